"""Reads run folders and makes tables, curves and plots."""
