"""The privacy loss (epsilon) of client-side differential privacy over a whole run.

The uploads of one client are T Gaussian mechanisms. Two clipped updates differ by at most ``2 clip``, so each has the
noise multiplier z = noise / 2, and together they are one Gaussian mechanism with z / sqrt(T). The server knows which
clients it asked, so sampling does not amplify privacy. Source: Balle and Wang, "Improving the Gaussian Mechanism for
Differential Privacy", ICML 2018, theorem 8 (exact).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedcross.conf.schema import Privacy

UNIT = "one client's whole training data replaced by any other, all its uploads, against the server and other clients"


def epsilon(settings: Privacy, uploads: int) -> float:
    """Return the smallest epsilon at ``settings.delta`` after `uploads` uploads of one client."""
    from scipy.optimize import brentq

    mu = 2 * math.sqrt(uploads) / settings.noise  # sensitivity in standard deviations

    def excess(eps: float) -> float:
        return delta_of(mu, eps) - settings.delta

    if uploads == 0 or excess(0.0) <= 0:
        return 0.0
    highest = 1.0
    while excess(highest) > 0:
        highest *= 2
    return float(brentq(excess, 0.0, highest, xtol=1e-10))


def delta_of(mu: float, eps: float) -> float:
    """Return delta of a Gaussian mechanism with sensitivity `mu` standard deviations at epsilon `eps`.

    ``delta = Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu)``
    """
    from scipy.special import log_ndtr, ndtr

    return float(ndtr(mu / 2 - eps / mu)) - math.exp(min(eps + float(log_ndtr(-mu / 2 - eps / mu)), 0.0))


def statement(settings: Privacy, requests: Mapping[int, int]) -> dict[str, Any]:
    """Return the ``privacy`` object of ``result.json``, for the client that received the most requests."""
    uploads = max(requests.values(), default=0)
    eps = epsilon(settings, uploads)
    odds = f"e^{eps:.3g}" if eps > 5 else f"{math.exp(eps):.3g}"
    strength = "a strong" if eps <= 1 else "a usual" if eps <= 10 else "hardly any"
    known = " The noise is seeded: whoever knows the seed can remove it." if settings.randomness == "seed" else ""
    return {
        **{"epsilon": eps, "delta": settings.delta, "unit": UNIT, "uploads": uploads},
        **{name: getattr(settings, name) for name in ("clip", "noise", "randomness")},
        "accountant": "exact Gaussian mechanism (Balle and Wang, 2018)",
        "meaning": f"Privacy: epsilon {eps:.3g} at delta {settings.delta:g} after {uploads} uploads of one client. "
        f"Replacing all training data of a client changes the odds of any observation at most {odds}-fold: {strength} "
        f"guarantee.{known}",
    }
