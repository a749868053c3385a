"""One file per method, both halves of its protocol side by side.

Folders named in ``FEDCROSS_PATH`` add methods of their own: ``FOLDER/strategies/NAME.py``.
"""

from fedcross.core.plugins import extra_folders

__path__ += extra_folders("strategies")
