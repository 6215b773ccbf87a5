"""Comparison of a model's versions with the original, on the example and on other inputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from pdecay.deployment.layers.modules import SparseLayer
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import difference, fresh_outputs, outputs
from pdecay.deployment.model.state import keeping_attributes
from pdecay.deployment.runtime.layer_choice import Choice

TOLERANCE = 1e-4  # relative to the largest output: rounding errors of another summation order


def check_outputs(
    given: nn.Module, models: Mapping[Choice, nn.Module], inputs: Inputs
) -> tuple[dict[Choice, float], dict[Choice, str]]:
    """Compare models with the given one.

    Returns:
        Each model's largest difference on the example, and the reasons to reject models.
    """
    # A second call that has other outputs rejects a model: it may use its layers in other ways.
    expected = 2 * outputs_of_calls(given, inputs, calls=1)
    errors = {
        name: difference(expected, outputs_of_calls(one, inputs)) for name, one in models.items()
    }
    rejected: dict[Choice, str] = {}
    for name, other in _other_input_errors(given, models, inputs).items():
        error = max(errors[name], other)
        if error > TOLERANCE:
            where = "" if errors[name] > TOLERANCE else " for another size or number"
            rejected[name] = f"its outputs differ by {error:.1e}{where}, more than {TOLERANCE:.0e}"
    return errors, rejected


def outputs_of_calls(model: nn.Module, inputs: Inputs, calls: int = 2) -> list[Tensor]:
    """Return the outputs of calls in a row. The model does not remember them afterwards."""
    with keeping_attributes(model, skip=SparseLayer):
        return [one for _ in range(calls) for one in outputs(model, inputs)]


def _other_input_errors(
    given: nn.Module, models: Mapping[Choice, nn.Module], inputs: Inputs
) -> dict[Choice, float]:
    """Return each model's largest difference for other sizes and numbers than the example's.

    The models run as copies, so that the plans of sparse layers for these sizes are not kept.
    """
    errors: dict[Choice, float] = dict.fromkeys(models, 0.0)
    numbers = inputs.other_numbers()
    for check in (*inputs.other_sizes(), *numbers):
        try:
            expected = fresh_outputs(given, check)
        except Exception:  # the model does not take this size or number
            continue
        for name, one in models.items():
            try:
                error = difference(expected, fresh_outputs(one, check))
            except Exception:
                # A number may choose layers that did not run on the example and do not fit.
                error = 0.0 if any(check is number for number in numbers) else float("inf")
            errors[name] = max(errors[name], error)
    return errors
