"""Programs in files: a model's graph is stored as one more tensor, of bytes."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from pdecay._utils.errors import one_line
from pdecay.deployment.files.container import FileFormatError
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import (
    difference,
    fresh_outputs,
    outputs,
    outputs_of_two_calls,
    without_writes_to,
)
from pdecay.deployment.model.program import Free
from pdecay.deployment.model.state import evaluating, keeping_buffers, shared_copy
from pdecay.deployment.program import Captured, SavedModel, capture, restore
from pdecay.deployment.program.sizes import ASSUMED, check_sizes
from pdecay.deployment.program.structure import assemble, describe

PROGRAM = "pdecay.program"  # the name of the program among the tensors of a file

# Bytes of the decompressed JSON, about 80,000 calls. Its Python objects take up to 30 times as much
# memory, whatever the size of the compressed file.
_MAX_PROGRAM = 1 << 22
_TOLERANCE = 1e-4  # relative to the largest element of an output


def check_names(names: Container[str]) -> None:
    """Raise a ValueError if a tensor has the name of the program."""
    if PROGRAM in names:
        raise ValueError(
            f"a tensor is named {PROGRAM!r}, the name of the program of a saved model: rename it"
        )


def with_program(model: object, example: Inputs) -> dict[str, Tensor]:
    """Return the tensors of a model's program and the program itself as a tensor of bytes."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a program needs a torch.nn.Module, got {type(model).__name__}: save a state dict "
            "without example_inputs"
        )
    with without_writes_to(model, ExportError), keeping_buffers(model):
        # Run a copy: a run with another size may grow the model's caches.
        try:
            copied = shared_copy(model)
        except Exception as error:
            raise ExportError(
                f"the model cannot be copied ({one_line(error)}): remove attributes that hold "
                "tensors with a gradient history, for instance torch.nn.utils.prune.remove(layer, "
                "'weight')"
            ) from error
        return _program_of(copied, example)


def _program_of(model: nn.Module, example: Inputs) -> dict[str, Tensor]:
    ways: tuple[Free, ...] = ("all", "batch", "none")
    for free in ways:
        try:
            captured = capture(model, example, free)
            if captured.program_size > _MAX_PROGRAM:
                raise ExportError(
                    f"the program has {captured.program_size:,} bytes, more than {_MAX_PROGRAM:,}: "
                    "save the parts of the model separately, or the weights without example_inputs"
                )
            check_names(captured.tensors)
            loaded = restored(_state(captured))
            captured = captured.with_least(_least_sizes(model, loaded, example))
            loaded.sizes = captured.content["sizes"]
            _compare(model, loaded, example)
            return _state(captured)
        except ExportError:
            if free == "none":
                raise
    raise AssertionError


def _state(captured: Captured) -> dict[str, Tensor]:
    program = torch.frombuffer(bytearray(captured.program), dtype=torch.uint8)
    return {PROGRAM: program, **captured.tensors}


def _least_sizes(model: nn.Module, loaded: SavedModel, example: Inputs) -> dict[str, int]:
    """Return the least number for each free size of a program, by name.

    torch.export does not record what the code does for a size of 1. It is allowed if the program's
    outputs are the model's there, for each size alone, if both take it alone, and for all
    together. Empty inputs are not tried, since some operators of torch crash on them; they are
    allowed where a size of 1 is.
    """
    names = list(loaded.sizes["ranges"]) if loaded.sizes else []
    with evaluating(model):
        same = {name: _same_at_one(model, loaded, example, [name]) for name in names}
        allowed = [name for name in names if same[name]]
        # Code may take a single row of a mask only if the other inputs have one row, too.
        others = [name for name in names if same[name] is not False]
        if _same_at_one(model, loaded, example, others):
            allowed = others
        elif _same_at_one(model, loaded, example, allowed) is False:
            allowed = []
    return {name: 0 if name in allowed else ASSUMED for name in names}


def _same_at_one(
    model: nn.Module, loaded: SavedModel, example: Inputs, names: list[str]
) -> bool | None:
    """Return whether a program refuses a size of 1 for these free sizes, or returns the same.

    Return None if the model does not take it, or if the program fails for a single free size: it
    may have to be equal to another.
    """
    assert loaded.sizes is not None
    tensors: list[Tensor] = []
    structure = describe([list(example.args), example.kwargs], tensors, "example_inputs")
    pairs = zip(tensors, loaded.sizes["shapes"], strict=True)
    given = [_first(tensor, sizes, names) for tensor, sizes in pairs]
    try:
        check_sizes(loaded.sizes, given)
    except ValueError:
        return True
    args, kwargs = assemble(structure, given)
    inputs = Inputs(tuple(args), kwargs)
    try:
        expected = fresh_outputs(model, inputs)
    except Exception:
        return None
    try:
        return difference(expected, outputs(loaded, inputs)) <= _TOLERANCE
    except Exception:
        return None if len(names) == 1 else False


def _first(tensor: Tensor, sizes: list[int | str], names: list[str]) -> Tensor:
    """Return the first position along the axes of these names."""
    for axis, name in enumerate(sizes):
        tensor = tensor.narrow(axis, 0, 1) if name in names else tensor
    return tensor


def _compare(model: nn.Module, loaded: nn.Module, example: Inputs) -> None:
    """Raise ExportError if a loaded program returns other outputs than its model.

    Sizes that the model or the program does not take are skipped, except the example's.
    """
    with evaluating(model):
        for inputs in (example, *example.other_sizes()):
            try:
                expected = outputs_of_two_calls(shared_copy(model), inputs)
            except Exception:
                continue
            try:
                error = difference(expected, outputs_of_two_calls(loaded, inputs))
            except Exception as refused:
                if inputs is not example and isinstance(refused, ValueError):
                    continue
                raise ExportError(f"the recorded program fails: {one_line(refused)}") from refused
            if error > _TOLERANCE:
                raise ExportError(
                    f"the outputs of the recorded program differ by {error:.1e} of the largest "
                    f"element, more than {_TOLERANCE:g}, in two calls: nothing was written. A "
                    "program remembers only what the model writes into its buffers in place, such "
                    "as self.state.copy_(new)"
                )


def restored(state: Mapping[str, Tensor]) -> SavedModel:
    """Return the model of a file that has a program; raise FileFormatError if it is invalid."""
    try:
        return restore(state[PROGRAM].numpy().tobytes(), state, _MAX_PROGRAM)
    except ValueError as error:
        raise FileFormatError(str(error)) from error
