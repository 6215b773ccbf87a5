"""`compact`: rounds of removal on a copy of the model, and the checks before and after."""

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
from pdecay.deployment.compact.analysis import Analysis, analyse
from pdecay.deployment.compact.attention import replace_attention
from pdecay.deployment.compact.fitting import Fitting
from pdecay.deployment.compact.optimizer import check_optimizer, copy_optimizer
from pdecay.deployment.compact.removal import Biases, Removal, choose_removal
from pdecay.deployment.compact.report import CompactReport, SmallerTensor, kept_units
from pdecay.deployment.compact.shrink import KeptPositions, kept_positions, optimizers_in
from pdecay.deployment.compact.trace import Trace, record
from pdecay.deployment.model.errors import CompactError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import (
    TOLERANCE,
    agree,
    agree_in_float64,
    difference,
    fresh_outputs,
    outputs,
    without_writes_to,
)
from pdecay.deployment.model.state import check_plain

_RANDOM_CHECKS = 2  # random inputs that the smaller model is checked on, besides the example


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
    """Remove all dead units of a model. The smaller model computes the same function.

    A unit is a neuron, a channel, an attention head or an embedding dimension. It is dead if
    nothing reads it, if it is always zero, or if it is constant. Constants are folded into the
    biases of the layers that read them. A unit is removed from all tensors at once. Dead units that
    share a residual connection, a group or a head with live units are kept. The result is a copy of
    the same class with smaller layers; the original is not changed.

    Args:
        model: the trained model. Only weights that are exactly zero count; :func:`pdecay.prune_`
            sets small weights to zero.
        example_inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or a pair of
            both, ``((x,), {"mask": mask})``. The model runs on it in eval mode. The result is the
            same function along the code that runs on this example; it is also checked with one row,
            with twice the rows, with other numbers and, where the model takes it, with half, one,
            one less and twice of each other size. Layers that do not run on the example are not
            changed, so that they may not fit the smaller layers before them; the report names them.
        optimizer: the optimizer of this model, whose state is carried over.
        fold: whether constants may be folded into biases. If False, constant units are kept.

    Returns:
        The smaller model; with `optimizer`, a pair of the model and a copy of the optimizer for it.
        The model's ``compact_report`` (:class:`pdecay.CompactReport`) lists the removed units and
        the dead units that were kept, with the reasons.

    Raises:
        CompactError: if the model does not run on the example, or if the outputs of the smaller
            model differ by more than 1e-5 of the largest element, for the example or for another
            size of the inputs. Nothing is changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model[2].weight.data[:, :3] = 0
        >>> smaller = compact(model, torch.randn(1, 4))
        >>> smaller[0]
        Linear(in_features=4, out_features=5, bias=True)
        >>> smaller.compact_report.removed
        {'unread': 3}
    """
    inputs = Inputs.of(example_inputs)
    _check_model(model)
    has_optimizer = optimizer is not None or bool(optimizers_in(model))
    biases = Biases.EXISTING if has_optimizer else Biases.ANY
    if optimizer is not None:
        check_optimizer(optimizer, model)
    with torch.random.fork_rng(devices=_accelerators(model)), torch.inference_mode(False):
        compaction = _Compaction(model, inputs, biases if fold else Biases.NONE)
        smaller = compaction.run()
    if optimizer is None:
        return smaller
    return smaller, copy_optimizer(optimizer, model, smaller, compaction.kept)


