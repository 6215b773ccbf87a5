"""What the demo concludes, from results that are made up: every sentence follows the numbers."""

from __future__ import annotations

import pytest

from pdecay import Lp
from pdecay._sparsity.counting import LayerSparsity, SparsityReport
from pdecay.lab.demo.runs import Run, Setting, Summary
from pdecay.lab.demo.story import Plan, Story
from pdecay.lab.demo.toy import Toy


def summary(setting, accuracy, zeros=0):
    layer = LayerSparsity("weight", (10, 100), 1000, zeros, decayed=True)
    return Summary(setting, (Run(0, accuracy, SparsityReport((layer,), 1e-13)),))


def story(*sparse, dense=((0.01, 0.97), (0.3, 0.98))):
    summaries = [summary(Setting(weight_decay=decay), accuracy) for decay, accuracy in dense]
    summaries += [
        summary(Setting(Lp(0.8, lam)), accuracy, zeros) for lam, accuracy, zeros in sparse
    ]
    plan = Plan(tuple(s.setting for s in summaries), seeds=1, epochs=1)
    return Story(plan, tuple(summaries), Toy({}, {}))


def test_the_dense_run_is_the_best_adamw():
    assert story((0.1, 0.99, 900)).dense.setting.weight_decay == 0.3


def test_the_sparsest_within_half_a_point_is_recommended():
    told = story((0.1, 0.985, 500), (0.2, 0.976, 900), (0.3, 0.974, 950), (0.4, 0.95, 990))
    assert told.pick.setting.decay == Lp(0.8, 0.2)
    assert told.lost(told.pick) == pytest.approx(0.004)
    # the sparsest within the paper's two points, and the sparsest of all
    assert [s.setting.decay.lam for s in told.marked] == [0.2, 0.3, 0.4]


def test_no_point_is_marked_twice():
    assert len(story((0.1, 0.98, 900)).marked) == 1


def test_the_headline_follows_the_numbers():
    assert story((0.1, 0.976, 912)).headline() == (
        "91.2 % of the weights are zero and validation accuracy is 97.6 %; the best AdamW, dense, "
        "has 98.0 % (PAdam with Lp(0.8, 0.1), one seed)."
    )
    assert (
        story((0.1, 0.976, 912)).title() == "91 % of the weights are zero, 0.4 points less accurate"
    )
    assert story((0.1, 0.98, 912)).title() == "91 % of the weights are zero, as accurate as AdamW"


def test_a_story_without_success_says_so():
    told = story((0.1, 0.90, 900), (0.2, 0.10, 1000))
    assert told.pick.setting.decay == Lp(0.8, 0.1)
    assert told.headline().startswith(
        "No sparse run is within 0.5 points of AdamW. The nearest: 90.0 %"
    )
