"""Only-Train-Once: a method that removes whole units by half-space projected steps.

Implemented from the papers, because the published package does not import with current torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdecay._core.validation import check_number, check_share
from pdecay.lab.methods.base import Method, Run, adamw
from pdecay.lab.methods.units import Units, find_units, zero_readers
from pdecay.lab.tasks import Task

_START, _RAMP = 0.1, 0.1  # shares of the training: the warm-up and the removal of units
_PERIODS = 10  # of removal, with an equal share of the units in each


@dataclass(frozen=True)
class OTOMethod(Method):
    """Only-Train-Once with its dual half-space projected gradient, on top of AdamW.

    A group is a unit: the row of a linear layer or the filter of a convolution, with its bias and
    the following norm, so that a zero group outputs zero. After a warm-up of 10 % of the training
    the groups of lowest saliency become redundant, a tenth of them at a time over the next 10 %, as
    in the paper's comparison. Each step then also pulls every redundant group towards zero, and
    sets it to zero if the step would leave the half-space ``<w_new, w_old> >= eps * |w_old|^2``.
    Redundant groups that remain when the next tenth is chosen are set to zero. Zero groups stay
    zero while the others train. At the end the weights that read a dead unit are zeroed too, as the
    original removes them.

    As in the original: the stages, the pull ``w / |w|`` with a strength that decreases both the
    loss and the norm (here the geometric mean of the two bounds, ``|update|``), the half-space rule
    and the exact count. Different: saliency is the magnitude relative to the layer's mean; layers
    whose outputs are added are not grouped together, so some dead units cannot be cut out of such a
    network; and every layer keeps one unit.

    Args:
        target: the share of units to remove; it determines the sparsity.
        eps: the threshold of the half-space rule, from 0 to below 1; higher values zero earlier.
        weight_decay: AdamW's L2 decay.

    References:
        Chen et al., Only Train Once: A One-Shot Neural Network Training And Pruning Framework,
        2021. Chen et al., OTOv2: Automatic, Generic, User-Friendly, 2023.
    """

    target: float = 0.7
    eps: float = 0.0
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_share("target", self.target)
        if check_number("eps", self.eps) >= 1:
            raise ValueError(f"eps must be below 1, got {self.eps!r}")
        check_number("weight_decay", self.weight_decay)

    def start(self, model: nn.Module, task: Task, lr: float, steps: int) -> Run:
        example, _ = task.batch(0, 0)
        layers = find_units(model, example)
        optimizer = adamw(model, lr, self.weight_decay)
        return _HalfSpace(optimizer, model, example, layers, self, steps)


@dataclass(eq=False)
class _Layer:
    units: Units
    redundant: Tensor  # mask of units that are pulled to zero
    dead: Tensor  # mask of units that are zero and stay zero
    before: Tensor | None = None  # the redundant units before the optimizer's step


class _HalfSpace(Run):
    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        example: Tensor,
        units: list[Units],
        method: OTOMethod,
        steps: int,
    ) -> None:
        super().__init__(optimizer)
        self._model, self._example, self._method = model, example, method
        self._step = 0
        self._period = max(1, round(_RAMP * steps / _PERIODS))
        self._begin = round(_START * steps)
        self._layers = []
        for one in units:
            none = torch.zeros(len(one), dtype=torch.bool, device=one.parts[0].device)
            self._layers.append(_Layer(one, none, none.clone()))
        optimizer.register_step_pre_hook(lambda *_: self._save_redundant())

    def after_step(self) -> None:
        self._step += 1
        for layer in self._layers:
            if layer.before is not None:
                self._pull(layer, layer.before)
                layer.before = None
            if layer.dead.any():
                layer.units.zero(layer.dead)
        past = self._step - self._begin
        if past >= 0 and past % self._period == 0 and past // self._period <= _PERIODS:
            self._next_period(past // self._period)

    def finish(self) -> None:
        self._zero_redundant()
        dead = {layer.units: layer.dead for layer in self._layers}
        zero_readers(self._model, self._example, dead)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "redundant": [layer.redundant for layer in self._layers],
            "dead": [layer.dead for layer in self._layers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step = state_dict["step"]
        saved = zip(self._layers, state_dict["redundant"], state_dict["dead"], strict=True)
        for layer, redundant, dead in saved:
            layer.redundant.copy_(redundant)
            layer.dead.copy_(dead)

    def _save_redundant(self) -> None:
        for layer in self._layers:
            if layer.redundant.any():
                layer.before = layer.units.matrix()[layer.redundant]

    def _pull(self, layer: _Layer, before: Tensor) -> None:
        after = layer.units.matrix()[layer.redundant]
        layer.units.set_rows(layer.redundant, half_space_step(before, after, self._method.eps))

    def _zero_redundant(self) -> None:
        for layer in self._layers:
            layer.dead |= layer.redundant
            layer.redundant.zero_()
            layer.units.zero(layer.dead)

    def _next_period(self, period: int) -> None:
        """Zero the redundant groups and choose the next ones."""
        self._zero_redundant()
        if period == _PERIODS:
            return
        scores = torch.cat([_saliency(layer) for layer in self._layers])
        total = len(scores)
        dead = sum(int(layer.dead.sum()) for layer in self._layers)
        most = total - len(self._layers)
        wanted = min(round(self._method.target * total * (period + 1) / _PERIODS), most) - dead
        if wanted <= 0:
            return
        chosen = torch.zeros(total, dtype=torch.bool, device=scores.device)
        chosen[scores.argsort(stable=True)[:wanted]] = True
        sizes = [len(layer.units) for layer in self._layers]
        for layer, mask in zip(self._layers, chosen.split(sizes), strict=True):
            layer.redundant.copy_(mask)


def half_space_step(w_old: Tensor, w_tilde: Tensor, eps: float) -> Tensor:
    """Return the redundant groups, one in each row, after a half-space step.

    With the optimizer's update ``u = w_tilde - w_old`` the new group is
    ``w_tilde - |u| * w_old / |w_old|``, or zero if that is outside of the half-space. The strength
    ``|u|`` is the geometric mean of two bounds between which the loss and the norm both decrease:
    ``<u, w_old> / |w_old|`` and ``|u|^2`` divided by it.
    """
    length = w_old.norm(dim=1, keepdim=True)
    pull = (w_tilde - w_old).norm(dim=1, keepdim=True)
    trial = w_tilde - pull * w_old / length.clamp_min(torch.finfo(length.dtype).tiny)
    outside = (trial * w_old).sum(dim=1, keepdim=True) < eps * length.square()
    stepped: Tensor = trial.masked_fill_(outside | (length == 0), 0.0)
    return stepped


def _saliency(layer: _Layer) -> Tensor:
    """Return the root mean square of each unit relative to the layer's mean.

    Dead units and the layer's largest unit, which must remain, are infinite.
    """
    score = layer.units.matrix().square().mean(dim=1).sqrt()
    relative: Tensor = score / score[~layer.dead].mean()
    relative[layer.dead | (score == score.max())] = torch.inf
    return relative
