"""The fused steps in C, on lists of CPU tensors.

Every function changes its tensors in place and makes one call into C for each dtype, whatever the
number of tensors. Nothing is kept between calls: packing a tensor anew takes about two
microseconds, and no stale pointer can be followed.

`terms` is a sequence of (p, lam); `scales` has, for each weight, what lam is multiplied by. A term
whose rate * lam is 0 is dropped; with none left the step is the optimizer's own. Where something
decays, results below the smallest normal number (of float32 for half-precision weights) are written
as 0.

Raises `KernelUnavailable` where the kernel cannot be compiled, `ValueError` for tensors that it
cannot take; ask `supports` first.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdecay._native.build import KernelUnavailable, load
from pdecay._optim.kernels.layout import (
    PLAIN,
    Batch,
    Tensors,
    batches,
    is_dense,
    local,
)

__all__ = ["KernelUnavailable", "adam_", "available", "sgd_", "shrink_", "supports", "why_not"]

Terms = Sequence[tuple[float, float]]
Scales = Sequence[float] | None

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as in step.c
_FAILURES = {1: "this compiler has no float16", 2: "out of memory"}


def available() -> str | None:
    """None if the kernel is or can be compiled here, else the reason."""
    try:
        _library()
    except KernelUnavailable as reason:
        return str(reason)
    return None


def supports(tensor: Tensor) -> bool:
    """Whether the kernel can update this weight, given that it compiles."""
    return why_not(tensor) is None


def why_not(tensor: Tensor) -> str | None:
    """Why the kernel cannot update this weight, in a few words; None if it can."""
    if type(tensor) not in PLAIN:
        tensor = local(tensor)
        if type(tensor) not in PLAIN:
            return f"a {type(tensor).__name__}"
    if tensor.device.type != "cpu":
        return f"on device {tensor.device.type}"
    if tensor.dtype not in _DTYPES:
        return f"of dtype {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout != torch.strided or not is_dense(tensor):
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
    scales: Scales = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    rate: float | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of `torch.optim.AdamW` and of the decay, in one pass over memory.

    Args:
        params: the weights.
        grads: their gradients; divided by `grad_scale`, if given, in place (as torch's fused does).
        exp_avgs: the state, as torch keeps it: first moments,
        exp_avg_sqs: second moments,
        max_exp_avg_sqs: their maxima (only read if `amsgrad`; else may be empty),
        state_steps: and step counts on the CPU, which are incremented here.
        terms, scales: the decay, see the module.
        lr: learning rate.
        beta1: coefficient of the first moments.
        beta2: coefficient of the second moments.
        eps: added to the root of the second moments.
        weight_decay: the decoupled weight decay of AdamW.
        amsgrad: whether to divide by the maxima of the second moments.
        maximize: whether to go up.
        rate: the learning rate of the decay where it is not `lr`.
        grad_scale: what the gradients were multiplied by (GradScaler).
        found_inf: if not 0, nothing at all changes.
    """
    if found_inf is not None and found_inf.item():
        return
    library = _library()
    rate = float(lr if rate is None else rate)
    scale = 0.0 if grad_scale is None else float(grad_scale.item())
    streams = [params, grads, exp_avgs, exp_avg_sqs]
    if amsgrad:
        streams.append(max_exp_avg_sqs)
    steps, double_steps = _step_pointers(state_steps)
    for batch in batches(streams, read_only=() if scale else (1,), keys=scales):
        powers, rates = _live(terms, rate, batch.key)
        counts = array("Q", [steps[i] for i in batch.indices])
        _call(
            batch,
            library.pdecay_adam,
            *(len(powers), _address(powers), _address(rates), scale),
            *(_address(counts), double_steps),
            *(lr, beta1, beta2, eps, weight_decay, amsgrad, maximize),
        )


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    terms: Terms,
    scales: Scales = None,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    first: bool | Sequence[bool] = False,
    rate: float | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of `torch.optim.SGD` and of the decay, in one pass over memory.

    Args:
        params: the weights.
        grads: their gradients; divided by `grad_scale`, if given, in place (as torch's fused does).
        momentum_buffers: one for each weight; not read without `momentum`, may then be empty.
        terms, scales: the decay, see the module.
        lr: learning rate.
        momentum: coefficient of the buffers.
        dampening: the share of the gradient that does not enter the buffers.
        nesterov: whether to look ahead.
        weight_decay: the coupled weight decay of SGD, added to the gradient.
        maximize: whether to go up.
        first: whether a buffer is fresh, for all or each: it becomes the gradient, unread.
        rate: the learning rate of the decay where it is not `lr`.
        grad_scale: what the gradients were multiplied by (GradScaler).
        found_inf: if not 0, nothing at all changes.
    """
    if found_inf is not None and found_inf.item():
        return
    library = _library()
    rate = float(lr if rate is None else rate)
    scale = 0.0 if grad_scale is None else float(grad_scale.item())
    fresh = [first] * len(params) if isinstance(first, bool) else first
    streams = [params, grads, momentum_buffers] if momentum != 0 else [params, grads]
    for batch in batches(streams, read_only=() if scale else (1,), keys=scales):
        powers, rates = _live(terms, rate, batch.key)
        flags = array("B", [fresh[i] for i in batch.indices])
        _call(
            batch,
            library.pdecay_sgd,
            *(len(powers), _address(powers), _address(rates), scale, _address(flags)),
            *(lr, momentum, dampening, nesterov, weight_decay, maximize),
        )


def shrink_(params: Tensors, olds: Tensors, *, terms: Terms, lr: float) -> None:
    """The decay alone, in one pass: `params` are the updated weights, `olds` those before."""
    powers, rates = _live(terms, lr)
    if not powers:
        return
    library = _library()
    for batch in batches([params, olds], read_only=(1,)):
        _call(batch, library.pdecay_shrink, len(powers), _address(powers), _address(rates))


@functools.cache
def _library() -> ctypes.CDLL:
    library = load("step")
    types = {"d": ctypes.c_double, "i": ctypes.c_int, "n": ctypes.c_int64, "p": ctypes.c_void_p}
    # dtype, threads, tensors, sizes, data; terms, their p and c; then what is the step's own
    for name, own in (("adam", "dpidddddii"), ("sgd", "dpdddidi"), ("shrink", "")):
        function = getattr(library, f"pdecay_{name}")
        function.argtypes = [types[letter] for letter in f"iinppnpp{own}"]
    return library


def _live(
    terms: Terms, rate: float, scale: float | None = None
) -> tuple[array[float], array[float]]:
    """P and c = rate * lam of the terms that change anything."""
    rate = rate if scale is None else rate * scale
    live = [(p, rate * lam) for p, lam in terms if rate * lam != 0]
    return array("d", [p for p, _ in live]), array("d", [c for _, c in live])


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


def _call(batch: Batch, function: Callable[..., int], *arguments: float) -> None:
    if batch.dtype not in _DTYPES:
        raise ValueError(f"cannot update a weight: of dtype {batch.dtype}")
    sizes = array("q", batch.sizes)
    data = array("Q", [tensor.data_ptr() for stream in batch.streams for tensor in stream])
    status = function(
        *(_DTYPES[batch.dtype], torch.get_num_threads(), len(sizes)),
        *(_address(sizes), _address(data)),
        *arguments,
    )
    if status:
        raise KernelUnavailable(_FAILURES.get(status, f"status {status}"))
    batch.finish()


def _step_pointers(steps: Tensors) -> tuple[list[int], bool]:
    """Where the step counts lie, and whether they are float64 (as with that default dtype)."""
    dtypes = {step.dtype for step in steps}
    if not dtypes <= {torch.float32} and not dtypes <= {torch.float64}:
        raise ValueError(f"step counts must be all float32 or all float64, not {dtypes}")
    return [step.data_ptr() for step in steps], dtypes == {torch.float64}
