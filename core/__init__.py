"""Basics that every other package may import: errors, settings, randomness, keys. It imports no other package."""
