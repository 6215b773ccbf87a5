from __future__ import annotations

import functools
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import pdecay
from pdecay.lab.data import sources
from pdecay.lab.data.sources import DataError
from pdecay.lab.tasks import SCALES, TASKS, Task, get_task
from pdecay.lab.train.loop import lr_factor, schedule


@functools.cache
def with_data(name: str, scale: str) -> Task:
    """Return a task with its data; skip the test if they are missing. Nothing is downloaded."""
    task = get_task(name, scale)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "fetch", refuse_download)
            _ = task.stream
    except DataError as error:
        if "was not found" not in str(error):
            raise
        pytest.skip(str(error))
    return task


def refuse_download(remote, folder):
    raise DataError("tests download nothing")


KNOWN = [
    (name, scale)
    for name in TASKS
    for scale in SCALES
    if scale != "paper" or name in ("cifar10", "shakespeare")
]


@pytest.mark.parametrize(("name", "scale"), KNOWN)
def test_task_needs_no_data_for_model_and_recipe(name, scale):
    task = get_task(name, scale)
    assert (task.name, task.scale) == (name, scale)
    assert 0 < task.warmup < task.steps
    assert 0 < task.lr < 0.1
    if (name, scale) != ("cifar10", "cpu"):  # its first layer is fitted to training images
        assert isinstance(task.model(0), nn.Module)
    assert "build" not in repr(task)
    assert repr(pickle.loads(pickle.dumps(task))) == repr(task)


@pytest.mark.slow
def test_whitening_layer_is_the_same_for_all_seeds():
    task = with_data("cifar10", "cpu")
    one, other = task.model(0).state_dict(), task.model(1).state_dict()
    assert torch.equal(one["stem.0.weight"], other["stem.0.weight"])
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_settings_of_paper():
    resnet, nano = get_task("cifar10", "paper"), get_task("shakespeare", "paper")
    epoch = 782  # 50,000 images in batches of 64
    assert (resnet.steps, resnet.warmup, resnet.clip) == (100 * epoch, 3 * epoch, None)
    assert (nano.steps, nano.warmup, nano.clip) == (5000, 100, 1.0)


@pytest.mark.parametrize("arguments", [("mnist",), ("digits", "huge"), ("digits", "paper")])
def test_unknown_name_error_lists_choices(arguments):
    with pytest.raises(ValueError, match=r"quick, cpu$|digits, fashion, cifar10, shakespeare$"):
        get_task(*arguments)


