"""Rows of a table that a number in the code selects: other inputs may take other rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import CompactError, compact

from .checks import Model, compacted

LENGTH, WIDTH = 12, 6

TABLES = {
    "view": lambda table, n: table.unsqueeze(0)[:, :n],
    "computed": lambda table, n: (2 * table)[:n],
    "converted": lambda table, n: table.double()[:n].float(),
    "last": lambda table, n: table[n - 1],
    "stacked": lambda table, n: torch.stack([table[i] for i in range(n)]),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", TABLES)
def test_rows_beyond_the_example_may_not_be_zero(name):
    def forward(self, x):
        return self.head(self.body(x) * TABLES[name](self.table, x.shape[1]))

    table = torch.randn(LENGTH, WIDTH)
    table[:7, :4] = 0
    layers = {"body": nn.Linear(3, WIDTH), "head": nn.Linear(WIDTH, 2)}
    model = Model(forward, table=nn.Parameter(table), **layers)
    also = [(torch.randn(2, n, 3),) for n in (3, 8, LENGTH)]
    compacted(model, torch.randn(2, 6, 3), also=also)


def test_row_of_another_task():
    def forward(self, x, task):
        return self.head(self.body(x) * self.gates[task])

    gates = torch.randn(3, WIDTH)
    gates[0, :3] = gates[1, 2:5] = gates[2, 2] = 0
    layers = {"body": nn.Linear(3, WIDTH), "head": nn.Linear(WIDTH, 2)}
    model = Model(forward, gates=nn.Parameter(gates), **layers)
    x = torch.randn(4, 3)
    smaller = compacted(model, x, 0, also=[(x, 1), (x, 2)])
    assert smaller.gates.shape == (3, WIDTH - 1)  # one unit is off in all tasks


def test_stacked_weights_lose_units_that_are_dead_in_all():
    def forward(self, x, expert):
        return (x @ self.inner[expert]).relu() @ self.outer[expert]

    layers = {"inner": torch.randn(3, 4, 8), "outer": torch.randn(3, 8, 2)}
    layers["outer"][:, 5] = 0
    layers["outer"][0, :3] = 0
    model = Model(forward, **{name: nn.Parameter(one) for name, one in layers.items()})
    x = torch.randn(4, 4)
    smaller = compacted(model, x, 0, also=[(x, 1), (x, 2)])
    assert smaller.inner.shape == (3, 4, 7)


def test_sizes_from_tolist():
    def forward(self, x, sizes):
        return torch.stack([self.net(part).amax(0) for part in x.split(sizes.tolist())])

    model = Model(forward, net=nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)))
    model.net[2].weight.data[:, 1] = 0
    also = [(torch.randn(9, 3), torch.tensor([2, 7]))]
    smaller = compacted(model, torch.randn(6, 3), torch.tensor([1, 3, 2]), also=also)
    assert smaller.net[0].out_features == WIDTH - 1


def test_branch_on_a_length_of_one_is_an_error():
    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden + 1 if x.shape[1] == 1 else hidden)

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2)).eval()
    model.body.weight.data[2] = 0
    with pytest.raises(CompactError, match=r"shape \[2, 1, 3\] instead of \[2, 6, 3\]"):
        compact(model, torch.randn(2, 6, 3))


def branching(self, x, scale):
    hidden = self.body(x)
    return self.head(hidden + 1 if x.abs().max() > 1.01 else hidden) * scale


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_constant_that_depends_on_a_number_in_the_example_is_an_error(scale):
    def forward(self, x, scale):
        return self.head(self.body(x) * scale)

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2)).eval()
    model.body.weight.data[2] = 0
    x = torch.randn(2, 3)
    with pytest.raises(CompactError, match="another number in example_inputs"):
        compact(model, (x, scale))
    other = Model(branching, body=model.body, head=model.head).eval()
    with pytest.raises(CompactError, match="please report"):  # it branches on values
        compact(other, (torch.linspace(-1, 1, 6).view(2, 3), 2.0))
    smaller = compacted(model, x, torch.tensor(scale), also=[(x, torch.tensor(0.7))])
    assert smaller.body.out_features == WIDTH


def test_number_in_the_example_without_influence_on_dead_units():
    def forward(self, x, scale):
        return self.head(self.body(x).relu()) * scale

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2))
    model.body.weight.data[2] = 0
    x = torch.randn(2, 3)
    assert compacted(model, x, 2.0, also=[(x, 0.3), (x, 0.0)]).body.out_features == WIDTH - 1
