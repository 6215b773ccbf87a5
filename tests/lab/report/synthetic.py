"""Synthetic records with the format of real ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from pdecay.lab.train.records import SCHEMA, Record, run_id, tradeoff

# The decayed weights of the char-GPT, by name and shape.
GPT = [
    ("token_embedding.weight", [65, 128]),
    *(
        (f"blocks.{k}.{name}", shape)
        for k in range(4)
        for name, shape in (
            ("attention.qkv.weight", [384, 128]),
            ("attention.out.weight", [128, 128]),
            ("mlp.up.weight", [512, 128]),
            ("mlp.down.weight", [128, 512]),
        )
    ),
]
MLP = [("0.weight", [300, 64]), ("2.weight", [100, 300]), ("4.weight", [10, 100])]


def record(
    method: str = "padam",
    *,
    task: str = "shakespeare",
    scale: str = "cpu",
    seed: int = 0,
    lr: float = 1e-2,
    steps: int = 1500,
    layers: Iterable[tuple[str, list[int]]] = GPT,
    finished: str = "2026-01-02T03:05:27+00:00",
    diverged: bool = False,
    accuracy: float | None = None,
    sparsity: float | None = None,
    **options: Any,
) -> Record:
    """Return a run. Accuracy and sparsity are derived from its settings unless they are given."""
    settings = {
        "task": task,
        "scale": scale,
        "method": method,
        "seed": seed,
        "lr": lr,
        "steps": steps,
        "options": options,
    }
    dice = random.Random(run_id(settings))
    if sparsity is None:
        sparsity = _sparsity(method, lr, options, dice)
    if accuracy is None:
        accuracy = _accuracy(method, lr, sparsity, dice)
    result = _result(list(layers), accuracy, sparsity, dice)
    curve = list(_curve(steps, lr, result, method))
    if diverged:
        curve = curve[:7]
        curve[-1] |= {"train_loss": None, "loss": None, "accuracy": None}
        result |= {"accuracy": None, "loss": None, "tradeoff": None}
    return {
        "schema": SCHEMA,
        "id": run_id(settings),
        "settings": settings,
        "result": result,
        "curve": curve,
        "status": "diverged" if diverged else "ok",
        "environment": {"pdecay": "0.2.0", "torch": "2.13.0", "python": "3.11.9", "threads": 1},
        "timing": {
            "started": "2026-01-02T03:04:05+00:00",
            "finished": finished,
            "seconds": 80 + 4 * dice.random(),
            "resumed": 0,
        },
    }


def sweep(seeds: Iterable[int] = (0,), **shared: Any) -> list[Record]:
    """Return a sweep like the paper's: AdamW, PAdam over p x lr x lam, and the other methods."""
    records = []
    rates = (1e-3, 3e-3, 1e-2, 3e-2)
    for seed in seeds:
        same = {"seed": seed, **shared}
        for lr, decay in product(rates, (0.01, 0.1)):
            records.append(record("adamw", lr=lr, weight_decay=decay, **same))
        for p, lr, lam in product((0.5, 0.8, 1.0, 1.2, 1.5), rates, (1e-3, 3e-3, 1e-2, 3e-2, 0.1)):
            failed = lr == 3e-2 and lam == 0.1 and p < 1
            records.append(record("padam", lr=lr, p=p, lam=lam, diverged=failed, **same))
        for lr, lam in product(rates[1:], (3e-3, 1e-2, 3e-2)):
            records.append(record("elastic", lr=lr, p=0.8, lam=lam, l2=2e-3, **same))
        for lr, share in product(rates[1:3], (0.8, 0.9, 0.95, 0.98)):
            records.append(record("target", lr=lr, p=0.8, target=share, **same))
            records.append(record("gmp", lr=lr, target=share, weight_decay=0.1, **same))
        for lr, threshold in product(rates[1:3], (3e-3, 1e-2, 3e-2)):
            records.append(record("mp", lr=lr, threshold=threshold, weight_decay=0.1, **same))
        records += [record("oto", lr=3e-3, target=share, **same) for share in (0.5, 0.7)]
    return records


def _sparsity(method: str, lr: float, options: dict[str, Any], dice: random.Random) -> float:
    noise = dice.gauss(0, 1)
    if method == "adamw":
        return 0.0
    if "target" in options:
        return float(options["target"]) + 1e-5 * noise
    if "threshold" in options:
        pull = 1.3 * math.log10(options["threshold"] / 6e-3)
    else:
        pull = math.log10(options.get("lam", 1e-2) / 0.01) + 0.5 * math.log10(lr / 1e-2)
        pull += 1.4 * (0.95 - options.get("p", 1.0))
    return 0.998 / (1 + math.exp(-4.2 * pull - 0.15 * noise))


def _accuracy(method: str, lr: float, sparsity: float, dice: random.Random) -> float:
    price = {"oto": 4.0, "mp": 1.1, "gmp": 1.15, "target": 0.9, "elastic": 0.95}.get(method, 1.0)
    gone = -math.log10(1 - min(sparsity, 0.9995))
    detour = math.log10(lr / 1e-2)
    dense = 48.9 - 1.9 * detour**2 - 1.2 * max(detour, 0) + 0.25 * min(1, 2 * sparsity)
    return max(21.0, dense - price * 0.9 * gone**2.2 + dice.gauss(0, 0.12))


def _result(
    layers: list[tuple[str, list[int]]], accuracy: float, sparsity: float, dice: random.Random
) -> dict[str, Any]:
    found = []
    for name, shape in layers:
        size = math.prod(shape)
        left = min(1.0, (1 - sparsity) * math.exp(dice.gauss(0, 0.3)))
        found.append(
            {"name": name, "shape": shape, "size": size, "zeros": round((1 - left) * size)}
        )
    return {
        "accuracy": accuracy,
        "loss": 3.6 - 0.037 * accuracy,
        "sparsity": sparsity,
        "tradeoff": tradeoff(accuracy, sparsity),
        "total_sparsity": 0.99 * sparsity,
        "weights": sum(layer["size"] for layer in found),
        "layers": found,
    }


def _curve(steps: int, lr: float, result: dict[str, Any], method: str) -> Iterator[dict[str, Any]]:
    for k in range(21):
        done = k / 20
        rise = (1 - math.exp(-5 * done)) / (1 - math.exp(-5))
        ramp = 1 / (1 + math.exp(-12 * (done - 0.35)))
        yield {
            "step": round(done * steps),
            "lr": lr * (0.01 + 0.99 * math.cos(math.pi * done / 2) ** 2),
            "train_loss": 4.17 + (result["loss"] - 0.08 - 4.17) * rise,
            "accuracy": 2 + (result["accuracy"] - 2) * rise,
            "loss": 4.17 + (result["loss"] - 4.17) * rise,
            "sparsity": result["sparsity"] * ramp if k < 20 else result["sparsity"],
        }
