"""The results of the demo: summaries over seeds, the recommended setting and the headline.

All numbers are computed from the records of the runs. Accuracies are in percent. The validation
split chooses the best AdamW and the recommended setting; the test split is reported beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pdecay
from pdecay import SparsityReport
from pdecay.lab import machine
from pdecay.lab.demo.toy import Toy
from pdecay.lab.report.experiments import Point

TOLERANCE = 0.5  # points of accuracy that the recommended setting may lose
PAPER_TOLERANCE = 2.0  # the same for the paper's sparsest networks (section 5.1)


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

    @property
    def curve(self) -> str:
        """The name of the curve that the setting belongs to in the figure."""
        return f"p = {self.options['p']:g}" + (" and L2" if "l2" in self.options else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; accuracies are fractions."""
        decay = [] if self.dense else [[self.options["p"], self.options["lam"]]]
        return {
            "optimizer": "AdamW" if self.dense else "PAdam",
            "decay": decay,
            "weight_decay": self.options.get("weight_decay", self.options.get("l2", 0.0)),
            "accuracy": self.accuracy / 100,
            "accuracy_sd": self.spread / 100,
            "test_accuracy": (self.test_accuracy or 0.0) / 100,
            "sparsity": self.sparsity,
            "runs": [
                {
                    "seed": record["settings"]["seed"],
                    "accuracy": record["result"]["accuracy"] / 100,
                    "test_accuracy": record["result"]["test_accuracy"] / 100,
                    "sparsity": record["result"]["sparsity"],
                }
                for record in self.runs
            ],
        }


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

    @property
    def marked(self) -> tuple[Summary, ...]:
        """The settings with labels in the figure, without duplicates.

        These are the recommended one, the sparsest in the paper's tolerance, and the sparsest.
        """
        close = self._within(PAPER_TOLERANCE) or [self.recommended]
        return tuple(dict.fromkeys((self.recommended, _sparsest(close), _sparsest(self.sparse))))

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

    def title(self) -> str:
        """Return the title of the figure."""
        points = round(self.lost(self.recommended), 1)
        price = f"{points:.1f} points less accurate" if points > 0 else "as accurate as AdamW"
        return f"{100 * self.recommended.sparsity:.0f} % of the weights are zero, {price}"

    def to_dict(self, report: SparsityReport) -> dict[str, Any]:
        """Return plain data for JSON. Equal seeds give equal data.

        Args:
            report: the zeros of the recommended setting's first seed.
        """
        settings = self.dense.runs[0]["settings"]
        versions = machine.describe()
        return {
            "headline": self.headline(),
            "versions": {"pdecay": pdecay.__version__, "torch": versions["torch"]},
            "task": {
                "data": "scikit-learn digits",
                "scale": settings["scale"],
                "steps": settings["steps"],
                "lr": settings["lr"],
                "seeds": [record["settings"]["seed"] for record in self.dense.runs],
                "zero_below": report.threshold,
            },
            "settings": [summary.to_dict() for summary in self.summaries],
            "dense": self.dense.to_dict(),
            "recommended": {
                **self.recommended.to_dict(),
                "accuracy_lost": self.lost(self.recommended) / 100,
                "report_of_first_seed": report.to_dict(),
            },
            "toy": {"curves": self.toy.curves, "difference_to_psgd": self.toy.difference},
        }

    def _within(self, tolerance: float) -> list[Summary]:
        return [one for one in self.sparse if self.lost(one) <= tolerance]


def _sparsest(summaries: Sequence[Summary]) -> Summary:
    """Return the sparsest summary; among equally sparse ones the most accurate."""
    return max(summaries, key=lambda one: (one.sparsity, one.accuracy))
