"""The data's split and what a run leaves untouched."""

from __future__ import annotations

import math

import pytest
import torch

from pdecay import Lp
from pdecay.lab.data import digits
from pdecay.lab.demo import runs
from pdecay.lab.demo.runs import Run, Setting, Summary


@pytest.fixture(scope="module")
def data():
    return digits.load()


def test_the_split_is_fixed_and_stratified(data):
    again = digits.load()
    assert torch.equal(data.validation_images, again.validation_images)
    assert len(data.validation_labels) == digits.VALIDATION_IMAGES
    assert len(data.train_labels) + len(data.validation_labels) == 1797
    counts = data.validation_labels.bincount()
    assert len(counts) == 10
    assert counts.min() >= 45
    assert abs(data.train_images.mean()) < 1e-6


def test_no_image_is_in_both_parts(data):
    train = {tuple(image) for image in data.train_images.tolist()}
    assert not train & {tuple(image) for image in data.validation_images.tolist()}


def test_the_network_has_the_sizes_that_are_told():
    weights = [tuple(p.shape) for p in digits.network().parameters() if p.ndim == 2]
    assert weights == [(300, 64), (100, 300), (10, 100)]


def test_biases_decay_under_no_setting():
    model = digits.network()
    dense = Setting(weight_decay=0.3).optimizer(model, 0.1)
    sparse = Setting(Lp(0.8, 0.1)).optimizer(model, 0.1)
    for param in model.parameters():
        (group,) = (g for g in dense.param_groups if any(p is param for p in g["params"]))
        assert group["weight_decay"] == (0.3 if param.ndim == 2 else 0)
        (group,) = (g for g in sparse.param_groups if any(p is param for p in g["params"]))
        assert group["decay"] == ([[0.8, 0.1]] if param.ndim == 2 else [])


def test_a_run_follows_its_seed_alone_and_leaves_the_callers_state(data):
    setting = Setting(Lp(0.8, 0.1))
    threads = torch.get_num_threads()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = runs.train(setting, data, seed=1, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    torch.manual_seed(8)
    assert runs.train(setting, data, seed=1, epochs=1) == first
    assert runs.train(setting, data, seed=2, epochs=1) != first


def test_names():
    elastic = Setting(Lp(0.8, 0.06) + Lp(2, 0.1))
    assert elastic.name == "PAdam, Lp(0.8, 0.06) + Lp(2, 0.1)"
    assert elastic.series == "elastic, p = 0.8 and 2"
    assert Setting(Lp(1.2, 1)).series == "p = 1.2"
    assert Setting(weight_decay=0.01).name == "AdamW, weight_decay=0.01"


def test_a_summary_is_the_mean_and_the_deviation():
    class Report:
        total = 0.5

    one, two = (Run(seed, accuracy, Report()) for seed, accuracy in ((0, 0.9), (1, 1.0)))
    summary = Summary(Setting(), (one, two))
    assert summary.accuracy == pytest.approx(0.95)
    assert summary.spread == pytest.approx(math.sqrt(0.005))
    assert Summary(Setting(), (one,)).spread == 0
