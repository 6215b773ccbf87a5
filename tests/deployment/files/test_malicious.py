"""Malicious sparse files: one for each check, with the expected error message."""

from __future__ import annotations

import json
import time
import zlib

import pytest
import safetensors
import torch
from torch import nn

from pdecay.deployment.files import FileFormatError, load, table
from pdecay.deployment.files.container import header_bytes

METADATA = {"format": "pdecay", "format_version": "1"}
SIZES = {"U8": 1, "BOOL": 1, "F16": 2, "F32": 4, "F64": 8, "U64": 8}


def write(path, rows, positions=b"", metadata=METADATA, table=None, drop=(), **values):
    """Write a valid container with arbitrary contents."""
    if table is None:
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        table = zlib.compress(lines.encode(), 9, wbits=11)
    parts = {"positions": ("U8", positions), "table": ("U8", table)}
    values = {"F32": b"", **values}
    parts |= {f"values.{name}": (name, data) for name, data in values.items()}
    entries, body = [], b""
    for name, (dtype, data) in parts.items():
        if name not in drop:
            shape = (len(data) // SIZES[dtype],)
            entries.append((name, dtype, shape, len(data)))
            body += data
    path.write_bytes(header_bytes(entries, metadata) + body)
    safetensors.deserialize(path.read_bytes())  # the container itself is valid
    return path


def contents(**given):
    return given


GOOD = ["w", "F32", [4, 4], "mask", 2]


def test_helper_writes_loadable_files(tmp_path):
    path = write(tmp_path / "file", [GOOD], b"\x01\x80", F32=bytes([0, 0, 128, 63, 0, 0, 0, 64]))
    expected = torch.zeros(16)
    expected[0], expected[15] = 1, 2
    assert torch.equal(load(path)["w"], expected.view(4, 4))


TEN_TERABYTES = ["w", "F32", [10**6, 2_500_000], "gaps", 0, 0, 0]
MALICIOUS = {
    "version": (
        contents(rows=[], metadata={"format": "pdecay", "format_version": "2"}),
        "format version is '2'",
    ),
    "no version": (contents(rows=[], metadata={"format": "pdecay"}), "format version is None"),
    "no table": (contents(rows=[], drop=["table"]), "table or positions are missing"),
    "no positions": (contents(rows=[], drop=["positions"]), "table or positions are missing"),
    "unknown section": (contents(rows=[]), ""),
    "table": (contents(rows=[], table=b"not zlib"), "cannot be decompressed"),
    "half a table": (
        contents(rows=[], table=zlib.compress(bytes(99), 0, wbits=11)[:20]),
        "table is truncated",
    ),
    "table and more": (
        contents(rows=[], table=zlib.compress(b"", wbits=11) + b"x"),
        "after its last line",
    ),
    "half a line": (
        contents(rows=[], table=zlib.compress(b"[", wbits=11)),
        "after its last line",
    ),
    "a larger window": (contents(rows=[], table=zlib.compress(b"x" * 99)), "invalid window size"),
    "no list": (contents(rows=[{}]), "invalid line"),
    "an empty list": (contents(rows=[[]]), "unknown encoding"),
    "nesting": (contents(rows=[[[[[]]]]]), "invalid line"),
    "null": (contents(rows=[["w", None, [], "dense"]]), "invalid line"),
    "not ASCII": (
        contents(rows=[], table=zlib.compress('["ü","F32",[],"dense"]\n'.encode(), wbits=11)),
        "invalid line",
    ),
    "half a character": (contents(rows=[["\ud800", "F32", [0], "dense"]]), "surrogates"),
    "encoding": (contents(rows=[["w", "F32", [4], "huffman", 3]]), "unknown encoding"),
    "numbers missing": (contents(rows=[["w", "F32", [4], "gaps", 3]]), "unknown encoding"),
    "numbers too many": (contents(rows=[["w", "F32", [4], "dense", 3]]), "unknown encoding"),
    "dtype": (contents(rows=[["w", "F9", [4], "dense"]]), "unknown dtype 'F9'"),
    "ints for names": (contents(rows=[[1, "F32", [4], "dense"]]), "unknown encoding"),
    "a negative count": (contents(rows=[["w", "F32", [4], "mask", -1]]), "invalid line"),
    "count": (contents(rows=[["w", "F32", [4], "mask", 5]]), "impossible number"),
    "low bits": (contents(rows=[["w", "F32", [4], "gaps", 1, 63, 0]]), "impossible number"),
    "overflow": (
        contents(rows=[["w", "F32", [2**32, 2**32], "gaps", 0, 0, 0]]),
        "impossible shape",
    ),
    "empty overflow": (
        contents(rows=[["w", "F32", [0, 2**32, 2**32], "gaps", 0, 0, 0]]),
        "impossible shape",
    ),
    "dimensions": (contents(rows=[["w", "F32", [1] * 65, "dense"]]), "65 dimensions"),
    "a name twice": (
        contents(rows=[["w", "F32", [0], "dense"]] * 2),
        "duplicate tensor name 'w'",
    ),
    "a name tied and not": (
        contents(rows=[["v", "F32", [0], "dense"], ["w", "F32", [0], "dense"], ["w", "same", "v"]]),
        "duplicate tensor name 'w'",
    ),
    "tied to nothing": (contents(rows=[["w", "same", "v"]]), "tied to 'v'"),
    "tied to itself": (contents(rows=[["w", "same", "w"]]), "tied to 'w'"),
    "tied to a tie": (
        contents(rows=[["a", "F32", [0], "dense"], ["b", "same", "a"], ["c", "same", "b"]]),
        "tied to 'b'",
    ),
    "tied to one below": (
        contents(rows=[["w", "same", "v"], ["v", "F32", [0], "dense"]]),
        "does not precede it",
    ),
    "too few values": (
        contents(rows=[GOOD], positions=b"\x01\x80", F32=bytes(4)),
        "needs more bytes than remain",
    ),
    "no values": (contents(rows=[GOOD], positions=b"\x01\x80"), "needs more bytes than remain"),
    "no such values": (contents(rows=[["w", "F64", [1], "dense"]]), "needs more bytes than remain"),
    "too few positions": (
        contents(rows=[GOOD], positions=b"\x01", F32=bytes(8)),
        "needs more bytes than remain",
    ),
    "values left": (
        contents(rows=[GOOD], positions=b"\x01\x80", F32=bytes(12)),
        "belong to no tensor",
    ),
    "other values left": (
        contents(rows=[GOOD], positions=b"\x01\x80", F32=bytes(8), U8=b"x"),
        "'values.U8' has bytes that belong to no tensor",
    ),
    "positions left": (
        contents(rows=[GOOD], positions=b"\x01\x80" + bytes(8), F32=bytes(8)),
        "'positions' has bytes",
    ),
    "padding of ones": (
        contents(rows=[GOOD], positions=b"\x01\x80\x01", F32=bytes(8)),
        "'positions' has bytes",
    ),
    "mask of three": (
        contents(rows=[GOOD], positions=b"\x03\x80", F32=bytes(8)),
        "'w': mask does not mark",
    ),
    "mask outside": (
        contents(rows=[["w", "F32", [15], "mask", 2]], positions=b"\x01\x80", F32=bytes(8)),
        "'w': mask does not mark",
    ),
    "gaps outside": (
        contents(
            rows=[["w", "F32", [9], "gaps", 2, 2, 1]], positions=b"\x03\x03\x05", F32=bytes(8)
        ),
        "'w': gaps exceed the 9 elements",
    ),
    "not a bool": (
        contents(rows=[["w", "BOOL", [3], "dense"]], BOOL=b"\x00\x01\x02"),
        "neither True nor False",
    ),
    "not a sparse bool": (
        contents(rows=[["w", "BOOL", [8], "mask", 1]], positions=b"\x01", BOOL=b"\x02"),
        "neither True nor False",
    ),
    "10 TB of zeros": (contents(rows=[TEN_TERABYTES]), "takes 10,000,000,000,"),
    "1 GB of zeros a thousand times": (
        contents(rows=[[str(i), "F32", [250_000_000], "gaps", 0, 0, 0] for i in range(1000)]),
        "bytes of memory",
    ),
    "30,000 empty tensors": (
        contents(rows=[[str(i), "F32", [0], "dense"] for i in range(30_000)]),
        "table alone",
    ),
    "a bomb of spaces": (
        contents(rows=[], table=zlib.compress(b" " * 10**7, 9, wbits=11)),
        "table alone",
    ),
    "a bomb of lines": (
        contents(rows=[], table=zlib.compress(b"\n" * 10**7, 9, wbits=11)),
        "invalid line",
    ),
    "a bomb of digits": (
        contents(
            rows=[], table=zlib.compress(b'["w","F32",[' + b"1" * 10**6 + b"]]\n", 9, wbits=11)
        ),
        "table alone",
    ),
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_malicious_file_is_rejected_before_allocation(tmp_path, peak_memory, case):
    contents, expected = MALICIOUS[case]
    if case == "unknown section":
        path = write(tmp_path / "file", [], U8=b"")
        data = path.read_bytes().replace(b'"values.U8"', b'"values.F9"')
        path.write_bytes(data)
        expected = "unexpected entry 'values.F9' of U8"
    else:
        path = write(tmp_path / "file", **contents)

    def rejected():
        with pytest.raises(FileFormatError) as caught:
            load(path)
        return str(caught.value)

    limit = 50 * path.stat().st_size + 16384
    message, peak = peak_memory(rejected, limit)
    assert expected in message
    assert message.startswith(f"{path}: ")
    assert len(message) < 500
    assert peak <= limit


def test_model_shapes_must_match_claimed_shapes(tmp_path):
    path = write(tmp_path / "file", [TEN_TERABYTES])
    model = nn.Module()
    model.register_buffer("w", torch.zeros(3))
    with pytest.raises(ValueError, match=r"'w' has shape \[1000000, 2500000\] in the file"):
        load(path, model)
    with pytest.raises(ValueError, match="missing in the model: 'w'"):
        load(path, nn.Linear(2, 2))
    load(path, nn.Linear(2, 2), strict=False)  # the unexpected tensor is skipped


def test_stored_zero_is_accepted(tmp_path):
    path = write(tmp_path / "file", [GOOD], b"\x01\x80", F32=bytes(8))
    assert not load(path)["w"].any()


def test_empty_and_full_encodings(tmp_path):
    rows = [["w", "U8", [4], "gaps", 4, 0, 0], ["v", "U8", [0], "mask", 0]]
    state = load(write(tmp_path / "file", rows, U8=b"\x01\x02\x03\x04"))
    assert state["w"].tolist() == [1, 2, 3, 4]
    assert state["v"].tolist() == []


def test_long_line_takes_linear_time():
    line = zlib.compress(b'["' + b"x" * 200_000_000, 9, wbits=11)
    start = time.process_time()
    with pytest.raises(FileFormatError, match="after its last line"):
        list(table.parse(line, 10**9))
    assert time.process_time() - start < 10
