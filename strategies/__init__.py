"""One file per method, both halves of its protocol side by side."""
