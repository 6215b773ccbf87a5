"""The decay engine: one implementation of the step for PAdam, PSGD and attach.

The step of a weight is ``w <- w_tilde * factor(w_old)``, where ``w_old`` is the weight before and
``w_tilde`` the weight after the optimizer's own update:

- PAdam and PSGD ask :func:`c_arguments` whether one call into C can do all, else they pass their
  update to :func:`update_and_decay_`;
- attach cannot change the update: it copies ``w_old`` before it and calls
  :meth:`DecayBatch.decay_` after it.

Parameters are processed in batches (:func:`make_batches`), each by a fused kernel, by torch's
multi-tensor functions (foreach), or one tensor at a time. On the CPU, foreach leaves the decay to
C (``kernels/old_weights.py``) unless ``fused=False``, because torch's general power takes about as
long as the whole of Adam's update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from pdecay._core.anchors import decay_at_anchor_
from pdecay._core.group_settings import Group, decays, penalty_of, scales_of
from pdecay._core.penalty import Penalty
from pdecay._core.tensors import TensorList, is_tracing
from pdecay._core.validation import check_number
from pdecay._optim.cache_parts import IN_CACHE, cache_parts
from pdecay._optim.kernels import native
from pdecay._optim.kernels.layout import PLAIN
from pdecay._optim.kernels.old_weights import OldWeights
from pdecay._optim.kernels.selection import kernels_for, may_use_c, table_for
from pdecay._utils.interrupts import deferred_interrupts

Rate = float | Tensor
State = dict[Tensor, dict[str, Any]]
T = TypeVar("T")


class _Scratch(threading.local):
    """The memory of foreach's copies, kept for the next part and step: allocating takes longer."""

    def __init__(self) -> None:
        self.old = OldWeights()


_scratch = _Scratch()
_KEPT = 8 * IN_CACHE  # bytes: one part in float64


def update_and_decay_(
    update: Callable[..., None],
    streams: Sequence[list[Any]],
    group: Group,
    rate: Rate,
    state: State,
    *,
    allow_kernels: bool = True,
    measure: Callable[[Sequence[list[Tensor]]], list[Tensor]] | None = None,
) -> None:
    """Run one step of a group's parameters: the optimizer's own update, then the decay.

    Args:
        update: the optimizer's own update, called as ``update(batch, *streams)`` for each batch.
            If ``batch.kernel`` is set, it must run that kernel, which also decays.
        streams: lists in the same order: the parameters that have a gradient, then their
            gradients and state.
        group: the parameter group.
        rate: the learning rate of the decay.
        state: the optimizer's state.
        allow_kernels: whether fused kernels may be used.
        measure: returns the lengths of a batch's weights, as new tensors, from which the decay is
            computed, given the batch's streams; None for the weights themselves.
    """
    fused = _fused(group, streams[0]) if allow_kernels else False
    # Lengths of half-precision weights are in single precision, and C needs one dtype.
    readable = measure is None or all(param.dtype.itemsize >= 4 for param in streams[0])
    in_c = readable and may_use_c(group["fused"])
    for batch in make_batches(streams, group, rate, fused, foreach_in_c=in_c):
        selected = [batch.select(stream) for stream in streams]
        if batch.kernel is not None:
            update(batch, *selected)  # decays, too
        else:
            for part, own in batch.parts(selected):
                lengths = measure(own) if measure and part.has_factors else None
                decay_ = part.decay_after_update(lengths)  # remembers w_old
                if is_tracing():
                    update(part, *own)  # w_old -> w_tilde
                    decay_()  # w = w_tilde * factor(w_old)
                else:
                    deferred_interrupts.run(partial(update, part, *own), decay_)
        batch.decay_at_anchors_(state)


