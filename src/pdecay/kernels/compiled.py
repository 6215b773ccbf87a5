"""The fused steps through `torch.compile`, for accelerators and where no C compiler fits `native`.

One function of flat tensors (`flat.py`) is compiled, with sizes left open, and called for each
tensor (small ones are put together first). All hyper-parameters are elements of a tensor, so that
none of them is ever a reason to compile again: lr, betas, lam, p, the step count, decay_scale.
Compiled anew is only what the function's text depends on: device and dtype, how many terms there
are and which of them have a cheap form, amsgrad, nesterov, and whether gradients come scaled. The
first step of each such kind takes some seconds; inductor keeps the result on disk. A call costs
about 10 microseconds beside its work, and as much again for the views of a tensor.

On an accelerator nothing waits for the device: lr, rate, found_inf, grad_scale and the step counts
may be tensors there.

The functions are those of `pdecay.kernels.native`, and so is their documentation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from pdecay.kernels import flat
from pdecay.kernels.build import KernelUnavailable
from pdecay.kernels.flat import Kind
from pdecay.kernels.native import Tensors, Terms, _is_dense, _local

__all__ = ["adam_", "available", "sgd_", "shrink_", "supports", "why_not"]

Number = float | Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SMALL = 1 << 15  # weights of a tensor that is put together with others rather than pay for a call
_TRIAL = 1_000_003  # the size to compile with: one at which threads pay
_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add
    "cpp.dynamic_threads": True,  # follow torch.set_num_threads
}
_CHEAP = {0.0: "p_0", 0.5: "p_half", 1.0: "p_1", 1.5: "p_3_2"}


@functools.cache
def available(device: torch.device | str = "cpu") -> str | None:
    """None if torch.compile works for the device, else the reason. Compiles something small."""
    try:
        _compiled(flat.shrink, Kind("flat", 0, False), 2, torch.float32, torch.device(device))
    except KernelUnavailable as reason:
        return str(reason)
    return None


def supports(tensor: Tensor) -> bool:
    """Whether the kernel can update this weight, given that torch.compile works for its device."""
    return why_not(tensor) is None


def why_not(tensor: Tensor) -> str | None:
    """Why the kernel cannot update this weight, in a few words; None if it can."""
    tensor = _local(tensor)
    if tensor.dtype not in _DTYPES:
        return f"of dtype {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout != torch.strided or not _is_dense(tensor):
        return "not dense in memory"
    return None


# ---- the steps ----


def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    terms: Terms,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    rate: Number | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """As `native.adam_`; numbers and step counts may also be tensors on the device."""
    if _is_host(found_inf) and found_inf.item():
        return
    streams = [params, grads, exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
    new1 = beta1 - 1 if maximize else 1 - beta1
    fixed = (new1, beta1, 1 - beta2, beta2, eps, 1 - lr * weight_decay)
    corrections: dict[Any, tuple[Number, Number]] = {}

    def numbers_of(i: int) -> tuple[object, Sequence[Number]]:
        count = state_steps[i]
        step: Number = count.item() + 1 if _is_host(count) else count + 1
        key = i if isinstance(step, Tensor) else step
        if key not in corrections:
            corrections[key] = (lr / (1 - beta1**step), (1 - beta2**step) ** -0.5)
        return key, (*fixed, *corrections[key])

    how = _How(terms, lr if rate is None else rate, grad_scale, found_inf, {"amsgrad": amsgrad})
    _run(flat.adam, streams, numbers_of, how)
    if not state_steps:
        return
    torch._foreach_add_(list(state_steps), 1)
    if found_inf is not None and not _is_host(found_inf):
        found = found_inf.reshape(()).to(state_steps[0].dtype)
        torch._foreach_sub_(list(state_steps), [found] * len(state_steps))


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    terms: Terms,
    lr: Number,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    first: bool | Sequence[bool] = False,
    rate: Number | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """As `native.sgd_`; numbers may also be tensors on the device."""
    if _is_host(found_inf) and found_inf.item():
        return
    fresh = [first] * len(params) if isinstance(first, bool) else list(first)
    streams = [params, grads, momentum_buffers] if momentum != 0 else [params, grads]
    numbers = (lr, momentum, 1 - dampening, weight_decay, -1.0 if maximize else 1.0)
    rate = lr if rate is None else rate
    for is_first in sorted(set(fresh)):
        chosen = [i for i, value in enumerate(fresh) if value == is_first]
        flags = {"momentum": momentum != 0, "nesterov": nesterov}
        flags["first"] = is_first and momentum != 0
        how = _How(terms, rate, grad_scale, found_inf, flags)
        parts = [[stream[i] for i in chosen] for stream in streams]
        _run(flat.sgd, parts, lambda _: (None, numbers), how)


def shrink_(params: Tensors, olds: Tensors, *, terms: Terms, lr: Number) -> None:
    """As `native.shrink_`; lr may also be a tensor on the device."""
    if not isinstance(lr, Tensor) and not any(lr * lam for _, lam in terms):
        return
    how = _How(terms, lr, None, None, {})
    _run(flat.shrink, [params, olds], lambda _: (None, ()), how)


# ---- how they are run ----


class _How(NamedTuple):
    """What the steps have in common."""

    terms: Terms
    rate: Number
    grad_scale: Tensor | None
    found_inf: Tensor | None
    flags: dict[str, bool]  # for Kind


def _is_host(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor that can be read without waiting for a device."""
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _run(
    function: Callable[..., None],
    streams: Sequence[Tensors],
    numbers_of: Callable[[int], tuple[object, Sequence[Number]]],
    how: _How,
) -> None:
    """Call the compiled `function` on flat tensors until all of `streams` are done.

    `numbers_of(i)` gives the function's own numbers for tensor i and a key that is the same for
    tensors whose numbers are. All kinds are compiled before any tensor changes.
    """
    local = [[_local(tensor).detach() for tensor in stream] for stream in streams]
    groups: dict[Any, list[int]] = {}
    for i, weight in enumerate(local[0]):
        if weight.numel():
            groups.setdefault((weight.device, weight.dtype, numbers_of(i)[0]), []).append(i)
    skip = None if _is_host(how.found_inf) else how.found_inf
    scale: Number = 1.0 if how.grad_scale is None else how.grad_scale
    calls = []
    for (device, dtype, _), members in groups.items():
        wide = dtype if dtype == torch.float64 else torch.float32
        form, powers, decay = _plan(how.terms, how.rate, wide)
        kind = Kind(
            form,
            powers,
            bits=device.type == "cpu" and wide == torch.float32,
            scaled=how.grad_scale is not None,
            skippable=skip is not None,
            **how.flags,
        )
        own = _vector([scale, *numbers_of(members[0])[1]], wide, device)
        numbers = torch.cat([own, decay.to(device, wide)])
        step = _compiled(function, kind, len(local), dtype, device)
        calls.append((step, members, numbers, None if skip is None else skip.to(device), kind))
    for step, members, numbers, skip_here, kind in calls:
        for lists in _flattened([[stream[i] for i in members] for stream in local], kind.scaled):
            # a size of 1 would be compiled as a constant
            run = step if lists[0].numel() > 1 else function
            run(lists, numbers, skip_here, kind)


