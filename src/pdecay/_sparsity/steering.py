"""The parameters that a target steers: those that decay and are trained.

A parameter is trained if it requires a gradient at the step of its own optimizer. While one
optimizer of a GAN steps, the parameters of the other often require none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import Group
from pdecay._sparsity.metric import Rank, factors_of_young, with_gradients
from pdecay._sparsity.pools import PerLayer, Pool, make_pools, steered

Optimizers = Sequence[Optimizer]


class Steering:
    """The selection of the parameters to steer, among those of a list of optimizers.

    Each method takes the optimizers, because references to them would form a cycle.

    Args:
        target: the share of zeros.
        per_layer: as in :class:`pdecay.SparsityTarget`.
    """

    def __init__(self, target: float, per_layer: PerLayer) -> None:
        self._target, self._per_layer = target, per_layer
        self._at_last_step: dict[Tensor, bool] = {}  # requires_grad
        self._had_gradient: set[Tensor] = set()

    def clear(self) -> None:
        """Forget which tensors had a gradient."""
        self._had_gradient.clear()

    def begin_step(self, optimizer: Optimizer, optimizers: Optimizers) -> None:
        """Read which parameters require a gradient at the step of one of the optimizers."""
        before, self._at_last_step = self._at_last_step, {}  # parameters may have been replaced
        for one in optimizers:
            for param in (param for group in one.param_groups for param in group["params"]):
                if one is optimizer:
                    self._at_last_step[param] = param.requires_grad
                elif param in before:
                    self._at_last_step[param] = before[param]

    def trained(self, optimizers: Optimizers) -> dict[Tensor, bool]:
        """Return for each parameter if it required a gradient at its optimizer's last step."""
        trained: dict[Tensor, bool] = {}
        if len(optimizers) > 1:  # some may not have stepped since a checkpoint was loaded
            for group in groups_of(optimizers):
                joined = zip(group["params"], group.get("target_initial", []), strict=False)
                trained |= {param: True for param, initial in joined if initial >= 0}
        return trained | self._at_last_step

    def owners(self, optimizers: Optimizers) -> dict[Tensor, Optimizer]:
        """Return the steered parameters, with their optimizers."""
        trained = self.trained(optimizers)
        return {
            param: one
            for one in optimizers
            for group in one.param_groups
            for _, param in steered(group, trained)
        }

    def pools(self, optimizers: Optimizers) -> list[Pool]:
        """Return the pools of the steered parameters."""
        trained = self.trained(optimizers)
        return make_pools(groups_of(optimizers), self._target, self._per_layer, trained)

    def ranked_pools(self, optimizers: Optimizers, rank: Rank, progress: float) -> list[Pool]:
        """Return the pools without tensors that wait for their first gradient; see ``metric.py``.

        At the end of the ramp, no tensor waits: the target is met in any case.
        """
        if rank != "adaptive" or progress >= 1:
            return self.pools(optimizers)
        owners = self.owners(optimizers)
        self._had_gradient = with_gradients(owners, self._had_gradient)
        ranked = {param: param in self._had_gradient for param in owners}
        trained = self.trained(optimizers) | ranked
        return make_pools(groups_of(optimizers), self._target, self._per_layer, trained)

    def zero_lowest(
        self, optimizers: Optimizers, rank: Rank, progress: float, floor: float
    ) -> None:
        """Set as many weights of each pool to zero as the ramp asks for."""
        owners = self.owners(optimizers)
        factors = factors_of_young(owners) if rank == "adaptive" else {}
        for pool in self.ranked_pools(optimizers, rank, progress):
            pool.zero_lowest(progress, floor, rank, owners, factors)


def groups_of(optimizers: Optimizers) -> Iterator[Group]:
    """Yield the parameter groups of some optimizers."""
    for optimizer in optimizers:
        yield from optimizer.param_groups
