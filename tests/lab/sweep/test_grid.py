"""Grids: their cells, each once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdecay.lab import methods
from pdecay.lab.sweep import Grid, SweepError
from pdecay.lab.sweep.plan import difference
from pdecay.lab.train.training import Settings

METHODS = ["adamw", "padam", "elastic", "target", "mp", "gmp", "oto", "dwf", "l1"]
VALUES = {
    "p": [0.5, 0.8, 1.0],
    "lam": [0.001, 0.01],
    "target": [0.9, 0.95],
    "lr": [0.001, 0.003],
    "seed": [0, 1, 2],
    "steps": [10, 20],
}


def grid(*grids, **common):
    return Grid(task="digits", scale="quick", grids=grids, **common)


def cells(*grids):
    return list(grid(*grids).cells.values())


def test_method_is_not_repeated_for_options_of_other_methods():
    found = cells({"method": ["adamw", "padam", "gmp"], "p": [0.5, 0.8], "target": [0.9]})
    assert [(cell.method, cell.options.get("p"), cell.options.get("target")) for cell in found] == [
        ("adamw", None, None),
        ("padam", 0.5, None),
        ("padam", 0.8, None),
        ("gmp", None, 0.9),
    ]


def test_missing_settings_take_defaults():
    assert cells({"method": ["padam"]}) == [Settings.of("digits", "padam", scale="quick")]


def test_cell_of_two_grids_is_run_once():
    found = cells(
        {"method": ["padam"], "lam": [0.01, 0.02]},
        {"method": ["padam", "adamw"], "lam": [0.02, 0.01, 0.01], "p": [0.8]},
    )
    assert [(cell.method, cell.options.get("lam")) for cell in found] == [
        ("padam", 0.01),
        ("padam", 0.02),
        ("adamw", None),
    ]


def test_integer_and_equal_float_are_one_value():
    assert len(cells({"method": ["padam"], "p": [1, 1.0]})) == 1


axes = st.fixed_dictionaries(
    {"method": st.lists(st.sampled_from(METHODS), min_size=1, max_size=4)},
    optional={
        name: st.lists(st.sampled_from(values), min_size=1, max_size=4)
        for name, values in VALUES.items()
    },
)


@settings(max_examples=60, deadline=None)
@given(axes)
def test_grid_has_every_combination_once(chosen):
    options = {name: methods.options_of(methods.METHODS[name]) for name in chosen["method"]}
    if any(
        name not in ("method", "lr", "seed", "steps")
        and not any(name in o for o in options.values())
        for name in chosen
    ):
        with pytest.raises(SweepError, match="no chosen method has an option"):
            grid(chosen)
        return
    expected = 0
    for method in set(chosen["method"]):
        count = 1
        for name, values in chosen.items():
            if name in ("lr", "seed", "steps", *options[method]):
                count *= len(set(values))
        expected += count
    found = grid(chosen)
    assert len(found.cells) == expected
    assert all(key == cell.id for key, cell in found.cells.items())
    for cell in found.cells.values():
        assert cell.method in chosen["method"]
        for name in ("lr", "seed", "steps"):
            assert name not in chosen or getattr(cell, name) in chosen[name]
        for name, value in cell.options.items():
            assert name not in chosen or value in chosen[name]
    assert list(grid(chosen).cells) == list(found.cells)
    backwards = {name: values[::-1] for name, values in chosen.items()}
    assert grid(backwards).identity == found.identity


@settings(max_examples=30, deadline=None)
@given(axes)
def test_params_fit_their_distributions(chosen):
    try:
        plan = grid(chosen)
    except SweepError:
        return
    for key, cell in plan.cells.items():
        params, distributions = plan.params(key)
        assert params.keys() == distributions.keys()
        everything = {**cell.to_dict(), **cell.options}
        for name, value in params.items():
            assert everything[name] == value
            assert distributions[name]._contains(distributions[name].to_internal_repr(value))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({}, "name at least one method"),
        ({"method": ["padam"], "lam": []}, "lam has no values"),
        ({"method": ["pdam"]}, "there is no method 'pdam'; choose from adamw, padam"),
        ({"method": [0.5]}, "there is no method '0.5'"),
        ({"method": ["adamw"], "p": [0.8]}, "option 'p': adamw has weight_decay"),
        ({"method": ["padam"], "p": [-1.0]}, "p must be"),
        ({"method": ["padam"], "lr": [0.0]}, "lr must be above 0"),
        ({"method": ["padam"], "seed": [0.5]}, "seed must be a whole number"),
        ({"method": ["dwf"], "depth": [2.5]}, "depth must be a whole number"),
    ],
)
def test_invalid_grid_is_refused(chosen, message):
    with pytest.raises(SweepError, match=message):
        grid(chosen)


def test_empty_grid_and_unknown_names_are_refused():
    with pytest.raises(SweepError, match="no grid"):
        grid()
    with pytest.raises(SweepError, match="no task 'digit'"):
        Grid(task="digit", grids=[{"method": ["padam"]}])
    with pytest.raises(SweepError, match="no objective 'acc'; choose from pareto, tradeoff"):
        grid({"method": ["padam"]}, objective="acc")


def test_difference_names_changed_settings():
    old = grid({"method": ["padam"], "lam": [0.01, 0.02]})
    assert difference(old.description, grid({"method": ["padam"], "lam": [0.01]}).description) == (
        "lam was 0.01 0.02 and is now 0.01"
    )
    new = grid({"method": ["padam", "adamw"], "lam": [0.01, 0.02], "seed": [1]})
    assert difference(old.description, new.description) == (
        "method was padam and is now padam adamw; seed was not given and is now 1"
    )
    two = grid({"method": ["padam"]}, {"method": ["adamw"]})
    other = grid({"method": ["padam"]}, {"method": ["adamw"], "lr": [0.1]}, objective="accuracy")
    assert difference(two.description, other.description) == (
        "objective was pareto and is now accuracy; grid 2's lr was not given and is now 0.1"
    )
    assert "defaults" in difference(old.description, old.description)


def test_objective_values():
    ok = {"status": "ok", "result": {"accuracy": 50.0, "sparsity": 0.9, "tradeoff": 50.9}}
    diverged = {"status": "diverged", "result": {"accuracy": None, "sparsity": 0.9}}
    for objective, values in {
        "pareto": [50.0, 0.9],
        "tradeoff": [50.9],
        "accuracy": [50.0],
    }.items():
        plan = grid({"method": ["padam"]}, objective=objective)
        assert plan.values(ok) == values
        assert plan.values(diverged) == [0.0] * len(values)
