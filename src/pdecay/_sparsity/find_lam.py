"""A starting value for lam, from the magnitudes of a model's weights."""

from __future__ import annotations

from torch import nn

from pdecay._core.parameters import decays_by_default, is_zero, owners_of
from pdecay._core.validation import check_count, check_number
from pdecay._sparsity.ranking import count_weights, kth_magnitude


def find_lam(model: nn.Module, p: float, lr: float, steps: int, share: float = 0.5) -> float:
    """Return the lam that would bring a share of the weights to zero after some steps.

    A weight without a gradient shrinks by ``lr * lam * |w|^(p-1)`` a step, and so reaches zero
    after ``|w|^(2-p) / ((2-p) * lr * lam)`` steps. Solved for lam, at the magnitude that `share`
    of the weights lie below::

        lam = |w|^(2-p) / ((2-p) * lr * steps) .

    In training, gradients keep some of these weights away from zero. Use the result as the lower
    end of a scan over lam. With a learning-rate schedule, pass its mean as `lr`.

    Args:
        model: the model as initialised: call this before training. Only weights that
            :func:`pdecay.param_groups` decays are considered: not those of normalisation layers,
            biases, frozen ones, or tensors that are all zero.
        p: the norm, below 2.
        lr: the learning rate.
        steps: the number of training steps.
        share: the share of the weights, above 0 and below 1.

    Example:
        >>> model = nn.Linear(100, 100)
        >>> _ = nn.init.constant_(model.weight, 0.1)
        >>> round(find_lam(model, p=1, lr=1e-3, steps=1000), 6)
        0.1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"find_lam needs a torch.nn.Module, got {type(model).__name__}")
    if check_number("p", p) >= 2:
        raise ValueError(f"p must be below 2, where weights can reach zero, got {p!r}")
    if not check_number("lr", lr):
        raise ValueError("lr must be above 0: at lr = 0 no weight reaches zero")
    check_count("steps", steps)
    if not 0 < check_number("share", share) < 1:
        raise ValueError(f"share must be above 0 and below 1, got {share!r}")
    weights = [
        param
        for param, owners in owners_of(model)
        if decays_by_default(param, owners)
        and param.requires_grad
        and param.numel()
        and not is_zero(param)
    ]
    if not weights:
        raise ValueError(f"{type(model).__name__} has no weights that decay")
    magnitude = kth_magnitude(weights, max(1, round(share * count_weights(weights))))
    if not magnitude:
        raise ValueError(f"share must be higher: {share!r} of the weights are zero already")
    return float(magnitude ** (2 - p) / ((2 - p) * lr * steps))
