"""Contract tests: properties of p-norm weight decay that every optimizer must satisfy."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pdecay import Lp

from .cases import CASES, PENALTIES, Case, attached, literal, plain

pytestmark = [
    pytest.mark.filterwarnings(
        # torch warns about the reference cycle of a second derivative; these cases break it.
        "ignore:Using backward\\(\\) with create_graph=True:UserWarning"
    ),
]


def over(holds_for: Callable[[Case], Any] = lambda case: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(filter(holds_for, CASES)), ids=str)


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]):
    if "case" in request.fixturenames:
        name, *_ = str(request.getfixturevalue("case")).split("[")  # PAdam has two cases
        record_property("optimizer", name)


@over()
def test_equals_copy_step_multiply(case, exact, same):
    ours, theirs, undecayed = attached(case, exact), literal(case), plain(case)
    for t in range(10):
        ours.step(t)
        theirs.step(t)
        undecayed.step(t)
        assert same(ours.params, theirs.params), f"differs after step {t}"
    assert all(weight.isfinite().all() for weight in ours.params)
    assert not same(ours.params, undecayed.params)


@over()
def test_parameters_without_gradient_are_unchanged(case, exact, same):
    ours, theirs = attached(case, exact), literal(case)
    start = ours.weights()
    for t, skip in enumerate([(), (), (0,), (0,), ()]):
        ours.step(t, skip=skip)
        theirs.step(t, skip=skip)
        assert same(ours.params, theirs.params), f"differs after step {t}"
    assert same(ours.params[-1].detach(), start[-1])


@over(lambda case: any(len(shape) < 2 for shape in case.shapes))
def test_vectors_do_not_decay(case, exact, same):
    ours, undecayed = attached(case, exact), plain(case)
    ours.step(0)
    undecayed.step(0)
    weight, bias, *_ = ours.params
    assert same(bias, undecayed.params[1])
    assert not same(weight, undecayed.params[0])


@over(lambda case: case.takes_zero and "lr" in plain(case).decaying.param_groups[0])
def test_follows_schedule_from_zero_lr(case, exact, same):
    ours, theirs, undecayed = attached(case, exact), literal(case), plain(case)
    schedulers = [
        LambdaLR(run.decaying, lambda t: min(t / 3, 1)) for run in (ours, theirs, undecayed)
    ]
    for t in range(5):
        for run, scheduler in zip((ours, theirs, undecayed), schedulers, strict=True):
            run.step(t)
            scheduler.step()
        if t == 0:
            assert same(ours.params, undecayed.params), "a rate of 0 must change nothing"
        assert same(ours.params, theirs.params), f"differs after step {t}"
    assert all(weight.isfinite().all() for weight in ours.params)
    assert ours.decaying.param_groups[0]["initial_lr"] > 0


@over(lambda case: case.resumes)
def test_resumes_from_a_checkpoint(case, exact, same):
    through = attached(case, exact)
    for t in range(4):
        through.step(t)
    file = io.BytesIO()
    torch.save({"weights": through.weights(), "optimizer": through.optimizer.state_dict()}, file)
    file.seek(0)

    resumed = attached(case, exact, penalty=Lp(1.25, 0.125))  # replaced by the checkpoint
    saved = torch.load(file, weights_only=case.plain_state)
    with torch.no_grad():
        for param, weight in zip(resumed.params, saved["weights"], strict=True):
            param.copy_(weight)
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert resumed.decaying.param_groups[0]["decay"] == case.penalty.pairs()
    for t in range(4, 8):
        through.step(t)
        resumed.step(t)
        assert same(through.params, resumed.params), f"differs after step {t}"


@over(lambda case: case.own is None)
def test_detach_restores_the_plain_optimizer(case, exact, same):
    ours, theirs = attached(case, exact), literal(case)
    for t in range(3):
        ours.step(t)
        theirs.step(t)
    ours.handle.detach()
    del theirs.decaying.step
    for t in range(3, 6):
        ours.step(t)
        theirs.step(t)
    assert same(ours.params, theirs.params)
    assert same(_groups(ours.decaying), _groups(theirs.decaying))
    assert not any(_hooks(ours.decaying))


def test_all_torch_optimizers_are_covered():
    names = {case.name for case in CASES if case.package == "torch.optim"}
    assert names >= {
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    }


def test_all_penalties_are_covered():
    assert {str(case.penalty) for case in CASES} == set(map(str, PENALTIES))


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _hooks(optimizer: Optimizer) -> list[Any]:
    return [value for name, value in vars(optimizer).items() if name.endswith("_hooks")]
