"""What the server does about uploads that may be poisoned."""
