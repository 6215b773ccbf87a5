"""Whether two models give the same outputs, and where two runs part."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pdecay.deployment.compact.plan import Plan
from pdecay.deployment.compact.trace import Call, Trace, Value, tensors_of
from pdecay.deployment.model.inputs import Inputs

TOLERANCE = 1e-5  # relative to the largest element of an output


@torch.no_grad()
def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What a model returns, as a list of tensors."""
    return [tensor.clone() for tensor in tensors_of(inputs.call(model))]


def difference(expected: list[Tensor], got: list[Tensor]) -> float:
    """The largest difference of two lists of outputs, each relative to its largest element.

    Infinity where anything but numbers differs: shapes, types, where NaN and infinity stand.
    """
    if len(expected) != len(got):
        return float("inf")
    pairs = zip(expected, got, strict=True)
    return max((_difference(one, other) for one, other in pairs), default=0.0)


def agree(expected: list[Tensor], got: list[Tensor], slack: float = 1.0) -> bool:
    """Whether all outputs are the same to 1e-5, times `slack`.

    In a number format with less than that, to eight of its rounding errors.
    """
    if len(expected) != len(got):
        return False
    return all(
        _difference(one, other) <= slack * max(TOLERANCE, 8 * _rounding(one))
        for one, other in zip(expected, got, strict=True)
    )


def agree_in_float64(model: nn.Module, other: nn.Module, inputs: Inputs) -> bool:
    """Whether two models give the same outputs where rounding errors hardly count.

    A deep network in float32 may be further off from itself than two models are to be from each
    other. False where they do not run in float64.
    """
    try:
        expected, got = (
            outputs(copy.deepcopy(one).double(), inputs.double()) for one in (model, other)
        )
    except Exception:
        return False
    return agree(expected, got)


@torch.no_grad()
def parting(plan: Plan, trace: Trace, run: Trace) -> int | None:
    """The first operation of a trace in which a smaller model's run is not as planned.

    None where all are. A run that failed parts where it ended, at the latest.
    """
    ours, theirs = _comparable(plan, trace), _comparable(plan, run)
    for (at, call), (_, other) in zip(ours, theirs, strict=False):
        if call.op is not other.op:
            return at
        for value, got in zip(call.outs, other.outs, strict=True):
            less, live = _less(plan, value, value.tensor), _less(plan, value, value.live)
            if less.shape != got.tensor.shape:
                return at
            # Rounding errors may be larger on the way than in the outputs.
            if not call.unfilled and not agree([less[live]], [got.tensor[live]], slack=100):
                return at
    return ours[len(theirs)][0] if len(theirs) < len(ours) else None


def _comparable(plan: Plan, trace: Trace) -> list[tuple[int, Call]]:
    """The operations with their numbers, but for those of layers whose biases took constants over.

    A layer with a bias runs others than one without, and its sums are less before the bias.
    """
    shifted = {weight.rpartition(".")[0] for weight in plan.shifts}
    calls = enumerate(trace.calls)
    return [(at, call) for at, call in calls if not shifted.intersection(call.modules[-1:])]


def _less(plan: Plan, value: Value, tensor: Tensor) -> Tensor:
    for axis, places in enumerate(value.places):
        kept = plan.kept(places)
        if len(kept) != tensor.shape[axis]:
            tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor


def _rounding(tensor: Tensor) -> float:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if numbers else 0.0


def _difference(expected: Tensor, got: Tensor) -> float:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if not _rounding(expected):
        return 0.0 if torch.equal(expected, got) else float("inf")
    finite = expected.isfinite()
    same_elsewhere = torch.equal(finite, got.isfinite()) and torch.allclose(
        expected[~finite], got[~finite], equal_nan=True
    )
    if not same_elsewhere:
        return float("inf")
    if not finite.any():
        return 0.0
    expected, got = expected[finite], got[finite]
    off = float((expected - got).abs().max())
    scale = float(expected.abs().max())
    return off / scale if scale else (float("inf") if off else 0.0)
