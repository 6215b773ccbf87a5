"""The report of pdecay.deploy: times, bytes and the choice for each layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pdecay._utils.tables import aligned, ruled

PLAN_FORMAT = ("chosen", "sparse")  # the keys that every plan has

_MEDIAN_RATIO = 1.1  # print the gain of the median call if it differs by more than this
_MAX_NAMES = 6  # folded modules to print


@dataclass(frozen=True)
class DeployedLayer:
    """A layer and its measurements.

    Args:
        name: its name in ``model.named_modules()``.
        kind: its class.
        shape: the shape of its weight after compaction.
        sparsity: the fraction of zeros in its weight.
        choice: its form in the deployed model.
        why: the reason for the choice.
        dense_bytes, sparse_bytes: its memory in both forms.
        dense_time, sparse_time: seconds of all its calls on the example; None if not measured.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sparsity: float
    choice: Literal["dense", "sparse"]
    why: str
    dense_bytes: int
    sparse_bytes: int | None = None
    dense_time: float | None = None
    sparse_time: float | None = None


@dataclass(frozen=True)
class DeployReport:
    """The result of :func:`deploy`; ``str()`` formats it as a table.

    Args:
        layers: the linear and convolutional layers.
        chosen: the fastest model: "sparse" has sparse layers, "smaller" is compacted and has
            folded batch norms, "dense" is the original.
        dense_time, deployed_time: seconds of a run on the example, original and deployed, that
            other processes hardly disturb.
        median_speedup: the ratio of the median times. It is larger than `speedup` if other
            processes slow the original down more, for example by using the processor's cache.
        folded_time: seconds of the original with folded batch norms, whose weights are all dense;
            None if no batch norm was folded. It separates the gain of folding from the gain of
            zeros.
        spread: how much the ratios of these times varied during the measurement; 0.1 is 10 %.
        dense_bytes, deployed_bytes: bytes of parameters and buffers.
        folded: batch norms, ReLUs and sums that became part of the layer before them.
        removed: the number of units that compaction removed.
        difference: the largest difference of outputs, relative to the largest output.
        batch: the number of rows of the example; None if its tensors have different numbers.
        threads: torch's number of threads during the measurements.
        notes: steps that were skipped, with reasons.
    """

    layers: tuple[DeployedLayer, ...]
    chosen: Literal["sparse", "smaller", "dense"]
    dense_time: float
    folded_time: float | None
    deployed_time: float
    median_speedup: float
    spread: float
    dense_bytes: int
    deployed_bytes: int
    folded: tuple[str, ...]
    removed: int
    difference: float
    batch: int | None
    threads: int
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """The original time divided by the deployed time."""
        return self.dense_time / self.deployed_time

    @property
    def plan(self) -> dict[str, Any]:
        """The choices as plain data, ready for JSON, for ``deploy(model, inputs, choose=plan)``."""
        return {
            "chosen": self.chosen,
            "sparse": {one.name: list(one.shape) for one in self.layers if one.choice == "sparse"},
            "batch": self.batch,
            "threads": self.threads,
            "speedup": round(self.speedup, 2),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        layers = [{**asdict(layer), "shape": list(layer.shape)} for layer in self.layers]
        lists = {"layers": layers, "folded": list(self.folded), "notes": list(self.notes)}
        return {**asdict(self), **lists, "speedup": self.speedup}

    def __str__(self) -> str:
        header = ("layer", "weight", "zeros", "kB", "sparse kB", "us", "sparse us", "choice")
        rows: list[tuple[str, ...]] = [header]
        rows += [
            (
                layer.name or "(the model)",
                "x".join(map(str, layer.shape)),
                f"{layer.sparsity:.1%}",
                _kilobytes(layer.dense_bytes),
                _kilobytes(layer.sparse_bytes),
                _microseconds(layer.dense_time),
                _microseconds(layer.sparse_time),
                f"{layer.choice}: {layer.why}" if layer.why else layer.choice,
            )
            for layer in self.layers
        ]
        lines = [*ruled(rows), "", *self._summary()]
        if self.chosen != "sparse":
            smaller = ": the model is dense but smaller" if self.chosen == "smaller" else ""
            lines.append(f"no layer is sparse{smaller}")
        if self.removed:
            lines.append(f"{_plural(self.removed, 'dead unit')} removed")
        if self.folded:
            more = f", ... ({len(self.folded)} in total)" if len(self.folded) > _MAX_NAMES else ""
            names = ", ".join(self.folded[:_MAX_NAMES])
            lines.append(f"folded into the layer before: {names}{more}")
        return "\n".join([*lines, *self.notes])

    def _summary(self) -> list[str]:
        """Return the times and bytes of the whole model."""
        rows: list[tuple[str, ...]] = [("", "", "us", "kB", "times as fast")]
        times = [
            ("original", self.dense_time, self.dense_bytes),
            ("dense, batch norms folded", self.folded_time, None),
            (f"deployed ({self.chosen})", self.deployed_time, self.deployed_bytes),
        ]
        rows += [
            (name, "", _microseconds(seconds), _kilobytes(size), f"{self.dense_time / seconds:.2f}")
            for name, seconds, size in times
            if seconds is not None
        ]
        batch = "" if self.batch is None else f"batch size {self.batch}, "
        lines = [
            *aligned(rows),
            f"{self.speedup:.2f} times as fast with {batch}{_plural(self.threads, 'thread')}",
        ]
        if not 1 / _MEDIAN_RATIO < self.median_speedup / self.speedup < _MEDIAN_RATIO:
            lines.append(f"{self.median_speedup:.2f} times for the median call, which is disturbed")
        return [
            *lines,
            f"outputs differ by {self.difference:.1e} of the largest output",
        ]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _kilobytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e3:,.1f}"


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:,.1f}"
