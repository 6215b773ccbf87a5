"""The work plan of a sparse convolution for one input size, for `sparse_conv.c`.

The kernel computes a strip of pixels of one output channel at a time. The strip stays in vector
registers while the kernel iterates over the channel's non-zero weights. For each weight, it reads
the inputs of all pixels of the strip from one place in memory.

This works because the input is copied ("packed") first, so that the inputs of neighbouring pixels
are neighbours in memory for any stride, dilation and padding. A plan has three parts:

- the layout of the packed input (`_Planes`),
- the offset of each weight's first input in the packed input (`at`),
- blocks of input channels whose packed input fits into the cache.

A linear layer is a convolution of images with one pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from pdecay.deployment.layers.kernel import Plan, integer, lanes_of
from pdecay.deployment.layers.shapes import NonZeros, Shape

_STRIP = 8  # the maximum number of vectors in a strip, as in sparse_conv.c
_CACHE = 32 * 1024  # bytes of packed input that fit into the first-level cache
# Non-zeros per block that a strip of four vectors needs. With fewer, loading and storing the strip
# takes longer than the cache saves.
_MIN_VISIT = 10
# With a separate plane for each column of the convolution kernel, all reads are aligned. The
# additional planes must be packed. That pays off with more than this many non-zeros per plane.
_MIN_ALIGNED = 11


def conv_plan(
    shape: Shape, weight: NonZeros, height: int, width: int, images: int, relu: bool
) -> Plan:
    """Return the plan of a layer for one image size; it is fastest for batches of `images`."""
    dtype = weight.values.dtype
    lanes = lanes_of(dtype)
    taps = _taps(shape, weight)
    planes = _planes(shape, taps, height, width, max(1, images), lanes)
    per_block, blocks = _blocks(shape, taps, planes, lanes, dtype.itemsize)
    at, values, row = _sort_by_block(shape, weight, taps, planes, per_block, blocks)
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
    # With several blocks, partial sums must be stored between blocks: in the output if each strip
    # consists of whole vectors of one image, else in scratch memory.
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
    """The non-zero weights: output channel, input channel, and position in the kernel.

    The positions `y` and `x` are in pixels of the input, so they include the dilation.
    """

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
    """The layout of the packed input. Each channel is copied into planes, see sparse_pack.h.

    Args:
        kind: how the input is packed. "in place": not at all. "pixels": transposed, for images with
            one pixel. "image", "rows" and "line": copied as a whole image, as several rows at once,
            or row by row.
        group: the number of images that are computed together, side by side in a plane.
        band: the number of output rows that are computed together.
        channels: the input channels with non-zero weights.
        channel_index: the index of each weight's input channel in `channels`.
        shift: the horizontal offsets; a channel has a plane for each shift and phase.
        phase: the vertical offsets.
        rows: the number of rows of a plane.
        line: the number of elements of one image in a row.
        size: the number of elements of a plane.
        at: the offset of each weight's first input from the start of its channel's planes.
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
        """The number of planes of a channel."""
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
    # A small image does not fill the registers, so several images are computed side by side.
    group = _even(images, max(1, _STRIP * lanes // numbers))
    band = out_height if group > 1 else _band(out_height, out_width, shape)
    channels, channel_index = torch.unique(taps.channel, return_inverse=True)
    phase, phase_index = torch.unique(taps.y % shape.stride[0], return_inverse=True)
    shift, shift_index = torch.unique(taps.x, return_inverse=True)
    line, in_line = out_width, torch.zeros_like(taps.x)
    fewer, fewer_index = torch.unique(taps.x % shape.stride[1], return_inverse=True)
    aligned = len(taps.x) > _MIN_ALIGNED * len(channels) * (len(shift) - len(fewer))
    if group == 1 and out_width % lanes == 0 and len(shift) > len(fewer) and not aligned:
        # Use one plane for several shifts. Its rows are longer by the width of the kernel.
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
    """Return the size of a part if `count` is divided into equal parts of at most `most`."""
    return math.ceil(count / math.ceil(count / most))


def _band(out_height: int, out_width: int, shape: Shape) -> int:
    """Return the number of output rows in a band.

    Neighbouring bands read some input rows twice. A band is high enough that these are few.
    """
    halo = (shape.kernel[0] - 1) * shape.dilation[0] // shape.stride[0]
    least = max(8, min(16, out_width // 2), 4 * halo)
    return math.ceil(out_height / max(1, out_height // least))


def _blocks(
    shape: Shape, taps: _Taps, planes: _Planes, lanes: int, itemsize: int
) -> tuple[int, int]:
    """Return the number of channels per block and the number of blocks.

    The packed input of a block fits into the cache. A block is larger if the output channels would
    otherwise have too few non-zeros per block.
    """
    channels = len(planes.channels)
    lines = min(_STRIP, math.ceil(planes.band * planes.group * planes.line / lanes))
    each = len(taps.output) / max(1, shape.out_channels * channels)
    least = _MIN_VISIT * max(1, 4 / lines) / each if each else channels
    least = max(1, least, _CACHE / (planes.of_channel * planes.size * itemsize))
    blocks = max(1, int(channels / least))
    return max(1, math.ceil(channels / blocks)), blocks


def _sort_by_block(
    shape: Shape, weight: NonZeros, taps: _Taps, planes: _Planes, per_block: int, blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the offsets and values of the non-zeros, sorted by block, and where outputs start."""
    in_block = planes.channel_index
    if planes.kind != "in place":
        in_block = in_block % per_block
    at = in_block * planes.of_channel * planes.size + planes.at
    if len(at) and int(at.max()) >= 2**31:
        raise ValueError("an image has more than 2^31 elements: split the input")
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
    """Return a mask for each shift: -1 (all bits set) inside the image, 0 in the padding.

    A mask has one more vector than needed, because the kernel reads whole vectors.
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
