"""Crafted files of torch.save, written instruction by instruction.

With ``torch.load(weights_only=True)``, each of them crashes the process, fills the memory or takes
minutes.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

MARK, TUPLE, REDUCE, BUILD = pickle.MARK, pickle.TUPLE, pickle.REDUCE, pickle.BUILD
SETITEM, STOP, EMPTY_DICT, EMPTY_LIST = pickle.SETITEM, pickle.STOP, b"}", b"]"


class Storage:
    """A storage of a crafted file."""

    def __init__(self, kind: str, key: Any, count: int) -> None:
        self.kind, self.key, self.count = kind, key, count


class Call:
    """A call of a function, by name, and the state that is set afterwards."""

    def __init__(self, name: str, *arguments: Any, state: Any = None) -> None:
        self.name, self.arguments, self.state = name, arguments, state


class Raw(bytes):
    """Instructions."""


def code(value: Any) -> bytes:
    """Return the instructions that push a value."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, tuple):
        return MARK + b"".join(map(code, value)) + TUPLE
    if isinstance(value, list):
        return EMPTY_LIST + MARK + b"".join(map(code, value)) + pickle.APPENDS
    if isinstance(value, dict):
        return EMPTY_DICT + b"".join(code(k) + code(v) + SETITEM for k, v in value.items())
    if isinstance(value, str):
        text = value.encode()
        return pickle.BINUNICODE + struct.pack("<I", len(text)) + text
    if isinstance(value, bool | None):
        return {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]
    if isinstance(value, int):
        data = pickle.encode_long(value)
        return pickle.LONG1 + bytes([len(data)]) + data
    if isinstance(value, float):
        return pickle.BINFLOAT + struct.pack(">d", value)
    if isinstance(value, Storage):
        place = ("storage", name(f"torch.{value.kind}Storage"), value.key, "cpu", value.count)
        return code(place) + pickle.BINPERSID
    state = b"" if value.state is None else code(value.state) + BUILD
    return name(value.name) + code(value.arguments) + REDUCE + state


def name(text: str) -> Raw:
    module, _, own = text.rpartition(".")
    return Raw(pickle.GLOBAL + f"{module}\n{own}\n".encode())


def tensor(storage: Storage, size: Sequence[int], stride: Sequence[int], offset: Any = 0) -> Call:
    arguments = storage, offset, tuple(size), tuple(stride), False
    return Call("torch._utils._rebuild_tensor_v2", *arguments, Call("collections.OrderedDict"))


def sparse(layout: str, *parts: Any) -> Call:
    chosen = Call("torch.serialization._get_layout", f"torch.sparse_{layout}")
    return Call("torch._utils._rebuild_sparse_tensor", chosen, parts)


def put(index: int) -> bytes:
    return pickle.LONG_BINPUT + struct.pack("<I", index)


def get(index: int) -> Raw:
    return Raw(pickle.LONG_BINGET + struct.pack("<I", index))


LONGS, DOUBLES = Storage("Long", "0", 16), Storage("Double", "0", 16)
FLOATS, BYTES = Storage("Float", "0", 32), Storage("QInt8", "1", 64)
HUGE, DEEP = 2**29, 300_000
WIDE = tensor(LONGS, (2, HUGE), (1, 0)), tensor(FLOATS, (HUGE,), (0,))


def quantized(scales: Any, zeros: Any, axis: Any = 0) -> Call:
    quantizer = name("torch.per_channel_affine"), scales, zeros, axis
    return Call("torch._utils._rebuild_qtensor", BYTES, 0, (4, 4), (4, 1), quantizer, False, {})


def _colliding() -> list[int]:
    """Return long numbers with equal hashes."""
    return [(2**61 - 1) * factor + 1 for factor in range(1, 60_000)]


def _doubled(times: int) -> Raw:
    """A string that is encoded many times, each time to twice its length."""
    step = name("_codecs.encode") + MARK
    text = code("ab" * 500)
    for _ in range(times):
        text = step + text + code("hex") + TUPLE + REDUCE
    return Raw(text)


