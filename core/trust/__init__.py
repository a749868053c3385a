"""Keys and certificates of a federation: made, read, checked, listed, revoked."""
