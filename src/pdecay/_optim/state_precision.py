"""The state of weights in half precision: what float16 loses, and state kept in float32.

``Optimizer.load_state_dict`` casts all state to the dtype of the weight. The running mean of
squared gradients, which a ranking keeps, is in float32 for every weight. In bfloat16 it would lose
16 bits, and a resumed run would rank other weights first. The anchors of a slow auxiliary variable
are in float32 for weights in half precision.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

FLOAT16_ZERO = 2.0**-25  # float16 rounds numbers up to this one, about 3e-8, to zero
FLOAT16_CAUSE = (
    "In float16, squared gradients and eps below 3e-8 are zero, and Adam divides by them"
)
FLOAT16_REMEDY = (
    "keep float32 weights and use autocast and a GradScaler (Lightning: '16-mixed' instead of "
    "'16-true'), or use bfloat16"
)

SQUARES = "squared_gradient"  # the key in ``optimizer.state[param]``; see _sparsity/metric.py
_KEPT = (SQUARES, "anchor")  # see _core/anchors.py


def restore_precision(
    state: dict[Tensor, Any], optimizer: Optimizer, saved: dict[str, Any]
) -> None:
    """Replace state that was cast while a checkpoint was loaded by that of the checkpoint.

    Args:
        state: the optimizer's state after loading.
        optimizer: the optimizer that was loaded.
        saved: the checkpoint.
    """
    places = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for place, param in zip(places, params, strict=True):
        for key in _KEPT:
            exact, loaded = _tensor(saved["state"].get(place), key), _tensor(state.get(param), key)
            if exact is None or loaded is None or loaded.dtype.itemsize >= exact.dtype.itemsize:
                continue
            state[param][key] = exact.to(loaded.device, copy=True)


def _tensor(entry: object, key: str) -> Tensor | None:
    tensor = entry.get(key) if isinstance(entry, dict) else None
    return tensor if isinstance(tensor, Tensor) else None
