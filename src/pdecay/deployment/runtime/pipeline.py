"""The deployment pipeline: compact, fold, choose dense or sparse per layer, fuse, and verify."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pdecay.deployment.compact import CompactError, compact
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs
from pdecay.deployment.model.state import shared_copy, total_nbytes
from pdecay.deployment.runtime.deploy_report import DeployedLayer, DeployReport
from pdecay.deployment.runtime.fusion import fuse
from pdecay.deployment.runtime.rewriting import fold_batch_norms, obstacle, with_sparse_layers
from pdecay.deployment.runtime.timing import interleaved
from pdecay.deployment.runtime.usage import InputSpec, Usage, is_layer, observe_usage, record_calls

__all__ = ["DeployReport", "DeployedLayer", "deploy"]

Choice = Literal["sparse", "smaller", "dense"]

_MIN_SPARSITY = 0.3  # a sparse layer is never faster below this sparsity
_MAX_RATIO = 0.9  # a sparse layer must take at most this fraction of the dense time
_TOLERANCE = 1e-4  # relative to the largest output: rounding errors of another summation order
_TIE = 1.02  # times within this ratio count as equal


def deploy(model: nn.Module, example_inputs: Any) -> nn.Module:
    """Make a sparse model fast on this machine.

    The model is compacted (:func:`pdecay.compact`), and batch norms are folded into the layers
    before them. Every linear and 2-d convolutional layer is timed, dense and sparse, on the input
    shapes of the example and with torch's number of threads. A layer becomes sparse if that is
    clearly faster. ReLUs and residual sums after sparse layers are fused into them. Finally the
    whole model is timed: if it is not faster than the original, the result is dense.

    Layers whose weight is shared, parametrized, masked or read by other code stay dense, for
    example the output projection of ``nn.MultiheadAttention``. The report names them.

    Args:
        model: the trained model; it is not changed. Only exact zeros count (see
            :func:`pdecay.prune_`).
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments, with the
            batch size of later use. The model's code must take the same branches later. This is
            checked for one row and for twice the rows: a version whose outputs differ there is
            not used, and the report says so.

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
    inputs = Inputs.of(example_inputs)
    _check_deployable(model)
    smaller, notes = _compacted(model, inputs)
    given = shared_copy(model)
    usage = observe_usage(smaller, inputs)
    folded = fold_batch_norms(smaller, usage)
    layers, sparse = _choose_layers(smaller, usage, inputs)
    models: dict[Choice, nn.Module] = {"dense": given, "smaller": smaller}
    fused: list[str] = []
    if sparse:
        models["sparse"], fused = _fused_model(smaller, sparse, usage, inputs)

    expected = outputs(given, inputs)
    errors = {name: difference(expected, outputs(one, inputs)) for name, one in models.items()}
    other_errors = _other_batch_errors(given, models, inputs)
    candidates: tuple[Choice, ...] = ("smaller", "sparse")
    for name in candidates:
        where = "" if errors.get(name, 0.0) > _TOLERANCE else " for another batch size"
        error = max(errors.get(name, 0.0), other_errors.get(name, 0.0))
        if error > _TOLERANCE:
            notes.append(
                f"not {name}: its outputs differ by {error:.1e}{where}, more than {_TOLERANCE:.0e}"
            )
            del models[name]
    times = _model_times(models, inputs.copy())
    chosen = _fastest(times)
    if chosen == "dense":  # the result must not share the caller's tensors
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
        dense_bytes=_nbytes(given),
        deployed_bytes=_nbytes(deployed),
        folded=() if chosen == "dense" else (*folded, *(fused if chosen == "sparse" else ())),
        removed=0 if chosen == "dense" else _removed_units(smaller),
        difference=errors[chosen],
        threads=torch.get_num_threads(),
        notes=tuple(notes),
    )
    return deployed


def _check_deployable(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"deploy needs a torch.nn.Module, got {type(model).__name__}")
    # Compare class names: importing the class of torch.compile takes a second.
    compiled = [
        name for name, one in model.named_modules() if type(one).__name__ == "OptimizedModule"
    ]
    if compiled or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{''.join(compiled[:1]) or 'the model'} is compiled, which hides its layers: deploy "
            "the original model"
        )
    report = getattr(model, "report", None)
    if isinstance(report, DeployReport):
        raise ValueError("the model is deployed already: deploy the trained model")
    if report is not None:
        raise ValueError("the model has an attribute `report`, which deploy sets: rename it")


def _compacted(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, list[str]]:
    """Return the compacted model; if compaction fails, a copy of the model and a note."""
    notes = []
    try:
        smaller = compact(model, inputs.copy())
    except CompactError as error:
        try:
            smaller = copy.deepcopy(model).eval()
            outputs(smaller, inputs)
        except Exception:  # the model cannot be copied or run: report the first error
            raise error from None
        notes.append(f"not compacted: {error}")
    return smaller.eval().requires_grad_(False), notes


def _other_batch_errors(
    given: nn.Module, models: Mapping[Choice, nn.Module], inputs: Inputs
) -> dict[Choice, float]:
    """Return each model's largest difference for other batch sizes than the example's.

    The models run as copies, so that the plans of sparse layers for these sizes are not kept.
    """
    errors: dict[Choice, float] = dict.fromkeys(models, 0.0)
    for check in inputs.other_batches():
        try:
            expected = outputs(given, check)
        except Exception:  # the model takes this batch size only
            continue
        for name, one in models.items():
            tried = shared_copy(one)
            try:
                error = difference(expected, outputs(tried, check))
            except Exception:
                error = float("inf")
            errors[name] = max(errors[name], error)
    return errors


