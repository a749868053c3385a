"""The server half: rounds, evaluation, checkpoints, the command line."""
