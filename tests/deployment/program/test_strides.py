"""Programs for inputs with other strides than the example's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pdecay


class Frames(nn.Module):
    """Overlapping frames of a signal, cut out by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 5)

    def forward(self, signal: Tensor) -> Tensor:
        count, step = 1 + (signal.shape[0] - 40) // 16, signal.stride(0)
        output: Tensor = self.layer(signal.as_strided((count, 40), (16 * step, step)))
        return output


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 4, 3), nn.Linear(144, 2)

    def forward(self, image: Tensor) -> Tensor:
        y = self.conv(image).contiguous()
        output: Tensor = self.layer(y.view(y.shape[0], -1))
        return output


PLAIN, STEREO = torch.randn(400), torch.randn(400, 2)
CHANNELS_FIRST, CHANNELS_LAST = torch.randn(2, 3, 8, 8), torch.randn(2, 8, 8, 3)


@pytest.mark.parametrize("example", [PLAIN, STEREO[:, 0]])
def test_strides_do_not_change_frames(tmp_path, example):
    model = Frames()
    pdecay.save(model, tmp_path / "model.safetensors", example_inputs=example)
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    for signal in (PLAIN, STEREO[:, 1], STEREO[:200, 1], PLAIN[::2]):
        torch.testing.assert_close(loaded(signal), model(signal))


@pytest.mark.parametrize("example", [CHANNELS_FIRST, CHANNELS_LAST.permute(0, 3, 1, 2)])
def test_program_takes_images_of_any_memory_format(tmp_path, example):
    model = Image()
    pdecay.save(model, tmp_path / "model.safetensors", example_inputs=example)
    loaded = pdecay.load(tmp_path / "model.safetensors", trusted=True)
    permuted = CHANNELS_LAST.permute(0, 3, 1, 2)
    for image in (CHANNELS_FIRST, permuted, permuted[:1], CHANNELS_FIRST.transpose(2, 3)):
        torch.testing.assert_close(loaded(image), model(image))
