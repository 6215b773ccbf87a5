"""Slow, literal implementation of the paper; the tests compare every fast path with it.

The code loops over scalars, in double precision unless the caller's tensors are narrower. Nothing
is optimised or done in place, so that each line can be compared with the paper.

References:
    Outmezguine and Levi, Decoupled Weight Decay for Any p Norm, 2024: Algorithm 1, section 4.2 (the
    toy example), appendix A (K(s)) and appendix E (Listing 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdecay._core.penalty import Penalty


def pwd_step(w_tilde: float, w_old: float, pairs: Sequence[Sequence[float]], lr: float) -> float:
    """Return one weight after line 9 of Algorithm 1, for a sum of norms (eq. 15).

    ``w <- w_tilde * |w_old|^q / (|w_old|^q + lr * sum_k lam_k * |w_old|^(p_k + q - 2))`` with
    ``q = max(0, 2 - min p)``. This equals the division by ``1 + lr * sum_k lam_k * s_k``, but
    avoids the infinite s at w_old = 0.
    """
    active = [(p, lam) for p, lam in pairs if lr * lam > 0]
    if not active:
        return w_tilde
    x = abs(w_old)
    q = max(0.0, 2 - min(p for p, _ in active))
    numerator: float = x**q
    denominator: float = numerator + lr * sum(lam * x ** (p + q - 2) for p, lam in active)
    return w_tilde * (numerator / denominator)


def pwd(w_tilde: Tensor, w_old: Tensor, penalty: Penalty, lr: float) -> Tensor:
    """Apply :func:`pwd_step` to each weight of a real tensor, in double precision."""
    pairs = penalty.pairs()
    new = [
        pwd_step(tilde, old, pairs, lr)
        for tilde, old in zip(w_tilde.flatten().tolist(), w_old.flatten().tolist(), strict=True)
    ]
    return torch.tensor(new, dtype=torch.float64).reshape(w_tilde.shape)


def algorithm_1(
    w: Tensor,
    gradient: Callable[[Tensor], Tensor],
    update: Callable[[Tensor, int], Tensor],
    penalty: Penalty,
    lr: float,
    schedule: Callable[[int], float],
    steps: int,
) -> Tensor:
    """Run Algorithm 1: any gradient-based optimizer with the p-norm weight decay step.

    Args:
        w: the parameter vector at t = 0.
        gradient: returns g_t for w_(t-1).
        update: the paper's OptimizerWeightUpdate(g_t, t); returns delta w_t.
        penalty: an :class:`Lp` or a sum of them.
        lr: the learning rate, alpha in the paper.
        schedule: the paper's SetScheduleMultiplier(t); returns eta_t.
        steps: the number of steps.

    Returns:
        The parameter vector after the last step.
    """
    for t in range(1, steps + 1):
        g = gradient(w)
        delta_w = update(g, t)
        eta = schedule(t)
        w_tilde = w - eta * lr * delta_w
        w = pwd(w_tilde, w, penalty, eta * lr)
    return w


class AdamUpdate:
    """Adam as Kingma and Ba define it, as an `update` for :func:`algorithm_1`."""

    def __init__(
        self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, amsgrad: bool = False
    ) -> None:
        self.betas, self.eps, self.amsgrad = betas, eps, amsgrad
        self.m: Tensor | float = 0.0
        self.v: Tensor | float = 0.0
        self.v_max: Tensor | None = None

    def __call__(self, g: Tensor, t: int) -> Tensor:
        beta1, beta2 = self.betas
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        v = self.v
        if self.amsgrad:
            self.v_max = v if self.v_max is None else torch.maximum(self.v_max, v)
            v = self.v_max
        m_hat = self.m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        return m_hat / (v_hat**0.5 + self.eps)


class SGDUpdate:
    """SGD with momentum, defined as in ``torch.optim.SGD``; an `update` for :func:`algorithm_1`."""

    def __init__(self, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False):
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        self.buffer: Tensor | None = None

    def __call__(self, g: Tensor, t: int) -> Tensor:
        if not self.momentum:
            return g
        if self.buffer is None:
            self.buffer = g
        else:
            self.buffer = self.momentum * self.buffer + (1 - self.dampening) * g
        return g + self.momentum * self.buffer if self.nesterov else self.buffer


class Listing1(torch.optim.AdamW):
    """The paper's Listing 1, including its flaws; a baseline for the tests and the benchmarks.

    Its decay uses ``p * lr * lambda_p`` where Algorithm 1 uses ``lr * lam``, so
    ``lam = p * lambda_p``. It breaks at w = 0 with lr = 0, and its settings are not in checkpoints.
    """

    def __init__(
        self, params: Any, lr: float, *, lambda_p: float, p_norm: float, **adam: Any
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=0, **adam)
        self.lambda_p = lambda_p
        self.p_norm = p_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        before = [
            {param: param.data.clone() for param in group["params"] if param.grad is not None}
            for group in self.param_groups
        ]
        loss = super().step(closure)
        for group, old in zip(self.param_groups, before, strict=True):
            lambda_p = group.get("lambda_p", self.lambda_p)
            if lambda_p > 0:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    x = old[param].abs() ** (2 - self.p_norm)
                    param.data.mul_(x / (x + self.p_norm * group["lr"] * lambda_p))
        return loss


def extended_penalty(w: Tensor, s: Tensor, p: float, lam: float) -> Tensor:
    """Return the penalty as a function of the weights and of the auxiliary variable s.

    ``R(w, s) = (lam/2) * sum_i [s_i w_i^2 + K(s_i)]`` with ``K(s) = (2-p)/p * s^(p/(p-2))``.
    Its minimum over s > 0 is ``(lam/p) * sum |w|^p``, for 0 < p < 2 (eqs. 1 and 2).
    """
    k = (2 - p) / p * s ** (p / (p - 2))
    return lam / 2 * (s * w**2 + k).sum()


def toy(
    p: float = 0.6, lam: float = 1.0, lr: float = 0.1, steps: int = 100
) -> dict[str, list[float]]:
    """Run the paper's toy example (section 4.2) and return the weight after each step.

    It minimises ``(w-1)^2/2 + (lam/p)|w|^p`` from w = 1 in three variants: with the penalty in the
    gradient ("gradient"), with s updated at every step ("s every step"), and with s_0 = 0.1 and s
    updated at every 20th step ("s every 20 steps").
    """
    return {
        "gradient": _toy_gradient(p, lam, lr, steps),
        "s every step": _toy_decay(p, lam, lr, steps, every=1, start=1.0),
        "s every 20 steps": _toy_decay(p, lam, lr, steps, every=20, start=0.1),
    }


def _toy_gradient(p: float, lam: float, lr: float, steps: int) -> list[float]:
    w = [1.0]
    for _ in range(steps):
        w.append(w[-1] - lr * (w[-1] * (1 + lam * abs(w[-1]) ** (p - 2)) - 1))
    return w


def _toy_decay(
    p: float, lam: float, lr: float, steps: int, every: int, start: float
) -> list[float]:
    w = [torch.tensor(1.0, dtype=torch.float64)]
    s = torch.tensor(start, dtype=torch.float64)
    for t in range(steps):
        if t % every == 0 and (t > 0 or every == 1):
            s = abs(w[-1]) ** (p - 2)  # inf at 0, so that the weight stays 0
        w.append((w[-1] - lr * (w[-1] - 1)) / (1 + lr * lam * s))
    return [value.item() for value in w]