def _flattened(streams: list[list[Tensor]], scaled: bool) -> Iterator[list[Tensor]]:
    """The streams of each tensor as 1-D tensors, small ones joined; copied back where copied."""
    lists: list[list[Tensor]] = [[] for _ in streams]
    copied: list[tuple[Tensor, Tensor]] = []
    for s, stream in enumerate(streams):
        for weight, tensor in zip(streams[0], stream, strict=True):
            laid_out = tensor
            if tensor.dtype != weight.dtype or tensor.stride() != weight.stride():
                laid_out = torch.empty_like(weight).copy_(tensor)
                copied.append((tensor, laid_out))
            lists[s].append(laid_out.as_strided((weight.numel(),), (1,)))
    small = [i for i, weight in enumerate(lists[0]) if weight.numel() < _SMALL]
    if len(small) > 1:
        sizes = [lists[0][i].numel() for i in small]
        joined = [torch.cat([flats[i] for i in small]) for flats in lists]
        yield joined
        for s, whole in enumerate(joined):
            if s != 1 or scaled:  # stream 1, gradients or old weights, is only read otherwise
                torch._foreach_copy_([lists[s][i] for i in small], whole.split(sizes))
    alone = set(range(len(lists[0]))) - (set(small) if len(small) > 1 else set())
    for i in sorted(alone):
        yield [flats[i] for flats in lists]
    for original, copy in copied:
        original.copy_(copy)


