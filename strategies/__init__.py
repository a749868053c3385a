"""The methods, one file each; a file holds both the server's and the client's part of its method.

Folders named in ``FEDCROSS_PATH`` add methods of their own: ``FOLDER/strategies/NAME.py``.
"""

from fedcross.core.paths import extra_folders

__path__ += extra_folders("strategies")
