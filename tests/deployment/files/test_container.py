"""The safetensors container: agreement with safetensors, and rejection of malicious headers."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as reference_save

from pdecay.deployment.files import FileFormatError
from pdecay.deployment.files.container import Container, header_bytes


def write(path, header, data=b""):
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(shape=(2,), offsets=(0, 2), dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_file_written_by_safetensors(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b/ü": torch.tensor(True), "c": torch.empty(0, 4)}
    path = tmp_path / "file"
    path.write_bytes(reference_save(tensors, metadata={"note": 'a "b" \\ \n ü', "": ""}))
    with Container(path) as container:
        assert container.metadata == {"note": 'a "b" \\ \n ü', "": ""}
        assert container.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = container.entries[name]
            assert found.shape == tuple(tensor.shape)
            assert found.end - found.begin == tensor.nbytes
            values = np.empty(tensor.shape, tensor.numpy().dtype)
            container.read_into(values, found.begin)
            assert np.array_equal(values, tensor.numpy())


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.slow
@settings(deadline=None)
@given(
    names=st.dictionaries(TEXT.filter(lambda name: name != "__metadata__"), st.integers(0, 9)),
    metadata=st.dictionaries(TEXT, TEXT, max_size=5),
    min_length=st.integers(0, 2000),
)
def test_written_header_is_read_by_pdecay_and_safetensors(
    tmp_path_factory, names, metadata, min_length
):
    start = header_bytes(
        ((name, "U8", (size,), size) for name, size in names.items()), metadata, min_length
    )
    assert len(start) >= min_length
    assert len(start) % 8 == 0
    data = start + bytes(range(256))[: sum(names.values())]
    assert {name for name, _ in safetensors.deserialize(data)} == set(names)
    path = tmp_path_factory.mktemp("one", numbered=True) / "file"
    path.write_bytes(data)
    with Container(path) as container:
        assert container.metadata == metadata
        assert list(container.entries) == list(names)
        offset = len(start)
        for name, size in names.items():
            found = container.entries[name]
            assert (found.begin, found.shape) == (offset, (size,))
            offset += size


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"shape":[2],"dtype":"U8","data_offsets":[0,2]}}',
        '{ "a" :\t{ "dtype" : "U8" , "shape":[ 2 ] ,\n"data_offsets":[ 0 , 2 ] } }  ',
        '{"\\u0061":{"dtype":"U8","shape":[1,2,1],"data_offsets":[0,2]}}',
    ],
)
def test_reads_equivalent_json(tmp_path, text):
    with Container(write(tmp_path / "file", text, b"xy")) as container:
        assert list(container.entries) == ["a"]


def test_reads_header_without_tensors(tmp_path):
    for text in ("{}", "{ } ", '{"__metadata__":{}}'):
        with Container(write(tmp_path / "file", text)) as container:
            assert container.entries == container.metadata == {}


NO_HEADER = "header is not a JSON object of tensor entries"
MALICIOUS = {
    "header length": (b"\xff" * 8 + b"{}", "claims a header of 18,446,744,073,709,551,615 bytes"),
    "text": (b"import torch\n" * 9, "not a weight file: expected a file written by pdecay.save"),
    "nothing": (b"", "0 bytes are too few"),
    "seven bytes": (b"1234567", "7 bytes are too few"),
    "pickle": (b"\x80\x02}q\x00." + b"x" * 80, "use torch.load"),
    "no object": ("[]", NO_HEADER),
    "space first": (" {}", NO_HEADER),
    "empty header": ("", NO_HEADER),
    "not UTF-8": (b"{\xff}", "header is not UTF-8"),
    "half a header": ('{"a":{"dtype":"U8","shape":[2],', NO_HEADER),
    "data after the end": ("{} {}", "Extra data"),
    "trailing comma": (
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},}',
        "is not valid JSON",
    ),
    "nesting": ("[" * 99_999, NO_HEADER),
    "nesting inside": ('{"a":' + "[" * 99_999, NO_HEADER),
    "nested entries": ('{"a":' * 999 + "{}" + "}" * 999, NO_HEADER),
    "numbers for entries": ({"a": 3}, NO_HEADER),
    "floats": ('{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}', NO_HEADER),
    "NaN": ('{"a":{"dtype":NaN,"shape":[2],"data_offsets":[0,2]}}', "NaN is not allowed"),
    "true": ('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,2]}}', NO_HEADER),
    "bare words": ('{"a":{"dtype":U8,"shape":[2],"data_offsets":[0,2]}}', "is not valid JSON"),
    "missing comma": ('{"a":{"dtype":"U8" "shape":[2],"data_offsets":[0,2]}}', "is not valid JSON"),
    "two commas": ('{"a":{"dtype":"U8","shape":[2,,1],"data_offsets":[0,2]}}', NO_HEADER),
    "a raw line break": ('{"a\n":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', NO_HEADER),
    "half a character": (
        '{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        "surrogates not allowed",
    ),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "not an object of strings"),
    "metadata in a list": ('{"__metadata__":[1]}', "not an object of strings"),
    "metadata as a string": ('{"__metadata__":"a"}', "not an object of strings"),
    "half a character in the metadata": ('{"__metadata__":{"a":"\\udc00"}}', "surrogates"),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', "duplicate key"),
    "metadata key twice": ('{"__metadata__":{"a":"","a":""}}', "duplicate key"),
    "name twice": (
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        '"\\u0061":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        "duplicate key",
    ),
    "field twice": (
        '{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}',
        "duplicate key",
    ),
    "field too many": ({"a": entry() | {"more": "x"}}, "and nothing else"),
    "field missing": ({"a": {"dtype": "U8", "shape": [2]}}, "must have a dtype"),
    "three offsets": ({"a": entry(offsets=[0, 1, 2])}, "must have a dtype"),
    "dtype": ({"a": entry(dtype="F9")}, "unknown dtype 'F9'"),
    "negative": ({"a": entry(shape=[-2])}, NO_HEADER),
    "large numbers": ({"a": entry(shape=[10**30])}, NO_HEADER),
    "product overflow": ({"a": entry(shape=[2**40, 2**40])}, "impossible shape"),
    "product wraps to 2": ({"a": entry(shape=[2**63 + 1, 2])}, "impossible shape"),
    "empty, yet impossible": ({"a": entry([0, 2**40, 2**40], [0, 0])}, "impossible shape"),
    "dimensions": ({"a": entry(shape=[1] * 65)}, "65 dimensions"),
    "too short": ({"a": entry(shape=[3])}, "has 2 bytes, but shape [3] of U8 needs 3"),
    "wrong dtype": ({"a": entry(dtype="F32")}, "needs 8"),
    "odd bits": ({"a": entry(shape=[3], dtype="F4")}, "needs 2"),
    "offsets backwards": ({"a": entry(offsets=[2, 0])}, "has -2 bytes"),
    "overlap": ({"a": entry(), "b": entry([1], [1, 2])}, "must not overlap"),
    "same place": ({"a": entry(), "b": entry()}, "must not overlap"),
    "gap": ({"a": entry([1], [1, 2])}, "expected"),
    "beyond the end": ({"a": entry([9], [0, 9])}, "but the file ends at"),
    "bytes left": ({"a": entry([1], [0, 1])}, "but the file ends at"),
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_malicious_header_is_rejected(tmp_path, case):
    header, message = MALICIOUS[case]
    path = tmp_path / "file"
    if isinstance(header, bytes) and header != b"{\xff}":
        path.write_bytes(header)
    else:
        write(path, header, b"xy" if isinstance(header, dict) or '"a"' in str(header) else b"")
    with pytest.raises(FileFormatError) as caught:
        Container(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "repeated",
    [
        "[[]],",
        "[],",
        "{},",
        '{"":',
        "[",
        '"":"",',
        '"ab":"",',
        '"":[],',
        "[1],",
        '"\\n',
        "9,",
        '"😀":"",',
    ],
)
@pytest.mark.parametrize("before", ["{", '{"a":', '{"__metadata__":{', '{"a":{"shape":['])
def test_header_memory_is_at_most_50_times_its_size(tmp_path, peak_memory, before, repeated):
    path = write(tmp_path / "file", before + repeated * (200_000 // len(repeated)))

    def rejected():
        with pytest.raises(FileFormatError):
            Container(path)

    limit = 50 * path.stat().st_size
    _, peak = peak_memory(rejected, limit)
    assert peak <= limit


def test_valid_header_memory_is_at_most_40_times_its_size(tmp_path, peak_memory):
    text = '{"__metadata__":{' + ",".join(f'"{i}":""' for i in range(30_000)) + "}}"
    path = write(tmp_path / "file", text)

    def opened():
        with Container(path) as container:
            return len(container.metadata)

    limit = 40 * path.stat().st_size
    entries, peak = peak_memory(opened, limit)
    assert entries == 30_000
    assert peak <= limit


def test_missing_and_special_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        Container(tmp_path / "missing")
    with pytest.raises(FileFormatError, match="not a regular file"):
        Container(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="not a regular file"):
        Container(tmp_path / "pipe")


def test_truncation_after_opening_is_an_error(tmp_path):
    path = write(tmp_path / "file", {"a": entry([4000], [0, 4000])}, bytes(4000))
    with Container(path) as container:
        os.truncate(path, 1000)
        with pytest.raises(FileFormatError, match="file ends at byte 1,000"):
            container.read(container.entries["a"].begin, 4000)


@pytest.mark.parametrize("end", ["", "\n", "\\"])
def test_string_without_end_takes_linear_time(tmp_path, end):
    path = write(tmp_path / "file", '{"' + '\\"' * 1_000_000 + end)
    start = time.process_time()
    with pytest.raises(FileFormatError, match=NO_HEADER):
        Container(path)
    assert time.process_time() - start < 10  # an hour, if the end is searched from each quote
