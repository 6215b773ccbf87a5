"""Searches: what the samplers may choose, and that a cell's choice stays."""

from __future__ import annotations

import optuna
import pytest
from optuna.storages import InMemoryStorage

from pdecay.lab.sweep import PlanError, Range, Search
from pdecay.lab.sweep.study import SweepStudy


def search(trials=3, sampler="random", **axes):
    objective = axes.pop("objective", "pareto")
    seed = axes.pop("sampler_seed", 0)
    return Search(
        task="digits",
        scale="quick",
        axes={"method": ["padam"], **axes},
        sampler=sampler,
        trials=trials,
        sampler_seed=seed,
        objective=objective,
    )


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def run_all(plan, storage=None):
    """The settings of all cells, with made-up results handed in."""
    study = SweepStudy.open(storage or InMemoryStorage(), "s", plan, "here", resume=True)
    found = {}
    while (claim := study.claim("w")) is not None:
        settings = found[claim.key] = study.settings(claim)
        accuracy = 90 - 1000 * abs(settings.options["lam"] - 0.01)
        result = {"accuracy": accuracy, "sparsity": 0.5, "tradeoff": accuracy + 0.5}
        record = {"id": settings.id, "status": "ok", "result": result}
        study.complete(claim, record)
    return found


def test_a_range_is_logarithmic_from_a_factor_of_ten_on():
    assert Range(1e-4, 1e-3).log
    assert not Range(0.5, 2).log
    assert not Range(0, 10).log
    assert str(Range(1e-4, 0.1)) == "0.0001:0.1"
    with pytest.raises(PlanError, match="up to a greater one, got 2:2"):
        Range(2, 2)


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2"])
@pytest.mark.parametrize("objective", ["pareto", "tradeoff"])
def test_samplers_stay_in_the_ranges(sampler, objective):
    plan = search(
        14, sampler, lam=[Range(1e-4, 1.0)], p=[Range(0.5, 1.5)], seed=[0, 1], objective=objective
    )
    found = run_all(plan)
    assert list(found) == plan.keys
    lams = sorted(settings.options["lam"] for settings in found.values())
    assert 1e-4 <= lams[0] < 1e-2 < lams[-1] <= 1.0  # both halves of the logarithms
    assert all(0.5 <= settings.options["p"] <= 1.5 for settings in found.values())
    assert {settings.seed for settings in found.values()} == {0, 1}
    assert len({settings.id for settings in found.values()}) > 10


def test_a_sampler_learns():
    plan = search(40, "tpe", lam=[Range(1e-4, 1.0)], objective="tradeoff")
    lams = [settings.options["lam"] for settings in run_all(plan).values()]
    far = [abs(lam - 0.01) for lam in lams]
    assert sorted(far[20:])[10] < sorted(far[:10])[5]


def test_a_random_search_draws_the_same_whoever_draws():
    plan = search(6, lam=[Range(1e-4, 1.0)])
    assert run_all(plan) == run_all(plan)
    assert run_all(search(6, lam=[Range(1e-4, 1.0)], sampler_seed=1)) != run_all(plan)


def test_methods_have_their_own_ranges_and_whole_numbers_stay_whole():
    plan = search(
        30, method=["padam", "dwf", "adamw"], lam=[Range(1e-4, 1e-2)], depth=[Range(2, 5)]
    )
    found = SweepStudy.open(InMemoryStorage(), "s", plan, "here", resume=False)
    depths, names = set(), set()
    while (claim := found.claim("w")) is not None:
        settings = found.settings(claim)
        names |= set(found.cells()[claim.key].trials[0].params)
        depths.add(settings.options.get("depth"))
    assert depths == {None, 2, 3, 4, 5}
    assert names == {"method", "padam lam", "dwf lam", "dwf depth"}


def test_a_search_may_go_on_with_more_runs():
    storage = InMemoryStorage()
    first = run_all(search(3, lam=[Range(1e-4, 1.0)]), storage)
    assert len(first) == 3
    more = run_all(search(5, lam=[Range(1e-4, 1.0)]), storage)
    assert list(more) == ["run 4", "run 5"]


def test_another_attempt_runs_what_the_first_has_drawn():
    study = SweepStudy.open(
        InMemoryStorage(), "s", search(1, "tpe", lam=[Range(1e-4, 1.0)]), "here", resume=False
    )
    claim = study.claim("w")
    drawn = study.settings(claim)
    assert study.settings(claim) == drawn
    study.release(claim)
    again = study.claim("other")
    assert again.trial_id != claim.trial_id
    assert study.settings(again) == drawn


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"sampler": "grid"}, "no sampler 'grid'; there are tpe, nsga2, random"),
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"lam": [Range(0.1, 1), 2.0]}, "lam takes one range or several values"),
        ({"target": [0.9]}, "no chosen method has an option 'target': padam has p, lam"),
        ({"p": [Range(-1, 1)]}, "p must be"),
        ({"lr": [Range(0, 1)]}, "lr must be above 0"),
        ({"seed": [Range(0.5, 2)]}, "seed must be a whole number"),
        ({"method": ["dwf"], "depth": [Range(1, 4)]}, "depth must be a whole number >= 2"),
        ({"method": ["target"], "target": [Range(0.5, 1.5)]}, "target must be below 1"),
    ],
)
def test_a_bad_search(axes, told):
    with pytest.raises(PlanError, match=told):
        search(**axes)
