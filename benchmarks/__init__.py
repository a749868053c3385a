"""Benchmarks of speed and memory; each measures its ratios in one run."""
