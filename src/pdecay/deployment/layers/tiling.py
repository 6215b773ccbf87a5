"""How a sparse convolution's work is cut, for one size of input: what `sparse_conv.c` walks over.

The kernel keeps a strip of an output's pixels in registers and walks the output's non-zeros. A plan
says where each non-zero's input lies (`at`), how the input is packed so that this is one distance
for all pixels, and in which blocks of channels, so that a block stays in the cache next to the
core. A linear layer is a convolution of images of one pixel.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from pdecay.deployment.layers.kernel import Plan, function, integer, lanes_of, library

__all__ = ["NonZeros", "Shape", "convolution", "rows"]

_STRIP = 8  # as in sparse_conv.c: the most lines of a strip
_PICKS = 4  # and the tiles that share a word
_NEAR = 16  # groups of outputs among which a tile's are chosen
_TILE_PAYS = 4  # non-zeros that a tile should have: as many terms of dot products take as long
_CACHE = 32 * 1024  # bytes of packed input that stay close to the core
# What a visit to an output's strip has to be worth: non-zeros, on strips of four lines or more.
_VISIT = 10
# Packing each column of the kernel apart aligns all reads. It pays from so many non-zeros on for
# each plane that is written.
_ALIGNED_PAYS = 11


@dataclass(frozen=True)
class Shape:
    """A layer's geometry, with zeros around its input on the (top, left, bottom, right)."""

    in_channels: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def weights(self) -> int:
        return self.out_channels * (self.in_channels // self.groups) * math.prod(self.kernel)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """The output's height and width."""
        top, left, bottom, right = self.padding
        reach = [self.dilation[i] * (self.kernel[i] - 1) + 1 for i in (0, 1)]
        out_height = (height + top + bottom - reach[0]) // self.stride[0] + 1
        out_width = (width + left + right - reach[1]) // self.stride[1] + 1
        if out_height < 1 or out_width < 1:
            raise ValueError(
                f"the kernel reaches over {reach[0]} x {reach[1]} pixels, more than an input of "
                f"{height} x {width} has with its padding"
            )
        return out_height, out_width


@dataclass(frozen=True)
class NonZeros:
    """A layer's weight: the non-zeros of each output, one output after the other.

    Args:
        values: what they are.
        columns: where they are: indices into an output's weights, flat (int32).
        row: where those of each output begin, and one more, where the last's end (int64).
        bias: one number for each output.
    """

    values: Tensor
    columns: Tensor
    row: Tensor
    bias: Tensor


def rows(shape: Shape, weight: NonZeros, relu: bool) -> Plan:
    """A linear layer on few rows: tiles where the kernel has them and they pay, or dot products."""
    arrays = {"at": weight.columns, "row": weight.row, "value": weight.values, "bias": weight.bias}
    numbers = {"in_channels": shape.in_channels, "out_channels": shape.out_channels, "relu": relu}
    tiles: dict[str, Tensor] = {}
    if library().pdecay_has_tiles() and shape.in_channels >= 2 * lanes_of(weight.values.dtype):
        tiles = _tiles(shape, weight, arrays, numbers)
    # A tile takes as long as half a vector elsewhere for each non-zero, a dot product as a whole.
    work = (8 if tiles else 16) * len(weight.values)
    return Plan("rows", arrays | tiles, work, 0, **numbers)


def _tiles(
    shape: Shape, weight: NonZeros, arrays: dict[str, Tensor], numbers: dict[str, int]
) -> dict[str, Tensor]:
    """The matrix as sparse_tiles.h has it, or nothing where its tiles would hold too little."""
    dtype = weight.values.dtype
    lanes = lanes_of(dtype)
    # Outputs of as many non-zeros come together, but none from afar: two threads would write to
    # the same lines of the cache.
    counts = weight.row.diff()
    near = torch.arange(len(counts)) // (_NEAR * lanes)
    order = torch.argsort(near * (shape.in_channels + 1) + counts, stable=True).int()
    start = torch.zeros(math.ceil(len(order) / lanes) + 1, dtype=torch.int64)
    matrix = Plan("rows", {**arrays, "order": order}, 0, 0, **numbers)
    cut = partial(function("cut", dtype), ctypes.addressof(matrix.struct))
    cut(start.data_ptr(), None, None, None)
    tiles = int(start[-1])
    if len(weight.values) < _TILE_PAYS * tiles:
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


def convolution(
    shape: Shape, weight: NonZeros, height: int, width: int, images: int, relu: bool
) -> Plan:
    """A layer on images of one size; `images` is the number that it is best for."""
    dtype = weight.values.dtype
    lanes = lanes_of(dtype)
    taps = _taps(shape, weight)
    planes = _planes(shape, taps, height, width, max(1, images), lanes)
    per_block, blocks = _blocks(shape, taps, planes, lanes, dtype.itemsize)
    at, values, row = _in_blocks(shape, weight, taps, planes, per_block, blocks)
    arrays = {
        "channel": planes.channels,
        "shift": planes.shift - shape.padding[1],
        "phase": planes.phase - shape.padding[0],
        "mask": _mask(shape, planes, height, width, lanes, dtype),
        "row": row,
        "at": at,
        "value": values,
        "bias": weight.bias,
    }
    block_size = 0
    if planes.kind != "in place":
        block_size = per_block * planes.of_channel * planes.size + _STRIP * lanes
    out_height, out_width = shape.output(height, width)
    # Strips that are not whole vectors of one image wait outside of the output for the next block.
    whole = planes.group == 1 and not planes.band * out_width % lanes
    whole = whole and not out_height * out_width % lanes
    sums_pitch = math.ceil(planes.band * planes.group * planes.line / lanes) * lanes
    scratch = block_size + (0 if whole or blocks == 1 else shape.out_channels * sums_pitch)
    return Plan(
        *("conv", arrays, len(values) * out_height * out_width, scratch * dtype.itemsize),
        in_channels=shape.in_channels,
        height=height,
        width=width,
        out_channels=shape.out_channels,
        out_height=out_height,
        out_width=out_width,
        stride_y=shape.stride[0],
        stride_x=shape.stride[1],
        relu=relu,
        group=planes.group,
        band=planes.band,
        channels=len(planes.channels),
        blocks=blocks,
        per_block=per_block,
        shifts=len(planes.shift),
        phases=len(planes.phase),
        rows=planes.rows,
        line=planes.line,
        plane=planes.size,
        mask_pitch=arrays["mask"].shape[1],
        block_size=block_size,
        sums_pitch=sums_pitch,
        scratch_size=scratch,
        in_place=planes.kind == "in place",
        pixels=planes.kind == "pixels",
        whole_rows=planes.kind == "rows",
        whole_image=planes.kind == "image",
    )


@dataclass(frozen=True)
class _Taps:
    """For each non-zero: its output, the channel that it reads, and how far down and right."""

    output: Tensor
    channel: Tensor
    y: Tensor
    x: Tensor


def _taps(shape: Shape, weight: NonZeros) -> _Taps:
    output = torch.repeat_interleave(torch.arange(shape.out_channels), weight.row.diff())
    of_group = output // max(1, shape.out_channels // shape.groups)
    column = weight.columns.long()
    height, width = shape.kernel
    return _Taps(
        output,
        of_group * (shape.in_channels // shape.groups) + column // (height * width),
        column % (height * width) // width * shape.dilation[0],
        column % width * shape.dilation[1],
    )


_Kind = Literal["in place", "pixels", "image", "rows", "line"]


@dataclass(frozen=True)
class _Planes:
    """How the input lies in memory, and where in a channel's planes each non-zero reads it.

    Args:
        kind: "in place" as it is given; "pixels", transposed; an "image" at once; its "rows" at
            once; or each "line" by itself.
        group, band: the images side by side and the output rows that are computed together.
        channels, channel_index: those that are read; which of them each non-zero reads.
        shift, phase: how far right and down each plane of a channel begins.
        rows, line, size: of a plane: its rows, the numbers of an image in a row, all numbers.
        at: where each non-zero's input begins, from the first plane of its channel on.
    """

    kind: _Kind
    group: int
    band: int
    channels: Tensor
    channel_index: Tensor
    shift: Tensor
    phase: Tensor
    rows: int
    line: int
    size: int
    at: Tensor

    @property
    def of_channel(self) -> int:
        return max(1, len(self.shift) * len(self.phase))


def _planes(shape: Shape, taps: _Taps, height: int, width: int, images: int, lanes: int) -> _Planes:
    out_height, out_width = shape.output(height, width)
    numbers = out_height * out_width
    nothing = torch.zeros(1, dtype=torch.int64)
    kind: _Kind
    as_given = shape.kernel == shape.stride == (1, 1) and not any(shape.padding)
    if as_given and (numbers == 1 or numbers % lanes == 0):
        kind = "pixels" if numbers == 1 else "in place"
        group = 1
        if numbers == 1:
            group = _even(images, _STRIP * lanes)
            group = math.ceil(group / lanes) * lanes
        size = numbers * group
        every = torch.arange(shape.in_channels)
        at = torch.zeros_like(taps.channel)
        return _Planes(
            *(kind, group, out_height, every, taps.channel, nothing, nothing),
            *(out_height, out_width, size, at),
        )
    # Small images are computed side by side, for strips as long as registers can hold.
    group = _even(images, max(1, _STRIP * lanes // numbers))
    band = out_height if group > 1 else _band(out_height, out_width, shape)
    channels, channel_index = torch.unique(taps.channel, return_inverse=True)
    phase, phase_index = torch.unique(taps.y % shape.stride[0], return_inverse=True)
    shift, shift_index = torch.unique(taps.x, return_inverse=True)
    line, in_line = out_width, torch.zeros_like(taps.x)
    fewer, fewer_index = torch.unique(taps.x % shape.stride[1], return_inverse=True)
    aligned = len(taps.x) > _ALIGNED_PAYS * len(channels) * (len(shift) - len(fewer))
    if group == 1 and out_width % lanes == 0 and len(shift) > len(fewer) and not aligned:
        # One plane for several shifts: its rows are as much longer as the kernel is wide.
        shift, shift_index, in_line = fewer, fewer_index, taps.x // shape.stride[1]
        line = out_width + int(in_line.max())
    row = taps.y // shape.stride[0]
    rows = band + (int(row.max()) if len(row) else 0)
    kind = "line"
    if group == 1 and shape.stride == (1, 1) and line == width:
        kind = "image" if band == out_height else "rows"
    spare = 0 if kind == "image" else lanes - 1  # see sparse_pack.h
    size = math.ceil((rows * group * line + spare) / lanes) * lanes
    at = (shift_index * len(phase) + phase_index) * size + row * group * line + in_line
    return _Planes(
        *(kind, group, band, channels, channel_index, shift, phase, rows, line, size, at)
    )


def _even(count: int, most: int) -> int:
    """The size of parts of `count` that are alike, none above `most`."""
    return math.ceil(count / math.ceil(count / most))


def _band(out_height: int, out_width: int, shape: Shape) -> int:
    """Rows of a band: enough that the rows which two bands share are few."""
    halo = (shape.kernel[0] - 1) * shape.dilation[0] // shape.stride[0]
    least = max(8, min(16, out_width // 2), 4 * halo)
    return math.ceil(out_height / max(1, out_height // least))


def _blocks(
    shape: Shape, taps: _Taps, planes: _Planes, lanes: int, itemsize: int
) -> tuple[int, int]:
    """Channels in a block, and blocks: small enough for the cache where a visit is worth it."""
    channels = len(planes.channels)
    lines = min(_STRIP, math.ceil(planes.band * planes.group * planes.line / lanes))
    each = len(taps.output) / max(1, shape.out_channels * channels)
    least = _VISIT * max(1, 4 / lines) / each if each else channels
    least = max(1, least, _CACHE / (planes.of_channel * planes.size * itemsize))
    blocks = max(1, int(channels / least))
    return max(1, math.ceil(channels / blocks)), blocks


def _in_blocks(
    shape: Shape, weight: NonZeros, taps: _Taps, planes: _Planes, per_block: int, blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the non-zeros read and what they are, block by block; where each output's begin."""
    in_block = planes.channel_index
    if planes.kind != "in place":
        in_block = in_block % per_block
    at = in_block * planes.of_channel * planes.size + planes.at
    if len(at) and int(at.max()) >= 2**31:
        raise ValueError("an image of more than 2^31 numbers: split the input")
    values, row = weight.values, weight.row
    if blocks > 1:
        block = planes.channel_index // per_block
        order = torch.argsort(block, stable=True)
        key = (block * (shape.out_channels + 1) + taps.output)[order]
        at, values = at[order], values[order]
        row = torch.searchsorted(key, torch.arange(blocks * (shape.out_channels + 1)))
    return at.int(), values, row


def _mask(
    shape: Shape, planes: _Planes, height: int, width: int, lanes: int, dtype: torch.dtype
) -> Tensor:
    """For each shift, -1 (all ones) where a row's number lies within the image; see sparse_pack.h.

    A vector more, as the kernel reads by vectors.
    """
    x = torch.arange(planes.line) * shape.stride[1]
    x = x + (planes.shift - shape.padding[1])[:, None]
    inside = (x >= 0) & (x < width)
    if planes.kind in ("rows", "image"):
        inside = inside.repeat(1, planes.rows)
    if planes.kind == "image":
        y = torch.arange(planes.rows).repeat_interleave(planes.line) - shape.padding[0]
        inside &= (y >= 0) & (y < height)
    return pad(-inside.to(integer(dtype)), (0, lanes))
