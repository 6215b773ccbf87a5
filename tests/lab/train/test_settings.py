from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from pdecay.lab import methods
from pdecay.lab.methods import METHODS
from pdecay.lab.train import records
from pdecay.lab.train.training import Settings


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_every_method_round_trip(method):
    settings = Settings.of("digits", method)
    assert list(settings.options) == methods.options_of(METHODS[method])
    assert settings.build() == METHODS[method](**settings.options)
    plain = settings.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert Settings(**plain) == settings
    assert settings.id == records.run_id(plain)


def test_task_provides_defaults():
    settings = Settings.of("shakespeare", "padam", scale="paper")
    assert (settings.lr, settings.steps, settings.seed) == (1e-3, 5000, 0)
    asked = Settings.of("digits", "gmp", scale="quick", seed=3, lr=0.1, steps=7, target=0.5)
    assert asked.to_dict() == {
        "task": "digits",
        "scale": "quick",
        "method": "gmp",
        "seed": 3,
        "lr": 0.1,
        "steps": 7,
        "options": {"target": 0.5, "weight_decay": 0.1, "rank": "magnitude", "end": 0.85},
    }


@how(deadline=None)  # for busy machines
@given(st.integers(0, 100))
def test_integers_and_floats_are_equal_settings(number):
    one, other = (Settings.of("digits", "padam", lam=lam) for lam in (number, float(number)))
    assert one == other
    assert one.id == other.id
    assert {one} == {other}


def test_defaults_equal_explicit_options():
    assert Settings.of("digits", "padam").id == Settings.of("digits", "padam", p=0.8, lam=0.01).id


BAD = [
    (("mnist", "padam"), {}, "there is no task 'mnist'; choose from digits, "),
    (
        ("digits", "padam"),
        {"scale": "paper"},
        "has no scale 'paper'; choose from quick, cpu",
    ),
    (("digits", "sgd"), {}, "there is no method 'sgd'; choose from adamw, padam, .*my_module:My"),
    (("digits", "no_such_module:It"), {}, "cannot import 'no_such_module': ModuleNotFoundError"),
    (("digits", "json:Nothing"), {}, "'json' has no 'Nothing'"),
    (("digits", "json:JSONDecoder"), {}, "must be a dataclass that inherits from pdecay.lab"),
    (("digits", "pdecay.lab.methods:Method"), {}, "must be a dataclass"),
    (("digits", "padam"), {"lamda": 1}, "padam has no option 'lamda'; it has p, lam"),
    (("digits", "padam"), {"target": 0.9}, "no option 'target'; .*; methods with it: target, gmp,"),
    (("digits", "padam"), {"p": -1}, "padam: p must be finite and >= 0, got -1"),
    (("digits", "padam"), {"p": "0.8"}, "padam: p must be a number, got '0.8'"),
    (("digits", "padam"), {"p": True}, "padam: p must be a number, got True"),
    (("digits", "padam"), {"lam": math.nan}, "option lam must be finite, got nan"),
    (("digits", "padam"), {"lam": [1]}, r"option lam must be a number or a string, got \[1\]"),
    (("digits", "padam"), {"seed": -1}, "seed must be a whole number >= 0, got -1"),
    (("digits", "padam"), {"seed": 0.5}, "seed must be a whole number >= 0, got 0.5"),
    (("digits", "padam"), {"steps": 0}, "steps must be a whole number >= 1, got 0"),
    (("digits", "padam"), {"steps": True}, "steps must be a whole number >= 1, got True"),
    (("digits", "padam"), {"lr": 0}, "lr must be above 0, got 0"),
    (("digits", "padam"), {"lr": math.inf}, "lr must be finite and >= 0, got inf"),
    (("digits", "adamw"), {"weight_decay": -1}, "adamw: weight_decay must be finite and >= 0"),
    (("digits", "elastic"), {"l2": -1}, "elastic: l2 must be"),
    (("digits", "target"), {"target": 0}, "target: target must be above 0, got 0"),
    (("digits", "target"), {"target": 1}, "target: target must be below 1, got 1"),
    (("digits", "target"), {"target": 90}, "method target: target must .*; for 90 %, pass 0.9"),
    (("digits", "target"), {"p": 2}, "target: p must be below 2"),
    (("digits", "mp"), {"threshold": -1}, "mp: threshold must be"),
    (("digits", "gmp"), {"target": 1.5}, "gmp: target must be below 1"),
    (("digits", "oto"), {"eps": 1}, "oto: eps must be below 1, got 1"),
    (("digits", "dwf"), {"depth": 1}, "dwf: depth must be a whole number >= 2, got 1"),
    (("digits", "dwf"), {"depth": 2.0}, "dwf: depth must be a whole number >= 2, got 2.0"),
    (("digits", "l1"), {"lam": -1}, "l1: lam must be"),
]


@pytest.mark.parametrize(("names", "more", "message"), BAD)
def test_invalid_settings_are_refused(names, more, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Settings.of(*names, **more)


def test_default_metric_does_not_change_the_ids_of_earlier_records():
    settings = Settings.of("digits", "padam", lam=0.02)
    assert settings.to_dict()["options"] == {"p": 0.8, "lam": 0.02}
    assert Settings(**settings.to_dict()) == settings
    other = Settings.of("digits", "padam", lam=0.02, metric="adaptive")
    assert other.to_dict()["options"] == {"p": 0.8, "lam": 0.02, "metric": "adaptive"}
    assert other.id != settings.id
