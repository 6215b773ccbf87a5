"""Scores that decide which weights are removed first: magnitude, or length in Adam's metric.

Adam moves each weight by about ``lr * m / sqrt(v)``, where v is the running mean of its squared
gradient. It therefore measures the distance between two weights in its own metric,

    |w - w'|^2_v = sqrt(v) * (w - w')^2 ,

in which the length of a weight is ``|w| * v^(1/4)``. Ranking by this length (``rank="adaptive"``)
removes small weights whose gradients are small, too, before weights that are as small but matter to
the loss. Weights that had no gradient yet come first. A whole tensor of them, such as a head whose
loss is added later, would be removed before its training starts, and is not ranked yet. Ranking by
``|w|`` alone is ``rank="magnitude"``.

v starts at zero. Where Adam has updated some weights less often than others, because they were
unfrozen later, their scores are multiplied as Adam's own correction of v asks for.

Adam, RMSprop and their relatives keep v in their state. For other optimizers a running mean is kept
in ``optimizer.state[param]["squared_gradient"]``, where it is saved with the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

from pdecay._core.group_settings import Group
from pdecay._core.parameters import is_zero
from pdecay._optim.hooks import local_optimizer
from pdecay._optim.state_precision import SQUARES
from pdecay._sparsity import passes
from pdecay._sparsity.shards import local_part

Rank = Literal["adaptive", "magnitude"]

_KEYS = ("exp_avg_sq", "square_avg", SQUARES)  # Adam; RMSprop, Adadelta; ours
_BETA = 0.999


def check_rank(rank: str) -> None:
    """Raise ValueError unless this is the name of a ranking."""
    if rank not in get_args(Rank):
        names = " or ".join(repr(name) for name in get_args(Rank))
        raise ValueError(f"rank must be {names}, got {rank!r}")


@torch.no_grad()
def adaptive_scores(param: Tensor, optimizer: Optimizer, factor: float = 1.0) -> Tensor:
    """Return ``|w| * v^(1/4)``, times a factor; exactly 0 for zero weights."""
    local = local_optimizer(optimizer)
    squares = _squares(param, local)
    if (
        squares is not None
        and local is optimizer
        and passes.supports(*map(local_part, (param, squares)))
    ):
        result = torch.empty_like(param, requires_grad=False)
        passes.scores_(local_part(result), local_part(param), local_part(squares))
        return result if factor == 1 else result.mul_(factor)
    magnitude: Tensor = param.abs()
    if magnitude.dtype != torch.float64:
        magnitude = magnitude.float()
    if local is not optimizer:  # ZeroRedundancyOptimizer: one rank has the state, the others 0
        squares = torch.zeros_like(param) if squares is None else squares.to(param.dtype).clone()
        torch.distributed.all_reduce(squares, group=optimizer.process_group)  # type: ignore[attr-defined]
    if squares is None:
        return magnitude.mul(passes.SMALLEST_SQUARE**0.25)
    if squares.is_complex():  # Adam treats a complex weight as two real ones
        squares = squares.real + squares.imag
    roots = squares.to(magnitude.dtype).clamp_min(passes.SMALLEST_SQUARE).sqrt_().sqrt_()
    scores: Tensor = magnitude * roots.mul_(factor)
    # Without this, an infinite v would give a zero weight the score NaN, which ranks last.
    return scores.masked_fill_(param == 0, 0.0)


def ranked_squares(param: Tensor, optimizer: Optimizer) -> Tensor | None:
    """Return v if the C kernel can rank this weight directly from w and v, else None."""
    squares = _squares(param, optimizer) if local_optimizer(optimizer) is optimizer else None
    if squares is None or not passes.supports(param, squares):
        return None
    return squares


def with_gradients(owners: Mapping[Tensor, Optimizer], known: Iterable[Tensor] = ()) -> set[Tensor]:
    """Return the tensors that have had a gradient; return all if none is known to have had one.

    Args:
        owners: the tensors, with their optimizers.
        known: the result of an earlier call.
    """
    found = {*known} & owners.keys()
    found |= {
        param for param in owners if param not in found and _had_gradient(param, owners[param])
    }
    return found or {*owners}


def factors_of_young(owners: Mapping[Tensor, Optimizer]) -> dict[Tensor, float]:
    """Return factors of the scores of weights that Adam has updated less often than others.

    Adam's v starts at 0, and Adam divides it by ``1 - beta2^step``. For the weights of an optimizer
    that were added or unfrozen later, this number is smaller.

    Args:
        owners: the weights, with their optimizers.
    """
    factors: dict[Tensor, float] = {}
    for optimizer in dict.fromkeys(owners.values()):  # in the same order on all ranks
        shares = {
            param: share
            for group in optimizer.param_groups
            for param in group["params"]
            if param in owners and (share := _share_of_v(param, group, optimizer))
        }
        largest = max(shares.values(), default=0.0)
        young = {param: share for param, share in shares.items() if share < largest}
        factors |= {param: (largest / share) ** 0.25 for param, share in young.items()}
    return factors


def create_squares(params: Iterable[Tensor], optimizer: Optimizer) -> None:
    """Create the mean of squared gradients for weights whose state lacks it.

    torch.distributed.checkpoint loads no state that does not exist yet. It creates missing state by
    a step, but not for an optimizer that has some: Adagrad creates its own at the start.
    """
    local = local_optimizer(optimizer)
    for param in params:
        if local.state.get(param) and _squares(param, local) is None:
            local.state[param][SQUARES] = torch.zeros_like(param, dtype=torch.float32)


@torch.no_grad()
def update_squares(params: Iterable[Tensor], optimizer: Optimizer) -> None:
    """Update the running mean of squared gradients where the optimizer keeps none.

    Call it after the optimizer's step: many optimizers initialise their state only if it is empty.
    """
    local = local_optimizer(optimizer)
    if local is not optimizer:  # the state of a parameter is on one rank
        own = {param for group in local.param_groups for param in group["params"]}
        params = [param for param in params if param in own]
    for param in params:
        if param.grad is None:
            continue
        squares = _squares(param, local)
        if squares is not None and local.state[param].get(SQUARES) is not squares:
            continue
        square = _magnitudes(param.grad).square_()
        if squares is None or squares.shape != square.shape:  # see _complete_state
            squares = local.state[param][SQUARES] = torch.zeros_like(square)
        elif squares.dtype != torch.float32:  # loaded without our hooks
            squares = local.state[param][SQUARES] = squares.float()
        if torch.isfinite(square).all():  # one infinite gradient would make the mean infinite
            squares.lerp_(square, 1 - _BETA)
    _complete_state(local)


def _complete_state(optimizer: Optimizer) -> None:
    """Give the other weights a state if the optimizer keeps none, such as SGD without momentum.

    torch.distributed.checkpoint refuses to load state if only some of the weights have it. It is
    replaced if a weight is steered later.
    """
    if all(state.keys() <= {SQUARES} for state in optimizer.state.values()):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.grad is not None and not optimizer.state.get(param):
                optimizer.state[param][SQUARES] = torch.zeros((), device=param.device)


def _had_gradient(param: Tensor, optimizer: Optimizer) -> bool:
    local = local_optimizer(optimizer)
    squares = _squares(param, local)
    had = bool(local.state.get(param)) and (squares is None or not is_zero(squares))
    return bool(_on_all_ranks(float(had), param, optimizer))


def _share_of_v(param: Tensor, group: Group, optimizer: Optimizer) -> float:
    """Return ``1 - beta2^step`` for weights of torch's Adam and its relatives; 0 for others."""
    local = local_optimizer(optimizer)
    if not isinstance(local, Adam | AdamW | NAdam | RAdam):
        return 0.0
    state = local.state.get(param, {})
    step = state.get("step", 0) if "exp_avg_sq" in state else 0
    count = float(local_part(step) if isinstance(step, Tensor) else step)
    beta = float(group["betas"][1])
    return float(1 - beta ** _on_all_ranks(count, param, optimizer))


def _on_all_ranks(number: float, param: Tensor, optimizer: Optimizer) -> float:
    """Return a number that only the rank with the weight's state knows; the others give 0."""
    if local_optimizer(optimizer) is optimizer:
        return number
    total = torch.tensor([number], dtype=torch.float32, device=param.device)
    torch.distributed.all_reduce(total, group=optimizer.process_group)  # type: ignore[attr-defined]
    return float(total.item())


def _magnitudes(grad: Tensor) -> Tensor:
    """Return the magnitudes of a gradient, which may be sparse, as a new float32 tensor."""
    whole: Tensor = grad.to_dense() if grad.is_sparse else grad
    return whole.abs().float()


def _squares(param: Tensor, optimizer: Optimizer) -> Tensor | None:
    state = optimizer.state.get(param, {})
    for key in _KEYS:
        squares = state.get(key)
        # 8-bit and factored optimizers keep other shapes, types or classes under the same name.
        if (
            isinstance(squares, Tensor)
            and type(local_part(squares)) is Tensor
            and squares.shape == param.shape
            and (squares.is_floating_point() or squares.is_complex())
        ):
            return squares
    return None
