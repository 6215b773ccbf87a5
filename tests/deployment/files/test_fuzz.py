"""Fuzz test: 10,000 mutated files either load to valid tensors or raise FileFormatError.

A load must not crash, hang, raise another error or take more than 50 times the file's size. For
more files and another seed:

    PDECAY_FUZZ=100000 PDECAY_FUZZ_SEED=1 pytest tests/deployment/files/test_fuzz.py
"""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest
import safetensors
import torch

from pdecay.deployment.files import FileFormatError, load, save

FILES = int(os.environ.get("PDECAY_FUZZ", "10000"))
SEED = int(os.environ.get("PDECAY_FUZZ_SEED", "0"))
SECONDS = 1.0
# Memory of every load, whatever the file's size: zlib's state, an error and its traceback.
SLACK = 16384

NUMBERS = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 255, 4096, 10**6, 2**31, 2**32, 2**40, 2**53]
NUMBERS += [2**62, 2**63 - 1, 2**63, 2**64, 10**18, 10**19, 10**30, -1, -(2**63)]
THINGS = [None, True, 1.5, float("nan"), "", "F32", "same", [], [1], {}, {"a": 1}, [[[]]]]
DTYPES = ["F64", "F32", "F16", "BF16", "I8", "U8", "BOOL", "C64", "F8_E4M3", "F4", "F6_E2M3", "F9"]


def originals():
    """Yield small state dicts with every encoding, several dtypes, ties and empty tensors."""
    torch.manual_seed(0)

    def sparse(shape, share, dtype=torch.float32):
        return (torch.randn(shape) * (torch.rand(shape) < share)).to(dtype)

    tied = sparse((16, 20), 0.2)
    yield {
        "gaps": sparse((40, 30), 0.05),
        "zeros": torch.randn(200).index_fill(0, torch.tensor([3, 70, 71, 150]), 0.0),
        "mask": sparse((15, 15), 0.5, torch.float16),
        "dense": torch.randn(7),
        "tied": tied,
        "again": tied,
        "flags": torch.rand(50) < 0.3,
        "steps": torch.tensor(12),
    }
    yield {
        "nothing": torch.zeros(30, 40),
        "empty": torch.zeros(0, 3),
        "half": sparse((30, 20), 0.1, torch.bfloat16),
        "complex": torch.complex(sparse((5, 6), 0.5), sparse((5, 6), 0.5)),
        "few": sparse(1000, 0.01, torch.float64),
        "small": sparse((16, 32), 0.3, torch.float8_e4m3fn),
        "ümlaut/名": torch.arange(-4, 9, dtype=torch.int16),
    }
    yield {f"layer.{i}.weight": sparse((6, 5), 0.3) for i in range(5)}


