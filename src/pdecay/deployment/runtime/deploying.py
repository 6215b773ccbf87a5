"""A trained model made fast: compacted, and each layer dense or sparse, whichever is faster."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map

from pdecay.deployment.compact import CompactError, compact
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear, why_not
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs
from pdecay.deployment.model.state import shared_copy, total_nbytes
from pdecay.deployment.runtime.fusing import fuse
from pdecay.deployment.runtime.report import DeployedLayer, DeployReport
from pdecay.deployment.runtime.timing import interleaved
from pdecay.deployment.runtime.wiring import (
    LAYERS,
    Input,
    Wiring,
    calls,
    has_hooks,
    wiring,
)

__all__ = ["DeployReport", "DeployedLayer", "deploy"]

Chosen = Literal["sparse", "smaller", "dense"]

_FEW_ZEROS = 0.3  # below this share of zeros, sparse is never faster
_MARGIN = 0.9  # of the dense time: what a sparse layer may take
_SAME = 1e-4  # of the largest output: rounding, in another order
_LEVEL = 1.02  # times that are as good as equal


def deploy(model: nn.Module, example_inputs: Any) -> nn.Module:
    """Make a sparse model fast on this machine, by measuring what is faster.

    The model is compacted (:func:`pdecay.compact`), batch norms are folded into the layers before
    them, and every linear and 2-d convolutional layer is measured, dense and sparse, on the shapes
    that it sees on the example, with torch's number of threads. The faster one stays; dense where
    they are close. Sparse layers take in the ReLUs and residual sums that follow them. Last, the
    whole model is measured against the one that was given: if it is not faster, what comes back is
    dense.

    Left dense are layers whose weight is shared, parametrized, masked or read by other code, such
    as the output projection of ``nn.MultiheadAttention``. The report names them.

    Args:
        model: the model, as it was trained; it is left as it is. Exact zeros count
            (:func:`pdecay.prune_` makes them).
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments: of the size
            that the model will run on.

    Returns:
        A copy for inference, in eval mode and without gradients. Its ``report`` has the times,
        bytes and choices; ``print(model.report)`` shows them.

    Raises:
        CompactError: if the model does not run on the example.

    Example:
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> _ = model[0].weight.data.masked_fill_(torch.rand(256, 256) < 0.95, 0.0)
        >>> x = torch.randn(1, 256)
        >>> deployed = deploy(model, x)
        >>> torch.allclose(deployed(x), model(x), atol=1e-5)
        True
        >>> deployed.report.layers[0].name, deployed.report.layers[0].choice in ("dense", "sparse")
        ('0', True)
    """
    example = Inputs.of(example_inputs)
    inputs = _Fresh(example.args, example.kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"deploy needs a torch.nn.Module, got {type(model).__name__}")
    compiled = [name for name, one in model.named_modules() if _is_compiled(one)]
    if compiled or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{''.join(compiled[:1]) or 'the model'} is compiled, which hides its layers: deploy "
            "the model that it was made from, and use that as it is"
        )
    report = getattr(model, "report", None)
    if isinstance(report, DeployReport):
        raise ValueError("the model is deployed already: deploy the one that was trained")
    if report is not None:
        raise ValueError("the model has a `report` already, which deploy would hide: rename it")
    smaller, notes = _compacted(model, inputs)
    given = shared_copy(model)
    seen = wiring(smaller, inputs)
    folded = _fold_batch_norms(smaller, seen)
    layers, sparse = _choose(smaller, seen, inputs)
    models: dict[Chosen, nn.Module] = {"dense": given, "smaller": smaller}
    taken_in: list[str] = []
    if sparse:
        models["sparse"], taken_in = _fused(smaller, sparse, seen, inputs)

    expected = outputs(given, inputs)
    off = {name: difference(expected, outputs(one, inputs)) for name, one in models.items()}
    wrong: list[Chosen] = [name for name in models if name != "dense" and off[name] > _SAME]
    for name in wrong:
        notes.append(f"not {name}: its outputs differ by {off[name]:.1e}, more than {_SAME:.0e}")
        del models[name]
    times = _times(models, inputs.copy())
    chosen = _fastest(times)
    if chosen == "dense":  # of its own, not the caller's tensors
        models["dense"] = copy.deepcopy(model).eval().requires_grad_(False)
    if chosen != "sparse":
        layers = [
            replace(one, choice="dense", why="the whole model is not faster")
            if one.choice == "sparse"
            else one
            for one in layers
        ]
    deployed = models[chosen]
    deployed.report = DeployReport(  # type: ignore[assignment]
        layers=tuple(layers),
        chosen=chosen,
        dense_time=times["dense"],
        deployed_time=times[chosen],
        dense_bytes=_bytes(given),
        deployed_bytes=_bytes(deployed),
        folded=() if chosen == "dense" else (*folded, *(taken_in if chosen == "sparse" else ())),
        removed=0 if chosen == "dense" else _removed(smaller),
        difference=off[chosen],
        threads=torch.get_num_threads(),
        notes=tuple(notes),
    )
    return deployed


def _is_compiled(module: nn.Module) -> bool:
    """Whether this is what torch.compile returns; its class would take a second to import."""
    return type(module).__name__ == "OptimizedModule"


class _Fresh(Inputs):
    """An example that stays as it is, though a model may change its inputs in place."""

    def copy(self) -> Inputs:
        def copied(leaf: Any) -> Any:
            return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(copied, (self.args, self.kwargs))
        return Inputs(args, kwargs)

    def call(self, model: nn.Module) -> Any:
        return self.copy().call(model)


def _compacted(model: nn.Module, inputs: _Fresh) -> tuple[nn.Module, list[str]]:
    """The smaller model, or a copy where it cannot be had, and a note of why not."""
    notes = []
    example = inputs.copy()
    try:
        smaller = compact(model, example.kwargs or example.args)
    except CompactError as error:
        try:
            smaller = copy.deepcopy(model).eval()
            outputs(smaller, inputs)
        except Exception:  # it cannot even be copied, or does not run: that is the error to tell
            raise error from None
        notes.append(f"not compacted: {error}")
    return smaller.eval().requires_grad_(False), notes


def _fold_batch_norms(model: nn.Module, seen: Wiring) -> list[str]:
    """Make each batch norm part of the layer whose outputs alone it gets. Their names."""
    names = {module: name for name, module in model.named_modules()}
    found = []
    for layer, norm in list(seen.next_of.items()):
        if not isinstance(layer, LAYERS) or _obstacle(model, layer, seen) or has_hooks(norm):
            continue
        with torch.no_grad():
            if isinstance(layer, nn.Conv2d) and type(norm) is nn.BatchNorm2d and _can_fold(norm):
                fused: nn.Module = fuse_conv_bn_eval(layer, norm)
            elif (
                isinstance(layer, nn.Linear)
                and type(norm) is nn.BatchNorm1d
                and _can_fold(norm)
                and all(call and len(call.shape) == 2 for call in seen.calls[layer])
            ):
                fused = fuse_linear_bn_eval(layer, norm)
            else:
                continue
        layer.weight, layer.bias = fused.weight, fused.bias  # type: ignore[assignment]
        layer.requires_grad_(False)
        found.append(names[norm])
        _replace(model, {norm: nn.Identity().eval()})
        if norm in seen.next_of:
            seen.next_of[layer] = seen.next_of[norm]
        else:
            del seen.next_of[layer]
    return found


def _can_fold(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> bool:
    return norm.running_mean is not None and not norm.training


def _choose(
    model: nn.Module, seen: Wiring, inputs: Inputs
) -> tuple[list[DeployedLayer], dict[nn.Module, SparseLayer]]:
    """Measure each layer. All of them, and those that shall be sparse."""
    layers = {name: one for name, one in model.named_modules() if isinstance(one, LAYERS)}
    rows = {name: _row(model, name, layer, seen) for name, layer in layers.items()}
    candidates: dict[nn.Module, SparseLayer] = {
        layers[name]: _sparse(layers[name]) for name, row in rows.items() if not row.why
    }
    # The form of a layer's input depends on the layers before it: it is that of the sparse model.
    trial, _ = _with_sparse(model, candidates, seen)
    forms = calls(trial, inputs)
    chosen: dict[nn.Module, SparseLayer] = {}
    for name, layer in layers.items():
        if layer not in candidates:
            continue
        sparse = candidates[layer]
        dense_time, sparse_time = _layer_times(layer, sparse, forms[trial.get_submodule(name)])
        rows[name] = replace(
            rows[name],
            sparse_bytes=sparse.nbytes,
            dense_time=dense_time,
            sparse_time=sparse_time,
            why="faster",
        )
        if sparse_time < _MARGIN * dense_time:
            rows[name] = replace(
                rows[name], choice="sparse", why=f"{dense_time / sparse_time:.1f}x"
            )
            chosen[layer] = sparse
    return list(rows.values()), chosen


def _row(model: nn.Module, name: str, layer: nn.Linear | nn.Conv2d, seen: Wiring) -> DeployedLayer:
    """A layer before it is measured, and why it need not be."""
    zeros = int((layer.weight == 0).sum())
    row = DeployedLayer(
        name=name,
        kind=type(layer).__name__,
        shape=tuple(layer.weight.shape),
        sparsity=zeros / max(1, layer.weight.numel()),
        choice="dense",
        why=_obstacle(model, layer, seen) or "",
        dense_bytes=_bytes(layer),
    )
    return replace(row, why="few zeros") if not row.why and row.sparsity < _FEW_ZEROS else row


def _obstacle(model: nn.Module, layer: nn.Linear | nn.Conv2d, seen: Wiring) -> str | None:
    """What speaks against another layer in this one's place."""
    if type(layer) not in LAYERS:
        return f"a {type(layer).__name__}"
    if is_parametrized(layer):
        return "parametrized"
    if has_hooks(layer):
        return "has hooks"
    if layer not in seen.calls:
        return "not called on the example"
    if None in seen.calls[layer]:
        return "called with something else than one tensor"
    if layer in seen.readers:
        return f"its weight is read by {', '.join(sorted(seen.readers[layer]))}"
    owners = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is layer.weight
    ]
    modules = {id(model.get_submodule(name.rpartition(".")[0])) for name in owners}
    if len(modules) > 1:
        return f"a weight shared by {', '.join(owners)}"
    return why_not(layer)


