"""Units that look dead or constant on the example only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdecay.deployment.compact import CompactError, compact

from .checks import Model, compacted


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def batch_branch(kind):
    """Return a model whose code treats a batch of one row in another way."""

    def forward(self, x):
        h = self.first(x)
        if kind == "activation":
            return self.second(h.relu() if len(x) > 1 else h)
        if kind == "sum":
            return self.second(h.relu()) + (0 if len(x) > 1 else h.sum(1, keepdim=True))
        return (self.second if len(x) > 1 else self.other)(h.relu())

    layers = {"other": nn.Linear(6, 2)} if kind == "layer" else {}
    model = Model(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2), **layers)
    model.second.weight.data[:, :3] = 0
    model.first.weight.data[4] = 0
    model.first.bias.data[4] = -1
    return model


@pytest.mark.parametrize("kind", ["activation", "sum", "layer"])
def test_branch_on_the_batch_size_is_an_error(kind):
    shapes = r"shape \[1, 4\] instead of \[5, 4\], where the model's code takes"
    with pytest.raises(CompactError, match=shapes):
        compact(batch_branch(kind), torch.randn(5, 4))


def test_model_that_takes_one_batch_size_only():
    model = Model(lambda self, x: self.first(x).view(5, 6).relu(), first=nn.Linear(4, 6))
    assert compact(model, torch.randn(5, 4)).compact_report.units == 0


def test_example_that_hides_other_values_of_a_shuffle():
    def forward(model, x):
        x = model.first(x).relu()
        return model.second(model.norm(torch.channel_shuffle(x, 2) * x.tanh()))

    layers = {"first": nn.Conv1d(2, 6, 1), "second": nn.Conv1d(6, 4, 1)}
    model = Model(forward, **layers, norm=nn.InstanceNorm1d(6))
    model.first.weight.data[[0, 1, 2, 4, 5]] = 0
    model.first.bias.data = torch.tensor([0.5, 0.4, 0.3, -100.0, 0.2, 0.1])
    smaller = compact(model, torch.randn(3, 2, 5))  # unit 3 is zero for small inputs
    x = 1000 * torch.randn(3, 2, 5)
    torch.testing.assert_close(smaller(x), model(x))


def pad(x, size):
    return nn.functional.pad(x, (0, 0, 0, size - x.shape[1]))


def join_with_zeros(x, size):
    return torch.cat([x, x.new_zeros(len(x), size - x.shape[1], x.shape[2])], 1)


def stack_with_zeros(x, size):
    return torch.stack([*x.unbind(1), *[torch.zeros(len(x), x.shape[2])] * (size - x.shape[1])], 1)


def write_into_zeros(x, size):
    longer = torch.zeros(len(x), size, x.shape[2])
    longer[:, : x.shape[1]] = x
    return longer


@pytest.mark.parametrize("fill", [pad, join_with_zeros, stack_with_zeros, write_into_zeros])
def test_positions_that_are_filled_up_on_the_example(fill):
    def forward(self, x):
        return self.last(self.first(fill(self.words(x), 12).flatten(1)).relu())

    layers = {"words": nn.Linear(2, 2), "first": nn.Linear(24, 6), "last": nn.Linear(6, 2)}
    model = Model(forward, **layers)
    model.words.weight.data[1] = 0  # constant in each word, but not after the last one
    model.first.weight.data[:2, :16] = 0  # read only the words after the eighth
    model.first.weight.data[0, 17::2] = model.first.weight.data[1, 16::2] = 0
    smaller = compacted(model, torch.randn(3, 3, 2), also=[(torch.randn(3, 12, 2),)])
    assert smaller.first.out_features == 6


def test_channels_that_are_filled_up_with_zeros_do_not_keep_others():
    def forward(self, x):
        x = self.first(x)
        return self.last(torch.cat([x.relu(), torch.zeros(len(x), 2)], 1))

    model = Model(forward, first=nn.Linear(3, 6), last=nn.Linear(8, 2))
    model.last.weight.data[:, 1:3] = 0
    assert compacted(model, torch.randn(2, 3)).first.out_features == 4


@pytest.mark.parametrize("shape", [(12,), (4, 3)])
def test_results_that_the_example_crops(shape):
    def forward(self, x, number):
        results = self.last(self.first(x).relu()).unflatten(1, shape)
        return results[:, :number] if len(shape) == 1 else results[:, number]

    model = Model(forward, first=nn.Linear(3, 8), last=nn.Linear(8, 12))
    model.last.weight.data[:, 0] = 0
    model.last.weight.data[:9, 1:4] = 0  # read only by the last three results
    x = torch.randn(5, 3)
    smaller = compacted(model, x, 2, also=[(x, 3)])
    torch.testing.assert_close(smaller(x, shape[0] - 1), model(x, shape[0] - 1))
    assert smaller.first.out_features == 7


def test_pieces_that_the_example_does_not_read():
    def forward(self, x, number):
        read, _ = self.last(self.first(x).relu()).split([number, 12 - number], 1)
        return read

    model = Model(forward, first=nn.Linear(3, 8), last=nn.Linear(8, 12))
    model.last.weight.data[:, 0] = 0
    model.last.weight.data[:9, 1:4] = 0  # read only by the last three results
    x = torch.randn(5, 3)
    smaller = compacted(model, x, 2, also=[(x, 11)])
    assert smaller.first.out_features == 7


def test_half_of_the_results_that_is_not_read_is_removed():
    def forward(self, x):
        mean, _ = self.last(self.first(x).relu()).chunk(2, 1)  # as in an autoencoder
        return mean

    model = Model(forward, first=nn.Linear(3, 8), last=nn.Linear(8, 12))
    model.last.weight.data[:6, :3] = 0
    assert compacted(model, torch.randn(5, 3)).first.out_features == 5


def test_position_table_that_is_split_at_the_length():
    def forward(self, x):
        where, _ = self.where.split([x.shape[1], 12 - x.shape[1]])
        return self.last((self.first(x) + where).relu())

    model = Model(forward, first=nn.Linear(3, 8), last=nn.Linear(8, 2))
    model.where = nn.Parameter(torch.randn(12, 8))
    model.first.weight.data[:4] = 0
    model.where.data[:8, :4] = model.where.data[:1, :4]  # constant up to the eighth position
    x = torch.randn(5, 4, 3)
    smaller = compacted(model, x, also=[(torch.randn(5, 12, 3),)])
    assert smaller.first.out_features == 8


@pytest.mark.parametrize(("number", "other"), [(1.0, 9.0), (torch.tensor(4), torch.tensor(9))])
def test_unit_that_is_constant_for_a_number_only(number, other):
    def forward(self, x, number):
        scale = float(number) if isinstance(number, torch.Tensor) else number
        return self.last((self.first(x) + scale * self.second(x)).relu())

    model = Model(forward, first=nn.Linear(3, 6), second=nn.Linear(3, 6), last=nn.Linear(6, 2))
    for layer in (model.first, model.second):
        layer.weight.data[:3] = 0
    model.first.bias.data[:3] = torch.tensor([-5.0, -5.0, -1.0])
    model.second.bias.data[:3] = torch.tensor([1.0, 1.0, 0.0])
    x = torch.randn(5, 3)
    smaller = compacted(model, x, number, also=[(x, other)])
    assert smaller.first.out_features == 5  # one unit is zero for any number


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_position_map_that_is_resized(mode):
    def forward(self, x):
        x = self.first(x)
        where = nn.functional.interpolate(self.where, size=x.shape[-2:], mode=mode)
        return self.last(x + where)

    layers = {"first": nn.Conv2d(2, 4, 1), "last": nn.Conv2d(4, 3, 1)}
    model = Model(forward, **layers, where=nn.Parameter(torch.zeros(1, 4, 16, 16)))
    model.first.weight.data[:2] = model.first.bias.data[:2] = 0
    model.where.data[0, 1, 5, 9] = 1  # between the pixels that images of 4 x 4 read
    images = [(torch.randn(2, 2, size, size),) for size in (4, 12, 16)]
    assert compacted(model, *images[0], also=images[1:]).first.out_channels == 3


def test_expert_without_tokens_on_the_example():
    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        x = self.trunk(x).relu()
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            mixed.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        return self.head(mixed)

    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4)
    )
    layers = {"trunk": nn.Linear(5, 6), "router": nn.Linear(5, 4), "head": nn.Linear(6, 2)}
    model = Model(forward, experts=experts, **layers)
    for expert in experts:
        expert[2].weight.data[:, :3] = 0
    smaller = compacted(model, torch.randn(1, 5), also=[(torch.randn(50, 5),)])
    widths = sorted(expert[0].out_features for expert in smaller.experts)
    assert widths == [5, 5, 8, 8]  # the example says nothing about two of them


def test_axis_of_a_number():
    def forward(self, x):
        return self.last(self.first(x).relu()) * self.scale.sum(0) * self.scale.softmax(-1)

    model = Model(forward, first=nn.Linear(3, 8), last=nn.Linear(8, 2))
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.last.weight.data[:, :3] = 0
    assert compacted(model, torch.randn(5, 3)).first.out_features == 5
