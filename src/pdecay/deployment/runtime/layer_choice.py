"""The choice of dense or sparse for each layer: measured, forced, or taken from a plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.runtime.deploy_report import PLAN_FORMAT, DeployedLayer
from pdecay.deployment.runtime.rewriting import obstacle, with_sparse_layers
from pdecay.deployment.runtime.timing import interleaved
from pdecay.deployment.runtime.usage import InputSpec, Usage, is_layer, record_calls

Choice = Literal["sparse", "smaller", "dense"]
CHOICES: tuple[Choice, ...] = ("sparse", "smaller", "dense")  # in the order of preference
Choose = Literal["measured", "sparse", "dense"] | Mapping[str, Any]

_MIN_SPARSITY = 0.3  # a sparse layer is never faster below this sparsity
_MAX_RATIO = 0.9  # a sparse layer must take at most this fraction of the dense time


def check_choose(choose: object) -> None:
    """Raise unless the argument `choose` of deploy is valid."""
    if isinstance(choose, Mapping):
        missing = [key for key in PLAN_FORMAT if key not in choose]
        if missing:
            raise ValueError(
                f"choose is a dict without {missing[0]!r}: give the plan of an earlier report, "
                "deployed.report.plan"
            )
        sparse = choose["sparse"]
        shapes = sparse.values() if isinstance(sparse, Mapping) else [None]
        if choose["chosen"] not in CHOICES or not all(
            isinstance(one, list | tuple) for one in shapes
        ):
            raise ValueError(
                "choose is a damaged plan: 'chosen' must be one of "
                f"{', '.join(CHOICES)} and 'sparse' a dict of shapes, got "
                f"{choose['chosen']!r} and {str(sparse)[:100]}"
            )
    elif choose not in ("measured", "sparse", "dense"):
        raise ValueError(f"choose must be 'measured', 'sparse', 'dense' or a plan, got {choose!r}")


def choose_layers(
    model: nn.Module,
    usage: Usage,
    inputs: Inputs,
    choose: Choose,
    seconds: float,
    say: Callable[[float, str], None],
) -> tuple[list[DeployedLayer], dict[nn.Module, SparseLayer]]:
    """Choose the form of each layer.

    Args:
        model: the compacted model with folded batch norms.
        usage: how it uses its layers.
        inputs: the example.
        choose: as for :func:`pdecay.deploy`.
        seconds: the time that measurements may take.
        say: called with the share of the work that is done, and the current layer.

    Returns:
        The report of all layers, and the sparse layers to use.
    """
    layers = {name: one for name, one in model.named_modules() if is_layer(one)}
    rows = {name: _unmeasured(model, name, layer, usage) for name, layer in layers.items()}
    names = [name for name, row in rows.items() if not row.why]
    if choose == "measured":
        return _measure(model, rows, names, usage, inputs, seconds, say)
    wanted = set(names) if choose == "sparse" else set()
    why = "as asked"
    if isinstance(choose, Mapping):
        wanted, why = _planned(choose, rows), "as planned"
    for name in names:
        kind: Literal["sparse", "dense"] = "sparse" if name in wanted else "dense"
        rows[name] = replace(rows[name], choice=kind, why=why)
    made: dict[nn.Module, SparseLayer] = {
        layers[name]: make_sparse(layers[name]) for name in names if name in wanted
    }
    return list(rows.values()), made


def make_sparse(layer: nn.Linear | nn.Conv2d) -> SparseLayer:
    """Return the sparse form of a layer."""
    return SparseConv2d(layer) if isinstance(layer, nn.Conv2d) else SparseLinear(layer)


def _planned(plan: Mapping[str, Any], rows: Mapping[str, DeployedLayer]) -> set[str]:
    """Return the names of a plan's sparse layers; raise if it is a plan of another model."""
    for name, shape in plan["sparse"].items():
        row = rows.get(name)
        problem = ""
        if row is None:
            problem = "which this model does not have"
        elif list(row.shape) != list(shape):
            problem = f"which has shape {list(row.shape)} in this model"
        elif row.why:
            problem = f"which must be dense in this model ({row.why})"
        if problem:
            raise ValueError(
                f"the plan does not fit this model: it has a sparse layer {name!r} of shape "
                f"{list(shape)}, {problem}; make a new plan with choose='measured'"
            )
    return set(plan["sparse"])


def _measure(
    model: nn.Module,
    rows: dict[str, DeployedLayer],
    names: list[str],
    usage: Usage,
    inputs: Inputs,
    seconds: float,
    say: Callable[[float, str], None],
) -> tuple[list[DeployedLayer], dict[nn.Module, SparseLayer]]:
    layers = {name: cast("nn.Linear | nn.Conv2d", model.get_submodule(name)) for name in names}
    candidates: dict[nn.Module, SparseLayer] = {
        layer: make_sparse(layer) for layer in layers.values()
    }
    # The memory format of a layer's input depends on the layers before it, so record the inputs in
    # a model with all sparse layers.
    trial, _ = with_sparse_layers(model, candidates, usage)
    try:
        specs = record_calls(trial, inputs)
    except Exception as error:  # code of the model needs something that sparse layers do not have
        why = f"the model does not run with sparse layers ({type(error).__name__})"
        rows.update({name: replace(rows[name], why=why) for name in names})
        return list(rows.values()), {}
    chosen: dict[nn.Module, SparseLayer] = {}
    end = time.perf_counter() + seconds
    for done, (name, layer) in enumerate(layers.items()):
        say(done / len(layers), f"layer {name} ({done + 1} of {len(layers)})")
        sparse = candidates[layer]
        limit = max(0.0, end - time.perf_counter()) / (len(layers) - done)
        times = _layer_times(layer, sparse, specs[trial.get_submodule(name)], limit)
        is_faster = times[1] < _MAX_RATIO * times[0]
        rows[name] = replace(
            rows[name],
            sparse_bytes=sparse.nbytes,
            dense_time=times[0],
            sparse_time=times[1],
            choice="sparse" if is_faster else "dense",
            why=f"{times[0] / times[1]:.1f}x" if is_faster else "faster",
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
    tensors = (*layer.parameters(), *layer.buffers())
    return DeployedLayer(
        name=name,
        kind=type(layer).__name__,
        shape=tuple(layer.weight.shape),
        sparsity=sparsity,
        choice="dense",
        why=why,
        dense_bytes=sum(tensor.nbytes for tensor in tensors),
    )


@torch.inference_mode()
def _layer_times(
    layer: nn.Module, sparse: nn.Module, specs: list[InputSpec | None], limit: float
) -> tuple[float, float]:
    """Return the seconds of all calls of a layer, dense and sparse."""
    totals = [0.0, 0.0]
    kinds = Counter(specs)
    for spec, count in kinds.items():
        assert spec is not None
        x = spec.random()
        dense = partial(_call_contiguous, layer, x) if spec.channels_last else partial(layer, x)
        timing = interleaved([dense, partial(sparse, x)], limit=limit / len(kinds))
        for k, seconds in enumerate(timing.seconds):
            totals[k] += count * seconds
    return totals[0], totals[1]


def _call_contiguous(layer: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, layer(x.contiguous()))
