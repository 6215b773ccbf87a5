"""The fused steps in C, on lists of CPU tensors.

Every function changes its tensors in place. The addresses are read and checked at each call, so
that none can become stale: in C, in one pass, if all tensors are alike (:func:`table_of`), else in
Python (:class:`Batch`), with one call into C for each dtype.

`terms` is a sequence of (p, lam) pairs, and `scales` multiplies lam for each tensor (1 by default).
Where rate * lam * scale is 0, the step is the optimizer's own update. Elsewhere, results below the
smallest normal number (of float32 for half-precision weights) are written as 0.

The functions raise `KernelUnavailable` if the kernel cannot be compiled and `ValueError` for
unsupported tensors; call `why_not` first.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pdecay._native.build import KernelUnavailable, load
from pdecay._optim.kernels.layout import (
    PLAIN,
    Batch,
    Tensors,
    all_on_cpu,
    are_contiguous,
    are_plain,
    batches,
    is_dense,
    is_plain,
    local,
)

__all__ = [
    "DTYPES",
    "Call",
    "KernelUnavailable",
    "Table",
    "adam_",
    "available",
    "c_library",
    "can_read",
    "check_status",
    "decay_",
    "read_tensors",
    "sgd_",
    "table_of",
    "why_not",
]

Terms = Sequence[Sequence[float]]  # (p, lam) pairs

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # numbered as in step.c
_DTYPE_SET = {*DTYPES}
_FAILURES = {1: "this compiler has no float16", 2: "out of memory"}


def available() -> str | None:
    """Return None if the kernel is or can be compiled, else the reason."""
    try:
        c_library()
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
    if tensor.dtype not in DTYPES:
        return f"of dtype {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.dtype == torch.float16 and available() is None and not _has_float16():
        return "of dtype float16, which this C compiler does not have"
    if not is_plain(tensor) or not is_dense(tensor):
        return "not dense in memory"
    return None


def can_read(tensors: Tensors) -> bool:
    """Check quickly whether the kernel can read all tensors without a copy; dtypes may differ."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not are_contiguous(tensors) or not dtypes <= _DTYPE_SET or available() is not None:
        return False
    return torch.float16 not in dtypes or _has_float16()


class Table(NamedTuple):
    """The addresses of tensors that one call into C can read.

    Args:
        dtype: the common dtype, as in step.c.
        sizes: the number of elements of each weight.
        data: the addresses of all weights, then of all tensors of the next stream, then of all step
            counts.
        counts_dtype: the dtype of the step counts; None without them.
    """

    dtype: int
    sizes: array[int]
    data: array[int]
    counts_dtype: int | None = None


def table_of(streams: Sequence[Tensors], counts: Tensors | None = None) -> Table | None:
    """Return the addresses if all tensors are contiguous, on the CPU and of one dtype.

    The streams must have equal lengths, the weights first, with equal shapes of the tensors of one
    index. The step counts, one for each weight, have a dtype of their own, single or double. Return
    None otherwise, and for tensors that the kernel cannot read.
    """
    count = len(streams[0])
    lists = streams if counts is None else [*streams, counts]
    tensors = [*chain(*lists)]
    if not count or {*map(len, lists)} != {count} or not are_plain(tensors):
        return None
    objects = array("Q", map(id, tensors))
    sizes, data = array("q", bytes(8 * count)), array("Q", bytes(8 * len(tensors)))
    addresses = map(_address, (objects, sizes, data))
    dtypes = read_tensors(count, len(streams), *addresses, counts=counts is not None)
    dtype, counts_dtype = dtypes % len(DTYPES), dtypes // len(DTYPES)
    if dtypes < 0 or DTYPES[counts_dtype].itemsize < 4:
        return None
    return Table(dtype, sizes, data, None if counts is None else counts_dtype)


