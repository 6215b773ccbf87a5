"""The fused steps through `torch.compile`, for accelerators and where no C compiler fits `native`.

One function of flat tensors (`flat.py`) is compiled, with sizes left open, and called for each
tensor (small ones are put together first). All hyper-parameters are elements of a tensor, so that
none of them is ever a reason to compile again: lr, betas, lam, p, the step count, decay_scale.
Compiled anew is only what the function's text depends on: device and dtype, how many terms there
are and which of them have a cheap form, amsgrad, nesterov, and whether gradients come scaled. The
first step of each such kind takes some seconds; inductor keeps the result on disk. On a CPU the
compiled kernel is called without what torch puts around it, where that can be had (`bare.py`).

On an accelerator nothing waits for the device: lr, rate, found_inf, grad_scale and the step counts
may be tensors there.

The functions are those of `pdecay._optim.kernels.native`, and so is their documentation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from pdecay._native.build import KernelUnavailable
from pdecay._optim.kernels import bare, flat
from pdecay._optim.kernels.flat import Kind
from pdecay._optim.kernels.layout import Batch, Tensors, batches, is_dense, local
from pdecay._optim.kernels.native import Scales, Terms

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
    tensor = local(tensor)
    if tensor.dtype not in _DTYPES:
        return f"of dtype {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout != torch.strided or not is_dense(tensor):
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
    scales: Scales = None,
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
    # A count that only the device knows makes a tensor one of its own.
    steps = [count.item() + 1 if _is_host(count) else count + 1 for count in state_steps]
    keys = [-1 - i if isinstance(step, Tensor) else step for i, step in enumerate(steps)]

    def numbers_of(i: int) -> Sequence[Number]:
        return (*fixed, lr / (1 - beta1 ** steps[i]), (1 - beta2 ** steps[i]) ** -0.5)

    how = _How(terms, lr if rate is None else rate, grad_scale, found_inf, {"amsgrad": amsgrad})
    _run(flat.adam, streams, numbers_of, how, scales, keys)
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
    scales: Scales = None,
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
        _run(flat.sgd, parts, lambda _: numbers, how, scales and [scales[i] for i in chosen])


def shrink_(params: Tensors, olds: Tensors, *, terms: Terms, lr: Number) -> None:
    """As `native.shrink_`; lr may also be a tensor on the device."""
    if not isinstance(lr, Tensor) and not any(lr * lam for _, lam in terms):
        return
    how = _How(terms, lr, None, None, {})
    _run(flat.shrink, [params, olds], lambda _: (), how)


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
    return isinstance(value, Tensor) and value.is_cpu


def _run(
    function: Callable[..., None],
    streams: Sequence[Tensors],
    numbers_of: Callable[[int], Sequence[Number]],
    how: _How,
    scales: Scales = None,
    keys: Sequence[Hashable] | None = None,
) -> None:
    """Call the compiled `function` until all of `streams` are done.

    `numbers_of(i)` gives the function's own numbers for tensor i; they are the same for all tensors
    of one key. All kinds are compiled before any tensor changes.
    """
    count = len(streams[0])
    both = list(zip(scales or [1.0] * count, keys or [None] * count, strict=True))
    skip = None if _is_host(how.found_inf) else how.found_inf
    scaled = how.grad_scale is not None
    grad_scale: Number = 1.0 if how.grad_scale is None else how.grad_scale
    calls = []
    for batch in batches(streams, read_only=() if scaled else (1,), keys=both):
        device, dtype = batch.device, batch.dtype
        scale, _ = batch.key
        wide = dtype if dtype == torch.float64 else torch.float32
        form, powers, decay = _plan([(p, lam * scale) for p, lam in how.terms], how.rate, wide)
        kind = Kind(
            form,
            powers,
            bits=device.type == "cpu" and wide == torch.float32,
            scaled=scaled,
            skippable=skip is not None,
            **how.flags,
        )
        numbers = _vector([grad_scale, *numbers_of(batch.indices[0]), *decay], wide, device)
        code = _compiled(function, kind, len(streams), dtype, device)
        calls.append((batch, code, numbers, None if skip is None else skip.to(device), kind))
    for batch, code, numbers, skip_here, kind in calls:
        if code.kernel is not None:
            code.kernel.run(batch.streams, numbers, batch.sizes)
        else:
            for flats in _flattened(batch, scaled):
                # a size of 1 would be compiled as a constant
                run = code.call if flats[0].numel() > 1 else function
                run(flats, numbers, skip_here, kind)
        batch.finish()


def _flattened(batch: Batch, scaled: bool) -> Iterator[list[Tensor]]:
    """The streams of each tensor as 1-D tensors; small ones are joined, and copied back after."""
    members = [i for i, size in enumerate(batch.sizes) if size]
    flats = [
        [stream[i].detach().as_strided((batch.sizes[i],), (1,)) for i in members]
        for stream in batch.streams
    ]
    small = [k for k, flat in enumerate(flats[0]) if flat.numel() < _SMALL]
    if len(small) > 1:
        sizes = [flats[0][k].numel() for k in small]
        joined = [torch.cat([stream[k] for k in small]) for stream in flats]
        yield joined
        for s, whole in enumerate(joined):
            if s != 1 or scaled:  # stream 1, gradients or old weights, is only read otherwise
                torch._foreach_copy_([flats[s][k] for k in small], whole.split(sizes))
    alone = set(range(len(members))) - (set(small) if len(small) > 1 else set())
    for k in sorted(alone):
        yield [stream[k] for stream in flats]


def _vector(values: Sequence[Number], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as one tensor on the device; those that lie there already stay there."""
    there = {i: v for i, v in enumerate(values) if isinstance(v, Tensor) and not _is_host(v)}
    hosted = [0.0 if i in there else float(value) for i, value in enumerate(values)]
    vector = torch.tensor(hosted, dtype=dtype).to(device, non_blocking=True)
    for i, value in there.items():
        vector[i] = value.reshape(())
    return vector


