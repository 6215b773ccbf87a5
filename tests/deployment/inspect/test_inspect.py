"""`pdecay inspect`: equal counts for every kind of file, and one-line errors."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import pdecay
from pdecay.deployment.files import FileFormatError, save
from pdecay.deployment.files.codec import BLOCK, Encoding
from pdecay.deployment.files.dtypes import BY_NAME
from pdecay.deployment.files.table import Row
from pdecay.deployment.inspect import histogram, inspect, sources
from pdecay.deployment.inspect.counts import count

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(40, 30), nn.Linear(30, 40)
    )
    with torch.no_grad():
        for layer in (model[0], model[3], model[4]):
            layer.weight *= torch.rand(layer.weight.shape) < 0.2
            layer.weight[1] = 0
            layer.weight[:, 2:4] = 0
    model[4].weight = nn.Parameter(model[3].weight.t().contiguous())
    return model


def write(kind, model, tmp_path):
    path = tmp_path / kind
    if kind == "sparse":
        save(model, path)
    elif kind == "dense":
        save(model, path, dense=True)
    elif kind == "torch":
        torch.save(model.state_dict(), path)
    elif kind == "old torch":
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    else:
        torch.save({"epoch": 3, "model": model.state_dict(), "optimizer": {"lr": 0.1}}, path)
    return path


KINDS = ["sparse", "dense", "torch", "old torch", "checkpoint"]


@pytest.mark.parametrize("kind", KINDS)
def test_counts_match_pdecay_sparsity(tmp_path, kind):
    model = network()
    path = write(kind, model, tmp_path)
    found = {layer.name: layer for layer in inspect(path).layers}
    assert found.keys() == model.state_dict().keys()
    for expected in pdecay.sparsity(model).layers:
        layer = found[expected.name]
        assert layer.shape == expected.shape
        assert layer.counts.zeros == layer.counts.exact_zeros == expected.zeros
        assert layer.counts.dead_rows == len(expected.dead_rows)
        assert layer.counts.dead_columns == len(expected.dead_columns)
    assert found["0.weight"].counts.dead_columns >= 2
    report = inspect(path)
    assert report.nbytes == path.stat().st_size
    assert report.sparsity == pytest.approx(pdecay.sparsity(model).total)
    weights = [layer for layer in report.layers if len(layer.shape) > 1]
    nonzero = sum(layer.size - layer.counts.exact_zeros for layer in weights)
    assert report.histogram.sum() == nonzero
    if kind == "sparse":
        saved = {t.name: t for t in save(model, path).tensors}
        assert all(layer.bound == saved[name].bound for name, layer in found.items())
        assert all(layer.nbytes == saved[name].nbytes for name, layer in found.items())


@pytest.mark.parametrize("dense", [False, True])
def test_header_length_that_looks_like_a_pickle(tmp_path, dense):
    """A safetensors file starts with the length of its header, a pickle with 0x80 and 0x02."""
    model, path = network(), tmp_path / "file"
    save(model, path, dense=dense)
    data = path.read_bytes()
    old = int.from_bytes(data[:8], "little")
    new = old + (0x280 - old) % 0x10000  # spaces may follow the header
    path.write_bytes(new.to_bytes(8, "little") + data[8 : 8 + old].ljust(new) + data[8 + old :])
    assert path.read_bytes()[:2] == b"\x80\x02"
    report = inspect(path)
    assert report.kind == ("safetensors file" if dense else "pdecay sparse file")
    assert report.sparsity == pytest.approx(pdecay.sparsity(model).total)


def test_threshold_and_non_finite_values(tmp_path):
    weight = torch.ones(4, 5)
    weight[0] = 1e-15
    weight[1, 1] = 0
    weight[2, 2], weight[3, 3] = float("nan"), float("-inf")
    save({"w": weight}, tmp_path / "file")
    report = inspect(tmp_path / "file")
    (layer,) = report.layers
    counts = layer.counts
    assert (counts.zeros, counts.exact_zeros, counts.dead_rows, counts.not_finite) == (6, 1, 1, 2)
    assert "5 of the zeros are stored, but smaller than 1e-13" in str(report)
    assert "w has 2 infinities or NaNs" in str(report)
    assert report.histogram.sum() == 17
    exact = inspect(tmp_path / "file", threshold=0)
    assert exact.layers[0].counts.zeros == 1
    assert "but smaller" not in str(exact)
    with pytest.raises(ValueError, match="threshold"):
        inspect(tmp_path / "file", threshold=-1)


def test_counts_of_every_dtype(tmp_path):
    from pdecay.deployment.files.dtypes import BY_TORCH

    state = {}
    for dtype in BY_TORCH:
        bits = torch.zeros(6, 4 * dtype.itemsize, dtype=torch.uint8)
        bits[1, dtype.itemsize - 1] = 1
        state[str(dtype)] = bits.view(dtype)
    save(state, tmp_path / "file")
    for layer in inspect(tmp_path / "file", threshold=0).layers:
        assert layer.counts.exact_zeros == 23, layer.name
        assert layer.counts.dead_rows == 5
        assert layer.counts.dead_columns == 3


@pytest.mark.parametrize("name", ["numel", "detach", "stride"])
def test_parameter_with_attributes_in_place_of_methods(tmp_path, name):
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    setattr(weight, name, 5)
    torch.save({"w": weight}, tmp_path / "w.pt")
    assert inspect(tmp_path / "w.pt").sparsity == 1.0


def test_tied_tensor_is_listed_once(tmp_path):
    weight = torch.randn(5, 4)
    for kind, write_file in (("sparse", save), ("torch", torch.save)):
        write_file({"a": weight, "b": weight}, tmp_path / kind)
        report = inspect(tmp_path / kind)
        assert [layer.name for layer in report.layers] == ["a"]
        assert report.ties == {"b": "a"}
        assert "b is tied to a" in str(report)


def test_claimed_terabytes_are_not_allocated(tmp_path):
    weight = torch.zeros(1000, 1000)
    weight[3, 4] = weight[3, 999] = 1
    save({"w": weight}, tmp_path / "file")
    from pdecay.deployment.files import container, table

    with container.Container(tmp_path / "file") as file:
        entries, metadata = file.entries, file.metadata
        parts = {n: file.read(e.begin, e.end - e.begin).tobytes() for n, e in entries.items()}
    ((row, _),) = table.parse(parts["table"], 10**6)
    huge = table.Row("w", row.dtype, (10**9, 1000), row.encoding)
    line = table.format_lines([huge])
    parts["table"] = table.compress(line, 10**6)
    body, listed = b"", []
    for name, part in parts.items():
        shape = (len(part) // (4 if "F32" in name else 1),)
        listed.append((name, entries[name].dtype, shape, len(part)))
        body += part
    (tmp_path / "file").write_bytes(container.header_bytes(listed, metadata) + body)
    (layer,) = inspect(tmp_path / "file").layers
    assert layer.dense_nbytes == 4 * 10**12
    assert layer.counts.zeros == 10**12 - 2
    assert layer.counts.dead_rows == 10**9 - 1
    assert layer.counts.dead_columns == 998


def test_histogram():
    magnitudes = np.array([1e-3, 1.05e-3, 2e-3, 1.0, 1e-60, 1e60])
    counts = histogram.count(magnitudes)
    assert counts.sum() == 6
    assert counts[0] == counts[-1] == 1
    one = histogram.count(np.array([0.015, 0.017, 0.5]))
    found = histogram.bars(one)
    assert found[0][:2] == pytest.approx((-1.9, -1.8))
    assert [n for *_, n in found if n] == [1, 1, 1]
    wide = histogram.bars(counts)
    assert len(wide) <= 24
    assert sum(n for *_, n in wide) == 6
    lines = histogram.draw_text(one, zeros=7)
    assert len(lines) == len(found) + 2
    assert lines[-1].split() == ["zero", "70.00%"]
    assert lines[1].split()[-1].strip("#") == ""
    assert histogram.bars(histogram.empty()) == []
    assert histogram.draw_text(histogram.empty(), 0) == []


def test_command_prints_table_and_histogram(run_cli, tmp_path):
    model = network()
    path = write("sparse", model, tmp_path)
    out = run_cli("inspect", path)
    assert out.startswith(f"{path}: pdecay sparse file, {path.stat().st_size:,} bytes\n")
    assert "  model: torch.nn.modules.container.Sequential\n" in out
    row = next(line for line in out.splitlines() if line.startswith("0.weight")).split()
    layer = inspect(path).layers[0]
    assert row[:3] == ["0.weight", "8x6x3x3", "F32"]
    assert row[3] == f"{layer.sparsity:.2%}"
    assert row[4:6] == [str(layer.counts.dead_rows), str(layer.counts.dead_columns)]
    assert row[6:] == [f"{layer.dense_nbytes:,}", f"{layer.nbytes:,}", f"{layer.bound:,.0f}"]
    assert "log10|w|" in out
    assert "####" in out
    assert out.isascii()
    assert all(line == line.rstrip() for line in out.splitlines())


def test_command_prints_json(run_cli, tmp_path):
    path = write("sparse", network(), tmp_path)
    data = json.loads(run_cli("inspect", path, "--json"))
    assert data == json.loads(json.dumps(inspect(path).to_dict()))
    assert data["bytes"] == path.stat().st_size
    assert data["layers"][0]["name"] == "0.weight"
    assert sum(bar["weights"] for bar in data["histogram"]) == inspect(path).histogram.sum()


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "w $\\frac$ b"])
def test_plot_of_unusual_names(tmp_path, run_cli, name):
    torch.save({name: torch.randn(3, 4)}, tmp_path / "w.pt")
    run_cli("inspect", tmp_path / "w.pt", "--plot", tmp_path / "w.svg")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_command_draws_figure(run_cli, tmp_path, suffix):
    path = write("torch", network(), tmp_path)
    picture = tmp_path / "new" / f"weights.{suffix}"
    assert run_cli("inspect", path, "--plot", picture).endswith(f"written: {picture}\n")
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    run_cli("inspect", path, "--plot", picture)
    assert picture.read_bytes() == first
    if suffix == "svg":
        assert b"3.weight" in first or b"weight" in first


def test_figures_of_empty_files(run_cli, tmp_path):
    for state in ({}, {"w": torch.zeros(3, 4)}, {"steps": torch.tensor(3)}, {"b": torch.ones(3)}):
        save(state, tmp_path / "file")
        run_cli("inspect", tmp_path / "file", "--plot", tmp_path / "picture.png")


def test_terminal_control_codes_are_escaped(run_cli, tmp_path):
    save({"a\x1b[31m\nü": torch.ones(3)}, tmp_path / "file", metadata={"k\n": "\x1b]0;x\x07"})
    out = run_cli("inspect", tmp_path / "file")
    assert out.isascii()
    assert "\x1b" not in out
    assert r"a\x1b[31m\n\xfc" in out


class Unsafe:
    def __reduce__(self):
        return os.system, ("echo harm",)


def test_errors_are_one_line(run_cli, tmp_path):
    def error_of(*argv):
        return run_cli("inspect", *argv, code=2)

    (tmp_path / "text").write_text("hello, this is not a weight file")
    assert "not a weight file: expected a file written by" in error_of(tmp_path / "text")
    assert "No such file" in error_of(tmp_path / "missing")
    assert "not a regular file" in error_of(tmp_path)
    torch.save({"w": Unsafe()}, tmp_path / "unsafe.pt")
    assert "contains a posix.system, which is neither" in error_of(tmp_path / "unsafe.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    assert "written by torch.save(model.state_dict(), path)" in error_of(tmp_path / "model.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:300])
    assert "cannot be read (BadZipFile: " in error_of(tmp_path / "cut.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "contains a list, expected a state dict" in error_of(tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "none.pt")
    assert "contains no tensors" in error_of(tmp_path / "none.pt")
    two = {"ema": {"w": torch.ones(2)}, "net": {"w": torch.ones(3)}}
    torch.save(two, tmp_path / "two.pt")
    assert "pass one of ['ema', 'net'] as the key" in error_of(tmp_path / "two.pt")
    assert "no key 'x' in the checkpoint, found ['ema', 'net']" in error_of(
        tmp_path / "two.pt", "--key", "x"
    )
    assert "must be a number >= 0, got 'x'" in error_of(tmp_path / "two.pt", "--threshold=x")
    save({"w": torch.ones(3)}, tmp_path / "file")
    assert "a key needs a torch.save checkpoint" in error_of(tmp_path / "file", "--key", "x")
    assert "--plot writes .png or .svg" in error_of(tmp_path / "file", "--plot", "x.gif")
    plot = tmp_path / "text" / "x.png"
    assert "cannot write to" in error_of(tmp_path / "file", "--plot", plot)
    assert inspect(tmp_path / "two.pt", key="net").layers[0].size == 3


def test_tensors_beside_a_state_dict(tmp_path):
    path = tmp_path / "file.pt"
    state = {"layer.weight": torch.zeros(2, 3)}
    torch.save({"rng": torch.get_rng_state(), "best": torch.tensor(0.9), "model": state}, path)
    assert [layer.name for layer in inspect(path).layers] == ["layer.weight"]
    torch.save({"best": torch.tensor(0.9), "net": state}, path)
    with pytest.raises(FileFormatError, match=r"beside tensors: pass one of \['net'\]"):
        inspect(path)
    assert inspect(path, key="net").sparsity == 1
    torch.save({**state, "layer._extra_state": {"scale": torch.ones(1)}}, path)
    assert [layer.name for layer in inspect(path).layers] == ["layer.weight"]


def test_one_dict_under_many_keys_is_read_once(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        one = dict.fromkeys(range(30_000))
        many = pickle.dumps(dict.fromkeys(range(30_000), one), protocol=2)
        archive.writestr("w/data.pkl", many)
    start = time.process_time()
    with pytest.raises(FileFormatError, match="contains no tensors"):
        inspect(tmp_path / "w.pt")
    assert time.process_time() - start < 20


def test_sparse_and_strided_tensors_of_torch_files(tmp_path):
    state = {"sparse": torch.eye(4).to_sparse(), "view": torch.arange(12.0).view(3, 4).t()}
    state["one"] = torch.ones(1).expand(7)
    torch.save(state, tmp_path / "file.pt")
    sparse, view, one = inspect(tmp_path / "file.pt").layers
    assert (sparse.counts.zeros, view.counts.zeros, one.counts.zeros) == (12, 1, 0)
    torch.save(torch.ones(3), tmp_path / "file.pt")
    assert [layer.name for layer in inspect(tmp_path / "file.pt").layers] == ["tensor"]
    torch.save({"w": torch.ones(3, device="meta")}, tmp_path / "file.pt")
    with pytest.raises(FileFormatError, match="'w' has no values"):
        inspect(tmp_path / "file.pt")


def test_figure_needs_matplotlib_but_table_does_not(run_cli, tmp_path, monkeypatch):
    class Missing:
        def find_spec(self, fullname, path=None, target=None):
            if fullname.partition(".")[0] == "matplotlib":
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    for name in list(sys.modules):
        if name.startswith(("matplotlib", "pdecay.lab.drawing", "pdecay.lab.weight_figure")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("pdecay.lab.weight_figure", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    save({"w": torch.ones(3)}, tmp_path / "file")
    run_cli("inspect", tmp_path / "file")
    error = run_cli("inspect", tmp_path / "file", "--plot", tmp_path / "x.png", code=2)
    assert error == (
        "pdecay inspect: error: matplotlib is not installed: pip install 'pdecay[lab]'\n"
    )


def write_zip(path, state, compression=zipfile.ZIP_STORED, change=lambda name, data: data):
    """Write a torch.save file, and rewrite its archive with other contents or compression."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "bsr"])
