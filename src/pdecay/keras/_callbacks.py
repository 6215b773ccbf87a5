"""Keras callbacks that log the sparsity and steer the decay to a given sparsity.

With a fixed lam the final sparsity is unknown in advance. :class:`SparsityTarget` instead follows a
cubic ramp of sparsities. ``tau`` is the quantile of |w| at the sparsity that the ramp asks for now.
The callback sets the optimizer's ``decay_scale`` so that a weight at tau shrinks as fast as the
optimizer typically moves a weight. Weights that have been below tau for a while are set to exactly
zero, where the decay keeps them. At the end of the ramp the count of zeros is made exact. After
that the zeros stay, and the other weights train without decay. These are the rules of
:class:`pdecay.SparsityTarget` for torch.

The callback has no state of its own. It reads the step from the optimizer's ``iterations`` and
keeps its result in ``decay_scale``, and Keras saves both with the model.
"""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from pdecay._core.pull import pull_scale
from pdecay._core.ramp import check_ramp, check_target, cubic_ramp, ramp_steps
from pdecay._core.validation import check_count, check_number
from pdecay.keras._optimizers import HOLD, PNormDecay, decaying, zero_keeping

_LAG = 0.1  # share of the ramp that a weight has to shrink before it is set to zero
_PROBED_ROWS = 8  # rows of each variable that the size of the update is measured on

Probes = dict[int, np.ndarray[Any, Any]]


def sparsity(model: Any, threshold: float = 1e-13) -> float:
    """Return the share of the decayed weights with a magnitude below the threshold.

    Args:
        model: a model that was compiled with an optimizer with p-norm weight decay and trained for
            at least one step.
        threshold: weights below it count as zeros.
    """
    arrays = _decayed_arrays(decaying(model.optimizer, "sparsity"))
    size = sum(array.size for array in arrays)
    zeros = sum(int((np.abs(array) < threshold).sum()) for array in arrays)
    return zeros / size if size else 0.0


class SparsityLogger(keras.callbacks.Callback):
    """Log the share of zeros among the decayed weights, at the end of each epoch.

    The log has the name "sparsity": the history, the progress bar, ``CSVLogger`` and other
    callbacks that come later in the list see it.

    Args:
        threshold: weights with a magnitude below it count as zeros.
    """

    def __init__(self, threshold: float = 1e-13) -> None:
        super().__init__()
        self.threshold = check_number("threshold", threshold)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer."""
        decaying(self.model.optimizer, type(self).__name__)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the sparsity to the logs."""
        if logs is not None:
            logs["sparsity"] = sparsity(self.model, self.threshold)


