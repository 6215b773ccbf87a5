"""A model's output tensors, and the comparison of two models by their outputs."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pdecay.deployment.model.state import keeping_buffers, shared_copy

if TYPE_CHECKING:
    from pdecay.deployment.model.inputs import Inputs

TOLERANCE = 1e-5  # relative to the largest element of an output

# Masked elements are at least so large, nearly equal, and much larger than all others.
_LEAST_MASK, _MASKED_SPREAD, _MASK_GAP = 5e3, 0.99, 0.01


def tensors_of(output: object) -> Iterator[Tensor]:
    """Yield the tensors in a model's output, also in containers and in attributes of objects.

    Objects are for example dataclasses and the distributions of ``torch.distributions``. Those of
    the transformers package, such as a key-value cache, are skipped, and so are modules.
    """
    return (one for one in objects_in(output) if isinstance(one, Tensor))


def objects_in(output: object, seen: dict[int, object] | None = None) -> Iterator[object]:
    """Yield an object and all that it contains, except the parts of tensors, types and modules.

    The parts of an object are yielded once; `seen` keeps such objects alive.
    """
    seen = {} if seen is None else seen
    yield output
    if id(output) not in seen and not isinstance(output, type | Tensor | nn.Module):
        seen[id(output)] = output
        for value in _parts(output):
            yield from objects_in(value, seen)


def _parts(output: object) -> list[object]:
    """Return the elements of a container, or the values of an object's attributes."""
    if isinstance(output, Mapping):
        return list(output.values())
    if isinstance(output, tuple | list | set | frozenset | deque):
        return list(output)
    if type(output).__module__.partition(".")[0] == "transformers":
        return []
    slots = [name for kind in type(output).__mro__ for name in getattr(kind, "__slots__", ())]
    names = dict.fromkeys((*getattr(output, "__dict__", ()), *slots))
    return [getattr(output, name, None) for name in names]


def attribute_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return the tensors in the attributes of all modules, also in objects, by id.

    Code may store a result there instead of returning it, such as a loss or features.
    """
    found = tensors_of([vars(module) for module in model.modules()])
    return {id(tensor): tensor for tensor in found}


@contextlib.contextmanager
def without_writes_to(model: nn.Module, error: type[Exception]) -> Iterator[None]:
    """Raise an error if copies of a model that run here store tensors in the model itself.

    Copies share functions with the model, and the containers that these functions were made with.
    A hook of a copy may write its features there, and the copy read old ones in its own container.
    """
    before = attribute_tensors(model)
    try:
        yield
    except Exception as cause:
        _check_attributes(model, before, error, cause)
        raise
    _check_attributes(model, before, error, None)


def _check_attributes(
    model: nn.Module, before: dict[int, Tensor], error: type[Exception], cause: Exception | None
) -> None:
    if attribute_tensors(model).keys() != before.keys():
        raise error(
            "a copy of the model stores tensors in the attributes of the original: a function such "
            "as a forward hook refers to a container or module from outside, so that copies share "
            "it. Use a method that stores them in self instead, for example "
            "layer.register_forward_hook(self.keep_features)"
        ) from cause


@torch.no_grad()
def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Run a model and return copies of its output tensors."""
    return [tensor.clone() for tensor in tensors_of(inputs.call(model))]


def outputs_of_two_calls(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the outputs of two calls in a row: a model may remember something of the first."""
    with keeping_buffers(model):
        return [*outputs(model, inputs), *outputs(model, inputs)]


def fresh_outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Run a copy of a model in eval mode and return its output tensors.

    A run may store something that depends on its inputs, such as a smaller window for a small
    image. With copies, a check of other inputs does not change the results of later runs.
    """
    return outputs(shared_copy(model), inputs)


def difference(expected: list[Tensor], got: list[Tensor]) -> float:
    """Return the largest difference of two lists of outputs, relative to each largest element.

    Elements that are masked with a large number do not count as largest. The difference is
    infinite if the numbers, shapes or dtypes of the tensors differ, if integer or bool tensors are
    not equal, or if NaN and infinity are at different positions.
    """
    if len(expected) != len(got):
        return float("inf")
    pairs = zip(expected, got, strict=True)
    return max((_difference(one, other) for one, other in pairs), default=0.0)


def agree(expected: list[Tensor], got: list[Tensor], slack: float = 1.0) -> bool:
    """Return whether all outputs are equal up to ``TOLERANCE * slack``.

    Dtypes of low precision are compared up to eight rounding errors if that is more.
    """
    if len(expected) != len(got):
        return False
    return all(
        _difference(one, other) <= slack * max(TOLERANCE, 8 * _rounding(one))
        for one, other in zip(expected, got, strict=True)
    )


def is_precise(tensor: Tensor) -> bool:
    """Return whether rounding errors of a tensor's dtype are below the tolerance."""
    return _rounding(tensor) < TOLERANCE


def agree_in_float64(
    model: nn.Module, other: nn.Module, inputs: Inputs, *, default: bool = False
) -> bool:
    """Return whether two models agree when both run in float64.

    Rounding errors of a deep network in float32 may exceed the tolerance even if both models
    compute the same function. Return the default if a model does not run in float64.
    """
    try:
        expected, got = (
            outputs(copy.deepcopy(one).double(), inputs.double()) for one in (model, other)
        )
    except Exception:
        return default
    return agree(expected, got)


def _rounding(tensor: Tensor) -> float:
    inexact = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if inexact else 0.0


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
    return _relative_difference(expected[finite], got[finite]) if finite.any() else 0.0


def _relative_difference(expected: Tensor, got: Tensor) -> float:
    """Return the largest difference of finite elements, relative to the largest of them.

    Elements that a model masks with a number such as -1e9 are compared on their own: next to them,
    the differences of all other elements would look small.
    """
    size = expected.abs()
    scale = float(size.max())
    others = size < _MASKED_SPREAD * scale
    largest = float(size[others].max()) if others.any() else 0.0
    if scale >= _LEAST_MASK and 0 < largest < _MASK_GAP * scale:
        parts = ((expected[mask], got[mask]) for mask in (others, ~others))
        return max(_relative_difference(*part) for part in parts)
    error = float((expected - got).abs().max())
    return error / scale if scale else (float("inf") if error else 0.0)
