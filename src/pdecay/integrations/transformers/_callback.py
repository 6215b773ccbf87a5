"""A callback for ``transformers.Trainer``."""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from pdecay.integrations._common import SparsityActions, measure


class SparsityCallback(TrainerCallback):
    """Log the sparsity, and optionally steer it to a target, freeze the zeros, or prune.

    The share of zeros among the decayed weights is added to the logs as ``sparsity``, and that of
    each decayed parameter as ``sparsity/<name>``. The console, ``state.log_history`` and all
    trackers of ``report_to`` receive them.

    The callback has no state of its own. A target keeps its state in the optimizer, so that
    ``trainer.train(resume_from_checkpoint=...)`` continues exactly.

    Args:
        target: the share of the decayed weights that must be zero at the end. The Trainer's
            optimizer must be a PAdam, a PSGD, or one that ``pdecay.attach`` was called on.
        freeze, layers: as in :class:`pdecay.integrations.lightning.SparsityCallback`.
        prune: as there. The last checkpoint is written before; call ``trainer.save_model()`` after
            the training.
        options: further arguments of :class:`pdecay.SparsityTarget`, for instance ``end=0.8``.

    Example::

        optimizer = pdecay.PAdam(pdecay.param_groups(model), lr=1e-3)
        trainer = Trainer(
            model, args, train_dataset=data, optimizers=(optimizer, None),
            callbacks=[SparsityCallback(target=0.9)],
        )
        trainer.train()
    """

    def __init__(
        self,
        target: float | None = None,
        *,
        freeze: float | None = None,
        prune: float | None = None,
        layers: bool = True,
        **options: Any,
    ) -> None:
        self._actions = SparsityActions(target, freeze, prune, options)
        self._layers = layers
        self._logged_step = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the target. The checkpoint of the optimizer is loaded already."""
        handler = sys._getframe(1).f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            # Trackers come before the user's callbacks and would not see what on_log adds.
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)
        self._logged_step = -1
        self._actions.begin(kwargs["optimizer"], state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Freeze the zeros when it is time."""
        self._actions.after_step(kwargs["optimizer"], state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the sparsity to the logs, once for each step."""
        logs = kwargs.get("logs")
        if logs is None or state.global_step == self._logged_step:
            return
        self._logged_step = state.global_step
        measured = measure(kwargs["model"], kwargs.get("optimizer"), self._layers)
        logs.update(measured)
        if state.log_history:
            state.log_history[-1].update(measured)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prune the model, and warn if it misses the target."""
        self._actions.prune_model(kwargs["model"])
        self._actions.check_target()
