"""How published files become arrays: cache, images, LEAF text, checks. Shared by the task modules."""
