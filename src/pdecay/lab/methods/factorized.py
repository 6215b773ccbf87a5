"""Deep weight factorization: another way to an L_p penalty, for p = 2 / depth.

Each weight is a product, ``w = u_1 * ... * u_D``, and the factors have an L2 penalty. Of all
factors with a given product those of equal magnitude have the smallest penalty, so that

    min over u of  (lam / 2) * sum_d u_d^2  =  (lam / p) * |w|^p ,    p = 2 / D ,

which is the penalty of :class:`pdecay.Lp` with the same lam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import pdecay
from pdecay._core.validation import check_count, check_number
from pdecay.lab.methods.base import Method, Run
from pdecay.lab.tasks import Task

# Products below single precision's epsilon count as zero, as in the method's paper.
EPSILON = torch.finfo(torch.float32).eps
_SMALLEST = 3e-3  # of a product at the start: factors next to zero would not move


@dataclass(frozen=True)
class DWFMethod(Method):
    """Deep weight factorization: products of `depth` factors, with L2 in their gradients.

    The factors start from a normal distribution whose product has the deviation that the weights
    had, cut off so that the product is neither tiny nor huge. They are trained with Adam like all
    else here, where the method's paper has SGD; the L2 term is part of the gradient, as the
    equivalence needs. So lam is in units of the loss's gradient, and much smaller than PAdam's.

    References:
        Kolb, Weber, Bischl and Rügamer, Deep Weight Factorization: Sparse Learning Through the
        Lens of Artificial Symmetries, 2025.
    """

    depth: int = 3
    lam: float = 1e-4

    def __post_init__(self) -> None:
        check_count("depth", self.depth, least=2)
        check_number("lam", self.lam)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        decayed, spared = pdecay.param_groups(model)
        weights: list[Tensor] = decayed["params"]
        factors = [new_factors(weight, self.depth) for weight in weights]
        optimizer = Adam(
            [
                {"params": factors, "weight_decay": self.lam},
                {"params": spared["params"], "weight_decay": 0.0},
            ],
            lr=lr,
            fused=True,
        )
        return _Factorized(optimizer, weights, factors)


class _Factorized(Run):
    """The model keeps its plain weights, which are set to the products after each step.

    Their gradients are the products'; the chain rule takes them to the factors before each step.
    So ties between layers, evaluation and counting need no thought.
    """

    def __init__(
        self, optimizer: Optimizer, weights: list[Tensor], factors: list[nn.Parameter]
    ) -> None:
        super().__init__(optimizer)
        self._weights, self._factors = weights, factors
        optimizer.register_step_pre_hook(lambda *_: self._pull_back())
        self._multiply_out()

    def after_step(self) -> None:
        self._multiply_out()

    def state_dict(self) -> dict[str, Any]:
        return {"factors": [factors.detach() for factors in self._factors]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for factors, saved in zip(self._factors, state_dict["factors"], strict=True):
            factors.copy_(saved)

    @torch.no_grad()
    def _multiply_out(self) -> None:
        for weight, factors in zip(self._weights, self._factors, strict=True):
            product = factors.prod(dim=0)
            weight.copy_(product.masked_fill_(product.abs() < EPSILON, 0.0))

    @torch.no_grad()
    def _pull_back(self) -> None:
        for weight, factors in zip(self._weights, self._factors, strict=True):
            if weight.grad is not None:
                factors.grad = others_product(factors).mul_(weight.grad)


@torch.no_grad()
def new_factors(weight: Tensor, depth: int) -> nn.Parameter:
    """Random factors, stacked along a new first dimension, for a weight of this deviation.

    Each is normal, with the depth-th root of the weight's deviation, and cut off on both sides of
    zero: drawn through the distribution's inverse, so that none has to be drawn again.
    """
    deviation = float(weight.std())
    scale = math.sqrt(2) * deviation ** (1 / depth)
    low = min(_SMALLEST, deviation / 2) ** (1 / depth)
    high = min(1.0, (2 * deviation) ** (1 / depth))
    factors = torch.empty((depth, *weight.shape), device=weight.device)
    factors.uniform_(math.erf(low / scale), math.erf(high / scale)).erfinv_().mul_(scale)
    signs = torch.randint_like(factors, 2).mul_(2).sub_(1)
    return nn.Parameter(factors.mul_(signs))


def others_product(factors: Tensor) -> Tensor:
    """For each factor the product of all others, without a division that zero would spoil."""
    products = torch.ones_like(factors)
    for k, factor in enumerate(factors):
        products[:k] *= factor
        products[k + 1 :] *= factor
    return products
