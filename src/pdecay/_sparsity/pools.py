"""Pools of weights that are ranked together on the way to a target sparsity.

By default all decayed weights form one pool. With ``per_layer`` a tensor is a pool of its own. Only
weights that decay and require a gradient belong to a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdecay._core.group_settings import Group, decayed_params, decays
from pdecay._core.ramp import check_target
from pdecay._sparsity.metric import Rank, adaptive_scores, ranked_squares
from pdecay._sparsity.ranking import count_zeros, kth_magnitude, zero_smallest_

PerLayer = bool | Mapping[Tensor, float]
Trained = Mapping[Tensor, bool]  # whether a parameter is trained, whatever its requires_grad is now
_UNKNOWN: Trained = {}

# The share of weights by which a finished run may exceed its target: weights can reach zero by
# themselves. Restored weights must not be refused for it.
_TOLERANCE = 0.01


@dataclass
class Pool:
    """Weights that are ranked together.

    Args:
        params: the tensors.
        target: the share of the weights that must be zero at the end.
        initial_zeros: the number of zeros at the start of the ramp.
    """

    params: list[Tensor]
    target: float
    initial_zeros: int = 0

    @property
    def size(self) -> int:
        """The number of weights, over all ranks."""
        return sum(param.numel() for param in self.params)

    def zeros_at(self, progress: float) -> int:
        """Return the number of zeros at a progress from 0 to 1 along the ramp."""
        initial = self.initial_zeros / self.size
        return round((initial + progress * (self.target - initial)) * self.size)

    def split(
        self, progress: float, floor: float, scores: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[list[Tensor], int]]:
        """Yield lists of tensors to rank together, each with its number of zeros.

        A tensor that the common ranking would take below its floor gets as many zeros as the
        floor allows. The rest of the zeros is distributed over the other tensors. If the floors
        leave too few weights for the target, the target is met without them.

        Args:
            progress: the progress along the ramp, from 0 to 1.
            floor: the share of each tensor that is kept.
            scores: returns the scores by which the weights of a tensor are ranked.
        """
        count, free = self.zeros_at(progress), list(self.params)
        most = self._most_zeros(count, floor, scores) if floor else None
        while most and count:
            tau = kth_magnitude([scores(param) for param in free], count)
            up_to = {param: _count_up_to(scores(param), tau) for param in free}
            full = [param for param in free if up_to[param] > most[param]]
            if not full:
                break
            if sum(min(up_to[param], most[param]) for param in free) >= count:
                # Equal scores: the others have enough of them. The earliest are set, as elsewhere.
                below = {p: min(_count_below(scores(p), tau), most[p]) for p in free}
                count -= sum(below.values())
                for param in free:
                    tied = min(count, min(up_to[param], most[param]) - below[param])
                    count -= tied
                    yield [param], below[param] + tied
                return
            for param in full:
                count -= most[param]
                yield [param], most[param]
            free = [param for param in free if param not in set(full)]
        yield free, count

    def zero_lowest(
        self,
        progress: float,
        floor: float,
        rank: Rank,
        owners: Mapping[Tensor, Optimizer],
        factors: Mapping[Tensor, float],
    ) -> None:
        """Set as many weights to zero as the ramp asks for.

        Args:
            progress, floor: as in :meth:`split`.
            rank: the name of the ranking.
            owners: the optimizers of the tensors.
            factors: the result of ``factors_of_young``.
        """
        same_age = len({factors.get(param, 1.0) for param in self.params}) == 1
        if rank == "adaptive" and not floor and same_age:
            squares = [ranked_squares(param, owners[param]) for param in self.params]
            if None not in squares:
                zero_smallest_(self.params, self.zeros_at(progress), squares=squares)
                return
        scores = {
            param: param
            if rank == "magnitude"
            else adaptive_scores(param, owners[param], factors.get(param, 1.0))
            for param in self.params
        }
        for params, count in self.split(progress, floor, scores.__getitem__):
            zero_smallest_(params, count, scores=[scores[param] for param in params])

    def _most_zeros(
        self, count: int, floor: float, scores: Callable[[Tensor], Tensor]
    ) -> dict[Tensor, int] | None:
        """Return how many weights of each tensor may be zero; None if `count` needs more.

        The share that is kept is rounded up if possible, else down, but not to nothing.
        """
        zeros = [_count_up_to(scores(param), 0.0) for param in self.params]
        sizes = [param.numel() for param in self.params]
        up = [size - int((1 - floor) * size) for size in sizes]
        down = [max(1, int(floor * size)) for size in sizes]
        for kept in (up, down):
            most = [max(n - k, z) for n, k, z in zip(sizes, kept, zeros, strict=True)]
            if sum(most) >= count:
                return dict(zip(self.params, most, strict=True))
        return None

    def check(self, floor: float, *, continues: bool) -> None:
        """Raise ValueError if the target cannot be met.

        A run that continues may have more zeros than asked for: some weights reach zero by decay.
        """
        if self.target > 1 - floor:
            raise ValueError(
                f"target {self.target:g} keeps less than floor={floor:g} of the weights; choose a "
                f"target of at most {1 - floor:g} or a lower floor"
            )
        zeros, allowed = count_zeros(self.params), round(self.target * self.size)
        if zeros > allowed + _TOLERANCE * self.size and not continues:
            raise ValueError(
                f"target {self.target:g} means {allowed} zeros, but {zeros} of the {self.size} "
                "weights are already zero; choose a higher target"
            )


def make_pools(
    groups: Iterable[Group], target: float, per_layer: PerLayer, trained: Trained = _UNKNOWN
) -> list[Pool]:
    """Return the pools of some parameter groups as they are now; see `steered`."""
    own_targets = per_layer if isinstance(per_layer, Mapping) else {}
    pools = []
    rest = Pool([], target)
    groups = list(groups)
    known = {param for group in groups for param in group["params"]} if own_targets else {}
    if missing := [tuple(param.shape) for param in own_targets if param not in known]:
        raise RuntimeError(
            f"per_layer of SparsityTarget has tensors, of shapes {missing}, that the optimizer "
            "does not have any more. Code that shards a model replaces its parameters: create the "
            "target after it, with the new ones"
        )
    seen: set[Tensor] = set()  # optimizers of a list may share parameters, such as an encoder
    for group in groups:
        initial = group.get("target_initial", [])  # shorter if parameters were appended just now
        for i, param in steered(group, trained):
            if param in seen:
                continue
            seen.add(param)
            zeros = min(max(0, initial[i]), param.numel()) if i < len(initial) else 0
            if per_layer is True or param in own_targets:
                pools.append(Pool([param], own_targets.get(param, target), zeros))
            else:
                rest.params.append(param)
                rest.initial_zeros += zeros
    return [*pools, rest] if rest.params else pools


def steered(group: Group, trained: Trained = _UNKNOWN) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the tensor of each parameter that decays and requires a gradient.

    `trained` decides about the parameters that it has, instead of their ``requires_grad``.
    """
    if not group.get("decay"):  # also a new group that attach has not completed yet
        return
    for i, param in enumerate(group["params"]):
        if decays(param, group) and trained.get(param, param.requires_grad) and param.numel():
            yield i, param


def check_per_layer(per_layer: PerLayer, groups: Iterable[Group]) -> None:
    """Raise an error if a mapping has bad targets or tensors that do not decay."""
    if isinstance(per_layer, bool):
        return
    if not isinstance(per_layer, Mapping) or not all(isinstance(w, Tensor) for w in per_layer):
        raise TypeError(
            f"per_layer must be True, False or a mapping from tensors to targets, got {per_layer!r}"
        )
    for target in per_layer.values():
        check_target("a layer's target", target)
    decayed = {param for group in groups for param in decayed_params(group)}
    unknown = [tuple(param.shape) for param in per_layer if param not in decayed]
    if unknown:
        raise ValueError(f"per_layer has tensors that do not decay, of shapes {unknown}")


@torch.no_grad()
def _count_up_to(scores: Tensor, tau: float) -> int:
    return _total(scores.abs() <= tau)


@torch.no_grad()
def _count_below(scores: Tensor, tau: float) -> int:
    return _total(scores.abs() < tau)


def _total(chosen: Tensor) -> int:
    count = chosen.sum()
    return int(count.full_tensor() if hasattr(count, "full_tensor") else count)
