"""The fused steps by ``torch.compile``, for accelerators and for CPUs without a C compiler.

Each step is one function of flat tensors (`streams`: the weights first, then gradients and state),
compiled with dynamic sizes and called for each tensor; small tensors are concatenated first. All
hyper-parameters, p and lam included, are elements of one tensor (`numbers`), so that a change of
them never recompiles. The first step of each kind (device, dtype, number of terms, flags) takes
some seconds to compile; inductor caches the result on disk. The logger "pdecay" reports it at the
level INFO.

Nothing waits for an accelerator: lr, rate and the step counts may be tensors there.

The functions have the arguments of `pdecay._optim.kernels.native` and are documented there.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pdecay._native.build import KernelUnavailable
from pdecay._native.private_folders import create, resolve
from pdecay._optim.kernels.layout import Batch, Tensors, batches, is_dense, is_plain, local
from pdecay._optim.kernels.native import Terms
from pdecay._utils.imports import safe_path

__all__ = ["adam_", "available", "decay_", "sgd_", "why_not"]

_LOG = logging.getLogger("pdecay")

Number = float | Tensor
Numbers = Callable[[int], Sequence[Number]]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SMALL = 1 << 15  # tensors with fewer weights are concatenated: one call instead of many
_TRIAL_SIZE = 1_000_003  # inductor compiles for several threads only if the size is worth it
_CPU_OPTIONS: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add
    "cpp.dynamic_threads": True,  # follow torch.set_num_threads
}


@functools.cache
def available(device: torch.device | str = "cpu") -> str | None:
    """Return None if torch.compile works for the device, else the reason. Compiles a kernel."""
    try:
        _compile(_decay, 2, 5, (), torch.float32, torch.device(device))
    except KernelUnavailable as reason:
        return str(reason)
    return None


def why_not(tensor: Tensor) -> str | None:
    """Return why the kernel cannot update this weight; None if it can."""
    tensor = local(tensor)
    if tensor.dtype not in _DTYPES:
        return f"of dtype {str(tensor.dtype).removeprefix('torch.')}"
    if not is_plain(tensor) or not is_dense(tensor):
        return "not dense in memory"
    return None


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
    mean: Number | None = None,
) -> None:
    streams = [params, grads, exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
    new1 = beta1 - 1 if maximize else 1 - beta1
    per_mean = 1.0 if mean is None else 1 / mean
    shared = (new1, beta1, 1 - beta2, beta2, eps, 1 - lr * weight_decay, per_mean)
    # A step count on a device is not read; tensors with such a count are not batched.
    steps = [count.item() + 1 if _on_host(count) else count + 1 for count in state_steps]
    keys = [-1 - i if isinstance(step, Tensor) else step for i, step in enumerate(steps)]

    def numbers(i: int) -> Sequence[Number]:
        return (*shared, lr / (1 - beta1 ** steps[i]), (1 - beta2 ** steps[i]) ** -0.5)

    flags = (amsgrad, mean is not None)
    _run(_adam, streams, numbers, terms, lr if rate is None else rate, flags, keys)
    if state_steps:
        torch._foreach_add_(list(state_steps), 1)


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
) -> None:
    streams = [params, grads, momentum_buffers] if momentum != 0 else [params, grads]
    numbers = (lr, momentum, 1 - dampening, weight_decay, -1.0 if maximize else 1.0)
    fresh = [first] * len(params) if isinstance(first, bool) else list(first)
    for is_first in sorted(set(fresh)):
        chosen = [
            [x for x, f in zip(stream, fresh, strict=True) if f == is_first] for stream in streams
        ]
        flags = (momentum != 0, is_first and momentum != 0, nesterov)
        _run(_sgd, chosen, lambda _: numbers, terms, lr if rate is None else rate, flags)


def decay_(params: Tensors, olds: Tensors, *, terms: Terms, rate: Number) -> None:
    _run(_decay, [params, olds], lambda _: (), terms, rate, ())


# ---- the compiled functions ----


def _adam(streams: list[Tensor], numbers: Tensor, amsgrad: bool, adaptive: bool) -> None:
    new1, beta1, new2, beta2, eps, keep, per_mean, step_size, per_root, *decay = numbers.unbind()
    w, g, m, v = (_wide(stream) for stream in streams[:4])
    m = beta1 * m + new1 * g
    v = beta2 * v + new2 * g * g
    streams[2].copy_(m)
    streams[3].copy_(v)
    if amsgrad:
        v = torch.maximum(_wide(streams[4]), v)
        streams[4].copy_(v)
    denominator = v.sqrt() * per_root + eps
    w_tilde = keep * w - step_size * m / denominator
    length = w * (denominator * per_mean).sqrt() if adaptive else w  # see adam_metric.py
    streams[0].copy_(_decayed(w_tilde, length, decay))


def _sgd(
    streams: list[Tensor], numbers: Tensor, has_momentum: bool, first: bool, nesterov: bool
) -> None:
    lr, momentum, new, weight_decay, sign, *decay = numbers.unbind()
    w = _wide(streams[0])
    # 0 * inf is NaN: without weight decay, infinite weights must not reach the gradient
    g = sign * _wide(streams[1]) + torch.where(weight_decay != 0, weight_decay * w, 0.0)
    update = g
    if has_momentum:
        update = g if first else momentum * _wide(streams[2]) + new * g
        streams[2].copy_(update)
        if nesterov:
            update = g + momentum * update
    streams[0].copy_(_decayed(w - lr * update, w, decay))


def _decay(streams: list[Tensor], numbers: Tensor) -> None:
    w_tilde, w_old = (_wide(stream) for stream in streams)
    streams[0].copy_(_decayed(w_tilde, w_old, numbers.unbind()))


def _decayed(w_tilde: Tensor, w_old: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    """Return ``w_tilde / (1 + sum_k c_k |w_old|^q_k)``; the numbers are those of `_decay_numbers`.

    Results below the smallest normal number become +0.0, as in the C kernel.
    """
    decays, at_zero, total, *powers = numbers
    tiny = torch.finfo(w_tilde.dtype).tiny
    log = _log2(w_old.abs())
    for q, log_c in zip(powers[::2], powers[1::2], strict=True):
        total = total + _power(log, q, log_c)
    w = w_tilde * torch.where(w_old.abs() < tiny, at_zero, 1 / total)
    w = torch.where(w.abs() < tiny, 0.0, w)
    return torch.where(decays > 0, w, w_tilde)  # rate = 0 changes nothing, not even a zero


def _log2(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return log2 x as an exponent and a rest; any finite numbers where x is 0.

    On a CPU, exponent and polynomial are computed as in fastpow.h, which is several times faster
    than the library's log2.
    """
    if x.is_cpu and x.dtype == torch.float32:
        bits = x.view(torch.int32)
        exponent = (bits - 0x3F3504F3) & -0x800000
        z = (bits - exponent).view(torch.float32) - 1.0
        zz = z * z
        high = (0.479348 - 0.36749 * z) + zz * (0.32215494 - 0.20659186 * z)
        return exponent.to(x.dtype) * 2.0**-23, ((1.4427135 - 0.72113186 * z) + zz * high) * z
    log = x.clamp(min=torch.finfo(x.dtype).tiny).log2()
    return log, torch.zeros_like(log)


