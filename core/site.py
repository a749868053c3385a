"""What a machine says about itself, whatever configuration a run brings: the device on which it trains, and how."""

from __future__ import annotations

import os
import re

from fedcross.core.errors import ConfigError

#: Environment variable: the device of this machine or container, in place of the run's ``device``.
DEVICE = "FEDCROSS_DEVICE"
#: Environment variable: ``off`` trains on this machine's GPU without recorded steps (CUDA graphs), ``on`` with them.
GRAPHS = "FEDCROSS_GRAPHS"
#: The names of devices.
NAMES = r"^(auto|cpu|cuda(:\d+)?|mps)$"


def device_name(configured: str) -> str:
    """Return the name of the device for this site: ``FEDCROSS_DEVICE``, else `configured`.

    A federation has one configuration and many kinds of machines: a server without a GPU, clients with one.

    Raises
    ------
    ConfigError
        If the variable names no device.
    """
    own = os.environ.get(DEVICE, "")
    if own and not re.match(NAMES, own):
        raise ConfigError(f"{DEVICE}={own!r}: not a device. Choose auto, cpu, cuda, cuda:0 (or another GPU) or mps.")
    return own or configured


def uses_graphs() -> bool:
    """Return whether training on a GPU records its step and replays it, which ``FEDCROSS_GRAPHS=off`` forbids.

    Raises
    ------
    ConfigError
        If the variable holds something else.
    """
    own = os.environ.get(GRAPHS, "on")
    if own not in {"on", "off"}:
        raise ConfigError(f"{GRAPHS}={own!r}: choose on or off.")
    return own == "on"


def gpus_for(name: str) -> int:
    """Return on how many GPUs of this machine clients may train under the device `name`.

    ``auto`` and ``cuda`` mean all of them, ``cuda:1`` one, any other name none.
    """
    if name not in {"auto", "cuda"}:
        return int(name.startswith("cuda"))
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
