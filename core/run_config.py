"""The run config of Flower as overrides: typed keys for what most runs set, and ``overrides`` for all of the rest."""

from __future__ import annotations

from collections.abc import Mapping

from fedcross.core.errors import ConfigError
from fedcross.core.overrides import join, split

#: Key of the run config (``[tool.flwr.app.config]`` in pyproject.toml) -> our setting. 0 or an empty text: not set.
TYPED = {
    "method": "method",
    "task": "task",
    "model": "model",
    "clients": "partition.clients",
    "clients-per-round": "clients_per_round",
    "rounds": "rounds",
    "local-epochs": "train.epochs",
    "learning-rate": "train.lr",
    "alpha": "method.alpha",
    "beta": "partition.beta",
    "seed": "seed",
}
OVERRIDES = "overrides"
#: Clients drawn in a round, unless the run config says how many, or fewer are simulated.
PER_ROUND = 10


def overrides_of(run_config: Mapping[str, object], nodes: int | None = None) -> str:
    """Return a run's configuration as one text (:func:`core.overrides.join`).

    Parameters
    ----------
    run_config : mapping
        Flower's. What ``overrides`` sets wins over a typed key.
    nodes : int, optional
        Number of simulated nodes. If typed keys are declared and ``overrides`` is empty, it is the size of the
        federation that ``clients`` does not give, so that ``flwr run .`` works with as many nodes as Flower simulates.

    Raises
    ------
    ConfigError
        If neither says how many clients there are. A configuration in ``overrides`` has a default for that.
    """
    text = str(run_config.get(OVERRIDES, ""))
    given = split(text)
    named = {one.partition("=")[0].lstrip("+~") for one in given}
    typed = {
        setting: run_config[key]
        for key, setting in TYPED.items()
        if setting not in named and run_config.get(key) not in (None, "", 0)
    }
    if not given and "clients" in run_config:
        clients = typed.setdefault("partition.clients", nodes)
        if clients is None:
            raise ConfigError("How many clients has this federation? Say it: flwr run . --run-config 'clients=3'.")
        typed.setdefault("clients_per_round", min(PER_ROUND, int(str(clients))))
    if not typed:
        return text
    return join([*(f"{setting}={value}" for setting, value in typed.items()), *given])
