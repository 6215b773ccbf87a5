"""ReLUs and sums that follow a sparse layer, made part of it.

What a module's forward does with a layer's output, by a function, a method or a module, is seen by
tracing it with ``torch.fx``, its submodules as black boxes. The module stays what it is; its
forward becomes one with fewer steps. A forward is left alone if it cannot be traced, has tensors of
its own, changes its module, or asks what its arguments are: a trace knows one answer only.
"""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from pdecay.deployment.layers.modules import SparseLayer
from pdecay.deployment.model.state import shared_copy
from pdecay.deployment.runtime.wiring import has_hooks

_RELUS = {functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_SUMS = {operator.add, torch.add, "add"}  # fx takes += for +


def fuse(model: nn.Module, counts: Mapping[nn.Module, int]) -> list[str]:
    """Change a model's forwards so that its sparse layers do what follows them. What was taken in.

    Args:
        model: with sparse layers in it; it is changed.
        counts: how often each of its modules is called in a run.
    """
    told = []
    for name, module in model.named_modules():
        graph = _traced(module)
        if graph is None:
            continue
        _drop_identities(graph, module)
        taken = [
            f"the {what} after {name}.{layer}" if name else f"the {what} after {layer}"
            for layer, what in _fuse_in(graph, module, counts)
        ]
        if taken:
            module.forward = fx.GraphModule(module, graph).forward
            told += taken
    return told


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(module: nn.Module) -> fx.Graph | None:
    """What a module's forward does, if it is one of the user's, with sparse layers, and simple."""
    if isinstance(module, SparseLayer) or type(module).__module__.startswith("torch."):
        return None
    if not any(isinstance(one, SparseLayer) for one in module.modules()):
        return None
    # fx traces the class's forward.
    if "forward" in vars(module) or _asks_what_it_is_given(module.forward):
        return None
    # A copy, as the forward may keep what it is given: stand-ins for tensors.
    twin = shared_copy(module)
    before = _state(twin)
    try:
        graph = _Tracer().trace(twin)
    except Exception:  # whatever a forward does with the stand-ins may fail
        return None
    after = _state(twin)
    if len(before) != len(after) or any(map(operator.is_not, before, after)):
        return None
    # Its own tensors would be held twice, and part ways when the model is converted.
    return None if any(node.op == "get_attr" for node in graph.nodes) else graph


def _asks_what_it_is_given(forward: Any) -> bool:
    """Whether a forward may do one thing for a tensor and another for something else."""
    given = inspect.signature(forward).parameters.values()
    # An argument with a default is often one that the forward branches on.
    if any(
        one.kind is not one.POSITIONAL_OR_KEYWORD or one.default is not one.empty for one in given
    ):
        return True
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or "isinstance" in code.co_names:
        return True
    names = [step.opname for step in dis.get_instructions(code)]
    # "is None" asks for an attribute, as a rule; among several arguments, one may be optional.
    return len(given) > 1 and any("IS_OP" in name or name.endswith("_NONE") for name in names)


def _state(module: nn.Module) -> list[Any]:
    """All that a module and those in it hold."""
    return tree_leaves([vars(one) for one in module.modules()])


def _drop_identities(graph: fx.Graph, module: nn.Module) -> None:
    for node in list(graph.nodes):
        called = _called(node, module)
        if type(called) is nn.Identity and len(node.args) == 1 and not has_hooks(called):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _fuse_in(
    graph: fx.Graph, module: nn.Module, counts: Mapping[nn.Module, int]
) -> list[tuple[str, str]]:
    """Take in what follows each layer that is called here alone, and once."""
    told = []
    for node in list(graph.nodes):
        layer = _called(node, module)
        if not isinstance(layer, SparseLayer) or counts.get(layer) != counts.get(module):
            continue
        if len(node.args) != 1 or node.kwargs or layer.relu or has_hooks(layer):
            continue
        user = _only_user(node)
        other = _added(user, node)
        # The layer will be called where the sum is: nothing in between may change what it reads.
        if user is not None and other is not None and not _writes_between(node, user, module):
            with graph.inserting_before(user):
                both = graph.call_module(node.target, (*node.args, other))
            user.replace_all_uses_with(both)
            graph.erase_node(user)
            graph.erase_node(node)
            node = both
            told.append((str(node.target), "sum"))
        user = _only_user(node)
        if user is not None and _is_relu(user, module):
            user.replace_all_uses_with(node)
            graph.erase_node(user)
            layer.take_in_relu()
            told.append((str(node.target), "ReLU"))
    return told


def _called(node: fx.Node, module: nn.Module) -> Any:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _added(user: fx.Node | None, node: fx.Node) -> fx.Node | None:
    """What is added to the node, if that is all that its user does."""
    if user is None or len(user.args) != 2 or user.kwargs:
        return None
    if user.op not in ("call_function", "call_method"):
        return None
    first, second = user.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if first is node and user.target in (*_SUMS, "add_"):
        return second
    # In place, the other one would be changed: somebody may read it later.
    return first if second is node and user.target in _SUMS else None


def _writes_between(first: fx.Node, last: fx.Node, module: nn.Module) -> bool:
    node = first.next
    while node is not last and not _may_write(node, module):
        node = node.next
    return node is not last


def _may_write(node: fx.Node, module: nn.Module) -> bool:
    """Whether a step may change a tensor in place."""
    if node.op == "call_module":
        return any(getattr(one, "inplace", False) for one in _called(node, module).modules())
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name == "setitem"
        or "out" in node.kwargs
        or any(value is True for value in (*node.args, node.kwargs.get("inplace")))
    )


def _is_relu(user: fx.Node, module: nn.Module) -> bool:
    if user.op == "call_module":
        called = _called(user, module)
        return type(called) is nn.ReLU and not has_hooks(called)
    return user.op in ("call_function", "call_method") and user.target in _RELUS
