"""The operator that represents a sparse layer in the graph of a program.

While torch traces a model, sparse layers would compute densely, and the graph would lose them.
`record_sparse_layers` therefore replaces them by modules that call one operator. `restore` turns
each call into a sparse layer again. Run by itself, the operator computes densely.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from pdecay.deployment.layers.modules import SparseConv2d, SparseLayer, SparseLinear
from pdecay.deployment.model.state import replace_modules

# Arguments of nn.Conv2d that the operator stores besides the weight's shape.
_CONV_OPTIONS = ("stride", "padding", "dilation", "groups", "padding_mode")
# Attributes of layers that code of models reads.
_SIZES = ("in_features", "out_features", "in_channels", "out_channels", "kernel_size")


@torch.library.custom_op("pdecay::sparse_layer", mutates_args=())
def sparse_layer(
    x: Tensor, more: Tensor | None, weight: Tensor, bias: Tensor | None, options: str
) -> Tensor:
    """Return a layer's output; `more` is added to it before the ReLU.

    Args:
        x: the input.
        more: a tensor to add, or None.
        weight, bias: the dense weight of a linear or 2-d convolutional layer, and its bias.
        options: the other settings of the layer as JSON.
    """
    layer, relu = _on_meta(tuple(weight.shape), bias is not None, options)
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    y: Tensor = torch.func.functional_call(layer, tensors, (x,))
    y = y if more is None else y + more
    return y.relu() if relu else y.clone()


sparse_layer.register_fake(sparse_layer._init_fn)


def make_layer(weight: Tensor, bias: Tensor | None, options: str) -> SparseLayer:
    """Return the sparse layer of a call of the operator."""
    layer, relu = _on_meta(tuple(weight.shape), bias is not None, options)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    layer.eval()
    if isinstance(layer, nn.Linear):
        return SparseLinear(layer, relu=relu)
    return SparseConv2d(layer, relu=relu)


def record_sparse_layers(model: nn.Module) -> None:
    """Replace all sparse layers inside a model, in place, by calls of the operator."""
    new: dict[nn.Module, nn.Module] = {
        layer: _Recorded(layer)
        for layer in model.modules()
        if isinstance(layer, SparseLinear | SparseConv2d)
    }
    replace_modules(model, new)


class _Recorded(nn.Module):
    """A sparse layer as a call of the operator, with its dense weight."""

    takes_sums = True

    def __init__(self, layer: SparseLinear | SparseConv2d) -> None:
        super().__init__()
        dense = layer.to_dense().requires_grad_(False)
        self.weight, self.bias = dense.weight, dense.bias
        settings = {}
        if isinstance(dense, nn.Conv2d):
            settings = {name: getattr(dense, name) for name in _CONV_OPTIONS}
        self.settings = settings
        self.relu = layer.relu
        for name in (*_SIZES, *_CONV_OPTIONS):
            if name in vars(layer):
                setattr(self, name, getattr(layer, name))

    def forward(self, x: Tensor, more: Tensor | float | None = None, relu: bool = False) -> Tensor:
        if isinstance(more, float | int):
            more = torch.tensor(more, dtype=self.weight.dtype)
        options = json.dumps({**self.settings, "relu": self.relu or relu})
        y: Tensor = sparse_layer(x, more, self.weight, self.bias, options)
        return y


def _on_meta(
    shape: tuple[int, ...], bias: bool, options: str
) -> tuple[nn.Linear | nn.Conv2d, bool]:
    """Return a dense layer without memory, and whether a ReLU follows it."""
    settings = json.loads(options)
    relu = bool(settings.pop("relu"))
    if len(shape) == 2 and not settings:
        return nn.Linear(shape[1], shape[0], bias, device="meta"), relu
    if len(shape) != 4 or set(settings) != set(_CONV_OPTIONS):
        raise ValueError(f"not the settings of a layer with weight {list(shape)}: {options[:200]}")
    channels = shape[1] * int(settings["groups"])
    return nn.Conv2d(channels, shape[0], shape[2:], bias=bias, device="meta", **settings), relu
