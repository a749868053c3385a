"""One round, the same code for all methods: the method's contract, messages, checks, settings of the federation."""
