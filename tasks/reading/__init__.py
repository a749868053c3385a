"""Reads published files into arrays: cache, images, LEAF text, checks. Shared by the task modules."""
