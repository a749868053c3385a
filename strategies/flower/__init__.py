"""Flower's own and foreign strategies behind ``method=flwr``: finding one, calling it, keeping its state."""
