"""Models whose calls change their buffers and attributes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import CompactError, compact

from .checks import Model, compacted

WIDTH = 8


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Positions(nn.Module):
    """A table of positions that the first call fills."""

    def __init__(self, in_place):
        super().__init__()
        self.register_buffer("table", torch.zeros(30, WIDTH), persistent=False)
        self.in_place = in_place
        self.filled = False

    def forward(self, x):
        if not self.filled:
            table = torch.arange(30.0)[:, None].mul(torch.arange(WIDTH) + 1).sin()
            if self.in_place:
                self.table.copy_(table)
            else:
                self.table = table
            self.filled = True
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize("dead", [0, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_buffer_that_the_first_call_fills(in_place, dead):
    model = nn.Sequential(
        nn.Linear(3, WIDTH), Positions(in_place), nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, 2)
    )
    model[4].weight.data[:, :dead] = 0
    x = torch.randn(2, 6, 3)
    smaller = compact(model, x)
    assert smaller[2].out_features == 9 - dead
    assert not smaller[1].filled
    for other in (x, torch.randn(2, 12, 3)):
        torch.testing.assert_close(smaller(other), model(other))


def test_buffer_that_grows_with_the_longest_input():
    def forward(self, x):
        x = self.body(x).relu()
        length, width = x.shape[1:]
        if len(self.table) < length:
            scale = torch.arange(width) / width
            self.table = torch.arange(float(length))[:, None].mul(scale).sin()
        return self.head(x + self.table[:length])

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2))
    model.register_buffer("table", torch.zeros(0, WIDTH))
    model.head.weight.data[:, 2] = 0
    also = [(torch.randn(2, n, 3),) for n in (3, 12, 20)]
    compacted(model, torch.randn(2, 6, 3), also=also)


def test_cache_of_a_function_keeps_plain_tensors():
    @functools.cache
    def embedding(step):
        return torch.arange(4.0).mul(step).sin()

    def forward(self, x, step):
        return self.head((self.body(x) + self.step(embedding(step))).relu())

    layers = {"body": nn.Linear(3, WIDTH), "step": nn.Linear(4, WIDTH)}
    model = Model(forward, head=nn.Linear(WIDTH, 2), **layers)
    model.head.weight.data[:, 2] = 0
    x = torch.randn(2, 3)
    smaller = compact(model, (x, 5))
    for step in range(7):
        assert not torch._is_functional_tensor(embedding(step))
        torch.testing.assert_close(smaller(x, step), model(x, step))


def test_cache_of_keys_in_a_buffer():
    def forward(self, x, start):
        queries, keys = self.query(x), self.key(x)
        self.keys[: len(x), start : start + x.shape[1]] = keys
        scores = queries @ self.keys[: len(x), : start + x.shape[1]].mT
        return self.head(self.body(x).relu()) + scores.amax(-1, keepdim=True)

    layers = {name: nn.Linear(3, WIDTH) for name in ("query", "key", "body")}
    model = Model(forward, head=nn.Linear(WIDTH, 2), **layers).eval()
    model.register_buffer("keys", torch.zeros(4, 20, WIDTH))
    model.head.weight.data[:, 2] = 0
    smaller = compact(model, (torch.randn(2, 6, 3), 0))
    assert smaller.body.out_features == WIDTH - 1
    assert not smaller.keys.any()
    model = copy.deepcopy(model)
    with torch.no_grad():
        for start, length in ((0, 6), (6, 1), (7, 4)):
            x = torch.randn(2, length, 3)
            torch.testing.assert_close(smaller(x, start), model(x, start))


def test_checks_of_other_sizes_do_not_change_later_ones():
    def forward(self, x):
        length = x.shape[1]
        self.size = min(self.size, length)  # a single word makes all later inputs fail
        x = self.first(x).relu()
        x = 1 - x if length > 20 else x
        return self.second(x.unflatten(1, (-1, self.size)).mT.matmul(self.position).squeeze(-1))

    model = Model(forward, first=nn.Linear(5, 8), second=nn.Linear(8, 3), size=4)
    model.position = nn.Parameter(torch.randn(4, 1))
    with torch.no_grad():
        model.first.weight[0], model.first.bias[0] = 0, -1
    with pytest.raises(CompactError, match="an input of shape \\[2, 24, 5\\]"):
        compact(model, torch.randn(2, 12, 5))