def _power(log: tuple[Tensor, Tensor], q: Tensor, log_c: Tensor) -> Tensor:
    """Return ``c * x^q`` from log2 x and log2 c, on a CPU as in fastpow.h."""
    exponent, part = log
    rest = q * part + log_c
    if not (part.is_cpu and part.dtype == torch.float32):
        return (q * exponent + rest).exp2()
    rounder = 1.5 * 2**23 + 127
    rounded = (q * exponent + rest) + rounder
    z = (q * exponent - (rounded - rounder)) + rest
    zz = z * z
    high = (0.2402212 + 0.05550713 * z) + zz * (0.009675542 + 0.0013276472 * z)
    scale = rounded.view(torch.int32).clamp(0x4B400001, 0x4B4000FD) << 23
    return ((1.0000001 + 0.69314694 * z) + zz * high) * scale.view(torch.float32)


def _wide(tensor: Tensor) -> Tensor:
    """Compute half precision in float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


# ---- how they are called ----


def _run(
    function: Callable[..., None],
    streams: Sequence[Tensors],
    numbers_of: Numbers,
    terms: Terms,
    rate: Number,
    flags: tuple[bool, ...],
    keys: Sequence[Hashable] | None = None,
) -> None:
    """Call a compiled function for all tensors of `streams`.

    `numbers_of(i)` returns the update's own numbers for tensor i; tensors of the same key share
    them. Everything is compiled before any tensor changes.
    """
    calls = []
    for batch in batches(streams, read_only=(1,), keys=keys):
        wide = batch.dtype if batch.dtype == torch.float64 else torch.float32
        values = [*numbers_of(batch.indices[0]), *_decay_numbers(terms, rate)]
        numbers = _vector(values, wide, batch.device)
        kernel = _compile(function, len(streams), len(values), flags, batch.dtype, batch.device)
        calls.append((batch, kernel, numbers))
    for batch, kernel, numbers in calls:
        for flat in _flattened(batch):
            # torch.compile specialises on size 1
            (kernel if flat[0].numel() > 1 else function)(flat, numbers, *flags)
        batch.finish()


def _decay_numbers(terms: Terms, rate: Number) -> list[Number]:
    """Return whether rate > 0, the factor at w = 0, 1 + the terms with p = 2, 2 numbers a term.

    The 2 numbers are ``q = p - 2`` and ``log2 c`` with ``c = rate * lam``. The logarithms of the
    power and of c are added, so that only the product can overflow.
    """
    live = [(p, rate * lam) for p, lam in terms if lam and (isinstance(rate, Tensor) or rate * lam)]
    constant = 1 + sum(c for p, c in live if p == 2)
    at_zero = 0.0 if any(p < 2 for p, _ in live) else 1 / constant
    # Compared here: in single precision, a small lr times the scale that holds zeros would be 0.
    numbers: list[Number] = [rate > 0 if live else 0.0, at_zero, constant]
    for p, c in live:
        if p != 2:
            numbers += [p - 2, c.log2() if isinstance(c, Tensor) else math.log2(c)]
    return numbers


def _vector(values: Sequence[Number], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers as one tensor on the device; device tensors are not read."""
    there = {i: v for i, v in enumerate(values) if isinstance(v, Tensor) and not _on_host(v)}
    hosted = [0.0 if i in there else float(value) for i, value in enumerate(values)]
    vector = torch.tensor(hosted, dtype=dtype, device="cpu").to(device, non_blocking=True)
    for i, value in there.items():
        vector[i] = value.reshape(())
    return vector


