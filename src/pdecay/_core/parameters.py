"""Selection of the parameters that decay.

Zero is a fixed point of the decay for p < 2: a tensor that is initialised to zero would never
change. Biases and the parameters of normalisation layers are few, and setting them to zero saves
nothing. Both kinds are excluded from the decay: by number of dimensions, by the module that owns
them, by value and by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pdecay._core.group_settings import check_not_flattened, decays, penalty_of, scale_of
from pdecay._core.penalty import Decay, as_penalty
from pdecay._core.tensors import is_tracing
from pdecay._utils.user_warnings import warn_user

_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norms, including lazy and synchronised
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
# Norms of other packages (LlamaRMSNorm, FrozenBatchNorm2d, LayerNorm2d, ...) share no base class.
# Fused modules that also hold a matrix (LayerNormLinear) are not norms.
_NORM_NAMES = re.compile(
    r"(Batch|Layer|Group|Instance|RMS|Rms)Norm(?!.*(Linear|MLP|Conv|Attention))"
)

# Weak references to the memory of reported tensors, with offset and shape. A reference to a tensor
# itself would keep torch.utils.swap_tensors from converting a model.
_warned: set[tuple[StorageWeakRef, int, torch.Size]] = set()

# A model with this share of zeros was sparse before. Rows of padding have a smaller one.
_SPARSE = 0.1


def param_groups(
    model: nn.Module,
    decay: Decay = None,
    exclude: Iterable[str] | str = (),
    include: Iterable[str] | str = (),
) -> list[dict[str, Any]]:
    """Split a model's parameters into two groups for an optimizer: decayed, and not.

    The second group holds tensors with fewer than two dimensions, vectors that are stored with
    three or more so that they broadcast (layer scales of shape (C, 1, 1), class tokens), parameters
    of normalisation layers, tensors that are all zero, and parameters whose name matches an
    `exclude` pattern. A match of `include` overrides all of these rules. Parameters that require no
    gradient are in neither group. A tied weight is listed once; the patterns are compared with all
    of its names.

    A tensor that an earlier training removed is all zero as well, and would not stay zero. If other
    weights are zero, too, all-zero tensors are named in a warning.

    Args:
        model: the model.
        decay: the penalty of the decayed group; None uses the optimizer's default.
        exclude, include: patterns of ``fnmatch``, e.g. ``"*.embedding.*"``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> decayed, not_decayed = param_groups(model)
        >>> [len(decayed["params"]), len(not_decayed["params"])]
        [2, 4]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups needs a torch.nn.Module, got {type(model).__name__}: pass the model, "
            "not its parameters"
        )
    check_not_flattened(model.parameters())
    penalty = as_penalty(decay)
    excluded, included = _patterns("exclude", exclude), _patterns("include", include)
    _check_matches(model, [*excluded, *included])
    decayed: list[Tensor] = []
    not_decayed: list[Tensor] = []
    frozen: list[tuple[str, Tensor]] = []
    left_out: list[str] = []
    for param, owners in owners_of(model):
        if not param.requires_grad:
            continue
        names = [name for name, _ in owners]
        if _matches(names, included):
            if is_zero(param) and (penalty is None or penalty.absorbs):
                frozen.append((names[0], param))
            decayed.append(param)
        elif not decays_by_default(param, owners) or _matches(names, excluded):
            not_decayed.append(param)
        elif is_zero(param):
            left_out.append(names[0])
            not_decayed.append(param)
        else:
            decayed.append(param)
    if not decayed and not not_decayed:
        raise ValueError(
            f"there is nothing to optimize: {type(model).__name__} has no parameter that "
            "requires a gradient"
        )
    _warn(frozen)
    if left_out and _share_of_zeros([w for w in decayed if not is_zero(w)]) >= _SPARSE:
        warn_user(
            f"param_groups: these tensors are all zero and do not decay, so they do not stay zero: "
            f"{', '.join(left_out)}. Other weights of the model are zero, too. If an earlier "
            "training removed these tensors, call requires_grad_(False) on them, or name them with "
            "include="
        )
    split = _split_of(model, decayed)
    # A 1-d tensor is in the first group only if it matches `include`.
    first: dict[str, Any] = {"params": decayed, "decay_1d": True, "decay_split": split}
    if penalty is not None:
        first["decay"] = penalty
    return [first, {"params": not_decayed, "decay": None, "decay_split": split}]


def owners_of(model: nn.Module) -> Iterator[tuple[Tensor, list[tuple[str, nn.Module]]]]:
    """Yield each parameter once, with a (full name, owning module) pair for each of its uses."""
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((f"{prefix}.{name}" if prefix else name, module))
    yield from owners.items()


def decays_by_default(param: Tensor, owners: list[tuple[str, nn.Module]]) -> bool:
    """Return whether a parameter decays, judged by its dimensions and the modules that own it."""
    if any(is_norm(module) for _, module in owners):
        return False
    if is_lazy(param):
        return not owners[0][0].endswith("bias")
    return param.ndim >= 2 and not _is_broadcast_vector(param, [name for name, _ in owners])


