"""What a learning curve can be drawn over (a module of its own: the command line needs nothing else to start)."""

AXES = {
    "rounds": "round",
    "bytes": "bytes moved, both directions (MB)",
    "epochs": "local epochs of one sampled client",
    "seconds": "seconds",
    "exchanges": "model exchanges",
}
"""What a curve can be drawn over, with the title of that axis."""
