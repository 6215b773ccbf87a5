"""The example that a model is run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: Any) -> Inputs:
        """From a tensor, a tuple of arguments, or a dict of keyword arguments."""
        if isinstance(example, Tensor):
            made = cls((example,), {})
        elif isinstance(example, Mapping):
            names = [name for name in example if not isinstance(name, str)]
            if names:
                raise TypeError(f"example_inputs has a keyword that is no string: {names[0]!r}")
            made = cls((), dict(example))
        elif isinstance(example, tuple | list):
            made = cls(tuple(example), {})
        else:
            raise TypeError(
                "example_inputs must be a tensor, a tuple of the model's arguments or a dict of "
                f"its keyword arguments, got {type(example).__name__}"
            )
        shapes = [tuple(tensor.shape) for tensor in made.tensors]
        if shapes and all(0 in shape for shape in shapes):
            raise ValueError(
                f"example_inputs has no numbers, got a tensor of shape {shapes[0]}: an example "
                "needs at least one row"
            )
        return made

    @property
    def tensors(self) -> list[Tensor]:
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def call(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def double(self) -> Inputs:
        """The same numbers in float64."""

        def wide(leaf: Any) -> Any:
            numbers = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.double() if numbers else leaf

        args, kwargs = tree_map(wide, (self.args, self.kwargs))
        return Inputs(args, kwargs)

    def others(self, generator: torch.Generator) -> Inputs:
        """Other inputs of the same kind: new random numbers, the same tokens in another order.

        Bool tensors are masks and stay: a random one may hide a whole row.
        """

        def other(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool or not leaf.numel():
                return leaf
            if leaf.is_floating_point():
                noise = torch.randn(leaf.shape, generator=generator, dtype=torch.float32)
                values = leaf.detach().float()
                scale = values.std() if leaf.numel() > 1 else values.abs().max()
                if scale == 0:  # an example of zeros or ones, for the shape alone
                    scale = values.abs().max().clamp(min=1)
                return (values.mean() + 2 * scale * noise.to(leaf.device)).to(leaf.dtype)
            order = torch.randperm(leaf.numel(), generator=generator).to(leaf.device)
            return leaf.flatten()[order].view_as(leaf)

        args, kwargs = tree_map(other, (self.args, self.kwargs))
        return Inputs(args, kwargs)
