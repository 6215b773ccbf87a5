"""Save a model to a file, and load a file into a model or a state dict."""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import pdecay
from pdecay._utils.user_warnings import warn_user
from pdecay.deployment.files.container import (
    MAX_DIMENSIONS,
    Container,
    FileFormatError,
    check_byte_order,
    prefix_errors,
)
from pdecay.deployment.files.dtypes import BY_TORCH
from pdecay.deployment.files.matching import check_ties, match_targets, tie_key
from pdecay.deployment.files.pretrained import (
    DENSE_WEIGHTS,
    OTHER_WEIGHTS,
    SPARSE_WEIGHTS,
    has_sparse_layers,
    is_pretrained_model,
    weights_in,
    weights_to_save,
    write_config,
)
from pdecay.deployment.files.programs import PROGRAM, check_names, restored, with_program
from pdecay.deployment.files.reader import FORMAT, FORMAT_VERSION, TIED, TensorFile
from pdecay.deployment.files.save_report import SaveReport
from pdecay.deployment.files.table import Row
from pdecay.deployment.files.writer import write_dense, write_sparse
from pdecay.deployment.layers.base import SparseLayer
from pdecay.deployment.model.inputs import Inputs, kept_example
from pdecay.deployment.program import SavedModel

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)

_RESERVED_KEYS = ("format", "format_version", "pdecay_version", "sparsity")


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: PathLike,
    *,
    example_inputs: Any = None,
    metadata: Mapping[str, str] | None = None,
    dense: bool = False,
) -> SaveReport:
    """Write a model's parameters and buffers to a file that omits the zeros.

    For a model of Hugging Face transformers the path is a folder, unless it ends in
    ``.safetensors``. The model's configuration is written next to the weights, and
    :func:`pdecay.integrations.transformers.from_pretrained` loads the folder.

    All tensors of ``state_dict()`` are restored bit by bit, except that -0.0 becomes 0.0. A tensor
    with several names is stored once and stays tied. The file is complete when it appears under
    its name. Besides the model, saving takes about the memory of one tensor.

    With `example_inputs`, and always for a model of :func:`pdecay.deploy` that is not of
    transformers, the file also has the model's program, recorded by ``torch.export`` in eval mode.
    ``load(path, trusted=True)`` then returns a model that runs without the code of its class, for
    any batch size if the model allows it. The program is compared with the model before the file is
    written.

    Args:
        model: a model or a state dict.
        path: the file or folder to write. An existing file is replaced.
        example_inputs: as for :func:`pdecay.deploy`, to save the program too. A deployed model has
            its own example; a model that :func:`load` returned has none and needs one.
        metadata: strings to store in the file. ``"model"`` defaults to the model's class name.
        dense: write an ordinary safetensors file with all zeros, readable without pdecay.

    Returns:
        A report of the stored sizes; ``str()`` formats it as a table.

    Raises:
        ExportError: if the model's program cannot be recorded, or its outputs differ from the
            model's. Nothing is written then.

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
    _check_order("save(model, path)", path)
    path = Path(path)
    if isinstance(model, nn.Module) and is_pretrained_model(model):
        if path.suffix != ".safetensors":
            if example_inputs is not None:
                raise ValueError(
                    f"{path} is a folder, which has a configuration but no program: leave out "
                    "example_inputs, or give a path that ends in .safetensors to save the program"
                )
            return _save_folder(model, path, metadata, dense)
        if path.name == DENSE_WEIGHTS and not dense:
            warnings.warn(
                f"transformers cannot read the sparse file {path} and would initialise the model "
                "at random: save to a folder, or pass dense=True",
                stacklevel=2,
            )
    # Hugging Face models have a configuration, so that their program is saved only if asked for.
    example = None if is_pretrained_model(model) else kept_example(model)
    example = example if example_inputs is None else Inputs.of(example_inputs)
    if example is None and isinstance(model, SavedModel):
        raise ValueError(
            "the model was loaded from a file with its program, which needs an example to be saved "
            "again: give example_inputs, or copy the file; model.state_dict() can be saved without"
        )
    source = model if example is None else with_program(model, example)
    if example is None and is_pretrained_model(model) and has_sparse_layers(model):
        source, _ = weights_to_save(model)  # plain weights, as in a folder
    state = _collect(source)
    if example is None:
        check_names(state)
    header = {"format": "pt"} if dense else {"format": FORMAT, "format_version": FORMAT_VERSION}
    header["pdecay_version"] = pdecay.__version__
    if isinstance(model, nn.Module):
        header["model"] = f"{type(model).__module__}.{type(model).__qualname__}"
    header |= _checked_metadata(metadata or {})
    write = write_dense if dense else write_sparse
    stored, size = write(path, state, header)
    dense_nbytes = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return SaveReport(os.fspath(path), tuple(stored), size, dense_nbytes)


@overload
def load(
    path: PathLike,
    model: None = None,
    *,
    strict: bool = True,
    max_bytes: int | None = None,
    trusted: bool = False,
) -> Any: ...


@overload
def load(path: PathLike, model: Model, *, strict: bool = True) -> Model: ...


def load(
    path: PathLike,
    model: Model | None = None,
    *,
    strict: bool = True,
    max_bytes: int | None = None,
    trusted: bool = False,
) -> Any:
    """Read a file written by :func:`save`, or any other safetensors file.

    The whole file is checked before memory is allocated or a weight is changed. No Python code of
    a file is run. The program of a saved model calls torch's operators, which do not check all
    their arguments, so that it is loaded from trusted files only.

    Args:
        path: the file to read, or the folder of a Hugging Face model.
        model: load the tensors into this model in place, one at a time, and convert them to its
            dtypes and devices.
        strict: raise if names are missing in the model or in the file, as in ``load_state_dict``.
            Shapes must always match.
        max_bytes: the memory that tensors may take when no model is given. The default is 40
            times the file's size, so that a small file cannot exhaust the memory. It suffices up
            to a sparsity of about 98 % in float32. With a model, its shapes are the limit.
        trusted: whether the file is from a source that you trust, such as your own training. A
            trusted file may have a program and take any memory.

    Returns:
        The given `model`. Without one: the saved model if the file has a program, a module for
        inference that needs no code but torch and pdecay; else a state dict of dense tensors on the
        CPU.

    Raises:
        FileFormatError: if the file is damaged, malicious or needs too much memory, or if it has a
            program and is not trusted.
        ValueError: if the file does not fit the model.
    """
    check_byte_order()
    _check_order("load(path, model)", path)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"load needs a torch.nn.Module, got {type(model).__name__}")
    if model is not None and (trusted or max_bytes is not None):
        option = "trusted" if trusted else "max_bytes"
        raise ValueError(f"{option} needs a load without a model: the model's shapes are the limit")
    if trusted and max_bytes is None:
        max_bytes = sys.maxsize
    if os.path.isdir(path):
        path = weights_in(path)
    with prefix_errors(path), TensorFile(path, max_bytes) as file:
        if model is None:
            if PROGRAM in file.names and not trusted:
                raise FileFormatError(
                    "the file has a program, which could harm this process if it was made to: if "
                    "you trust its source, call load(path, trusted=True)"
                )
            file.check_memory()
            file.check_contents()
            state = _state_dict(file)
            return restored(state) if PROGRAM in state else state
        targets = match_targets(path, file, model, strict)
        file.check_contents()
        check_ties(path, file, model, targets)
        _copy_into(file, model, targets)
        return model


def read_metadata(path: PathLike) -> dict[str, str]:
    """Return the metadata strings of a file: the user's and those added by pdecay."""
    with prefix_errors(path), Container(path) as file:
        return dict(file.metadata)


