"""The decay around an update by other code, such as torch's own, in two passes in C.

The first pass copies the weights before the update. The second one, after it, multiplies them by
the factors of the copies, or scales the update. After an update, the caches are full of weights and
state, and each line of Python takes many times as long as usual. What does not change between steps
is therefore kept ready for C: all arguments but the addresses of the weights, which are read before
each pass.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pdecay._optim.kernels import native
from pdecay._optim.kernels.layout import are_plain

_LINE = 64  # bytes; each copy starts with a new line of the cache
_NO_LAYOUT: tuple[int, array[int]] = (-2, array("q"))  # unequal to every layout that is read


class OldWeights:
    """Copies of weights, in memory that is kept for the next ones."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._set_weights([])

    def __deepcopy__(self, memo: dict[int, Any]) -> OldWeights:
        return OldWeights()  # its memory has a meaning only within a step

    def copy(self, weights: list[Tensor]) -> bool:
        """Copy the weights; return False if C cannot read them."""
        # A new tensor may have the id of a freed one: sizes and addresses are read again below.
        if array("Q", map(id, weights)) == self._objects:
            self._weights[:] = weights
        else:
            self._set_weights(weights)
        dtype = self._read()
        if dtype < 0:
            return False
        if self._layout != (dtype, self._sizes):
            self._set_layout(dtype)
        self._call.terms, self._call.threads = 0, torch.get_num_threads()
        return not native.c_library().pdecay_copy(self._reference)

    def decay_(self, terms: native.Terms, rate: float, scales: Sequence[float]) -> bool:
        """Decay the weights, which were updated since :meth:`copy`; see ``native.decay_``.

        Return False, and change nothing, if C cannot read them any more or their sizes changed.
        """
        if self._layout != (self._read(), self._sizes):
            return False
        powers = array("d", [p for p, _ in terms])
        rates = array("d", [rate * lam for _, lam in terms])
        if not any(rates):
            return True
        self._scales[:] = array("d", scales)
        call = self._call
        call.terms, call.threads = len(powers), torch.get_num_threads()
        call.p, call.c = powers.buffer_info()[0], rates.buffer_info()[0]
        native.check_status(native.c_library().pdecay_decay(self._reference))
        increment_version(self._weights)  # as every in-place operation does
        return True

    def scale_updates_(self, means: Sequence[float], power: float, largest: float) -> bool:
        """Scale the updates since :meth:`copy` by ``|old|^power / mean``, at most `largest`.

        Zeros stay zero, and tensors with a mean of 0 keep their update. Return False, and change
        nothing, if the weights are not float32, or as in :meth:`decay_`.
        """
        dtype = self._read()
        if self._layout != (dtype, self._sizes) or native.DTYPES[dtype] != torch.float32:
            return False
        given = array("d", means)
        self._call.terms, self._call.threads = 0, torch.get_num_threads()
        address = given.buffer_info()[0]
        scale = native.c_library().pdecay_scale_updates
        native.check_status(scale(self._reference, address, power, largest))
        increment_version(self._weights)
        return True

    def tensors(self) -> list[Tensor]:
        """Return the copies, valid until the next :meth:`copy`."""
        dtype, sizes = self._layout
        start, found = self._memory.data_ptr(), []
        for weight, size, address in zip(
            self._weights, sizes, self._data[len(sizes) :], strict=True
        ):
            own = self._memory[address - start :][: size * native.DTYPES[dtype].itemsize]
            found.append(own.view(native.DTYPES[dtype]).view(weight.shape))
        return found

    def forget(self, keep: int) -> None:
        """Drop the weights, and the memory of the copies if it has more than `keep` bytes."""
        self._weights.clear()
        if self._memory.numel() > keep:
            self._memory = self._memory.new_empty(0)
            self._layout = _NO_LAYOUT

    def _set_weights(self, weights: list[Tensor]) -> None:
        count = len(weights)
        self._weights = [*weights]  # references, so that the addresses of the objects stay valid
        self._objects = array("Q", map(id, weights))
        self._sizes, self._scales = array("q", bytes(8 * count)), array("d", [1.0]) * count
        self._data = array("Q", bytes(16 * count))  # the addresses of the weights, of the copies
        self._addresses = [
            numbers.buffer_info()[0] for numbers in (self._objects, self._sizes, self._data)
        ]
        self._layout = _NO_LAYOUT
        self._call = native.Call(
            tensors=count,
            sizes=self._addresses[1],
            data=self._addresses[2],
            scales=self._scales.buffer_info()[0],
        )
        self._reference = ctypes.byref(self._call)

    def _read(self) -> int:
        """Read the sizes and addresses of the weights; return their dtype, or -1."""
        if not are_plain(self._weights):
            return -1
        return native.read_tensors(len(self._weights), 1, *self._addresses)

    def _set_layout(self, dtype: int) -> None:
        """Choose the addresses of the copies."""
        offsets, end = [], 0
        for size in self._sizes:
            offsets.append(end)
            end += -(-size * native.DTYPES[dtype].itemsize // _LINE) * _LINE
        if self._memory.numel() < end:
            self._memory = torch.empty(end, dtype=torch.uint8, device="cpu")
        start = self._memory.data_ptr()
        self._data[len(offsets) :] = array("Q", [start + offset for offset in offsets])
        self._layout = (dtype, self._sizes[:])
        self._call.dtype = dtype