class Mutator:
    """A mutator of a file's bytes; most mutations keep the rest of the file consistent."""

    def __init__(self, data, rng):
        self.data = data
        self.rng = rng
        length = int.from_bytes(data[:8], "little")
        self.header = json.loads(data[8 : 8 + length])
        body = data[8 + length :]
        self.parts = {
            name: body[slice(*entry["data_offsets"])]
            for name, entry in self.header.items()
            if name != "__metadata__"
        }
        self.rows = []
        if "table" in self.parts:
            self.rows = list(map(json.loads, zlib.decompress(self.parts["table"]).splitlines()))

    def mutate(self):
        mutations = [self.flip, self.cut, self.splice, self.edit_header, self.edit_text, self.fill]
        if self.rows:
            mutations += [self.edit_table] * 4 + [self.edit_part] * 2
        mutation = self.rng.choice(mutations)
        return mutation.__name__, mutation()

    def flip(self):
        data = bytearray(self.data)
        for _ in range(self.rng.choice([1, 1, 2, 8])):
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        return bytes(data)

    def cut(self):
        if self.rng.random() < 0.2:
            return self.data + self.rng.randbytes(self.rng.choice([1, 7, 8, 100]))
        return self.data[: self.rng.randrange(len(self.data))]

    def splice(self):
        a, b, c = sorted(self.rng.randrange(len(self.data)) for _ in range(3))
        piece = self.data[a:b]
        return self.rng.choice(
            [
                self.data[:a] + self.data[b:],
                self.data[:c] + piece + self.data[c:],
                self.data[:c] + piece + self.data[c + len(piece) :],
            ]
        )

    def fill(self):
        a, b = sorted(self.rng.randrange(8, len(self.data)) for _ in range(2))
        return (
            self.data[:a]
            + bytes([self.rng.choice([0, 255, 32, 91, 123])]) * (b - a)
            + (self.data[b:])
        )

    def edit_text(self):
        """Replace a word or number in the text of the header."""
        text = json.dumps(self.header)
        words = [*self.header, "dtype", "shape", "U8", "F32", "0", "1", "[", "}"]
        old, new = self.rng.choice(words), self.rng.choice(words)
        place = text.find(old, self.rng.randrange(len(text)))
        if place >= 0:
            text = text[:place] + new + text[place + len(old) :]
        return self.with_header(text.encode())

    def edit_header(self):
        header = json.loads(json.dumps(self.header))
        for _ in range(self.rng.choice([1, 1, 2])):
            names = [name for name in header if isinstance(header[name], dict)]
            name = self.rng.choice(names)
            kind = self.rng.randrange(6)
            entry = header[name]
            if kind == 0:
                header[self.rng.choice([name + "x", *names])] = header.pop(name)
            elif kind == 1:
                del header[name]
            elif kind == 2 and entry:
                entry[self.rng.choice([*entry, "more"])] = self.thing()
            elif name != "__metadata__":
                for _ in range(self.rng.choice([1, 2])):
                    field = self.rng.choice(["dtype", "shape", "data_offsets"])
                    if field == "dtype":
                        entry["dtype"] = self.rng.choice(DTYPES)
                    elif isinstance(entry.get(field), list) and entry[field]:
                        index = self.rng.randrange(len(entry[field]))
                        entry[field][index] = self.number(entry[field][index])
                        if self.rng.random() < 0.2:
                            entry[field] = entry[field] * self.rng.choice([0, 2, 40])
        return self.with_header(json.dumps(header).encode())

    def edit_table(self):
        """Change the table; lines stay valid JSON and offsets consistent."""
        rows = json.loads(json.dumps(self.rows))
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            row = self.rng.choice(rows)
            kind = self.rng.randrange(10)
            if kind == 0:
                rows.remove(row)
            elif kind == 1:
                rows.insert(self.rng.randrange(len(rows) + 1), row)
            elif kind == 2:
                self.rng.shuffle(rows)
            elif kind == 3:
                row[self.rng.randrange(len(row))] = self.thing()
            elif kind == 4:
                row[1] = self.rng.choice(DTYPES)
            elif kind == 5 and isinstance(row[2], list):
                row[2] = [self.number(n) for n in row[2]] * self.rng.choice([1, 1, 0, 2, 33])
            elif kind == 6 and isinstance(row[2], list) and row[2]:
                index = self.rng.randrange(len(row[2]))
                row[2][index] = self.number(row[2][index])
            elif kind == 7 and len(row) > 3:
                row[3] = self.rng.choice(["gaps", "mask", "dense", "zip"])
                row[4:] = [self.rng.choice(NUMBERS[:12]) for _ in range(self.rng.choice([0, 1, 3]))]
            elif len(row) > 4:
                index = self.rng.randrange(4, len(row))
                row[index] = self.number(row[index])
            if not rows:
                break
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
        if self.rng.random() < 0.1:
            text *= self.rng.choice([2, 1000])
        if self.rng.random() < 0.1:
            text = self.rng.choice([text[:-1], text + b"[" * 99999, b"\n" + text, text + b"{}\n"])
        return self.assembled(self.parts | {"table": zlib.compress(text, 9, wbits=11)})

    def edit_part(self):
        """Change bytes of one part, and sometimes its length."""
        name = self.rng.choice(["positions", "positions", *self.parts])
        part = bytearray(self.parts[name])
        for _ in range(self.rng.choice([1, 3, 30])):
            if part:
                part[self.rng.randrange(len(part))] = self.rng.choice([0, 1, 128, 255, 85])
        if self.rng.random() < 0.3:
            size = self.rng.choice([0, len(part) // 2, len(part) + 1, len(part) + 8])
            part = part[:size].ljust(size, b"\0")
        return self.assembled(self.parts | {name: bytes(part)})

    def number(self, old):
        near = [old + 1, old - 1, old * 2, old // 2, old + 8] if isinstance(old, int) else []
        return self.rng.choice([*NUMBERS, *near * 3])

    def thing(self):
        return self.rng.choice([*THINGS, self.number(1)])

    def with_header(self, header):
        length = int.from_bytes(self.data[:8], "little")
        return len(header).to_bytes(8, "little") + header + self.data[8 + length :]

    def assembled(self, parts):
        """Return a consistent container of these parts."""
        header, place = {"__metadata__": self.header["__metadata__"]}, 0
        for name, part in parts.items():
            old = self.header[name]
            item = len(self.parts[name]) // max(old["shape"][0], 1) or 1
            header[name] = old | {
                "shape": [len(part) // item],
                "data_offsets": [place, place + len(part)],
            }
            place += len(part)
        return self.with_header(json.dumps(header).encode())[
            : -len(b"".join(self.parts.values()))
        ] + (b"".join(parts.values()))


def loaded(path):
    """Load a file; return its state, the error message if any, and the seconds taken."""
    start = time.process_time()
    try:
        return load(path), None, time.process_time() - start
    except FileFormatError as error:
        return {}, str(error), time.process_time() - start


def outcome(path, mutation, peak_memory):
    """Load a file, check its memory, time and result, and return "loaded" or "rejected"."""
    size = path.stat().st_size
    limit = 50 * size + SLACK
    (state, message, seconds), peak = peak_memory(lambda: loaded(path), limit)
    tensors = {id(tensor): tensor for tensor in state.values()}
    memory = peak + sum(tensor.nbytes for tensor in tensors.values())
    assert memory <= limit, f"{mutation}: {memory} for {size} bytes"
    assert seconds < SECONDS
    for tensor in tensors.values():
        raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(1)
        assert int(raw.max()) <= (1 if tensor.dtype == torch.bool else 255)
    if message is None:  # safetensors must accept the file, too
        safetensors.deserialize(path.read_bytes())
        return "loaded"
    assert message.startswith(f"{path}: ")
    assert len(message) < len(str(path)) + 500
    assert "\n" not in message
    return "rejected"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_mutated_files(tmp_path, peak_memory):
    rng = random.Random(SEED)
    mutators = []
    for number, state in enumerate(originals()):
        for dense in (False, True):
            path = tmp_path / f"{number}{dense}.safetensors"
            save(state, path, metadata={"note": "x"}, dense=dense)
            mutators += [Mutator(path.read_bytes(), rng)] * (1 if dense else 3)
    counts = Counter()
    # Overwrite one file: some file systems flush a file when it is opened again.
    with open(tmp_path / "mutated.safetensors", "wb", buffering=0) as file:
        for _ in range(FILES):
            mutation, data = rng.choice(mutators).mutate()
            file.seek(0)
            file.truncate()
            file.write(data)
            counts[mutation, outcome(Path(file.name), mutation, peak_memory)] += 1
    print(dict(sorted(counts.items())))
    # The mutations are effective: each kind is rejected at times, and enough files still load.
    mutations = {mutation for mutation, _ in counts}
    assert len(mutations) == 8
    assert all(counts[mutation, "rejected"] for mutation in mutations)
    assert sum(counts[mutation, "loaded"] for mutation in mutations) > FILES / 50
