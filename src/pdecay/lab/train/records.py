"""The records of runs: JSON lines with everything needed to judge and repeat a run.

    {"schema": 1, "id": "1f0c...", "settings": {...}, "result": {...}, "curve": [...],
     "status": "ok", "environment": {...}, "timing": {...}}

The id is a hash of the settings. Repeating a run changes `environment` and `timing` only. Numbers
that are not finite are null. In the result, `accuracy` is on the validation split and
`test_accuracy` on the test split; records from before the three-way split have no `test_accuracy`.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Never

from pdecay._utils.errors import UserError
from pdecay._utils.files import replacing

SCHEMA = 1

Record = dict[str, Any]
_Fields = Mapping[str, tuple[type, ...]]

_NUMBER, _WHOLE = (int, float), (int,)
_NUMBER_OR_NULL, _WHOLE_OR_NULL = (int, float, type(None)), (int, type(None))
_SETTINGS: _Fields = {
    **dict.fromkeys(("task", "scale", "method"), (str,)),
    "seed": _WHOLE,
    "lr": _NUMBER,
    "steps": _WHOLE,
    "options": (dict,),
}
_RESULT: _Fields = {
    **dict.fromkeys(
        ("accuracy", "loss", "sparsity", "tradeoff", "total_sparsity"), _NUMBER_OR_NULL
    ),
    "weights": _WHOLE_OR_NULL,
    "layers": (list,),
}
_OPTIONAL: _Fields = {"test_accuracy": _NUMBER_OR_NULL}
_TIMING: _Fields = {"seconds": _NUMBER_OR_NULL}  # optional, too
_LAYER: _Fields = {"name": (str,), "shape": (list,), "size": _WHOLE, "zeros": _WHOLE}
_POINT: _Fields = {
    "step": _WHOLE,
    "lr": _NUMBER,
    **dict.fromkeys(("train_loss", "accuracy", "loss", "sparsity"), _NUMBER_OR_NULL),
}
_RECORD: _Fields = {
    **dict.fromkeys(("id", "status"), (str,)),
    **dict.fromkeys(("settings", "result", "environment", "timing"), (dict,)),
    "curve": (list,),
}
# The ranges of numbers that reports draw. Losses have single precision, or are sums of such.
_LIMITS = {
    **dict.fromkeys(("accuracy", "test_accuracy"), (0, 100)),
    **dict.fromkeys(("sparsity", "total_sparsity"), (0, 1)),
    **dict.fromkeys(("loss", "train_loss"), (-1e100, 1e100)),
    **dict.fromkeys(("step", "steps", "size", "zeros"), (0, 2**63)),
}
_STATUS = ("ok", "diverged")
_MAX_DEPTH = 50


class RecordError(UserError):
    """Records that cannot be read or written. The message says which, why and what to do."""


def run_id(settings: Mapping[str, Any]) -> str:
    """Return 16 hex digits that depend on the settings only.

    Example:
        >>> run_id({"task": "digits", "seed": 0}) == run_id({"seed": 0, "task": "digits"})
        True
    """
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tradeoff(accuracy: float, sparsity: float) -> float:
    """Return the paper's metric: accuracy in percent + sparsity from 0 to 1.

    One point of accuracy counts as much as all the weights.
    """
    return accuracy + sparsity


def essence(record: Mapping[str, Any]) -> Record:
    """Return the reproducible part of a record: all but the environment and the timing."""
    return {key: value for key, value in record.items() if key not in ("environment", "timing")}


def read(paths: str | Path | Iterable[str | Path]) -> list[Record]:
    """Read the records of files, and of all ``*.jsonl`` files in folders and their subfolders.

    Equal runs are returned once, because a sweep writes each record twice: beside its run and in
    the list of all records.

    Raises:
        RecordError: a file is missing, or a line is not a valid record.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found: dict[str, Record] = {}
    for file in _files(Path(path) for path in given):
        for record in _read_file(file):
            found.setdefault(json.dumps(essence(record), sort_keys=True), record)
    return list(found.values())


def read_one(path: Path) -> Record:
    """Read the file of a single run.

    Raises:
        RecordError: the file is missing or damaged, or has no record or several.
    """
    found = read(path)
    if len(found) != 1:
        raise RecordError(
            f"{path} has {len(found)} records, expected the record of one run: it was truncated or "
            "altered; delete it to repeat the run"
        )
    return found[0]


