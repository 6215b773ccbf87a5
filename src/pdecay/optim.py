"""PAdam and PSGD: Adam and SGD with the decay step inside the update, no copy of the weights.

Each is torch's own optimizer, state and arithmetic included, with three lines around the update of
a tensor: the factor from the old weights, the update, the multiplication. So a checkpoint of
``torch.optim.AdamW`` loads into :class:`PAdam`, and the results are those of :func:`pdecay.attach`
to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT, _default_to_fused_or_foreach
from torch.optim.sgd import sgd

from pdecay import settings
from pdecay.auxiliary import Auxiliary, as_plain, decay_at_anchor_
from pdecay.groups import warn_of_frozen
from pdecay.penalty import Lp, Penalty, as_penalty, check_number
from pdecay.settings import Defaults, Group
from pdecay.step import check_rate, effective_rate, factors, multiply_

_DEFAULT_DECAY = Lp(1, 1e-2)


class _Decaying(Optimizer):
    """What PAdam and PSGD share: the settings in their groups, and the loop over the groups."""

    _decays = True

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):  # else torch has the clear error
            param_group = dict(param_group)
            settings.write(param_group, self._defaults())
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(settings.completed(state_dict, self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step: the optimizer's own update, then the decay.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Every rate is asked for first: a bad one is an error before any weight moves.
        rates = [effective_rate(group, self) for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            self._update(group, rate)
        return loss

    def _update(self, group: Group, rate: float | Tensor) -> None:
        raise NotImplementedError

    def _defaults(self) -> Defaults:
        """From ``self.defaults``, since those are what deepcopy and pickle keep."""
        penalty = as_penalty(self.defaults.get("decay"))
        return Defaults(penalty, self.defaults.get("decay_auxiliary", []))

    def _finish_init(self, defaults: Defaults) -> None:
        self.defaults["decay"] = defaults.penalty.pairs() if defaults.penalty else []
        self.defaults["decay_auxiliary"] = defaults.auxiliary
        warn_of_frozen(self)


class PAdam(_Decaying, AdamW):
    """Adam with decoupled p-norm weight decay.

    The update is that of ``torch.optim.AdamW``, after which

        w <- w_tilde / (1 + lr * sum_k lam_k * |w_old|^(p_k - 2)) .

    Args:
        params: parameters, named parameters, or groups. A group's own ``"decay"`` (an
            :class:`Lp`, a sum of them, or None) overrides the default; in a group without one,
            tensors with fewer than two dimensions are spared. See :func:`pdecay.param_groups`.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable: as in
            ``torch.optim.AdamW``; `weight_decay` is its L2 decay and off by default.
        decay: the penalty, :class:`Lp` or a sum of them; None for plain AdamW.
        auxiliary: how s follows the weights: ``Instant()``, ``Every(n)`` or ``Slow(rate)``.

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
        decay: Penalty | None = _DEFAULT_DECAY,
        *,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        defaults = Defaults(as_penalty(decay), as_plain(auxiliary))
        super().__init__(
            settings.with_settings(params, defaults),
            check_rate(lr),
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
        )
        self._finish_init(defaults)

    def _update(self, group: Group, rate: float | Tensor) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        exp_avg_sqs: list[Tensor] = []
        max_exp_avg_sqs: list[Tensor] = []
        state_steps: list[Tensor] = []
        has_complex = self._init_group(
            group, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        )
        beta1, beta2 = group["betas"]
        foreach = _use_foreach(params, group)
        for part in _parts(params, foreach):
            decay = _Decay(params[part], group, rate, foreach)
            adam(
                params[part],
                grads[part],
                exp_avgs[part],
                exp_avg_sqs[part],
                max_exp_avg_sqs[part],
                state_steps[part],
                foreach=foreach,
                fused=False,
                capturable=group["capturable"],
                differentiable=False,
                has_complex=has_complex,
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                decoupled_weight_decay=True,
            )
            decay.apply_(self.state)


class PSGD(_Decaying, SGD):
    """SGD with momentum and decoupled p-norm weight decay.

    The update is that of ``torch.optim.SGD``, after which

        w <- w_tilde / (1 + lr * sum_k lam_k * |w_old|^(p_k - 2)) .

    Args:
        params: parameters, named parameters, or groups, as in :class:`PAdam`.
        lr, momentum, dampening, nesterov, weight_decay, maximize, foreach: as in
            ``torch.optim.SGD``; `weight_decay` is its L2 term, which is added to the gradient.
        decay: the penalty, :class:`Lp` or a sum of them; None for plain SGD.
        auxiliary: how s follows the weights: ``Instant()``, ``Every(n)`` or ``Slow(rate)``.

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
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        decay: Penalty | None = _DEFAULT_DECAY,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        defaults = Defaults(as_penalty(decay), as_plain(auxiliary))
        super().__init__(
            settings.with_settings(params, defaults),
            check_rate(lr),
            check_number("momentum", momentum),
            dampening,
            check_number("weight_decay", weight_decay),
            nesterov,
            maximize=maximize,
            foreach=foreach,
        )
        self._finish_init(defaults)

    def _update(self, group: Group, rate: float | Tensor) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor | None] = []
        has_sparse_grad = self._init_group(group, params, grads, buffers)
        foreach = _use_foreach(params, group)
        for part in _parts(params, foreach):
            decay = _Decay(params[part], group, rate, foreach)
            updated = buffers[part]
            sgd(
                params[part],
                grads[part],
                updated,
                foreach=foreach,
                fused=False,
                has_sparse_grad=has_sparse_grad,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
            decay.apply_(self.state)
            if group["momentum"]:
                for param, buffer in zip(params[part], updated, strict=True):
                    self.state[param]["momentum_buffer"] = buffer


def _use_foreach(params: list[Tensor], group: Group) -> bool:
    """The group's choice; without one, foreach on accelerators, as torch chooses."""
    if group["foreach"] is not None:
        return bool(group["foreach"])
    return bool(_default_to_fused_or_foreach(params, differentiable=False)[1])


def _parts(params: list[Tensor], foreach: bool) -> Iterator[slice]:
    """All at once for foreach; else one by one, so that one factor is in memory at a time."""
    if foreach:
        yield slice(None)
    else:
        yield from (slice(i, i + 1) for i in range(len(params)))


class _Decay:
    """The decay of some of a group's parameters: made before their update, applied after it."""

    def __init__(
        self, params: list[Tensor], group: Group, rate: float | Tensor, foreach: bool
    ) -> None:
        self.penalty = settings.penalty_of(group)
        self.rate, self.foreach = rate, foreach
        self.anchored = group["decay_auxiliary"]
        self.params = [param for param in params if settings.decays(param, group)]
        self.by: list[Tensor] = []
        if self.penalty is not None and not self.anchored:
            self.by = factors(self.params, self.penalty, rate, foreach=foreach)

    def apply_(self, state: dict[Tensor, dict[str, Any]]) -> None:
        if self.penalty is None:
            return
        if not self.anchored:
            multiply_(self.params, self.by, foreach=self.foreach)
            return
        for param in self.params:
            decay_at_anchor_(param, state[param], self.anchored, self.penalty, self.rate)