def read_tensors(
    count: int, streams: int, objects: int, sizes: int, data: int, *, counts: bool = False
) -> int:
    """Write the sizes and addresses of tensors into arrays, and return their dtype, as in step.c.

    Return -1 if they differ in dtype or shape, or are of another kind than in :func:`table_of`.

    Args:
        count: the number of weights.
        streams: the number of tensors for each weight.
        objects: the address of an array of the addresses of the tensors' Python objects.
        sizes: the address of an array for the sizes.
        data: the address of an array for the addresses.
        counts: whether `objects` ends with one step count for each weight; 4 times their dtype is
            then added to the result.
    """
    try:
        function, describe = _table_function()
        return function(describe, count, streams, count * counts, objects, sizes, data)
    except RuntimeError:  # the kernel is unavailable, or a tensor has no memory that C can read
        return -1


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
    scales: Sequence[float] | None = None,
    mean: float | None = None,
    table: Table | None = None,
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
        scales: multipliers of lam, one for each weight; 1 by default.
        mean: the mean of Adam's denominators, for the decay in Adam's metric (see
            ``adam_metric.py``); None for the decay by magnitude.
        table: the addresses of all streams, if they are known already.
    """
    library = c_library()
    rate = float(lr if rate is None else rate)
    streams = [params, grads, exp_avgs, exp_avg_sqs]
    if amsgrad:
        streams.append(max_exp_avg_sqs)
    if len(state_steps) != len(params):  # C reads one for each weight
        raise ValueError(f"got {len(state_steps)} step counts for {len(params)} weights")
    per_mean = 1 / mean if mean else 0.0
    hyper = (lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, per_mean)
    table = table or table_of(streams, state_steps)
    counts = table or table_of([state_steps], state_steps)
    copies: Tensors = ()
    if counts is not None and counts.counts_dtype is not None:
        addresses, double_steps = counts.data[-len(params) :], bool(counts.counts_dtype)
    else:
        copies = _step_counts(state_steps)
        addresses, double_steps = array("Q", map(Tensor.data_ptr, copies)), True
    for call, indices in _calls(streams, terms, rate, scales, table):
        own = addresses if indices is None else array("Q", [addresses[i] for i in indices])
        check_status(library.pdecay_adam(call, _address(own), double_steps, *hyper))
    for step, count in zip(state_steps, copies, strict=False):
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
    scales: Sequence[float] | None = None,
    table: Table | None = None,
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
        scales: multipliers of lam, one for each weight; 1 by default.
        table: the addresses of all streams, if they are known already.
    """
    library = c_library()
    rate = float(lr if rate is None else rate)
    fresh = [first] * len(params) if isinstance(first, bool) else first
    streams = [params, grads, momentum_buffers] if momentum != 0 else [params, grads]
    hyper = (lr, momentum, dampening, nesterov, weight_decay, maximize)
    for call, indices in _calls(streams, terms, rate, scales, table):
        flags = array("B", fresh if indices is None else [fresh[i] for i in indices])
        check_status(library.pdecay_sgd(call, _address(flags), *hyper))


def decay_(
    params: Tensors,
    olds: Tensors,
    *,
    terms: Terms,
    rate: float,
    scales: Sequence[float] | None = None,
    table: Table | None = None,
) -> None:
    """Decay updated weights, given their values before the update (`olds`)."""
    if rate and any(lam for _, lam in terms):
        library = c_library()
        for call, _ in _calls([params, olds], terms, rate, scales, table):
            check_status(library.pdecay_decay(call))


