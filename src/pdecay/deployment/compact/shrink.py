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
    for module in smaller.modules():
        update_sizes(module)
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


def update_sizes(module: nn.Module) -> None:
    """Set the size attributes of known layers from their weights."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif has_transposed_weight(module):
        inputs, outputs = module.get_parameter("weight").shape
        vars(module).update(nx=inputs, nf=outputs)
    elif isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.weight.shape[:2]
        if module.transposed:
            module.in_channels, module.out_channels = first, second * module.groups
        else:
            module.out_channels, module.in_channels = first, second * module.groups
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