def _copied(function: str, argument: bytes, times: int) -> Raw:
    """Many calls with one long argument."""
    call = name(function) + MARK + get(1) + TUPLE + REDUCE
    return Raw(MARK + argument + put(1) + call * times + TUPLE)


def _called(function: str, *arguments: Any, times: int) -> Raw:
    """Many calls with the same arguments, of five bytes each."""
    start = name(function) + put(1) + code(arguments) + put(2)
    return Raw(MARK + start + (bytes(get(1)) + get(2) + REDUCE) * times + TUPLE)


def named(value: Any, times: int) -> Raw:
    """A dict with one object under many names."""
    names = b"".join(code(f"{k:x}") + get(1) for k in range(times))
    return Raw(EMPTY_DICT + MARK + code("first") + code(value) + put(1) + names + pickle.SETITEMS)


DEEP_TUPLE = Raw(b")" + pickle.TUPLE1 * DEEP)
# Its hash and its repr visit 2**60 elements.
SHARED_TUPLE = Raw(b"K\x01" + (put(3) + get(3) + pickle.TUPLE2) * 60)
EMPTY = tensor(FLOATS, (0,), (1,))
META = Call(
    *("torch._utils._rebuild_meta_tensor_no_storage", name("torch.float32")),
    *((2**40,), (1,), False),
)

