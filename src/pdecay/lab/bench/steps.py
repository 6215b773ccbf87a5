"""The time of an optimizer step relative to torch's fused optimizer.

Absolute times on a shared machine vary from minute to minute. All methods therefore step on the
same tensors in turn for many rounds, in a new random order each. A method's ratio is the median,
over the rounds, of its time relative to that of torch's fused optimizer in the same round. The
ratio also varies with the state of the process, such as the places of the tensors in memory: by
about 2 % for large models, and by up to 10 % for small ones. It is therefore measured in several
new processes, and their median is reported.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import pdecay
from pdecay import PSGD, Lp, PAdam
from pdecay._core.penalty import Penalty
from pdecay._core.reference import Listing1
from pdecay._optim.kernels.selection import KernelName, only_kernel
from pdecay.lab.methods import Run
from pdecay.lab.methods.decay import AdamWMethod, PAdamMethod
from pdecay.lab.models import GPT, MLP, ResNet
from pdecay.lab.tasks import Task, get_task
from pdecay.lab.train.loop import Trainer

# Small enough that the weights hardly change: only the cost of a step is measured.
LR, LAM = 1e-6, 1e-3
ELASTIC = "0.8 + 2"
NORMS: dict[str, Penalty] = {
    **{f"{p:g}": Lp(p, LAM) for p in (0, 0.5, 0.8, 1, 1.2, 1.5, 2)},
    ELASTIC: Lp(0.8, LAM) + Lp(2, LAM),
}
ONE_NORM = {"0.8": NORMS["0.8"]}
PROCESSES = 5  # for each model
MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": functools.partial(MLP, 64, [256, 128], 10),
    "char-GPT": functools.partial(GPT, 65, 64, 4, 4, 128),
    "ResNet": functools.partial(ResNet, 32),
    "nanoGPT": functools.partial(GPT, 65, 256, 6, 6, 384),
    "GPT-2": functools.partial(GPT, 50257, 1024, 12, 12, 768),
}
# torch and the C kernel as on a CPU without AVX-512
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "PDECAY_CFLAGS": "-march=haswell"}

Make = Callable[[list[nn.Parameter], Penalty], Optimizer]
Cell = tuple[str, str]  # the names of a method and a penalty
Report = Callable[[str], None]


@dataclass(frozen=True)
class Method:
    """An optimizer to measure, with the penalties to measure it with.

    Args:
        make: makes the optimizer of weights with a penalty.
        norms: the penalties by name.
        path: the only fused kernel that may be used; None for the default.
    """

    make: Make
    norms: Mapping[str, Penalty]
    path: KernelName | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of a step of a method on the weights of a model: medians over processes.

    Args:
        model: the name of the model.
        weights: the number of its weights.
        method: the name of the method.
        norm: the name of the penalty.
        milliseconds: the time of a step.
        ratio: the time relative to torch's fused optimizer.
        extra_bytes: the peak memory of a step for each weight, beyond the memory before it.
        ratios: the ratio in each process.
    """

    model: str
    weights: int
    method: str
    norm: str
    milliseconds: float
    ratio: float
    extra_bytes: float
    ratios: Sequence[float] = ()


def adam_methods() -> dict[str, Method]:
    """Return the methods by name. The first is the baseline, whose state all others share."""
    plain = {"": Lp(1, 0)}
    return {
        "AdamW fused": Method(lambda w, _: AdamW(w, LR, fused=True, weight_decay=0), plain),
        "AdamW foreach": Method(lambda w, _: AdamW(w, LR, foreach=True, weight_decay=0), plain),
        "AdamW default": Method(lambda w, _: AdamW(w, LR, weight_decay=0), plain),
        "the paper's listing": Method(_listing, ONE_NORM),
        "attach to AdamW fused": Method(_attached, ONE_NORM),
        "PAdam foreach": Method(lambda w, n: PAdam(w, LR, decay=n, foreach=True), ONE_NORM),
        "PAdam foreach without C": Method(  # as on accelerators
            lambda w, n: PAdam(w, LR, decay=n, foreach=True, fused=False), ONE_NORM
        ),
        "PAdam compiled": Method(lambda w, n: PAdam(w, LR, decay=n, fused=True), NORMS, "compiled"),
        "PAdam fused": Method(lambda w, n: PAdam(w, LR, decay=n, fused=True), NORMS, "native"),
        "PAdam fused, adaptive metric": Method(
            lambda w, n: PAdam(w, LR, decay=n, fused=True, metric="adaptive"), ONE_NORM, "native"
        ),
    }


