"""The state of weights in half precision: what float16 loses, and state kept in float32.

``Optimizer.load_state_dict`` casts all state to the dtype of the weight. The running mean of
squared gradients, which a ranking keeps, is in float32 for every weight. In bfloat16 it would lose
16 bits, and a resumed run would rank other weights first.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
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


def restore_squares(state: dict[Tensor, Any], optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Replace squares that were cast while a checkpoint was loaded by those of the checkpoint.

    Args:
        state: the optimizer's state after loading.
        optimizer: the optimizer that was loaded.
        saved: the checkpoint.
    """
    places = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for place, param in zip(places, params, strict=True):
        exact, loaded = _squares_in(saved["state"].get(place)), _squares_in(state.get(param))
        if exact is not None and loaded is not None and loaded.dtype != torch.float32:
            state[param][SQUARES] = exact.to(loaded.device, torch.float32, copy=True)


def _squares_in(entry: object) -> Tensor | None:
    squares = entry.get(SQUARES) if isinstance(entry, dict) else None
    return squares if isinstance(squares, Tensor) else None
