"""Lets the tests read each configuration file once: they compose more than a thousand configurations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository


def read_once() -> None:
    """Have Hydra keep what it has read of a file until the file changes, in this process."""
    read = ConfigRepository.load_config
    known: dict[tuple[Any, ...], Any] = {}

    def load_config(self: ConfigRepository, config_path: str) -> Any:
        places = [str(source.path) for source in self.sources]
        files = [Path(place, config_path).with_suffix(".yaml") for place in places]
        stamps = [(found.st_mtime_ns, found.st_size) for found in (one.stat() for one in files if one.is_file())]
        key = (config_path, *places, *stamps)
        if key not in known:
            known[key] = read(self, config_path)
        return copy.deepcopy(known[key])

    ConfigRepository.load_config = load_config  # type: ignore[method-assign]
