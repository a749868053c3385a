"""The x-axes of learning curves, in a separate module so that the command line can import it quickly."""

AXES = {
    "rounds": "round",
    "bytes": "bytes moved, both directions (MB)",
    "epochs": "local epochs of one sampled client",
    "seconds": "seconds",
    "exchanges": "model exchanges",
    "virtual": "virtual seconds",
    "visits": "visits to clients",
}
"""Name of each possible x-axis, with its title."""
