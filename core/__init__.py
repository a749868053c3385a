"""What everybody may know: errors, settings, randomness, keys. It knows nobody."""
