"""Folders of Hugging Face models: a configuration and sparse weights.

The weights are not in ``model.safetensors``. The ``from_pretrained`` of transformers would find no
known tensor in a sparse file of that name and would initialise the model at random; without one it
raises an error.

A configuration cannot describe a compacted model, whose layers have sizes of their own. Their
shapes are in the weights file. Integer attributes that differ from those of a new model, such as a
number of heads, are written to ``config.json`` under the key "pdecay".
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from pdecay._core.parameters import has_transposed_weight
from pdecay._utils.files import replacing
from pdecay.deployment.layers.base import SparseLayer

SPARSE_WEIGHTS = "model.pdecay.safetensors"
DENSE_WEIGHTS = "model.safetensors"
# What transformers loads from a folder without DENSE_WEIGHTS: its shards, and its older format.
OTHER_WEIGHTS = (
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
CONFIG_KEY = "pdecay"

Attributes = dict[str, dict[str, int]]  # by module name, the attributes that differ


def is_pretrained_model(model: object) -> bool:
    """Return whether an object is a model of transformers, without importing the package."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__ == "transformers.modeling_utils"
        for kind in type(model).__mro__
    )


def weights_in(folder: str | os.PathLike[str]) -> Path:
    """Return the path of the weights file in a model folder; raise ValueError if it has two."""
    found = [name for name in (SPARSE_WEIGHTS, DENSE_WEIGHTS) if (Path(folder) / name).exists()]
    if len(found) > 1:
        # pdecay.save leaves one of them. With both, the wrong choice would be old weights.
        raise ValueError(
            f"{os.fspath(folder)} has both {' and '.join(found)}, which may differ: another "
            "program wrote to the folder after pdecay.save, or a save was interrupted; delete one "
            "of them, or give the path of a file"
        )
    if found:
        return Path(folder) / found[0]
    raise FileNotFoundError(
        f"{os.fspath(folder)} has neither {SPARSE_WEIGHTS} nor {DENSE_WEIGHTS}: give a folder that "
        "pdecay.save wrote"
    )


def has_sparse_layers(model: Any) -> bool:
    """Return whether a model was deployed with sparse layers."""
    return any(isinstance(module, SparseLayer) for module in model.modules())


def weights_to_save(model: Any) -> tuple[dict[str, Tensor], Attributes]:
    """Return the state of a model with its sparse layers as dense weights, and its attributes.

    Raises:
        ValueError: if the result could not be loaded into a new model of the same class.
    """
    fresh = new_model(type(model), model.config)
    state: dict[str, Tensor] = dict(model.state_dict())
    tied = _first_names(fresh)
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SparseLayer):
            for buffer in ("values", "columns", "row"):
                del state[f"{prefix}.{buffer}"]
            weight = module.weight
            transposed = has_transposed_weight(fresh.get_submodule(prefix))
            name = f"{prefix}.weight"
            state[name] = weight.mT.contiguous() if transposed else weight
            if tied[name] != name:
                state[name] = state[tied[name]]
    _check_structure(model, fresh, state, tied)
    return {name: state[name] for name in model_order(fresh, state)}, _attributes(model, fresh)


def new_model(kind: type[Any], config: Any) -> Any:
    """Return a model of a class without memory for its weights."""
    with torch.device("meta"):
        return kind(copy.deepcopy(config))


def model_order(fresh: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """Return the names of a state in the order of a new model, additional ones last."""
    order = {name: i for i, name in enumerate(fresh.state_dict())}
    return sorted(state, key=lambda name: order.get(name, len(order)))


def write_config(model: Any, folder: Path, attributes: Attributes) -> None:
    """Write the model's configuration files, with the attributes of a compacted model."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    if attributes:
        setattr(config, CONFIG_KEY, {"attributes": attributes})
    elif hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)
    # A full disk or a kill must not truncate a configuration that exists.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".config-") as new:
        config.save_pretrained(new)
        if model.can_generate():
            model.generation_config.save_pretrained(new)
        for path in Path(new).iterdir():
            with replacing(folder / path.name) as file:
                file.write(path.read_bytes())


def fits_in(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether a tensor of a new model can be cut to a shape: no size is larger."""
    return len(shape) == len(other) and all(a <= b for a, b in zip(shape, other, strict=True))


def _check_structure(
    model: nn.Module, fresh: nn.Module, state: dict[str, Tensor], tied: dict[str, str]
) -> None:
    """Raise unless a new model has the same modules and can hold all tensors."""
    # A model may have one module where a new model has two with tied weights: resizing the
    # embeddings of an encoder-decoder does that.
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = []
    for name, module in fresh.named_modules():
        one = modules.get(name)
        same = _kind(one) is _kind(module) or isinstance(one, SparseLayer)
        # A ReLU that deploy fused into the layer before it has no weights.
        if not same and (one is None or _has_own_tensors(module) or _has_own_tensors(one)):
            kind = "missing" if one is None else f"a {type(one).__name__}"
            problems.append(f"{name or 'the model'} is {kind} instead of {type(module).__name__}")
    expected, names = fresh.state_dict(), state.keys()
    problems += [f"{name} is missing" for name in sorted(expected.keys() - names)]
    problems += [
        f"{name} is unknown"
        for name in sorted(names - expected.keys())
        if not _is_free(fresh, name)
    ]
    for name in sorted(names & expected.keys()):
        shape, new, first = state[name].shape, expected[name].shape, tied.get(name, name)
        if not fits_in(shape, new):
            problems.append(f"{name} has the shape {list(shape)} instead of {list(new)}")
        elif first in state and not _same(state[name], state[first]):
            problems.append(f"{name} differs from {first}, which the configuration ties to it")
    if problems:
        listed = "; ".join(problems[:4]) + ("; ..." if len(problems) > 4 else "")
        raise ValueError(
            f"this {type(model).__name__} cannot be saved as a model folder, because its class "
            f"could not load it again: {listed}. Save the trained or compacted model (adapters "
            "merged, before deploy folds its batch norms), update model.config if you changed the "
            "head, or give a path that ends in .safetensors to save the tensors only"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    # One memory first: a tensor with NaN is not equal to itself.
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _kind(module: nn.Module | None) -> type | None:
    """Return the class of a module, without the one that parametrizations make for each module."""
    return None if module is None else type_before_parametrizations(module)


def _has_own_tensors(module: nn.Module) -> bool:
    return bool(module._parameters or module._buffers)


def _is_free(fresh: nn.Module, name: str) -> bool:
    """Return whether a parameter is None in a new model, as the bias that compact may add."""
    prefix, _, attribute = name.rpartition(".")
    try:
        module = fresh.get_submodule(prefix)
    except AttributeError:
        return False
    return attribute in module._parameters and module._parameters[attribute] is None


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return for the name of each parameter the first name of the same parameter."""
    first: dict[Tensor, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def _attributes(model: nn.Module, fresh: nn.Module) -> Attributes:
    found: Attributes = {}
    for name, module in fresh.named_modules():
        differing = dict(_differing(model.get_submodule(name), module))
        if differing:
            found[name] = differing
    return found


def _differing(module: nn.Module, fresh: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(fresh).items():
        own = vars(module).get(name)
        if type(value) is int and type(own) is int and own != value:
            yield name, own
