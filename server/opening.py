"""What a run says when it starts: what runs, where, and that data are read; before anything slow is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import ConfigError, counted
from fedcross.core.events import say

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig
    from fedcross.tasks.data import FederatedData


def announce(overrides: Sequence[str]) -> None:
    """Print what `overrides` run; nothing if they cannot be composed, which the check will report."""
    from fedcross.conf.compose import compose

    try:
        raw = compose([o for o in overrides if not o.startswith("hydra")])
    except ConfigError:
        return
    say(describe(raw))


def describe(raw: Mapping[str, Any]) -> str:
    """Return a composed configuration, not checked yet, in two lines: what runs, and how."""
    names = {group: (raw.get(group) or {}).get("name") for group in ("method", "task", "model", "partition", "engine")}
    clients = (raw.get("partition") or {}).get("clients")
    what = [
        f"{names['method']} on {names['task']}",
        f"{_of(clients)} ({names['partition']}), K={raw.get('clients_per_round')} a round",
        counted(raw.get("rounds"), "round"),
        f"model {names['model']}",
        f"seed {raw.get('seed')}",
    ]
    how = [
        f"engine {names['engine']}{_workers(raw)}",
        f"defence {'on' if (raw.get('defence') or {}).get('enabled') else 'off'}",
        *_unusual(raw),
    ]
    return "\n".join([", ".join(what), ", ".join(how)])


def place(config: RunConfig, folder: Path) -> str:
    """Return the device that `config` takes on this machine, and its folder; torch has been imported before."""
    from fedcross.client.device import taken
    from fedcross.engines.job import engine_of

    device = config.device
    if not engine_of(config.module("engine")).CAPABILITIES.own_folders:  # else each machine takes its own
        name = taken(device)
        device += f" ({name})" if name != device else ""
    return f"device {device}, {'continues' if config.resume else 'folder'} {folder}"


def _of(clients: Any) -> str:
    return counted(clients, "client") if isinstance(clients, int) else "clients as the data have them"


def _workers(raw: Mapping[str, Any]) -> str:
    """Return the number of processes that train, if the engine has such a setting."""
    from fedcross.engines.local import cores

    engine, clients = raw.get("engine") or {}, (raw.get("partition") or {}).get("clients")
    if "workers" not in engine:
        return ""
    count = cores() if engine["workers"] == "auto" else engine["workers"]
    if isinstance(count, int) and isinstance(clients, int):
        count = min(count, clients)
    return f" ({counted(count, 'worker')})"


def _unusual(raw: Mapping[str, Any]) -> list[str]:
    """Return what not every run has: models of several widths, an attack, compression, privacy, part of the data."""
    compression, privacy = raw.get("compression") or {}, raw.get("privacy") or {}
    found = []
    if isinstance(widths := (raw.get("method") or {}).get("widths"), list) and widths:
        devices = raw.get("devices") or {}
        where = f" on devices {devices.get('name')}" if devices.get("widths") else ""
        found.append(f"models of width {' / '.join(map(str, widths))}{where}")
    if (attack := (raw.get("attack") or {}).get("name", "none")) != "none":
        found.append(f"attack {attack}")
    if (wire := {way: kind for way, kind in compression.items() if kind != "float32"}) and wire:
        found.append("compression " + ", ".join(f"{way} {kind}" for way, kind in wire.items()))
    if privacy.get("enabled"):
        found.append("privacy on")
    if (limit := (raw.get("task") or {}).get("limit")) is not None:
        found.append(f"only {limit} training examples")
    return found


def read(config: RunConfig) -> FederatedData:
    """Read the data of `config`, and say so before and after."""
    say(f"Reading {config.names['task']} ...")
    data = config.load_data()
    parts = "training examples on the devices"
    if not data.partition.own:
        parts = f"{len(data.task.train)} training examples over {len(data.partition)} clients"
    say(f"{parts}, {len(data.task.test)} test examples, {data.task.classes} classes")
    return data
