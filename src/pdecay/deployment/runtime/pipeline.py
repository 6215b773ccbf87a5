"""The deployment pipeline: compact, fold, choose dense or sparse per layer, fuse, and verify."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pdecay._utils.progress import Progress
from pdecay.deployment.compact import CompactError, compact
from pdecay.deployment.layers.modules import SparseLayer
from pdecay.deployment.model.errors import DeploymentError
from pdecay.deployment.model.inputs import Inputs, keep_example
from pdecay.deployment.model.outputs import difference, without_writes_to
from pdecay.deployment.model.state import (
    buffer_values,
    check_plain,
    keeping_attributes,
    keeping_buffers,
    set_buffers,
    shared_copy,
    total_nbytes,
)
from pdecay.deployment.runtime.deploy_report import DeployedLayer, DeployReport
from pdecay.deployment.runtime.fusion import fuse
from pdecay.deployment.runtime.layer_choice import Choice, Choose, check_choose, choose_layers
from pdecay.deployment.runtime.model_choice import choose_model, time_models
from pdecay.deployment.runtime.rewriting import fold_batch_norms, with_sparse_layers
from pdecay.deployment.runtime.timing import Timing, usable_threads
from pdecay.deployment.runtime.usage import Usage, count_tensor_calls, observe_usage
from pdecay.deployment.runtime.verification import TOLERANCE, check_outputs, outputs_of_calls

__all__ = ["DeployReport", "DeployedLayer", "deploy"]

_CHECK_SECONDS = 0.5  # enough to find out whether threads wait for processors
_MAX_SPREAD = 0.1  # times that vary more are reported
_MEASURING_SHARE = 0.3  # at least this share of `seconds` is left for measurements
_LAYER_SHARE = 0.3  # of the time for measurements; the rest is for the whole model


def deploy(
    model: nn.Module,
    example_inputs: Any,
    *,
    seconds: float = 30.0,
    choose: Choose = "measured",
    progress: bool | None = None,
) -> nn.Module:
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
        example_inputs: as for :func:`pdecay.compact`, with the batch size of later use. The model's
            code must take the same branches later. This is checked for one row, for twice the rows,
            for half, one, one less and twice of each other size, and for other numbers: a version
            whose outputs differ is not used, and the report says so.
        seconds: the time for the whole call. Compaction and checks run the model dozens of times,
            however long that takes; at least 30 % of `seconds` remain for measurements, which time
            each layer and model at least once. Measurements end earlier if repetitions agree. If
            they still vary at the end, because other processes use the processor, the report says
            so. If torch's threads have to wait for processors, one thread is used during the call
            and the report has its times.
        choose: ``"measured"`` takes the faster form of each layer and of the model. ``"sparse"``
            makes each layer sparse that can be, and ``"dense"`` none; both measure the whole model
            only. A plan, ``deployed.report.plan`` of an earlier call, repeats its choices: it is
            plain data, so that another process can read it from a JSON file.
        progress: whether to show a progress bar on standard error; None shows it in terminals.

    Returns:
        A copy for inference, in eval mode and without gradients. Its ``report`` has the times,
        bytes and choices; ``print(model.report)`` shows them.

    Raises:
        CompactError: if the model does not run on the example.
        DeploymentError: if the model does not run under ``torch.inference_mode()``.
        ValueError: if an argument is invalid, or a plan does not fit the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> _ = model[0].weight.data.masked_fill_(torch.rand(256, 256) < 0.95, 0.0)
        >>> x = torch.randn(1, 256)
        >>> deployed = deploy(model, x)
        >>> torch.allclose(deployed(x), model(x), atol=1e-5)
        True
        >>> first = deployed.report.layers[0]
        >>> first.name, first.choice in ("dense", "sparse")
        ('0', True)
    """
    inputs = Inputs.of(example_inputs)
    check_choose(choose)
    if not seconds >= 0:
        raise ValueError(f"seconds must be at least 0, got {seconds!r}")
    _check_deployable(model)
    asked = torch.get_num_threads()
    check = min(_CHECK_SECONDS, 0.2 * seconds)
    with Progress("deploy", progress) as say, usable_threads(check) as threads:
        notes = []
        if threads < asked:
            notes.append(
                f"other processes use the processors, so that {asked} threads wait for each other: "
                "times are of 1 thread; serve with torch.set_num_threads(1), or deploy on an idle "
                "machine"
            )
        return _deployed(model, inputs, seconds - check, choose, say, notes)


