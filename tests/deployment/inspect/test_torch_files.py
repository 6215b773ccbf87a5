"""Files of torch.save are read as by torch.load, but nothing that a file names is called."""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from pdecay.deployment.files import FileFormatError
from pdecay.deployment.files.dtypes import BY_TORCH
from pdecay.deployment.inspect import inspect
from pdecay.deployment.inspect.sources import read_loadable_state
from pdecay.deployment.inspect.torch_files import read_torch_file

from .hostile import (
    CRAFTED,
    DEEP_TUPLE,
    EMPTY,
    STOP,
    Call,
    Storage,
    code,
    name,
    named,
    tensor,
    write_state,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def trained():
    """Return the states of a short training."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {name: one.state_dict() for name, one in states.items()}


def tensors():
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    with_attribute = torch.ones(2)
    with_attribute.note = "kept by torch"
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "kept by torch"
    return {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(3, 0, 2),
        "views": [base, base.t(), base[1:, ::2], base[2], base.expand(2, 4, 6), base[3:, 4:]],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": nn.Parameter(base, requires_grad=False),
        "attributes": [with_attribute, parameter],
        "coo": base.relu().to_sparse(),
        "hybrid": base.relu().to_sparse(1),
        "csr": base.relu().to_sparse_csr(),
        "csc": base.relu().to_sparse_csc(),
        "bsr": base.relu().to_sparse_bsr((2, 2)),
        "bsc": base.relu().to_sparse_bsc((2, 2)),
    }


def all_dtypes():
    return [torch.arange(48, dtype=torch.uint8).view(3, 16).view(dtype) for dtype in BY_TORCH]


def plain_data():
    return {
        "numbers": [1, -1, 70000, 2**40, -(2**200), 0.5, float("inf"), 1 + 2j, True, None],
        "text": ["", "ä", "\ud800", b"bytes"],
        "nested": ({"a": (1,)}, [(), [], {}, (1, 2, 3, 4)], {1, "two"}),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter("abca"),
        "size": torch.Size([2, 3]),
        7: "number",
        None: "none",
    }


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert (ours.dtype, ours.shape, ours.layout) == (theirs.dtype, theirs.shape, theirs.layout)
        if theirs.layout != torch.strided:
            ours, theirs = ours.to_dense(), theirs.to_dense()
        bits = [one.detach().resolve_conj().resolve_neg().contiguous() for one in (ours, theirs)]
        assert torch.equal(*(one.view(-1).view(torch.uint8) for one in bits))
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            same(ours[key], value)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("make", [trained, tensors, all_dtypes, plain_data])
def test_reads_what_torch_reads(tmp_path, make, new_format):
    if make is all_dtypes and not new_format:
        pytest.skip("torch.save does not write the newer dtypes in the old format")
    path = tmp_path / "file.pt"
    torch.save(make(), path, _use_new_zipfile_serialization=new_format)
    same(read_torch_file(path), torch.load(path, weights_only=True))


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantized_tensors_are_counted_as_numbers(tmp_path, per_channel):
    weight = torch.randn(5, 6)
    weight[2] = 0
    if per_channel:
        scales, zeros = torch.rand(6, dtype=torch.float64) + 0.1, torch.arange(6)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 1, torch.qint8)
    else:
        quantized = torch.quantize_per_tensor(weight, 0.1, 3, torch.quint8)
    torch.save({"q": quantized}, tmp_path / "q.pt")
    torch.testing.assert_close(read_torch_file(tmp_path / "q.pt")["q"], quantized.dequantize())
    (layer,) = inspect(tmp_path / "q.pt").layers
    assert layer.counts.exact_zeros == (quantized.dequantize() == 0).sum()


def test_tied_tensors_share_memory(tmp_path):
    weight = torch.randn(3, 4)
    torch.save({"a": weight, "b": weight, "row": weight[1]}, tmp_path / "w.pt")
    found = read_torch_file(tmp_path / "w.pt")
    assert found["a"].data_ptr() == found["b"].data_ptr()
    found["row"].zero_()
    assert not found["a"][1].any()
    assert read_torch_file(tmp_path / "w.pt")["a"].all()  # the file did not change


def test_versions_of_modules_are_kept(tmp_path):
    model = nn.Sequential(nn.BatchNorm1d(3))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    state = read_loadable_state(tmp_path / "w.pt")
    assert state._metadata == model.state_dict()._metadata
    assert state._metadata["0"] == {"version": 2}


def test_state_that_was_assigned_is_copied_into_the_model(tmp_path):
    state, model = nn.Linear(3, 2).state_dict(), nn.Linear(3, 2).double()
    nn.Linear(3, 2).load_state_dict(state, assign=True)  # torch marks the state
    torch.save(state, tmp_path / "w.pt")
    weight = model.weight
    model.load_state_dict(read_loadable_state(tmp_path / "w.pt"))
    assert model.weight is weight
    assert torch.equal(weight, state["weight"].double())


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit('harm')",)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Harm, "contains a builtins.exec, which is neither a tensor nor plain data"),
        (lambda: np.float64(3), r"contains a numpy\.dtype, which is neither"),
        (lambda: torch.ones(2).as_subclass(Subclass), r"contains a .*Subclass, expected plain"),
        (lambda: torch.nested.as_nested_tensor([torch.ones(2)]), "_rebuild_nested_tensor, which"),
        (lambda: {(1, 2): 3}, "a tuple is a key or an element of a set"),
        (lambda: {2**70: 3}, "a int is a key .* at most 64 bits"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_objects_are_refused(tmp_path, make, message):
    torch.save({"w": torch.ones(2), "other": make()}, tmp_path / "w.pt")
    with pytest.raises(FileFormatError, match=message):
        inspect(tmp_path / "w.pt")


@pytest.mark.parametrize("kind", ["Bool", "Byte", "Half", "ComplexFloat", "QInt8"])
def test_lazy_bits_of_any_dtype(tmp_path, kind):
    arguments = *tensor(Storage(kind, "0", 4), (4,), (1,)).arguments, {"conj": True, "neg": True}
    call = Call("torch._utils._rebuild_tensor_v2", *arguments)
    write_state({"w": call}, tmp_path / "w.pt")
    if kind == "QInt8":
        with pytest.raises(FileFormatError, match="cannot be read"):
            inspect(tmp_path / "w.pt")
    else:
        assert inspect(tmp_path / "w.pt").layers[0].size == 4


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "bfloat16"])
def test_lazy_bits_of_newer_dtypes(tmp_path, dtype):
    rest = 0, (4,), (1,), False, None, name(f"torch.{dtype}"), {"neg": True}
    call = Call("torch._utils._rebuild_tensor_v3", Storage("Untyped", "0", 128), *rest)
    write_state({"w": call}, tmp_path / "w.pt")
    assert inspect(tmp_path / "w.pt").layers[0].size == 4


def test_sparse_tensors_that_torch_does_not_sort_are_refused(tmp_path):
    indices, values = torch.tensor([[0, 2]]), torch.ones(2, dtype=torch.uint16)
    torch.save(
        {"w": torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)},
        tmp_path / "w.pt",
    )
    with pytest.raises(FileFormatError, match=r"'w' cannot be counted .*not implemented"):
        inspect(tmp_path / "w.pt")


@pytest.mark.parametrize("make", ["sparse_coo_tensor", "sparse_compressed_tensor"])
def test_sparse_tensors_are_checked_without_the_switch_of_torch(tmp_path, monkeypatch, make):
    parts = {
        "sparse_coo_tensor": ([[9]], [1.0], (3,)),
        "sparse_compressed_tensor": ([0, 1], [9], [1.0], (1, 3)),
    }[make]
    options = {} if make == "sparse_coo_tensor" else {"layout": torch.sparse_csr}
    wrong = getattr(torch, make)(*parts, **options, check_invariants=False)
    torch.save({"w": wrong}, tmp_path / "w.pt")
    # As if another thread turned the switch off between the call and the check.
    unchecked = getattr(torch, make)
    monkeypatch.setattr(
        torch, make, lambda *args, **rest: unchecked(*args, **rest | {"check_invariants": False})
    )
    with pytest.raises(FileFormatError, match="cannot be read"):
        inspect(tmp_path / "w.pt")


def test_names_do_not_import_modules_and_have_no_control_codes(tmp_path):
    function = "torch._utils._rebuild_meta_tensor_no_storage"
    write_state({"w": Call(function, name("torch._inductor"), (1,), (1,), False)}, tmp_path / "w")
    code = (
        "import sys, pdecay.deployment.inspect.torch_files as room\n"
        "try:\n    room.read_torch_file(sys.argv[1])\n"
        "except ValueError as error:\n    print(error, 'torch._inductor' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "w")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "found torch._inductor instead of a dtype False\n"
    write_state({"w": Call("os.\x1b[2J")}, tmp_path / "w")
    with pytest.raises(FileFormatError, match="a name has control characters"):
        inspect(tmp_path / "w")


def test_files_of_many_names_are_refused(tmp_path):
    write_state(named(EMPTY, 10**5), tmp_path / "w.pt")  # type: ignore[arg-type]
    with pytest.raises(FileFormatError, match=r"the tensors take .* bytes, more than"):
        inspect(tmp_path / "w.pt")


def test_row_pointers_of_many_names_are_counted(tmp_path):
    names, tall = map(str, range(3000)), torch.eye(20_000, 1).to_sparse_csr()
    torch.save(dict.fromkeys(names, tall), tmp_path / "w.pt")
    with pytest.raises(FileFormatError, match=r"the tensors take .* bytes, more than"):
        inspect(tmp_path / "w.pt")


def sparse_without_elements(layout):
    wide = 2**40
    if layout == torch.sparse_coo:
        parts = torch.empty(1, 0), torch.empty(0, 1, wide)
        return torch.sparse_coo_tensor(*parts, (3, 1, wide), check_invariants=True)
    indices = torch.tensor([0, 1]), torch.tensor([0])
    return torch.sparse_compressed_tensor(
        *indices, torch.empty(1, 1, wide, 0), (1, wide, 0), layout=layout, check_invariants=True
    )


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_bsr, torch.sparse_bsc])
def test_wide_sparse_tensors_without_elements_take_no_memory(tmp_path, layout):
    torch.save({"w": sparse_without_elements(layout)}, tmp_path / "w.pt")
    (layer,) = inspect(tmp_path / "w.pt").layers
    assert layer.counts.zeros == layer.size == (3 * 2**40 if layout == torch.sparse_coo else 0)


def test_views_of_one_memory_are_counted(tmp_path):
    flat = torch.ones(2000)
    torch.save({f"{k}": flat[k] for k in range(2000)}, tmp_path / "w.pt")
    assert len(inspect(tmp_path / "w.pt").layers) == 2000


def test_keys_of_old_files_are_checked(tmp_path):
    system = {"little_endian": True}
    parts = 0x1950A86A20F9469CFC6C, 1001, system, {}, [DEEP_TUPLE]
    data = b"".join(b"\x80\x02" + code(part) + STOP for part in parts)
    (tmp_path / "w.pt").write_bytes(data)
    command = [sys.executable, "-m", "pdecay", "inspect", str(tmp_path / "w.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "found a tuple instead of a str" in done.stderr


def test_dtypes_beside_tensors_are_ignored(tmp_path):
    torch.save({"w": torch.ones(2), "dtype": torch.float16}, tmp_path / "w.pt")
    assert len(inspect(tmp_path / "w.pt").layers) == 1


def test_crafted_files_are_refused_in_little_memory(tmp_path):
    paths = [tmp_path / f"{k}.pt" for k in range(len(CRAFTED))]
    for crafted, path in zip(CRAFTED.values(), paths, strict=True):
        ordinary = tensor(Storage("Float", "0", 32), (4,), (1,))
        write_state({"w": crafted, "v": ordinary}, path)
    code = (
        "import resource, sys, pdecay, pdecay.deployment.inspect as room\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({2**31}, {2**31}))\n"
        f"resource.setrlimit(resource.RLIMIT_CPU, (100, 100))\n"
        "for path in sys.argv[1:]:\n"
        "    print(end='read: ', flush=True)\n"
        "    try:\n"
        "        print(room.inspect(path))\n"
        "    except pdecay.FileFormatError as error:\n"
        "        print('refused:', error)\n"
    )
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    for case, line in itertools.zip_longest(CRAFTED, lines):
        assert line.startswith("read: refused: "), (case, line, done.stderr)
        assert "MemoryError" not in line, (case, line)
    assert done.returncode == 0


def test_storages_outside_the_file_are_refused(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(whole[:-1])
    with pytest.raises(FileFormatError, match=r"storage '.*' is outside the file: it is truncated"):
        inspect(tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes(whole.replace((1000).to_bytes(8, "little"), bytes(8)))
    with pytest.raises(FileFormatError, match="has another size than its tensors expect"):
        inspect(tmp_path / "w.pt")
