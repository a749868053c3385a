"""A plain Flower app: nothing in it but the server's strategy comes from fedcross."""
