"""Data sets, partitions and models. Knows no other room of the house."""
