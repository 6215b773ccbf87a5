"""Size and speed of `pdecay.save` compared with `torch.save` and the bound.

    python benchmarks/files.py size      # networks, one of them trained
    python benchmarks/files.py speed     # 50 million weights, written and read; median of five

The results are written to benchmarks/records/files.json; deploy_tables.py makes tables from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from documents import RECORDS
from pdecay.deployment.files import load, save
from pdecay.lab.methods.decay import TargetMethod
from pdecay.lab.models import GPT, ResNet
from pdecay.lab.tasks import get_task
from pdecay.lab.train.loop import Trainer
from provenance import provenance

SPARSITIES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)


def sizes(folder: Path) -> list[dict[str, Any]]:
    """Return the bytes of files of several networks."""
    networks: list[tuple[str, nn.Module]] = [
        (f"digits MLP, trained to {target:.0%}", trained_digits(target)) for target in (0.9, 0.95)
    ]
    torch.manual_seed(0)
    for name, model in (
        ("ResNet18, 16 channels wide, random", lambda: ResNet(16)),
        ("ResNet18, random", ResNet),
        ("char-GPT, random", lambda: GPT(65, 128, 4, 4, 128)),
    ):
        networks += [(name, masked(model(), sparsity)) for sparsity in (0.9, 0.95, 0.99)]
    rows = []
    for name, model in networks:
        torch.save(model.state_dict(), folder / "torch.pt")
        report = save(model, folder / "file.safetensors")
        weights = [tensor for tensor in report.tensors if len(tensor.shape) > 1]
        zeros = sum(t.zeros for t in weights) / sum(t.size for t in weights)
        rows.append(
            {
                "network": name,
                "zeros": round(zeros, 4),
                "torch.save": (folder / "torch.pt").stat().st_size,
                "pdecay.save": report.nbytes,
                "bound": round(report.bound),
            }
        )
        print(rows[-1], flush=True)
    return rows


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


def speed(folder: Path) -> list[dict[str, float]]:
    """Return the megabytes of dense weights that are written and read in a second."""
    torch.manual_seed(0)
    dense = [torch.randn(1250, 4000) for _ in range(10)]
    ours, torchs = folder / "file", folder / "torch.pt"
    rows = []
    for sparsity in SPARSITIES:
        state = {str(i): w * (torch.rand(w.shape) >= sparsity) for i, w in enumerate(dense)}
        calls: dict[str, Callable[[], object]] = {
            "save": lambda state=state: save(state, ours),
            "load": lambda: load(ours, max_bytes=10**9),
            "torch.save": lambda state=state: torch.save(state, torchs),
            "torch.load": lambda: torch.load(torchs),
        }
        rates = {name: round(rate(state, call)) for name, call in calls.items()}
        rows.append({"zeros": sparsity} | rates)
        print(rows[-1], flush=True)
    return rows


def rate(state: Mapping[str, Tensor], call: Callable[[], object]) -> float:
    """Return megabytes of dense weights per second."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sum(w.nbytes for w in state.values()) / statistics.median(times) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["size", "speed"])
    part = parser.parse_args().part
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        name, measure = {"size": ("networks", sizes), "speed": ("rates", speed)}[part]
        measured = {**provenance(), name: measure(Path(temporary))}
    path = RECORDS / "files.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**record, part: measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