def _vector(values: Sequence[Number], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as one tensor on the device; those that lie there already stay there."""
    there = {i: v for i, v in enumerate(values) if isinstance(v, Tensor) and not _is_host(v)}
    hosted = [0.0 if i in there else float(value) for i, value in enumerate(values)]
    vector = torch.tensor(hosted, dtype=dtype).to(device, non_blocking=True)
    for i, value in there.items():
        vector[i] = value.reshape(())
    return vector


def _plan(terms: Terms, rate: Number, dtype: torch.dtype) -> tuple[str, int, Tensor]:
    """The form of the factor (as in decay.h), how many powers it sums, and its numbers."""
    live = tuple((p, lam) for p, lam in terms if lam != 0)
    if isinstance(rate, Tensor) and not _is_host(rate):
        return _plan_on_device(live, rate.reshape(()).to(dtype), dtype)
    return _plan_on_host(live, float(rate), dtype)


@functools.lru_cache(maxsize=64)
def _plan_on_host(
    terms: tuple[tuple[float, float], ...], rate: float, dtype: torch.dtype
) -> tuple[str, int, Tensor]:
    return _plan_on_device(terms, torch.tensor(rate, dtype=torch.float64), dtype)


def _plan_on_device(
    terms: tuple[tuple[float, float], ...], rate: Tensor, dtype: torch.dtype
) -> tuple[str, int, Tensor]:
    """`_plan`, where the rate is.

    The numbers are tiny, constant (p = 2), at_zero, per_knee and, for each power, q, whole and
    mantissa. A rate of 0, also one that only the device knows, is not a form of its own: its
    numbers give a factor of 1 everywhere, at zero too.
    """
    limits = torch.finfo(dtype)
    others = [(p, lam) for p, lam in terms if p != 2]

    def number(value: Number) -> Tensor:
        return torch.as_tensor(value, dtype=rate.dtype, device=rate.device)

    def unless_idle(value: Number, when_idle: float) -> Tensor:
        return torch.where(rate == 0, number(when_idle), number(value))

    if not others:
        form = "flat"
    elif len(others) == 1:
        form = _CHEAP.get(others[0][0], "powers")
    else:
        form = "powers"
    constant = 1 / (1 + rate * sum(lam for p, lam in terms if p == 2))
    at_zero = 0.0 if any(p < 2 for p, _ in others) else constant
    rates = [(rate * lam * constant).clamp(limits.tiny, limits.max) for _, lam in others]
    per_knee = number(0.0)
    if form in _CHEAP.values():
        per_knee = (rates[0] ** (1 / (others[0][0] - 2))).clamp(max=limits.max)
    tiny = limits.tiny if terms else 0.0
    numbers = [unless_idle(tiny, 0.0), constant, unless_idle(at_zero, 1.0)]
    numbers.append(unless_idle(per_knee, limits.max))
    if form != "powers":
        return form, 0, torch.stack(numbers)
    for (p, _), c in zip(others, rates, strict=True):
        whole = c.log2().round()
        numbers.append(unless_idle(p - 2, 0.0))
        numbers.append(unless_idle(whole, math.log2(limits.tiny)))
        numbers.append(c / whole.exp2())
    return form, len(others), torch.stack(numbers)


@functools.cache
def _compiled(
    function: Callable[..., None],
    kind: Kind,
    streams: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[..., None]:
    """`function`, compiled; tried on numbers of no consequence, so that no step fails half done.

    The trial also shows which arguments the compiled code takes, in which order. From then on it is
    called itself: what torch.compile would check at every call (guards) is given by the key of this
    cache and by `_flattened`, and would cost more than a small tensor's step.
    """
    from torch._dynamo import lookup_backend  # these two take a second to import
    from torch._inductor import config as inductor_config

    wide = dtype if dtype == torch.float64 else torch.float32
    count = {flat.adam: 9, flat.sgd: 6, flat.shrink: 1}[function] + 4 + 3 * kind.powers
    trial = [torch.ones(_TRIAL, dtype=dtype, device=device) for _ in range(streams)]
    numbers = torch.ones(count, dtype=wide, device=device)
    skip = torch.zeros((), device=device) if kind.skippable else None
    code: list[Callable[..., object]] = []
    order: list[int] = []  # which of `arguments_of` the code takes

    def arguments_of(streams: list[Tensor], numbers: Tensor, skip: Tensor | None) -> list[object]:
        return [streams[0].numel(), count, numbers, skip, *streams]

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., object]:
        with inductor_config.patch(_OPTIONS if device.type == "cpu" else {}):
            code.append(lookup_backend("inductor")(graph, inputs))

        def first_call(*arguments: object) -> object:
            known = [x if isinstance(x, int) else id(x) for x in arguments_of(trial, numbers, skip)]
            order.extend(known.index(x if isinstance(x, int) else id(x)) for x in arguments)
            return code[0](*arguments)

        return first_call

    try:
        compile_: Callable[..., Any] = torch.compile  # its overloads lack isolate_recompiles
        options = {"dynamic": True, "fullgraph": True, "isolate_recompiles": True}
        with torch.no_grad():
            compile_(function, backend=backend, **options)(trial, numbers, skip, kind)
    except Exception as error:  # whatever a backend may raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise KernelUnavailable(f"torch.compile failed: {lines[0]}") from error

    def call(streams: list[Tensor], numbers: Tensor, skip: Tensor | None, _: Kind) -> None:
        arguments = arguments_of(streams, numbers, skip)
        code[0](*[arguments[i] for i in order])

    return call