class Call(ctypes.Structure):
    """The struct `call` of step.c."""

    _fields_ = (
        *(("dtype", ctypes.c_int), ("threads", ctypes.c_int)),
        *(("tensors", ctypes.c_int64), ("terms", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("sizes", "data", "p", "c", "scales")),
    )


def _calls(
    streams: list[Tensors],
    terms: Terms,
    rate: float,
    scales: Sequence[float] | None,
    table: Table | None,
) -> Iterator[tuple[Any, Sequence[int] | None]]:
    """Yield the argument of each call into C, and the indices of its tensors (None for all).

    Everything is checked before the first call. After each one, converted tensors are copied back
    and the version counters of the written tensors are incremented, as by every in-place operation.
    """
    powers = array("d", [p for p, _ in terms])
    rates = array("d", [rate * lam for _, lam in terms])
    factors = array("d", scales or [1.0] * len(streams[0]))
    table = table or table_of(streams)
    if table is not None:
        yield _call_of(table, powers, rates, factors), None
        increment_version([*chain(streams[0], *streams[2:])])
        return
    parts = list(batches(streams, read_only=(1,)))
    tables = [_table_of_batch(part) for part in parts]
    for part, table in zip(parts, tables, strict=True):
        own = array("d", [factors[i] for i in part.indices])  # alive during the call
        yield _call_of(table, powers, rates, own), part.indices
        part.finish()


def _call_of(table: Table, powers: array[float], rates: array[float], scales: array[float]) -> Any:
    """Return the argument of a call into C; the arrays must stay alive during the call."""
    counts = (table.dtype, torch.get_num_threads(), len(table.sizes), len(powers))
    arrays: tuple[array[Any], ...] = (table.sizes, table.data, powers, rates, scales)
    return ctypes.byref(Call(*counts, *map(_address, arrays)))


def _table_of_batch(batch: Batch) -> Table:
    if batch.dtype not in DTYPES:
        raise ValueError(f"cannot update a weight of dtype {batch.dtype}; supported: {[*DTYPES]}")
    sizes = array("q", batch.sizes)
    data = array("Q", [tensor.data_ptr() for stream in batch.streams for tensor in stream])
    if 0 in data and any(not d and batch.sizes[i % len(sizes)] for i, d in enumerate(data)):
        raise ValueError("a weight, its gradient or its state has no memory (freed, or on meta)")
    return Table(DTYPES.index(batch.dtype), sizes, data)


@functools.cache
def c_library() -> ctypes.CDLL:
    """Return the compiled functions of step.c."""
    library = load("step")
    types = {"d": ctypes.c_double, "i": ctypes.c_int, "p": ctypes.c_void_p}
    types_of = {"adam": "ppidddddiid", "sgd": "ppdddidi"}
    types_of |= {"copy": "p", "decay": "p", "scale_updates": "ppdd"}
    for name, arguments in types_of.items():
        function = getattr(library, f"pdecay_{name}")
        function.argtypes = [types[letter] for letter in arguments]
    return library


@functools.cache
def _has_float16() -> bool:
    return bool(c_library().pdecay_has_float16())


@functools.cache
def _table_function() -> tuple[Callable[..., int], int]:
    """Return the C function that reads tensors, and torch's function that describes one.

    The former is called with Python's lock held, because the latter needs it.
    """
    library = c_library()
    function = ctypes.PyDLL(library._name, handle=library._handle).pdecay_table
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [pointer, integer, integer, integer, pointer, pointer, pointer]
    return function, _describer()


def _describer() -> int:
    """Return the address of ``dltensor_from_py_object_no_sync`` of torch's DLPack interface."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        raise KernelUnavailable("this version of torch has no DLPack exchange interface")
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    start = get_pointer(capsule, b"dlpack_exchange_api")
    major = ctypes.c_uint32.from_address(start).value
    # The version, the pointer to an older interface, and three functions precede it.
    describer = ctypes.c_void_p.from_address(start + 5 * ctypes.sizeof(ctypes.c_void_p)).value
    if major != 1 or not describer:
        raise KernelUnavailable(f"expected DLPack's exchange interface 1, torch has {major}")
    return describer


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def check_status(status: int) -> None:
    """Raise `KernelUnavailable` unless a function of step.c returned 0."""
    if status:
        raise KernelUnavailable(_FAILURES.get(status, f"status {status}"))


def _step_counts(steps: Tensors) -> Tensors:
    """Return copies of step counts that C cannot read: integers, lazy numbers, several dtypes."""
    if steps and (set(map(Tensor.numel, steps)) != {1} or not all_on_cpu(steps)):
        raise ValueError("a step count must be one number on the CPU")
    return [torch.tensor(step.item(), dtype=torch.float64, device="cpu") for step in steps]
