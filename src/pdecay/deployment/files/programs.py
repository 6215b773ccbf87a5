"""Programs in files: a model's graph is stored as one more tensor, of bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pdecay.deployment.files.container import FileFormatError
from pdecay.deployment.model.errors import ExportError
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, outputs
from pdecay.deployment.model.state import evaluating
from pdecay.deployment.program import capture, restore

PROGRAM = "pdecay.program"  # the name of the program among the tensors of a file

_MAX_PROGRAM = 1 << 28  # bytes
_TOLERANCE = 1e-4  # relative to the largest element of an output


def with_program(model: object, example: Inputs) -> dict[str, Tensor]:
    """Return the tensors of a model's program and the program itself as a tensor of bytes."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a program needs a torch.nn.Module, got {type(model).__name__}: save a state dict "
            "without example_inputs"
        )
    captured = capture(model, example)
    program = torch.frombuffer(bytearray(captured.program), dtype=torch.uint8)
    state = {PROGRAM: program, **captured.tensors}
    loaded = restored(state)
    with evaluating(model):
        for inputs in (example, *([example.repeated()] if captured.free_batch else [])):
            error = difference(outputs(model, inputs), outputs(loaded, inputs))
            if error > _TOLERANCE:
                raise ExportError(
                    f"the outputs of the recorded program differ by {error:.1e} of the largest "
                    f"element, more than {_TOLERANCE:g}: nothing was written"
                )
    return state


def restored(state: Mapping[str, Tensor]) -> nn.Module:
    """Return the model of a file that has a program; raise FileFormatError if it is invalid."""
    try:
        return restore(state[PROGRAM].numpy().tobytes(), state, _MAX_PROGRAM)
    except ValueError as error:
        raise FileFormatError(str(error)) from error
