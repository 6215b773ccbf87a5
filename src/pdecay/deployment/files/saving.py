"""From a model to a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import pdecay
from pdecay.deployment.files.container import MAX_DIMENSIONS, check_byte_order
from pdecay.deployment.files.dtypes import BY_TORCH
from pdecay.deployment.files.reading import FORMAT, FORMAT_VERSION, TIED
from pdecay.deployment.files.report import SaveReport
from pdecay.deployment.files.writing import write_dense, write_sparse

_OURS = ("format", "format_version", "pdecay_version", "sparsity")


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    dense: bool = False,
) -> SaveReport:
    """Write a model's parameters and buffers to a file that leaves out the zeros.

    Everything that ``state_dict()`` has comes back as it was, to the last bit, but for the sign of
    a zero: -0.0 is a zero, too, and comes back as 0.0. A weight that has several names is stored
    once, and comes back as one. The file appears when it is complete, or not at all. Beside the
    model, this takes no more memory than about one of its tensors.

    Args:
        model: a model, or a state dict.
        path: of the file; one that is there is replaced.
        metadata: strings of your own to keep in the file. ``"model"`` is the model's class, if
            you say nothing else.
        dense: write an ordinary safetensors file, zeros and all, that needs no pdecay to be read.

    Returns:
        What was written, and the least that it could have taken; ``str()`` is a table.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(1000, 100)
        >>> model.weight.data[torch.rand(100, 1000) < 0.95] = 0
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> report = save(model, path)
        >>> report.dense_nbytes, report.ratio < 1.1
        (400400, True)
        >>> torch.equal(pdecay.load(path)["weight"], model.weight)
        True
    """
    check_byte_order()
    state = _collect(model)
    own = {"format": "pt"} if dense else {"format": FORMAT, "format_version": FORMAT_VERSION}
    own["pdecay_version"] = pdecay.__version__
    if isinstance(model, nn.Module):
        own["model"] = f"{type(model).__module__}.{type(model).__qualname__}"
    own |= _checked_metadata(metadata or {})
    write = write_dense if dense else write_sparse
    stored, size = write(Path(path), state, own)
    memory = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return SaveReport(os.fspath(path), tuple(stored), size, memory)


def _collect(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor | str]:
    """The tensors to write, each once; further names of one say which."""
    state = source.state_dict() if isinstance(source, nn.Module) else source
    if not isinstance(state, Mapping):
        raise TypeError(f"save needs a model or a state dict, got {type(source).__name__}")
    collected: dict[str, Tensor | str] = {}
    known: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        _check(name, tensor)
        # The same memory, read in the same way: one tensor with two names.
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*memory, tensor.is_conj(), tensor.is_neg())
        first = known.setdefault(key, name) if tensor.numel() else name
        collected[name] = tensor if first == name else first
    return collected


def _check(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"names must be strings, got {name!r}")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"only tensors can be saved: {name!r} is a {type(tensor).__name__}; leave it out, or "
            "put it into the metadata as a string"
        )
    cure = None
    if is_lazy(tensor):
        cure = "is not initialised: run the model once"
    elif hasattr(tensor, "full_tensor"):
        cure = "is sharded: save what full_tensor() gives, on one rank"
    elif hasattr(tensor, "__tensor_flatten__"):
        cure = f"is a {type(tensor).__name__}, not a plain tensor: save a plain one"
    elif tensor.layout != torch.strided:
        cure = f"has the layout {tensor.layout}: save tensor.to_dense(), zeros cost next to nothing"
    elif tensor.is_meta:
        cure = "is on the meta device and has no values: load or initialise it first"
    elif tensor.dtype not in BY_TORCH:
        cure = f"has dtype {tensor.dtype}, which has no place in a file: convert it first"
    elif tensor.ndim > MAX_DIMENSIONS:
        cure = f"has {tensor.ndim} dimensions, more than {MAX_DIMENSIONS}: reshape it"
    if cure:
        raise ValueError(f"{name!r} {cure}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {name!r} is not Unicode text: rename it") from None


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be strings, got {key!r}: {value!r}")
        if key in _OURS or key.startswith(TIED):
            raise ValueError(f"metadata may not have the key {key!r}: it is pdecay's own")
        try:
            (key + value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"metadata must be Unicode text, got {key!r}: {value!r}") from None
    return dict(metadata)
