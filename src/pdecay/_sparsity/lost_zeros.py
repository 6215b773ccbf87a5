"""A warning if zeros of a sparsity target come back.

The decay keeps zeros in the steps of its optimizer. Code that writes to the weights between the
steps, such as Lookahead, does not. A few rows of each tensor show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from pdecay._sparsity.probing import sample_rows
from pdecay._utils.user_warnings import warn_user

_ROWS = 8  # of each tensor


class ZeroWatch:
    """Zeros of this rank that were counted once, and must still be zero later."""

    def __init__(self) -> None:
        self._nonzeros: dict[Tensor, int] = {}
        self._warned = False

    def clear(self) -> None:
        """Forget the counts."""
        self._nonzeros.clear()

    def count(self, params: Iterable[Tensor]) -> None:
        """Count the weights of these tensors that are not zero."""
        self._nonzeros = {param: int(rows.count_nonzero()) for param, rows in _watched(params)}

    def check(self, params: Iterable[Tensor], step: int) -> None:
        """Warn once if zeros of these tensors have become other finite numbers before a step."""
        known = (param for param in params if param in self._nonzeros)
        if self._warned or not any(
            int(rows.count_nonzero()) > self._nonzeros[param] and bool(rows.isfinite().all())
            for param, rows in _watched(known)
        ):
            return
        self._warned = True
        warn_user(
            f"SparsityTarget: weights that were zero are not zero any more before step {step}. "
            "Something moved them that the decay does not see: code that writes to the weights "
            "between steps (Lookahead, averages, loaded weights), or an optimizer that moves "
            "weights at lr = 0"
        )


def _watched(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for param in params:
        yield from ((param, rows) for rows, _ in sample_rows([param], _ROWS))
