"""Checks of a model and its optimizer for mistakes, before the training starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Adam, Optimizer

from pdecay._core.group_settings import Group, decays, penalty_of, scale_of
from pdecay._core.parameters import decays_by_default, frozen_in, owners_of
from pdecay._core.penalty import Penalty, magnitude
from pdecay._optim.attachment import complete_groups, is_decaying
from pdecay._optim.hooks import unwrap
from pdecay._optim.state_precision import FLOAT16_CAUSE, FLOAT16_REMEDY
from pdecay._sparsity.target import target_of

Level = Literal["error", "warning", "hint"]
_MOST_NAMES = 8  # parameters that a finding lists by name


@dataclass(frozen=True)
class Finding:
    """A problem, or a possible one, and how to solve it."""

    level: Level
    message: str
    cure: str

    def __str__(self) -> str:
        return f"{self.level}: {self.message}\n  cure: {self.cure}"


@torch.no_grad()
def doctor(model: nn.Module, optimizer: Optimizer) -> list[Finding]:
    """Return the problems of training this model with this optimizer, the worst first.

    Nothing is changed. An empty list means that no problem was found.

    Args:
        model: the model.
        optimizer: its optimizer. Wrappers that hold the real one as ``.optimizer`` are unwrapped.

    Example:
        >>> import pdecay
        >>> model = nn.Linear(4, 2)
        >>> for finding in doctor(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        ...     print(finding)
        error: nothing decays: SGD has no p-norm weight decay
          cure: use pdecay.PAdam or pdecay.PSGD, or call pdecay.attach(optimizer, pdecay.Lp(...))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"doctor needs a torch.nn.Module, got {type(model).__name__}")
    optimizer = unwrap(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"doctor needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    complete_groups(optimizer)
    findings = [*_check_decay_acts(optimizer)]
    if not findings:
        findings += _check_zero_tensors(model, optimizer)
        findings += _check_norms_and_biases(model, optimizer)
        findings += _check_weight_norms(model, optimizer)
        findings += _check_settings(optimizer)
        findings += _check_strength(model, optimizer)
    findings += _check_ownership(model, optimizer)
    findings += _check_values(model, optimizer)
    rank = {"error": 0, "warning": 1, "hint": 2}
    return sorted(findings, key=lambda finding: rank[finding.level])


def _check_decay_acts(optimizer: Optimizer) -> Iterator[Finding]:
    kind = type(optimizer).__name__
    if not is_decaying(optimizer):
        if any("decay" in group for group in optimizer.param_groups):
            yield Finding(
                "error",
                f"nothing decays: this {kind} has a decay in its groups but no hook that applies "
                "it (deepcopy and pickle drop hooks)",
                "call pdecay.attach on this optimizer again, or use pdecay.PAdam or pdecay.PSGD, "
                "which survive both",
            )
        else:
            yield Finding(
                "error",
                f"nothing decays: {kind} has no p-norm weight decay",
                "use pdecay.PAdam or pdecay.PSGD, or call pdecay.attach(optimizer, pdecay.Lp(...))",
            )
    elif not any(True for _ in _decaying(optimizer)):
        yield Finding(
            "error",
            "nothing decays: no group has both a decay and a parameter that it acts on "
            "(tensors with fewer than two dimensions are not decayed by default)",
            "give a group its own decay: {'params': ..., 'decay': pdecay.Lp(...)}",
        )


def _check_zero_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    names = _names(model)
    frozen = [names.get(param, name) for name, param in frozen_in(optimizer)]
    if frozen:
        yield Finding(
            "error",
            f"all zero, and zero is a fixed point for p < 2, so they never move: {_list(frozen)}",
            "exclude them from the decay (pdecay.param_groups does, or name them in its exclude=), "
            "or initialise them with other values",
        )


def _check_norms_and_biases(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    decaying = {param for param, *_ in _decaying(optimizer)}
    found = [
        owners[0][0]
        for param, owners in owners_of(model)
        if param in decaying and not decays_by_default(param, owners)
    ]
    if found:
        yield Finding(
            "warning",
            f"biases, norms or scales decay, which saves little and costs accuracy: {_list(found)}",
            "build the groups with pdecay.param_groups(model), or set the group's 'decay_1d' to "
            "False",
        )


def _check_weight_norms(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    decaying = {param for param, _, _, penalty in _decaying(optimizer) if penalty.absorbs}
    found = [
        name
        for param, owners in owners_of(model)
        for name, module in owners
        if param in decaying and _is_weight_norm_direction(name, module)
    ]
    if found:
        yield Finding(
            "warning",
            "weight_norm divides by the norm of each row, so a row whose weights all become zero "
            f"gives NaN: {_list(found)}",
            "call torch.nn.utils.parametrize.remove_parametrizations (or remove_weight_norm) on "
            "these layers before the training, or exclude them: "
            "param_groups(model, exclude='*original?')",
        )


def _check_settings(optimizer: Optimizer) -> Iterator[Finding]:
    steered = target_of(optimizer) is not None  # a target starts at decay_scale = 0
    if not steered and any("target_step" in group for group in optimizer.param_groups):
        yield Finding(
            "warning",
            "the groups hold the state of a SparsityTarget, but none acts on this optimizer "
            "(deepcopy and pickle drop hooks)",
            "create the SparsityTarget on this optimizer again; it continues from the state",
        )
    for index, group in enumerate(optimizer.param_groups):
        if not group["decay"]:
            continue
        where = f"group {index}"
        penalty = penalty_of(group)
        scales = [scale_of(param, i, group) for i, param in enumerate(group["params"])]
        has_lam = penalty is not None and any(lam for _, lam in penalty.pairs())
        if penalty is None or not has_lam or not (any(scales) or steered):
            yield Finding(
                "warning",
                f"{where}: lam or decay_scale is 0, so nothing decays now",
                "set lam and decay_scale above 0, unless a schedule raises them later",
            )
            continue
        lr = group.get("lr")
        if lr is not None and float(lr) == 0:
            yield Finding(
                "hint",
                f"{where}: lr is 0, so nothing moves or decays now",
                "set the learning rate, unless a warm-up raises it from 0",
            )
        yield from _check_penalty(where, group, penalty, optimizer)
        if any(key in group for key in ("d", "d0", "d_coef")):
            yield Finding(
                "warning",
                f"{where}: this optimizer adapts its own step size, and the decay follows "
                "only group['lr']",
                "pass lr= to pdecay.attach, e.g. lr=lambda group: group['d'] * group['lr']",
            )


def _check_penalty(
    where: str, group: Group, penalty: Penalty, optimizer: Optimizer
) -> Iterator[Finding]:
    powers = [p for p, lam in penalty.pairs() if lam]
    if min(powers) > 1:
        yield Finding(
            "hint",
            f"{where}: p = {min(powers):g} > 1 gives tiny weights instead of exact zeros",
            "call pdecay.prune_(model) after training, or use p <= 1",
        )
    l2 = group.get("weight_decay", 0)
    if l2 and 2 in powers:
        yield Finding(
            "warning",
            f"{where}: weight_decay = {float(l2):g} and an Lp(2, ...) both shrink the weights",
            "keep one of the two",
        )
    coupled = isinstance(optimizer, Adam) and not group.get("decoupled_weight_decay", False)
    if l2 and coupled:
        yield Finding(
            "hint",
            f"{where}: Adam adds weight_decay = {float(l2):g} to the gradient and rescales it "
            "with the gradient",
            "use AdamW, or add Lp(2, ...) to the decay, for a decoupled L2 term",
        )


def _check_strength(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    """Find layers whose median weight is more than halved by one step."""
    names = _names(model)
    halved = []
    for param, scale, group, penalty in _decaying(optimizer):
        lr = group.get("lr")
        if (
            lr is None
            or not _is_countable(param)
            or param.numel() == 0
            or hasattr(param, "full_tensor")
        ):
            continue
        values = magnitude(param.detach().flatten())
        alive = values[values > 0]
        if alive.numel():
            factor = penalty.factor(alive.median(), float(lr) * scale)
            if float(factor) < 0.5:
                halved.append(names.get(param, "a parameter outside the model"))
    if halved:
        yield Finding(
            "warning",
            f"one step more than halves the median weight, so these layers soon become zero: "
            f"{_list(halved)}",
            "lower lam or lr: a weight w is halved where lr * lam = |w|^(2-p)",
        )


def _check_ownership(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    names = _names(model)
    known = {param for group in optimizer.param_groups for param in group["params"]}
    left_out = [name for param, name in names.items() if param.requires_grad and param not in known]
    if left_out:
        yield Finding(
            "warning",
            f"these parameters require a gradient but are not in the optimizer: {_list(left_out)}",
            "build the optimizer from this model's parameters, or freeze them",
        )
    foreign = sum(param not in names for param in known)
    if foreign:
        yield Finding(
            "error" if foreign == len(known) else "warning",
            f"{foreign} of the optimizer's {len(known)} parameters are not in this model",
            "build the optimizer after copying, moving or wrapping the model",
        )


def _check_values(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    non_finite = []
    names: dict[torch.dtype, list[str]] = {torch.float16: [], torch.bfloat16: []}
    rounded = {
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if group.get("stochastic_rounding")
    }
    for param, name in _names(model).items():
        if _is_countable(param) and not bool(torch.isfinite(param).all()):
            non_finite.append(name)
        if param.requires_grad and param.dtype in names and param not in rounded:
            names[param.dtype].append(name)
    if non_finite:
        yield Finding(
            "error",
            f"weights that are not finite: {_list(non_finite)}",
            "load the last good checkpoint; lower lr or clip the gradients; do not train float16 "
            "weights: use float32 weights and autocast",
        )
    if names[torch.float16]:
        yield Finding(
            "warning",
            f"trained in float16: {_list(names[torch.float16])}. {FLOAT16_CAUSE}",
            FLOAT16_REMEDY,
        )
    if names[torch.bfloat16]:
        yield Finding(
            "hint",
            "trained in bfloat16, where updates below 0.2 % of a weight are rounded away: "
            f"{_list(names[torch.bfloat16])}",
            "keep float32 weights and use autocast for the forward pass, or pass "
            "stochastic_rounding=True to PAdam or PSGD",
        )


def _decaying(optimizer: Optimizer) -> Iterator[tuple[Tensor, float, Group, Penalty]]:
    """Yield each decayed parameter with its scale, group and penalty."""
    for group in optimizer.param_groups:
        penalty = penalty_of(group)
        if penalty is None:
            continue
        for i, param in enumerate(group["params"]):
            if decays(param, group):
                yield param, scale_of(param, i, group), group, penalty


def _is_countable(param: Tensor) -> bool:
    """Check that a tensor has values, and that torch can compare and select them."""
    return param.layout == torch.strided and not param.is_meta


def _is_weight_norm_direction(name: str, module: nn.Module) -> bool:
    """Check for the parameter v of weight_norm, ``w = g * v / |v|``, in its new and old form."""
    if isinstance(module, ParametrizationList):
        return name.endswith(".original1") and any(isinstance(one, _WeightNorm) for one in module)
    hooks = module._forward_pre_hooks.values()
    return name.endswith("_v") and any(isinstance(hook, WeightNorm) for hook in hooks)


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {param: owners[0][0] for param, owners in owners_of(model)}


def _list(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