def _choose_layers(
    model: nn.Module, usage: Usage, inputs: Inputs
) -> tuple[list[DeployedLayer], dict[nn.Module, SparseLayer]]:
    """Time each layer; return the report of all layers and the sparse layers to use."""
    layers = {name: one for name, one in model.named_modules() if is_layer(one)}
    rows = {name: _unmeasured(model, name, layer, usage) for name, layer in layers.items()}
    candidates: dict[nn.Module, SparseLayer] = {
        layers[name]: _sparse(layers[name]) for name, row in rows.items() if not row.why
    }
    # The memory format of a layer's input depends on the layers before it, so record the inputs in
    # a model with all sparse layers.
    trial, _ = with_sparse_layers(model, candidates, usage)
    specs = record_calls(trial, inputs)
    chosen: dict[nn.Module, SparseLayer] = {}
    for name, layer in layers.items():
        if layer not in candidates:
            continue
        sparse = candidates[layer]
        dense_time, sparse_time = _layer_times(layer, sparse, specs[trial.get_submodule(name)])
        is_faster = sparse_time < _MAX_RATIO * dense_time
        rows[name] = replace(
            rows[name],
            sparse_bytes=sparse.nbytes,
            dense_time=dense_time,
            sparse_time=sparse_time,
            choice="sparse" if is_faster else "dense",
            why=f"{dense_time / sparse_time:.1f}x" if is_faster else "faster",
        )
        if is_faster:
            chosen[layer] = sparse
    return list(rows.values()), chosen


def _unmeasured(
    model: nn.Module, name: str, layer: nn.Linear | nn.Conv2d, usage: Usage
) -> DeployedLayer:
    """Return a layer's report before timing; `why` is set if it must stay dense."""
    sparsity = int((layer.weight == 0).sum()) / max(1, layer.weight.numel())
    why = obstacle(model, layer, usage) or ("few zeros" if sparsity < _MIN_SPARSITY else "")
    return DeployedLayer(
        name=name,
        kind=type(layer).__name__,
        shape=tuple(layer.weight.shape),
        sparsity=sparsity,
        choice="dense",
        why=why,
        dense_bytes=_nbytes(layer),
    )


def _sparse(layer: nn.Linear | nn.Conv2d) -> SparseLayer:
    return SparseConv2d(layer) if isinstance(layer, nn.Conv2d) else SparseLinear(layer)


@torch.inference_mode()
def _layer_times(
    layer: nn.Module, sparse: nn.Module, specs: list[InputSpec | None]
) -> tuple[float, float]:
    """Return the seconds of all calls of a layer, dense and sparse."""
    totals = [0.0, 0.0]
    for spec, count in Counter(specs).items():
        assert spec is not None
        x = spec.random()
        dense = partial(_call_contiguous, layer, x) if spec.channels_last else partial(layer, x)
        for k, seconds in enumerate(interleaved([dense, partial(sparse, x)])):
            totals[k] += count * seconds
    return totals[0], totals[1]


def _call_contiguous(layer: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, layer(x.contiguous()))


def _fused_model(
    model: nn.Module, sparse: Mapping[nn.Module, SparseLayer], usage: Usage, inputs: Inputs
) -> tuple[nn.Module, list[str]]:
    """Return a model with fused sparse layers, and the names of the fused operations."""
    plain, relus = with_sparse_layers(model, sparse, usage)
    fused, _ = with_sparse_layers(model, sparse, usage)
    counts = {module: len(specs) for module, specs in record_calls(fused, inputs).items()}
    try:
        more = fuse(fused, counts)
        same = difference(outputs(plain, inputs), outputs(fused, inputs)) <= _TOLERANCE
    except Exception:  # torch.fx cannot represent a forward
        return plain, relus
    return (fused, [*relus, *more]) if same else (plain, relus)


@torch.inference_mode()
def _model_times(models: Mapping[Choice, nn.Module], inputs: Inputs) -> dict[Choice, float]:
    calls = [partial(inputs.call, one, copy=False) for one in models.values()]
    return dict(zip(models, interleaved(calls, rounds=11, seconds=0.5), strict=True))


def _fastest(times: Mapping[Choice, float]) -> Choice:
    """Prefer sparse, then smaller, among models close to the fastest and not slower than dense."""
    best = min(times.values())
    order: tuple[Choice, ...] = ("sparse", "smaller")
    for name in order:
        if name in times and times[name] <= min(_TIE * best, times["dense"]):
            return name
    return "dense"


def _nbytes(model: nn.Module) -> int:
    """Return the bytes of parameters, buffers and the plans of sparse layers."""
    if isinstance(model, SparseLayer):
        return model.nbytes
    return total_nbytes((*model.parameters(), *model.buffers())) + sum(
        module.nbytes - sum(buffer.nbytes for buffer in module.buffers())
        for module in model.modules()
        if isinstance(module, SparseLayer)
    )


def _removed_units(model: nn.Module) -> int:
    report = getattr(model, "compact_report", None)
    return 0 if report is None else int(report.units)
