"""The hook lifecycle: objects that act around the ``step()`` of any torch optimizer.

A subclass of :class:`StepHooks` overrides the methods that it needs::

    class Counter(StepHooks):
        def __init__(self, optimizer):
            super().__init__(optimizer)
            self.count = 0
            self.register()                  # last: the object is complete

        def after_step(self):
            self.count += 1

The optimizer owns the object through its hooks; the object refers to the optimizer weakly, so
that the two are freed together without the garbage collector. ``detach()`` removes the hooks.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Iterator
from itertools import takewhile
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler
from torch.optim import Optimizer

from pdecay._core.parameters import is_zero
from pdecay._optim.state_precision import restore_precision
from pdecay._utils.interrupts import deferred_interrupts, is_inside

T = TypeVar("T", bound="StepHooks")

# Attributes that a copy of an object does not take over.
_OF_ONE_OPTIMIZER = ("_optimizer", "_outer_step", "_handles", "_checkpoint")
_OPTIMIZER_FILE = sys.modules[Optimizer.__module__].__file__  # torch runs the hooks in it


class StepHooks:
    """Base class of objects that act around an optimizer's outermost ``step()``.

    A subclass's ``step()`` that calls ``super().step()`` runs torch's hooks twice. Only the
    outer call is the user's; the inner one is ignored here. The methods run without gradients and
    are not traced by ``torch.compile``. Ctrl-C acts after the step (see ``interrupts.py``).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_takes_hooks(optimizer, type(self).__name__)
        self._optimizer = weakref.ref(optimizer)
        self._outer_step: FrameType | None = None  # the running step() that before_step saw
        self._handles: list[Any] = []
        self._checkpoint: dict[str, Any] | None = None  # the one that is being loaded

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the hooks are registered on."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the optimizer was deleted: keep a reference to it")
        return optimizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that acts on the copy of the optimizer, which torch makes without hooks.

        Objects that act before this one on the optimizer are copied first, to keep the order.
        """
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        optimizer = self._optimizer()
        acting = _hooks_of(optimizer) if self._handles else iter(())
        for other in takewhile(lambda other: other is not self, acting):
            copy.deepcopy(other, memo)
        own = {key: value for key, value in vars(self).items() if key not in _OF_ONE_OPTIMIZER}
        twin.__dict__.update(copy.deepcopy(own, memo))
        if optimizer is None:
            twin._optimizer, twin._handles = self._optimizer, []
        else:
            StepHooks.__init__(twin, copy.deepcopy(optimizer, memo))
            if self._handles:
                twin.register()
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "hooks of an optimizer (attach, SparsityTarget, pruning) cannot be pickled: save the "
            "state_dict() of the model and of the optimizer, and create them again"
        )

    def register(self) -> None:
        """Register the hooks on the optimizer."""
        optimizer = self.optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_hook),
            optimizer.register_step_post_hook(self._post_hook),
            optimizer.register_state_dict_pre_hook(self._state_dict_hook),
            optimizer.register_load_state_dict_pre_hook(self._load_state_dict_hook),
            optimizer.register_load_state_dict_post_hook(self._loaded_hook),
        ]

    def detach(self) -> None:
        """Remove the hooks from the optimizer. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_step(self, *, has_closure: bool) -> None:
        """Act before the update. A closure computes the gradients later, within the step."""

    def after_step(self) -> None:
        """Act after the update."""

    def before_state_dict(self) -> None:
        """Act before the optimizer's ``state_dict()`` is made."""

    def before_load_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint that the optimizer loads in place of this one."""
        return state_dict

    @_disable_dynamo
    @torch.no_grad()
    def _pre_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        frame = _calling_step()
        if self._outer_step is not None and is_inside(frame, self._outer_step):
            return
        deferred_interrupts.begin(frame)
        self._outer_step = frame
        given = (*args[1:], *kwargs.values())  # the first argument is the optimizer
        self.before_step(has_closure=any(callable(arg) for arg in given))

    @_disable_dynamo
    @torch.no_grad()
    def _post_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        frame = _calling_step()
        if frame is not self._outer_step:
            return
        self._outer_step = None
        try:
            self.after_step()
        finally:
            acting = [*_hooks_of(optimizer)]
            if not acting or acting[-1] is self:
                deferred_interrupts.end(frame)

    def _state_dict_hook(self, optimizer: Optimizer) -> None:
        self.before_state_dict()

    def _load_state_dict_hook(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        self._checkpoint = self.before_load_state_dict(state_dict)
        return self._checkpoint

    def _loaded_hook(self, optimizer: Optimizer) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if (
            checkpoint is not None
        ):  # PAdam and PSGD need no hooks for this: a second call is a no-op
            restore_precision(local_optimizer(optimizer).state, optimizer, checkpoint)


def find_hooks(optimizer: Optimizer, kind: type[T]) -> T | None:
    """Return the first object of a class that is registered on the optimizer."""
    return next((owner for owner in _hooks_of(optimizer) if isinstance(owner, kind)), None)


def unwrap(optimizer: Any) -> Any:
    """Return the innermost optimizer of wrappers that hold one as ``.optimizer``.

    SAM and its variants hold it as ``.base_optimizer``, and may be used without their ``step()``.

    Wrappers, such as accelerate's AcceleratedOptimizer, are optimizers by type but have no hooks,
    or a stale copy of ``param_groups``. Other objects are returned unchanged.
    """
    *_, inner = unwrapping(optimizer)
    return inner


def unwrapping(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, the one that it wraps, and so on to the innermost."""
    yield optimizer
    for name in ("optimizer", "base_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer):
            if getattr(optimizer, "decouple", False):
                raise TypeError(
                    f"{type(optimizer).__name__} with decouple=True moves weights after the step "
                    "of its base optimizer, so that the decay does not keep zeros; use "
                    "decouple=False"
                )
            yield from unwrapping(inner)
            return


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a ZeroRedundancyOptimizer runs on this rank; else the given one.

    It holds the state of this rank's share of the parameters.
    """
    local = getattr(optimizer, "optim", None)
    return local if isinstance(local, Optimizer) else optimizer


def is_local(optimizer: Optimizer) -> bool:
    """Check whether a ZeroRedundancyOptimizer runs this optimizer on this rank's share of weights.

    The optimizer has no reference to the ZeroRedundancyOptimizer, so this looks at all objects.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not torch.distributed.is_initialized():
        return False
    return any(
        issubclass(type(one), module.ZeroRedundancyOptimizer)
        and getattr(one, "optim", None) is optimizer
        for one in gc.get_objects()
    )


def check_not_local(optimizer: Optimizer, caller: str) -> None:
    """Raise a TypeError for the optimizer inside a ZeroRedundancyOptimizer.

    It has only this rank's share of the weights, and before each step its settings are replaced.
    """
    if is_local(optimizer):
        raise TypeError(
            f"{caller} got the .optim of a ZeroRedundancyOptimizer, which has only this rank's "
            "share of the weights; pass the ZeroRedundancyOptimizer itself"
        )


def is_skipped(optimizer: Optimizer) -> bool:
    """Check whether a gradient scaler skips the step that is running.

    GradScaler sets ``found_inf`` around the step of fused optimizers, which skip the update
    themselves. It does not call the step of other optimizers at all.
    """
    return bool(getattr(optimizer, "found_inf", None))  # a tensor; 0 if there are no gradients


def only_creates_state(optimizer: Optimizer) -> bool:
    """Check whether the step that is running does nothing but create missing state.

    torch.distributed.checkpoint runs such a step, at learning rate 0 with gradients of 0.
    """
    groups = optimizer.param_groups
    lrs = [group.get("lr") for group in groups]
    if any(lr is None or (isinstance(lr, Tensor) and not lr.is_cpu) or lr for lr in lrs):
        return False
    grads = [param.grad for group in groups for param in group["params"] if param.grad is not None]
    return all(is_zero(grad) or not grad.numel() for grad in grads)


def check_takes_hooks(optimizer: object, caller: str) -> None:
    """Raise a TypeError that names the caller unless the optimizer supports hooks.

    Wrappers that never ran ``Optimizer.__init__`` lack some of the hook dictionaries.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{caller} needs a torch.optim.Optimizer, got {name}")
    if hasattr(optimizer, "fused_backward"):  # LOMO and AdaLOMO
        raise TypeError(
            f"{name} updates the weights in fused_backward() and never calls step(), where "
            f"{caller} acts; use an optimizer that updates them in step()"
        )
    try:
        for register in (
            optimizer.register_step_pre_hook,
            optimizer.register_step_post_hook,
            optimizer.register_state_dict_pre_hook,
            optimizer.register_load_state_dict_pre_hook,
            optimizer.register_load_state_dict_post_hook,
        ):
            register(lambda *args: None).remove()
    except AttributeError:
        raise TypeError(
            f"{name} wraps another optimizer and has no step hooks; pass the inner optimizer to "
            f"{caller}"
        ) from None


def _hooks_of(optimizer: Optimizer | None) -> Iterator[StepHooks]:
    """Yield the objects that act on an optimizer, in their order."""
    for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, StepHooks):
            yield owner


def _calling_step() -> FrameType:
    """Return the frame of the ``step()`` that runs the hook; torch runs both hooks in one frame.

    A counter of nested calls would be wrong after a step that raised, because torch then skips the
    hook after the step.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZER_FILE:
            return frame
        frame = frame.f_back
    raise RuntimeError("a step hook was called outside an optimizer's step()")
