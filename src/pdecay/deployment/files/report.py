"""What a file takes, tensor by tensor, and the least that it could take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pdecay._utils.tables import aligned
from pdecay.deployment.files.codec import bound
from pdecay.deployment.files.table import Row


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        encoding: ``dense``, ``mask`` or ``gaps``; a tied one's is ``same``.
        nbytes: what it takes in the file, without its line of the table.
        bound: the values' bytes and the entropy of their positions.
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
        code = row.encoding
        return cls(
            name=row.name,
            shape=row.shape,
            dtype=row.dtype.name,
            encoding=code.kind,
            size=code.size,
            zeros=zeros,
            nbytes=row.values_nbytes + code.nbytes,
            bound=bound(code.size, code.size - zeros, row.dtype.itemsize),
        )


@dataclass(frozen=True)
class SaveReport:
    """What :func:`pdecay.save` wrote. ``str()`` is a table, :meth:`to_dict` plain data.

    Args:
        nbytes: the file's size, the header and the names included.
        dense_nbytes: what the tensors take in memory.
    """

    path: str
    tensors: tuple[StoredTensor, ...]
    nbytes: int
    dense_nbytes: int

    @property
    def bound(self) -> float:
        """The bytes of the values and the entropy of their positions, over all tensors."""
        return sum(tensor.bound for tensor in self.tensors)

    @property
    def ratio(self) -> float:
        """The file's size in units of the bound."""
        return self.nbytes / self.bound if self.bound else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "path": self.path,
            "nbytes": self.nbytes,
            "dense_nbytes": self.dense_nbytes,
            "bound": self.bound,
            "tensors": [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in self.tensors],
        }

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
        names = self.nbytes - sum(tensor.nbytes for tensor in self.tensors)
        rows.append(("names, shapes, metadata", "", "", "", "", f"{names:,}", ""))
        rows.append(("in all", "", "", "", "", f"{self.nbytes:,}", f"{self.bound:,.0f}"))
        lines = aligned(rows)
        rule = "-" * max(map(len, lines))
        lines = [lines[0], rule, *lines[1:-1], rule, lines[-1]]
        if self.nbytes:
            lines.append(
                f"{self.path}: {self.dense_nbytes / self.nbytes:.1f} times smaller than its "
                f"tensors in memory, {self.nbytes / max(self.bound, 1) - 1:+.1%} of the bound"
            )
        return "\n".join(lines)
