"""Random contents of files, and the comparison of what was saved and loaded."""

from __future__ import annotations

import torch

from pdecay.deployment.files.dtypes import BY_TORCH, to_array


def bits_with_positive_zeros(tensor):
    """Return the tensor's bits with -0.0 replaced by 0.0, as after a round trip."""
    dtype = BY_TORCH[tensor.dtype]
    bits = to_array(tensor).copy()
    bits[~dtype.nonzero(bits)] = 0
    return bits


def check_same(state, back):
    assert list(back) == list(state)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].is_contiguous()
        assert not back[name].requires_grad
        found, expected = to_array(back[name]), bits_with_positive_zeros(tensor)
        assert found.tobytes() == expected.tobytes()


def random_bits(shape, dtype, share, seed):
    """Return random bits, including NaNs, infinities and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.Size(shape).numel())
    bits = torch.randint(0, 256, (size, dtype.itemsize), dtype=torch.uint8, generator=generator)
    bits[torch.rand(size, generator=generator) >= share] = 0
    if dtype.is_floating_point and size:
        bits[::3, -1] |= 128
    if dtype == torch.bool:
        bits = (bits > 127).to(torch.uint8)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return bits.reshape(-1).view(dtype).view(shape)
