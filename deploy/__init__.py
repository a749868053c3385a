"""Keys, certificates and files for a federation of devices."""
