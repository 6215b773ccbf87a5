"""Log the sparsity of a model to an experiment tracker from any training loop.

A tracker is a function ``log(metrics, step=step)`` of a dictionary of numbers. ``wandb.log``,
``mlflow.log_metrics`` and ``trackio.log`` are such functions. A TensorBoard ``SummaryWriter`` is
accepted, too.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from pdecay._core.validation import check_count
from pdecay._optim.hooks import StepHooks, is_skipped, unwrap
from pdecay.integrations._common import measure


class Log(Protocol):
    """A function that records numbers under their names, for instance ``wandb.log``."""

    def __call__(self, metrics: dict[str, float], /, *, step: int) -> Any: ...


class SummaryWriter(Protocol):
    """The method of TensorBoard's ``SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any: ...


def log_sparsity(
    model: nn.Module,
    optimizer: Optimizer,
    log: Log | SummaryWriter,
    *,
    every: int = 100,
    layers: bool = True,
    step: int = 0,
) -> StepHooks:
    """Log the sparsity of a model after every `every` steps of its optimizer.

    The share of zeros among the decayed weights is logged as ``sparsity``, and that of each decayed
    parameter as ``sparsity/<name>``.

    Args:
        model: the model.
        optimizer: its optimizer.
        log: a function of a dictionary and a step, such as ``wandb.log``, ``mlflow.log_metrics`` or
            ``trackio.log``; or a TensorBoard ``SummaryWriter``.
        every: the number of optimizer steps between two logs. Counting reads all weights once.
        layers: whether to log each parameter besides the total.
        step: the number of steps that a resumed training has taken already.

    Returns:
        A handle; its ``detach()`` ends the logging.

    Example:
        >>> import pdecay, torch
        >>> model = nn.Linear(2, 2, bias=False)
        >>> optimizer = pdecay.PSGD(model.parameters(), lr=0.1)
        >>> def log(metrics, step):
        ...     print(step, metrics)
        >>> handle = log_sparsity(model, optimizer, log, every=2)
        >>> for _ in range(2):
        ...     optimizer.step()
        2 {'sparsity': 0.0, 'sparsity/weight': 0.0}
    """
    check_count("every", every)
    hooks = _Logging(model, unwrap(optimizer), log, every, layers, step)
    hooks.register()
    return hooks


class _Logging(StepHooks):
    """The hook of :func:`log_sparsity`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        log: Log | SummaryWriter,
        every: int,
        layers: bool,
        step: int,
    ) -> None:
        super().__init__(optimizer)
        self._model = model
        self._log = log
        self._every = every
        self._layers = layers
        self._step = step

    def after_step(self) -> None:
        if is_skipped(self.optimizer):
            return
        self._step += 1
        if self._step % self._every == 0:
            self._write(measure(self._model, self.optimizer, self._layers))

    def _write(self, metrics: dict[str, float]) -> None:
        if callable(self._log):
            self._log(metrics, step=self._step)
            return
        for name, value in metrics.items():
            self._log.add_scalar(name, value, self._step)