def c_arguments(
    streams: Sequence[list[Any]],
    counts: list[Tensor] | None,
    group: Group,
    rate: Rate,
) -> dict[str, Any] | None:
    """Return the arguments with which the C kernel updates and decays all parameters in one call.

    Return None if it cannot; then use :func:`update_and_decay_`, whose batches alone take about
    as long as the step of a small model.

    Args:
        streams: lists in the same order: the parameters that have a gradient, then their
            gradients and state, with one number for each weight.
        counts: Adam's step counts.
        group: the parameter group.
        rate: the learning rate of the decay.
    """
    if group["decay_auxiliary"]:
        return None
    table = table_for(streams, counts, _fused(group, streams[0]))
    if table is None:
        return None
    penalty = penalty_of(group)
    terms = [] if penalty is None else penalty.pairs()
    return {"terms": terms, "rate": rate, "scales": scales_of(streams[0], group), "table": table}


@dataclass
class DecayBatch:
    """Parameters of one group that are updated and decayed together."""

    params: list[Tensor]
    indices: list[int]  # positions in the list that the batch was made from
    rate: Rate  # the learning rate of the decay; a number is multiplied by the decay_scale
    penalty: Penalty | None  # None if nothing decays; for a tensor `rate`, it has the decay_scale
    auxiliary: Sequence[float]  # if not empty, s is kept in an anchor for each parameter
    kernel: ModuleType | None
    foreach: bool
    options: dict[str, Any]  # arguments of the C kernel, if it decays; it accepts many scales

    def select(self, stream: list[T]) -> list[T]:
        """Select this batch's entries of a list; an empty list stays empty."""
        if len(self.indices) == len(stream):
            return stream
        return [stream[i] for i in self.indices] if stream else []

    def parts(self, streams: list[list[Any]]) -> Iterator[tuple[DecayBatch, list[list[Any]]]]:
        """Yield this batch in parts for foreach, with their streams; see ``cache_parts.py``.

        The other implementations read memory once, or work on one tensor at a time.
        """
        if not self.foreach:
            yield self, streams
            return
        for places, own in cache_parts(streams):
            if own[0] is streams[0]:  # the only part
                yield self, own
                return
            indices = [self.indices[place] for place in places]
            options = {
                key: [values[place] for place in places] for key, values in self.options.items()
            }
            yield replace(self, params=own[0], indices=indices, options=options), own

    @property
    def terms(self) -> list[list[float]]:
        """The (p, lam) pairs for a fused kernel; empty if anchors decay the weights."""
        return [] if self.penalty is None or self.auxiliary else self.penalty.pairs()

    @property
    def has_factors(self) -> bool:
        """Whether the weights are multiplied by factors, and no kernel or anchors decay them."""
        return self.penalty is not None and not self.auxiliary and self.kernel is None

    def factors(self, w_old: list[Tensor]) -> list[Tensor]:
        """Return the decay factors; an empty list if a kernel or anchors decay the weights."""
        if self.penalty is None or not self.has_factors:
            return []
        return decay_factors(w_old, self.penalty, self.rate, foreach=self.foreach)

    def decay_after_update(self, lengths: list[Tensor] | None) -> Callable[[], None]:
        """Return a function that decays the weights once they are updated.

        It does nothing if a kernel or anchors decay them. The decay is computed from `lengths`, or
        if this is None, from the weights as they are now.
        """
        if not self.has_factors or "scales" not in self.options:
            factors = self.factors(self.params if lengths is None else lengths)
            return partial(multiply_, self.params, factors, foreach=self.foreach)
        options = {"terms": self.terms, "rate": float(self.rate), **self.options}
        old = _scratch.old
        if lengths is None and old.copy(self.params):

            def decay() -> None:
                # torch updates in place; code that replaced the weights' memory needs the fallback.
                if not old.decay_(**options):
                    native.decay_(self.params, old.tensors(), **options)
                old.forget(keep=_KEPT)

            return decay
        olds = lengths or [param.detach().clone() for param in self.params]
        return partial(native.decay_, self.params, olds, **options)

    def decay_(self, w_old: list[Tensor], state: State) -> None:
        """Decay weights that were updated already, given their values before the update."""
        if self.auxiliary:
            self.decay_at_anchors_(state)
        elif self.kernel is not None:
            self.kernel.decay_(self.params, w_old, terms=self.terms, rate=self.rate, **self.options)
        else:
            for part, (params, old) in self.parts([self.params, w_old]):
                multiply_(params, part.factors(old), foreach=self.foreach)

    def decay_at_anchors_(self, state: State) -> None:
        """Decay by the anchors' factors (see ``auxiliary.py``); without anchors do nothing."""
        if self.penalty is not None and self.auxiliary:
            for param in self.params:
                decay_at_anchor_(param, state[param], self.auxiliary, self.penalty, self.rate)


