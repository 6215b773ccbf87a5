"""The rules that analyse PyTorch's operations. An operation without a rule is opaque.

`base.Rule` is the interface. `rule_for` finds the rule of a recorded operation by its name.
"""

from __future__ import annotations

import torch

from pdecay.deployment.compact.rules.base import Consumer, Empty, Factory, Opaque, Rule
from pdecay.deployment.compact.rules.elementwise import Elementwise, Like, Product
from pdecay.deployment.compact.rules.lookups import Bags, Lookup
from pdecay.deployment.compact.rules.mixing import (
    Along,
    BatchNorm,
    GroupNorm,
    LastTwo,
    LayerNorm,
    Padding,
    Spatial,
    WeightNorm,
)
from pdecay.deployment.compact.rules.moves import Join, Move, Overwrite
from pdecay.deployment.compact.rules.products import Convolution, GroupedProduct, MatrixProduct
from pdecay.deployment.compact.trace import Call

__all__ = ["OPAQUE", "Consumer", "Rule", "rule_for"]

OPAQUE = Opaque()
_EMPTY = Empty()
_FACTORY = Factory()
_ELEMENTWISE = Elementwise()

_RULES: dict[Rule, str] = {
    # elementwise operations without torch's tag "pointwise"
    _ELEMENTWISE: "alias detach lift_fresh _to_copy copy hardswish rsub masked_fill "
    "log_sigmoid_forward _prelu_kernel floor_divide fill",
    Product(): "mul",
    Like(): "zeros_like ones_like full_like empty_like rand_like randn_like",
    _FACTORY: "new_zeros new_ones new_full new_empty",
    Move(): "view _unsafe_view reshape permute transpose t unsqueeze squeeze expand slice select "
    "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind flip roll repeat "
    "pixel_shuffle pixel_unshuffle channel_shuffle movedim",
    Join(): "cat stack",
    Overwrite(): "select_scatter slice_scatter",
    MatrixProduct(): "mm bmm addmm baddbmm",
    GroupedProduct(): "_grouped_mm",
    Convolution(): "convolution",
    Along(): "_softmax _log_softmax _safe_softmax softmax log_softmax mean sum amax amin prod var "
    "std var_mean std_mean any all argmax argmin cumsum cumprod logcumsumexp logsumexp "
    "linalg_vector_norm sort topk max min median",
    Spatial(): "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d "
    "adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
    LastTwo(): "tril triu",
    Padding(): "constant_pad_nd",
    LayerNorm(): "native_layer_norm _fused_rms_norm",
    BatchNorm(): "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm miopen_batch_norm",
    GroupNorm(): "native_group_norm",
    WeightNorm(): "_weight_norm_interface",
    Lookup(): "embedding index index_select",
    Bags(): "_embedding_bag _embedding_bag_forward_only",
}
_BY_NAME = {name: rule for rule, names in _RULES.items() for name in names.split()}
_OPAQUE_OVERLOADS = {"view.dtype"}  # reinterprets the bits instead of reshaping


def rule_for(call: Call) -> Rule:
    """Return the rule of an operation."""
    overload = str(call.op).removeprefix("aten.")
    if call.in_place or overload in _OPAQUE_OVERLOADS:
        return OPAQUE
    if not call.ins:
        return _FACTORY
    if _has_no_elements(call):
        return _EMPTY
    if call.op.namespace == "aten" and call.name in _BY_NAME:
        return _BY_NAME[call.name]
    if torch.Tag.pointwise in call.op.tags:
        return _ELEMENTWISE
    return OPAQUE


def _has_no_elements(call: Call) -> bool:
    """Return whether a tensor has no elements, except where a rule can move or join it."""
    rule = _BY_NAME.get(call.name)
    ins, outs = ([value.tensor.numel() == 0 for value in each] for each in (call.ins, call.outs))
    if isinstance(rule, Move):
        return any(outs) and not all(ins)
    # Further outputs, such as the statistics of a norm in eval mode, may be empty in any case.
    return not isinstance(rule, Join | Like | Factory) and any((*ins, *outs[:1]))