def _on_host(value: object) -> TypeGuard[Tensor]:
    """Check whether this is a tensor that can be read without waiting for a device."""
    return isinstance(value, Tensor) and value.is_cpu


def _flattened(batch: Batch) -> Iterator[list[Tensor]]:
    """Yield the streams of each tensor as 1-D views; small tensors as one concatenated copy."""
    members = [i for i, size in enumerate(batch.sizes) if size]
    flat = [
        [stream[i].detach().as_strided((batch.sizes[i],), (1,)) for stream in batch.streams]
        for i in members
    ]
    small = [views for views in flat if views[0].numel() < _SMALL]
    if len(small) > 1:
        joined = [torch.cat(tensors) for tensors in zip(*small, strict=True)]
        yield joined
        sizes = [views[0].numel() for views in small]
        for s, whole in enumerate(joined):
            if s != 1:  # stream 1, the gradients or old weights, is only read
                torch._foreach_copy_([views[s] for views in small], list(whole.split(sizes)))
    yield from (views for views in flat if len(small) <= 1 or views[0].numel() >= _SMALL)


def _check_cache() -> None:
    """Raise PermissionError if another user may have put code into inductor's cache.

    It is /tmp/torchinductor_<user>, which another user can create first, and torch runs what it
    finds there. Even if ``TORCHINDUCTOR_CACHE_DIR`` names another folder, torch keeps precompiled
    headers in this one.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if not hasattr(os, "getuid"):  # Windows, where each user has a folder for temporary files
        return
    cache = default_cache_dir()
    folder = resolve(cache)
    if folder is None or not create(folder):
        raise PermissionError(
            f"other users could write to {cache}, where torch.compile keeps code: remove it, or "
            "set TMPDIR to a folder that only you can write to"
        )


@functools.cache
def _compile(
    function: Callable[..., None],
    streams: int,
    numbers: int,
    flags: tuple[bool, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[..., None]:
    """Compile a function and run it once on unused tensors, so that no step fails half done."""
    wide = dtype if dtype == torch.float64 else torch.float32
    trial = [torch.ones(_TRIAL_SIZE, dtype=dtype, device=device) for _ in range(streams)]
    compile_: Callable[..., Any] = torch.compile  # its overloads lack isolate_recompiles
    kind = f"fused step ({function.__name__.strip('_')}, {device.type}, {dtype})"
    _LOG.info("compiling the %s; this takes seconds, once. fused=False avoids it", kind)
    began = time.perf_counter()
    try:
        _check_cache()
        kernel: Callable[..., None] = compile_(
            function,
            dynamic=True,
            fullgraph=True,
            isolate_recompiles=True,
            options=_CPU_OPTIONS if device.type == "cpu" else {},
        )
        with safe_path(), torch.no_grad():  # inductor uses `python -c`
            kernel(trial, torch.ones(numbers, dtype=wide, device=device), *flags)
    except Exception as error:  # backends raise errors of any type
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise KernelUnavailable(f"torch.compile failed: {lines[0]}") from error
    _LOG.info("compiled the %s in %.1f s", kind, time.perf_counter() - began)
    return kernel
