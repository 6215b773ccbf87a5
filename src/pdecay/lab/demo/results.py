"""The results of the demo: summaries over seeds, the recommended setting and the headline.

All numbers are computed from the records of the runs. Accuracies are in percent. The validation
split chooses the best AdamW and the recommended setting; the test split is reported beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdecay.lab.demo.toy import Toy
from pdecay.lab.report.experiments import Point

TOLERANCE = 0.5  # points of accuracy that the recommended setting may lose


class Summary(Point):
    """One setting over its seeds."""

    @property
    def dense(self) -> bool:
        return self.method == "adamw"

    @property
    def spread(self) -> float:
        """The standard deviation of the validation accuracy over the seeds; 0 for one seed."""
        return self.deviation or 0.0

    @property
    def decay(self) -> str:
        """The decay of the setting, such as ``Lp(0.8, 0.06), L2 0.1``."""
        if self.dense:
            return f"L2 {self.options['weight_decay']:g}"
        penalty = f"Lp({self.options['p']:g}, {self.options['lam']:g})"
        return penalty + (f", L2 {self.options['l2']:g}" if "l2" in self.options else "")

    @property
    def name(self) -> str:
        return f"{'AdamW' if self.dense else 'PAdam'}, {self.decay}"


@dataclass(frozen=True)
class Results:
    """All results of the demo.

    Args:
        summaries: one for each setting.
        toy: the toy example.
    """

    summaries: tuple[Summary, ...]
    toy: Toy

    @property
    def dense(self) -> Summary:
        """The best AdamW, which the sparse settings are compared with."""
        return max((one for one in self.summaries if one.dense), key=lambda one: one.accuracy)

    @property
    def sparse(self) -> tuple[Summary, ...]:
        return tuple(one for one in self.summaries if not one.dense)

    @property
    def recommended(self) -> Summary:
        """The sparsest setting that loses at most `TOLERANCE` points, else the most accurate.

        No other sparse setting is at least as good in both accuracy and sparsity and better in one.
        """
        close = self._within(TOLERANCE)
        return _sparsest(close or self._within(min(map(self.lost, self.sparse))))

    def lost(self, summary: Summary) -> float:
        """Return the points of validation accuracy that a setting loses to the best AdamW."""
        return self.dense.accuracy - summary.accuracy

    def headline(self) -> str:
        """Return the result in one sentence."""
        best, dense = self.recommended, self.dense
        count = len(best.runs)
        seeds = "one seed" if count == 1 else f"mean of {count} seeds"
        text = (
            f"{100 * best.sparsity:.1f} % of the weights are zero at a validation accuracy of "
            f"{best.accuracy:.1f} % (test: {best.test_accuracy:.1f} %); the best AdamW, dense, has "
            f"{dense.accuracy:.1f} % (test: {dense.test_accuracy:.1f} %). PAdam with {best.decay}, "
            f"{seeds}."
        )
        if self.lost(best) <= TOLERANCE:
            return text
        return f"No sparse run is within {TOLERANCE:g} points of AdamW. The closest: {text}"

    def _within(self, tolerance: float) -> list[Summary]:
        return [one for one in self.sparse if self.lost(one) <= tolerance]


def _sparsest(summaries: Sequence[Summary]) -> Summary:
    """Return the sparsest summary; among equally sparse ones the most accurate."""
    return max(summaries, key=lambda one: (one.sparsity, one.accuracy))
