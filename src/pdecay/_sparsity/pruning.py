"""Magnitude pruning on any torch optimizer, with or without p-norm weight decay.

    MagnitudePruning(optimizer, threshold=1e-2, total_steps=5000)
    GradualMagnitudePruning(optimizer, sparsity=0.9, total_steps=5000)

Both act in the optimizer's hooks, after its own update. A decay that is attached to the same
optimizer, or that is part of it, may act before or after them: it multiplies, so zeros stay zero.

A checkpoint needs their ``state_dict()`` besides those of the model and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pdecay._core.penalty import magnitude
from pdecay._core.ramp import check_ramp, cubic_ramp, linear_ramp
from pdecay._core.validation import check_count, check_number, check_share
from pdecay._optim.hooks import (
    StepHooks,
    is_skipped,
    local_optimizer,
    only_creates_state,
    unwrap,
)
from pdecay._sparsity.metric import (
    Rank,
    adaptive_scores,
    check_rank,
    create_squares,
    factors_of_young,
    update_squares,
    with_gradients,
)
from pdecay._sparsity.ranking import count_weights, count_zeros, zero_smallest_
from pdecay._sparsity.shards import local_part
from pdecay._utils.user_warnings import warn_user

_FEW = 0.01  # share of zeros that a training without pruning may have: padding rows of embeddings


class _Pruning(StepHooks):
    """The common part of both methods: the weights, the steps, the hooks and the checkpoint."""

    _saved: tuple[str, ...]  # the attributes in a checkpoint, all of them plain numbers

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        every: int | None,
        params: Iterable[Tensor] | None,
    ) -> None:
        super().__init__(unwrap(optimizer))
        self.total_steps = check_count("total_steps", total_steps)
        self._warned = False
        default = max(1, self.total_steps // 100)
        self.every = default if every is None else check_count("every", every)
        self.last_step = 0
        self._chosen = self._check_params(params)
        if not self.params:
            raise ValueError(
                f"{type(self).__name__} has nothing to prune: the optimizer has no parameters "
                "with two or more dimensions that require a gradient; pass params= to choose others"
            )
        self.register()

    @property
    def params(self) -> list[Tensor]:
        """The parameters that are pruned."""
        if self._chosen is not None:
            return self._chosen
        return [param for param in self._matrices() if param.requires_grad]

    @property
    def sparsity_now(self) -> float:
        """The share of zeros among the weights of the pruned parameters now."""
        return count_zeros(self.params) / count_weights(self.params)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the step as plain numbers; the zeros themselves are the mask."""
        return {key: getattr(self, key) for key in self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint with its settings, as torch's schedulers do."""
        if state_dict.keys() != set(self._saved):
            raise ValueError(
                f"this is not a checkpoint of {type(self).__name__}: it has the keys "
                f"{sorted(state_dict)}, expected {sorted(self._saved)}"
            )
        for key, value in state_dict.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.state_dict().items())
        return f"{type(self).__name__}({shown})"

    def before_step(self, *, has_closure: bool) -> None:
        """Check the parameters and the state."""
        if self._chosen:
            self._check_chosen(self._chosen)
        if not (self.last_step or self._warned):
            self._warn_of_lost_state()

    def _check_chosen(self, chosen: list[Tensor]) -> None:
        """Raise RuntimeError if the optimizer does not have the chosen parameters any more."""
        known = {param for group in self.optimizer.param_groups for param in group["params"]}
        if missing := [tuple(one.shape) for one in chosen if one not in known]:
            raise RuntimeError(
                f"params of {type(self).__name__} has tensors, of shapes {missing}, that the "
                "optimizer does not have any more. Code that shards a model replaces its "
                "parameters: create the pruning after it, with the new ones"
            )

    def _warn_of_lost_state(self) -> None:
        """Warn at the first step if a run was resumed without the state of the pruning."""
        if not local_optimizer(self.optimizer).state:
            return
        zeros, size = count_zeros(self.params), count_weights(self.params)
        if zeros > _FEW * size:
            self._warned = True
            warn_user(
                f"{type(self).__name__} starts at step 0, but the optimizer has taken steps, and "
                f"{zeros} of {size} weights are zero, which may move until the pruning begins. To "
                "resume a run, save the state_dict() of the pruning, too, and load it"
            )

    def after_step(self) -> None:
        """Count the step and prune."""
        if not is_skipped(self.optimizer) and not only_creates_state(self.optimizer):
            self.last_step += 1
            self._prune()

    def _matrices(self) -> list[Tensor]:
        """Return the parameters that are pruned, or would be if they required a gradient."""
        if self._chosen is not None:
            return self._chosen
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return [param for param in params if is_lazy(param) or param.ndim >= 2]

    def _prune(self) -> None:
        """Prune after the optimizer's update, which `last_step` counts already."""
        raise NotImplementedError

    def _check_params(self, params: Iterable[Tensor] | None) -> list[Tensor] | None:
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
    """Iterative magnitude pruning: set small weights to 0 at regular intervals.

    Every `every` steps, and at the last one, all weights with ``|w|`` below a threshold are set to
    0. The threshold is 0 at first, grows linearly to its final value, and stays there. Between two
    prunings weights may become nonzero again; those that stay small are pruned again.
    Save its ``state_dict()`` with each checkpoint.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        threshold: the final threshold, >= 0. The final sparsity is not known in advance.
        total_steps: the number of steps of the training.
        every: the number of steps between two prunings; a hundredth of the training by default.
        start: the start of the threshold's growth, as a share of the training.
        ramp: the length of the threshold's growth, as a share of the training.
        params: the parameters to prune; by default those with two or more dimensions that require
            a gradient.

    Example:
        >>> import torch
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
                f"the threshold must reach its final value within the training: start < 1 and "
                f"start + ramp <= 1 must hold, got start={start!r}, ramp={ramp!r}"
            )
        self._warned_of_all = False
        super().__init__(optimizer, total_steps, every, params)

    def threshold_at(self, step: int) -> float:
        """Return the threshold after a number of steps."""
        begin, end = self.start * self.total_steps, (self.start + self.ramp) * self.total_steps
        return self.threshold * linear_ramp(step, begin, end)

    def _prune(self) -> None:
        threshold = self.threshold_at(self.last_step)
        if threshold and (self.last_step % self.every == 0 or self.last_step == self.total_steps):
            for param in map(local_part, self.params):
                param.masked_fill_(magnitude(param) < threshold, 0.0)
            if not self._warned_of_all and self.sparsity_now == 1:
                self._warned_of_all = True
                warn_user(
                    f"MagnitudePruning: all weights are below the threshold {threshold:g} and are "
                    f"zero after step {self.last_step}. The threshold is an absolute value, not a "
                    "share; GradualMagnitudePruning takes a share"
                )


class GradualMagnitudePruning(_Pruning):
    """Gradual magnitude pruning: set the smallest weights to 0 permanently, along a cubic ramp.

    All weights are ranked together. After t steps the share

        sparsity * (1 - (1 - (t - t_0) / (t_1 - t_0))^3)

    of them is zero, updated every `every` steps. The ramp begins at step t_0 = start * total_steps
    and ends at step t_1 = end * total_steps. At the end of the ramp the count is exact, and
    the remaining weights train on. Once the ramp has begun, zero weights stay zero. No mask is
    stored: the zeros before each update are the mask. Save its ``state_dict()`` with each
    checkpoint.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        sparsity: the final share of zeros, at least 0 and below 1. If the training itself makes
            more zeros, as p-norm weight decay may, they are kept.
        total_steps, every: as in :class:`MagnitudePruning`.
        start, end: the start and the end of the ramp, as shares of the training.
        params: as in :class:`MagnitudePruning`. Sharded parameters (DTensors) are ranked over all
            ranks of their mesh.
        rank: "magnitude" is the method of the literature; "adaptive" ranks in Adam's metric, as
            :class:`SparsityTarget` does.

    Example:
        >>> import torch
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
        rank: Rank = "magnitude",
    ) -> None:
        check_rank(rank)
        self.rank = rank
        self.sparsity = check_share("sparsity", sparsity)
        check_ramp(start, end)
        self.start, self.end = start, end
        super().__init__(optimizer, total_steps, every, params)
        if rank == "adaptive":
            create_squares(self.params, self.optimizer)
        self._zeros: list[tuple[Tensor, Tensor]] = []

    def sparsity_at(self, step: int) -> float:
        """Return the share of zeros that the ramp asks for after a number of steps."""
        begin, end = self.start * self.total_steps, self.end * self.total_steps
        return self.sparsity * cubic_ramp(step, begin, end)

    def before_step(self, *, has_closure: bool) -> None:
        """Remember the zeros."""
        super().before_step(has_closure=has_closure)
        self._zeros = []
        if self.sparsity_at(self.last_step):
            # Momentum moves weights that were frozen but kept their gradients.
            moved = [p for p in self._matrices() if p.requires_grad or p.grad is not None]
            self._zeros = [(param, param == 0) for param in map(local_part, moved)]

    def after_step(self) -> None:
        """Update the squares that weights are ranked by, count the step and prune.

        A step that only creates missing state must create the squares, too: a distributed
        checkpoint loads no state that does not exist yet.
        """
        if self.rank == "adaptive" and not is_skipped(self.optimizer):
            update_squares(self.params, self.optimizer)
        super().after_step()

    def _prune(self) -> None:
        zeros, self._zeros = self._zeros, []
        for param, is_zero in zeros:
            param.masked_fill_(is_zero, 0.0)
        asked, before = self.sparsity_at(self.last_step), self.sparsity_at(self.last_step - 1)
        ramp_ends = asked == self.sparsity and before < asked
        if ramp_ends or (asked != before and self.last_step % self.every == 0):
            params = self.params
            scores = None
            if self.rank == "adaptive":
                if not ramp_ends:  # at the end, no tensor waits for its first gradient
                    started = with_gradients(dict.fromkeys(params, self.optimizer))
                    params = [param for param in params if param in started]
                factors = factors_of_young(dict.fromkeys(params, self.optimizer))
                scores = [
                    adaptive_scores(param, self.optimizer, factors.get(param, 1.0))
                    for param in params
                ]
            zero_smallest_(params, round(asked * count_weights(params)), scores=scores)
