"""Fusion of ReLUs and sums into the sparse layer before them.

Each module's forward is traced with ``torch.fx``, with submodules as leaves. ReLUs and sums may be
functions, methods or modules. The module keeps its class and state; only its forward is replaced.

A forward is skipped if it cannot be traced, uses tensors of its module, changes its module, or
branches on its arguments: a trace contains only one branch. Some branches are found by running the
trace, see `_faithful`.
"""

from __future__ import annotations

import dis
import inspect
import operator
import types
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pdecay.deployment.layers.modules import SparseLayer
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.outputs import objects_in
from pdecay.deployment.model.state import keeping_attributes, shared_copy
from pdecay.deployment.runtime.usage import Operation, has_hooks, record_operations

_RELUS = {functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_SUMS = {operator.add, torch.add, "add"}
_IN_PLACE_SUMS = {operator.iadd, "add_"}
# The operators +=, -=, *= and so on, by the name of their method.
_IN_PLACE = {
    f"__{name}__": getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
}


def fuse(model: nn.Module, counts: Mapping[nn.Module, int], inputs: Inputs) -> list[str]:
    """Fuse ReLUs and sums into the sparse layers of a model, in place.

    Args:
        model: the model with sparse layers.
        counts: the number of calls of each module in a run, see :func:`count_tensor_calls`.
        inputs: the example.

    Returns:
        Descriptions of the fused operations.
    """
    fused = []
    with keeping_attributes(model, skip=SparseLayer):
        ran = record_operations(model, inputs)
    writers = {one for one, called in ran.items() if any(each.in_place for each in called)}
    graphs = {module: graph for module in model.modules() if (graph := _trace(module)) is not None}
    graphs = _faithful(graphs, ran, model, inputs)
    for name, module in model.named_modules():
        graph = graphs.get(module)
        if graph is None:
            continue
        _drop_identities(graph, module)
        operations = [
            f"the {kind} after {name}.{layer}" if name else f"the {kind} after {layer}"
            for layer, kind in _fuse_graph(graph, module, counts, writers)
        ]
        if operations:
            module.forward = _Forward(module, graph)
            fused += operations
    return fused


def _faithful(
    graphs: dict[nn.Module, fx.Graph],
    ran: Mapping[nn.Module, list[Operation]],
    model: nn.Module,
    inputs: Inputs,
) -> dict[nn.Module, fx.Graph]:
    """Return the graphs that call the same torch functions as the forwards do on the example.

    A trace runs with proxies instead of tensors. It takes another branch where the code asks for
    the kind of an argument, such as ``torch.is_tensor(x)`` or ``hasattr(x, "name")``, or catches
    the error of a proxy. The outputs may be the same nevertheless, for the numbers of the example.
    """
    for module, graph in graphs.items():
        module.forward = _Forward(module, graph)
    try:
        with keeping_attributes(model, skip=SparseLayer):
            traced = record_operations(model, inputs)
    finally:
        for module in graphs:
            del module.forward
    return {one: graph for one, graph in graphs.items() if ran.get(one) == traced.get(one)}


class _Forward:
    """A fused forward. It calls the submodules that the module has at that time.

    The module's original forward runs if a fused layer was replaced by one that takes no sums and
    ReLUs, such as its ``to_dense()``, and for arguments other than tensors, such as None or a dict:
    the code may choose another branch for them.

    Args:
        module: the module.
        graph: its graph with fused operations.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module = module
        self.traced = fx.GraphModule(module, graph)  # can be copied and pickled, unlike a function
        self.fused = [
            (module.get_submodule(parent)._modules, name)
            for node in graph.nodes
            if len(node.args) > 1 or "relu" in node.kwargs
            if isinstance(_called(node, module), SparseLayer)
            for parent, _, name in [str(node.target).rpartition(".")]
        ]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.traced.forward)

    @property
    def __code__(self) -> types.CodeType:  # which torch.export reads
        code: types.CodeType = type(self.traced).forward.__code__
        return code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if not isinstance(argument, Tensor):
                return type(self.module).forward(self.module, *args, **kwargs)
        for modules, name in self.fused:
            if not getattr(modules.get(name), "takes_sums", False):
                return type(self.module).forward(self.module, *args, **kwargs)
        return type(self.traced).forward(self.module, *args, **kwargs)


class _Proxy(fx.Proxy):
    """A proxy that records ``+=`` as ``operator.iadd``; ``fx.Proxy`` records it as ``+``.

    The tensor that it changes may be read later, also by the caller.
    """


def _recorded(function: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy(
        "call_function", function, (self, other), {}
    )


for _name, _function in _IN_PLACE.items():
    setattr(_Proxy, _name, _recorded(_function))


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module) -> fx.Graph | None:
    """Return the graph of a module's forward; None if it must not be rewritten."""
    if isinstance(module, SparseLayer) or type(module).__module__.startswith("torch."):
        return None
    if not any(isinstance(one, SparseLayer) for one in module.modules()):
        return None
    # torch.fx traces the forward of the class, not one set on the instance.
    if "forward" in vars(module) or _may_branch_on_arguments(module.forward):
        return None
    # Trace a copy: the forward may store the proxies of its arguments in the module.
    twin = shared_copy(module)
    before = _state(twin)
    try:
        graph = _Tracer().trace(twin)
    except Exception:  # operations on proxies may fail
        return None
    after = _state(twin)
    if len(before) != len(after) or any(map(operator.is_not, before, after)):
        return None
    # Tensors of the module would be copied into the graph and not follow later conversions.
    return None if any(node.op == "get_attr" for node in graph.nodes) else graph


def _may_branch_on_arguments(forward: Any) -> bool:
    """Return whether a forward may branch on the kind of its arguments."""
    parameters = inspect.signature(forward).parameters.values()
    # A forward often branches on optional arguments.
    if any(
        one.kind is not one.POSITIONAL_OR_KEYWORD or one.default is not one.empty
        for one in parameters
    ):
        return True
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or "isinstance" in code.co_names:
        return True
    names = [step.opname for step in dis.get_instructions(code)]
    # A test of an attribute is harmless, unless the attribute is an argument's. With one argument,
    # "if self.shortcut is None" is common; what is not loaded as an attribute may be from a dict.
    tests = [i for i, name in enumerate(names) if name == "IS_OP" or name.endswith("_NONE")]
    return any(
        len(parameters) > 1 or "LOAD_ATTR" not in names[i - (2 if names[i] == "IS_OP" else 1)]
        for i in tests
    )


def _state(module: nn.Module) -> list[Any]:
    """Return the attributes of a module and its submodules, and the objects in them."""
    return [part for one in module.modules() for part in objects_in(vars(one))]


def _drop_identities(graph: fx.Graph, module: nn.Module) -> None:
    for node in list(graph.nodes):
        called = _called(node, module)
        if type(called) is nn.Identity and len(node.args) == 1 and not has_hooks(called):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _fuse_graph(
    graph: fx.Graph,
    module: nn.Module,
    counts: Mapping[nn.Module, int],
    writers: Container[nn.Module],
) -> list[tuple[str, str]]:
    """Fuse operations after layers that this forward calls exactly once.

    Args:
        graph: the graph of the forward.
        module: its module.
        counts: the number of calls of each module in a run.
        writers: the modules whose forward changed tensors in place in that run.

    Returns:
        Pairs of a layer's name and the kind of the fused operation.
    """
    fused = []
    for node in list(graph.nodes):
        layer = _called(node, module)
        if not isinstance(layer, SparseLayer) or counts.get(layer) != counts.get(module):
            continue
        if len(node.args) != 1 or node.kwargs or layer.relu or has_hooks(layer):
            continue
        user = _only_user(node)
        other = _other_summand(user, node)
        # The layer call moves to the sum: nothing in between may change the layer's input.
        if (
            user is not None
            and other is not None
            and not _writes_between(node, user, module, writers)
        ):
            with graph.inserting_before(user):
                call = graph.call_module(node.target, (*node.args, other))
            user.replace_all_uses_with(call)
            graph.erase_node(user)
            graph.erase_node(node)
            node = call
            fused.append((str(node.target), "sum"))
        user = _only_user(node)
        if user is not None and _is_relu(user, module):
            user.replace_all_uses_with(node)
            graph.erase_node(user)
            # Of this call only: other methods of the module may call the layer, too.
            node.kwargs = {"relu": True}
            fused.append((str(node.target), "ReLU"))
    return fused


def _called(node: fx.Node, module: nn.Module) -> Any:
    """Return the submodule that a node calls; None for other nodes."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _other_summand(user: fx.Node | None, node: fx.Node) -> fx.Node | None:
    """Return the node that the user adds to the given one; None if it does something else."""
    if user is None or len(user.args) != 2 or user.kwargs:
        return None
    if user.op not in ("call_function", "call_method"):
        return None
    first, second = user.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if first is node and user.target in _SUMS | _IN_PLACE_SUMS:
        return second
    # An in-place sum would change the other summand, which may be read later.
    return first if second is node and user.target in _SUMS else None


def _writes_between(
    first: fx.Node, last: fx.Node, module: nn.Module, writers: Container[nn.Module]
) -> bool:
    node = first.next
    while node is not last and not _may_write(node, module, writers):
        node = node.next
    return node is not last


def _may_write(node: fx.Node, module: nn.Module, writers: Container[nn.Module]) -> bool:
    """Return whether a node may change a tensor in place."""
    if node.op == "call_module":
        parts = _called(node, module).modules()
        return any(one in writers or getattr(one, "inplace", False) for one in parts)
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return (
        (name.endswith("_") and not name.endswith("__"))
        or node.target in _IN_PLACE.values()
        or name == "setitem"
        or "out" in node.kwargs
        or any(value is True for value in (*node.args, node.kwargs.get("inplace")))
    )


def _is_relu(user: fx.Node, module: nn.Module) -> bool:
    if user.op == "call_module":
        called = _called(user, module)
        return type(called) is nn.ReLU and not has_hooks(called)
    return user.op in ("call_function", "call_method") and user.target in _RELUS
