"""The names that Flower's strategies give to arguments, turned into ours or answered with ours.

Who replaces ``FedAvg`` by one of our methods in a ServerApp keeps its arguments at first. What means the same here is
accepted. What cannot be kept is a fault that names the argument, its value and what to write instead. Source of names
and meanings: ``FedAvg`` of ``flwr.serverapp.strategy``, and of ``flwr.server.strategy`` (the classic API), Flower 1.41.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

AVAILABLE = "min_available_nodes"
FRACTION, LEAST = "fraction_train", "min_train_nodes"
#: Argument -> the only value that changes nothing here, and what to do with any other.
ONLY: dict[str, tuple[Any, str]] = {
    "fraction_evaluate": (0.0, "clients do not evaluate, the server does. Leave it out, give evaluate_fn to start()"),
    "min_evaluate_nodes": (0, "clients do not evaluate, the server does. Leave it out, give evaluate_fn to start()"),
    "weighted_by_key": ("num-examples", "clients must tell num-examples. Leave it out"),
    "arrayrecord_key": ("arrays", "the model is in the record 'arrays'. Leave it out"),
    "configrecord_key": ("config", "the configuration is in the record 'config'. Leave it out"),
    "train_metrics_aggr_fn": (None, "train-loss and local-accuracy are averaged, nothing else. Leave it out"),
    "evaluate_metrics_aggr_fn": (None, "clients do not evaluate, the server does. Leave it out"),
}
#: Arguments of the classic API.
CLASSIC = (
    "fraction_fit", "min_fit_clients", "min_evaluate_clients", "min_available_clients", "evaluate_fn",
    "on_fit_config_fn", "on_evaluate_config_fn", "accept_failures", "initial_parameters", "fit_metrics_aggregation_fn",
    "evaluate_metrics_aggregation_fn",
)  # fmt: skip


def translate(values: Mapping[str, Any], known: Collection[str], faults: list[str]) -> dict[str, Any]:
    """Return `values` with Flower's names replaced by ours.

    Parameters
    ----------
    values : mapping
        Arguments of a method's constructor by name.
    known : collection of str
        The method's own names; they stay as they are.
    faults : list of str
        Receives a sentence for each of Flower's arguments that has no meaning here.
    """
    theirs = {name: value for name, value in values.items() if name not in known}
    own = {name: value for name, value in values.items() if name in known}
    if AVAILABLE in theirs:
        nodes = theirs.pop(AVAILABLE)
        if own.setdefault("min_clients", nodes) != nodes:
            faults.append(f"{AVAILABLE}={nodes} and min_clients={own['min_clients']} mean the same. Give one of them.")
    if FRACTION in theirs or LEAST in theirs:
        faults.append(_number(theirs, own.get("min_clients")))
    for name in (FRACTION, LEAST):
        theirs.pop(name, None)
    for name, (value, advice) in ONLY.items():
        if name in theirs and (given := theirs.pop(name)) != value:
            faults.append(f"{name}={_shown(given)}: {advice}.")
    faults += [
        f"{name}={_shown(theirs.pop(name))}: an argument of Flower's classic API. "
        f"Wrap the method and give it there: ClassicFedCross(FedCross(...), {name}=...)."
        for name in CLASSIC
        if name in theirs
    ]
    return {**own, **theirs}


def _number(theirs: Mapping[str, Any], nodes: Any) -> str:
    """Return what to write in place of a fraction of the nodes and a least number of them."""
    seen = ", ".join(f"{name}={_shown(theirs[name])}" for name in (FRACTION, LEAST) if name in theirs)
    counts = [theirs[LEAST]] if isinstance(theirs.get(LEAST), int) else []
    if isinstance(theirs.get(FRACTION), float | int) and isinstance(nodes, int):
        counts.append(int(theirs[FRACTION] * nodes))
    # Without the number of nodes a fraction says nothing.
    number = str(max(counts)) if counts and (FRACTION not in theirs or isinstance(nodes, int)) else "N"
    return f"{seen}: the number of clients that train in a round is fixed here. Write clients_per_round={number}."


def classic_faults(options: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each option of Flower's classic ``FedAvg`` that a method decides itself."""
    faults = []
    if "fraction_fit" in options or "min_fit_clients" in options:
        seen = ", ".join(
            f"{name}={_shown(options[name])}" for name in ("fraction_fit", "min_fit_clients") if name in options
        )
        number = options.get("min_fit_clients", "N")
        faults.append(
            f"{seen}: the number of clients that train in a round is the method's. "
            f"Write FedCross(clients_per_round={number})."
        )
    if "min_available_clients" in options:
        number = options["min_available_clients"]
        faults.append(f"min_available_clients={_shown(number)}: Write FedCross(min_clients={number}).")
    return faults


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
