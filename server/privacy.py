"""What client-side differential privacy amounts to over a whole run: epsilon, for ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fedcross.conf.schema import Privacy

UNIT = "one client's whole data replaced by any other, all of its uploads, against the server and other clients"
#: Orders of Renyi divergence: fine where epsilon is large, far where it is small.
ORDERS = [1 + x / 100 for x in range(1, 100)] + [2 + x / 10 for x in range(100)] + [float(x) for x in range(12, 1025)]


def epsilon(settings: Privacy, uploads: int) -> float:
    """Return epsilon at ``settings.delta`` after `uploads` uploads of one client, by opacus's RDP accountant.

    Two clipped updates differ by at most ``2 clip``, so the Gaussian mechanism has the noise multiplier ``noise / 2``.
    The server knows whom it asked: there is no amplification by sampling.
    """
    from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

    if uploads == 0:
        return 0.0
    spent = compute_rdp(q=1.0, noise_multiplier=settings.noise / 2, steps=uploads, orders=ORDERS)
    return float(get_privacy_spent(orders=ORDERS, rdp=spent, delta=settings.delta)[0])


def statement(settings: Privacy, requests: Mapping[int, int]) -> dict[str, Any]:
    """Return the ``privacy`` object of ``result.json``, for the client that was asked most often."""
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
