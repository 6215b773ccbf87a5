"""Deep weight factorization: an L_p penalty with p = 2 / depth through products of factors.

Each weight is a product, ``w = u_1 * ... * u_D``, of factors with an L2 penalty. Among all factors
with a given product, those of equal magnitude have the smallest penalty, so that

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
_SMALLEST = 3e-3  # initial product: factors close to zero would not train


@dataclass(frozen=True)
class DWFMethod(Method):
    """Deep weight factorization: products of `depth` factors, with L2 in their gradients.

    The factors start from a truncated normal distribution such that the products have the
    deviation of the weights and are neither tiny nor huge. They are trained with Adam like all
    methods here, whereas the method's paper uses SGD. The L2 term is part of the gradient, as the
    equivalence requires, so lam is in units of the gradient and much smaller than PAdam's.

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
        decayed, others = pdecay.param_groups(model)
        weights: list[Tensor] = decayed["params"]
        factors = [new_factors(weight, self.depth) for weight in weights]
        optimizer = Adam(
            [
                {"params": factors, "weight_decay": self.lam},
                {"params": others["params"], "weight_decay": 0.0},
            ],
            lr=lr,
            fused=True,
        )
        return _Factorized(optimizer, weights, factors)


class _Factorized(Run):
    """A run on a model that keeps plain weights, which are set to the products after each step.

    Before each step the chain rule turns the gradients of the weights into those of the factors.
    Tied layers, evaluation and counting need no special treatment.
    """

    def __init__(
        self, optimizer: Optimizer, weights: list[Tensor], factors: list[nn.Parameter]
    ) -> None:
        super().__init__(optimizer)
        self._weights, self._factors = weights, factors
        optimizer.register_step_pre_hook(lambda *_: self._set_factor_gradients())
        self._set_products()

    def after_step(self) -> None:
        self._set_products()

    def state_dict(self) -> dict[str, Any]:
        return {"factors": [factors.detach() for factors in self._factors]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for factors, saved in zip(self._factors, state_dict["factors"], strict=True):
            factors.copy_(saved)

    @torch.no_grad()
    def _set_products(self) -> None:
        for weight, factors in zip(self._weights, self._factors, strict=True):
            product = factors.prod(dim=0)
            weight.copy_(product.masked_fill_(product.abs() < EPSILON, 0.0))

    @torch.no_grad()
    def _set_factor_gradients(self) -> None:
        for weight, factors in zip(self._weights, self._factors, strict=True):
            if weight.grad is not None:
                factors.grad = others_product(factors).mul_(weight.grad)


@torch.no_grad()
def new_factors(weight: Tensor, depth: int) -> nn.Parameter:
    """Return random factors of a weight, stacked along a new first dimension.

    Their deviation is the depth-th root of the weight's. Small and large magnitudes are cut off by
    sampling through the inverse of the distribution, which needs no rejection.
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
    """Return for each factor the product of the others, without division, which fails at zero."""
    products = torch.ones_like(factors)
    for k, factor in enumerate(factors):
        products[:k] *= factor
        products[k + 1 :] *= factor
    return products
