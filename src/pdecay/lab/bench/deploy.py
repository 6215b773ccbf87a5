"""The speed of sparse layers and deployed models relative to dense ones, measured in turns.

Layers have random zeros. Networks are trained to 90 and 95 % zeros with the method ``target``, and
their weights are saved for later calls. Each network is measured deployed, dense in torch, and
dense in ONNX Runtime.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pdecay
from pdecay._utils.files import replacing
from pdecay.deployment.export.onnx import check_installed, export_onnx
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear
from pdecay.deployment.runtime.pipeline import DeployReport, deploy
from pdecay.deployment.runtime.timing import interleaved
from pdecay.lab.machine import use_threads
from pdecay.lab.methods.decay import TargetMethod
from pdecay.lab.models import MLP, ResNet
from pdecay.lab.tasks import Task, get_task
from pdecay.lab.train.loop import Trainer

SPARSITIES = (0.9, 0.95)
_FUNCTIONS = 4  # number of functions in a report

Report = Callable[[str], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class LayerCase:
    """A layer to measure, with the required speed-up over dense for each sparsity."""

    name: str
    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    wanted: dict[float, float]


def layer_cases() -> list[LayerCase]:
    """Return a linear layer, and 3x3 and 1x1 convolutions from 64 to 512 channels."""
    linear = functools.partial(nn.Linear, 1024, 1024)
    cases = [
        LayerCase("Linear 1024x1024", linear, (batch, 1024), {0.95: wanted})
        for batch, wanted in ((1, 4.0), (64, 5.0))
    ]
    for kernel, wants in (
        (3, {1: {0.9: 2.0, 0.95: 4.0, 0.99: 9.0}, 16: {0.9: 2.0, 0.95: 3.5, 0.99: 8.0}}),
        (1, {1: {0.95: 3.0}, 16: {0.95: 3.0}}),
    ):
        for channels, size in ((64, 32), (128, 16), (256, 8), (512, 4)):
            name = f"Conv2d {kernel}x{kernel}, {channels} channels, {size}x{size}"
            conv = functools.partial(nn.Conv2d, channels, channels, kernel, padding=kernel // 2)
            for batch, wanted_at in wants.items():
                cases.append(LayerCase(name, conv, (batch, channels, size, size), wanted_at))
    return cases


def layers(
    cases: Sequence[LayerCase],
    threads: Sequence[int],
    rounds: int,
    seconds: float,
    say: Report = lambda _: None,
) -> Iterator[Row]:
    """Measure each case, dense and sparse, for each number of threads.

    Yields for each measurement its ``name, batch, threads, sparsity``, the times ``dense`` and
    ``sparse`` in microseconds, their ``ratio`` and the ``wanted`` ratio.
    """
    for count in threads:
        with use_threads(count), torch.inference_mode():
            for case in cases:
                x = torch.randn(case.input)
                for sparsity, wanted in case.wanted.items():
                    say(f"{count} threads, {case.name}, batch {len(x)}, {sparsity:.0%}")
                    pair = [functools.partial(layer, x) for layer in _pair(case.make, sparsity)]
                    taken = interleaved(pair, rounds=rounds, seconds=seconds).seconds
                    yield {
                        "name": case.name,
                        "batch": len(x),
                        "threads": count,
                        "sparsity": sparsity,
                        "dense": 1e6 * taken[0],
                        "sparse": 1e6 * taken[1],
                        "ratio": taken[0] / taken[1],
                        "wanted": wanted,
                    }


def _pair(make: Callable[[], nn.Module], sparsity: float) -> tuple[nn.Module, SparseLayer]:
    """Return a dense layer with random zeros and its sparse equivalent."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        dense = make()
        assert isinstance(dense, nn.Linear | nn.Conv2d)
        dense.weight.mul_(torch.rand(dense.weight.shape) >= sparsity)
    if isinstance(dense, nn.Linear):
        return dense, SparseLinear(dense)
    return dense, SparseConv2d(dense)


@dataclass(frozen=True)
class Network:
    """A network to train and measure.

    Args:
        name: the name in the tables.
        task: returns the task.
        wanted: the required speed-up over dense at 95 %; None for no requirement.
    """

    name: str
    task: Callable[[], Task]
    wanted: float | None


def networks(quick: bool) -> list[Network]:
    """Return the digits' MLP, a CIFAR-10 ResNet and the char-GPT; `quick` makes them tiny."""
    mlp = (64, 64) if quick else (2048, 2048)
    resnet = functools.partial(ResNet, 64, (1, 1, 1))
    if quick:
        resnet = functools.partial(ResNet, 8, (1,), stride=2)

    def make(name: str, scale: str, build: Callable[[], nn.Module] | None = None) -> Task:
        full = get_task(name, "quick" if quick else scale)
        short = replace(full, steps=30, warmup=3) if quick else full
        return replace(short, build=build or full.build)

    digits = functools.partial(make, "digits", "quick", functools.partial(MLP, 64, mlp, 10))
    cifar10 = functools.partial(make, "cifar10", "quick", resnet)
    shakespeare = functools.partial(make, "shakespeare", "cpu")
    return [
        Network(f"digits MLP, 64-{mlp[0]}-{mlp[1]}-10", digits, 3.0),
        Network("CIFAR-10 ResNet" + ("" if quick else ", 64-128-256 channels"), cifar10, 3.0),
        Network("char-GPT" + ("" if quick else ", 4 layers of 128"), shakespeare, None),
    ]