def read_rows(path: PathLike) -> dict[str, Row]:
    """Return the dtypes and shapes of all tensors of a file by name, without their values."""
    with prefix_errors(path), TensorFile(path) as file:
        return {name: file.tensors[file.ties.get(name, name)].row for name in file.names}


def _save_folder(
    model: nn.Module, folder: Path, metadata: Mapping[str, str] | None, dense: bool
) -> SaveReport:
    """Write the folder of a Hugging Face model: first the weights, then the configuration."""
    state, attributes = weights_to_save(model)
    strings = {"model": f"{type(model).__module__}.{type(model).__qualname__}", **(metadata or {})}
    folder.mkdir(parents=True, exist_ok=True)
    written, other = (DENSE_WEIGHTS, SPARSE_WEIGHTS) if dense else (SPARSE_WEIGHTS, DENSE_WEIGHTS)
    report = save(state, folder / written, metadata=strings, dense=dense)
    (folder / other).unlink(missing_ok=True)  # weights of an earlier save
    write_config(model, folder, attributes)
    older = [name for name in OTHER_WEIGHTS if (folder / name).exists()]
    if older and not dense:
        warn_user(
            f"{folder} also has {' and '.join(older)}: transformers would load these weights, not "
            "the sparse ones, without an error; delete the files, or save to another folder"
        )
    return report


