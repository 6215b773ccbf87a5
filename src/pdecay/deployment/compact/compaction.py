"""compact: the steps, and the checks around them."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pdecay._core.parameters import owners_of
from pdecay.deployment.compact import carry
from pdecay.deployment.compact.analysis import Analysis, analyse
from pdecay.deployment.compact.attention import with_free_heads
from pdecay.deployment.compact.fitting import Fitting
from pdecay.deployment.compact.leftovers import left_units
from pdecay.deployment.compact.plan import Biases, Plan, plan
from pdecay.deployment.compact.report import CompactReport, SmallerTensor
from pdecay.deployment.compact.surgery import Kept, cut, kept_by
from pdecay.deployment.compact.trace import Trace, record
from pdecay.deployment.model.errors import CompactError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import (
    TOLERANCE,
    agree,
    agree_in_float64,
    difference,
    outputs,
)

_OTHER_INPUTS = 2  # that a smaller model is checked on, beside the example


@overload
def compact(
    model: nn.Module, example_inputs: Any, *, optimizer: None = None, fold: bool = True
) -> nn.Module: ...
@overload
def compact(
    model: nn.Module, example_inputs: Any, *, optimizer: Optimizer, fold: bool = True
) -> tuple[nn.Module, Optimizer]: ...
def compact(
    model: nn.Module,
    example_inputs: Any,
    *,
    optimizer: Optimizer | None = None,
    fold: bool = True,
) -> nn.Module | tuple[nn.Module, Optimizer]:
    """Remove every unit that contributes nothing. What the model computes stays the same.

    Removed are neurons, channels, attention heads and embedding dimensions that nothing reads,
    that are always zero, or that are constant, whose constant moves into the biases of the layers
    that read it. A unit goes from all tensors at once; one that shares a residual connection, a
    group or a head with units that are alive stays. The model is a copy of the same class with
    smaller layers; the original is left as it is.

    Args:
        model: the model, as it was trained; exact zeros count (:func:`pdecay.prune_` makes them).
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments. The model
            runs on it, in eval mode: what this example does not reach is left alone.
        optimizer: the optimizer of this model, whose state shall be taken along.
        fold: whether constants may move into biases. Without it only what is unread or zero goes.

    Returns:
        The smaller model; with `optimizer`, a pair of it and a copy of the optimizer for it. The
        model has a ``compact_report`` that says what was removed, and what stayed and why.

    Raises:
        CompactError: if the model does not run on the example, or the smaller model's outputs are
            not the same to 1e-5 of the largest. Nothing is changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model[2].weight.data[:, :3] = 0
        >>> smaller = compact(model, torch.randn(1, 4))
        >>> smaller[0]
        Linear(in_features=4, out_features=5, bias=True)
        >>> smaller.compact_report.removed
        {'nothing reads it': 3}
    """
    inputs = Inputs.of(example_inputs)
    _check(model)
    biases = Biases.NEW if optimizer is None else Biases.OWN
    if optimizer is not None:
        carry.check(optimizer, model)
    with torch.random.fork_rng(devices=_accelerators(model)), torch.inference_mode(False):
        removal = _Removal(model, inputs, biases if fold else Biases.NONE)
        made = removal.run()
    if optimizer is None:
        return made
    return made, carry.carried(optimizer, model, made, removal.kept)


class _Removal:
    """Rounds of removal on a copy of a model, until there is nothing more to remove.

    One round finds nearly all. Another one sees what only the first made unread: a constant that
    had to stay for a unit which went as a constant itself.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, biases: Biases) -> None:
        self.model = model
        self.inputs = inputs
        self.biases = biases
        self.kept: Kept = {}
        self.removed: Counter[str] = Counter()

    def run(self) -> nn.Module:
        current = self._copy()
        checks = self._checks(current)
        with_free_heads(current)
        found = self._analysed(current)
        made = plan(found, current, self.biases)
        while made.gone:
            fitted = Fitting(current, self.inputs, found.trace, made).fit()
            if fitted is not None:
                self._note(made, found.trace)
                current = fitted
                found = self._analysed(current)
            # Else some units have to stay, and the next plan is one without them.
            made = plan(found, current, self.biases)
        off = self._checked(current, checks)
        self._restore(current)
        current.compact_report = self._report(current, found, made, off)  # type: ignore[assignment]
        return current

    def _restore(self, current: nn.Module) -> None:
        """Modes as they were; and buffers, which a model may count its runs in."""
        before = {
            id(buffer): cut(buffer, self.kept[name]) if name in self.kept else buffer.clone()
            for name, buffer in self.model.named_buffers()
        }
        for prefix, module in self.model.named_modules():
            twin = current.get_submodule(prefix)
            twin.training = module.training
            for name, buffer in module._buffers.items():  # one of several modules stays one
                twin._buffers[name] = None if buffer is None else before[id(buffer)]

    def _copy(self) -> nn.Module:
        try:
            return copy.deepcopy(self.model).eval()
        except Exception as error:
            raise CompactError(
                f"the model cannot be copied ({error}): remove what holds tensors with a gradient, "
                "for instance torch.nn.utils.prune.remove(layer, 'weight')"
            ) from error

    def _checks(self, current: nn.Module) -> list[tuple[Inputs, list[Tensor]]]:
        """The example and a few inputs like it, each with what the model returns."""
        try:
            expected = outputs(current, self.inputs)
        except Exception as error:
            raise CompactError(f"the model does not run on example_inputs: {error}") from error
        if not expected:
            raise CompactError("the model returns no tensors: there is nothing to compare")
        if not agree(expected, outputs(current, self.inputs)):
            raise CompactError(
                "the model returns something else each time, in eval mode and on the same inputs: "
                "nothing could be compared"
            )
        checks = [(self.inputs, expected)]
        for seed in range(_OTHER_INPUTS):
            others = self.inputs.randomized(torch.Generator().manual_seed(seed))
            # The model may refuse what it was not given: token ids in any order, for instance.
            with contextlib.suppress(Exception):
                checks.append((others, outputs(current, others)))
        return checks

    def _analysed(self, current: nn.Module) -> Analysis:
        trace = record(current, self.inputs)
        if trace.error is not None:
            raise CompactError(f"the model cannot be traced: {trace.error}") from trace.error
        return analyse(trace, _untouchable(current))

    def _note(self, made: Plan, trace: Trace) -> None:
        """Remember what went, in the numbers that the model had at first."""
        self.removed.update(made.gone.values())
        names = {name for name, _ in _tensors(self.model)}
        for name, indices in kept_by(made, trace).items():
            if name not in names:
                continue  # a bias that was added for the constants of a round before
            before = self.kept.get(name)
            self.kept[name] = tuple(
                own if before is None else before[axis][own] for axis, own in enumerate(indices)
            )

    def _checked(self, current: nn.Module, checks: list[tuple[Inputs, list[Tensor]]]) -> float:
        off = 0.0
        for inputs, expected in checks:
            got = outputs(current, inputs)
            off = max(off, difference(expected, got))
            if not agree(expected, got) and not agree_in_float64(self._copy(), current, inputs):
                raise CompactError(
                    f"the smaller model's outputs differ by {off:.1e} of the largest, more than "
                    f"{TOLERANCE:g}. Please report this model; fold=False removes less"
                )
        return off

    def _report(self, current: nn.Module, found: Analysis, made: Plan, off: float) -> CompactReport:
        before = {name: tuple(value.shape) for name, value in _tensors(self.model)}
        after = {name: tuple(value.shape) for name, value in _tensors(current)}
        return CompactReport(
            removed=dict(sorted(self.removed.items())),
            tensors=tuple(SmallerTensor(name, before[name], after[name]) for name in self.kept),
            left=tuple(left_units(found, made, self.kept)),
            unknown=tuple(dict.fromkeys((*map(_named, _recurrent(current)), *found.unknown))),
            parameters=(_count(self.model), _count(current)),
            difference=off,
        )


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compact needs a torch.nn.Module, got {type(model).__name__}")
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise CompactError(f"a {kind} has no layers that could be smaller: compact the original")
    if hasattr(model, "_orig_mod"):
        raise CompactError("a compiled model is fixed to its sizes: compact it, then compile it")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise CompactError(f"{kind} wraps the model: give its .module")
    for name, tensor in _tensors(model):
        if is_lazy(tensor):
            raise CompactError(f"{name} has no size yet: run the model once before")
        if tensor.is_meta or hasattr(tensor, "full_tensor"):
            raise CompactError(f"{name} is not here as a whole: load or gather the model before")


def _untouchable(model: nn.Module) -> dict[str, str]:
    """Parameters that stay as they are, with the reason."""
    keep = {
        name: _named(prefix)
        for prefix in _recurrent(model)
        for name, _ in model.get_submodule(prefix).named_parameters(prefix)
    }
    for _, owners in owners_of(model):
        if len(owners) > 1 and any(isinstance(owner, nn.Embedding) for _, owner in owners):
            keep[owners[0][0]] = "the embedding is tied to another layer"
    return keep


def _recurrent(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            yield name


def _named(recurrent: str) -> str:
    return f"{recurrent or 'the model'} is recurrent"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _accelerators(model: nn.Module) -> list[torch.device]:
    return list({tensor.device for _, tensor in _tensors(model) if tensor.device.type == "cuda"})
