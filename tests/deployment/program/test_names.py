"""Programs of models whose modules have names that are no words of Python."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import pdecay
from tests.deployment.networks import mostly_zero


@pytest.mark.parametrize("choose", ["dense", "sparse"])
@pytest.mark.parametrize("name", ["user->item", "3-way", "a b", "größe", "class", 'a"b', "a\\"])
def test_names_that_are_no_words(tmp_path, name, choose):
    layers = OrderedDict({name: nn.Linear(4, 4), f"{name}_": nn.Linear(4, 4)})
    model = mostly_zero(nn.Sequential(layers))
    x = torch.randn(3, 4)
    deployed = pdecay.deploy(model, x, seconds=0.1, choose=choose)
    pdecay.save(deployed, tmp_path / "model.safetensors")
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    for one in (loaded, pickle.loads(pickle.dumps(loaded))):
        torch.testing.assert_close(one(x[:2]), model(x[:2]))
