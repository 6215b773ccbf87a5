"""The optimizers of the contract suite, how they are built, and their special properties."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import pdecay
from pdecay import Lp
from pdecay._core.penalty import Penalty

# All kinds of p, and sums; each optimizer is tested with one of them.
PENALTIES = [
    Lp(0.8, 0.5),
    Lp(0, 0.01),
    Lp(1, 0.4),
    Lp(0.5, 0.3),
    Lp(2, 1.0),
    Lp(0.8, 0.2) + Lp(2, 0.5),
    Lp(3, 1.0),
    Lp(1.5, 0.7),
    Lp(0, 1e-3) + Lp(1, 0.1) + Lp(3, 0.1),
]

# Decayed; not decayed (one dimension); decayed; decayed, but without a gradient.
SHAPES = ((6, 5), (5,), (4, 3, 2, 2), (3, 4))
MATRICES = ((6, 5), (4, 3), (3, 4))

LearningRate = float | Callable[[dict[str, Any]], Any] | None


@dataclass(frozen=True)
class Case:
    """One optimizer of the suite.

    Attributes:
        package, name: its package and class name.
        build: constructs the plain optimizer from a list of parameters.
        penalty: the decay to attach.
        shapes: shapes of the parameters; the last one never has a gradient.
        closure: "" if gradients are computed before the step; "closure" if the step computes them;
            "graph" if the step differentiates them again.
        sparse: whether the gradients are sparse.
        lr: the argument ``lr`` of ``attach``.
        inner: returns the wrapped optimizer, to which the decay is attached, for wrappers.
        own: a class of pdecay, which needs no ``attach``; `build` is then its torch equivalent.
        plain_state: whether its state loads with ``weights_only=True``.
        resumes: whether the plain optimizer resumes bit-exactly.
        takes_zero: whether the plain optimizer supports a learning rate of 0.
    """

    package: str
    name: str
    build: Callable[[list[nn.Parameter]], Optimizer]
    penalty: Penalty = PENALTIES[0]
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    closure: str = ""
    sparse: bool = False
    lr: LearningRate = None
    inner: Callable[[Any], Optimizer] = field(default=lambda optimizer: optimizer)
    own: Callable[..., Optimizer] | None = None
    plain_state: bool = True
    resumes: bool = True
    takes_zero: bool = True

    def __str__(self) -> str:
        return f"{self.package}.{self.name}"


class Run:
    """Training of one case: parameters, optimizer, and steps that are deterministic in t."""

    def __init__(self, case: Case, build: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.case = case
        seeded = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(s, generator=seeded) / 2) for s in case.shapes]
        with torch.no_grad():
            self.params[0][0] = 0.0
            self.params[0][-1, -1] = -0.0
        self.optimizer = build(self.params)
        self.decaying = case.inner(self.optimizer)

    def step(self, t: int, *, skip: tuple[int, ...] = ()) -> None:
        """Run step t, in which the parameters `skip` and the last one have no gradient."""
        torch.manual_seed(t)

        @torch.enable_grad()
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            seeded = torch.Generator().manual_seed(1000 + t)
            loss = torch.zeros(())
            for i, param in enumerate(self.params[:-1]):
                target = torch.randn(param.shape, generator=seeded)
                rows = torch.randint(len(param), (3,), generator=seeded)
                if i in skip:
                    continue
                if self.case.sparse:
                    looked_up = nn.functional.embedding(rows, param, sparse=True)
                    loss = loss + ((looked_up - target[rows]) ** 2).sum()
                else:
                    loss = loss + ((param - target) ** 2).sum()
            loss.backward(create_graph=self.case.closure == "graph")
            return loss

        if self.case.closure == "closure":
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
            if self.case.closure == "graph":  # break the reference cycles of the graph
                for param in self.params:
                    if param.grad is not None:
                        param.grad = param.grad.detach()

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.params]


def plain(case: Case) -> Run:
    """Return a run of the optimizer without decay."""
    return Run(case, case.build)


def attached(case: Case, exact: dict[str, Any], penalty: Penalty | None = None) -> Run:
    """Return a run of the optimizer with the decay of this package."""
    penalty = case.penalty if penalty is None else penalty
    if case.own is not None:
        return Run(case, lambda params: case.own(params, decay=penalty))
    run = plain(case)
    run.handle = pdecay.attach(run.decaying, penalty, lr=case.lr, **exact)
    return run


def literal(case: Case) -> Run:
    """Return a run of the optimizer with the paper's literal decay: copy, step, multiply."""
    run = plain(case)
    own_step = run.decaying.step

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        w_old = {param: param.detach().clone() for param in params}
        loss = own_step(*args, **kwargs)
        for group in optimizer.param_groups:
            lr = group["lr"] if case.lr is None else case.lr
            if callable(lr):
                lr = lr(group)
            for param in group["params"]:
                if param.grad is not None and param.ndim >= 2:
                    with torch.no_grad():
                        param.mul_(case.penalty.factor(w_old[param], lr))
        return loss

    run.decaying.step = MethodType(step, run.decaying)
    return run


