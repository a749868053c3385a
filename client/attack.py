"""Malicious clients, for experiments: how they change their trained model before the upload.

With ``u = trained - received`` over the parameters (buffers and extras stay unchanged):

==============  ===========================================================  ==============
`attack.name`   upload                                                      `factor`
==============  ===========================================================  ==============
``sign_flip``   ``factor * trained``                                        -1
``scaling``     ``received + factor * u``                                   -10
``stealth``     ``received + factor * u``                                   -1
``noise``       ``received + factor * |u| / sqrt(d) * z``, z standard       10
                normal: an expected size of `factor` honest updates
``not_finite``  ``trained`` with one NaN (`nan` is a number to Hydra)       not used
==============  ===========================================================  ==============
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedcross.conf.schema import Attack
from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.strategies.pool.pool import Array, Arrays

FACTORS = {"sign_flip": -1.0, "scaling": -10.0, "stealth": -1.0, "noise": 10.0}


def malicious(settings: Attack, clients: int, seed: int) -> frozenset[int]:
    """Return which of the `clients` partitions are malicious, drawn from the run's seed; none without an attack.

    Raises
    ------
    ConfigError
        If the federation has fewer clients than ``settings.clients``.
    """
    if settings.name == "none":
        return frozenset()
    if settings.clients > clients:
        raise ConfigError(f"attack.clients={settings.clients}: the federation has {clients} clients. Lower it.")
    drawn = stream(seed, "malicious").permutation(clients)[: settings.clients]
    return frozenset(int(client) for client in drawn)


def poison(
    settings: Attack, received: Mapping[str, Array], trained: Mapping[str, Array], generator: np.random.Generator
) -> Arrays:
    """Return what a malicious client uploads.

    Parameters
    ----------
    settings : Attack
        Kind and factor.
    received : mapping of str to array
        The parameters that the client received, by name. Other entries are uploaded as trained.
    trained : mapping of str to array
        The client's whole model after training.
    generator : numpy.random.Generator
        Draws the noise.
    """
    bad: Arrays = dict(trained)
    factor = settings.factor if settings.factor is not None else FACTORS.get(settings.name, 0.0)
    if settings.name == "not_finite":
        first = next(iter(received))
        bad[first] = np.array(trained[first])
        bad[first].flat[0] = np.nan
        return bad
    updates = {name: trained[name].astype(np.float64) - old for name, old in received.items()}
    if settings.name == "noise":
        size = math.sqrt(sum(float(np.vdot(u, u)) for u in updates.values()))
        deviation = size / math.sqrt(sum(u.size for u in updates.values()))
        updates = {name: deviation * generator.standard_normal(u.shape) for name, u in updates.items()}
    for name, old in received.items():
        made = factor * trained[name] if settings.name == "sign_flip" else old + factor * updates[name]
        with np.errstate(over="ignore", invalid="ignore"):  # an attacker may send what is not finite
            bad[name] = np.asarray(made, dtype=trained[name].dtype)
    return bad