def make_batches(
    streams: Sequence[list[Any]],
    group: Group,
    rate: Rate,
    fused: bool | None,
    *,
    foreach_in_c: bool = False,
) -> Iterator[DecayBatch]:
    """Split a group's parameters into as few batches as kernels and scales allow.

    `streams` are lists in the same order: the parameters, then all tensors that a kernel reads.
    Without a kernel and without foreach each parameter is a batch, so that only one factor is in
    memory at a time. With `foreach_in_c`, foreach leaves the decay to C where C can read the
    weights. It accepts many scales, and torch updates all weights in one batch.
    """
    params: list[Tensor] = streams[0]
    penalty = penalty_of(group)
    scales = scales_of(params, group)
    auxiliary = group["decay_auxiliary"]
    kernels = kernels_for(streams, fused)
    rest = [param for param, kernel in zip(params, kernels, strict=True) if kernel is None]
    foreach = use_foreach(rest, group.get("foreach"))
    in_c = foreach_in_c and foreach and len(rest) == len(params) and penalty and not auxiliary
    if in_c and native.can_read(params):
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, param in enumerate(params):
            by_dtype.setdefault(param.dtype, []).append(i)
        for indices in by_dtype.values():
            own = [params[i] for i in indices]
            options = {"scales": [scales[i] for i in indices]}
            yield DecayBatch(own, indices, rate, penalty, auxiliary, None, True, options)
        return
    batches: dict[tuple[Any, ...], list[int]] = {}
    for i, (kernel, scale) in enumerate(zip(kernels, scales, strict=True)):
        alone = i if kernel is None and not foreach else None
        # At a scale of 0, too, a weight gets its anchor: see decay_at_anchor_.
        active = bool(scale) or (bool(auxiliary) and decays(params[i], group))
        batches.setdefault((kernel, scale, active, alone), []).append(i)
    for (kernel, scale, active, _), indices in batches.items():
        own_rate, own_penalty = rate * scale if scale else 0.0, penalty if active else None
        if isinstance(own_rate, Tensor) and own_penalty is not None:
            # In a tensor's precision, a small rate times the scale that holds zeros would be 0.
            own_rate, own_penalty = rate, own_penalty.scaled(scale)
        yield DecayBatch(
            params=[params[i] for i in indices],
            indices=indices,
            rate=own_rate,
            penalty=own_penalty,
            auxiliary=auxiliary,
            kernel=kernel,
            foreach=foreach,
            options={},
        )


class Copies:
    """Copies of tensors, made by torch, in memory that is kept for the next time."""

    def __init__(self) -> None:
        self._memory: dict[Tensor, Tensor] = {}

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return a copy of each tensor, valid until the next call with the same tensor."""
        plain = all(type(x) in PLAIN and x.layout is torch.strided for x in tensors)
        if is_tracing() or not plain:
            return [tensor.detach().clone() for tensor in tensors]
        copies = [self._memory_for(tensor) for tensor in tensors]
        if tensors:
            torch._foreach_copy_(copies, tensors)
        return copies

    def _memory_for(self, tensor: Tensor) -> Tensor:
        memory = self._memory.get(tensor)
        if memory is None or not _are_alike(memory, tensor):
            memory = self._memory[tensor] = torch.empty_like(tensor, requires_grad=False)
        return memory


def _are_alike(x: Tensor, y: Tensor) -> bool:
    if x.dtype is not y.dtype or x.shape != y.shape or x.device != y.device:
        return False
    return (x.is_contiguous() and y.is_contiguous()) or x.stride() == y.stride()


def use_foreach(params: list[Tensor], foreach: bool | None) -> bool:
    """Return the user's choice; without one, use foreach on accelerators, as torch does."""
    if foreach is not None:
        return foreach
    return bool(params) and bool(_default_to_fused_or_foreach(params, differentiable=False)[1])