def _torch_cases() -> list[Case]:
    """Return all optimizers of torch.optim, found by inspection so that new ones are included."""
    peculiar: dict[str, dict[str, Any]] = {
        "Adadelta": {"build": lambda params: torch.optim.Adadelta(params, lr=0.1)},
        "LBFGS": {"closure": "closure", "build": lambda p: torch.optim.LBFGS(p, lr=0.1)},
        "Muon": {"shapes": MATRICES},
        "SGD": {"build": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)},
        "SparseAdam": {"sparse": True, "shapes": MATRICES},
    }
    return [
        Case(**{"package": "torch.optim", "name": name, "build": cls, **peculiar.get(name, {})})
        for name, cls in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(cls, Optimizer) and cls is not Optimizer
    ]


def _own_cases() -> list[Case]:
    """Return PAdam and PSGD, each with torch's optimizer, as for-loop and as foreach."""
    cases = []
    for kind, foreach in (("for-loop", False), ("foreach", True)):
        cases += [
            Case(
                "pdecay",
                f"PAdam[{kind}]",
                lambda params, f=foreach: torch.optim.AdamW(
                    params, lr=0.02, weight_decay=0.0, foreach=f
                ),
                own=lambda params, decay, f=foreach: pdecay.PAdam(
                    params, lr=0.02, decay=decay, foreach=f, fused=False
                ),
            ),
            Case(
                "pdecay",
                f"PSGD[{kind}]",
                lambda params, f=foreach: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=f),
                own=lambda params, decay, f=foreach: pdecay.PSGD(
                    params, lr=0.05, momentum=0.9, decay=decay, foreach=f, fused=False
                ),
            ),
        ]
    return cases