CRAFTED: dict[str, Any] = {
    # Out of bounds
    "scales changed after the quantizer was made": quantized(
        Call(
            "torch._utils._rebuild_tensor_v2",
            *tensor(DOUBLES, (4,), (1,)).arguments,
            state=(DOUBLES, 0, (0,), (1,)),
        ),
        tensor(LONGS, (4,), (1,)),
    ),
    "scales of another length": quantized(tensor(DOUBLES, (1,), (1,)), tensor(LONGS, (1,), (1,))),
    "axis out of range": quantized(tensor(DOUBLES, (4,), (1,)), tensor(LONGS, (4,), (1,)), 7),
    "offset": tensor(FLOATS, (2,), (1,), 31),
    "negative offset": tensor(FLOATS, (2,), (1,), -1),
    "negative stride": tensor(FLOATS, (2,), (-1,), 8),
    "stride that overflows": tensor(FLOATS, (3, 2), (2**62, 2**62)),
    "shape that overflows": tensor(FLOATS, (2**32, 2**32, 0), (1, 1, 1)),
    "offset that is a tensor": tensor(FLOATS, (2,), (1,), tensor(LONGS, (), ())),
    "offset that is not a number": tensor(FLOATS, (2,), (1,), float("nan")),
    "many dimensions": tensor(FLOATS, (1,) * 5000, (1,) * 5000),
    "tensor in place of a storage": tensor(tensor(FLOATS, (2,), (1,)), (2**20,), (1,)),  # type: ignore[arg-type]
    "indices out of range": sparse(
        "coo", tensor(LONGS, (2, 1), (1, 1)), tensor(FLOATS, (1,), (1,)), (1, 1), True
    ),
    "rows out of range": sparse(
        *("csr", tensor(LONGS, (3,), (1,)), tensor(LONGS, (2,), (1,))),
        *(tensor(FLOATS, (2,), (1,)), (2, 2)),
    ),
    **{
        f"rows of a {layout} tensor beyond its indices": sparse(
            *(layout, tensor(Storage("Long", "2", 4), (4,), (1,)), tensor(LONGS, (0,), (1,))),
            *(tensor(FLOATS, (0, *block), (1, *block)), (3, 3)),
        )
        for layout, block in {"csr": (), "csc": (), "bsr": (1, 1), "bsc": (1, 1)}.items()
    },
    "tensor whose memory is replaced": Call("torch.FloatTensor", state=(FLOATS, 0, (10**6,), (1,))),
    # Memory
    "wide sparse tensor": sparse("coo", *WIDE, (100, 100), True),
    "wide sparse tensor without elements": sparse(
        "coo", tensor(LONGS, (0, HUGE), (1, 1)), tensor(FLOATS, (HUGE, 0), (1, 1)), (0,), True
    ),
    "wide quantized tensor": Call(
        *("torch._utils._rebuild_qtensor", BYTES, 0, (2**16, 2**15), (0, 0)),
        *((name("torch.per_tensor_affine"), 1.0, 0), False, {}),
    ),
    "wide scale": Call(
        *("torch._utils._rebuild_qtensor", BYTES, 0, (1,), (1,)),
        *((name("torch.per_tensor_affine"), tensor(FLOATS, (HUGE,), (0,)), 0), False, {}),
    ),
    "wide tensor": tensor(FLOATS, (2**16, 2**15), (0, 0)),
    "doubled bytes": _doubled(24),
    "copied bytes": _copied("_codecs.encode", code("a" * 10**5) + code("latin1"), 10**4),
    "copied sets": _copied("builtins.set", code([*range(10**4)]), 10**4),
    "copied arguments": _called("torch.device", *[None] * 10**5, times=10**4),
    "allocated bytes": Call("builtins.bytearray", 2**40),
    "empty tensor on a device": Call(
        "torch._utils._rebuild_meta_tensor_no_storage", name("torch.float32"), (2**62,), (1,), False
    ),
    "wide shape": tensor(FLOATS, Raw(code(WIDE[1])), (1,)),
    "wide strides": tensor(FLOATS, (1,), Raw(code(WIDE[1]))),
    "wide size": Call("torch.Size", WIDE[1]),
    "wide quantizer": Call("torch._utils._rebuild_qtensor", BYTES, 0, (4,), (1,), WIDE[1]),
    "wide storage": Raw(code(WIDE[1]) + pickle.BINPERSID),
    "wide pair": Call("collections.OrderedDict", [WIDE[1]]),
    "wide arguments": Call(
        *("torch._tensor._rebuild_from_type_v2", name("torch.Size"), name("torch.Tensor")),
        *(WIDE[1], {}),
    ),
    "many sets": Raw(MARK + pickle.EMPTY_SET * 10**6 + TUPLE),
    "many tensors": _called(EMPTY.name, *EMPTY.arguments, times=10**5),
    "many tensors without memory": _called(META.name, *META.arguments, times=10**5),
    # Time, and the stack of C
    "deep count": Call("collections.Counter", [(DEEP_TUPLE, 0)]),
    "deep layout": Call("torch.serialization._get_layout", DEEP_TUPLE),
    "deep dtype": Call("torch._utils._rebuild_tensor", FLOATS, 0, (1,), (1,), DEEP_TUPLE),
    "shared layout": Call("torch.serialization._get_layout", SHARED_TUPLE),
    "shared encoding": Call("_codecs.encode", "a", SHARED_TUPLE),
    "scales without memory": quantized(META, META),
    "colliding numbers": Call("builtins.set", _colliding()),
    "colliding keys": Raw(
        EMPTY_DICT + b"".join(code(one) + pickle.NONE + SETITEM for one in _colliding())
    ),
    "deep key": Raw(EMPTY_DICT + b")" + pickle.TUPLE1 * DEEP + pickle.NONE + SETITEM),
    "deep storage key": Storage("Float", Raw(b")" + pickle.TUPLE1 * DEEP), 1),
    "deep element": Call("builtins.set", [Raw(b")" + pickle.TUPLE1 * DEEP)]),
    "deep key of an OrderedDict": Call(
        "collections.OrderedDict", [(Raw(b")" + pickle.TUPLE1 * DEEP), 0)]
    ),
    # Foreign code
    "system": Call("os.system", "exit 3"),
    "attribute of a class": Call("torch.Tensor.__class__", "x"),
    "torch function": Call("torch.hub.load", "a/b", "c"),
}


def write_state(state: dict[str, Any], path: Any) -> None:
    """Write a file of torch.save with storages of 128, 64 and 32 bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.PROTO + b"\x02" + code(state) + STOP)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(range(128)))
        archive.writestr("archive/data/1", bytes(64))
        archive.writestr("archive/data/2", struct.pack("<4Q", 0, 2, 3, 0))
        archive.writestr("archive/version", "3\n")
