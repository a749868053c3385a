"""Reads what runs wrote: tables, curves, pictures."""
