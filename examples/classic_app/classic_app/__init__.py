"""A Flower app on the classic API: nothing in it but the server's strategy comes from fedcross."""