def methods_with_avx2() -> dict[str, Method]:
    """Return the methods to measure with the instructions of other processors."""
    slow = ("the paper's listing", "PAdam compiled")
    return {name: method for name, method in adam_methods().items() if name not in slow}


def sgd_methods() -> dict[str, Method]:
    """Return the methods by name. The first is the baseline, whose state all others share."""

    def psgd(weights: list[nn.Parameter], norm: Penalty) -> Optimizer:
        return PSGD(weights, LR, momentum=0.9, decay=norm, fused=True)

    return {
        "SGD fused": Method(lambda w, _: SGD(w, LR, momentum=0.9, fused=True), {"": Lp(1, 0)}),
        "PSGD compiled": Method(psgd, NORMS, "compiled"),
        "PSGD fused": Method(psgd, NORMS, "native"),
    }


def _listing(weights: list[nn.Parameter], norm: Penalty) -> Optimizer:
    ((p, lam),) = norm.pairs()
    return Listing1(weights, LR, lambda_p=lam, p_norm=p)


def _attached(weights: list[nn.Parameter], norm: Penalty) -> Optimizer:
    optimizer = AdamW(weights, LR, fused=True, weight_decay=0)
    pdecay.attach(optimizer, norm)
    return optimizer


# What to measure on each model in one process, and the environment variables of that process.
METHODS: dict[str, Callable[[], Sequence[Mapping[str, Method]]]] = {
    "steps": lambda: (adam_methods(), sgd_methods()),
    "steps_with_avx2": lambda: (methods_with_avx2(),),
}
VARIABLES: dict[str, Mapping[str, str]] = {"steps": {}, "steps_with_avx2": AVX2}


def steps(
    key: str, rounds: Mapping[str, int], processes: int = PROCESSES, say: Report = lambda _: None
) -> list[Cost]:
    """Measure the methods of a key of METHODS on tensors with the shapes of models.

    The models take turns, so that a busy minute of the machine does not spoil all processes of one.

    Args:
        key: the methods.
        rounds: the number of rounds in each process, for each model to measure.
        processes: the number of new processes for each model.
        say: reports the progress.
    """
    runs: dict[str, list[list[Cost]]] = {model: [] for model in rounds}
    for k in range(processes):
        for model, number in rounds.items():
            say(f"{key} of {model}: process {k + 1} of {processes}")
            costs = _in_process("measure_steps", (key, model, number), VARIABLES[key])
            runs[model].append(costs)
    return [cost for model in rounds for cost in _medians(runs[model])]


def growth(
    sizes: Sequence[int], rounds: int, processes: int = PROCESSES, say: Report = lambda _: None
) -> list[tuple[int, Cost]]:
    """Measure PAdam fused by the number of weights, in matrices of at most 2048 x 2048."""
    grown = []
    for size in sizes:
        runs = []
        for k in range(processes):
            say(f"{size / 1e6:,.0f} M weights: process {k + 1} of {processes}")
            runs.append(_in_process("measure_size", (size, rounds), {}))
        grown += [(size, cost) for cost in _medians(runs)]
    return grown


def measure_steps(key: str, model: str, rounds: int) -> list[Cost]:
    """Measure the methods of a key of METHODS in this process."""
    with torch.device("meta"):
        shapes = [tuple(param.shape) for param in MODELS[model]().parameters()]
    families = METHODS[key]()
    return [cost for methods in families for cost in _measure(model, shapes, methods, rounds)]


