"""The scale of the decay at which weights of a given magnitude shrink at a given speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

# From p = 1 on, larger weights are pulled at least as hard as those at tau, and the full pull would
# remove them too.
_SHARE_FROM_1_ON = 0.3


def pull_scale(
    pairs: Sequence[Sequence[float]],
    *,
    tau: float,
    typical: float,
    update: float,
    pull: float,
    rate: float,
) -> float:
    """Return the scale at which weights at `tau` shrink by `pull` updates in each step.

    For p < 1, weights below tau then shrink faster, and weights above it more slowly. The result is
    0 if no weight can be pulled: tau is 0 or not finite, or the rate is 0.

    Args:
        pairs: the penalty as ``[[p, lam], ...]``, with some lam > 0.
        tau: the magnitude of the weights that are removed next.
        typical: the mean magnitude of the nonzero weights.
        update: the typical size of the optimizer's update of a weight.
        pull: the speed, in units of `update`.
        rate: the learning rate of the decay.
    """
    if not tau or not math.isfinite(tau) or not rate:
        return 0.0
    lowest = min(p for p, lam in pairs if lam)
    share = pull * (1.0 if lowest < 1 else _SHARE_FROM_1_ON)
    # Above p = 1 the decay grows with the weight. It is set at the typical weight that remains:
    # set at tau, it would grow without bound on these as tau falls to zero.
    large = max(tau, typical)
    speed: float = sum(lam * (large if p > 1 else tau) ** (p - 1) for p, lam in pairs)
    return float(share * update / (rate * speed))