def _plan(terms: Terms, rate: Number, dtype: torch.dtype) -> tuple[str, int, list[Number]]:
    """The form of the factor (as in decay.h), how many powers it sums, and its numbers.

    The numbers are tiny, constant (p = 2), at_zero, per_knee and, for each power, q, whole and
    mantissa; tensors where the rate is one on a device. A rate of 0, also one that only the device
    knows, is not a form of its own: its numbers give a factor of 1 everywhere, at zero too.
    """
    limits = torch.finfo(dtype)
    if isinstance(rate, Tensor):
        rate = rate.item() if _is_host(rate) else rate.reshape(()).to(dtype)
    live = [(p, lam) for p, lam in terms if lam != 0]
    others = [(p, lam) for p, lam in live if p != 2]

    def unless_idle(value: Number, when_idle: float) -> Number:
        if isinstance(rate, Tensor):
            # multiplied, not chosen by torch.where alone: a plain value becomes a tensor there
            return torch.where(rate == 0, when_idle, value + 0 * rate)
        return value if rate else when_idle

    if not others:
        form = "flat"
    elif len(others) == 1:
        form = _CHEAP.get(others[0][0], "powers")
    else:
        form = "powers"
    constant = 1 / (1 + rate * sum(lam for p, lam in live if p == 2))
    at_zero = 0.0 if any(p < 2 for p, _ in others) else constant
    rates = [_clamp(rate * lam * constant, limits.tiny, limits.max) for _, lam in others]
    per_knee: Number = 0.0
    if form in _CHEAP.values():
        per_knee = _clamp(_power(rates[0], 1 / (others[0][0] - 2)), 0.0, limits.max)
    numbers = [unless_idle(limits.tiny if live else 0.0, 0.0), constant, unless_idle(at_zero, 1.0)]
    numbers.append(unless_idle(per_knee, limits.max))
    if form != "powers":
        return form, 0, numbers
    for (p, _), c in zip(others, rates, strict=True):
        whole = c.log2().round() if isinstance(c, Tensor) else round(math.log2(c))
        numbers.append(unless_idle(p - 2, 0.0))
        numbers.append(unless_idle(whole, math.log2(limits.tiny)))
        numbers.append(c * 2.0**-whole)
    return form, len(others), numbers


def _clamp(value: Number, low: float, high: float) -> Number:
    return value.clamp(low, high) if isinstance(value, Tensor) else min(max(value, low), high)


def _power(base: Number, exponent: float) -> Number:
    try:
        return base**exponent
    except OverflowError:  # of plain numbers; a tensor has inf
        return math.inf


class _Code(NamedTuple):
    """A compiled function, and its kernel where that can be called by itself."""

    call: Callable[..., None]
    kernel: bare.Bare | None = None


@functools.cache
def _compiled(
    function: Callable[..., None],
    kind: Kind,
    streams: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Code:
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

    if device.type != "cpu":
        return _Code(call)
    with torch.no_grad():
        kernel = bare.kernel_of(lambda x, y: call(x, y, skip, kind), [numbers, *trial])
    return _Code(call, kernel)