def measure_size(size: int, rounds: int) -> list[Cost]:
    """Measure PAdam fused on about as many weights, in this process."""
    every = adam_methods()
    methods = {
        "AdamW fused": every["AdamW fused"],
        "PAdam fused": Method(every["PAdam fused"].make, ONE_NORM, "native"),
    }
    side = 2048 if size >= 2048**2 else int(size**0.5)
    shapes = [(side, side)] * max(1, round(size / side**2))
    return [*_measure("matrices", shapes, methods, rounds)]


def _in_process(
    function: str, arguments: tuple[object, ...], variables: Mapping[str, str]
) -> list[Cost]:
    """Call a function of this module in a new process with further environment variables."""
    code = (
        "import dataclasses, json\n"
        "from pdecay.lab.bench import steps\n"
        f"costs = steps.{function}(*{arguments!r})\n"
        "print(json.dumps([dataclasses.asdict(cost) for cost in costs]))\n"
    )
    return [Cost(**cost) for cost in json.loads(_output_of(code, variables))]


def _medians(runs: Sequence[Sequence[Cost]]) -> Iterator[Cost]:
    """Yield the medians of costs that were measured in several processes, in the same order."""
    for costs in zip(*runs, strict=True):
        numbers = {
            name: statistics.median(getattr(cost, name) for cost in costs)
            for name in ("milliseconds", "ratio", "extra_bytes")
        }
        yield replace(costs[0], **numbers, ratios=[cost.ratio for cost in costs])


