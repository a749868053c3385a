"""One file per method, both halves of its protocol side by side.

The package may extend over several folders: a user's own ``strategies/`` folder on the import path adds methods without
an edit here.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