class _Compaction:
    """Rounds of removal on a copy of a model, until no more units can be removed.

    The first round finds nearly all dead units. Its removals may make further units unread: for
    example a constant unit whose only consumer was another constant unit.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, biases: Biases) -> None:
        self.model = model
        self.inputs = inputs
        self.biases = biases
        self.kept: KeptPositions = {}  # as indices of the original model
        self.removed: Counter[str] = Counter()

    def run(self) -> nn.Module:
        """Return the smaller model with its report."""
        # Run only copies: the first call of a model may fill buffers and set a flag for that.
        current = self._copy()
        with without_writes_to(self.model, CompactError):
            expected = self._expected_outputs()
        has_new_layers = replace_attention(current)
        analysis = self._analyse(current)
        removal = choose_removal(analysis, current, self.biases)
        while removal.dead:
            smaller = Fitting(current, self.inputs, analysis.trace, removal).fit()
            if smaller is not None:
                self._update_kept(removal, analysis.trace)
                current = smaller
                analysis = self._analyse(current)
            # Otherwise the analysis now keeps some units, and the next removal is without them.
            removal = choose_removal(analysis, current, self.biases)
        error = 0.0
        if self.kept or has_new_layers:  # otherwise it is a copy of the model
            error = self._check_outputs(current, expected)
        for prefix, module in self.model.named_modules():
            current.get_submodule(prefix).training = module.training
        report = self._report(current, analysis, removal, error)
        current.compact_report = report  # type: ignore[assignment]
        return current

    def _copy(self) -> nn.Module:
        try:
            return copy.deepcopy(self.model).eval()
        except Exception as error:
            raise CompactError(
                f"the model cannot be copied ({error}): remove attributes that hold tensors with a "
                "gradient history, for instance torch.nn.utils.prune.remove(layer, 'weight')"
            ) from error

    def _expected_outputs(self) -> list[Tensor]:
        """Return the model's outputs for the example."""
        original = self._copy()
        try:
            expected = outputs(original, self.inputs)
        except Exception as error:
            hint = ""
            if self.inputs.kwargs and not self.inputs.args:
                hint = (
                    " (a dict gives keyword arguments; for a model that takes a dict, give a "
                    "tuple with it, (batch,))"
                )
            raise CompactError(
                f"the model does not run on example_inputs: {error}{hint}"
            ) from error
        if not expected:
            raise CompactError(
                "the model returns no tensors, so that its outputs cannot be compared"
            )
        if not agree(expected, outputs(original, self.inputs)):
            raise CompactError(
                "the model returns different outputs for the same inputs in eval mode, so that "
                "they cannot be compared: turn off its randomness, or the memory of earlier calls"
            )
        return expected

    def _analyse(self, current: nn.Module) -> Analysis:
        trace = record(current, self.inputs)
        if trace.error is not None:
            raise CompactError(f"the model cannot be traced: {trace.error}") from trace.error
        for value in trace.values:
            check_plain("a tensor in the forward", value.tensor, "compact", CompactError)
        # A unit may be constant only for the numbers of the example, such as a scale.
        for inputs in self.inputs.other_numbers(in_tensors=trace.reads_numbers):
            # Functions with a cache must not keep tensors of a recorded run, which are wrapped.
            with contextlib.suppress(Exception):
                outputs(copy.deepcopy(current), inputs)
            trace.mark_changed(record(current, inputs))
        return analyse(trace, _fixed_tensors(current))

    def _update_kept(self, removal: Removal, trace: Trace) -> None:
        """Translate the kept positions of a round to indices of the original model."""
        self.removed.update(removal.dead.values())
        names = {name for name, _ in _tensors(self.model)}
        for name, indices in kept_positions(removal, trace).items():
            if name not in names:
                continue  # a bias that an earlier round added
            before = self.kept.get(name)
            self.kept[name] = tuple(
                own if before is None else before[axis][own] for axis, own in enumerate(indices)
            )

    def _check_outputs(self, current: nn.Module, expected_outputs: list[Tensor]) -> float:
        """Return the largest difference of the outputs; raise if it is too large.

        The models run on the example and on other inputs like it.
        """
        error = 0.0
        smaller = copy.deepcopy(current)
        checks = [(self.inputs, expected_outputs)]
        generators = [torch.Generator().manual_seed(seed) for seed in range(_RANDOM_CHECKS)]
        random = [self.inputs.randomized(generator) for generator in generators]
        original = self._copy()
        numbers = self.inputs.other_numbers()
        for inputs in (*random, *self.inputs.other_sizes(), *numbers):
            # The model may reject them, for example token ids in another order.
            with contextlib.suppress(Exception):
                checks.append((inputs, fresh_outputs(original, inputs)))
        for inputs, expected in checks:
            try:
                got = fresh_outputs(smaller, inputs)
            except Exception as failed:
                if any(inputs is one for one in numbers):
                    continue  # the number chooses layers that did not run on the example
                raise CompactError(
                    f"the smaller model does not run{self._other_size(inputs)}: {failed}"
                ) from failed
            error = max(error, difference(expected, got))
            if not agree(expected, got) and not agree_in_float64(original, smaller, inputs):
                remedy = self._other_size(inputs)
                if any(inputs is one for one in numbers):
                    remedy = (
                        " for another number in example_inputs, with which the model computes a "
                        "unit that is constant otherwise: give the number as a tensor and compute "
                        "with it as a tensor (without item()), or try fold=False"
                    )
                remedy = remedy or ": try fold=False, and please report this model"
                raise CompactError(
                    f"the smaller model's outputs differ by {error:.1e} of the largest element, "
                    f"more than {TOLERANCE:g}{remedy}"
                )
        return error

    def _other_size(self, inputs: Inputs) -> str:
        """Return a description of inputs whose sizes differ from the example's."""
        pairs = zip(inputs.tensors, self.inputs.tensors, strict=True)
        changed = [(list(a.shape), list(b.shape)) for a, b in pairs if a.shape != b.shape]
        if not changed:
            return ""
        given, example = changed[0]
        return (
            f" on an input of shape {given} instead of {example}, where the model's code takes "
            "another branch or computes with the size (compact follows the branches of "
            "example_inputs: move the branch out of the model, or try fold=False)"
        )

    def _report(
        self, current: nn.Module, analysis: Analysis, removal: Removal, error: float
    ) -> CompactReport:
        before = {name: tuple(value.shape) for name, value in _tensors(self.model)}
        after = {name: tuple(value.shape) for name, value in _tensors(current)}
        recurrent = _recurrent_modules(current)
        return CompactReport(
            removed=dict(sorted(self.removed.items())),
            tensors=tuple(SmallerTensor(name, before[name], after[name]) for name in self.kept),
            kept=tuple(kept_units(analysis, removal, self.kept)),
            unknown=tuple(dict.fromkeys((*map(_is_recurrent, recurrent), *analysis.unknown))),
            unused=tuple(_unused_modules(current, analysis.trace)),
            parameters=(_count(self.model), _count(current)),
            difference=error,
        )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compact needs a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CompactError(
                f"{name or 'the model'} is a {type(module).__name__}, which has no layers that can "
                "be resized: compact the original model"
            )
    if hasattr(model, "_orig_mod"):
        raise CompactError(
            "the model is compiled: compact the original model, then compile the result"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise CompactError(f"{type(model).__name__} is a wrapper: give its .module")
    for name, tensor in _tensors(model):
        if is_lazy(tensor):
            raise CompactError(f"{name} is not initialized: run the model once before compact")
        if tensor.is_meta or hasattr(tensor, "full_tensor"):
            raise CompactError(
                f"{name} is on the meta device or sharded: load or gather it before compact"
            )
        check_plain(name, tensor, "compact", CompactError)


def _fixed_tensors(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters that must keep their sizes, with the reason."""
    keep = {
        name: _is_recurrent(prefix)
        for prefix in _recurrent_modules(model)
        for name, _ in model.get_submodule(prefix).named_parameters(prefix)
    }
    for _, owners in owners_of(model):
        if len(owners) > 1 and any(isinstance(owner, nn.Embedding) for _, owner in owners):
            keep[owners[0][0]] = "the embedding is tied to another layer"
    return keep


def _unused_modules(model: nn.Module, trace: Trace) -> Iterator[str]:
    """Yield the names of modules whose own parameters the recorded run did not read."""
    used = {value.name for call in trace.calls for value in call.ins}
    first_names = {id(param): name for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        own = [first_names[id(param)] for param in module.parameters(recurse=False)]
        if own and used.isdisjoint(own):
            yield name


def _recurrent_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            yield name


def _is_recurrent(module: str) -> str:
    return f"{module or 'the model'} is recurrent"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _accelerators(model: nn.Module) -> list[torch.device]:
    return list({tensor.device for _, tensor in _tensors(model) if tensor.device.type == "cuda"})
