from __future__ import annotations

import functools
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import pdecay
from pdecay.lab.data.sources import DataError
from pdecay.lab.tasks import SCALES, TASKS, Task, task
from pdecay.lab.train.schedule import lr_factor, schedule


@functools.cache
def real(name: str, scale: str) -> Task:
    """A task with its data, read once, or a test skipped with what is missing."""
    job = task(name, scale)
    try:
        job = replace(job, open=_without_download(job))
        _ = job.stream
    except DataError as error:
        if "was not found" not in str(error):
            raise
        pytest.skip(str(error))
    return job


def _without_download(job: Task):
    from pdecay.lab.data import sources as data

    def refuse(remote, folder, *, progress=True):
        raise DataError("tests download nothing")

    def open(device):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data, "fetch", refuse)
            return job.open(device)

    return open


KNOWN = [
    (name, scale)
    for name in TASKS
    for scale in SCALES
    if scale != "paper" or name in ("cifar10", "shakespeare")
]


@pytest.mark.parametrize(("name", "scale"), KNOWN)
def test_every_task_has_a_model_and_a_recipe_without_data(name, scale):
    job = task(name, scale)
    assert (job.name, job.scale) == (name, scale)
    assert 0 < job.warmup < job.steps
    assert 0 < job.lr < 0.1
    assert isinstance(job.model(0), nn.Module)
    assert "build" not in repr(job)
    assert repr(pickle.loads(pickle.dumps(job))) == repr(job)


def test_the_papers_settings():
    resnet, nano = task("cifar10", "paper"), task("shakespeare", "paper")
    epoch = 782  # 50,000 images in batches of 64
    assert (resnet.steps, resnet.warmup, resnet.clip) == (100 * epoch, 3 * epoch, None)
    assert (nano.steps, nano.warmup, nano.clip) == (5000, 100, 1.0)


@pytest.mark.parametrize("arguments", [("mnist",), ("digits", "huge"), ("digits", "paper")])
def test_unknown_names_are_told_what_there_is(arguments):
    with pytest.raises(ValueError, match=r"quick, cpu$|digits, fashion, cifar10, shakespeare$"):
        task(*arguments)


def test_the_seed_decides_the_model_and_nothing_else():
    job = task("digits", "quick")
    before = torch.get_rng_state()
    one, again, other = (list(job.model(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])


def test_batches_go_on_from_any_step():
    job = real("digits", "quick")
    walked = list(itertools.islice(job.batches(5), 60))
    resumed = list(itertools.islice(job.batches(5, start=40), 20))
    for (x, y), (other_x, other_y) in zip(walked[40:], resumed, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def train(job: Task, model, optimizer, scheduler, steps, seed=0) -> float:
    loss = torch.tensor(0.0)
    for step in steps:
        job.reseed(seed, step)
        loss = job.loss(model, job.batch(seed, step))
        loss.backward()
        job.clip_(model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return loss.item()


def prepared(job: Task):
    model = job.model(0)
    decay = pdecay.Lp(0.8, 1e-3)
    optimizer = pdecay.PAdam(pdecay.param_groups(model), lr=job.lr, decay=decay)
    return model, optimizer, schedule(optimizer, job.steps, job.warmup)


def test_a_run_with_dropout_resumes_to_the_last_bit():
    job = real("shakespeare", "quick")
    build = job.build
    job = replace(job, build=lambda: _with_dropout(build()))
    whole = prepared(job)
    train(job, *whole, range(6))
    first = prepared(job)
    train(job, *first, range(3))
    state = [part.state_dict() for part in first]
    torch.manual_seed(99)  # another process
    second = prepared(job)
    for part, saved in zip(second, state, strict=True):
        part.load_state_dict(saved)
    train(job, *second, range(3, 6))
    for one, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


def _with_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def test_digits_are_learned():
    job = replace(real("digits", "quick"), steps=150, warmup=10)
    model, optimizer, scheduler = prepared(job)
    before = job.evaluate(model)
    train(job, model, optimizer, scheduler, range(job.steps))
    after = job.evaluate(model)
    assert before["accuracy"] < 40
    assert after["accuracy"] > 93
    assert after["loss"] < before["loss"]


@pytest.mark.parametrize("name", TASKS)
def test_a_few_steps_of_each_task(name):
    job = real(name, "quick")
    model, optimizer, scheduler = prepared(job)
    inputs, targets = job.batch(0, 0)
    assert inputs.shape[0] == targets.shape[0] > 1
    loss = job.loss(model, (inputs, targets)).item()
    assert train(job, model, optimizer, scheduler, range(12)) < loss


@pytest.mark.parametrize(("name", "shape"), [("cifar10", (3, 32, 32)), ("shakespeare", (256,))])
def test_the_papers_shapes_train(name, shape):
    """Three steps as in the paper, but with two examples a batch; data only need the shape."""
    job = task(name, "paper")
    model, optimizer, scheduler = prepared(job)
    random = torch.Generator().manual_seed(0)
    losses = []
    if name == "cifar10":
        inputs = torch.randn(2, *shape, generator=random)
        targets = torch.tensor([3, 7])
    else:
        inputs = torch.randint(65, (2, *shape), generator=random)
        targets = inputs.roll(-1, 1)
    for _ in range(3):
        loss = job.loss(model, (inputs, targets))
        loss.backward()
        job.clip_(model)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(4.17, abs=0.2) if name == "shakespeare" else losses[0] < 5


def test_the_papers_real_batches():
    job = real("shakespeare", "paper")
    inputs, targets = job.batch(0, 0)
    assert inputs.shape == targets.shape == (64, 256)
    job = real("cifar10", "paper")
    inputs, targets = job.batch(0, 781)
    assert inputs.shape == (16, 3, 32, 32)  # what is left of an epoch
    assert job.batch(0, 0)[0].shape == (64, 3, 32, 32)


class Fixed:
    """A stream of two validation batches of unlike size."""

    def batch(self, seed, step):
        raise NotImplementedError

    def validation(self):
        yield torch.eye(4)[:3], torch.tensor([0, 1, 3])
        yield torch.eye(4)[3:], torch.tensor([3])


def fixed(build=nn.Identity) -> Task:
    return Task("fixed", "quick", build, lambda device: Fixed(), steps=1, warmup=0, lr=0.1)


def test_evaluate_weighs_every_example_alike():
    result = fixed().evaluate(nn.Identity())
    right, wrong = -torch.tensor([1.0, 0, 0, 0]).log_softmax(0)[:2].double()
    assert result["accuracy"] == 75.0
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


def test_evaluate_restores_every_modules_mode_also_after_an_error():
    model = Recorder()
    job = fixed()
    assert job.evaluate(model)["accuracy"] == 75.0
    assert model.seen == [(False, False, False)] * 2
    with pytest.raises(RuntimeError, match="third"):
        job.evaluate(model)
    assert (model.training, model.live.training, model.frozen.training) == (True, True, False)
    model.eval()
    model.seen.clear()
    job.evaluate(model)
    assert not model.live.training


def test_clipping():
    job = replace(fixed(), clip=1.0)
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.full((2, 2), 100.0)
    fixed().clip_(model)
    assert model.weight.grad.norm().item() == 200
    job.clip_(model)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_the_learning_rates_course():
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
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)  # and stays there
    assert lr_factor(0, 10, 0) < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((10, 10), "got 10 of 10"), ((10, -1), "got -1 of 10"), ((10, 1, 2.0), "floor .* got 2.0")],
)
def test_a_course_that_cannot_be(arguments, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match=message):
        schedule(optimizer, *arguments)