def training(iterations: int = 300, say: Report = lambda _: None) -> dict[str, float]:
    """Return the wall time of training the char-GPT relative to AdamW fused.

    The methods take turns of ten iterations.
    """
    task = get_task("shakespeare", "cpu")
    methods = {
        "AdamW fused": AdamWMethod(weight_decay=0.01),
        "PAdam fused": PAdamMethod(p=0.8, lam=0.02),
        "PAdam fused, 95 % zeros": _SparsePAdam(p=0.8, lam=1e-3),
    }
    runs = {
        name: Trainer(task, method, seed=0, lr=task.lr, steps=iterations, points=0).train()
        for name, method in methods.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    turn = 10
    for first in range(0, iterations, turn):
        say(f"iteration {first} of {iterations}")
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in itertools.islice(run, turn):
                pass
            times[name].append(time.perf_counter() - began)
    base = statistics.median(times["AdamW fused"])
    return {name: statistics.median(taken) / base for name, taken in times.items()}


class _SparsePAdam(PAdamMethod):
    """PAdam on a model with 95 % zeros from the start, which stay zero."""

    @torch.no_grad()
    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        for param in model.parameters():
            if param.ndim >= 2:
                param.mul_(torch.rand_like(param) < 0.05)
        return super().start(model, task, lr, steps)


def target_share(
    model: str, batch: tuple[int, int], iterations: int, update_power: float = 0.0
) -> float:
    """Return the time of SparsityTarget relative to the rest of training, during its ramp.

    A GPT trains on random symbols with PAdam for some steps of a ramp of 1200 steps (a training of
    2000), in which weights are ranked at every sixth step.

    Args:
        model: the name of a GPT in MODELS.
        batch: the number of sequences and their length.
        iterations: the number of steps; a multiple of six.
        update_power: as in SparsityTarget.
    """
    network = MODELS[model]()
    optimizer = PAdam(network.parameters(), LR, decay=NORMS["0.8"])
    target = pdecay.SparsityTarget(
        optimizer, 0.9, 2000, start=0, end=0.6, update_power=update_power
    )
    times = {"target": 0.0, "all": 0.0}

    def timed(function: Callable[..., None], key: str) -> Callable[..., None]:
        def run(*args: object) -> None:
            began = time.perf_counter()
            function(*args)
            times[key] += time.perf_counter() - began

        return run

    def train() -> None:
        tokens = torch.randint(0, 65, (batch[0], batch[1] + 1))
        logits = network(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for name in ("before_step", "after_step"):
        setattr(target, name, timed(getattr(target, name), "target"))
    for _ in range(6):  # allocates state and compiles
        train()
    times["target"] = 0.0
    for _ in range(iterations):
        timed(train, "all")()
    return times["target"] / (times["all"] - times["target"])


def first_use() -> dict[str, float]:
    """Return the seconds of the first step in a new process, with an empty and a full cache.

    The time to import torch and pdecay is not included.
    """
    code = (
        "import time, torch, pdecay\n"
        "w = torch.nn.Parameter(torch.ones(4, 4)); w.grad = torch.ones(4, 4)\n"
        "optimizer = pdecay.PAdam([w], fused=True)\n"
        "began = time.perf_counter(); optimizer.step(); print(time.perf_counter() - began)\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        taken = [float(_output_of(code, {"PDECAY_CACHE": cache})) for _ in range(2)]
    return dict(zip(("cold", "from the cache"), taken, strict=True))


def _output_of(code: str, variables: Mapping[str, str]) -> str:
    """Run Python code in a new process with further environment variables.

    It imports from where this process does: `-c` alone adds the current folder, where another user
    may have put a `torch.py`.
    """
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    command = [sys.executable, "-P", "-c", path + code]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def _weights(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    """Return weights with gradients. Large tensors repeat random numbers, to save time."""
    numbers = torch.empty(1 << 20).normal_(generator=torch.Generator().manual_seed(0))
    weights = []
    for shape in shapes:
        weight = nn.Parameter(_filled(shape, 0.05 * numbers))
        weight.grad = _filled(shape, 1e-3 * numbers.flip(0))
        weights.append(weight)
    return weights


def _filled(shape: tuple[int, ...], numbers: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape)
    for part in tensor.view(-1).split(len(numbers)):
        part.copy_(numbers[: len(part)])
    return tensor


def _measure(
    model: str,
    shapes: Sequence[tuple[int, ...]],
    methods: Mapping[str, Method],
    rounds: int,
) -> Iterator[Cost]:
    count = sum(map(math.prod, shapes))
    cells = [(name, norm) for name, method in methods.items() for norm in method.norms]
    times: dict[Cell, list[float]] = {cell: [] for cell in cells}
    steppers = _steppers(_weights(shapes), methods)
    extra = {cell: _extra_memory(step) / count for cell, step in steppers.items()}
    order = random.Random()
    for _ in range(rounds):
        for cell in order.sample(cells, len(cells)):
            began = time.perf_counter()
            steppers[cell]()
            times[cell].append(time.perf_counter() - began)
    base = times[cells[0]]
    for name, norm in cells:
        taken = times[name, norm]
        ratio = statistics.median(map(operator.truediv, taken, base))
        milliseconds = 1e3 * statistics.median(taken)
        yield Cost(model, count, name, norm, milliseconds, ratio, extra[name, norm])


def _steppers(
    weights: list[nn.Parameter], methods: Mapping[str, Method]
) -> dict[Cell, Callable[[], None]]:
    """Return a function for each method and penalty that runs one step on the same weights."""
    steppers: dict[Cell, Callable[[], None]] = {}
    shared = None
    for name, method in methods.items():
        for norm, penalty in method.norms.items():
            optimizer = method.make(weights, penalty)
            if shared is None:
                optimizer.step()
                shared = optimizer.state
            optimizer.state = shared  # all share one set of moments
            steppers[name, norm] = functools.partial(_step, optimizer, method.path)
    return steppers


def _step(optimizer: Optimizer, path: KernelName | None) -> None:
    with only_kernel(path):
        optimizer.step()


def _extra_memory(step: Callable[[], None]) -> float:
    """Return the peak memory of a step in bytes beyond the memory before it."""
    step()  # allocates buffers that are kept
    gc.collect()
    peak = Path("/proc/self/clear_refs")
    if not peak.exists():
        return float("nan")
    peak.write_text("5")  # resets the peak to the current memory
    before = _memory("VmHWM")
    step()
    return max(0.0, _memory("VmHWM") - before)


def _memory(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * float(line.split()[1])
    return float("nan")
