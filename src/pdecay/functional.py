"""PAdam and PSGD as functions of tensors, without an optimizer object.

They are to :class:`pdecay.PAdam` and :class:`pdecay.PSGD` what ``torch.optim.adam.adam`` and
``torch.optim.sgd.sgd`` are to torch's optimizers: the caller keeps gradients and state in lists
with one entry for each parameter, and all tensors are changed in place. The decay applies to every
given tensor, biases included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdecay._core.group_settings import Group
from pdecay._core.penalty import Penalty, as_penalty
from pdecay._core.validation import check_number
from pdecay._optim.engine import check_scalar, decay_rate
from pdecay._optim.settings import check_flags, check_weight_decay
from pdecay._optim.steps import adam_step_, sgd_step_

__all__ = ["padam", "psgd"]


@torch.no_grad()
def padam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    decay: Penalty | None,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float | Tensor = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    foreach: bool | None = None,
    fused: bool | None = None,
    capturable: bool = False,
) -> None:
    """Run one step of :class:`pdecay.PAdam` in place.

    Args:
        params: the parameters.
        grads: their gradients.
        exp_avgs: first moments, zeros before the first step.
        exp_avg_sqs: second moments, zeros before the first step.
        max_exp_avg_sqs: maxima of the second moments; may be empty without `amsgrad`.
        state_steps: step counts as tensors of one element, which are incremented.
        lr: learning rate of the update and of the decay.
        beta1, beta2, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``.
        decay, foreach, fused, capturable: as in :class:`pdecay.PAdam`.

    Example:
        >>> from pdecay import Lp
        >>> w, g = torch.ones(2, 2), torch.ones(2, 2)
        >>> m, v, step = torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor(0.0)
        >>> padam([w], [g], [m], [v], [], [step], decay=Lp(1, 1.0), lr=0.1,
        ...       beta1=0.9, beta2=0.999, eps=1e-8, fused=False)
        >>> w[0, 0], step
        (tensor(0.8182), tensor(1.))
    """
    state = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "state_steps": state_steps}
    state |= {"max_exp_avg_sqs": max_exp_avg_sqs} if amsgrad else {}
    _check_lengths(params, grads=grads, **state)
    _check_leaves(params)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not isinstance(check_scalar(name, beta), Tensor) and beta >= 1:
            raise ValueError(f"{name} must be below 1, got {beta!r}")
    flags = {"amsgrad": amsgrad, "maximize": maximize, "capturable": capturable}
    group = _group(decay, lr, weight_decay, {**flags, "foreach": foreach, "fused": fused})
    group |= {"betas": (beta1, beta2), "eps": check_number("eps", eps)}
    streams = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
    has_complex = any(map(torch.is_complex, params))
    adam_step_(streams, group, decay_rate(group, None), {}, has_complex=has_complex)


@torch.no_grad()
def psgd(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor | None],
    *,
    decay: Penalty | None,
    lr: float | Tensor,
    momentum: float | Tensor = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | Tensor = 0.0,
    maximize: bool = False,
    foreach: bool | None = None,
    fused: bool | None = None,
) -> None:
    """Run one step of :class:`pdecay.PSGD` in place.

    Args:
        params, grads, lr: as in :func:`padam`.
        momentum_buffers: the momentum buffers; None in the list for a parameter that has none yet,
            which is replaced by a new buffer. May be empty without `momentum`.
        momentum, dampening, nesterov, weight_decay, maximize: as in ``torch.optim.SGD``.
        decay, foreach, fused: as in :class:`pdecay.PSGD`.

    Example:
        >>> from pdecay import Lp
        >>> w = torch.ones(2, 2)
        >>> psgd([w], [torch.ones(2, 2)], [], decay=Lp(1, 1.0), lr=0.1, fused=False)
        >>> w[0, 0]
        tensor(0.8182)
    """
    _check_lengths(params, grads=grads)
    _check_leaves(params)
    if bool(check_scalar("momentum", momentum) != 0):
        _check_lengths(params, momentum_buffers=momentum_buffers)
    flags = {"nesterov": nesterov, "maximize": maximize}
    group = _group(decay, lr, weight_decay, {**flags, "foreach": foreach, "fused": fused})
    group |= {"momentum": momentum, "dampening": check_number("dampening", dampening)}
    rate = decay_rate(group, None)
    has_sparse_grad = any(grad.is_sparse for grad in grads)
    sgd_step_(params, grads, momentum_buffers, group, rate, {}, has_sparse_grad=has_sparse_grad)


def _check_lengths(params: Sequence[Any], **lists: Sequence[Any]) -> None:
    """Raise a ValueError for a list that does not have one entry for each parameter."""
    for name, values in lists.items():
        if len(values) != len(params):
            raise ValueError(
                f"{name} must have one entry for each of the {len(params)} parameters, "
                f"got {len(values)}"
            )


def _check_leaves(params: Sequence[Tensor]) -> None:
    """Raise a ValueError for results of other operations that autograd would differentiate.

    The step is not recorded, so the gradient through it would be wrong, as if it did nothing.
    """
    if torch.compiler.is_compiling():
        return
    if any(param.requires_grad and not param.is_leaf for param in params):
        raise ValueError(
            "a parameter requires a gradient and is the result of another operation: autograd "
            "cannot differentiate through this step; pass param.detach()"
        )


def _group(
    decay: Penalty | None,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    flags: dict[str, bool | None],
) -> Group:
    """Return the settings as they stand in an optimizer's ``param_groups``."""
    check_flags(flags)
    if flags["fused"] and flags["foreach"]:
        raise ValueError("fused and foreach exclude each other: set at most one of them to True")
    penalty = as_penalty(decay)
    settings: dict[str, Any] = {"decay": penalty.pairs() if penalty else [], "decay_scale": 1.0}
    settings |= {"decay_lr": None, "decay_1d": True, "decay_auxiliary": []}
    settings |= {"weight_decay": check_weight_decay(weight_decay)}
    return {"lr": check_scalar("lr", lr), **flags, **settings}
