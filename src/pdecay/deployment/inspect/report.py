"""The table of a file's tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pdecay._core.validation import check_number
from pdecay._utils.tables import aligned
from pdecay.deployment.files.codec import bound
from pdecay.deployment.files.container import naming
from pdecay.deployment.inspect import histogram
from pdecay.deployment.inspect.counts import Counts, counted, has_magnitude
from pdecay.deployment.inspect.sources import Source, opened

_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Layer:
    """A tensor of a file: what it is, what it takes, and what was counted in it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    encoding: str
    dense_nbytes: int
    nbytes: int
    bound: float
    counts: Counts
    is_weight: bool

    @property
    def sparsity(self) -> float:
        return self.counts.zeros / self.size if self.size else 0.0


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found. ``str()`` is a table and a histogram, :meth:`to_dict` plain data.

    Args:
        nbytes: the file's size.
        ties: names of tensors that have another name, under which they are listed.
    """

    path: str
    kind: str
    nbytes: int
    metadata: dict[str, str]
    threshold: float
    layers: tuple[Layer, ...]
    ties: dict[str, str]

    @property
    def weights(self) -> tuple[Layer, ...]:
        """The layers that the histogram is of: all numbers of two dimensions or more."""
        proper = tuple(layer for layer in self.layers if layer.is_weight and len(layer.shape) > 1)
        return proper or tuple(layer for layer in self.layers if layer.is_weight)

    @property
    def sparsity(self) -> float:
        """The share of zeros among the weights."""
        size = sum(layer.size for layer in self.weights)
        return sum(layer.counts.zeros for layer in self.weights) / size if size else 0.0

    @property
    def bound(self) -> float:
        return sum(layer.bound for layer in self.layers)

    @property
    def histogram(self) -> histogram.Counts:
        return sum((layer.counts.histogram for layer in self.weights), start=histogram.empty())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "bytes": self.nbytes,
            "bound": self.bound,
            "metadata": self.metadata,
            "threshold": self.threshold,
            "sparsity": self.sparsity,
            "layers": [
                {
                    "name": layer.name,
                    "shape": list(layer.shape),
                    "dtype": layer.dtype,
                    "size": layer.size,
                    "zeros": layer.counts.zeros,
                    "exact_zeros": layer.counts.exact_zeros,
                    "sparsity": layer.sparsity,
                    "dead_rows": layer.counts.dead_rows,
                    "dead_columns": layer.counts.dead_columns,
                    "not_finite": layer.counts.not_finite,
                    "encoding": layer.encoding,
                    "dense_bytes": layer.dense_nbytes,
                    "bytes": layer.nbytes,
                    "bound": layer.bound,
                }
                for layer in self.layers
            ],
            "ties": self.ties,
            "histogram": [
                {"from": low, "to": high, "weights": n}
                for low, high, n in histogram.bars(self.histogram)
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.kind}, {self.nbytes:,} bytes"]
        lines += [f"  {_plain(key)}: {_plain(value)}" for key, value in self.metadata.items()]
        lines += ["", *self._table(), *self._notes()]
        zeros = sum(layer.counts.exact_zeros for layer in self.weights)
        drawing = histogram.drawn(self.histogram, zeros)
        return "\n".join([*lines, "", *drawing] if drawing else lines)

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            (
                "tensor",
                "shape",
                "dtype",
                "zeros",
                "dead rows",
                "dead columns",
                "dense bytes",
                "in the file",
                "bound",
            )
        ]
        rows += [
            (
                _plain(layer.name),
                "x".join(map(str, layer.shape)),
                layer.dtype,
                f"{layer.sparsity:.2%}" if layer.size else "",
                f"{layer.counts.dead_rows:,}" if len(layer.shape) > 1 else "",
                f"{layer.counts.dead_columns:,}" if len(layer.shape) > 1 else "",
                f"{layer.dense_nbytes:,}",
                f"{layer.nbytes:,}",
                f"{layer.bound:,.0f}",
            )
            for layer in self.layers
        ]
        dense = sum(layer.dense_nbytes for layer in self.layers)
        rows.append(
            (
                "in all",
                "",
                "",
                f"{self.sparsity:.2%}",
                "",
                "",
                f"{dense:,}",
                f"{self.nbytes:,}",
                f"{self.bound:,.0f}",
            )
        )
        lines = aligned(rows)
        rule = "-" * max(map(len, lines))
        return [lines[0], rule, *lines[1:-1], rule, lines[-1]]

    def _notes(self) -> list[str]:
        notes = [f"{_plain(name)} is {_plain(other)}" for name, other in self.ties.items()]
        small = sum(layer.counts.zeros - layer.counts.exact_zeros for layer in self.layers)
        if small:
            notes.append(
                f"{small:,} of the zeros are only smaller than {self.threshold:g}, and stored: "
                "pdecay.prune_(model) makes them exact"
            )
        notes += [
            f"{_plain(layer.name)} has {layer.counts.not_finite:,} infinities or NaNs"
            for layer in self.layers
            if layer.counts.not_finite
        ]
        return notes


def _plain(text: str) -> str:
    """For a terminal, which may not know all letters, and must not obey a file's."""
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def inspect(
    path: str | os.PathLike[str], *, threshold: float = 1e-13, key: str | None = None
) -> Inspection:
    """Count the zeros, dead units and bytes of a file of weights, and how large the weights are.

    Args:
        path: of a sparse file, a safetensors file, or a file of ``torch.save`` that
            ``torch.load(weights_only=True)`` reads.
        threshold: weights with ``|w| < threshold`` count as zero, as in :func:`pdecay.sparsity`.
        key: for a checkpoint of several state dicts, which one.

    Raises:
        FileFormatError: for a file that is none of these.
    """
    threshold = check_number("threshold", threshold)
    with naming(path), opened(path, key) as file:
        return Inspection(
            path=os.fspath(path),
            kind=file.kind,
            nbytes=os.path.getsize(path),
            metadata=file.metadata,
            threshold=threshold,
            layers=tuple(_layer(source, threshold) for source in file.sources),
            ties=file.ties,
        )


def _layer(source: Source, threshold: float) -> Layer:
    counts = counted(source, threshold)
    return Layer(
        name=source.name,
        shape=source.shape,
        dtype=source.dtype.name,
        size=source.size,
        encoding=source.encoding,
        dense_nbytes=source.size * source.dtype.itemsize,
        nbytes=source.nbytes,
        bound=bound(source.size, source.size - counts.exact_zeros, source.dtype.itemsize),
        counts=counts,
        is_weight=has_magnitude(source.dtype),
    )
