"""pdecay's optimizers in the form of torch's own test database, and the accepted differences.

``torch.testing._internal.common_optimizers`` ships with torch. Its `optim_db` lists for each torch
optimizer the settings that torch tests, the settings that must raise an error, and the supported
features. A subject puts PAdam, PSGD or an attached optimizer in the place of torch's class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

import pdecay
from pdecay import Lp, Penalty

with torch.random.fork_rng():
    from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

# torch's module forbids all later changes of torch.backends flags in this process; allow them.
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

INFOS: dict[str, OptimizerInfo] = {info.optim_cls.__name__: info for info in optim_db}
DECAY = Lp(0.8, 1e-2)


@dataclass(frozen=True)
class Subject:
    name: str
    info: OptimizerInfo
    build: Callable[..., Optimizer]
    decays: bool

    @property
    def attached(self) -> bool:
        return self.name.startswith("attach")

    def inputs(self, *, foreach: bool | None = None) -> list[dict[str, Any]]:
        """Return torch's settings for this optimizer; with `foreach`, those that it supports."""
        settings = [dict(given.kwargs) for given in self.info.optim_inputs_func(device="cpu")]
        if foreach is None:
            return settings
        numbers = [s for s in settings if not isinstance(s.get("lr"), torch.Tensor)]
        return [{**s, "foreach": foreach} for s in numbers]

    def without_l2(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings without torch's own L2 decay, which only some classes have."""
        known = inspect.signature(self.info.optim_cls).parameters
        return {**settings, **{key: 0.0 for key in ("weight_decay", "lambd") if key in known}}

    def __str__(self) -> str:
        return f"{self.name}-{'decay' if self.decays else 'none'}"


def _attached(cls: type[Optimizer], decay: Penalty | None) -> Callable[..., Optimizer]:
    def build(params: Any, **settings: Any) -> Optimizer:
        optimizer = cls(params, **settings)
        pdecay.attach(optimizer, decay)
        return optimizer

    return build


def _own(cls: Callable[..., Optimizer], decay: Penalty | None) -> Callable[..., Optimizer]:
    return lambda params, **settings: cls(params, decay=decay, **settings)


# Left out: Muon refuses vectors, LBFGS needs a closure, SparseAdam needs sparse gradients. The
# contract suite covers all three.
ATTACHED = [name for name in INFOS if name not in ("Muon", "LBFGS", "SparseAdam")]
SUBJECTS = [
    subject
    for decay in (None, DECAY)
    for subject in (
        Subject("PAdam", INFOS["AdamW"], _own(pdecay.PAdam, decay), decay is not None),
        Subject("PSGD", INFOS["SGD"], _own(pdecay.PSGD, decay), decay is not None),
        *(
            Subject(
                f"attach({name})",
                INFOS[name],
                _attached(INFOS[name].optim_cls, decay),
                decay is not None,
            )
            for name in ATTACHED
        ),
    )
]


# Numbers that pdecay checks itself, before torch does.
_NUMBER_CHECKS = ("momentum should be between 0 and 1", "weight_decay should > 0")


def difference(check: str, subject: Subject, case: str = "") -> str | None:
    """Return why a check of torch's does not hold for a subject; None if it must hold."""
    own = not subject.attached
    if check == "zero_gradients_change_nothing" and subject.decays:
        return "the decay moves weights without a gradient, as the weight decay of AdamW does"
    if check == "goes_the_right_direction" and subject.decays and "Adadelta" in subject.name:
        return "its default lr is 1, for which this decay is larger than the first updates"
    if check == "resume_from_state_dict_is_deterministic" and "NAdam" in subject.name:
        return "torch loads NAdam's mu_product in the dtype of the weights, so plain NAdam differs"
    if check == "copies_step_alike" and subject.attached and subject.decays:
        return "copy.deepcopy and pickle drop the hooks of every torch optimizer: attach again"
    if check == "complex_equals_pairs_of_reals" and subject.decays:
        return "complex weights decay by their magnitude, real and imaginary part together"
    if check == "errors" and own and case == "invalid param type":
        return "the same TypeError has a shorter message"
    if check == "errors" and own and case in _NUMBER_CHECKS:
        return "the same ValueError has the wording of pdecay's other number checks"
    return None