class SparsityTarget(SparsityLogger):
    """Steer the decay so that a given share of the decayed weights is exactly zero at the end.

    The callback counts the steps of the optimizer. A model that was loaded from a ``.keras`` file
    or restored by ``BackupAndRestore`` therefore continues its ramp; a model that was compiled
    again starts a new one. It also logs the sparsity.

    Args:
        target: the share of the decayed weights that must be zero, above 0 and below 1.
        total_steps: the number of optimizer steps of the whole training. The default is the number
            of batches and epochs that ``fit`` was given.
        start, end: as in :class:`pdecay.SparsityTarget`.
    """

    def __init__(
        self,
        target: float,
        total_steps: int | None = None,
        *,
        start: float = 0.1,
        end: float = 0.85,
    ) -> None:
        super().__init__(threshold=float(np.finfo(np.float32).smallest_normal))
        check_target("target", target)
        check_ramp(start, end)
        if total_steps is not None:
            check_count("total_steps", total_steps)
        self.target, self.total_steps, self.start, self.end = target, total_steps, start, end
        self._begin = self._end = self._every = 0
        self._first = self._step = 0  # of this call of `fit`, and now
        self._is_new = False  # whether this call of `fit` has not begun an epoch
        self._before: Probes | None = None  # weights before the step
        self._thread = 0  # that trains

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Place the ramp and switch the decay off until it starts."""
        self._thread = threading.get_ident()
        optimizer = self._optimizer()
        total = self.total_steps or self._steps_of_fit(optimizer)
        self._begin, self._end, self._every = ramp_steps(self.start, self.end, total)
        self._before, self._is_new = None, True
        self._first = self._step = _steps(optimizer)
        if self._step == 0 or self._step < self._begin:
            if not 0 < _scale(optimizer) <= 2 * HOLD:  # else freeze_zeros was called
                optimizer.decay_scale.assign(0.0)
        elif self._step >= self._end and not self._is_unfinished(optimizer):
            missing = _missing_zeros(_magnitudes(optimizer), self.target)
            if missing > 0 or _scale(optimizer) > 2 * HOLD:
                warnings.warn(
                    f"SparsityTarget({self.target}) has no effect: the optimizer has made "
                    f"{self._step} steps, and the ramp ended at {self._end}; compile the model "
                    "again or raise total_steps",
                    stacklevel=2,
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the step again: ``BackupAndRestore`` may have restored it when training began."""
        optimizer = self._optimizer()
        self._step = _steps(optimizer)
        is_unfinished = self._is_unfinished(optimizer)
        if self._is_new and (self._step < self._end or is_unfinished):
            self._check_start(_magnitudes(optimizer))
            if is_unfinished:
                self._finish(optimizer)
        self._is_new = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember some weights, to measure how far the step moves them."""
        steps = self.model.steps_per_execution  # until on_train_batch_end
        if self._before is None and self._is_due(self._step, self._step + steps):
            self._before = _probes(self._optimizer())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Zero the weights whose turn it is, and set the scale of the next steps."""
        if threading.get_ident() != self._thread:
            raise TypeError(
                "pass a list to fit, callbacks=[SparsityTarget(...)]: Keras calls other callbacks "
                "while the next step changes the weights"
            )
        if self._step >= self._end:
            return
        optimizer = self._optimizer()
        step, last = _steps(optimizer), self._step
        if step == last:  # gradients are accumulated, or the step was skipped
            return
        self._step = step
        before, self._before = self._before, None
        if step >= self._end:
            self._finish(optimizer)
        elif self._is_due(last, step):
            _zero_smallest(optimizer, self._share_of_zeros(step))
            self._set_scale(optimizer, before, step - last)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Warn if the model misses the target, once the other callbacks have restored weights."""
        # Keras calls its History after the callbacks of the user. `EarlyStopping` restores the best
        # weights in its own `on_train_end`, which may follow this one.
        history = getattr(self.model, "history", None)
        if not isinstance(history, keras.callbacks.History):
            self._check_target()
            return

        def check_once(logs: dict[str, Any] | None = None) -> None:
            del history.on_train_end
            history.on_train_end(logs)
            self._check_target()

        history.on_train_end = check_once

    def _finish(self, optimizer: PNormDecay) -> None:
        """Make the count of zeros exact at the end of the ramp, and keep the zeros from then on."""
        _zero_smallest(optimizer, self.target)
        optimizer.decay_scale.assign(HOLD)

    def _is_unfinished(self, optimizer: PNormDecay) -> bool:
        """Return whether the model is from the last step of the ramp, saved before its end acted.

        `BackupAndRestore` saves after a number of batches, before the callbacks that follow it.
        """
        ended = self._end <= self._step < self._end + self.model.steps_per_execution
        return ended and not 0 < _scale(optimizer) <= 2 * HOLD

    def _check_start(self, magnitudes: np.ndarray[Any, Any]) -> None:
        """Warn if the ramp has begun without this callback: many weights become zero at once."""
        # a training that continues may wait for the next stage, or for the end of an execution
        seen = self._step - self._every - self.model.steps_per_execution
        if _missing_zeros(magnitudes, self._share_of_zeros(seen)) > 0:
            due = self._share_of_zeros(self._step)
            warnings.warn(
                f"SparsityTarget({self.target}) starts in the middle of its ramp and makes "
                f"{due:.1%} of the weights zero at once: the optimizer has made {self._step} "
                f"steps, and the ramp goes from step {self._begin} to {self._end}; compile the "
                "model again or raise total_steps",
                stacklevel=2,
            )

    def _check_target(self) -> None:
        """Warn if the training has ended with too few zeros."""
        is_short = self._step < self._end
        # with total_steps, another call of `fit` may follow
        if is_short and self.total_steps is not None and not self.model.stop_training:
            return
        magnitudes = _magnitudes(self._optimizer())
        if not magnitudes.size:
            warnings.warn(
                f"SparsityTarget({self.target}) has no effect: no variable decays; see "
                "optimizer.decay_mask, and exclude_from_weight_decay, which may name all of them",
                stacklevel=2,
            )
        if self._first >= self._end or not _missing_zeros(magnitudes, self.target) > 0:
            return
        reason = "its weights were replaced by others, perhaps of an earlier step"
        if is_short:
            reason = f"the training stopped at step {self._step}"
        warnings.warn(
            f"the model has {sparsity(self.model, self.threshold):.1%} zeros, but SparsityTarget "
            f"was given {self.target:.1%}: {reason}; the ramp ends at step {self._end}. Let other "
            "callbacks choose weights after it (EarlyStopping has start_from_epoch)",
            stacklevel=2,
        )

    def _optimizer(self) -> PNormDecay:
        # self.model synchronises the state of JAX; self._model would read stale weights.
        return zero_keeping(self.model.optimizer, "SparsityTarget")

    def _steps_of_fit(self, optimizer: PNormDecay) -> int:
        epochs, batches = self.params.get("epochs"), self.params.get("steps")
        if not epochs or not batches:
            raise ValueError(
                "SparsityTarget: the number of batches is unknown; pass total_steps, or pass "
                "steps_per_epoch to fit"
            )
        return max(1, int(epochs) * int(batches) // (optimizer.gradient_accumulation_steps or 1))

    def _share_of_zeros(self, step: int) -> float:
        """Return the share of the weights that are zero during the ramp; it follows with a lag."""
        lag = _LAG * (self._end - self._begin)
        return self.target * cubic_ramp(int(step - lag), self._begin, self._end)

    def _is_due(self, last: int, step: int) -> bool:
        """Return whether a stage of the ramp begins after the step `last`, up to `step`."""
        if not self._begin <= step <= self._end:
            return False
        stage = (step - self._begin) // self._every
        return last < self._begin or stage > (last - self._begin) // self._every

    def _set_scale(self, optimizer: PNormDecay, before: Probes | None, steps: int) -> None:
        """Set the scale at which a weight at tau shrinks at the given speed."""
        if not before:  # TensorFlow builds the optimizer in the first step
            return
        update, typical = _measure(before, _probes(optimizer), steps)
        if not math.isfinite(update) or not math.isfinite(typical):
            return
        magnitudes = _magnitudes(optimizer)
        share = self.target * cubic_ramp(self._step, self._begin, self._end)
        count = round(share * magnitudes.size)
        tau = float(np.partition(magnitudes, count - 1)[count - 1]) if count else 0.0
        rate = float(ops.convert_to_numpy(optimizer.learning_rate))
        assert optimizer.decay is not None
        scale = pull_scale(
            optimizer.decay.pairs(),
            tau=tau,  # 0 if there are more zeros than the ramp asks for
            typical=typical,
            update=update,
            pull=1.0,
            rate=rate,
        )
        optimizer.decay_scale.assign(max(scale, HOLD))


def _steps(optimizer: PNormDecay) -> int:
    return int(ops.convert_to_numpy(optimizer.iterations))


def _scale(optimizer: PNormDecay) -> float:
    # float() of the variable fails if TensorFlow mirrors it on several devices.
    return float(ops.convert_to_numpy(optimizer.decay_scale))


def _decayed_arrays(optimizer: PNormDecay) -> list[np.ndarray[Any, Any]]:
    # Copies: on torch the array shares the memory of the variable.
    return [
        np.array(ops.convert_to_numpy(ops.cast(variable, "float32")))
        for variable in optimizer.decayed_variables
    ]


def _magnitudes(optimizer: PNormDecay) -> np.ndarray[Any, Any]:
    arrays = [np.abs(array).ravel() for array in _decayed_arrays(optimizer)]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)


def _probes(optimizer: PNormDecay) -> Probes:
    """Return a few rows of each decayed variable, by the variable's id."""
    arrays = zip(optimizer.decayed_variables, _decayed_arrays(optimizer), strict=True)
    return {id(v): array[:: max(1, len(array) // _PROBED_ROWS)] for v, array in arrays}


def _measure(before: Probes, now: Probes, steps: int) -> tuple[float, float]:
    """Return how far a step moves a nonzero weight, and the mean magnitude of these weights."""
    common = before.keys() & now.keys()  # others were frozen or unfrozen between the two
    if not common:
        return 0.0, 0.0
    kept = [key for key in now if key in common]
    old, new = (np.concatenate([arrays[key].ravel() for key in kept]) for arrays in (before, now))
    alive = new != 0
    if not alive.any():
        return 0.0, 0.0
    moved = (new[alive] - old[alive]).astype(np.float64)
    return float(np.sqrt(np.mean(moved**2))) / steps, float(np.abs(new[alive]).mean())


def _missing_zeros(magnitudes: np.ndarray[Any, Any], share: float) -> int:
    return round(share * magnitudes.size) - int(np.count_nonzero(magnitudes == 0))


def _zero_smallest(optimizer: PNormDecay, share: float) -> None:
    """Set weights to zero, the smallest first, until the share of all decayed weights is zero."""
    magnitudes = _magnitudes(optimizer)
    count = round(share * magnitudes.size)
    if _missing_zeros(magnitudes, share) <= 0:
        return
    keep = np.ones(magnitudes.size, bool)
    keep[np.argpartition(magnitudes, count - 1)[:count]] = False
    start = 0
    for variable in optimizer.decayed_variables:
        size = math.prod(variable.shape)
        kept = keep[start : start + size].reshape(variable.shape)
        value = ops.convert_to_numpy(variable)
        variable.assign(np.where(kept, value, np.zeros_like(value)))
        start += size
