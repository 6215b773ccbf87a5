"""The reference of the kernel tests: torch's own optimizers and the decay factor in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SHAPES = ((3,), (33, 7), (1,), (64, 130), (0, 4), (4, 3, 3, 3))
LR = 2e-5  # small: rounding decides whether a weight that crosses zero stays there


def factor(w_old: Tensor, terms: Sequence[tuple[float, float]], rate: float) -> Tensor:
    """Return the decay factor in float64, for weights that do not overflow."""
    nonzero = [(p, rate * lam) for p, lam in terms if rate * lam != 0]
    if not nonzero:
        return torch.ones_like(w_old, dtype=torch.float64)
    x = w_old.double().abs()
    q = max(0.0, 2 - min(p for p, _ in nonzero))
    return x**q / (x**q + sum(c * x ** (p + q - 2) for p, c in nonzero))


class Twins:
    """Weights updated by a kernel, and the same weights in float64 updated by torch."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, shapes: Sequence[Any] = SHAPES) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.fast = [self.normal(shape).mul(0.05).to(dtype) for shape in shapes]
        self.slow = [torch.nn.Parameter(w.double().clone()) for w in self.fast]

    def normal(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def gradients(self) -> list[Tensor]:
        grads = [self.normal(w.shape).to(w.dtype) for w in self.fast]
        for weight, grad in zip(self.slow, grads, strict=True):
            weight.grad = grad.double()
        return grads

    def step_slow(
        self, optimizer: torch.optim.Optimizer, terms: Sequence[tuple[float, float]], rate: float
    ) -> None:
        by = [factor(w.detach(), terms, rate) for w in self.slow]
        optimizer.step()
        with torch.no_grad():
            for weight, value in zip(self.slow, by, strict=True):
                weight.mul_(value)

    def difference(self) -> float:
        pairs = zip(self.fast, self.slow, strict=True)
        return max((f.double() - s).abs().max().item() for f, s in pairs if f.numel())

    def different_zeros(self) -> float:
        """Return the fraction of weights that are zero (below 1e-30) in only one of the two."""
        pairs = list(zip(self.fast, self.slow, strict=True))
        differ = sum(int(((f.abs() < 1e-30) != (s.abs() < 1e-30)).sum()) for f, s in pairs)
        return differ / sum(f.numel() for f, _ in pairs)

    def adam(
        self, kernel: ModuleType, terms: Any, steps: int, *, lr: float = LR, **options: Any
    ) -> None:
        """Run `steps` steps of AdamW with the decay on both."""
        amsgrad = options.get("amsgrad", False)
        slow = torch.optim.AdamW(self.slow, lr=lr, foreach=False, fused=False, **options)
        state = [[torch.zeros_like(w) for w in self.fast] for _ in range(3)]
        counts = [torch.tensor(0.0) for _ in self.fast]
        for _ in range(steps):
            grads = self.gradients()
            self.step_slow(slow, terms, lr)
            kernel.adam_(
                *(self.fast, grads, *state[:2], state[2] if amsgrad else [], counts),
                terms=terms,
                lr=lr,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=options.get("weight_decay", 1e-2),
                amsgrad=amsgrad,
                maximize=options.get("maximize", False),
            )
        assert all(count.item() == steps for count in counts)

    def sgd(self, kernel: ModuleType, terms: Any, steps: int, **options: Any) -> None:
        """Run `steps` steps of SGD with the decay, which has its own rate, on both."""
        lr = LR / 10  # with momentum, the steps are then as long as Adam's
        settings = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
        settings |= {"maximize": False} | options
        slow = torch.optim.SGD(self.slow, lr=lr, foreach=False, fused=False, **settings)
        buffers = [torch.full_like(w, float("nan")) for w in self.fast]
        for step in range(steps):
            grads = self.gradients()
            self.step_slow(slow, terms, LR)
            settings["first"] = step == 0
            kernel.sgd_(self.fast, grads, buffers, terms=terms, lr=lr, rate=LR, **settings)


@pytest.fixture
def twins() -> type[Twins]:
    return Twins


@pytest.fixture
def literal_factor() -> Any:
    return factor