def trained(
    network: Network, sparsity: float, folder: Path, say: Report = lambda _: None
) -> tuple[nn.Module, Row]:
    """Train a network to a sparsity, or load the weights of an earlier call from `folder`.

    Returns:
        The model, and its ``sparsity`` and test ``accuracy`` in percent.
    """
    task = network.task()
    path = folder / f"{task.name}-{sparsity:g}.pt"
    if path.exists():
        model = task.model(0)
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved.pop("model"))
        return model.eval(), saved
    method = TargetMethod(p=0.8, target=sparsity)
    trainer = Trainer(task, method, seed=0, lr=task.lr, steps=task.steps, points=0)
    for _ in trainer.train():
        if trainer.step % 10 == 0:
            say(f"training {network.name} to {sparsity:.0%}: step {trainer.step} of {task.steps}")
    result = trainer.finish()
    saved = {"sparsity": result["sparsity"], "accuracy": result["test_accuracy"]}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save({"model": trainer.model.state_dict(), **saved}, file)
    return trainer.model.eval(), saved


def network_costs(
    network: Network,
    sparsity: float,
    folder: Path,
    batches: Sequence[int],
    threads: Sequence[int],
    seconds: float,
    say: Report = lambda _: None,
) -> Iterator[Row]:
    """Measure a trained network in torch, in ONNX Runtime and deployed, on validation batches.

    Yields for each measurement, with times in microseconds and sizes in bytes:

    - ``name, sparsity, accuracy, batch, threads``: the network, as trained, and the setting;
    - ``dense, onnx, deployed``: the times dense in torch, dense in ONNX Runtime, and deployed;
    - ``ratio, onnx_ratio, wanted``: the speed-ups over the two dense ones, and the required ratio;
    - ``dense_bytes, deployed_bytes, dense_file, file``: the sizes in memory and as a file;
    - ``chosen``: the variant that deploy chose;
    - ``layers``: the name, kind and separate time of each layer;
    - ``functions``: the slowest functions besides layers, with their times.
    """
    model, found = trained(network, sparsity, folder, say)
    inputs, _ = next(iter(network.task().validation()))
    files = {"dense_file": _file_size(model, True), "file": _file_size(model, False)}
    for count in threads:
        for batch in batches:
            say(f"{count} threads, {network.name}, {sparsity:.0%} zeros, batch {batch}")
            x = inputs[:batch].clone()
            with use_threads(count), torch.inference_mode():
                deployed = deploy(model, x)
                runs = [functools.partial(one, x) for one in (model, deployed)]
                taken = interleaved(runs, rounds=7, seconds=seconds, turn=20e-3).seconds
                functions = _function_times(deployed, x)
                # Measured separately, because its idle threads spin and would slow the others down.
                session = onnx_session(model, x, count)
                if session is not None:
                    taken += interleaved(
                        [session], rounds=7, seconds=seconds / 2, turn=20e-3
                    ).seconds
                    session = None
            dense, fast, *others = (1e6 * one for one in taken)
            onnx = others[0] if others else None
            report = deployed.report
            assert isinstance(report, DeployReport)
            yield {
                "name": network.name,
                **found,
                "batch": batch,
                "threads": count,
                "dense": dense,
                "onnx": onnx,
                "deployed": fast,
                "ratio": dense / fast,
                "onnx_ratio": None if onnx is None else onnx / fast,
                "wanted": network.wanted if sparsity == 0.95 else None,
                "dense_bytes": report.dense_bytes,
                "deployed_bytes": report.deployed_bytes,
                **files,
                "chosen": report.chosen,
                "layers": _times_of(report),
                "functions": functions,
            }


def _file_size(model: nn.Module, dense: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        pdecay.save(model, path, dense=dense)
        return path.stat().st_size


def _times_of(report: DeployReport) -> list[tuple[str, str, float]]:
    """Return the name, kind and time in microseconds of each measured layer."""
    return [
        (layer.name, layer.choice, 1e6 * taken)
        for layer in report.layers
        if (taken := layer.sparse_time if layer.choice == "sparse" else layer.dense_time)
    ]


class _Clock(TorchFunctionMode):
    """A function mode that measures the time of each torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: defaultdict[str, float] = defaultdict(float)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.taken[getattr(func, "__name__", "")] += time.perf_counter() - began
        return result


def _function_times(model: nn.Module, x: Tensor) -> list[tuple[str, float]]:
    """Return the slowest functions besides layers, with their times in microseconds."""
    runs: list[defaultdict[str, float]] = []
    for _ in range(11):
        with _Clock() as clock:
            model(x)
        runs.append(clock.taken)
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[-1]}
    others = [(name, 1e6 * medians[name]) for name in medians if name not in ("linear", "conv2d")]
    return sorted(others, key=lambda one: one[1], reverse=True)[:_FUNCTIONS]


def onnx_session(model: nn.Module, x: Tensor, threads: int) -> Callable[[], object] | None:
    """Return a function that runs the dense model in ONNX Runtime, or None without it."""
    try:
        check_installed()
    except ModuleNotFoundError:
        return None
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        with torch.inference_mode(False), torch.no_grad():
            export_onnx(model, path, x.clone())
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return functools.partial(session.run, None, feed)
