"""What the demo's runs showed: the run worth recommending, and the sentence about it.

Every number here is computed from the runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import pdecay
from pdecay.lab.data import digits
from pdecay.lab.demo import runs
from pdecay.lab.demo.runs import Setting, Summary
from pdecay.lab.demo.toy import Toy

TOLERANCE = 0.005  # the loss of accuracy up to which a sparse run is worth recommending
PAPERS_TOLERANCE = 0.02  # up to which the paper names its sparsest networks (section 5.1)


@dataclass(frozen=True)
class Plan:
    """What is trained: settings, times seeds, for a number of epochs."""

    settings: tuple[Setting, ...]
    seeds: int
    epochs: int


@dataclass(frozen=True)
class Story:
    """The results of a plan."""

    plan: Plan
    summaries: tuple[Summary, ...]
    toy: Toy

    @property
    def dense(self) -> Summary:
        """The best AdamW: sparse runs are held against it, as in the paper."""
        dense = (summary for summary in self.summaries if summary.setting.decay is None)
        return max(dense, key=lambda summary: summary.accuracy)

    @property
    def sparse(self) -> tuple[Summary, ...]:
        return tuple(summary for summary in self.summaries if summary.setting.decay is not None)

    @property
    def pick(self) -> Summary:
        """The setting worth recommending: the sparsest that is about as accurate as AdamW."""
        within = self._within(TOLERANCE)
        return _sparsest(within) if within else max(self.sparse, key=lambda s: s.accuracy)

    @property
    def marked(self) -> tuple[Summary, ...]:
        """Whose numbers the figure shows: the pick, the paper's measure, the sparsest of all."""
        within = self._within(PAPERS_TOLERANCE) or [self.pick]
        return tuple(dict.fromkeys((self.pick, _sparsest(within), _sparsest(self.sparse))))

    def lost(self, summary: Summary) -> float:
        """How much less accurate than the best AdamW a setting is; negative where it is more."""
        return self.dense.accuracy - summary.accuracy

    def curves(self) -> dict[str, list[Summary]]:
        """The sparse settings by the curve that they belong to."""
        by_name: dict[str, list[Summary]] = {}
        for summary in self.sparse:
            by_name.setdefault(summary.setting.series, []).append(summary)
        return by_name

    def headline(self) -> str:
        """One sentence: what was gained, at what price, against what, by what."""
        pick, dense = self.pick, self.dense
        seeds = "one seed" if self.plan.seeds == 1 else f"mean of {self.plan.seeds} seeds"
        told = (
            f"{100 * pick.sparsity:.1f} % of the weights are zero and validation accuracy is "
            f"{100 * pick.accuracy:.1f} %; the best AdamW, dense, has "
            f"{100 * dense.accuracy:.1f} % (PAdam with {pick.setting.decay_name}, {seeds})."
        )
        if self.lost(pick) <= TOLERANCE:
            return told
        return f"No sparse run is within {100 * TOLERANCE:g} points of AdamW. The nearest: {told}"

    def title(self) -> str:
        """The headline in as few words as a figure's title has room for."""
        points = round(100 * self.lost(self.pick), 1)
        price = f"{points:.1f} points less accurate" if points > 0 else "as accurate as AdamW"
        return f"{100 * self.pick.sparsity:.0f} % of the weights are zero, {price}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON. Equal seeds give equal data."""
        report = self.pick.runs[0].report
        return {
            "headline": self.headline(),
            "versions": {"pdecay": pdecay.__version__, "torch": torch.__version__},
            "task": {
                "data": "scikit-learn digits",
                "layers": list(digits.SIZES),
                "validation_images": digits.VALIDATION_IMAGES,
                "epochs": self.plan.epochs,
                "batch": runs.BATCH,
                "lr": runs.LR,
                "seeds": [run.seed for run in self.dense.runs],
                "zero_below": report.threshold,
            },
            "settings": [summary.to_dict() for summary in self.summaries],
            "dense": self.dense.to_dict(),
            "recommended": {
                **self.pick.to_dict(),
                "accuracy_lost": self.lost(self.pick),
                "report_of_first_seed": report.to_dict(),
            },
            "toy": {"curves": self.toy.curves, "difference_to_psgd": self.toy.difference},
        }

    def _within(self, tolerance: float) -> list[Summary]:
        return [summary for summary in self.sparse if self.lost(summary) <= tolerance]


def _sparsest(summaries: list[Summary] | tuple[Summary, ...]) -> Summary:
    return max(summaries, key=lambda summary: summary.sparsity)