def test_sparse_tensor_with_indices_out_of_range(tmp_path, layout):
    convert = {
        "coo": lambda t: t.to_sparse(),
        "csr": lambda t: t.to_sparse_csr(),
        "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    }[layout]
    state = {"w": convert(torch.eye(4))}
    path = tmp_path / "file.pt"
    write_zip(path, state)
    assert inspect(path).layers[0].counts.exact_zeros == 12

    def damage(name, data):  # the index of the last element
        last = struct.pack("<2q", 0, 1) if layout == "bsr" else struct.pack("<2q", 2, 3)
        return data.replace(last, struct.pack("<2q", 0, 10**8))

    write_zip(path, state, change=damage)
    with pytest.raises(FileFormatError, match=r"size is inconsistent|rows do not fit its indices"):
        inspect(path)


def test_sparse_tensor_is_not_expanded(tmp_path):
    indices = torch.tensor([[0, 3, 3], [1, 999, 2]])
    options = {"check_invariants": True}
    matrix = torch.sparse_coo_tensor(indices, torch.ones(3), (10**9, 1000), **options)
    blocks = torch.sparse_coo_tensor(indices[:1, :2], torch.eye(2), (5, 2), **options)
    torch.save({"w": matrix, "blocks": blocks}, tmp_path / "file.pt")
    layer, hybrid = inspect(tmp_path / "file.pt").layers
    assert layer.counts.exact_zeros == 10**12 - 3
    assert (layer.counts.dead_rows, layer.counts.dead_columns) == (10**9 - 2, 997)
    assert (hybrid.counts.exact_zeros, hybrid.counts.dead_rows) == (8, 3)


def test_many_blocks_of_a_wide_tensor_take_linear_time():
    blocks, size, columns = 5000, 200, 2**40
    row = Row("w", BY_NAME["I8"], (1, columns), Encoding("gaps", columns, blocks * size))
    values = np.ones(size, np.uint8)
    parts = ((np.arange(size) + size * k, values) for k in range(blocks))
    start = time.process_time()
    counts = count(sources.Source(row, lambda: parts), 0)
    assert counts.dead_columns == columns - blocks * size
    assert time.process_time() - start < 20


def test_tensors_that_share_memory_are_bounded(tmp_path):
    torch.save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "file.pt")
    with pytest.raises(FileFormatError, match="elements share memory"):
        inspect(tmp_path / "file.pt")


