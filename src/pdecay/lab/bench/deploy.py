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
from pdecay.deployment.export.onnx import check_installed
from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear
from pdecay.deployment.model.program import quiet
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


@dataclass(frozen=True)
class LayerCase:
    """A layer to measure, with the required speed-up over dense for each sparsity."""

    name: str
    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    wanted: dict[float, float]


@dataclass(frozen=True)
class LayerCost:
    """The times of a dense and a sparse layer in microseconds."""

    name: str
    batch: int
    threads: int
    sparsity: float
    dense: float
    sparse: float
    ratio: float
    wanted: float


def layer_cases() -> list[LayerCase]:
    """Return a linear layer, and 3x3 and 1x1 convolutions from 64 to 512 channels."""
    cases = []
    for batch, wanted in ((1, 4.0), (64, 5.0)):
        cases.append(
            LayerCase(
                "Linear 1024x1024",
                functools.partial(nn.Linear, 1024, 1024),
                (batch, 1024),
                {0.95: wanted},
            )
        )
    for kernel, wants in (
        (3, {1: {0.9: 2.0, 0.95: 4.0, 0.99: 9.0}, 16: {0.9: 2.0, 0.95: 3.5, 0.99: 8.0}}),
        (1, {1: {0.95: 3.0}, 16: {0.95: 3.0}}),
    ):
        for channels, size in ((64, 32), (128, 16), (256, 8), (512, 4)):
            for batch, each in wants.items():
                cases.append(
                    LayerCase(
                        f"Conv2d {kernel}x{kernel}, {channels} channels, {size}x{size}",
                        functools.partial(
                            nn.Conv2d, channels, channels, kernel, padding=kernel // 2
                        ),
                        (batch, channels, size, size),
                        each,
                    )
                )
    return cases


def layers(
    cases: Sequence[LayerCase],
    threads: Sequence[int],
    rounds: int,
    seconds: float,
    say: Report = lambda _: None,
) -> Iterator[LayerCost]:
    """Measure each case, dense and sparse, for each number of threads."""
    for count in threads:
        with use_threads(count), torch.inference_mode():
            for case in cases:
                x = torch.randn(case.input)
                for sparsity, wanted in case.wanted.items():
                    say(f"{count} threads, {case.name}, batch {len(x)}, {sparsity:.0%}")
                    dense, sparse = _pair(case.make, sparsity)
                    taken = interleaved(
                        [functools.partial(dense, x), functools.partial(sparse, x)],
                        rounds=rounds,
                        seconds=seconds,
                    )
                    yield LayerCost(
                        *(case.name, len(x), count, sparsity),
                        *(1e6 * taken[0], 1e6 * taken[1], taken[0] / taken[1], wanted),
                    )


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


@dataclass(frozen=True)
class Trained:
    """A trained network with its sparsity and its test accuracy in percent."""

    model: nn.Module
    sparsity: float
    accuracy: float


def trained(
    network: Network, sparsity: float, folder: Path, say: Report = lambda _: None
) -> Trained:
    """Train a network to a sparsity, or load the weights of an earlier call from `folder`."""
    task = network.task()
    path = folder / f"{task.name}-{sparsity:g}.pt"
    if path.exists():
        model = task.model(0)
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        return Trained(model.eval(), saved["sparsity"], saved["accuracy"])
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
    return Trained(trainer.model.eval(), **saved)


@dataclass(frozen=True)
class NetworkCost:
    """The times of a trained network in microseconds.

    Args:
        name, sparsity, accuracy: the network, its sparsity and its test accuracy in percent.
        batch, threads: the batch size and the number of threads.
        dense, onnx, deployed: the times dense in torch, dense in ONNX Runtime, and deployed.
        ratio, onnx_ratio: the speed-ups of the deployed model over the two dense ones.
        wanted: the required ratio, if any.
        dense_bytes, deployed_bytes: the memory of parameters and buffers.
        dense_file, file: the sizes of the dense and the sparse model file in bytes.
        chosen: the variant that deploy chose.
        layers: the name, kind and separate time of each layer.
        functions: the slowest functions besides layers, with their times.
    """

    name: str
    sparsity: float
    accuracy: float
    batch: int
    threads: int
    dense: float
    onnx: float | None
    deployed: float
    ratio: float
    onnx_ratio: float | None
    wanted: float | None
    dense_bytes: int
    deployed_bytes: int
    dense_file: int
    file: int
    chosen: str
    layers: list[tuple[str, str, float]]
    functions: list[tuple[str, float]]


def network_costs(
    network: Network,
    sparsity: float,
    found: Trained,
    batches: Sequence[int],
    threads: Sequence[int],
    seconds: float,
    say: Report = lambda _: None,
) -> Iterator[NetworkCost]:
    """Measure a trained network in torch, in ONNX Runtime and deployed, on validation batches."""
    inputs, _ = next(iter(network.task().validation()))
    dense_file, file = (_file_size(found.model, dense) for dense in (True, False))
    for count in threads:
        for batch in batches:
            say(f"{count} threads, {network.name}, {sparsity:.0%} zeros, batch {batch}")
            x = inputs[:batch].clone()
            with use_threads(count), torch.inference_mode():
                deployed = deploy(found.model, x)
                runs: list[Callable[[], object]] = [
                    functools.partial(found.model, x),
                    functools.partial(deployed, x),
                ]
                taken = interleaved(runs, rounds=7, seconds=seconds, turn=20e-3)
                functions = _function_times(deployed, x)
                # Measured separately, because its idle threads spin and would slow the others down.
                session = onnx_session(found.model, x, count)
                if session is not None:
                    taken += interleaved([session], rounds=7, seconds=seconds / 2, turn=20e-3)
                    session = None
            dense, fast, *others = (1e6 * one for one in taken)
            onnx = others[0] if others else None
            report = deployed.report
            assert isinstance(report, DeployReport)
            yield NetworkCost(
                name=network.name,
                sparsity=found.sparsity,
                accuracy=found.accuracy,
                batch=batch,
                threads=count,
                dense=dense,
                onnx=onnx,
                deployed=fast,
                ratio=dense / fast,
                onnx_ratio=None if onnx is None else onnx / fast,
                wanted=network.wanted if sparsity == 0.95 else None,
                dense_bytes=report.dense_bytes,
                deployed_bytes=report.deployed_bytes,
                dense_file=dense_file,
                file=file,
                chosen=report.chosen,
                layers=_times_of(report),
                functions=functions,
            )


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
        path = str(Path(folder) / "model.onnx")
        with torch.inference_mode(False), torch.no_grad(), quiet():
            torch.onnx.export(model, (x.clone(),), path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    (got,) = session.run(None, feed)
    torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-3, atol=1e-3)
    return functools.partial(session.run, None, feed)
