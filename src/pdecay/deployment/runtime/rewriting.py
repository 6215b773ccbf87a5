"""Changes to a model before deployment: batch-norm folding and the replacement of layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.nn.utils.parametrize import is_parametrized

from pdecay._core.parameters import has_transposed_weight
from pdecay.deployment.layers.modules import SparseLayer, why_not
from pdecay.deployment.model.state import replace_modules, shared_copy
from pdecay.deployment.runtime.usage import LAYERS, Usage, has_hooks


def obstacle(model: nn.Module, layer: nn.Linear | nn.Conv2d, usage: Usage) -> str | None:
    """Return why a layer must not be replaced or changed; None if it may."""
    if type(layer) not in LAYERS and not has_transposed_weight(layer):
        return f"a {type(layer).__name__}"
    if is_parametrized(layer):
        return "parametrized"
    if "forward" in vars(layer):
        return "its forward was replaced"
    if has_hooks(layer):
        return "has hooks"
    if layer not in usage.calls:
        return "not called on the example"
    if None in usage.calls[layer]:
        return "called with something else than one tensor"
    if layer in usage.readers:
        return f"its weight is read by {', '.join(sorted(usage.readers[layer]))}"
    owners = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is layer.weight
    ]
    modules = {model.get_submodule(name.rpartition(".")[0]) for name in owners}
    # An embedding keeps the dense weight, and the output layer that is tied to it may be sparse.
    if any(one is not layer and type(one) is not nn.Embedding for one in modules):
        return f"a weight shared by {', '.join(owners)}"
    return why_not(layer)


def fold_batch_norms(model: nn.Module, usage: Usage) -> list[str]:
    """Fold each batch norm into the layer before it, if it receives only that layer's outputs.

    Returns:
        The names of the folded batch norms.
    """
    names = {module: name for name, module in model.named_modules()}
    folded = []
    for layer, norm in list(usage.next_of.items()):
        if not isinstance(layer, LAYERS) or obstacle(model, layer, usage) or has_hooks(norm):
            continue
        fused = _fused_layer(layer, norm, usage)
        if fused is None or _has_alternative(model, norm, usage):
            continue
        layer.weight, layer.bias = fused.weight, fused.bias
        layer.requires_grad_(False)
        folded.append(names[norm])
        replace_modules(model, {norm: nn.Identity().eval()})
        if norm in usage.next_of:
            usage.next_of[layer] = usage.next_of[norm]
        else:
            del usage.next_of[layer]
    return folded


def _has_alternative(model: nn.Module, norm: nn.Module, usage: Usage) -> bool:
    """Return whether another batch norm beside this one may get the layer's outputs.

    Such as the one of another domain, which an argument chooses and the example did not run.
    """
    siblings = [
        one for parent in model.modules() if norm in parent.children() for one in parent.children()
    ]
    return any(
        isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d)
        and one not in usage.calls
        and one.num_features == norm.num_features
        for one in siblings
    )


@torch.no_grad()
def _fused_layer(
    layer: nn.Linear | nn.Conv2d, norm: nn.Module, usage: Usage
) -> nn.Linear | nn.Conv2d | None:
    """Return the layer with the batch norm folded in; None if that is not possible."""
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d):
        return None
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    mean = norm.running_mean
    if mean is None or norm.training:
        return None
    if not norm.affine:  # which fuse_linear_bn_eval does not support
        norm = copy.copy(norm)
        norm._parameters = {
            "weight": nn.Parameter(torch.ones_like(mean)),
            "bias": nn.Parameter(torch.zeros_like(mean)),
        }
    if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
        return fuse_conv_bn_eval(layer, norm)
    # On inputs of three dimensions, BatchNorm1d normalizes the second, not the features.
    is_2d = all(call and len(call.shape) == 2 for call in usage.calls[layer])
    if isinstance(layer, nn.Linear) and isinstance(norm, nn.BatchNorm1d) and is_2d:
        return fuse_linear_bn_eval(layer, norm)
    return None


def with_sparse_layers(
    model: nn.Module, sparse: Mapping[nn.Module, SparseLayer], usage: Usage
) -> tuple[nn.Module, list[str]]:
    """Return a copy with sparse layers, each with the ReLU after it; dense tensors are shared.

    Returns:
        The copy, and the names of the ReLUs that became part of a layer.
    """
    names = {module: name for name, module in model.named_modules()}
    new: dict[nn.Module, nn.Module] = {}
    relus = []
    for layer, sparse_layer in sparse.items():
        new[layer] = replacement = shared_copy(sparse_layer)
        after = usage.next_of.get(layer)
        if type(after) is nn.ReLU and not has_hooks(after):
            replacement.enable_relu()
            new[after] = nn.Identity().eval()
            relus.append(names[after])
    result = shared_copy(model)
    for layer, specs in usage.calls.items():
        if isinstance(layer, nn.Conv2d) and layer not in sparse:
            channels_last = any(spec is not None and spec.channels_last for spec in specs)
            copied = cast(nn.Conv2d, result.get_submodule(names[layer]))
            _make_contiguous(copied, channels_last)
    by_copy = {result.get_submodule(names[module]): one for module, one in new.items()}
    result = replace_modules(result, by_copy)
    if hasattr(result, "save_pretrained"):  # of transformers, or of huggingface_hub
        result.save_pretrained = _refuse_save_pretrained  # type: ignore[assignment]
    return result, relus


def _refuse_save_pretrained(*args: object, **kwargs: object) -> NoReturn:
    raise TypeError(
        "save_pretrained would write the sparse layers of this deployed model as tensors that its "
        "class cannot load: call pdecay.save(model, folder), or save_pretrained before deploy"
    )


def _make_contiguous(layer: nn.Conv2d, channels_last: bool) -> None:
    """Let a dense layer return contiguous images, so that sparse layers need not copy them."""
    if channels_last:
        layer.register_forward_pre_hook(_contiguous_input)
    if not is_parametrized(layer) and not layer.weight.is_contiguous():
        layer.weight = nn.Parameter(layer.weight.contiguous(), requires_grad=False)


def _contiguous_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in args)
