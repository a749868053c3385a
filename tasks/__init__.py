"""Data sets, partitions and models.

Folders named in ``FEDCROSS_PATH`` add tasks of their own: ``FOLDER/tasks/NAME.py``.
"""

from fedcross.core.paths import extra_folders

__path__ += extra_folders("tasks")
