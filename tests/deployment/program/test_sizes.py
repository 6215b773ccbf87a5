"""Sizes and dtypes that the code of a model branches on, in programs of files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pdecay
from tests.deployment.networks import Windows


class Branching(nn.Module):
    """A linear layer whose code depends on the sizes of its input."""

    def __init__(self, branch):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.branch = branch

    def forward(self, x):
        y = self.layer(x)
        return 2 * y if self.branch(*x.shape) else y


BRANCHES = {
    "length one": lambda rows, length, width: length == 1,
    "short": lambda rows, length, width: length < 2,
    "half": lambda rows, length, width: length // 2 == 0,
    "one row": lambda rows, length, width: rows == 1,
    "one of both": lambda rows, length, width: rows * length == 1,
    "none": lambda rows, length, width: False,
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_sizes_below_two_are_exact_or_refused(branch, tmp_path):
    model = Branching(BRANCHES[branch]).eval()
    pdecay.save(model, tmp_path / "a.safetensors", example_inputs=torch.randn(3, 6, 4))
    loaded = pdecay.load(tmp_path / "a.safetensors", trusted=True)
    refused = set()
    for shape in [(r, n) for r in (0, 1, 2, 5) for n in (0, 1, 2, 7)]:
        x = torch.randn(*shape, 4)
        try:
            got = loaded(x)
        except ValueError:
            refused.add(shape)
        else:
            torch.testing.assert_close(got, model(x))
    for shape in refused:
        with pytest.raises(ValueError, match="the program takes"):
            loaded(torch.randn(*shape, 4))
    assert not refused & {(2, 2), (2, 7), (5, 2), (5, 7)}
    if branch == "none":
        assert not refused
    if branch == "length one":
        assert (1, 7) not in refused


class RowsOfMask(nn.Module):
    """A model that takes a mask of one row only for one row, as models of transformers.

    With `skips`, it skips a mask of ones, but not while torch traces it.
    """

    def __init__(self, skips):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.skips = skips

    def forward(self, x, mask):
        if self.skips and not torch.compiler.is_compiling() and mask.all():
            return self.layer(x)
        return self.layer(x) * mask[torch.arange(x.shape[0])]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("skips", [False, True])
def test_one_row_is_allowed_that_only_all_inputs_may_have(rows, skips, tmp_path):
    model = RowsOfMask(skips).eval()
    example = (torch.randn(rows, 4), torch.ones(rows, 4))
    pdecay.save(model, tmp_path / "a.safetensors", example_inputs=example)
    loaded = pdecay.load(tmp_path / "a.safetensors", trusted=True)
    for count in (1, 2, 5):
        inputs = torch.randn(count, 4), torch.rand(count, 4).round()
        torch.testing.assert_close(loaded(*inputs), model(*inputs))
    with pytest.raises(IndexError):  # as the model
        loaded(torch.randn(5, 4), torch.rand(1, 4))


def masked(x, mask):
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(x).masked_fill(mask, -5.0)
    return x + mask


class Masked(nn.Module):
    def forward(self, x, mask):
        return masked(x, mask)


def test_other_kinds_of_numbers_are_refused(tmp_path):
    x, hidden = torch.randn(3, 4), torch.rand(3, 4) < 0.5
    added = torch.zeros(3, 4).masked_fill(hidden, -5.0)
    for given, other, text in [(added, hidden, "float32.*got bool"), (hidden, added, "bool.*got")]:
        pdecay.save(Masked(), tmp_path / "a.safetensors", example_inputs=(x, given))
        loaded = pdecay.load(tmp_path / "a.safetensors", trusted=True)
        assert torch.equal(loaded(x, given), masked(x, given))
        with pytest.raises(ValueError, match=f"takes a tensor of dtype {text}"):
            loaded(x, other)


def test_precision_may_differ(tmp_path):
    table = nn.Embedding(5, 4)
    pdecay.save(table, tmp_path / "a.safetensors", example_inputs=torch.tensor([[1, 2]]))
    loaded = pdecay.load(tmp_path / "a.safetensors", trusted=True).double()
    indices = torch.tensor([[3, 0, 4]])
    assert torch.equal(loaded(indices.int()), table(indices).double())


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4, mode="max")

    def forward(self, indices, offsets):
        return self.table(indices, offsets)


def test_models_are_not_tried_on_empty_inputs(tmp_path):
    """nn.EmbeddingBag crashes the process without offsets."""
    indices, offsets = torch.arange(8), torch.tensor([0, 3, 7])
    model = Bags()
    pdecay.save(model, tmp_path / "a.safetensors", example_inputs=(indices, offsets))
    loaded = pdecay.load(tmp_path / "a.safetensors", trusted=True)
    assert torch.equal(loaded(indices, offsets), model(indices, offsets))


def test_checks_of_other_sizes_do_not_change_the_program(tmp_path):
    model = Windows().eval()
    x = torch.randn(2, 12, 5)
    pdecay.save(model, tmp_path / "a.safetensors", example_inputs=x)
    torch.testing.assert_close(pdecay.load(tmp_path / "a.safetensors", trusted=True)(x), model(x))
    assert model.size == 4
