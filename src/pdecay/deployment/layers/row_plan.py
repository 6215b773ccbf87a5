"""The work plan of a linear layer on few rows, for `sparse_conv.c`.

With few rows there are too few pixels to fill vector registers. The matrix is cut into tiles
instead (see sparse_tiles.h). A tile holds one non-zero of each of as many outputs as a vector has
lanes. If tiles would be mostly empty, or are not supported, each output is a dot product.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial

import torch
from torch import Tensor

from pdecay.deployment.layers.kernel import Plan, function, integer, lanes_of, library
from pdecay.deployment.layers.shapes import NonZeros, Shape

_PICKS = 4  # as in sparse_conv.c: tiles that share a word of indices
_NEIGHBOURHOOD = 16  # groups of outputs within which tiles are formed
_MIN_TILE_FILL = 4  # a tile with fewer non-zeros is slower than dot products


def row_plan(shape: Shape, weight: NonZeros, relu: bool) -> Plan:
    """Return the plan of a linear layer on few rows: tiles if they are dense enough."""
    arrays = {"at": weight.columns, "row": weight.row, "value": weight.values, "bias": weight.bias}
    numbers = {"in_channels": shape.in_channels, "out_channels": shape.out_channels, "relu": relu}
    tiles: dict[str, Tensor] = {}
    if library().pdecay_has_tiles() and shape.in_channels >= 2 * lanes_of(weight.values.dtype):
        tiles = _tiles(shape, weight, arrays, numbers)
    # Per non-zero, a tile costs about half a vector operation, a dot product a whole one.
    work = (8 if tiles else 16) * len(weight.values)
    return Plan("rows", arrays | tiles, work, None, **numbers)


def _tiles(
    shape: Shape, weight: NonZeros, arrays: dict[str, Tensor], numbers: dict[str, int]
) -> dict[str, Tensor]:
    """Return the matrix in the tiles of sparse_tiles.h; empty if they would be mostly zeros."""
    dtype = weight.values.dtype
    lanes = lanes_of(dtype)
    # Group outputs with similar numbers of non-zeros. Sort only within a neighbourhood, so that two
    # threads do not write to the same cache line.
    counts = weight.row.diff()
    neighbourhood = torch.arange(len(counts)) // (_NEIGHBOURHOOD * lanes)
    order = torch.argsort(neighbourhood * (shape.in_channels + 1) + counts, stable=True).int()
    start = torch.zeros(math.ceil(len(order) / lanes) + 1, dtype=torch.int64)
    matrix = Plan("rows", {**arrays, "order": order}, 0, None, **numbers)
    cut = partial(function("cut", dtype), ctypes.addressof(matrix.struct))
    cut(start.data_ptr(), None, None, None)
    tiles = int(start[-1])
    if len(weight.values) < _MIN_TILE_FILL * tiles:
        return {}
    base = torch.zeros(tiles, dtype=torch.int32)
    pick = torch.zeros(tiles // _PICKS * lanes, dtype=integer(dtype))
    value = torch.zeros(tiles * lanes, dtype=dtype)
    cut(start.data_ptr(), base.data_ptr(), pick.data_ptr(), value.data_ptr())
    return {
        "order": order,
        "tile_start": start,
        "tile_base": base,
        "tile_pick": pick,
        "tile_value": value,
    }
