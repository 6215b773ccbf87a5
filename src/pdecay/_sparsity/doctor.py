"""What would go wrong in a training run, before it does, each finding with its cure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from pdecay._core.group_settings import Group, decayed_params, penalty_of, scale_of
from pdecay._core.parameters import frozen_in, is_norm, owners_of
from pdecay._core.penalty import Penalty, magnitude
from pdecay._optim.attachment import is_decaying

Level = Literal["error", "warning", "hint"]
_MOST_NAMES = 8  # a finding names no more parameters than a person reads


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be."""

    level: Level
    message: str
    cure: str

    def __str__(self) -> str:
        return f"{self.level}: {self.message}\n  cure: {self.cure}"


@torch.no_grad()
def doctor(model: nn.Module, optimizer: Optimizer) -> list[Finding]:
    """List what would go wrong when this model is trained with this optimizer.

    Nothing is changed. An empty list means that nothing was found.

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
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"doctor needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    findings = [*_not_decaying(optimizer)]
    if not findings:
        findings += _frozen(model, optimizer)
        findings += _decayed_norms_and_biases(model, optimizer)
        findings += _settings(optimizer)
        findings += _too_strong(model, optimizer)
    findings += _strangers(model, optimizer)
    findings += _values(model)
    rank = {"error": 0, "warning": 1, "hint": 2}
    return sorted(findings, key=lambda finding: rank[finding.level])


def _not_decaying(optimizer: Optimizer) -> Iterator[Finding]:
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
            "(tensors with fewer than two dimensions are spared by default)",
            "give a group its own decay: {'params': ..., 'decay': pdecay.Lp(...)}",
        )


def _frozen(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    names = _names(model)
    frozen = [names.get(param, name) for name, param in frozen_in(optimizer)]
    if frozen:
        yield Finding(
            "error",
            f"all zero, and zero is a fixed point for p < 2, so they never move: {_list(frozen)}",
            "spare them (pdecay.param_groups does, or exclude=...), or initialise them otherwise",
        )


def _decayed_norms_and_biases(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    decaying = {param for param, *_ in _decaying(optimizer)}
    found = [
        owners[0][0]
        for param, owners in owners_of(model)
        if param in decaying and (param.ndim < 2 or any(is_norm(module) for _, module in owners))
    ]
    if found:
        yield Finding(
            "warning",
            f"biases or norms decay, which saves next to nothing and costs accuracy: "
            f"{_list(found)}",
            "build the groups with pdecay.param_groups(model), or set the group's 'decay_1d' to "
            "False",
        )


def _settings(optimizer: Optimizer) -> Iterator[Finding]:
    for index, group in enumerate(optimizer.param_groups):
        if not group["decay"]:
            continue
        where = f"group {index}"
        penalty = penalty_of(group)
        scales = [scale_of(param, i, group) for i, param in enumerate(group["params"])]
        if penalty is None or not any(lam for _, lam in penalty.pairs()) or not any(scales):
            yield Finding(
                "warning",
                f"{where}: lam or decay_scale is 0, so nothing decays now",
                "set a lam above 0, or let the schedule or target that set it move it",
            )
            continue
        lr = group.get("lr")
        if lr is not None and float(lr) == 0:
            yield Finding(
                "hint",
                f"{where}: lr is 0, so nothing moves or decays now",
                "none is needed where a warm-up starts at 0; else set the learning rate",
            )
        yield from _norms(where, group, penalty, optimizer)
        if any(key in group for key in ("d", "d0", "d_coef")):
            yield Finding(
                "warning",
                f"{where}: this optimizer finds its own step size, and the decay follows "
                "group['lr'] alone",
                "pass lr= to pdecay.attach, e.g. lr=lambda group: group['d'] * group['lr']",
            )


def _norms(where: str, group: Group, penalty: Penalty, optimizer: Optimizer) -> Iterator[Finding]:
    powers = [p for p, lam in penalty.pairs() if lam]
    if min(powers) > 1:
        yield Finding(
            "hint",
            f"{where}: p = {min(powers):g} > 1 gives tiny weights, no exact zeros",
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
            f"{where}: Adam adds weight_decay = {float(l2):g} to the gradient, where it is "
            "rescaled with it",
            "use AdamW, or add Lp(2, ...) to the decay, for a decoupled L2 term",
        )


def _too_strong(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    """A layer whose median weight is more than halved by one step will not live long."""
    names = _names(model)
    doomed = []
    for param, scale, group, penalty in _decaying(optimizer):
        lr = group.get("lr")
        if lr is None or param.numel() == 0 or hasattr(param, "full_tensor"):
            continue
        values = magnitude(param.detach().flatten())
        alive = values[values > 0]
        if alive.numel():
            factor = penalty.factor(alive.median(), float(lr) * scale)
            if float(factor) < 0.5:
                doomed.append(names.get(param, "a parameter that is not the model's"))
    if doomed:
        yield Finding(
            "warning",
            f"one step more than halves the median weight, so these layers die at once: "
            f"{_list(doomed)}",
            "lower lam or lr: a weight w is halved where lr * lam = |w|^(2-p)",
        )


def _strangers(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    names = _names(model)
    known = {param for group in optimizer.param_groups for param in group["params"]}
    left_out = [name for param, name in names.items() if param.requires_grad and param not in known]
    if left_out:
        yield Finding(
            "warning",
            f"these parameters require a gradient but are not the optimizer's: {_list(left_out)}",
            "build the optimizer from this model's parameters, or freeze them",
        )
    strangers = sum(param not in names for param in known)
    if strangers:
        yield Finding(
            "error" if strangers == len(known) else "warning",
            f"{strangers} of the optimizer's {len(known)} parameters are not this model's",
            "build the optimizer after the model is copied, moved or wrapped",
        )


def _values(model: nn.Module) -> Iterator[Finding]:
    broken, half = [], []
    for param, name in _names(model).items():
        if not param.is_meta and not bool(torch.isfinite(param).all()):
            broken.append(name)
        if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16):
            half.append(name)
    if broken:
        yield Finding(
            "error",
            f"not finite: {_list(broken)}",
            "load the last good checkpoint; lower lr or clip the gradients",
        )
    if half:
        yield Finding(
            "hint",
            f"trained in half precision, where small updates round away: {_list(half)}",
            "keep float32 weights and use autocast for the forward pass",
        )


def _decaying(optimizer: Optimizer) -> Iterator[tuple[Tensor, float, Group, Penalty]]:
    """Each parameter that decays, with its scale, its group and its penalty."""
    for group in optimizer.param_groups:
        penalty = penalty_of(group)
        if penalty is None:
            continue
        there_for = decayed_params(group)
        for i, param in enumerate(group["params"]):
            if any(param is other for other in there_for):
                yield param, scale_of(param, i, group), group, penalty


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {param: owners[0][0] for param, owners in owners_of(model)}


def _list(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
