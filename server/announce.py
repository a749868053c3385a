"""What a run prints when it starts and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcross.client.device import taken
from fedcross.conf.compose import compose
from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError, counted
from fedcross.core.events import say
from fedcross.core.settings import shown
from fedcross.engines.job import engine_of
from fedcross.engines.local import cores


def announce(overrides: Sequence[str]) -> None:
    """Print what `overrides` run, before anything slow is imported; the check reports what cannot be composed."""
    with suppress(ConfigError):
        say(describe(compose(overrides)))


def describe(raw: Mapping[str, Any]) -> str:
    """Return a composed configuration, not checked yet, in two lines."""

    def of(group: str, name: str = "name") -> Any:
        return (raw.get(group) or {}).get(name)

    clients, workers = of("partition", "clients"), of("engine", "workers")
    federation = counted(clients, "client") if isinstance(clients, int) else "clients as the data have them"
    workers = cores() if workers == "auto" else workers
    if isinstance(workers, int) and isinstance(clients, int):
        workers = min(workers, clients)
    what = [f"{of('method')} on {of('task')}"]
    what += [f"{federation} ({of('partition')}), K={raw.get('clients_per_round')} a round"]
    what += [counted(raw.get("rounds"), "round"), f"model {of('model')}", f"seed {raw.get('seed')}"]
    how = [f"engine {of('engine')}" + ("" if workers is None else f" ({counted(workers, 'worker')})")]
    how.append(f"defence {'on' if of('defence', 'enabled') else 'off'}")
    if isinstance(widths := of("method", "widths"), list) and widths:
        where = f" on devices {of('devices')}" if of("devices", "widths") else ""
        how.append(f"models of width {' / '.join(map(str, widths))}{where}")
    chosen = {"objective": of("objective"), "average": raw.get("average"), "attack": of("attack")}
    how += [f"{name} {value}" for name, value in chosen.items() if value not in (None, "own", "none")]
    how += [f"compression {way} {kind}" for way, kind in (raw.get("compression") or {}).items() if kind != "float32"]
    if of("privacy", "enabled"):
        how.append("privacy on")
    if of("task", "limit") is not None:
        how.append(f"only {of('task', 'limit')} training examples")
    return "\n".join([", ".join(what), ", ".join(how)])


def place(config: RunConfig, folder: Path) -> str:
    """Return the device that `config` takes on this machine, and its folder."""
    device = config.device
    if not engine_of(config.module("engine")).CAPABILITIES.own_folders:  # otherwise each machine takes its own
        name = taken(device)
        device += f" ({name})" if name != device else ""
    return f"device {device}, {'continues' if config.resume else 'folder'} {folder}"


def ending(result: Mapping[str, Any] | None, folder: Path, begun: int = 0, stop_at: int | None = None) -> str:
    """Return the last lines of a run that had `begun` rounds when it went on."""
    if result is None:
        first = "Stopped at the round of stop_at."
        if stop_at is not None and begun > stop_at:
            first = f"Nothing was trained: the run has {counted(begun, 'round')}, more than stop_at={stop_at}."
        return f"{first} To go on: fedcross resume={shown(folder)} stop_at=null"
    accuracy, text = result.get("final_accuracy"), f"Finished: {counted(result['rounds'], 'round')}"
    if accuracy is not None:
        text += f", accuracy {100 * accuracy:.2f} % (best {100 * result['best_accuracy']:.2f} %)"
    lines = [text]
    lines += [_percents(result["metrics"])] if "sensitivity" in result.get("metrics", {}) else []
    if "client_accuracy_mean" in result:
        mean, worst = (100 * result[f"client_accuracy_{name}"] for name in ("mean", "worst_tenth"))
        lines.append(f"On the clients' own test data: mean accuracy {mean:.2f} %, worst tenth {worst:.2f} %")
    lines += [result[name]["meaning"] for name in ("stopped", "privacy") if result.get(name)]
    return "\n".join(lines)


def _percents(metrics: Mapping[str, float]) -> str:
    """Return the metrics of two classes in words; accuracy below the larger class's share is worse than guessing."""
    found = {name: f"{100 * value:.2f} %" for name, value in metrics.items()}
    share = found.pop("majority_share")
    text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items() if name != "auc")
    return f"{text[:1].upper()}{text[1:]}, AUC {metrics['auc']:.3f}; the larger class has {share} of all"
