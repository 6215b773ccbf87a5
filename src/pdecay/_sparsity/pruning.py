"""Magnitude pruning on any torch optimizer, with or without p-norm weight decay.

    MagnitudePruning(optimizer, threshold=1e-2, total_steps=5000)
    GradualMagnitudePruning(optimizer, sparsity=0.9, total_steps=5000)

Both act through the optimizer's hooks, after its own update. A decay that is attached to the same
optimizer, or that is part of it, may come before or after: it multiplies, and zeros stay zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would load the compiler now
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pdecay._core.penalty import magnitude
from pdecay._core.validation import check_count, check_number
from pdecay._optim.hooks import calling_step, is_inside
from pdecay._sparsity.ranking import (
    count_weights,
    count_zeros,
    group_of,
    local_part,
    zero_smallest_,
)


def ramped_threshold(step: int, threshold: float, begin: float, end: float) -> float:
    """The threshold of iterative pruning after some steps: 0 up to `begin`, linear up to `end`."""
    if step <= begin:
        return 0.0
    return threshold if step >= end else threshold * (step - begin) / (end - begin)


def ramped_sparsity(step: int, sparsity: float, begin: float, end: float) -> float:
    """The sparsity of gradual pruning after some steps: fast at first, while much is redundant.

    ``sparsity * (1 - (1 - (step - begin) / (end - begin))^3)`` between `begin` and `end`.
    """
    if step <= begin:
        return 0.0
    return sparsity if step >= end else sparsity * (1 - (1 - (step - begin) / (end - begin)) ** 3)


class _Pruning:
    """What both methods share: which weights, which steps, the hooks and the checkpoint."""

    _saved: tuple[str, ...]  # what a checkpoint holds, all of it plain numbers

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        every: int | None,
        params: Iterable[Tensor] | None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{name} needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"{type(optimizer).__name__} wraps another optimizer and has no hooks of its own: "
                f"give {name} the inner one (usually its .optimizer)"
            )
        self.optimizer = optimizer
        self.total_steps = check_count("total_steps", total_steps)
        self.every = max(1, total_steps // 100) if every is None else check_count("every", every)
        self.last_step = 0
        self._chosen = self._checked_choice(params)
        self._frame: FrameType | None = None  # the step() call that is being looked at
        if not self.params:
            raise ValueError(
                f"{name} has nothing to prune: the optimizer has no parameters with two or more "
                "dimensions; pass params= to choose others"
            )
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_hook),
            optimizer.register_step_post_hook(self._after_hook),
        ]

    @property
    def params(self) -> list[Tensor]:
        """The parameters that are pruned."""
        if self._chosen is not None:
            return self._chosen
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return [param for param in params if is_lazy(param) or param.ndim >= 2]

    @property
    def sparsity_now(self) -> float:
        """The share of the pruned parameters' weights that are exactly zero now."""
        return count_zeros(self.params) / count_weights(self.params)

    def detach(self) -> None:
        """Stop pruning; weights stay as they are. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. No mask is among them: it is where the weights are zero."""
        return {key: getattr(self, key) for key in self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, with its settings, as torch's schedulers do."""
        if state_dict.keys() != set(self._saved):
            raise ValueError(
                f"this is not a checkpoint of {type(self).__name__}: it has the keys "
                f"{sorted(state_dict)}, not {sorted(self._saved)}"
            )
        for key, value in state_dict.items():
            setattr(self, key, value)

    def _before_step(self) -> None:
        """Called before the optimizer's update."""

    def _after_step(self) -> None:
        """Called after the optimizer's update, when `last_step` counts it already."""
        raise NotImplementedError

    @_disable_dynamo
    @torch.no_grad()
    def _before_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        frame = calling_step()
        if self._frame is not None and is_inside(frame, self._frame):
            return  # a step() within the step(), as when a subclass calls super().step()
        self._frame = frame
        self._before_step()

    @_disable_dynamo
    @torch.no_grad()
    def _after_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if calling_step() is not self._frame:
            return
        self._frame = None
        self.last_step += 1
        self._after_step()

    def _checked_choice(self, params: Iterable[Tensor] | None) -> list[Tensor] | None:
        if params is None:
            return None
        if isinstance(params, Tensor):
            raise TypeError("params must be a list of tensors, got one tensor")
        chosen = list(params)
        known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        for param in chosen:
            if not isinstance(param, Tensor):
                raise TypeError(f"params must hold tensors, got {type(param).__name__}")
            if id(param) not in known:
                raise ValueError(
                    f"params has a tensor of shape {tuple(param.shape)} that the optimizer does "
                    "not train"
                )
        return chosen


class MagnitudePruning(_Pruning):
    """Iterative magnitude pruning: small weights are set to 0 every now and then.

    Every `every` steps, and at the last one, all weights with ``|w|`` below a threshold become 0.
    The threshold is 0 at first, grows linearly to its final value, and stays. Between two prunings
    weights may come back: what is needed returns, what is not is pruned again.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        threshold: the final threshold, >= 0. The sparsity that it leads to comes out as it will.
        total_steps: how many steps the training has.
        every: how many steps lie between two prunings; a hundredth of the training by default.
        start: when the threshold begins to grow, as a share of the training.
        ramp: how long it grows, as a share of the training.
        params: which parameters; those with two dimensions or more by default.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> pruning = MagnitudePruning(optimizer, threshold=1e-2, total_steps=1000)
        >>> [pruning.threshold_at(step) for step in (100, 150, 200, 1000)]
        [0.0, 0.005, 0.01, 0.01]

    References:
        Outmezguine and Levi, Decoupled Weight Decay for Any p Norm, 2024, section 5.2.
    """

    _saved = ("last_step", "total_steps", "every", "threshold", "start", "ramp")

    def __init__(
        self,
        optimizer: Optimizer,
        threshold: float,
        total_steps: int,
        *,
        every: int | None = None,
        start: float = 0.1,
        ramp: float = 0.1,
        params: Iterable[Tensor] | None = None,
    ) -> None:
        self.threshold = check_number("threshold", threshold)
        self.start, self.ramp = check_number("start", start), check_number("ramp", ramp)
        if self.start >= 1 or self.start + self.ramp > 1:
            raise ValueError(
                f"the threshold must have grown when the training ends: start < 1 and "
                f"start + ramp <= 1, got start={start!r}, ramp={ramp!r}"
            )
        super().__init__(optimizer, total_steps, every, params)

    def threshold_at(self, step: int) -> float:
        """The threshold after this many steps."""
        end = (self.start + self.ramp) * self.total_steps
        return ramped_threshold(step, self.threshold, self.start * self.total_steps, end)

    def _after_step(self) -> None:
        threshold = self.threshold_at(self.last_step)
        if threshold and (self.last_step % self.every == 0 or self.last_step == self.total_steps):
            for param in map(local_part, self.params):
                param.masked_fill_(magnitude(param) < threshold, 0.0)


class GradualMagnitudePruning(_Pruning):
    """Gradual magnitude pruning: the smallest weights go for good, until the asked share is 0.

    All weights are ranked together. After t steps the share

        sparsity * (1 - (1 - (t - t_0) / (t_1 - t_0))^3),    t_0 = start, t_1 = end

    of them is zero, renewed every `every` steps; at the end of the ramp the count is exact, and
    the rest of the training is for the weights that are left. A weight that is zero when the ramp
    has begun stays so, whatever the optimizer's momentum says. That mask is not kept: it is taken
    from the weights before each update.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        sparsity: the final share of zeros, at least 0 and below 1. If the training itself brings
            more zeros than that, as p-norm weight decay may, they stay.
        total_steps: how many steps the training has.
        every: how many steps lie between two prunings; a hundredth of the training by default.
        start, end: when the ramp begins and ends, as shares of the training.
        params: which parameters; those with two dimensions or more by default. If they are
            sharded (DTensors), they are ranked over all ranks of their mesh.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> pruning = GradualMagnitudePruning(optimizer, sparsity=0.8, total_steps=1000)
        >>> [round(pruning.sparsity_at(step), 3) for step in (100, 400, 700, 1000)]
        [0.0, 0.7, 0.8, 0.8]

    References:
        Zhu and Gupta, To prune, or not to prune, 2017.
    """

    _saved = ("last_step", "total_steps", "every", "sparsity", "start", "end")

    def __init__(
        self,
        optimizer: Optimizer,
        sparsity: float,
        total_steps: int,
        *,
        every: int | None = None,
        start: float = 0.1,
        end: float = 0.7,
        params: Iterable[Tensor] | None = None,
    ) -> None:
        self.sparsity = check_number("sparsity", sparsity)
        if self.sparsity >= 1:
            raise ValueError(f"sparsity must be below 1, or nothing is left, got {sparsity!r}")
        self.start, self.end = check_number("start", start), check_number("end", end)
        if not self.start < self.end <= 1:
            raise ValueError(f"start < end <= 1 must hold, got start={start!r}, end={end!r}")
        super().__init__(optimizer, total_steps, every, params)
        group_of(self.params)  # weights that cannot be ranked together are an error now
        self._zeros: list[tuple[Tensor, Tensor]] = []

    def sparsity_at(self, step: int) -> float:
        """The share of zeros that is asked for after this many steps."""
        begin, end = self.start * self.total_steps, self.end * self.total_steps
        return ramped_sparsity(step, self.sparsity, begin, end)

    def _before_step(self) -> None:
        self._zeros = []
        if self.sparsity_at(self.last_step):
            self._zeros = [(param, param == 0) for param in map(local_part, self.params)]

    def _after_step(self) -> None:
        zeros, self._zeros = self._zeros, []
        for param, is_zero in zeros:
            param.masked_fill_(is_zero, 0.0)
        asked, before = self.sparsity_at(self.last_step), self.sparsity_at(self.last_step - 1)
        at_the_end = asked == self.sparsity and before < asked
        if at_the_end or (asked != before and self.last_step % self.every == 0):
            params = self.params
            zero_smallest_(params, round(asked * count_weights(params)))
