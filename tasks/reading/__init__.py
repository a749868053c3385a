"""Reads published files into arrays: cache, pictures, LEAF's text, tables, and the last steps from arrays to a task."""
