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


@pytest.mark.parametrize("scale", [0.0, 2.0, 0, 1, 7])
def test_constant_that_depends_on_a_number_in_the_example(scale):
    def forward(self, x, scale):
        return self.head(self.body(x) * scale)

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2)).eval()
    model.body.weight.data[2] = 0
    x = torch.randn(2, 3)
    assert compacted(model, x, scale, also=[(x, 0.7), (x, 4)]).body.out_features == WIDTH
    other = Model(branching, body=model.body, head=model.head).eval()
    with pytest.raises(CompactError, match="please report"):  # it branches on values
        compact(other, (torch.linspace(-1, 1, 6).view(2, 3), 2.0))
    also = [(x, torch.tensor(0.7)), (x, torch.tensor(4))]
    smaller = compacted(model, x, torch.tensor(scale), also=also)
    assert smaller.body.out_features == WIDTH


def test_number_in_the_example_without_influence_on_dead_units():
    def forward(self, x, scale):
        return self.head(self.body(x).relu()) * scale

    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2))
    model.body.weight.data[2] = 0
    x = torch.randn(2, 3)
    assert compacted(model, x, 2.0, also=[(x, 0.3), (x, 0.0)]).body.out_features == WIDTH - 1


@pytest.mark.parametrize("steps", [torch.tensor(7), torch.tensor([0]), torch.tensor([3, 3])])
def test_constant_that_depends_on_a_number_from_a_tensor(steps):
    def forward(self, x, steps):
        waves = (steps.flatten()[0].item() * self.frequencies).cos()
        return self.head((self.body(x) + self.time(waves)).relu())

    time = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    layers = {"body": nn.Linear(3, WIDTH), "time": time, "head": nn.Linear(WIDTH, 2)}
    model = Model(forward, **layers).eval()
    model.register_buffer("frequencies", torch.rand(4))
    model.body.weight.data[2] = 0  # varies with the number only
    x = torch.randn(2, 3)
    smaller = compacted(model, x, steps, also=[(x, steps + n) for n in (1, 20)])
    assert smaller.body.out_features == WIDTH


ROWS = {
    "unbind": lambda table, i: table.unbind()[i],
    "split": lambda table, i: table.split(1)[i][0],
    "chunk": lambda table, i: table.chunk(3)[i][0],
}


@pytest.mark.parametrize("name", ROWS)
def test_row_of_a_list(name):
    def forward(self, x, task):
        return self.head(self.body(x) + self.film(ROWS[name](self.table, task)))

    film = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    layers = {"body": nn.Linear(3, WIDTH), "film": film, "head": nn.Linear(WIDTH, 2)}
    model = Model(forward, table=nn.Parameter(torch.randn(3, 4)), **layers).eval()
    model.body.weight.data[2] = 0
    x = torch.randn(2, 3)
    assert compacted(model, x, 0, also=[(x, 1), (x, 2)]).body.out_features == WIDTH


def test_number_that_chooses_another_layer():
    def forward(self, x, task):
        return self.heads[task](self.body(x).relu())

    heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))
    model = Model(forward, body=nn.Linear(3, WIDTH), heads=heads)
    heads[1].weight.data[:, 2] = 0
    x = torch.randn(4, 3)
    smaller = compacted(model, x, 1)
    assert smaller.compact_report.unused == ("heads.0",)
    with pytest.raises(RuntimeError, match="shape"):
        smaller(x, 0)


PADDED = {
    "always": lambda x, n: nn.functional.pad(x, (0, 0, 0, n)),
    "other value": lambda x, n: nn.functional.pad(x, (0, 0, 0, n), value=-1.0),
}


@pytest.mark.parametrize("name", PADDED)
def test_sequence_that_is_padded_to_a_multiple(name):
    def forward(self, x):
        x = self.body(x)
        x = self.middle(PADDED[name](x, -x.shape[1] % 4))
        return self.head(x.unflatten(1, (-1, 4)).relu().mean(2))

    layers = {"body": nn.Linear(3, WIDTH), "middle": nn.Linear(WIDTH, 5), "head": nn.Linear(5, 2)}
    model = Model(forward, **layers)
    model.body.weight.data[2] = 0
    model.middle.weight.data[:, 1] = 0
    also = [(torch.randn(2, n, 3),) for n in (4, 6, 9, 11, 16)]
    assert compacted(model, torch.randn(2, 8, 3), also=also).body.out_features == WIDTH - 1


def test_image_that_is_padded_to_a_multiple_only_if_necessary_is_an_error():
    def forward(self, x):
        x = self.body(x)
        n = -x.shape[-1] % 4
        x = self.middle(nn.functional.pad(x, (0, n, 0, n)) if n else x)
        return self.head(nn.functional.avg_pool2d(x.relu(), 4))

    layers = {"body": nn.Conv2d(3, WIDTH, 2, 2), "head": nn.Conv2d(5, 2, 1)}
    model = Model(forward, middle=nn.Conv2d(WIDTH, 5, 1), **layers).eval()
    model.body.weight.data[2] = 0
    with pytest.raises(CompactError, match=r"shape \[2, 3, 15, 15\] instead of"):
        compact(model, torch.randn(2, 3, 16, 16))


def test_loop_that_the_example_runs_once_is_an_error():
    def forward(self, x):
        state = x.new_zeros(len(x), WIDTH)
        for step in x.unbind(1):
            state = self.body(step) + self.gate(self.feedback(state).sigmoid())
        return self.head(state)

    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("feedback", "gate")}
    model = Model(forward, body=nn.Linear(3, WIDTH), head=nn.Linear(WIDTH, 2), **layers).eval()
    with pytest.raises(CompactError, match=r"shape \[2, 2, 3\] instead of \[2, 1, 3\]"):
        compact(model, torch.randn(2, 1, 3))