def _third_party_cases() -> list[Case]:
    """Return optimizers of pytorch_optimizer that accept a list of parameters, and wrappers."""
    po = pytorch_optimizer

    def split(cls: type) -> Callable[[list[nn.Parameter]], Optimizer]:
        return lambda params: cls(
            [
                {"params": [p for p in params if p.ndim >= 2], "use_muon": True},
                {"params": [p for p in params if p.ndim < 2], "use_muon": False},
            ]
        )

    def around_adam(cls: type) -> Callable[[list[nn.Parameter]], Optimizer]:
        return lambda params: cls(torch.optim.Adam(params, lr=0.02))

    def over_sgd(cls: type) -> Callable[[list[nn.Parameter]], Optimizer]:
        return lambda params: cls(params, base_optimizer=torch.optim.SGD, lr=0.05)

    def found_rate(group: dict[str, Any]) -> float:
        return group["d"] * group["lr"]

    def training(
        build_it: Callable[[list[nn.Parameter]], Any],
    ) -> Callable[[list[nn.Parameter]], Optimizer]:
        def build(params: list[nn.Parameter]) -> Optimizer:
            optimizer = build_it(params)
            optimizer.train()
            return optimizer

        return build

    with_iterations = {"num_iterations": 50}
    wrapped = {"inner": lambda wrapper: wrapper.optimizer}
    peculiar: dict[str, dict[str, Any]] = {
        "A2Grad": {"lr": 0.01},
        "AdaGO": {"build": split(po.AdaGO)},
        "AdaHessian": {"closure": "graph"},
        "AdaMuon": {"build": split(po.AdaMuon)},
        "AdaShift": {"plain_state": False},  # a deque
        "ASGD": {"takes_zero": False},  # divides by its learning rate, as FTRL and Gravity do
        "AliG": {"lr": lambda group: float(group.get("step_size", 0.0)), "closure": "closure"},
        "Conda": {"plain_state": False},  # its state contains a projector object
        "DAdaptAdaGrad": {"lr": found_rate},
        "DAdaptAdam": {"lr": found_rate},
        "DAdaptAdan": {"lr": found_rate},
        "DAdaptLion": {"lr": found_rate},
        "DAdaptSGD": {"lr": found_rate},
        "FTRL": {"takes_zero": False},
        "FriendlySAM": {"build": over_sgd(po.FriendlySAM), "closure": "closure", "resumes": False},
        "Gravity": {"takes_zero": False},
        "LBFGS": {"closure": "closure"},
        "LookSAM": {"build": over_sgd(po.LookSAM), "closure": "closure"},
        "Lookahead": {"build": around_adam(po.Lookahead), **wrapped},
        "Magma": {"build": around_adam(po.Magma), **wrapped},
        "Muon": {"build": split(po.Muon)},
        "NorMuon": {"build": split(po.NorMuon)},
        "OrthoGrad": {"build": around_adam(po.OrthoGrad), **wrapped},
        "PCGrad": {"build": around_adam(po.PCGrad)},
        "Prodigy": {"lr": found_rate},
        "Ranger21": {"build": lambda params: po.Ranger21(params, **with_iterations)},
        "SAM": {"build": over_sgd(po.SAM), "closure": "closure", "resumes": False},
        "ScalableShampoo": {"plain_state": False},  # its state contains preconditioner objects
        "ScheduleFreeAdamW": {"build": training(po.ScheduleFreeAdamW)},
        "ScheduleFreeRAdam": {"build": training(po.ScheduleFreeRAdam)},
        "ScheduleFreeSGD": {"build": training(po.ScheduleFreeSGD)},
        "ScheduleFreeWrapper": {
            "build": training(around_adam(po.ScheduleFreeWrapper)),
            **wrapped,
        },
        "SophiaH": {"closure": "graph"},
    }
    return [
        Case(**{"package": "pytorch_optimizer", "name": name, "build": getattr(po, name), **own})
        for name in THIRD_PARTY
        for own in [peculiar.get(name, {})]
    ]


# Not tested: AdaLOMO and LOMO (they step inside backward()), AdamMini, GSAM and WSAM (they need the
# model), BSAM (needs all gradients), DeMo and DistributedMuon (need a process group), LoRARite
# (needs pairs of factors), MuonClip (needs query and key of attention), SafeFP16Optimizer (needs
# half precision), TRAC (its first updates are too small for float32), and Kron, SCION, SCIONLight
# and SpectralSphere (up to a second a step).
THIRD_PARTY = """
A2Grad ADOPT APOLLO ASGD AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGC AdaGO
AdaHessian AdaMax AdaMod AdaMuon AdaNorm AdaPNM AdaShift AdaSmooth AdaTAM Adai Adalite Adam AdamC
AdamG AdamP AdamS AdamW AdamWSN Adan AggMo Aida AliG Alice Amos Ano ApolloDQN AvaGrad BCOS CAME
Conda DASH DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD DiffGrad DualAdam EXAdam EmoFact
EmoLynx EmoNavi FAdam FOCUS FTRL Fira FlashAdamW FriendlySAM Fromage GaLore Grams Gravity
GrokFastAdamW Kate LARS LBFGS LaProp Lamb Lion LookSAM Lookahead MADGRAD MARS MSVAG Magma Muon NAdam
Nero NorMuon NovoGrad OrthoGrad PAdam PCGrad PID PNM Prodigy QHAdam QHM RACS RAdam RMSprop ROSE
Ranger Ranger21 SAM SGD SGDP SGDSaI SGDW SM3 SOAP SPAM SPlus SRMM SWATS SaRA ScalableShampoo
ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD ScheduleFreeWrapper Shampoo SignSGD
SimplifiedAdEMAMix SophiaH StableAdamW StableSPAM TAM Tiger VSGD Yogi
""".split()  # noqa: SIM905 (a list would take 120 lines)

CASES = [
    replace(case, penalty=PENALTIES[i % len(PENALTIES)])
    for i, case in enumerate([*_torch_cases(), *_own_cases(), *_third_party_cases()])
]
