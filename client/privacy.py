"""Differential privacy on the client: it clips its update and adds noise before the upload (local DP).

Flower's ``LocalDpMod`` requires a single record of floats, and draws noise from numpy's global generator, which forked
workers share.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from fedcross.conf.schema import Privacy
from fedcross.core.randomness import stream
from fedcross.strategies.pool.pool import Arrays


def protect(
    settings: Privacy,
    received: Arrays,
    trained: Arrays,
    generator: np.random.Generator,
    frozen: Collection[str] = (),
) -> Arrays:
    """Return the upload for `trained`: ``received + u min(1, clip / |u|) + N(0, (noise clip)^2)``.

    ``u = trained - received`` over all float entries together. Integer and `frozen` entries are returned as they were
    received, and an update that is not finite counts as zero, so that neither reveals anything about the data.

    Parameters
    ----------
    settings : Privacy
        `clip` is in units of the weights, `noise` in units of `clip`.
    received, trained : Arrays
        The model that the server sent, and the model that the client trained.
    generator : numpy.random.Generator
        Draws the noise, entry by entry in the order of `trained`.
    frozen : collection of str
        Names of parameters that are not trained.
    """
    floats = [name for name, array in trained.items() if array.dtype.kind == "f" and name not in frozen]
    updates = [np.subtract(trained[name], received[name], dtype=np.float64) for name in floats]
    if not all(np.isfinite(update).all() for update in updates):
        updates = [np.zeros_like(update) for update in updates]
    _clip(updates, settings.clip)
    made: Arrays = {name: np.array(array) for name, array in received.items() if name in trained}
    for name, update in zip(floats, updates):
        update += generator.normal(0.0, settings.noise * settings.clip, update.shape)
        made[name] = np.asarray(received[name] + update, dtype=trained[name].dtype)
    return {name: made[name] for name in trained}


def noise_source(settings: Privacy, seed: int, number: int, client: int, exchange: int) -> np.random.Generator:
    """Return the generator of one upload's noise, seeded from the system's entropy or from the run's seed."""
    if settings.randomness == "seed":
        return stream(seed, "privacy", number, client, exchange)
    return np.random.Generator(np.random.PCG64(secrets.randbits(256)))


def _clip(updates: list[NDArray[np.float64]], most: float) -> None:
    """Scale `updates` in place so that the Euclidean norm of all together is at most `most`."""
    norm = float(np.sqrt(sum(float(np.linalg.norm(update)) ** 2 for update in updates)))
    for update in updates:
        update *= min(1.0, most / norm) if norm else 1.0
