"""Searches: samplers stay in their ranges, and a retried cell keeps its settings."""

from __future__ import annotations

from functools import partial

import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from pdecay.lab.sweep import Range, Search, SweepError
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


def settings_of(study, trial):
    """Draw the settings of a trial as a worker does."""
    key = trial.user_attrs["cell"]
    return study.plan.settings(key, partial(study.bind, trial))


def run_all(plan, storage=None):
    """Return the settings of all cells; store made-up results."""
    study = SweepStudy.open(storage or InMemoryStorage(), "s", plan, resume=True)
    found = {}
    while study.has_waiting():
        trial = study.optuna.ask()
        settings = found[trial.user_attrs["cell"]] = settings_of(study, trial)
        accuracy = 90 - 1000 * abs(settings.options["lam"] - 0.01)
        result = {"accuracy": accuracy, "sparsity": 0.5, "tradeoff": accuracy + 0.5}
        record = {"id": settings.id, "status": "ok", "result": result}
        trial.set_user_attr("record", record)
        study.optuna.tell(trial, plan.values(record))
    return found


def test_range_is_logarithmic_from_a_factor_of_ten():
    assert Range(1e-4, 1e-3).log
    assert not Range(0.5, 2).log
    assert not Range(0, 10).log
    assert str(Range(1e-4, 0.1)) == "0.0001:0.1"
    with pytest.raises(SweepError, match="LOW < HIGH, got 2:2"):
        Range(2, 2)


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2"])
@pytest.mark.parametrize("objective", ["pareto", "tradeoff"])
def test_samplers_stay_in_their_ranges(sampler, objective):
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


def test_tpe_learns_from_results():
    plan = search(40, "tpe", lam=[Range(1e-4, 1.0)], objective="tradeoff")
    lams = [settings.options["lam"] for settings in run_all(plan).values()]
    far = [abs(lam - 0.01) for lam in lams]
    assert sorted(far[20:])[10] < sorted(far[:10])[5]


def test_random_search_is_reproducible():
    plan = search(6, lam=[Range(1e-4, 1.0)])
    assert run_all(plan) == run_all(plan)
    assert run_all(search(6, lam=[Range(1e-4, 1.0)], sampler_seed=1)) != run_all(plan)


def test_methods_have_own_parameters_and_integers_stay_integers():
    plan = search(
        30, method=["padam", "dwf", "adamw"], lam=[Range(1e-4, 1e-2)], depth=[Range(2, 5)]
    )
    study = SweepStudy.open(InMemoryStorage(), "s", plan, resume=False)
    depths, names = set(), set()
    while study.has_waiting():
        trial = study.optuna.ask()
        depths.add(settings_of(study, trial).options.get("depth"))
        names |= set(study.cells()[trial.user_attrs["cell"]].trials[0].params)
    assert depths == {None, 2, 3, 4, 5}
    assert names == {"method", "padam lam", "dwf lam", "dwf depth"}


def test_search_resumes_with_more_runs():
    storage = InMemoryStorage()
    first = run_all(search(3, lam=[Range(1e-4, 1.0)]), storage)
    assert len(first) == 3
    more = run_all(search(5, lam=[Range(1e-4, 1.0)]), storage)
    assert list(more) == ["run 4", "run 5"]


def test_retry_keeps_the_drawn_settings():
    plan = search(1, "tpe", lam=[Range(1e-4, 1.0)])
    study = SweepStudy.open(InMemoryStorage(), "s", plan, resume=False)
    trial = study.optuna.ask()
    drawn = settings_of(study, trial)
    assert settings_of(study, trial) == drawn
    trial.set_user_attr("worker", {"home": "here", "pid": 1, "run": drawn.id})
    study.end(trial, TrialState.FAIL)
    study.top_up()
    again = study.optuna.ask()
    assert again.number != trial.number
    assert settings_of(study, again) == drawn


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2"])
def test_worker_that_died_between_two_draws_does_not_change_the_settings(sampler, monkeypatch):
    plan = search(1, sampler, lam=[Range(1e-4, 1.0)], p=[Range(0.5, 1.5)])
    undisturbed = run_all(plan)["run 1"]
    study = SweepStudy.open(InMemoryStorage(), "s", plan, resume=False)
    suggest = optuna.Trial.suggest_float

    def die_at_the_second(trial, *args, **options):
        if trial.params:
            raise KeyboardInterrupt
        return suggest(trial, *args, **options)

    trial = study.optuna.ask()
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "suggest_float", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            settings_of(study, trial)
    study.end(trial, TrialState.FAIL)
    study.top_up()
    assert settings_of(study, study.optuna.ask()) == undisturbed


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"sampler": "grid"}, "no sampler 'grid'; choose from tpe, nsga2, random"),
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
def test_invalid_search_is_refused(axes, message):
    with pytest.raises(SweepError, match=message):
        search(**axes)