def test_model_depends_on_seed_only():
    task = get_task("digits", "quick")
    before = torch.get_rng_state()
    one, again, other = (list(task.model(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])


def train(task: Task, model, optimizer, scheduler, steps, seed=0) -> float:
    loss = torch.tensor(0.0)
    for step in steps:
        task.reseed(seed, step)
        loss = task.loss(model, task.batch(seed, step))
        loss.backward()
        task.clip_(model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return loss.item()


def prepared(task: Task):
    model = task.model(0)
    decay = pdecay.Lp(0.8, 1e-3)
    optimizer = pdecay.PAdam(pdecay.param_groups(model), lr=task.lr, decay=decay)
    return model, optimizer, schedule(optimizer, task.steps, task.warmup)


@pytest.mark.slow
def test_resume_with_dropout_is_bit_identical():
    task = with_data("shakespeare", "quick")
    build = task.build
    task = replace(task, build=lambda: _with_dropout(build()))
    whole = prepared(task)
    train(task, *whole, range(6))
    first = prepared(task)
    train(task, *first, range(3))
    state = [part.state_dict() for part in first]
    torch.manual_seed(99)  # as in a new process
    second = prepared(task)
    for part, saved in zip(second, state, strict=True):
        part.load_state_dict(saved)
    train(task, *second, range(3, 6))
    for one, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


def _with_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def test_digits_reach_93_percent():
    task = replace(with_data("digits", "quick"), steps=150, warmup=10)
    model, optimizer, scheduler = prepared(task)
    before = task.evaluate(model)
    train(task, model, optimizer, scheduler, range(task.steps))
    after = task.evaluate(model)
    assert before["accuracy"] < 40
    assert after["accuracy"] > 93
    assert after["loss"] < before["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_loss_of_each_task_decreases(name):
    task = with_data(name, "quick")
    model, optimizer, scheduler = prepared(task)
    inputs, targets = task.batch(0, 0)
    assert inputs.shape[0] == targets.shape[0] > 1
    loss = task.loss(model, (inputs, targets)).item()
    assert train(task, model, optimizer, scheduler, range(12)) < loss


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("cifar10", (3, 32, 32)), ("shakespeare", (256,))])
def test_networks_of_paper_train(name, shape):
    """Take three steps on two random examples with the paper's shapes."""
    task = get_task(name, "paper")
    model, optimizer, scheduler = prepared(task)
    random = torch.Generator().manual_seed(0)
    losses = []
    if name == "cifar10":
        inputs = torch.randn(2, *shape, generator=random)
        targets = torch.tensor([3, 7])
    else:
        inputs = torch.randint(65, (2, *shape), generator=random)
        targets = inputs.roll(-1, 1)
    for _ in range(3):
        loss = task.loss(model, (inputs, targets))
        loss.backward()
        task.clip_(model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(4.17, abs=0.2) if name == "shakespeare" else losses[0] < 5


@pytest.mark.slow
def test_batches_of_paper_scale():
    task = with_data("shakespeare", "paper")
    inputs, targets = task.batch(0, 0)
    assert inputs.shape == targets.shape == (64, 256)
    task = with_data("cifar10", "paper")
    inputs, targets = task.batch(0, 703)
    assert inputs.shape == (8, 3, 32, 32)  # the last batch of an epoch
    assert task.batch(0, 0)[0].shape == (64, 3, 32, 32)


class Fixed:
    """A stream with two validation batches of different sizes and one test batch."""

    def batch(self, seed, step):
        raise NotImplementedError

    def validation(self):
        yield torch.eye(4)[:3], torch.tensor([0, 1, 3])
        yield torch.eye(4)[3:], torch.tensor([3])

    def test(self):
        yield torch.eye(4), torch.tensor([0, 0, 0, 3])


def fixed(build=nn.Identity) -> Task:
    return Task("fixed", "quick", build, lambda device: Fixed(), steps=1, warmup=0, lr=0.1)


def test_evaluate_averages_over_examples():
    result = fixed().evaluate(nn.Identity())
    right, wrong = -torch.tensor([1.0, 0, 0, 0]).log_softmax(0)[:2].double()
    assert result["accuracy"] == 75.0
    assert fixed().evaluate(nn.Identity(), "test")["accuracy"] == 50.0
    assert fixed().evaluate(nn.Identity(), batches=1)["accuracy"] == pytest.approx(200 / 3)
    assert result["loss"] == pytest.approx(((3 * right + wrong) / 4).item(), rel=1e-6)


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.live, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen.eval()
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, self.live.training, torch.is_grad_enabled()))
        if len(self.seen) > 2:
            raise RuntimeError("third")
        return self.frozen(self.live(x)) * self.scale


def test_evaluate_restores_modes_even_after_an_error():
    model = Recorder()
    task = fixed()
    assert task.evaluate(model)["accuracy"] == 75.0
    assert model.seen == [(False, False, False)] * 2
    with pytest.raises(RuntimeError, match="third"):
        task.evaluate(model)
    assert (model.training, model.live.training, model.frozen.training) == (True, True, False)
    model.eval()
    model.seen.clear()
    task.evaluate(model)
    assert not model.live.training


def test_gradient_clipping():
    task = replace(fixed(), clip=1.0)
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.full((2, 2), 100.0)
    fixed().clip_(model)
    assert model.weight.grad.norm().item() == 200
    task.clip_(model)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_learning_rate_schedule():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=2.0)
    scheduler = schedule(optimizer, steps=100, warmup=10)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert max(rates) == rates[9] == 2.0
    assert rates[54] == pytest.approx(2 * (0.01 + 0.99 / 2))
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.02)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)  # and remains there
    assert lr_factor(0, 10, 0) < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((10, 10), "got 10 of 10"), ((10, -1), "got -1 of 10")],
)
def test_invalid_schedule_is_refused(arguments, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match=message):
        schedule(optimizer, *arguments)


def test_digits_splits_are_fixed_stratified_and_disjoint():
    from pdecay.lab.data import digits

    one, other = digits.load(), digits.load()
    parts = {}
    for name in ("train", "validation", "test"):
        pixels, labels = getattr(one, name)
        assert torch.equal(pixels, getattr(other, name)[0])
        counts = labels.bincount()
        assert len(counts) == 10
        assert counts.max() - counts.min() <= 0.12 * counts.max() + 1
        parts[name] = {tuple(image.flatten().tolist()) for image in pixels}
    assert [len(part) for part in parts.values()] == [1297, 250, 250]
    assert len(set.union(*parts.values())) == 1797


@pytest.mark.parametrize("name", TASKS)
def test_validation_and_test_splits_are_repeatable_and_differ(name):
    task = with_data(name, "quick")
    first, again = next(task.validation()), next(task.validation())
    assert torch.equal(first[0], again[0])
    inputs, _ = next(task.test())
    assert inputs.shape != first[0].shape or not torch.equal(inputs, first[0])
