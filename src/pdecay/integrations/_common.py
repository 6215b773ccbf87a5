"""The part of the sparsity callbacks that does not depend on the framework."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pdecay._core.ramp import check_target
from pdecay._core.validation import check_number
from pdecay._optim.hooks import unwrap
from pdecay._sparsity.counting import prune_, sparsity
from pdecay._sparsity.freezing import decaying, freeze_zeros
from pdecay._sparsity.target import SparsityTarget, target_of

_TOLERANCE = 1e-3  # a share of zeros that is lower by more than this misses the target


class SparsityActions:
    """The actions of a sparsity callback: steer, freeze and prune.

    Args:
        target: the share of the decayed weights that must be zero at the end; None for no target.
        freeze: the share of the training after which zeros stay zero and nothing else decays;
            None to leave the decay on. A target does this by itself at the end of its ramp.
        prune: the magnitude below which weights become zero at the end; None to leave them.
        options: further arguments of :class:`pdecay.SparsityTarget`.
    """

    def __init__(
        self,
        target: float | None,
        freeze: float | None,
        prune: float | None,
        options: dict[str, Any],
    ) -> None:
        if target is not None and freeze is not None:
            raise ValueError(
                f"give target or freeze, not both, got {target!r} and {freeze!r}: a target "
                "keeps its zeros from the end of its ramp on"
            )
        if target is None and options:
            raise TypeError(f"{', '.join(options)} need a target, got target=None")
        if freeze is not None and not 0 <= check_number("freeze", freeze) <= 1:
            raise ValueError(f"freeze must be a share from 0 to 1, got {freeze!r}")
        self.target = None if target is None else check_target("target", target)
        self.freeze = freeze
        self.prune = None if prune is None else check_number("prune", prune)
        self.options = options
        self._freeze_step: int | None = None
        self._steering: SparsityTarget | None = None

    def begin(self, optimizer: Optimizer, total_steps: int) -> None:
        """Start the target, or freeze the zeros if the training starts with that.

        Call it after the optimizer's checkpoint is loaded or before; the run continues exactly.
        """
        if self.target is not None:
            mine = self._steering is not None and target_of(unwrap(optimizer)) is self._steering
            if not mine:  # else the same optimizer trains again
                self._steering = SparsityTarget(optimizer, self.target, total_steps, **self.options)
        if self.freeze is not None:
            decaying(optimizer, "SparsityCallback")
            self._freeze_step = round(self.freeze * total_steps)
            self.after_step(optimizer, 0)

    def after_step(self, optimizer: Optimizer, step: int) -> None:
        """Freeze the zeros if the number of optimizer steps has come to the given share."""
        if self._freeze_step is not None and step >= self._freeze_step:
            freeze_zeros(optimizer)
            self._freeze_step = None

    def prune_model(self, model: nn.Module) -> None:
        """Prune the model at the end of the training; warn if the threshold is too high.

        An error would keep the framework from writing the last checkpoint.
        """
        if self.prune is None:
            return
        try:
            prune_(model, self.prune)
        except ValueError as error:
            warnings.warn(f"the model was not pruned: {error}", stacklevel=3)

    def check_target(self) -> None:
        """Warn if the trained model misses the target."""
        if self._steering is None or self.target is None:
            return
        reached = self._steering.sparsity
        if reached < self.target - _TOLERANCE:
            warnings.warn(
                f"{reached:.1%} of the decayed weights are zero, but the target is "
                f"{self.target:.1%}: the training stopped before the end of the ramp (step "
                f"{self._steering.last_step} of {self._steering.total_steps}), or weights from an "
                "earlier step were loaded (best checkpoint, average)",
                stacklevel=3,
            )


def measure(model: nn.Module, optimizer: Optimizer | None, layers: bool) -> dict[str, float]:
    """Return the sparsity of the decayed weights, by the names of logs.

    Args:
        model: the model.
        optimizer: its optimizer, which tells the decayed weights; None for the default ones.
        layers: whether to measure each decayed parameter besides the total.
    """
    inner = unwrap(optimizer)
    decays = inner is not None and any("decay" in group for group in inner.param_groups)
    report = sparsity(model, optimizer=inner if decays else None)
    logs = {"sparsity": report.total}
    if layers:
        decayed = (layer for layer in report.layers if layer.decayed)
        logs |= {f"sparsity/{layer.name}": layer.sparsity for layer in decayed}
    return logs