def _deployed(
    model: nn.Module,
    inputs: Inputs,
    seconds: float,
    choose: Choose,
    say: Callable[[float, str], None],
    notes: list[str],
) -> nn.Module:
    end = time.perf_counter() + seconds
    say(0.0, "removing dead units")
    smaller = _compacted(model, inputs, notes)
    buffers = buffer_values(smaller)
    given = shared_copy(model)
    set_buffers(given, buffer_values(model))  # a run may change them
    usage = _observed_usage(smaller, inputs)
    folded = fold_batch_norms(smaller, usage)
    removed = _removed_units(smaller)
    end = max(end, time.perf_counter() + _MEASURING_SHARE * seconds)
    layers, sparse = choose_layers(
        *(smaller, usage, inputs, choose, _LAYER_SHARE * (end - time.perf_counter())),
        lambda share, text: say(0.1 + 0.4 * share, text),
    )
    models: dict[Choice, nn.Module] = {"dense": given}
    if removed or folded:
        models["smaller"] = smaller
    fused: list[str] = []
    if sparse:
        try:
            models["sparse"], fused = _fused_model(smaller, sparse, usage, inputs)
        except Exception as failure:  # such as next(self.parameters()) without dense layers
            reason = f"{type(failure).__name__}: {failure}".removesuffix(": ")
            notes.append(f"not sparse: the model does not run with sparse layers ({reason})")
    say(0.5, "comparing outputs")
    changed: dict[Choice, nn.Module] = {
        name: one for name, one in models.items() if name != "dense"
    }
    for one in changed.values():
        set_buffers(one, buffers)
    errors, rejected = check_outputs(given, changed, inputs)
    for name, reason in rejected.items():
        notes.append(f"not {name}: {reason}")
        del models[name]
    timed: dict[str, nn.Module] = {str(name): one for name, one in models.items()}
    if folded and "smaller" in models:
        timed["folded"] = _folded_model(model, inputs) if removed else smaller
    times, medians, timing = time_models(
        *(timed, inputs.copy(), max(0.0, end - time.perf_counter())),
        lambda share, text: say(0.6 + 0.4 * share, text),
    )
    if timing.is_uncertain and choose == "measured":
        notes.append(_uncertainty(timing))
    chosen = choose_model(times, choose)
    if chosen == "dense":  # the result must not share the caller's tensors
        models["dense"] = copy.deepcopy(model).eval().requires_grad_(False)
    if chosen != "sparse":
        why = "the whole model is not faster" if "sparse" in models else "the sparse model fails"
        layers = [
            replace(one, choice="dense", why=why) if one.choice == "sparse" else one
            for one in layers
        ]
    deployed = models[chosen]
    if chosen != "dense":
        set_buffers(deployed, buffers)
    deployed.report = DeployReport(  # type: ignore[assignment]
        layers=tuple(layers),
        chosen=chosen,
        dense_time=times["dense"],
        folded_time=times.get("folded"),
        deployed_time=times[chosen],
        median_speedup=medians["dense"] / medians[chosen],
        spread=timing.spread,
        dense_bytes=_nbytes(given),
        deployed_bytes=_nbytes(deployed),
        folded=() if chosen == "dense" else (*folded, *(fused if chosen == "sparse" else ())),
        removed=0 if chosen == "dense" else removed,
        difference=errors.get(chosen, 0.0),
        batch=len(inputs.tensors[0]) if inputs.has_batch else None,
        threads=torch.get_num_threads(),
        notes=tuple(notes),
    )
    keep_example(deployed, inputs.copy())
    return deployed


