"""Size and speed of `pdecay.save` compared with `torch.save` and the bound, as Markdown tables.

python benchmarks/files.py size      # networks, one of them trained
python benchmarks/files.py speed     # 50 million weights, written and read; median of five
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pdecay.deployment.files import load, save
from pdecay.lab.methods.decay import TargetMethod
from pdecay.lab.models import GPT, ResNet
from pdecay.lab.tasks import get_task
from pdecay.lab.train.loop import Trainer

SPARSITIES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)


def sizes(folder: Path) -> None:
    print("| network | zeros | torch.save | pdecay.save | the bound | above it |")
    print("|---|---|---|---|---|---|")
    networks: list[tuple[str, nn.Module]] = [
        (f"digits MLP, trained to {target:.0%}", trained_digits(target)) for target in (0.9, 0.95)
    ]
    for sparsity in (0.9, 0.95, 0.99):
        networks.append(("ResNet18, 16 channels wide, random", masked(ResNet(16), sparsity)))
        networks.append(("ResNet18, random", masked(ResNet(), sparsity)))
        networks.append(("char-GPT, random", masked(GPT(65, 128, 4, 4, 128), sparsity)))
    for name, model in networks:
        torch.save(model.state_dict(), folder / "torch.pt")
        report = save(model, folder / "file.safetensors")
        weights = [tensor for tensor in report.tensors if len(tensor.shape) > 1]
        zeros = sum(t.zeros for t in weights) / sum(t.size for t in weights)
        print(
            f"| {name} | {zeros:.1%} | {(folder / 'torch.pt').stat().st_size:,} | "
            f"{report.nbytes:,} | {report.bound:,.0f} | {report.ratio - 1:.1%} |"
        )


def trained_digits(target: float) -> nn.Module:
    """Train the digits' network: its zeros are less random than those of `masked`."""
    task = get_task("digits", "cpu")
    method = TargetMethod(p=0.8, target=target)
    trainer = Trainer(task, method, seed=0, lr=1e-3, steps=task.steps, points=0)
    for _ in trainer.train():
        pass
    trainer.finish()
    return trainer.model


@torch.no_grad()
def masked(model: nn.Module, sparsity: float) -> nn.Module:
    for weight in model.parameters():
        if weight.ndim > 1:
            weight *= torch.rand(weight.shape) >= sparsity
    return model


def speed(folder: Path) -> None:
    torch.manual_seed(0)
    dense = [torch.randn(1250, 4000) for _ in range(10)]
    ours, torchs = folder / "file", folder / "torch.pt"
    print("| zeros | save, MB/s | load, MB/s | torch.save, MB/s | torch.load, MB/s |")
    print("|---|---|---|---|---|")
    for sparsity in SPARSITIES:
        state = {str(i): w * (torch.rand(w.shape) >= sparsity) for i, w in enumerate(dense)}
        rates = [
            rate(state, lambda state=state: save(state, ours)),
            rate(state, lambda: load(ours, max_bytes=10**9)),
            rate(state, lambda state=state: torch.save(state, torchs)),
            rate(state, lambda: torch.load(torchs)),
        ]
        print(f"| {sparsity:.0%} | " + " | ".join(f"{r:,.0f}" for r in rates) + " |", flush=True)


def rate(state: Mapping[str, Tensor], call: Callable[[], object]) -> float:
    """Return megabytes of dense weights per second."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sum(w.nbytes for w in state.values()) / statistics.median(times) / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["size", "speed"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        {"size": sizes, "speed": speed}[parser.parse_args().part](Path(temporary))