def decay_rate(group: Group, optimizer: Optimizer | None, lr: Rate | None = None) -> Rate:
    """Return the decay's learning rate; 0 where a gradient scaler skips this step.

    It is the group's "decay_lr", else `lr`, else the group's "lr". If the group's "lr" is 0, it
    is 0 in any case: torch.distributed.checkpoint runs such a step to create missing state, and
    expects that no weight moves. A tensor on a device stays there, because reading it would wait
    for the device; everything else becomes a float.
    """
    if group["decay_lr"] is not None:
        lr = group["decay_lr"]
    elif lr is None:
        lr = group["lr"]
    rate = _number_or_tensor(lr)
    own = _number_or_tensor(group.get("lr", 1.0))
    if isinstance(own, Tensor):
        rate = rate * (own != 0)
    elif not own:
        return 0.0
    found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler around fused steps
    if found_inf is None:
        return rate
    if not isinstance(found_inf, Tensor) or found_inf.is_cpu:  # it is 0 if there are no gradients
        return 0.0 if found_inf else rate
    skip: Tensor = found_inf != 0
    return rate * ~skip


def _number_or_tensor(lr: object) -> Rate:
    """Return a tensor on a device, or one under torch.compile, unchanged; else a checked float."""
    if isinstance(lr, Tensor):
        if lr.device.type != "cpu" or is_tracing():
            return lr
        lr = lr.item()
    return check_number("lr", lr)


def check_scalar(name: str, value: Rate) -> Rate:
    """Return a number or a tensor of one element, after checking that it is finite and >= 0."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if not is_tracing():
            check_number(name, value.item())
        return value
    return check_number(name, value)


def decay_factors(
    w_old: Sequence[Tensor], penalty: Penalty, rate: Rate, *, foreach: bool = False
) -> list[Tensor]:
    """Return the decay's factor for each tensor."""
    if not foreach or is_tracing():  # torch.compile does not trace TensorList
        return [penalty.factor(w, rate) for w in w_old]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, w in enumerate(w_old):
        alike.setdefault((w.device, w.dtype), []).append(i)
    factors: dict[int, Tensor] = {}
    for indices in alike.values():
        listed = penalty.factor(TensorList([w_old[i] for i in indices]), rate).tensors
        factors.update(zip(indices, listed, strict=True))
    return [factors[i] for i in range(len(w_old))]


def multiply_(w_tilde: Sequence[Tensor], by: Sequence[Tensor], *, foreach: bool = False) -> None:
    """Multiply weights by their factors; do nothing if the list of factors is empty.

    Half-precision weights are rounded once, after the product with a float32 factor.
    """
    if not by:
        return
    if foreach:
        torch._foreach_mul_(list(w_tilde), list(by))
    else:
        for weight, factor in zip(w_tilde, by, strict=True):
            weight.mul_(factor)


def _fused(group: Group, params: Sequence[Tensor]) -> bool | None:
    """Return the group's `fused`; without it, an explicit `foreach` disables the kernels.

    `capturable`, which prepares for CUDA graphs, does so on devices; see ``selection.py``.
    """
    captured = group.get("capturable") and not all(param.is_cpu for param in params)
    if group["fused"] is None and (group["foreach"] is not None or captured):
        return False
    fused: bool | None = group["fused"]
    return fused