def _sparse(layer: nn.Linear | nn.Conv2d) -> SparseLayer:
    return SparseLinear(layer) if isinstance(layer, nn.Linear) else SparseConv2d(layer)


@torch.inference_mode()
def _layer_times(
    layer: nn.Module, sparse: nn.Module, forms: list[Input | None]
) -> tuple[float, float]:
    """Seconds for all calls of a layer, dense and sparse."""
    totals = [0.0, 0.0]
    for form, count in Counter(forms).items():
        assert form is not None
        x = form.random()
        dense = partial(_contiguously, layer, x) if form.channels_last else partial(layer, x)
        for k, taken in enumerate(interleaved([dense, partial(sparse, x)])):
            totals[k] += count * taken
    return totals[0], totals[1]


def _contiguously(layer: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, layer(x.contiguous()))


def _fused(
    model: nn.Module, sparse: Mapping[nn.Module, SparseLayer], seen: Wiring, inputs: Inputs
) -> tuple[nn.Module, list[str]]:
    """A model with the sparse layers and what follows them made part of them; what that was."""
    plain, relus = _with_sparse(model, sparse, seen)
    made, _ = _with_sparse(model, sparse, seen)
    counts = {module: len(forms) for module, forms in calls(made, inputs).items()}
    try:
        more = fuse(made, counts)
        same = difference(outputs(plain, inputs), outputs(made, inputs)) <= _SAME
    except Exception:  # a forward that fx cannot write down, or that does more than it has seen
        return plain, relus
    return (made, [*relus, *more]) if same else (plain, relus)