def _check_deployable(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"deploy needs a torch.nn.Module, got {type(model).__name__}")
    # Compare class names: importing the class of torch.compile takes a second.
    compiled = [
        name
        for name, one in model.named_modules()
        if type(one).__name__ == "OptimizedModule" or isinstance(one, torch.jit.ScriptModule)
    ]
    if compiled:
        raise TypeError(
            f"{''.join(compiled[:1]) or 'the model'} is compiled, which hides its layers: deploy "
            "the original model"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise TypeError(
                f"{name} is on the meta device and has no values: load or initialise it first"
            )
        check_plain(name, tensor, "deploy", TypeError)
    report = getattr(model, "report", None)
    if isinstance(report, DeployReport):
        raise ValueError("the model is deployed already: deploy the trained model")
    if report is not None:
        raise ValueError("the model has an attribute `report`, which deploy sets: rename it")


def _compacted(model: nn.Module, inputs: Inputs, notes: list[str]) -> nn.Module:
    """Return the compacted model; if compaction fails, add a note and return a copy."""
    try:
        smaller = compact(model, inputs.copy())
    except CompactError as error:
        try:
            smaller = copy.deepcopy(model).eval()
            with without_writes_to(model, CompactError), keeping_buffers(smaller):
                outputs_of_calls(smaller, inputs)
        except Exception as own:  # the model cannot be copied or run
            raise error from own
        notes.append(f"not compacted: {error}")
    return smaller.eval().requires_grad_(False)


def _observed_usage(model: nn.Module, inputs: Inputs) -> Usage:
    try:
        with keeping_attributes(model, skip=SparseLayer):
            return observe_usage(model, inputs)
    except Exception as cause:  # it ran without inference mode
        raise DeploymentError(
            f"the model does not run under torch.inference_mode() ({cause}): a model that computes "
            "gradients in its forward cannot be deployed, only compacted with pdecay.compact"
        ) from cause


def _fused_model(
    model: nn.Module, sparse: Mapping[nn.Module, SparseLayer], usage: Usage, inputs: Inputs
) -> tuple[nn.Module, list[str]]:
    """Return a model with fused sparse layers, and the names of the fused operations."""
    plain, relus = with_sparse_layers(model, sparse, usage)
    fused, _ = with_sparse_layers(model, sparse, usage)
    with keeping_attributes(fused, skip=SparseLayer):
        counts = count_tensor_calls(fused, inputs)
    try:
        more = fuse(fused, counts, inputs)
        error = difference(outputs_of_calls(plain, inputs), outputs_of_calls(fused, inputs))
    except Exception:  # torch.fx cannot represent a forward
        return plain, relus
    return (fused, [*relus, *more]) if error <= TOLERANCE else (plain, relus)


def _uncertainty(timing: Timing) -> str:
    """Return the note about a measurement that did not settle."""
    what = "there was time for few measurements"
    if timing.spread > _MAX_SPREAD:
        what = f"times varied by {timing.spread:.0%}, probably because of other processes"
    return f"{what}: deploy on an idle machine or with more seconds= to be sure"


def _nbytes(model: nn.Module) -> int:
    """Return the bytes of parameters, buffers and the plans of sparse layers."""
    if isinstance(model, SparseLayer):
        return model.nbytes
    return total_nbytes((*model.parameters(), *model.buffers())) + sum(
        module.nbytes - sum(buffer.nbytes for buffer in module.buffers())
        for module in model.modules()
        if isinstance(module, SparseLayer)
    )


def _folded_model(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Return a copy of the original whose batch norms are folded, and nothing else."""
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    fold_batch_norms(copied, observe_usage(copied, inputs))
    return copied


def _removed_units(model: nn.Module) -> int:
    report = getattr(model, "compact_report", None)
    return 0 if report is None else int(report.units)
