"""A run that is resumed from a checkpoint file is bit-identical to an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import pdecay
from pdecay import PSGD, Every, Lp, PAdam, Slow

ELASTIC = Lp(0.6, 0.05) + Lp(2, 0.1)
OTHER = Lp(3, 0.7)  # the resuming program's own decay, which the checkpoint must override
STEPS, STOP = 24, 11


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler

    def run(self, start: int, stop: int) -> list[float]:
        losses = []
        for t in range(start, stop):
            seeded = torch.Generator().manual_seed(t)
            x = torch.randn(16, 8, generator=seeded)
            y = (x[:, :2] * x[:, 2:4]).sum(1, keepdim=True)

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                return loss

            if isinstance(self.optimizer, torch.optim.LBFGS):
                losses.append(self.optimizer.step(closure).item())
            else:
                losses.append(closure().item())
                self.optimizer.step()
            self.scheduler.step()
        return losses

    def save(self, path: Any) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(self, path: Any) -> None:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda t: min(t / 5, 1.0))


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    momentum = any(key in optimizer.defaults for key in ("momentum", "betas"))
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS, cycle_momentum=momentum)


def attached(cls: type, **flags: Any) -> Callable[..., torch.optim.Optimizer]:
    def build(params: Any, decay: Any, exact: dict[str, Any]) -> torch.optim.Optimizer:
        auxiliary = flags.get("auxiliary")
        optimizer = cls(params, **{k: v for k, v in flags.items() if k != "auxiliary"})
        pdecay.attach(optimizer, decay, auxiliary=auxiliary, **exact)
        return optimizer

    return build


def own(cls: type, **flags: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda params, decay, exact: cls(params, decay=decay, **flags)


BUILDS = {
    "PAdam": own(PAdam, lr=0.05),
    "PAdam foreach amsgrad": own(PAdam, lr=0.05, foreach=True, amsgrad=True),
    "PAdam for-loop L2": own(PAdam, lr=0.05, foreach=False, weight_decay=0.1),
    "PAdam every 3": own(PAdam, lr=0.05, foreach=False, auxiliary=Every(3)),
    "PSGD": own(PSGD, lr=0.1, momentum=0.9),
    "PSGD foreach nesterov": own(PSGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "PSGD slow": own(PSGD, lr=0.1, foreach=False, auxiliary=Slow(0.1)),
    "attach AdamW": attached(torch.optim.AdamW, lr=0.05),
    "attach AdamW, default path": lambda params, decay, exact: attached(torch.optim.AdamW, lr=0.05)(
        params, decay, {}
    ),
    "attach fused AdamW": attached(torch.optim.AdamW, lr=0.05, fused=True),
    "attach AdamW every 3": attached(torch.optim.AdamW, lr=0.05, auxiliary=Every(3)),
    "attach SGD": attached(torch.optim.SGD, lr=0.1, momentum=0.9),
    "attach SGD slow": attached(torch.optim.SGD, lr=0.1, auxiliary=Slow(0.1)),
    "attach NAdam": attached(torch.optim.NAdam, lr=0.05),
    "attach RMSprop": attached(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "attach Adafactor": attached(torch.optim.Adafactor, lr=0.05),
    "attach LBFGS": attached(torch.optim.LBFGS, lr=0.1, max_iter=3),
}


def training(build, schedule, exact, *, decay=ELASTIC, groups=False) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))
    params = pdecay.param_groups(model) if groups else list(model.parameters())
    optimizer = build(params, decay, exact)
    return Training(model, optimizer, schedule(optimizer))


@pytest.mark.parametrize("schedule", [warm_up, one_cycle])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_resumed_run_equals_uninterrupted_run(build, schedule, tmp_path, exact, same):
    groups = build is not BUILDS["attach LBFGS"]  # LBFGS supports one group only
    through = training(build, schedule, exact, groups=groups)
    losses = through.run(0, STEPS)

    first = training(build, schedule, exact, groups=groups)
    first_losses = first.run(0, STOP)
    first.optimizer.param_groups[0]["name"] = "weights"  # unknown keys are preserved
    first.save(tmp_path / "checkpoint.pt")
    del first
    resumed = training(build, schedule, exact, decay=OTHER, groups=groups)
    resumed.run(0, 3)  # state that loading must replace
    resumed.load(tmp_path / "checkpoint.pt")
    assert resumed.optimizer.param_groups[0].pop("name") == "weights"

    assert first_losses + resumed.run(STOP, STEPS) == losses
    assert same(resumed.model.state_dict(), through.model.state_dict())
    assert same(resumed.optimizer.state_dict(), through.optimizer.state_dict())
    undecayed = training(build, schedule, exact, decay=None, groups=groups)
    assert undecayed.run(0, STEPS) != losses


def test_resume_keeps_a_changing_scale(tmp_path, exact, same):
    """Changes of the groups by schedules and users are restored."""

    def fading(part: Training, start: int, stop: int) -> None:
        for t in range(start, stop):
            part.optimizer.param_groups[0]["decay_scale"] *= 0.9
            part.run(t, t + 1)

    build = BUILDS["PAdam for-loop L2"]
    through, first, resumed = (training(build, warm_up, exact, groups=True) for _ in range(3))
    fading(through, 0, STEPS)
    fading(first, 0, STOP)
    first.save(tmp_path / "checkpoint.pt")
    resumed.load(tmp_path / "checkpoint.pt")
    fading(resumed, STOP, STEPS)
    assert same(resumed.model.state_dict(), through.model.state_dict())
    assert resumed.optimizer.param_groups[0]["decay_scale"] == pytest.approx(0.9**STEPS)


@pytest.mark.parametrize("attached", [False, True])
def test_groups_made_from_loaded_weights_are_explained(attached):
    def build(model):
        groups = pdecay.param_groups(model)
        if not attached:
            return pdecay.PSGD(groups, lr=0.1)
        optimizer = torch.optim.SGD(groups, lr=0.1)
        pdecay.attach(optimizer, Lp(0.8, 1e-2))
        return optimizer

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    saved = build(model).state_dict()
    model[1].weight.data.zero_()  # as training may do
    optimizer = build(model)
    with pytest.raises(ValueError, match="create the optimizer before the weights are loaded"):
        optimizer.load_state_dict(saved)
