"""The report of pdecay.save: the size of each stored tensor and its theoretical minimum."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pdecay._utils.tables import ruled
from pdecay.deployment.files.codec import lower_bound
from pdecay.deployment.files.table import Row


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        encoding: ``dense``, ``mask`` or ``gaps``.
        size, zeros: the number of elements and of zeros.
        nbytes: its bytes in the file, without its line in the table.
        bound: the bytes of the non-zero values plus the entropy of their positions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    size: int
    zeros: int
    nbytes: int
    bound: float

    @classmethod
    def of(cls, row: Row, zeros: int) -> StoredTensor:
        size = row.encoding.size
        return cls(
            name=row.name,
            shape=row.shape,
            dtype=row.dtype.name,
            encoding=row.encoding.kind,
            size=size,
            zeros=zeros,
            nbytes=row.stored_nbytes,
            bound=lower_bound(size, size - zeros, row.dtype.itemsize),
        )


@dataclass(frozen=True)
class SaveReport:
    """The result of :func:`pdecay.save`; ``str()`` formats it as a table.

    Args:
        path: the file's path.
        tensors: the stored tensors.
        nbytes: the file's size.
        dense_nbytes: the bytes of the tensors in memory.
    """

    path: str
    tensors: tuple[StoredTensor, ...]
    nbytes: int
    dense_nbytes: int

    @property
    def bound(self) -> float:
        """The bytes of all non-zero values plus the entropy of their positions."""
        return sum(tensor.bound for tensor in self.tensors)

    @property
    def ratio(self) -> float:
        """The file's size divided by the bound."""
        return self.nbytes / self.bound if self.bound else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        tensors = [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in self.tensors]
        return {**asdict(self), "bound": self.bound, "tensors": tensors}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("tensor", "shape", "dtype", "zeros", "encoding", "bytes", "bound")
        ]
        rows += [
            (
                tensor.name,
                "x".join(map(str, tensor.shape)),
                tensor.dtype,
                f"{tensor.zeros / tensor.size:.2%}" if tensor.size else "",
                tensor.encoding,
                f"{tensor.nbytes:,}",
                f"{tensor.bound:,.0f}",
            )
            for tensor in self.tensors
        ]
        overhead = self.nbytes - sum(tensor.nbytes for tensor in self.tensors)
        rows.append(("names, shapes, metadata", "", "", "", "", f"{overhead:,}", ""))
        rows.append(("total", "", "", "", "", f"{self.nbytes:,}", f"{self.bound:,.0f}"))
        lines = ruled(rows, totals=1)
        if self.nbytes:
            lines.append(
                f"{self.path}: {self.nbytes:,} bytes, "
                f"{self.nbytes / max(1, self.dense_nbytes):.1%} of the {self.dense_nbytes:,} in "
                "memory, "
                f"{self.nbytes / max(self.bound, 1) - 1:+.1%} above the bound"
            )
        return "\n".join(lines)
