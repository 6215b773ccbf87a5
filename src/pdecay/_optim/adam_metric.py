"""Adam's own metric, in which ``PAdam(metric="adaptive")`` measures the weights that decay.

Adam divides the step of each weight by its denominator ``d = sqrt(v_hat) + eps``, where v_hat is
the running mean of its squared gradients. It moves as plain gradient descent does in the metric
``d * (w - w')^2``. The decay step of the penalty in this metric is

    w  <-  w_tilde / (1 + lr * sum_k lam_k * |c * w_old|^(p_k - 2)),    c = sqrt(d / mean(d)) .

d is that of the step's own update, so it includes this step's gradient. The mean is over all
decayed weights of the parameter group. It only sets the unit of lam: the mean of c^2 is 1, so that
lam acts on a weight with a typical gradient as it does with ``metric="magnitude"``, and the
result does not depend on the scale of the loss. The mean changes slowly, and is therefore computed
only at the steps 1, 2, 4, 8, 16, 32 and then at every 64th. ``group["metric_mean"]`` holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdecay._core.group_settings import Group, decayed_params, penalty_of
from pdecay._core.tensors import is_tracing

Streams = Sequence[list[Any]]

_EVERY = 64  # steps between two means; the running mean of squared gradients has about 1000
_LARGEST = torch.finfo(torch.float32).max  # a zero times an infinite denominator would be NaN


def metric_mean(streams: Streams, group: Group, rate: float | Tensor) -> float | Tensor | None:
    """Return the mean denominator of a group's decayed weights; None for the decay by magnitude.

    Args:
        streams: params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps before the step.
        group: the parameter group, whose "metric_mean" is updated.
        rate: the learning rate of the decay.
    """
    is_off = isinstance(rate, float) and not rate
    if group.get("metric") != "adaptive" or is_off or not streams[0] or penalty_of(group) is None:
        return None
    if is_tracing() or group["capturable"]:  # values of tensors cannot be read
        return _mean_denominator(streams, group)
    step = int(streams[-1][0]) + 1
    is_power_of_2 = step & (step - 1) == 0
    if not group.get("metric_mean") or step % _EVERY == 0 or (step < _EVERY and is_power_of_2):
        mean = _mean_denominator(streams, group)
        value = 0.0 if mean is None else float(mean)
        if value > 0 and math.isfinite(value):  # else gradients are infinite, or eps is 0
            group["metric_mean"] = value
    return group.get("metric_mean") or None


def metric_lengths(streams: Streams, group: Group, mean: float | Tensor) -> list[Tensor]:
    """Return ``|c * w|`` for all parameters, given the streams before the step."""
    scales = denominators(streams, group)
    torch._foreach_div_(scales, mean)
    torch._foreach_sqrt_(scales)
    torch._foreach_clamp_max_(scales, _LARGEST)
    torch._foreach_mul_(scales, [_wide(param.abs()) for param in streams[0]])
    return scales


def denominators(streams: Streams, group: Group) -> list[Tensor]:
    """Return Adam's denominators ``sqrt(v_hat) + eps`` in the coming step, as new tensors.

    Half precision is computed in float32. A complex weight has one denominator.
    """
    _, grads, _, squares, largest, steps = streams
    beta2 = _number(group["betas"][1])
    sizes = [_wide(grad.abs()) for grad in grads]
    result = [_real_sum(square) * beta2 for square in squares]
    torch._foreach_addcmul_(result, sizes, sizes, 1 - beta2)
    if group["amsgrad"]:
        torch._foreach_maximum_(result, [*map(_real_sum, largest)])
    torch._foreach_sqrt_(result)
    for root, step in zip(result, steps, strict=True):
        root.div_((1 - beta2 ** (_number(step) + 1)) ** 0.5).add_(group["eps"])
    return result


def _mean_denominator(streams: Streams, group: Group) -> Tensor | None:
    """Return the mean over all decayed weights of the group, on all ranks; None without any."""
    decayed = set(decayed_params(group))
    chosen = [i for i, param in enumerate(streams[0]) if param in decayed and param.numel()]
    if not chosen:
        return None
    total: Any = 0.0
    for i in chosen:  # one by one: there is memory for one more tensor only
        (found,) = denominators([stream[i : i + 1] for stream in streams], group)
        local = found.sum(dtype=torch.float32 if found.device.type == "mps" else torch.float64)
        if hasattr(local, "full_tensor"):  # a DTensor
            local = local.full_tensor()
        total = total.to(local.device) + local if isinstance(total, Tensor) else local
    mean: Tensor = total / sum(streams[0][i].numel() for i in chosen)
    return mean


def _real_sum(squares: Tensor) -> Tensor:
    """Return squares in at least float32; Adam treats a complex weight as two real ones."""
    return squares.real + squares.imag if squares.is_complex() else _wide(squares)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _number(value: Any) -> Any:
    return (
        value.item() if isinstance(value, Tensor) and value.is_cpu and not is_tracing() else value
    )
