"""The example inputs that a model runs on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pdecay.deployment.model.outputs import tensors_of
from pdecay.deployment.model.state import not_plain


@dataclass(frozen=True)
class Inputs:
    """The positional and keyword arguments of one call of a model.

    A subclass may override `call` to run the model several times.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: Any) -> Inputs:
        """Make inputs from an example.

        Args:
            example: a tensor, a tuple of arguments, a dict of keyword arguments, or a pair of both,
                ``((x,), {"mask": mask})``. A model that takes a dict as its argument gets it from a
                tuple, ``({"x": x},)``.
        """
        match example:
            case Inputs():
                made = example
            case Tensor():
                made = cls((example,), {})
            case Mapping():
                made = cls((), _keywords(example))
            case (tuple() | list() as args, Mapping() as kwargs):
                made = cls(tuple(args), _keywords(kwargs))
            case tuple() | list():
                made = cls(tuple(example), {})
            case _:
                raise TypeError(
                    "example_inputs must be a tensor, a tuple of the model's arguments, a dict of "
                    "its keyword arguments, or a pair of both, ((x,), {'mask': mask}), "
                    f"got {type(example).__name__}"
                )
        given = (*made.args, *made.kwargs.values())
        if any(type(value).__module__ == "transformers.cache_utils" for value in given):
            raise ValueError(
                "example_inputs has a key-value cache, which every call changes: give "
                "pdecay.integrations.transformers.generation_example(input_ids, new_tokens)"
            )
        for tensor in made.tensors:
            kind = not_plain(tensor)
            if kind is not None:
                raise TypeError(f"example_inputs has a {kind}: give plain tensors (to_dense())")
        shapes = [tuple(tensor.shape) for tensor in made.tensors]
        if shapes and all(0 in shape for shape in shapes):
            raise ValueError(
                f"example_inputs has no elements, got a tensor of shape {shapes[0]}: give at "
                "least one row"
            )
        return made

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the arguments, also in nested containers and in attributes of objects."""
        return [one for leaf in tree_leaves((self.args, self.kwargs)) for one in tensors_of(leaf)]

    @property
    def has_batch(self) -> bool:
        """Whether all tensors have a first axis, of the same size."""
        sizes = {tensor.shape[:1] for tensor in self.tensors}
        return len(sizes) == 1 and sizes != {torch.Size([])}

    def call(self, model: nn.Module, *, copy: bool = True) -> Any:
        """Call the model, by default with copies: a model may change its arguments in place."""
        args, kwargs = self.args, self.kwargs
        if copy:
            given = self.copy()
            args, kwargs = given.args, given.kwargs
        elif any(not isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            # New containers nevertheless: a model may take values out of a dict.
            args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        return model(*args, **kwargs)

    def copy(self) -> Self:
        """Return these inputs with copies of all tensors."""
        return self._map(lambda tensor: tensor.detach().clone())

    def distinct(self) -> Self:
        """Return these inputs with a copy for each argument, also of a tensor that is given twice.

        An exporter would take a tensor that is given twice for one input.
        """
        args, kwargs = tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf,
            (self.args, self.kwargs),
        )
        return replace(self, args=args, kwargs=kwargs)

    def double(self) -> Self:
        """Return these inputs with floating-point tensors converted to float64."""
        return self._map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)

    def repeated(self) -> Self:
        """Return these inputs with every tensor repeated along its first axis."""
        return self._map(lambda tensor: torch.cat([tensor, tensor]))

    def other_sizes(self) -> list[Self]:
        """Return these inputs in other sizes, for checks that one run cannot make.

        A model's code may branch on a size or compute with it. If the tensors have a common first
        axis, there are inputs with twice the rows and with one row. Then come inputs with other
        sizes along all axes of one size, such as height and width: half of it; one, such as a
        single word; one less, which code often pads to a multiple; and twice of it.
        """
        lengths = {n for tensor in self.tensors for n in tensor.shape if n}
        resized = [
            self._map(partial(_resize, length=n, size=size))
            for n in sorted(lengths)
            for size in dict.fromkeys(((n + 1) // 2, 1, n - 1, 2 * n))
            if size not in (0, n)
        ]
        return [*(self.other_batches() if self.has_batch else ()), *resized]

    def other_batches(self) -> list[Self]:
        """Return inputs with twice the rows and with one row; the tensors need a first axis."""
        single = [self._map(lambda tensor: tensor[:1])] if len(self.tensors[0]) > 1 else []
        return [self.repeated(), *single]

    def other_numbers(self, *, in_tensors: bool = True) -> list[Self]:
        """Return these inputs with other numbers, one argument at a time.

        A model may compute with a number, so that a unit is constant only for the example. The
        number may also come from a tensor of integers, by ``item()``: their random order does not
        change it, since all may be equal.
        """
        found = []
        for change in (_other_number, _other_integers) if in_tensors else (_other_number,):
            for i, value in enumerate(self.args):
                args = (*self.args[:i], tree_map(change, value), *self.args[i + 1 :])
                found.append(replace(self, args=args))
            for name, value in self.kwargs.items():
                found.append(replace(self, kwargs={**self.kwargs, name: tree_map(change, value)}))
        same = tree_leaves((self.args, self.kwargs))
        return [one for one in found if _differ(tree_leaves((one.args, one.kwargs)), same)]

    def randomized(self, generator: torch.Generator) -> Self:
        """Return other inputs of the same kind.

        Floating-point tensors get random numbers of similar scale, integer tensors a permutation
        of their elements. Bool tensors are masks and stay, since a random mask may hide a whole
        row.
        """

        def randomize(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.bool or not tensor.numel():
                return tensor
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                values = tensor.detach().float()
                scale = values.std() if tensor.numel() > 1 else values.abs().max()
                if scale == 0:  # torch.zeros or torch.ones: an example for the shape only
                    scale = values.abs().max().clamp(min=1)
                return (values.mean() + 2 * scale * noise.to(tensor.device)).to(tensor.dtype)
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            return tensor.flatten()[order].view_as(tensor)

        return self._map(randomize)

    def _map(self, change: Any) -> Self:
        # A tensor that is given twice stays one tensor: code may ask whether a key is the query.
        changed = {id(tensor): change(tensor) for tensor in self.tensors}
        args, kwargs = tree_map(partial(_with_tensors, changed=changed), (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)


_KEPT = "_example_inputs"  # the attribute of a deployed model with its example


def keep_example(model: nn.Module, inputs: Inputs) -> None:
    """Store example inputs in a model, so that it can be saved as a program later."""
    setattr(model, _KEPT, inputs)


def kept_example(model: object) -> Inputs | None:
    """Return the example inputs that a deployed model keeps; None for other models."""
    example = getattr(model, _KEPT, None)
    # A subclass may run the model several times, which is no program of the model.
    return example if type(example) is Inputs else None


def _with_tensors(leaf: Any, changed: dict[int, Tensor]) -> Any:
    """Return a changed tensor, or a copy of an object with changed tensors; all else as it is."""
    if isinstance(leaf, Tensor):
        return changed[id(leaf)]
    if not any(True for _ in tensors_of(leaf)):
        return leaf
    try:
        return copy.deepcopy(leaf, dict(changed))
    except Exception:  # it cannot be copied, such as an open file
        return leaf


def _resize(tensor: Tensor, length: int, size: int) -> Tensor:
    """Return a tensor with another size along all axes of this length: cropped, or repeated."""
    for axis, n in enumerate(tensor.shape):
        if n == length:
            whole = torch.cat([tensor, tensor], axis) if size > n else tensor
            tensor = whole.narrow(axis, 0, size)
    return tensor


def _other_number(leaf: Any) -> Any:
    """Return another number; everything else as it is."""
    if isinstance(leaf, float):
        return leaf / 2 or 0.5
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return leaf - 1 if leaf > 0 else leaf + 1
    return leaf


def _other_integers(leaf: Any) -> Any:
    """Return a tensor with smaller integers, which an embedding takes; all else as it is."""
    if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool:
        return leaf
    if leaf.is_floating_point() or leaf.is_complex() or not leaf.numel():
        return leaf
    if leaf.dim() > 1 and leaf.max() <= 1:
        return leaf  # a mask: without its ones, it hides whole rows
    return torch.where(leaf > 0, leaf - 1, leaf) if leaf.max() > 0 else leaf + 1


def _differ(leaves: list[Any], others: list[Any]) -> bool:
    return any(one is not other for one, other in zip(leaves, others, strict=True))


def _keywords(example: Mapping[Any, Any]) -> dict[str, Any]:
    for name in example:
        if not isinstance(name, str):
            raise TypeError(
                f"the keys of example_inputs must be strings (argument names), got {name!r}"
            )
    return dict(example)
