"""Early stopping: whether a run ends before its last round, from the lines of ``metrics.jsonl`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcross.conf.schema import StopSettings
from fedcross.core.errors import ConfigError, nearest


def stopped(lines: Sequence[Mapping[str, Any]], stop: StopSettings) -> dict[str, Any] | None:
    """Return why the run ends now: ``stopped`` of ``result.json``; None if it goes on.

    A metric with ``loss`` in its name improves downwards, any other one upwards.

    Returns
    -------
    dict or None
        ``reason`` (``target`` or ``patience``), ``metric``, ``value`` (the last one), ``best``, ``best_round``, and
        ``meaning``, a sentence.

    Raises
    ------
    ConfigError
        If the run was evaluated and has no such metric.
    """
    if stop.patience is None and stop.target is None:
        return None
    validated = any("validation_accuracy" in line for line in lines)
    metric = stop.metric or ("validation_accuracy" if validated else "test_accuracy")
    scored = [(line["round"], line[metric]) for line in lines if isinstance(line.get(metric), int | float)]
    if not scored:
        evaluated = [line for line in lines if line["test_accuracy"] is not None]
        if evaluated:
            raise ConfigError(
                f"stop.metric={metric}: no such column in metrics.jsonl. {nearest(metric, [*evaluated[0]])}"
            )
        return None
    sign = -1 if "loss" in metric else 1
    values = [sign * value for _, value in scored]
    best = values.index(max(values))
    if stop.target is not None and values[-1] >= sign * stop.target:
        reason = "target"
    elif stop.patience is not None and len(values) - 1 - best >= stop.patience:
        reason = "patience"
    else:
        return None
    facts = {"reason": reason, "metric": metric, "value": scored[-1][1]}
    facts |= {"best": scored[best][1], "best_round": scored[best][0]}
    return facts | {"meaning": sentence(facts)}


def sentence(found: Mapping[str, Any]) -> str:
    """Return what :func:`stopped` found as a sentence."""
    if found["reason"] == "target":
        return f"Stopped early: {found['metric']} reached {found['value']:.4g}."
    best = f"{found['metric']} has not improved since round {found['best_round']} ({found['best']:.4g})"
    return f"Stopped early: {best}."
