"""One step of Adam and of SGD with the decay, as functions of lists of tensors.

PAdam and PSGD collect gradients and state from the optimizer and call these functions;
``pdecay.functional`` takes them from the caller. Each list holds one entry for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from pdecay._core.group_settings import Group
from pdecay._core.tensors import is_tracing
from pdecay._optim.adam_metric import metric_lengths
from pdecay._optim.engine import DecayBatch, Rate, State, c_arguments, update_and_decay_
from pdecay._optim.kernels import native

# Typed loosely: type checkers cannot match long signatures with unpacked arguments.
torch_adamw: Callable[..., None] = adamw
torch_sgd: Callable[..., None] = sgd
c_kernel: Any = native


def adam_step_(
    streams: tuple[list[Tensor], ...],
    group: Group,
    rate: Rate,
    state: State,
    *,
    has_complex: bool,
    mean: Rate | None = None,
) -> None:
    """Run one step of PAdam.

    Args:
        streams: params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps; the maxima
            may be empty without amsgrad.
        group: the settings, as in an optimizer's ``param_groups``.
        rate: the learning rate of the decay.
        state: the optimizer's state, for the anchors of ``Every`` and ``Slow``.
        has_complex: whether some parameters are complex.
        mean: the mean of Adam's denominators, for the decay in Adam's metric (see
            ``adam_metric.py``); None for the decay by magnitude.
    """
    beta1, beta2 = group["betas"]
    hyper: dict[str, Any] = {"beta1": beta1, "beta2": beta2}
    hyper |= {key: group[key] for key in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
    elementwise = streams[:5] if group["amsgrad"] else streams[:4]
    in_c = c_arguments(elementwise, streams[-1], group, rate)
    if in_c is not None:
        c_kernel.adam_(*streams, mean=_number(mean), **in_c, **_numbers(hyper))
        return

    def update(batch: DecayBatch, *streams: list[Tensor]) -> None:
        if batch.kernel is not None:
            batch.kernel.adam_(
                *streams,
                terms=batch.terms,
                rate=batch.rate,
                mean=_number(mean),
                **batch.options,
                **_numbers(hyper),
            )
        else:
            torch_adamw(
                *streams,
                foreach=batch.foreach,
                fused=False,
                capturable=group["capturable"],
                differentiable=False,
                has_complex=has_complex,
                **hyper,
            )

    measure = None if mean is None else partial(metric_lengths, group=group, mean=mean)
    update_and_decay_(update, streams, group, rate, state, measure=measure)


def sgd_step_(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor | None],
    group: Group,
    rate: Rate,
    state: State,
    *,
    has_sparse_grad: bool,
) -> None:
    """Run one step of PSGD; replace missing buffers (None) in the list if there is momentum."""
    keys = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
    hyper: dict[str, Any] = {key: group[key] for key in keys}
    has_momentum = bool(group["momentum"] != 0)
    streams: list[list[Any]] = [params, grads, momentum_buffers]
    if not has_sparse_grad:
        elementwise = streams if has_momentum else streams[:2]
        in_c = c_arguments(elementwise, None, group, rate)
        if in_c is not None:
            c_kernel.sgd_(*streams, **in_c, **_numbers(hyper))
            return

    def update(
        batch: DecayBatch, params: list[Tensor], grads: list[Tensor], buffers: list[Any]
    ) -> None:
        if batch.kernel is not None:
            first = [not has_momentum or buffer is None for buffer in buffers or params]
            if has_momentum:
                buffers = [
                    torch.empty_like(param) if buffer is None else buffer
                    for param, buffer in zip(params, buffers, strict=True)
                ]
            batch.kernel.sgd_(
                *(params, grads, buffers),
                terms=batch.terms,
                rate=batch.rate,
                first=first,
                **batch.options,
                **_numbers(hyper),
            )
        else:
            _check_buffers(params, buffers)
            torch_sgd(
                *(params, grads, buffers),
                foreach=batch.foreach,
                fused=False,
                has_sparse_grad=has_sparse_grad,
                **hyper,
            )
        if has_momentum:
            for i, buffer in zip(batch.indices, buffers, strict=True):
                if momentum_buffers[i] is None:  # others may be views here
                    momentum_buffers[i] = buffer

    update_and_decay_(update, streams, group, rate, state, allow_kernels=not has_sparse_grad)


def _check_buffers(params: list[Tensor], buffers: list[Tensor | None]) -> None:
    """Raise for momentum without values: torch would drop the update without an error."""
    for param, buffer in zip(params, buffers, strict=bool(buffers)):
        if buffer is not None and buffer.is_meta and not param.is_meta:
            raise RuntimeError(
                f"the momentum buffer of a parameter on {param.device} is on the meta device and "
                "has no values: load the optimizer's state, or delete it to start again"
            )


def _numbers(hyper: dict[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with tensors on the CPU as floats, which every kernel accepts."""
    if not any(isinstance(value, Tensor) for value in hyper.values()):
        return hyper
    return {key: _number(value) for key, value in hyper.items()}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_cpu and not is_tracing():
        return value.item()
    return value
