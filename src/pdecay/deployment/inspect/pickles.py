"""A reader of pickles that makes plain data.

A pickle is a program: it calls functions by name. ``torch.load(weights_only=True)`` allows some
functions of torch only, but these were not made for hostile arguments: a crafted file can make
tensors that read foreign memory, or fill the memory. This reader imports nothing and calls nothing
that a pickle names. Its caller gets names and arguments, and returns an object in place of a call.

Numbers, strings, lists, tuples, dicts and sets are rebuilt. Keys of dicts and elements of sets are
strings and short numbers: Python would hash a deeply nested tuple by recursion, and long numbers
with equal hashes take quadratic time.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import UnionType
from typing import Any, BinaryIO

_ARGUMENTS = {"BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE", "SHORT_BINSTRING"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], object]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_READS, _WRITES = {"BINGET", "LONG_BINGET"}, {"BINPUT", "LONG_BINPUT"}
_KEYS = {str, bytes, int, float, bool, type(None)}
_KEY_BITS = 64


@dataclass(frozen=True)
class Name:
    """A function, class or constant that a pickle names, such as ``torch.float32``."""

    text: str


class PickleError(ValueError):
    """The pickle is damaged, or contains other objects than plain data."""


def read_pickle(
    file: BinaryIO,
    call: Callable[[str, tuple[Any, ...]], object],
    find_storage: Callable[[object], object],
) -> Any:
    """Return the object of a pickle of ``torch.save``, of protocol 2.

    Args:
        file: the pickle, from the current position. Afterwards the position is behind it.
        call: gets the name of a function and its arguments, and returns the result.
        find_storage: gets the persistent id of an object that is stored outside the pickle.
    """
    stack: list[Any] = []
    marked: list[list[Any]] = []  # the stacks below the marks
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name in _ARGUMENTS:
            stack.append(argument)
        elif name in _READS:
            stack.append(memo[argument])  # type: ignore[index]  # an integer
        elif name in _WRITES:
            memo[argument] = stack[-1]  # type: ignore[index]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise PickleError("the pickle is damaged: a value is missing")
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name == "TUPLE":
            items, stack = stack, marked.pop()
            stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items, stack = ([stack.pop()], stack) if name == "APPEND" else (stack, marked.pop())
            expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            last = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else []
            items, stack = (last, stack) if last else (stack, marked.pop())
            check_keys(items[::2])
            expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            if not str(argument).isprintable():
                raise PickleError("a name has control characters")
            stack.append(Name(str(argument).replace(" ", ".", 1)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(call(expect(function, Name).text, expect(arguments, tuple)))
        elif name == "BUILD":  # an OrderedDict stores the versions of modules as an attribute
            state = expect(stack.pop(), dict)
            if "_metadata" in state:
                expect(stack[-1], OrderedDict)._metadata = state["_metadata"]
        elif name == "BINPERSID":
            stack.append(find_storage(stack.pop()))
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise PickleError(
                f"the pickle has the instruction {name}, which torch.save uses with another "
                "pickle_protocol than 2, if at all"
            )
    raise PickleError("the pickle is truncated")


def check_keys(keys: Iterable[object]) -> None:
    """Raise unless all objects can be hashed safely and quickly."""
    for key in keys:
        if type(key) not in _KEYS or (isinstance(key, int) and key.bit_length() > _KEY_BITS):
            raise PickleError(
                f"a {type(key).__name__} is a key or an element of a set; only strings and numbers "
                f"of at most {_KEY_BITS} bits are read"
            )


def expect(value: Any, kind: type | UnionType) -> Any:
    """Return the value; raise unless it is of the kind.

    Check each argument of a file before it is iterated, hashed or formatted: a few bytes make a
    tensor of 2**40 elements, and a tuple whose hash overflows the stack.
    """
    if not isinstance(value, kind):
        wanted = kind.__name__ if isinstance(kind, type) else str(kind)
        raise PickleError(f"found a {type(value).__name__} instead of a {wanted}")
    return value
