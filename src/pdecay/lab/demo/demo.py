"""The demo: AdamW against PAdam on handwritten digits, and the paper's toy example."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from pdecay import Lp
from pdecay.lab.data import digits
from pdecay.lab.demo import console as say
from pdecay.lab.demo import figures, runs, toy
from pdecay.lab.demo.runs import Setting, Summary
from pdecay.lab.demo.story import Plan, Story

FULL = Plan(
    settings=(
        *(Setting(weight_decay=decay) for decay in (0.01, 0.3, 1.0)),
        *(Setting(Lp(0.8, lam)) for lam in (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4)),
        *(Setting(Lp(1.2, lam)) for lam in (0.1, 0.3, 1.0)),
        Setting(Lp(0.8, 0.06) + Lp(2, 0.1)),
    ),
    seeds=3,
    epochs=20,
)
# A tenth of the work, to see that everything runs; its numbers are not worth quoting.
QUICK = Plan(
    settings=(
        Setting(weight_decay=0.3),
        *(Setting(Lp(0.8, lam)) for lam in (0.03, 0.1, 0.2)),
        Setting(Lp(0.8, 0.06) + Lp(2, 0.1)),
    ),
    seeds=1,
    epochs=8,
)


def run(out: Path, *, seed: int = 0, quick: bool = False, console: Console | None = None) -> Story:
    """Train, show and write the whole demo.

    Args:
        out: the directory for the files; it must exist.
        seed: the first seed. Equal seeds give equal numbers and equal files.
        quick: a few short runs.
        console: where to show it; standard output unless told.
    """
    console = console or Console()
    plan = QUICK if quick else FULL
    start = time.perf_counter()
    say.opening(console, plan)
    with say.progress(console, plan) as announce:
        story = tell(plan, seed, announce)
    paths = write(story, out)
    say.story(console, story)
    say.closing(console, story, paths, time.perf_counter() - start)
    return story


def tell(plan: Plan, seed: int = 0, announce: Callable[[Setting], None] | None = None) -> Story:
    """Train all that the plan asks for.

    Args:
        plan: the settings, seeds and epochs.
        seed: the first seed; the others follow it.
        announce: called before each run with its setting.
    """
    data = digits.load()
    summaries = []
    for setting in plan.settings:
        done = []
        for offset in range(plan.seeds):
            if announce is not None:
                announce(setting)
            done.append(runs.train(setting, data, seed=seed + offset, epochs=plan.epochs))
        summaries.append(Summary(setting, tuple(done)))
    return Story(plan, tuple(summaries), toy.run())


def write(story: Story, out: Path) -> dict[str, Path]:
    """Write the figures and the numbers into a directory; their paths, by what they show."""
    paths = {
        "accuracy against sparsity": out / "accuracy_vs_sparsity.png",
        "toy example": out / "toy.png",
        "all numbers": out / "demo.json",
    }
    layers = "-".join(map(str, digits.SIZES))
    seeds = (
        "one seed"
        if story.plan.seeds == 1
        else f"mean ± standard deviation of {story.plan.seeds} seeds"
    )
    figures.accuracy_against_sparsity(
        story.curves(),
        story.dense,
        story.marked,
        paths["accuracy against sparsity"],
        title=story.title(),
        subtitle=f"{layers} network on scikit-learn's digits; {seeds}",
    )
    figures.toy(
        story.toy.curves,
        paths["toy example"],
        subtitle=f"(w-1)²/2 + (λ/p)|w|$^p$ by gradient descent, "
        f"p = {toy.P:g}, λ = {toy.LAM:g}, lr = {toy.LR:g}",
    )
    paths["all numbers"].write_text(json.dumps(story.to_dict(), indent=1) + "\n", encoding="utf-8")
    return paths