def _check_order(signature: str, path: object) -> None:
    """Raise a TypeError if the model was passed in the place of the path."""
    if isinstance(path, nn.Module | Mapping):
        kind = type(path).__name__
        raise TypeError(f"the path is a {kind}: the order of the arguments is {signature}")


def _collect(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor | str]:
    """Return the tensors to write; a tied one is replaced by the first name of its memory."""
    state = source.state_dict() if isinstance(source, nn.Module) else source
    if not isinstance(state, Mapping):
        raise TypeError(f"save needs a model or a state dict, got {type(source).__name__}")
    collected: dict[str, Tensor | str] = {}
    first_names: dict[object, str] = {}
    for name, tensor in state.items():
        _check_saveable(name, tensor)
        first = first_names.setdefault(tie_key(tensor), name)
        collected[name] = tensor if first == name else first
    return collected


def _check_saveable(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"names must be strings, got {name!r}")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"only tensors can be saved: {name!r} is a {type(tensor).__name__}; remove it, or "
            "store it in the metadata as a string"
        )
    problem = None
    if is_lazy(tensor):
        problem = "is not initialised: run the model once"
    elif hasattr(tensor, "full_tensor"):
        problem = "is sharded: save the result of full_tensor() on one rank"
    elif hasattr(tensor, "__tensor_flatten__"):
        problem = f"is a {type(tensor).__name__}: convert it to a plain tensor"
    elif tensor.layout != torch.strided:
        problem = f"has layout {tensor.layout}: save tensor.to_dense(), zeros cost almost nothing"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values: load or initialise it first"
    elif tensor.dtype not in BY_TORCH:
        problem = f"has dtype {tensor.dtype}, which files do not support: convert it first"
    elif tensor.ndim > MAX_DIMENSIONS:
        problem = f"has {tensor.ndim} dimensions, more than {MAX_DIMENSIONS}: reshape it"
    if problem:
        raise ValueError(f"{name!r} {problem}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {name!r} is not valid Unicode: rename it") from None


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be strings, got {key!r}: {value!r}")
        if key in _RESERVED_KEYS or key.startswith(TIED):
            raise ValueError(f"the metadata key {key!r} is reserved by pdecay: rename it")
        try:
            (key + value).encode()
        except UnicodeEncodeError:
            raise ValueError(f"metadata must be valid Unicode, got {key!r}: {value!r}") from None
    return dict(metadata)


def _state_dict(file: TensorFile) -> OrderedDict[str, Tensor]:
    state: OrderedDict[str, Tensor] = OrderedDict()
    for name in file.names:
        tie = file.ties.get(name)
        state[name] = file.load(file.tensors[name]) if tie is None else state[tie]
    return state


@torch.no_grad()
def _copy_into(file: TensorFile, model: nn.Module, targets: Mapping[str, list[Tensor]]) -> None:
    used = {name: group for name, group in targets.items() if group}
    if not _state_is_live(model) or _has_load_hooks(model):
        state: Any = OrderedDict((name, file.load(file.tensors[name])) for name in used)
        state.update((name, state[other]) for name, other in file.ties.items() if other in state)
        # The versions of the modules: without them, modules convert the state as if it were old.
        state._metadata = getattr(model.state_dict(), "_metadata", None)
        model.load_state_dict(state, strict=False)  # names were compared before
        return
    for name, group in used.items():
        _fill(group, file.load(file.tensors[name]))
    for module in model.modules():
        if isinstance(module, SparseLayer):
            module._reset()  # tensors that were made in inference mode have no version


def _fill(targets: list[Tensor], tensor: Tensor) -> None:
    # A separate function, so that the tensor is freed before the next one is loaded.
    for target in {tie_key(target): target for target in targets}.values():
        target.copy_(tensor)


def _state_is_live(model: nn.Module) -> bool:
    """Return whether ``state_dict()`` returns the model's own memory.

    Hooks and extra state may return copies. Such a model must load by ``load_state_dict``.
    """
    own: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    own.update(model.named_parameters(remove_duplicate=False))
    return all(
        isinstance(tensor, Tensor) and name in own and tie_key(tensor) == tie_key(own[name])
        for name, tensor in model.state_dict().items()
        if not isinstance(tensor, Tensor) or tensor.numel()
    )


def _has_load_hooks(model: nn.Module) -> bool:
    """Return whether a module does more in ``load_state_dict`` than to copy tensors.

    It may update what it derived from them. Overrides of torch and of sparse layers do not.
    """
    plain = ("torch.nn.modules.", "pdecay.")
    return not model.load_state_dict.__module__.startswith(plain) or any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or not module._load_from_state_dict.__module__.startswith(plain)
        for module in model.modules()
    )
