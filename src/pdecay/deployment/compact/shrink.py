"""The removal itself: a copy of the model with smaller parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdecay._core.parameters import has_transposed_weight
from pdecay.deployment.compact.removal import Removal
from pdecay.deployment.compact.rules import rule_for
from pdecay.deployment.compact.trace import Trace
from pdecay.deployment.model.outputs import objects_in

KeptPositions = dict[str, tuple[Tensor, ...]]  # by tensor name: the kept positions of each axis
Attributes = dict[tuple[str, str], int]  # by module name and attribute name: the new value


def kept_positions(removal: Removal, trace: Trace) -> KeptPositions:
    """Return the kept positions of the parameters and buffers that become smaller."""
    kept: KeptPositions = {}
    for name, value in trace.named.items():
        indices = tuple(removal.positions(labels) for labels in value.labels)
        if [len(one) for one in indices] != list(value.tensor.shape):
            kept[name] = indices
    return kept


@torch.no_grad()
def shrink(model: nn.Module, removal: Removal, trace: Trace, attributes: Attributes) -> nn.Module:
    """Return a copy of the traced model without the removed units.

    Args:
        model: the traced model.
        removal: the units to remove.
        trace: the trace.
        attributes: further attributes to set.
    """
    smaller = copy.deepcopy(model)
    layers = sized_layers(smaller)
    kept = kept_positions(removal, trace)
    tensors = {**dict(smaller.named_parameters()), **dict(smaller.named_buffers())}
    for optimizer in optimizers_in(smaller):
        for name, indices in kept.items():
            cut_state(optimizer.state.get(tensors[name], {}), tensors[name].shape, indices)
    for name, indices in kept.items():
        # In place, since lists of parameters and optimizers in the model hold them as well.
        tensors[name].data = cut(tensors[name].detach(), indices)
    for weight, shift in removal.bias_shifts.items():
        layer = smaller.get_submodule(weight.rpartition(".")[0])
        axis = 1 if has_transposed_weight(layer) else 0
        _add_to_bias(layer, shift[kept[weight][axis]])
    counts = _counting_attributes(removal, trace, smaller)
    for (name, attribute), size in {**counts, **attributes}.items():
        setattr(smaller.get_submodule(name), attribute, size)
    update_sizes(layers)
    return smaller


def cut(tensor: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
    """Return the kept positions of a tensor."""
    less = tensor
    for axis, indices in enumerate(kept):
        if len(indices) != less.shape[axis]:
            less = less.index_select(axis, indices.to(less.device))
    return less


def cut_state(state: dict[str, Any], shape: torch.Size, kept: tuple[Tensor, ...]) -> None:
    """Cut the tensors of a parameter's shape in the state that an optimizer has for it."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            state[key] = cut(value, kept)


def optimizers_in(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers in the attributes of a model, such as those of an agent's networks."""
    found = objects_in([vars(module) for module in model.modules()])
    return list({id(one): one for one in found if isinstance(one, Optimizer)}.values())


def _counting_attributes(removal: Removal, trace: Trace, model: nn.Module) -> Attributes:
    """Return the new values of attributes that count groups or channels."""
    found: Attributes = {}
    for call in trace.calls:
        for attribute, labels in rule_for(call).counted(call, removal.units).items():
            size = removal.size(labels)
            if size != len(labels) and call.modules:
                count = vars(model.get_submodule(call.modules[-1])).get(attribute)
                # The axis of an instance norm holds its channels once for every image.
                if isinstance(count, int) and count and len(labels) % count == 0:
                    found[call.modules[-1], attribute] = size // (len(labels) // count)
    return found


def _add_to_bias(layer: nn.Module, shift: Tensor) -> None:
    weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")
    if bias is None:
        layer.bias = nn.Parameter(shift.to(weight), requires_grad=weight.requires_grad)
    else:
        bias.data = (bias.double() + shift).to(weight)


def sized_layers(model: nn.Module) -> list[nn.Module]:
    """Return the known layers whose size attributes agree with their weights.

    A subclass may have another kind of weight, such as one matrix for each expert.
    """
    layers = []
    for module in model.modules():
        sizes = _sizes(module)
        if sizes and all(vars(module).get(name, size) == size for name, size in sizes.items()):
            layers.append(module)
    return layers


def update_sizes(layers: list[nn.Module]) -> None:
    """Set the size attributes of known layers from their weights."""
    for layer in layers:
        vars(layer).update(_sizes(layer))


def _sizes(module: nn.Module) -> dict[str, int]:
    """Return the size attributes of a known layer, computed from its weight."""
    weight = getattr(module, "weight", None)
    shape = list(weight.shape) if isinstance(weight, Tensor) else []
    names: tuple[str, ...] = ()
    if isinstance(module, nn.Linear):
        names = ("out_features", "in_features")
    elif has_transposed_weight(module):
        names = ("nx", "nf")
    elif isinstance(module, nn.modules.conv._ConvNd) and len(shape) == 2 + len(module.kernel_size):
        names = (
            ("in_channels", "out_channels")
            if module.transposed
            else ("out_channels", "in_channels")
        )
        shape = [shape[0], shape[1] * module.groups]
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        names = ("num_embeddings", "embedding_dim")
    elif isinstance(module, nn.PReLU):
        names = ("num_parameters",)
    return dict(zip(names, shape, strict=True)) if len(names) == len(shape) else {}