def _with_sparse(
    model: nn.Module, sparse: Mapping[nn.Module, SparseLayer], seen: Wiring
) -> tuple[nn.Module, list[str]]:
    """A model with the sparse layers, ReLUs made part of them; the names of the ReLUs.

    What stays dense is shared with the model.
    """
    names = {module: name for name, module in model.named_modules()}
    new: dict[nn.Module, nn.Module] = {}
    relus = []
    for layer, one in sparse.items():
        new[layer] = fresh = shared_copy(one)
        after = seen.next_of.get(layer)
        if type(after) is nn.ReLU and not has_hooks(after):
            fresh.take_in_relu()
            new[after] = nn.Identity().eval()
            relus.append(names[after])
    made = shared_copy(model)
    by_name = {names[module]: replacement for module, replacement in new.items()}
    for layer, forms in seen.calls.items():
        if isinstance(layer, nn.Conv2d) and layer not in sparse:
            last = any(form is not None and form.channels_last for form in forms)
            _keep_contiguous(cast(nn.Conv2d, made.get_submodule(names[layer])), last)
    return _replace(made, {made.get_submodule(name): by_name[name] for name in by_name}), relus


def _keep_contiguous(layer: nn.Conv2d, channels_last: bool) -> None:
    """Let a dense layer hand on images as sparse ones have them; else each of those would copy."""
    if channels_last:
        layer.register_forward_pre_hook(_contiguous_input)
    if not is_parametrized(layer) and not layer.weight.is_contiguous():
        layer.weight = nn.Parameter(layer.weight.contiguous(), requires_grad=False)


def _contiguous_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in args)


def _replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put modules in the place of others, wherever those are; the root may be one of them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in new:
                setattr(parent, name, new[child])
    return new.get(model, model)


@torch.inference_mode()
def _times(models: Mapping[Chosen, nn.Module], inputs: Inputs) -> dict[Chosen, float]:
    calls = [partial(inputs.call, one) for one in models.values()]
    return dict(zip(models, interleaved(calls, rounds=11, seconds=0.5), strict=True))


def _fastest(times: Mapping[Chosen, float]) -> Chosen:
    """The sparsest model that is as fast as any and faster than the one that was given."""
    best = min(times.values())
    order: tuple[Chosen, ...] = ("sparse", "smaller")
    for name in order:
        if name in times and times[name] <= min(_LEVEL * best, times["dense"]):
            return name
    return "dense"


def _bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once, and of the plans of sparse layers."""
    if isinstance(model, SparseLayer):
        return model.nbytes
    return total_nbytes((*model.parameters(), *model.buffers())) + sum(
        module.nbytes - sum(buffer.nbytes for buffer in module.buffers())
        for module in model.modules()
        if isinstance(module, SparseLayer)
    )


def _removed(model: nn.Module) -> int:
    report = getattr(model, "compact_report", None)
    return 0 if report is None else int(report.units)
