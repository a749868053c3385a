"""The privacy loss (epsilon) of client-side differential privacy over a whole run, for ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fedcross.conf.schema import Privacy

UNIT = "one client's whole data replaced by any other, all of its uploads, against the server and other clients"
#: Orders of the Renyi divergence: dense at small orders (for a large epsilon), up to high orders (for a small one).
ORDERS = [1 + x / 100 for x in range(1, 100)] + [2 + x / 10 for x in range(100)] + [float(x) for x in range(12, 1025)]


def epsilon(settings: Privacy, uploads: int) -> float:
    """Return epsilon at ``settings.delta`` after `uploads` uploads of one client, by opacus's RDP accountant.

    Two clipped updates differ by at most ``2 clip``, so the Gaussian mechanism has the noise multiplier ``noise / 2``.
    The server knows which clients it asked, so there is no amplification by sampling.
    """
    from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

    if uploads == 0:
        return 0.0
    spent = compute_rdp(q=1.0, noise_multiplier=settings.noise / 2, steps=uploads, orders=ORDERS)
    return float(get_privacy_spent(orders=ORDERS, rdp=spent, delta=settings.delta)[0])


def statement(settings: Privacy, requests: Mapping[int, int]) -> dict[str, Any]:
    """Return the ``privacy`` object of ``result.json``, for the client that received the most requests."""
    uploads = max(requests.values(), default=0)
    return {
        "epsilon": epsilon(settings, uploads),
        "delta": settings.delta,
        "unit": UNIT,
        "uploads": uploads,
        "clip": settings.clip,
        "noise": settings.noise,
        "randomness": settings.randomness,
        "accountant": f"RDP, opacus {version('opacus')}",
    }
