"""The removal itself: smaller parameters and buffers in a copy of the model."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pdecay.deployment.compact.plan import Plan
from pdecay.deployment.compact.rules import rule_for
from pdecay.deployment.compact.trace import Trace

Kept = dict[str, tuple[Tensor, ...]]  # by a tensor's name: which positions of each axis stay
Attributes = dict[tuple[str, str], int]  # by a module's name and its attribute's: the new value


def kept_by(plan: Plan, trace: Trace) -> Kept:
    """What stays of the parameters and buffers that lose something."""
    kept: Kept = {}
    for name, value in trace.named.items():
        indices = tuple(plan.kept(places) for places in value.places)
        if [len(one) for one in indices] != list(value.tensor.shape):
            kept[name] = indices
    return kept


def counts_by(plan: Plan, trace: Trace, model: nn.Module) -> Attributes:
    """The modules' attributes that count groups or channels which may have gone."""
    found: Attributes = {}
    for call in trace.calls:
        for attribute, places in rule_for(call).sizes(call, plan.units).items():
            size = plan.size(places)
            if size != len(places) and call.modules:
                count = vars(model.get_submodule(call.modules[-1])).get(attribute)
                # An instance norm's axis holds its channels once for every image.
                if isinstance(count, int) and count and len(places) % count == 0:
                    found[call.modules[-1], attribute] = size // (len(places) // count)
    return found


@torch.no_grad()
def smaller(model: nn.Module, plan: Plan, trace: Trace, attributes: Attributes) -> nn.Module:
    """A copy of the traced model without the units that the plan removes."""
    made = copy.deepcopy(model)
    kept = kept_by(plan, trace)
    for name, holders in _holders(made).items():
        if name in kept:
            owner, own = holders[0]
            less = cut(getattr(owner, own), kept[name])
            for owner, own in holders:  # a tied tensor stays tied
                setattr(owner, own, less)
    for weight, shift in plan.shifts.items():
        layer = made.get_submodule(weight.rpartition(".")[0])
        axis = 0 if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd) else 1  # or a Conv1D
        _add_to_bias(layer, shift[kept[weight][axis]])
    for (name, attribute), size in {**counts_by(plan, trace, made), **attributes}.items():
        setattr(made.get_submodule(name), attribute, size)
    for module in made.modules():
        _state_sizes(module)
    return made


def cut(tensor: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
    """What stays of a tensor; of a parameter, a parameter."""
    less = tensor.detach()
    for axis, indices in enumerate(kept):
        if len(indices) != less.shape[axis]:
            less = less.index_select(axis, indices.to(less.device))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(less, requires_grad=tensor.requires_grad)
    return less


def _holders(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter and buffer, by its first name, the modules and attributes that hold it."""
    first: dict[int, str] = {}
    holders: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                full = first.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
                holders.setdefault(full, []).append((module, name))
    return holders


def _add_to_bias(layer: nn.Module, shift: Tensor) -> None:
    weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")
    total = shift if bias is None else bias.double() + shift
    trained = weight.requires_grad if bias is None else bias.requires_grad
    layer.bias = nn.Parameter(total.to(weight), requires_grad=trained)


def _state_sizes(module: nn.Module) -> None:
    """Let a layer of torch's own say the sizes that it has now."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
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