def write(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by records, one a line. The file is never partially written."""
    lines = []
    for number, record in enumerate(records, start=1):
        problem = _problem(record)
        if problem:
            raise RecordError(f"{path}, line {number}: not written, {problem}")
        lines.append(json.dumps(record, allow_nan=False) + "\n")
    with replacing(Path(path)) as file:
        file.write("".join(lines).encode())


def _files(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise RecordError(
                f"{path} does not exist: give a file of records, or the --out folder of pdecay "
                "train or pdecay sweep"
            )
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise RecordError(
                f"{path} has no records (*.jsonl) in it: give the --out folder of pdecay train or "
                "pdecay sweep after a run has finished"
            )
        files += found
    return list(dict.fromkeys(files))


def _read_file(path: Path) -> list[Record]:
    try:
        # Opening a named pipe would block, and a device may have no end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise RecordError(f"{path} cannot be read: it is not a regular file")
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise RecordError(f"{path} is not text: give a file of records (*.jsonl)") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
            if _is_deeper(record, _MAX_DEPTH):
                raise ValueError(f"more than {_MAX_DEPTH} levels of brackets")
            json.dumps(record, ensure_ascii=False).encode()  # raises for unpaired surrogates
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"{path}, line {number} is not JSON ({error}): it was truncated or altered; remove "
                "the line, or repeat the run"
            ) from None
        problem = _problem(record)
        if problem:
            raise RecordError(f"{path}, line {number}: {problem}")
        records.append(record)
    return records


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _whole(text: str) -> int:
    _finite(text)  # the reports convert numbers to float
    return int(text)


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested in more levels.

    Python's JSON functions raise a RecursionError for deep values, when reading or only later.
    """
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)


def _problem(record: object) -> str:
    """Return the first problem of a record and its remedy, or an empty string."""
    if not isinstance(record, Mapping) or "schema" not in record:
        return "this is not a pdecay record; move the file, or name the files to read"
    schema = record["schema"]
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        return f"schema must be a whole number >= 1, got {schema!r}; remove the line"
    if schema > SCHEMA:
        return (
            f"schema {schema} was written by a newer pdecay (this one reads up to {SCHEMA}): "
            "upgrade pdecay"
        )
    wrong = (
        _mismatch("record", record, _RECORD)
        or _mismatch("settings", record["settings"], _SETTINGS)
        or _mismatch("result", record["result"], _RESULT)
        or _mismatch("result", record["result"], _OPTIONAL, optional=True)
        or _mismatch("timing", record["timing"], _TIMING, optional=True)
        or _first("result.layers", record["result"]["layers"], _LAYER)
        or _first("curve", record["curve"], _POINT)
        or _too_many_zeros(record["result"]["layers"])
    )
    if wrong:
        return f"{wrong}; the line was altered: remove it, or repeat the run"
    if record["status"] not in _STATUS:
        return f"status must be one of {', '.join(_STATUS)}, got {record['status']!r}"
    expected = run_id(record["settings"])
    if record["id"] != expected:
        return (
            f"id {record['id']!r} does not match its settings ({expected!r}); the line was "
            "altered: remove it, or repeat the run"
        )
    return ""


def _first(where: str, items: list[object], fields: _Fields) -> str:
    problems = (_mismatch(f"{where}[{k}]", item, fields) for k, item in enumerate(items))
    return next(filter(None, problems), "")


def _too_many_zeros(layers: list[Mapping[str, Any]]) -> str:
    for k, layer in enumerate(layers):
        if layer["zeros"] > layer["size"]:
            return f"result.layers[{k}] has {layer['zeros']} zeros in {layer['size']} weights"
    return ""


def _mismatch(where: str, value: object, fields: _Fields, optional: bool = False) -> str:
    if not isinstance(value, Mapping):
        return f"{where} must be an object, got {value!r}"
    for name, kinds in fields.items():
        if name not in value:
            if optional:
                continue
            return f"{where} lacks {name!r}"
        found = value[name]
        if not isinstance(found, kinds) or isinstance(found, bool):
            expected = " or ".join(
                "null" if kind is type(None) else kind.__name__ for kind in kinds
            )
            return f"{where}'s {name!r} must be {expected}, got {found!r}"
        if name in _LIMITS and found is not None:
            least, most = _LIMITS[name]
            if value[name] < least or value[name] > most:  # NaN is left to the JSON writer
                return f"{where}'s {name!r} must be between {least} and {most}, got {found!r}"
    return ""
