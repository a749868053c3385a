"""Keys, certificates and files for a real federation."""
