"""PAdam and PSGD: Adam and SGD with p-norm weight decay.

By default, on the CPU, a C kernel updates and decays in one pass over memory. With an explicit
``foreach`` or ``fused=False``, torch's own function updates the weights. Before it, the decay
factors are computed from the old weights, and after it, the new weights are multiplied by them, in
C for ``foreach=True`` and by torch's own operations for ``foreach=False`` or ``fused=False``. The
results are then bit-identical to those of :func:`pdecay.attach`, with the same `fused`. The
optimizer state is always torch's, so that a checkpoint of ``torch.optim.AdamW`` loads into
:class:`PAdam`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from pdecay._core.auxiliary import Auxiliary, as_plain
from pdecay._core.group_settings import (
    Defaults,
    Group,
    Metric,
    check_metric,
    complete_checkpoint,
    group_with_settings,
    groups_with_settings,
)
from pdecay._core.parameters import warn_of_frozen
from pdecay._core.penalty import Decay, Lp, as_penalty
from pdecay._core.validation import check_number
from pdecay._optim.adam_metric import metric_mean
from pdecay._optim.engine import check_scalar, decay_rate
from pdecay._optim.rounding import State, Streams, run_rounded
from pdecay._optim.settings import (
    check_betas,
    check_flags,
    check_not_scaled,
    check_settings,
    check_weight_decay,
)
from pdecay._optim.state_precision import (
    FLOAT16_CAUSE,
    FLOAT16_REMEDY,
    FLOAT16_ZERO,
    restore_precision,
)
from pdecay._optim.steps import adam_step_, sgd_step_
from pdecay._utils.user_warnings import warn_user

_DEFAULT_DECAY = Lp(1, 1e-2)
_LAYOUT = operator.attrgetter("layout")
_HEALTH_CHECK = "_accelerator_graph_capture_health_check"
if not hasattr(Optimizer, _HEALTH_CHECK):  # its name in older versions of torch
    _HEALTH_CHECK = "_cuda_graph_capture_health_check"


class _Decaying(Optimizer):
    """Common base of PAdam and PSGD: decay settings in the groups, and the loop over groups."""

    _decays = True

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # else torch raises a clear error
            check_flags(param_group)
            if "lr" in param_group:
                check_scalar("lr", param_group["lr"])
            param_group = group_with_settings(param_group, self._defaults())
        super().add_param_group(param_group)
        if "decay" in self.defaults:  # else __init__ is still running, and warns at its end
            warn_of_frozen(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(complete_checkpoint(state_dict, self.param_groups))
        restore_precision(self.state, self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step: the optimizer's own update, then the decay.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        getattr(self, _HEALTH_CHECK)()
        check_not_scaled(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All groups first: raise for a bad setting before any weight changes.
        for group in self.param_groups:
            check_settings(group, self)
        rates = [decay_rate(group, self) for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            self._update(group, rate)
        return loss

    def _update(self, group: Group, rate: float | Tensor) -> None:
        raise NotImplementedError

    def _init_group(self, group: Group, *streams: list[Any]) -> bool:
        """Collect gradients and state; initialise missing state in the layout of torch's own steps.

        torch.compile runs this method instead of tracing it, if it is called with a member of
        `param_groups` and with empty lists.
        """
        collect: Callable[..., bool] = super()._init_group  # type: ignore[misc]
        return collect({**group, "fused": False}, *streams)

    def _rounds(self, group: Group) -> bool:
        """Return whether the group is rounded stochastically; other checkpoints lack the key."""
        return bool(group.get("stochastic_rounding", self.defaults.get("stochastic_rounding")))

    def _defaults(self) -> Defaults:
        """Return the defaults for new groups, from ``self.defaults``, which deepcopy preserves."""
        penalty = as_penalty(self.defaults.get("decay"))
        auxiliary = self.defaults.get("decay_auxiliary", [])
        return Defaults(penalty, auxiliary, self.defaults.get("metric"))

    def _finish_init(
        self,
        defaults: Defaults,
        fused: bool | None,
        foreach: bool | None,
        stochastic_rounding: bool,
    ) -> None:
        own = {"fused": fused, "foreach": foreach, "stochastic_rounding": stochastic_rounding}
        check_flags({**self.defaults, **own})
        if fused and foreach:
            raise ValueError("fused and foreach cannot both be True; set at most one of them")
        # Not passed to torch's constructor: it would reject tensors that torch's own fused kernels
        # do not support, and would tell gradient scalers to leave the unscaling to the optimizer.
        self.defaults["fused"] = fused
        self.defaults["stochastic_rounding"] = stochastic_rounding
        for group in self.param_groups:
            group["fused"] = fused if group.get("fused") is None else group["fused"]
            group.setdefault("stochastic_rounding", stochastic_rounding)
        self.defaults["decay"] = defaults.penalty.pairs() if defaults.penalty else []
        self.defaults["decay_auxiliary"] = defaults.auxiliary
        if defaults.metric is not None:
            self.defaults["metric"] = defaults.metric
        warn_of_frozen(self)


class PAdam(_Decaying, AdamW):
    """Adam with decoupled p-norm weight decay.

    Each step runs the update of ``torch.optim.AdamW``, from ``w_old`` to ``w_tilde``, and then::

        w <- w_tilde / (1 + lr * sum_k lam_k * |w_old|^(p_k - 2))

    Args:
        params: parameters, named parameters, or groups. A group's own ``"decay"`` (an
            :class:`Lp`, a sum of them, or None) overrides the default; in a group without one,
            tensors with fewer than two dimensions do not decay. See :func:`pdecay.param_groups`.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable: as in
            ``torch.optim.AdamW``; `weight_decay` is its L2 decay and off by default.
        fused: True for one pass over memory, in C on the CPU and by ``torch.compile`` on other
            devices; the relative error of its powers is below 2e-5 (2e-6 * p for p > 10). None uses
            the C kernel on the CPU and ``torch.compile`` on CUDA if they are available and neither
            `foreach` nor `capturable` is given. The first step then compiles: 1 to 2 s in C,
            longer with ``torch.compile``, which reports its time to the logger "pdecay" at the
            level INFO. Both results are cached on disk. ``foreach=True`` uses the C kernel for the
            decay only, on the CPU, with the same error. False for torch's own operations, also
            with ``foreach=True``.
        decay: the penalty, :class:`Lp` or a sum of them; None for plain AdamW. A list of [p, lam]
            pairs, as in configuration files, is accepted, too.
        auxiliary: the update rule of s: ``Instant()`` (the default), ``Every(n)`` or
            ``Slow(rate)``.
        metric: how the decay measures a weight. "magnitude" is the paper's ``|w_old|``. "adaptive"
            is its length in Adam's own metric, ``|c * w_old|`` with ``c = sqrt(d / mean(d))`` and
            Adam's denominator ``d = sqrt(v_hat) + eps`` of this step. A weight with small gradients
            then decays faster than one of equal size with large gradients. The mean, over the
            decayed weights of the group, makes lam comparable with "magnitude". It is computed at
            the steps 1, 2, 4, ..., 32 and at every 64th. A weight that never had a gradient soon
            becomes zero. A group may have its own ``"metric"``.
        stochastic_rounding: round bfloat16 weights and their state up or down at random instead of
            to the nearest number, so that small updates are not lost. Steps compute in float32.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = PAdam(model.parameters(), lr=1e-2, decay=Lp(0.8, 1e-2))
        >>> optimizer.param_groups[0]["decay"]
        [[0.8, 0.01]]

    References:
        Outmezguine and Levi, Decoupled Weight Decay for Any p Norm, 2024.
        Kingma and Ba, Adam: A Method for Stochastic Optimization, 2014.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: Decay = _DEFAULT_DECAY,
        *,
        weight_decay: float | Tensor = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        auxiliary: Auxiliary | None = None,
        metric: Metric = "magnitude",
        stochastic_rounding: bool = False,
    ) -> None:
        check_metric(metric)
        defaults = Defaults(as_penalty(decay), as_plain(auxiliary), metric)
        super().__init__(
            groups_with_settings(params, defaults),
            check_scalar("lr", lr),
            check_betas(betas),
            check_number("eps", eps),
            check_weight_decay(weight_decay),  # type: ignore[arg-type]  # AdamW accepts a tensor
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
        )
        self._finish_init(defaults, fused, foreach, stochastic_rounding)
        _warn_of_float16(self)

    def _init_group(self, group: Group, *streams: list[Any]) -> bool:
        """Collect gradients and state; faster than torch's own method once the state exists."""
        params, grads, averages, squares, largest, steps = streams
        found = [param for param in group["params"] if param.grad is not None]
        found_grads = [param.grad for param in found]
        states = [self.state[param] for param in found]
        usual = (
            set(map(_LAYOUT, found_grads)) == {torch.strided}
            and not any(map(Tensor.is_complex, found))
            and isinstance(group["lr"], float)
            and all(states)
        )
        if not usual:
            # AdamW of torch 2.6 takes one more argument.
            more = [] if issubclass(AdamW, Adam) else [group["amsgrad"]]
            return super()._init_group(group, params, grads, *more, *streams[2:])
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []), "step"]
        params += found
        grads += found_grads
        own = [averages, squares, *([largest] if group["amsgrad"] else []), steps]
        for stream, key in zip(own, keys, strict=True):
            stream += [state[key] for state in states]
        return False

    def _update(self, group: Group, rate: float | Tensor) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        exp_avg_sqs: list[Tensor] = []
        max_exp_avg_sqs: list[Tensor] = []
        state_steps: list[Tensor] = []
        streams = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        has_complex = self._init_group(group, *streams)
        mean = metric_mean(streams, group, rate)

        def step(streams: Streams, group: Group, state: State) -> None:
            adam_step_(tuple(streams), group, rate, state, has_complex=has_complex, mean=mean)

        if self._rounds(group):
            run_rounded(step, streams, group, self.state)
        else:
            step(streams, group, self.state)


