"""A multi-head attention layer whose heads can be removed.

``nn.MultiheadAttention`` requires ``num_heads * head_dim == embed_dim``, so that it cannot lose a
head. Layers with dead heads are replaced by this one, which has the same parameters under the same
names and returns the same results.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

from pdecay.deployment.model.state import replace_modules


class MultiheadAttention(nn.Module):
    """Attention with `num_heads` heads of `head_dim` dimensions each.

    Args:
        source: the layer to replace. Its parameters are shared, not copied.
    """

    # nn.TransformerEncoderLayer reads this attribute; False turns off its fast path.
    _qkv_same_embed_dim = False

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim = source.embed_dim
        self.num_heads = source.num_heads
        self._heads_before = source.num_heads
        self.head_dim = source.head_dim
        self.dropout = source.dropout
        self.batch_first = source.batch_first
        self.in_proj_weight = source.in_proj_weight
        self.in_proj_bias = source.in_proj_bias
        self.out_proj = source.out_proj
        self.train(source.training)

    @staticmethod
    def can_replace(source: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
        """Return whether this class can replace a module."""
        return (
            type(source) is nn.MultiheadAttention
            and source._qkv_same_embed_dim
            and source.bias_k is None
            and not source.add_zero_attn
            and not (source._forward_hooks or source._forward_pre_hooks)  # they would be lost
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the same as ``nn.MultiheadAttention``: the output, and the weights or None."""
        if query.is_nested:
            return self._attend_nested(query, attn_mask), None
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is only a hint about attn_mask: give attn_mask as well")
        if need_weights and self.num_heads < self._heads_before:
            raise ValueError(
                f"need_weights=True, but {self._heads_before - self.num_heads} of "
                f"{self._heads_before} heads were removed, so that their weights are unknown: "
                "compact the model with an example for which it returns the weights"
            )
        batched = query.ndim == 3
        swapped = batched and not self.batch_first  # inputs are (length, batch, width)
        queries, keys, values = (
            heads.transpose(1, 2) for heads in self._project(query, key, value, batched, swapped)
        )
        mask = self._mask(queries, keys, key_padding_mask, attn_mask)
        drop = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (queries * self.head_dim**-0.5) @ keys.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = dropout(weights, drop) if drop else weights
            mixed = weights @ values
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            scale = self.head_dim**-0.5
            mixed = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, dropout_p=drop, scale=scale
            )
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), weights
        return (out.transpose(0, 1) if swapped else out), weights

    def _attend_nested(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute self-attention of sequences of different lengths.

        ``nn.TransformerEncoder`` makes a nested tensor of a padded one in eval mode.
        """
        padded = x.to_padded_tensor(0.0)
        lengths = torch.tensor([len(one) for one in x.unbind()], device=padded.device)
        shown = torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)
        out, _ = self(padded, padded, padded, ~shown, need_weights=False, attn_mask=mask)
        nested: Tensor = torch._nested_tensor_from_mask(out, shown)
        return nested

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool, swapped: bool
    ) -> tuple[Tensor, ...]:
        """Return queries, keys and values as (batch, length, head, dimension)."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        heads = (self.num_heads, self.head_dim)
        if query is key and key is value:
            all_three = linear(_batch_first(query, batched, swapped), weight, bias)
            return tuple(all_three.unflatten(-1, (3, *heads)).unbind(-3))
        weights = weight.unflatten(0, (3, -1)).unbind()
        biases = (None,) * 3 if bias is None else bias.unflatten(0, (3, -1)).unbind()
        return tuple(
            linear(_batch_first(x, batched, swapped), w, b).unflatten(-1, heads)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )

    def _mask(
        self, queries: Tensor, keys: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Combine both masks into one that is added to the scores."""
        total: Tensor | None = None
        if mask is not None:
            total = _additive(mask, queries.dtype)
            if total.ndim == 3:
                if len(total) != len(queries) * self.num_heads:
                    raise ValueError(
                        f"attn_mask has {len(total)} matrices, but the batch has {len(queries)} "
                        f"rows of {self.num_heads} heads ({self._heads_before} before compact): "
                        "give a 2-d mask, or compact the model with such a mask in the example"
                    )
                total = total.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            hidden = _additive(padding, queries.dtype).view(-1, 1, 1, keys.shape[2])
            total = hidden if total is None else total + hidden
        return total


def _batch_first(x: Tensor, batched: bool, swapped: bool) -> Tensor:
    if not batched:
        return x.unsqueeze(0)
    return x.transpose(0, 1) if swapped else x


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask (True is hidden) to an additive one."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


@torch.no_grad()
def replace_attention(model: nn.Module) -> bool:
    """Replace ``nn.MultiheadAttention`` layers with dead heads, in place; return whether any."""
    new: dict[nn.Module, nn.Module] = {
        layer: MultiheadAttention(layer)
        for layer in model.modules()
        if layer is not model and MultiheadAttention.can_replace(layer) and _has_dead_heads(layer)
    }
    replace_modules(model, new)
    return bool(new)


def _has_dead_heads(attention: nn.MultiheadAttention) -> bool:
    """Return whether the values of a head are zero or not read, in a layer of several heads."""
    heads = (attention.num_heads, attention.head_dim)
    read = attention.out_proj.weight.unflatten(1, heads).ne(0).any((0, 2))
    values = attention.in_proj_weight.chunk(3)[2].unflatten(0, heads).ne(0).any((1, 2))
    if attention.in_proj_bias is not None:
        values |= attention.in_proj_bias.chunk(3)[2].unflatten(0, heads).ne(0).any(1)
    return attention.num_heads > 1 and not bool((read & values).all())
