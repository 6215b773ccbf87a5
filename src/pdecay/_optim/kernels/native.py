"""The fused steps in C, on lists of CPU tensors.

Every function changes its tensors in place and makes one call into C for each dtype. Pointers are
collected at each call (about two microseconds a tensor), so that none can become stale.

`terms` is a sequence of (p, lam) pairs. Terms whose rate * lam is 0 are dropped; without terms the
step is the optimizer's own update. With terms, results below the smallest normal number (of float32
for half-precision weights) are written as 0.

The functions raise `KernelUnavailable` if the kernel cannot be compiled and `ValueError` for
unsupported tensors; call `why_not` first.
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
    all_on_cpu,
    batches,
    is_dense,
    is_plain,
    local,
)

__all__ = ["KernelUnavailable", "adam_", "available", "decay_", "sgd_", "why_not"]

Terms = Sequence[Sequence[float]]  # (p, lam) pairs

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as in step.c
_FAILURES = {1: "this compiler has no float16", 2: "out of memory"}


def available() -> str | None:
    """Return None if the kernel is or can be compiled, else the reason."""
    try:
        _library()
    except KernelUnavailable as reason:
        return str(reason)
    return None


def why_not(tensor: Tensor) -> str | None:
    """Return why the kernel cannot update this weight; None if it can."""
    tensor = local(tensor)
    if type(tensor) not in PLAIN:
        return f"a {type(tensor).__name__}"
    if tensor.device.type != "cpu":
        return f"on device {tensor.device.type}"
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
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    rate: float | None = None,
) -> None:
    """Run one step of `torch.optim.AdamW` and the decay in one pass over memory.

    Args:
        params: the weights.
        grads: their gradients.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        max_exp_avg_sqs: maxima of the second moments; may be empty without `amsgrad`.
        state_steps: step counts on the CPU, which are incremented here.
        terms: (p, lam) pairs of the decay.
        lr: learning rate.
        beta1: coefficient of the first moments.
        beta2: coefficient of the second moments.
        eps: added to the root of the second moments.
        weight_decay: the decoupled weight decay of AdamW.
        amsgrad: whether to divide by the maxima of the second moments.
        maximize: whether to ascend.
        rate: the learning rate of the decay; `lr` by default.
    """
    library = _library()
    rate = float(lr if rate is None else rate)
    streams = [params, grads, exp_avgs, exp_avg_sqs]
    if amsgrad:
        streams.append(max_exp_avg_sqs)
    steps = _step_counts(state_steps)
    pointers = [step.data_ptr() for step in steps]
    double_steps = bool(steps) and steps[0].dtype == torch.float64
    powers, rates = _nonzero_terms(terms, rate)
    for batch in list(batches(streams, read_only=(1,))):  # check all before any weight changes
        counts = array("Q", [pointers[i] for i in batch.indices])
        _call(
            batch,
            library.pdecay_adam,
            *(len(powers), _address(powers), _address(rates)),
            *(_address(counts), double_steps),
            *(lr, beta1, beta2, eps, weight_decay, amsgrad, maximize),
        )
    for step, count in zip(state_steps, steps, strict=True):
        if count is not step:
            step.copy_(count)


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    terms: Terms,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    first: bool | Sequence[bool] = False,
    rate: float | None = None,
) -> None:
    """Run one step of `torch.optim.SGD` and the decay in one pass over memory.

    Args:
        params: the weights.
        grads: their gradients.
        momentum_buffers: one for each weight; may be empty without `momentum`.
        terms: (p, lam) pairs of the decay.
        lr: learning rate.
        momentum: coefficient of the buffers.
        dampening: the fraction of the gradient that is not added to the buffers.
        nesterov: whether to use Nesterov momentum.
        weight_decay: the coupled weight decay of SGD, added to the gradient.
        maximize: whether to ascend.
        first: whether the buffers are uninitialised (written, not read), for all or for each.
        rate: the learning rate of the decay; `lr` by default.
    """
    library = _library()
    rate = float(lr if rate is None else rate)
    fresh = [first] * len(params) if isinstance(first, bool) else first
    streams = [params, grads, momentum_buffers] if momentum != 0 else [params, grads]
    powers, rates = _nonzero_terms(terms, rate)
    for batch in list(batches(streams, read_only=(1,))):
        flags = array("B", [fresh[i] for i in batch.indices])
        _call(
            batch,
            library.pdecay_sgd,
            *(len(powers), _address(powers), _address(rates), _address(flags)),
            *(lr, momentum, dampening, nesterov, weight_decay, maximize),
        )


def decay_(params: Tensors, olds: Tensors, *, terms: Terms, rate: float) -> None:
    """Decay updated weights, given their values before the update (`olds`)."""
    powers, rates = _nonzero_terms(terms, rate)
    if not powers:
        return
    library = _library()
    for batch in list(batches([params, olds], read_only=(1,))):
        _call(batch, library.pdecay_decay, len(powers), _address(powers), _address(rates))


@functools.cache
def _library() -> ctypes.CDLL:
    library = load("step")
    types = {"d": ctypes.c_double, "i": ctypes.c_int, "n": ctypes.c_int64, "p": ctypes.c_void_p}
    # common: dtype, threads, number of tensors, sizes, data, number of terms, p, c
    for name, extra in (("adam", "pidddddii"), ("sgd", "pdddidi"), ("decay", "")):
        function = getattr(library, f"pdecay_{name}")
        function.argtypes = [types[letter] for letter in f"iinppnpp{extra}"]
    return library


def _nonzero_terms(terms: Terms, rate: float) -> tuple[array[float], array[float]]:
    """Return p and c = rate * lam of the terms whose c is not 0."""
    nonzero = [(p, rate * lam) for p, lam in terms if rate * lam != 0]
    return array("d", [p for p, _ in nonzero]), array("d", [c for _, c in nonzero])


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


def _call(batch: Batch, function: Callable[..., int], *arguments: float) -> None:
    if batch.dtype not in _DTYPES:
        raise ValueError(f"cannot update a weight of dtype {batch.dtype}; supported: {[*_DTYPES]}")
    sizes = array("q", batch.sizes)
    data = array("Q", [tensor.data_ptr() for stream in batch.streams for tensor in stream])
    if 0 in data and any(not d and batch.sizes[i % len(sizes)] for i, d in enumerate(data)):
        raise ValueError("a weight, its gradient or its state has no memory (freed, or on meta)")
    status = function(
        *(_DTYPES[batch.dtype], torch.get_num_threads(), len(sizes)),
        *(_address(sizes), _address(data)),
        *arguments,
    )
    if status:
        raise KernelUnavailable(_FAILURES.get(status, f"status {status}"))
    batch.finish()


def _step_counts(steps: Tensors) -> Tensors:
    """Return the step counts in one dtype that C reads: float32 or float64, else as copies."""
    if steps and (set(map(Tensor.numel, steps)) != {1} or not all_on_cpu(steps)):
        raise ValueError("a step count must be one number on the CPU")
    dtypes = {step.dtype for step in steps}
    if dtypes <= {torch.float32} or dtypes <= {torch.float64}:
        return steps
    return [step.double() for step in steps]  # integers, or a mixture
