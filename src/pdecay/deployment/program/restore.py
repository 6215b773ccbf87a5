"""Modules that run a recorded program."""

from __future__ import annotations

import json
import keyword
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from pdecay.deployment.program.capture import VERSION
from pdecay.deployment.program.graph import SPARSE_LAYER, decode, find_operator
from pdecay.deployment.program.operator import make_layer
from pdecay.deployment.program.operators import check_constants
from pdecay.deployment.program.sizes import Sizes, check_form, check_sizes
from pdecay.deployment.program.structure import Structure, assemble, check_structure, flatten

# Errors of a damaged program, besides ValueError.
_ERRORS = (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, SyntaxError)
_WORD = re.compile(r"\w+", re.ASCII)
# The child of the graph module that has the model's tensors and modules. Their names may be the
# same as those of the graph module's attributes, such as "graph" and "meta", and arguments.
_MODEL = "model"


class SavedModel(nn.Module):
    """A model that was saved together with its program. It runs without the code of its class.

    It takes the arguments of the original model, in the same form as the example that it was saved
    with: positional arguments stay positional. It is for inference only.

    Args:
        program: the graph, whose inputs and outputs are flat lists of tensors.
        content: what the file says of the program, checked.
    """

    def __init__(self, program: fx.GraphModule, content: dict[str, Any]) -> None:
        super().__init__()
        self.program = program  # torch.export cannot export a child named "graph"
        self.inputs: Structure = content["inputs"]
        self.outputs: Structure = content["outputs"]
        self.free_batch = bool(content["free_batch"])  # the first axis may have any size
        self.sizes: Sizes | None = content.get("sizes")  # None in files of older versions
        self.contiguous = bool(content.get("contiguous"))  # recorded with contiguous inputs
        self._content, self._code = content, program.code
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the graph, because torch.fx traces code when it unpickles one.

        Functions that check their arguments cannot be traced.
        """
        state = self.__dict__
        if self.program.code != self._code:  # changed by the user
            return state
        children = {**self._modules, "program": nn.ModuleDict(dict(self.program.named_children()))}
        return {**state, "_modules": children}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        root = self._modules["program"]
        if not isinstance(root, fx.GraphModule):
            self.program = _Builder(self._content, {}, root).build()
            self.program.train(self.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors: dict[int, Tensor] = {}
        positional, keywords = self.inputs["list"]
        flatten(positional, list(args), tensors, "the tuple of arguments")
        flatten(keywords, kwargs, tensors, "the dict of keyword arguments")
        given = [tensors[i] for i in range(len(tensors))]
        if self.sizes is not None:
            check_sizes(self.sizes, given)
        if self.contiguous:
            given = [tensor.contiguous() for tensor in given]
        return assemble(self.outputs, self.program(*given))


def restore(program: bytes, tensors: Mapping[str, Tensor], max_bytes: int) -> SavedModel:
    """Build the module of a recorded program.

    Args:
        program: see :class:`Captured`.
        tensors: its tensors by name.
        max_bytes: the maximum size of the decompressed program.

    Raises:
        ValueError: if the program is invalid.
    """
    content = _parsed(program, max_bytes)
    try:
        if content["version"] != VERSION:
            raise ValueError(
                f"the program has version {content['version']!r}, but this pdecay reads version "
                f"{VERSION}: upgrade pdecay"
            )
        graph = _Builder(content, tensors).build()
        inputs, outputs = content["inputs"], content["outputs"]
        check_structure(inputs, content["names"].count(None), exact=True)
        check_structure(outputs, len(content["results"]))
        if not isinstance(inputs.get("list"), list) or len(inputs["list"]) != 2:
            raise ValueError("the program is damaged: its inputs are not arguments")
        sizes = content.get("sizes")
        if sizes is not None:
            check_form(sizes)
        return SavedModel(graph, content)
    except _ERRORS as error:
        raise ValueError(f"the program is damaged: {type(error).__name__}: {error}") from error


def _parsed(program: bytes, max_bytes: int) -> dict[str, Any]:
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(program, max_bytes + 1)
        if len(text) > max_bytes:
            raise ValueError(f"the program has more than {max_bytes:,} bytes")
        if not stream.eof:
            raise ValueError("the program is truncated")
        content = json.loads(text)
    except (zlib.error, UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"the program is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("the program is damaged: it is not a JSON object")
    return content


class _Builder:
    """The construction of an fx.GraphModule from a program.

    Args:
        content: the program.
        tensors: its tensors by name.
        root: a module that has all tensors and layers already.
    """

    def __init__(
        self,
        content: dict[str, Any],
        tensors: Mapping[str, Tensor],
        root: nn.Module | None = None,
    ) -> None:
        self.content = content
        self.tensors = tensors
        self.is_complete = root is not None
        self.root = nn.Module() if root is None else root
        self.graph = fx.Graph()
        self.names: dict[fx.Node, str] = {}  # nodes that are tensors of the model
        self.sparse: set[str] = set()  # paths of sparse layers
        self.values: list[fx.Node] = []

    def build(self) -> fx.GraphModule:
        count = 0
        for name in self.content["names"]:
            if name is None:
                node = self.graph.placeholder(f"input_{count}")
                count += 1
            else:
                node = self._tensor(name)
            self.values.append(node)
        for target, args, kwargs in self.content["calls"]:
            make = self._sparse_call if target == SPARSE_LAYER else self._call
            self.values.append(make(target, args, kwargs))
        self.graph.output(tuple(decode(self.content["results"], self.values)))
        for node in self.names:
            if not node.users:  # a sparse layer holds this weight itself
                self.graph.erase_node(node)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def _tensor(self, name: str) -> fx.Node:
        path = _path(name)
        if not self.is_complete:
            tensor = self.tensors[name]
            self._put(path, lambda parent, last: parent.register_buffer(last, tensor))
        node = self.graph.get_attr(path)
        self.names[node] = name
        return node

    def _call(self, target: str, args: Any, kwargs: dict[str, Any]) -> fx.Node:
        for name in kwargs:
            if not name.isidentifier():
                raise ValueError(f"an argument of a program has the invalid name {name[:100]!r}")
        function = find_operator(target)
        given = tuple(decode(args, self.values))
        named = {name: decode(value, self.values) for name, value in kwargs.items()}
        if isinstance(function, OpOverload):
            check_constants(function, given, named)
        elif not target.startswith("aten.") and None in tree_leaves((given, named)):
            # A function of numbers could return None, in place of a later operator's tensor.
            raise ValueError(f"the program is damaged: {target} of None")
        return self.graph.call_function(function, given, named)

    def _sparse_call(self, target: str, args: Any, kwargs: dict[str, Any]) -> fx.Node:
        x, more, weight, bias, options = decode(args, self.values)
        path = _path(self.names[weight].rpartition(".")[0] or "layer")
        if path not in self.sparse and not self.is_complete:
            self.sparse.add(path)
            tensor = None if bias is None else self.tensors[self.names[bias]]
            layer = make_layer(self.tensors[self.names[weight]], tensor, options)
            self._put(path, lambda parent, last: parent.add_module(last, layer))
        return self.graph.call_module(path, (x,) if more is None else (x, more))

    def _put(self, path: str, put: Callable[[nn.Module, str], None]) -> None:
        """Add a tensor or a module at a path; create the modules on the way."""
        parent = self.root
        *names, last = path.split(".")
        for name in names:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        put(parent, last)


def _path(name: str) -> str:
    """Return the path of a tensor or layer in the graph module.

    torch.fx writes paths into the source code of the forward. Parts of a name that are no words,
    such as the key "a-b" of a ModuleDict, or words of Python are therefore replaced.
    """
    return ".".join([_MODEL, *map(_word, name.split("."))])


def _word(part: str) -> str:
    if _WORD.fullmatch(part) and not keyword.iskeyword(part):
        return part
    # The code of the whole part keeps the words of different parts different.
    return f"{re.sub(r'[^A-Za-z0-9]', '_', part)}_{part.encode().hex()}"
