"""The inspection of a weight file: counts of each tensor, a table and a histogram."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pdecay._core.validation import check_number
from pdecay._utils.tables import ruled
from pdecay.deployment.files.codec import lower_bound
from pdecay.deployment.files.container import prefix_errors
from pdecay.deployment.files.table import Row
from pdecay.deployment.inspect import histogram
from pdecay.deployment.inspect.counts import Counts, count, has_magnitude
from pdecay.deployment.inspect.sources import open_weights

_MAX_TEXT = 200


@dataclass(frozen=True)
class Layer:
    """A tensor of a file and its counts."""

    row: Row
    counts: Counts

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.shape

    @property
    def size(self) -> int:
        return self.row.encoding.size

    @property
    def nbytes(self) -> int:
        """The bytes in the file."""
        return self.row.stored_nbytes

    @property
    def dense_nbytes(self) -> int:
        """The bytes of the dense tensor in memory."""
        return self.row.nbytes

    @property
    def bound(self) -> float:
        """The bytes of the non-zero values plus the entropy of their positions."""
        nonzeros = self.size - self.counts.exact_zeros
        return lower_bound(self.size, nonzeros, self.row.dtype.itemsize)

    @property
    def sparsity(self) -> float:
        return self.counts.zeros / self.size if self.size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        counts = self.counts
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.row.dtype.name,
            "size": self.size,
            "zeros": counts.zeros,
            "exact_zeros": counts.exact_zeros,
            "sparsity": self.sparsity,
            "dead_rows": counts.dead_rows,
            "dead_columns": counts.dead_columns,
            "not_finite": counts.not_finite,
            "encoding": self.row.encoding.kind,
            "dense_bytes": self.dense_nbytes,
            "bytes": self.nbytes,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class Inspection:
    """The result of :func:`inspect`; ``str()`` formats it as a table and a histogram.

    Args:
        path, kind, nbytes, metadata: the file's path, kind, size and metadata strings.
        threshold: the magnitude below which a weight counts as zero.
        layers: the tensors.
        ties: second names, and the name under which the tensor is listed.
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
        """The weights of the histogram: floating-point tensors, with two dimensions if any has."""
        numbers = tuple(layer for layer in self.layers if has_magnitude(layer.row.dtype))
        return tuple(layer for layer in numbers if len(layer.shape) > 1) or numbers

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the weights."""
        size = sum(layer.size for layer in self.weights)
        return sum(layer.counts.zeros for layer in self.weights) / size if size else 0.0

    @property
    def bound(self) -> float:
        return sum(layer.bound for layer in self.layers)

    @property
    def histogram(self) -> histogram.Counts:
        return sum((layer.counts.histogram for layer in self.weights), start=histogram.empty())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "bytes": self.nbytes,
            "bound": self.bound,
            "metadata": self.metadata,
            "threshold": self.threshold,
            "sparsity": self.sparsity,
            "layers": [layer.to_dict() for layer in self.layers],
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
        drawing = histogram.draw_text(self.histogram, zeros)
        return "\n".join([*lines, "", *drawing] if drawing else lines)

    def _table(self) -> list[str]:
        header = ("tensor", "shape", "dtype", "zeros", "dead rows", "dead columns")
        rows: list[tuple[str, ...]] = [(*header, "dense bytes", "in the file", "bound")]
        for layer in self.layers:
            units = ("", "")
            if len(layer.shape) > 1:
                units = (f"{layer.counts.dead_rows:,}", f"{layer.counts.dead_columns:,}")
            rows.append(
                (
                    _plain(layer.name),
                    "x".join(map(str, layer.shape)),
                    layer.row.dtype.name,
                    f"{layer.sparsity:.2%}" if layer.size else "",
                    *units,
                    *_sizes(layer.dense_nbytes, layer.nbytes, layer.bound),
                )
            )
        dense = sum(layer.dense_nbytes for layer in self.layers)
        total = _sizes(dense, self.nbytes, self.bound)
        rows.append(("total", "", "", f"{self.sparsity:.2%}", "", "", *total))
        return ruled(rows, totals=1)

    def _notes(self) -> list[str]:
        notes = [f"{_plain(name)} is tied to {_plain(other)}" for name, other in self.ties.items()]
        small = sum(layer.counts.zeros - layer.counts.exact_zeros for layer in self.layers)
        if small:
            notes.append(
                f"{small:,} of the zeros are stored, but smaller than {self.threshold:g}: "
                "pdecay.prune_(model) makes them exact"
            )
        notes += [
            f"{_plain(layer.name)} has {layer.counts.not_finite:,} infinities or NaNs"
            for layer in self.layers
            if layer.counts.not_finite
        ]
        return notes


def inspect(
    path: str | os.PathLike[str], *, threshold: float = 1e-13, key: str | None = None
) -> Inspection:
    """Count the zeros, dead units and bytes of a weight file and the magnitudes of its weights.

    Args:
        path: a sparse file, a safetensors file, or a ``torch.save`` file of tensors and plain
            data. Nothing in the file is run.
        threshold: weights with ``|w| < threshold`` count as zero, as in :func:`pdecay.sparsity`.
        key: the key of the state dict in a checkpoint with several.

    Raises:
        FileFormatError: if the file is of another kind or damaged.
    """
    threshold = check_number("threshold", threshold)
    with prefix_errors(path), open_weights(path, key) as file:
        return Inspection(
            path=os.fspath(path),
            kind=file.kind,
            nbytes=os.path.getsize(path),
            metadata=file.metadata,
            threshold=threshold,
            layers=tuple(Layer(source.row, count(source, threshold)) for source in file.sources),
            ties=file.ties,
        )


def _sizes(dense: int, stored: int, bound: float) -> tuple[str, str, str]:
    return f"{dense:,}", f"{stored:,}", f"{bound:,.0f}"


def _plain(text: str) -> str:
    """Escape and shorten untrusted text, which may contain terminal control codes."""
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
