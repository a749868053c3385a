"""Filters between a method and the wire: compression and defence."""
