"""One round, written once: what a method defines, exchanges with clients, checks, settings of the federation."""