def test_strided_tensor_is_read_block_by_block(tmp_path):
    weight = torch.arange(3_000_000.0).view(1000, 3000)
    state = {"t": weight.t(), "conj": torch.complex(weight, weight).conj(), "v": weight[:, ::2]}
    torch.save(state, tmp_path / "file.pt")
    layers = inspect(tmp_path / "file.pt").layers
    assert [layer.counts.exact_zeros for layer in layers] == [1, 1, 1]
    assert [layer.counts.dead_rows for layer in layers] == [0, 0, 0]
    parts = list(sources._parts(state["t"]))
    assert max(part.numel() for part in parts) <= BLOCK
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), weight.t().reshape(-1))


def test_compressed_archive_is_refused(tmp_path):
    write_zip(tmp_path / "file.pt", {"w": torch.zeros(10**6)}, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "file.pt").stat().st_size < 10**4
    with pytest.raises(FileFormatError, match=r"is compressed, but torch\.save compresses nothing"):
        inspect(tmp_path / "file.pt")


@pytest.mark.parametrize("new_format", [True, False])
def test_file_that_allocates_by_a_call_is_refused(tmp_path, new_format):
    """`torch.load` would call ``bytearray(n)`` for any n that a file names."""
    path = tmp_path / "file.pt"
    state = {"w": torch.ones(3), "b": bytearray(b"x")}
    torch.save(state, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(FileFormatError, match=r"contains a builtins\.bytearray, which is neither"):
        inspect(path)


def test_compressed_archive_that_zipfile_reads_as_uncompressed_is_refused(tmp_path):
    """Two directories: the end record names the first, but zipfile reads the one before it."""
    state = {"w": torch.ones(3), "names": ["x"] * 10**5}
    archives = []
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        write_zip(tmp_path / "file.pt", state, compression)
        archives.append((tmp_path / "file.pt").read_bytes())
    compressed, stored = archives
    (begin,) = struct.unpack("<I", stored[-6:-2])
    (tmp_path / "file.pt").write_bytes(compressed[:-22] + stored[begin:-22] + compressed[-22:])
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    with pytest.raises(FileFormatError, match="cannot be read"):
        inspect(tmp_path / "file.pt")


@pytest.mark.parametrize("new_format", [True, False])
def test_damaged_torch_files_raise_file_format_errors(tmp_path, new_format):
    state = {"w": torch.ones(3), "s": torch.eye(3).to_sparse(), "q": {"a": torch.ones(2)}}
    torch.save(state, tmp_path / "good.pt", _use_new_zipfile_serialization=new_format)
    good = (tmp_path / "good.pt").read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "bad.pt"
    failed = 0
    for _ in range(400):
        content = bytearray(good)
        for at in random.integers(2, len(good), random.integers(1, 6)):
            content[at] = random.integers(256)
        path.write_bytes(content[: random.integers(2, len(good))] if failed % 10 == 0 else content)
        try:
            str(inspect(path))
        except FileFormatError:
            failed += 1
    assert failed > 20


def test_file_is_read_after_one_with_a_wrong_sparse_tensor_and_a_forbidden_type(tmp_path):
    wrong = torch.sparse_coo_tensor([[9]], [1.0], (3,), check_invariants=False)
    torch.save({"s": wrong, "type": Unsafe()}, tmp_path / "bad.pt")
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "good.pt")
    with pytest.raises(FileFormatError, match="size is inconsistent"):
        inspect(tmp_path / "bad.pt")
    (layer,) = inspect(tmp_path / "good.pt").layers
    assert layer.counts.zeros == 6


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is dep")
def test_tensor_in_the_storage_of_a_quantized_one_is_refused(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    swap = (b"X\x01\x00\x00\x001", b"X\x01\x00\x00\x000")
    write_zip(
        tmp_path / "file.pt",
        {"q": quantized, "w": torch.ones(1)},
        change=lambda name, data: data.replace(*swap) if name.endswith("data.pkl") else data,
    )
    with pytest.raises(FileFormatError, match=r"of dtype torch\.qint8, which cannot be read"):
        inspect(tmp_path / "file.pt")


def test_many_small_tensors_take_little_memory(tmp_path):
    save({f"{i}": torch.ones(1) for i in range(3000)}, tmp_path / "file")
    inspect(tmp_path / "file")
    tracemalloc.start()
    inspection = inspect(tmp_path / "file")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert inspection.histogram.sum() == 3000
    assert held < 3000 * 3000  # a whole histogram has 7200 bytes
