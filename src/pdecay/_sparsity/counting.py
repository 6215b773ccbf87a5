"""Counts of zeros and dead units, and the removal of tiny weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdecay._core.group_settings import decayed_params
from pdecay._core.parameters import decays_by_default, has_transposed_weight, owners_of
from pdecay._core.penalty import magnitude
from pdecay._core.validation import check_number
from pdecay._optim.attachment import complete_groups
from pdecay._optim.hooks import unwrap
from pdecay._utils.tables import ruled

# A layer is dead if the root mean square of its weights is a smaller share of that of another one.
_DEAD = 1e-4


@dataclass(frozen=True)
class LayerSparsity:
    """The zeros of one parameter.

    A row is a slice along the first dimension, a column a slice along the second. In the weight of
    a linear or convolutional layer they belong to an output and an input unit, and the other way
    round in a transposed convolution. The weight of a ``Conv1D`` of transformers is counted as its
    transpose, so that rows are output units there too.
    Rows and columns that are all zero are dead.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    zeros: int
    decayed: bool
    dead_rows: tuple[int, ...] = ()
    dead_columns: tuple[int, ...] = ()

    @property
    def sparsity(self) -> float:
        return self.zeros / self.size if self.size else 0.0


@dataclass(frozen=True)
class SparsityReport:
    """The result of :func:`sparsity`. ``str()`` gives a table, :meth:`to_dict` plain data."""

    layers: tuple[LayerSparsity, ...]
    threshold: float

    @property
    def total(self) -> float:
        """The share of zeros among the decayed weights, as in :class:`pdecay.SparsityTarget`."""
        return self._share(self._decayed())

    @property
    def total_all(self) -> float:
        """The share of zeros among all parameters, including biases and norms."""
        return self._share(self.layers)

    @property
    def dead_units(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The indices of the dead rows and columns of each parameter that has any."""
        return {
            layer.name: {"rows": layer.dead_rows, "columns": layer.dead_columns}
            for layer in self.layers
            if layer.dead_rows or layer.dead_columns
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that can be written as JSON."""
        return {
            "total": self.total,
            "total_all": self.total_all,
            "threshold": self.threshold,
            "layers": [
                {
                    **asdict(layer),
                    "shape": list(layer.shape),
                    "dead_rows": list(layer.dead_rows),
                    "dead_columns": list(layer.dead_columns),
                    "sparsity": layer.sparsity,
                }
                for layer in self.layers
            ],
        }

    def __str__(self) -> str:
        header = ("parameter", "shape", "weights", "zeros", "dead rows", "dead columns")
        rows: list[tuple[str, ...]] = [header]
        rows += [
            (
                layer.name + ("" if layer.decayed else " *"),
                "x".join(map(str, layer.shape)),
                f"{layer.size:,}",
                f"{layer.sparsity:.2%}",
                f"{len(layer.dead_rows):,}",
                f"{len(layer.dead_columns):,}",
            )
            for layer in self.layers
        ]
        for title, layers in (("decayed", self._decayed()), ("all", self.layers)):
            size = sum(layer.size for layer in layers)
            rows.append((title, "", f"{size:,}", f"{self._share(layers):.2%}", "", ""))
        lines = ruled(rows, totals=2)
        if len(self._decayed()) < len(self.layers):
            lines.append("* not decayed")
        return "\n".join(lines)

    def _decayed(self) -> tuple[LayerSparsity, ...]:
        return tuple(layer for layer in self.layers if layer.decayed)

    @staticmethod
    def _share(layers: tuple[LayerSparsity, ...]) -> float:
        size = sum(layer.size for layer in layers)
        return sum(layer.zeros for layer in layers) / size if size else 0.0


@torch.no_grad()
def sparsity(
    model: nn.Module, threshold: float = 1e-13, *, optimizer: Optimizer | None = None
) -> SparsityReport:
    """Count the zeros and the dead units of each parameter and of the whole model.

    Args:
        model: the model. Tied weights are counted once. Weights under a mask of
            ``torch.nn.utils.prune`` are counted as masked. Sharded weights are counted over all
            ranks, which is a collective operation: call it on every rank.
        threshold: weights with ``|w| < threshold`` count as zero. The paper uses 1e-13.
        optimizer: an optimizer whose groups say which parameters are decayed. By default these
            are the parameters that :func:`pdecay.param_groups` decays: two or more dimensions,
            and not in a normalisation layer.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> model.weight.data[0] = 0
        >>> report = sparsity(model)
        >>> report.total, report.layers[0].dead_rows
        (0.5, (0,))
    """
    _check_model("sparsity", model)
    threshold = check_number("threshold", threshold)
    inner = unwrap(optimizer)
    if inner is not None:
        if not isinstance(inner, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, got {type(inner).__name__}")
        complete_groups(inner)
    layers = []
    decaying = {
        param
        for group in (inner.param_groups if inner else [])
        if "decay" in group
        for param in decayed_params(group)
    }
    for param, owners in owners_of(model):
        decayed = param in decaying if inner else decays_by_default(param, owners)
        layers.append(_count(param, owners, threshold, decayed))
    if not layers:
        raise ValueError(f"nothing to count: {type(model).__name__} has no parameters")
    return SparsityReport(tuple(layers), threshold)


@torch.no_grad()
def prune_(model: nn.Module, threshold: float = 1e-13) -> nn.Module:
    """Set every weight with ``|w| < threshold`` to exactly 0.0 in place and return the model.

    Negative zeros become 0.0 for any threshold.

    Args:
        model: the model.
        threshold: an absolute value, not a share of the weights.

    Raises:
        ValueError: if the weights below the threshold are not small: they hold more than half of
            the sum of squared weights, of all weights together or in the mean over the matrices
            that :func:`param_groups` decays. No weight is changed then.
    """
    _check_model("prune_", model)
    threshold = check_number("threshold", threshold)
    if threshold > 1e-13:  # the default is always safe
        _check_threshold(model, threshold)
    for param, _ in owners_of(model):
        param.masked_fill_((magnitude(param) < threshold) | (param == 0), 0.0)
    return model


def _check_threshold(model: nn.Module, threshold: float) -> None:
    weights = [magnitude(param).double() for param, _ in owners_of(model)]
    total = sum(_total(w.square()) for w in weights)
    small = sum(_total(w.square() * (w < threshold)) for w in weights)
    if small > total / 2 or _mean_share_below(model, threshold) > 1 / 2:
        zeros = sum(_total(w < threshold) for w in weights) / sum(w.numel() for w in weights)
        raise ValueError(
            f"prune_: the threshold {threshold:g} is too high: {zeros:.1%} of the weights are "
            "below it, and they hold most of the sum of squares, of the model or of most layers. "
            "It is an absolute value, not a share; to set a share of the weights to zero, train "
            "with pdecay.SparsityTarget"
        )


def _mean_share_below(model: nn.Module, threshold: float) -> float:
    """Return the share of small weights in the sum of squares, as the mean over the matrices.

    In one sum over the model, the scales of norms, which are about 1, and large embeddings would
    hide all other layers. Layers that are dead but for tiny weights are left out.
    """
    means, shares = [], []
    for param, owners in owners_of(model):
        if param.numel() and decays_by_default(param, owners):
            w = magnitude(param).double()
            total = _total(w.square())
            means.append(total / param.numel())
            shares.append(_total(w.square() * (w < threshold)) / total if total else 0.0)
    alive = [s for s, mean in zip(shares, means, strict=True) if mean > _DEAD**2 * max(means)]
    return sum(alive) / len(alive) if alive else 0.0


def _total(values: Tensor) -> float:
    total = values.sum()
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)


def _count(
    param: Tensor, owners: list[tuple[str, nn.Module]], threshold: float, decayed: bool
) -> LayerSparsity:
    name, module = owners[0]
    values = param.full_tensor() if hasattr(param, "full_tensor") else param
    mask = getattr(module, name.rsplit(".", 1)[-1].removesuffix("_orig") + "_mask", None)
    if name.endswith("_orig") and isinstance(mask, Tensor):  # torch.nn.utils.prune
        values = values * mask
    # Compare in single precision at least: in half precision 1e-13 rounds to 0. A threshold that
    # rounds to 0 even so still counts exact zeros.
    is_zero = (magnitude(values) < threshold) | (values == 0) if threshold else values == 0
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    if is_zero.ndim >= 2 and is_zero.numel():
        rows = _all_zero(is_zero.flatten(1))
        columns = _all_zero(is_zero.transpose(0, 1).flatten(1))
    if has_transposed_weight(module):
        rows, columns = columns, rows
    return LayerSparsity(
        name=name,
        shape=tuple(values.shape),
        size=math.prod(values.shape),
        zeros=int(is_zero.sum()),
        decayed=decayed,
        dead_rows=rows,
        dead_columns=columns,
    )


def _all_zero(is_zero: Tensor) -> tuple[int, ...]:
    return tuple(is_zero.all(dim=1).nonzero().flatten().tolist())


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} needs a torch.nn.Module, got {type(model).__name__}")
    if any(hasattr(module, "to_dense") for module in model.modules()):  # SparseLayer
        raise TypeError(
            f"{function} reads parameters, but {type(model).__name__} has sparse layers, which "
            "store no zeros. Pass the model as it was before deploy(); the report of the deployed "
            "model has the zeros of its layers"
        )
