"""The client's half of a method lives in :mod:`strategies.objective`."""

from fedcross.strategies.objective import *  # noqa: F403
from fedcross.strategies.objective import P as P
