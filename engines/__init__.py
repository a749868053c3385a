"""Engines run the clients: in this process, in worker processes, on Ray, or behind a SuperLink."""
