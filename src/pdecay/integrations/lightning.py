"""Lightning: a callback for ``Trainer``.

The module needs ``lightning`` or ``pytorch_lightning``. The optimizers need no integration: return
a PAdam, a PSGD, or an optimizer that ``pdecay.attach`` was called on from ``configure_optimizers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from pdecay._core.validation import check_count
from pdecay._optim.attachment import is_decaying
from pdecay._sparsity.metric import Rank
from pdecay.integrations._common import SparsityActions, measure

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:  # the two packages have separate classes: use the one that the program has imported
    import sys

    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        from pytorch_lightning import Callback, LightningModule, Trainer
    else:
        from lightning.pytorch import Callback, LightningModule, Trainer


class SparsityCallback(Callback):
    """Log the sparsity, and optionally steer it to a target, freeze the zeros, or prune.

    At the end of each epoch, the share of zeros among the decayed weights is logged as
    ``sparsity``, and that of each decayed parameter as ``sparsity/<name>``.

    The callback has no state of its own. A target keeps its state in the optimizer, so that
    ``trainer.fit(..., ckpt_path=...)`` continues exactly.

    Args:
        target: the share of the decayed weights that must be zero at the end. One of the module's
            optimizers must be a PAdam, a PSGD, or one that ``pdecay.attach`` was called on.
        freeze: the share of the training after which zeros stay zero and the other weights train
            without decay. 0 keeps the zeros of a sparse model from the start.
        prune: at the end of the training, set weights with a smaller magnitude to zero.
        layers: whether to log each parameter besides the total.
        total_steps: the number of optimizer steps of the training. The default is that of the
            Trainer, which knows gradient accumulation.
        every_n_steps: log every so many optimizer steps instead of at the end of each epoch.
        start, end, per_layer, floor, rank, pull, update_power: as in
            :class:`pdecay.SparsityTarget`.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[SparsityCallback(target=0.9)])
        trainer.fit(module, data)
    """

    def __init__(
        self,
        target: float | None = None,
        *,
        freeze: float | None = None,
        prune: float | None = None,
        layers: bool = True,
        total_steps: int | None = None,
        every_n_steps: int | None = None,
        start: float | None = None,
        end: float | None = None,
        per_layer: bool | None = None,
        floor: float | None = None,
        rank: Rank | None = None,
        pull: float | None = None,
        update_power: float | None = None,
    ) -> None:
        given: dict[str, Any] = {"start": start, "end": end, "per_layer": per_layer}
        given |= {"floor": floor, "rank": rank, "pull": pull, "update_power": update_power}
        options = {name: value for name, value in given.items() if value is not None}
        if every_n_steps is not None:
            check_count("every_n_steps", every_n_steps)
        self._actions = SparsityActions(target, freeze, prune, options)
        self._layers = layers
        self._total_steps = total_steps
        self._every = every_n_steps
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the target. The checkpoint of the optimizer is loaded already."""
        self._logged_step = trainer.global_step
        if self._actions.target is None and self._actions.freeze is None:
            return
        total = self._total_steps or trainer.estimated_stepping_batches
        if not self._total_steps and trainer.max_steps > 0:  # counts the steps of all optimizers
            total = min(total, max(1, trainer.max_steps // len(trainer.optimizers)))
        if total == float("inf"):
            raise ValueError(
                "SparsityCallback needs the number of optimizer steps, which this Trainer does not "
                "know; pass total_steps= to the callback, or max_steps= to the Trainer"
            )
        self._actions.begin(_decaying(trainer), int(total))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Freeze the zeros when it is time, and log every `every_n_steps` steps."""
        step = trainer.global_step
        if self._actions.freeze is not None:
            own = step // len(trainer.optimizers)  # the Trainer counts the steps of all optimizers
            self._actions.after_step(_decaying(trainer), own)
        if self._every and step % self._every == 0 and step != self._logged_step:
            self._logged_step = step
            pl_module.log_dict(self._measure(trainer, pl_module), on_step=True, on_epoch=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the sparsity."""
        if not self._every:
            pl_module.log_dict(self._measure(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune the model, before the last checkpoint is written."""
        self._actions.prune_model(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the model misses the target, after other callbacks have averaged the weights."""
        self._actions.check_target()

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        optimizers = _all_decaying(trainer)
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        return measure(pl_module, optimizer, self._layers)


def _all_decaying(trainer: Trainer) -> list[Optimizer]:
    return [one for one in trainer.optimizers if is_decaying(one)]


def _decaying(trainer: Trainer) -> Optimizer:
    optimizers = _all_decaying(trainer)
    if len(optimizers) != 1:
        names = ", ".join(type(one).__name__ for one in trainer.optimizers)
        raise ValueError(
            f"SparsityCallback needs exactly one optimizer that decays (PAdam, PSGD, or one that "
            f"pdecay.attach was called on), got {len(optimizers)} among: {names}. For several, "
            "create pdecay.SparsityTarget with a list of them in configure_optimizers"
        )
    return optimizers[0]