def _is_broadcast_vector(param: Tensor, names: list[str]) -> bool:
    """Return whether a tensor is a vector with further dimensions of size 1.

    The weight of a convolution with one channel and a kernel of size 1 has such a shape, too.
    """
    larger = sum(size > 1 for size in param.shape)
    return param.ndim >= 3 and larger <= 1 and not any(name.endswith("weight") for name in names)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, of torch or of another package."""
    return isinstance(module, _NORMS) or bool(_NORM_NAMES.search(type(module).__name__))


def has_transposed_weight(module: nn.Module) -> bool:
    """Return whether a module is a ``Conv1D`` of transformers.

    It is a linear layer whose weight has one row per input. It is recognised by name, because
    transformers may not be installed.
    """
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


@torch.no_grad()
def is_zero(param: Tensor) -> bool:
    """Return whether a tensor has elements and all of them are zero; False if under tracing."""
    if is_lazy(param) or param.is_meta or param.numel() == 0 or is_tracing():
        return False
    any_nonzero = param.any()
    if hasattr(any_nonzero, "full_tensor"):  # a DTensor: reduce over all ranks
        any_nonzero = any_nonzero.full_tensor()
    return not any_nonzero.item()


@torch.no_grad()
def _share_of_zeros(params: list[Tensor]) -> float:
    """Return the share of zeros in some tensors, over all ranks; 0 if under tracing."""
    known = [param for param in params if not (is_lazy(param) or param.is_meta)]
    size = sum(param.numel() for param in known)
    if not size or is_tracing():
        return 0.0
    counts = [param.count_nonzero() for param in known]
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in counts]
    return 1 - sum(map(int, whole)) / size


def frozen_in(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Return the (name, parameter) pairs that decay and are all zero, so would never change."""
    frozen = []
    for g, group in enumerate(optimizer.param_groups):
        penalty = penalty_of(group)
        if penalty is None or not penalty.absorbs or group["decay_auxiliary"]:
            continue  # with a slow auxiliary variable, a weight can leave zero
        for i, param in enumerate(group["params"]):
            if scale_of(param, i, group) and param.requires_grad and is_zero(param):
                frozen.append((_name_in(group, g, i), param))
    return frozen


def released_in(optimizer: Optimizer) -> list[str]:
    """Return the names of matrices that are all zero and will change, as they do not decay."""
    return [
        _name_in(group, g, i)
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        if param.requires_grad and not decays(param, group) and is_zero(param) and param.ndim >= 2
    ]


def _name_in(group: dict[str, Any], g: int, i: int) -> str:
    shape = "x".join(map(str, group["params"][i].shape))
    names = group.get("param_names")
    return names[i] if names else f"parameter {i} of group {g} ({shape})"


def warn_of_frozen(optimizer: Optimizer) -> None:
    """Warn, once for each tensor, about zero-initialised tensors that the decay would freeze."""
    _warn(frozen_in(optimizer))


def _warn(frozen: list[tuple[str, Tensor]]) -> None:
    global _warned
    _warned = {memory for memory in _warned if not memory[0].expired()}
    new = [(name, _memory(param)) for name, param in frozen if _memory(param) not in _warned]
    if not new:
        return
    _warned.update(memory for _, memory in new)
    names = ", ".join(name for name, _ in new)
    warn_user(
        f"these tensors are all zero and would never change, since zero is a fixed point of the "
        f"decay for p < 2: {names}. Exclude them from the decay (pdecay.param_groups does), or "
        "initialise them differently."
    )


def _memory(param: Tensor) -> tuple[StorageWeakRef, int, torch.Size]:
    """Return a key that is equal for the same memory as long as the memory exists."""
    return StorageWeakRef(param.untyped_storage()), int(param.storage_offset()), param.shape


def _split_of(model: nn.Module, decayed: list[Tensor]) -> str:
    """Return one letter for each parameter of a model: d decays, n does not, f is frozen."""
    chosen = set(decayed)
    return "".join(
        "d" if param in chosen else "n" if param.requires_grad else "f"
        for param, _ in owners_of(model)
    )


def _patterns(name: str, patterns: Iterable[str] | str) -> list[str]:
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{name} must be a list of name patterns (strings), got {patterns!r}")
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise TypeError(f"{name} must be a list of name patterns (strings), got {pattern!r}")
    return listed


def _check_matches(model: nn.Module, patterns: list[str]) -> None:
    """Warn about patterns that match no parameter, such as a misspelled name."""
    names = [name for _, owners in owners_of(model) for name, _ in owners]
    if unmatched := [pattern for pattern in patterns if not _matches(names, [pattern])]:
        warn_user(
            f"param_groups: {', '.join(map(repr, unmatched))} matches no parameter of this "
            f"{type(model).__name__}. Patterns are compared with the full name, such as "
            f"{names[0] if names else 'layer.weight'!r}; use * for any characters"
        )


def _matches(names: list[str], patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
