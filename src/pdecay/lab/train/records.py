"""What a run leaves behind: one JSON object a line, with all that is needed to judge and repeat it.

    {"schema": 1, "id": "1f0c...", "settings": {...}, "result": {...}, "curve": [...],
     "status": "ok", "environment": {...}, "timing": {...}}

`id` is made of the settings alone. Two runs are the same where all but `environment` and `timing`
is equal, to the last bit. Numbers that are not finite are null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pdecay._utils.files import replacing

SCHEMA = 1

Record = dict[str, Any]

_NUMBER, _WHOLE = (int, float), (int,)
_NUMBER_OR_NULL, _WHOLE_OR_NULL = (int, float, type(None)), (int, type(None))
_SETTINGS = {
    "task": (str,),
    "scale": (str,),
    "method": (str,),
    "seed": _WHOLE,
    "lr": _NUMBER,
    "steps": _WHOLE,
    "options": (dict,),
}
_RESULT = {
    "accuracy": _NUMBER_OR_NULL,
    "loss": _NUMBER_OR_NULL,
    "sparsity": _NUMBER_OR_NULL,
    "tradeoff": _NUMBER_OR_NULL,
    "total_sparsity": _NUMBER_OR_NULL,
    "weights": _WHOLE_OR_NULL,
    "layers": (list,),
}
_LAYER = {"name": (str,), "shape": (list,), "size": _WHOLE, "zeros": _WHOLE}
_POINT = {
    "step": _WHOLE,
    "lr": _NUMBER,
    "train_loss": _NUMBER_OR_NULL,
    "accuracy": _NUMBER_OR_NULL,
    "loss": _NUMBER_OR_NULL,
    "sparsity": _NUMBER_OR_NULL,
}
_RECORD = {
    "id": (str,),
    "settings": (dict,),
    "result": (dict,),
    "curve": (list,),
    "status": (str,),
    "environment": (dict,),
    "timing": (dict,),
}
_STATUS = ("ok", "diverged")


class RecordError(Exception):
    """Records cannot be read or written; the message says which, why and what to do."""


def run_id(settings: Mapping[str, Any]) -> str:
    """16 hex digits that are the same for the same settings, on every machine.

    Example:
        >>> run_id({"task": "digits", "seed": 0}) == run_id({"seed": 0, "task": "digits"})
        True
    """
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tradeoff(accuracy: float, sparsity: float) -> float:
    """The paper's metric: accuracy in percent + sparsity from 0 to 1.

    One point of accuracy weighs as much as all the weights.
    """
    return accuracy + sparsity


def essence(record: Mapping[str, Any]) -> Record:
    """What of a record is the same when the run is repeated: all but where and when it ran."""
    return {key: value for key, value in record.items() if key not in ("environment", "timing")}


def read(paths: str | Path | Iterable[str | Path]) -> list[Record]:
    """All records of some files, and of the ``*.jsonl`` files anywhere in some folders.

    Runs that are the same are given once: a sweep keeps each record beside its run and in its
    list of all.

    Raises:
        RecordError: a file is missing, or holds something that is no record.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found: dict[str, Record] = {}
    for file in _files(Path(path) for path in given):
        for record in _read_file(file):
            found.setdefault(json.dumps(essence(record), sort_keys=True), record)
    return list(found.values())


def write(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records, one a line, in place of what is there: all of them or, if killed, none."""
    lines = []
    for place, record in enumerate(records, start=1):
        problem = _problem(record)
        if problem:
            raise RecordError(f"{path}, line {place}: not written, {problem}")
        lines.append(json.dumps(record, allow_nan=False) + "\n")
    with replacing(Path(path)) as file:
        file.write("".join(lines).encode())


def _files(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.rglob("*.jsonl"))
            if not inside:
                raise RecordError(
                    f"{path} has no records (*.jsonl) in it: give the folder that pdecay train or "
                    "pdecay sweep wrote to with --out, once a run there has finished"
                )
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise RecordError(
                f"{path} does not exist: give a file of records, or a folder that pdecay train or "
                "pdecay sweep wrote to with --out"
            )
    return list(dict.fromkeys(files))


def _read_file(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise RecordError(f"{path} is not text: give a file of records (*.jsonl)") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_refuse)
        except ValueError as error:
            raise RecordError(
                f"{path}, line {place} is not JSON ({error}): it was cut short or altered; take "
                "the line out, or run it again"
            ) from None
        problem = _problem(record)
        if problem:
            raise RecordError(f"{path}, line {place}: {problem}")
        records.append(record)
    return records


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _problem(record: object) -> str:
    """What is wrong with a record and what to do; empty if nothing is."""
    if not isinstance(record, Mapping) or "schema" not in record:
        return "this is no pdecay record; take it out of the folder, or name the files that are"
    schema = record["schema"]
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        return f"schema must be a whole number >= 1, got {schema!r}; take the line out"
    if schema > SCHEMA:
        return (
            f"schema {schema} was written by a newer pdecay (this one reads up to {SCHEMA}): "
            "upgrade pdecay"
        )
    wrong = (
        _mismatch("record", record, _RECORD)
        or _mismatch("settings", record["settings"], _SETTINGS)
        or _mismatch("result", record["result"], _RESULT)
        or _first("result.layers", record["result"]["layers"], _LAYER)
        or _first("curve", record["curve"], _POINT)
    )
    if wrong:
        return f"{wrong}; the line was altered: take it out, or run it again"
    if record["status"] not in _STATUS:
        return f"status must be one of {', '.join(_STATUS)}, got {record['status']!r}"
    expected = run_id(record["settings"])
    if record["id"] != expected:
        return (
            f"id {record['id']!r} is not that of its settings ({expected!r}); one of them was "
            "altered: take the line out, or run it again"
        )
    return ""


def _first(where: str, items: list[object], fields: Mapping[str, tuple[type, ...]]) -> str:
    problems = (_mismatch(f"{where}[{k}]", item, fields) for k, item in enumerate(items))
    return next(filter(None, problems), "")


def _mismatch(where: str, value: object, fields: Mapping[str, tuple[type, ...]]) -> str:
    if not isinstance(value, Mapping):
        return f"{where} must be an object, got {value!r}"
    for name, kinds in fields.items():
        if name not in value:
            return f"{where} lacks {name!r}"
        found = value[name]
        if not isinstance(found, kinds) or isinstance(found, bool):
            expected = " or ".join(
                "null" if kind is type(None) else kind.__name__ for kind in kinds
            )
            return f"{where}'s {name!r} must be {expected}, got {found!r}"
    return ""