class PSGD(_Decaying, SGD):
    """SGD with momentum and decoupled p-norm weight decay.

    Each step runs the update of ``torch.optim.SGD``, from ``w_old`` to ``w_tilde``, and then::

        w <- w_tilde / (1 + lr * sum_k lam_k * |w_old|^(p_k - 2))

    Args:
        params: parameters, named parameters, or groups, as in :class:`PAdam`.
        lr, momentum, dampening, nesterov, weight_decay, maximize, foreach: as in
            ``torch.optim.SGD``; `weight_decay` is its L2 term, which is added to the gradient.
        decay, fused, auxiliary, stochastic_rounding: as in :class:`PAdam`; ``decay=None`` is plain
            SGD.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = PSGD(model.parameters(), lr=0.1, momentum=0.9, decay=Lp(1, 1e-3))
        >>> optimizer.param_groups[0]["decay"]
        [[1.0, 0.001]]

    References:
        Outmezguine and Levi, Decoupled Weight Decay for Any p Norm, 2024.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.0,
        dampening: float = 0.0,
        *,
        decay: Decay = _DEFAULT_DECAY,
        nesterov: bool = False,
        weight_decay: float | Tensor = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        auxiliary: Auxiliary | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        defaults = Defaults(as_penalty(decay), as_plain(auxiliary))
        super().__init__(
            groups_with_settings(params, defaults),
            check_scalar("lr", lr),
            check_scalar("momentum", momentum),  # type: ignore[arg-type]  # SGD accepts a tensor
            check_number("dampening", dampening),
            check_weight_decay(weight_decay),
            nesterov,
            maximize=maximize,
            foreach=foreach,
        )
        self._finish_init(defaults, fused, foreach, stochastic_rounding)

    def _update(self, group: Group, rate: float | Tensor) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor | None] = []
        has_sparse_grad = self._init_group(group, params, grads, buffers)

        def step(streams: Streams, group: Group, state: State) -> None:
            params, grads, buffers = streams
            sgd_step_(
                *(params, grads, buffers, group, rate, state), has_sparse_grad=has_sparse_grad
            )

        if self._rounds(group):
            run_rounded(step, (params, grads, buffers), group, self.state)
        else:
            step((params, grads, buffers), group, self.state)
        if group["momentum"] != 0:
            for param, buffer in zip(params, buffers, strict=True):
                self.state[param]["momentum_buffer"] = buffer


def _warn_of_float16(optimizer: Optimizer) -> None:
    """Warn about float16 weights whose update divides by zero, because eps is zero, too."""
    found = [
        group["eps"]
        for group in optimizer.param_groups
        for param in group["params"]
        if param.dtype == torch.float16 and group["eps"] <= FLOAT16_ZERO
    ]
    if found:
        warn_user(
            f"{len(found)} parameters are float16, and eps = {found[0]:g}. {FLOAT16_CAUSE}: "
            f"{FLOAT16_REMEDY}"
        )
