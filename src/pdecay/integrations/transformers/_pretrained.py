"""Save and load Hugging Face models as folders with sparse weights."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from pdecay.deployment.compact.shrink import sized_layers, update_sizes
from pdecay.deployment.files import SaveReport, load, read_rows, save
from pdecay.deployment.files.pretrained import CONFIG_KEY, fits_in, weights_in

PathLike = str | os.PathLike[str]


def save_pretrained(model: PreTrainedModel, folder: PathLike, *, dense: bool = False) -> SaveReport:
    """Write a model's configuration and its weights without their zeros to a folder.

    ``pdecay.save(model, folder)`` does the same. The sizes of a compacted model and the sparse
    layers of a deployed one are kept as plain weights, so that :func:`from_pretrained` returns a
    model that can be trained, compacted or deployed again.

    Args:
        model: a model of transformers. Merge adapters of PEFT first, or save them by themselves.
        folder: the folder; it is created if needed.
        dense: write an ordinary ``model.safetensors``, which transformers itself can load unless
            the model is compacted.

    Returns:
        A report of the stored sizes.

    Raises:
        ValueError: if the model's class could not load the folder again.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_pretrained needs a transformers.PreTrainedModel, got {type(model).__name__}: "
            "for a PEFT model give model.merge_and_unload(), for a wrapped one the inner model"
        )
    return save(model, folder, dense=dense)


def from_pretrained(folder: PathLike, model_class: type[Any] | None = None) -> Any:
    """Load a model from a folder that :func:`save_pretrained` or transformers wrote.

    Args:
        folder: a local folder with ``config.json`` and one weights file, sparse or ordinary.
        model_class: a model class, or an Auto class such as ``AutoModelForCausalLM``. The default
            is the class that the configuration names. All tensors of the file must fit it.

    Returns:
        The model in eval mode, with the saved dtypes and, if it was compacted, the saved sizes.

    Raises:
        ValueError: if the file does not fit the model.
        FileFormatError: if the file is damaged.
    """
    path = weights_in(folder)
    config = AutoConfig.from_pretrained(folder)
    kind = model_class or _architecture(config)
    # An Auto class has the first method, a model class the second.
    model = (getattr(kind, "from_config", None) or kind._from_config)(config)
    rows = read_rows(path)
    _resize(model, {name: row.shape for name, row in rows.items()}, _saved_attributes(config))
    _convert(model, {name: row.dtype.torch for name, row in rows.items()})
    load(path, model)
    model.tie_weights()
    if model.can_generate() and os.path.exists(os.path.join(folder, GENERATION_CONFIG_NAME)):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _architecture(config: Any) -> type[Any]:
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ValueError(
            f"config.json names the architectures {names}, none of which transformers has: give "
            "model_class"
        )
    return kind


def _saved_attributes(config: Any) -> dict[str, dict[str, int]]:
    saved = getattr(config, CONFIG_KEY, None) or {}
    attributes: dict[str, dict[str, int]] = saved.get("attributes", {})
    return attributes


@torch.no_grad()
def _resize(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], attributes: dict[str, dict[str, int]]
) -> None:
    """Give the tensors of a new model the smaller shapes of a file, and set the attributes."""
    layers = sized_layers(model)
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                shape = shapes.get(f"{prefix}.{name}" if prefix else name)
                if shape is None:
                    continue
                if tensor is None:
                    tensors[name] = nn.Parameter(module.get_parameter("weight").new_empty(shape))
                elif shape != tensor.shape and fits_in(shape, tensor.shape):  # else left to `load`
                    if tensor not in replaced:
                        cut = tensor[tuple(slice(size) for size in shape)].clone()
                        is_parameter = isinstance(tensor, nn.Parameter)
                        replaced[tensor] = nn.Parameter(cut) if is_parameter else cut
                    tensors[name] = replaced[tensor]
    for name, values in attributes.items():
        module = model.get_submodule(name)
        for attribute, value in values.items():
            if type(vars(module).get(attribute)) is not int or type(value) is not int:
                raise ValueError(
                    f"config.json sets {name}.{attribute} to {value!r}, which is not one of the "
                    f"sizes of {type(model).__name__}"
                )
            setattr(module, attribute, value)
    update_sizes(layers)


def _convert(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give the floating-point tensors of a new model the dtypes of a file.

    A configuration has one dtype, but a model may have several: T5 in half precision keeps some
    layers in float32, because their outputs would overflow.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in named:
        dtype = dtypes.get(name, tensor.dtype)
        if dtype.is_floating_point and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
