"""The report's folder: made beside its place and moved there when all of it is done."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from matplotlib.figure import Figure

from pdecay.lab import drawing
from pdecay.lab.report import (
    best,
    contours,
    figures,
    page,
    payload,
    tables,
)
from pdecay.lab.report.study import Study
from pdecay.lab.report.style import Style

PAGE = "index.html"
_LIST = "files.json"  # what a report consists of, so that the next one can clear it away


def write(studies: Sequence[Study], out: Path) -> list[Path]:
    """See `pdecay.lab.report.write`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as name:
        made = Path(name)
        styles = [Style(study) for study in studies]
        for style in styles:
            _draw(style, made / "figures" / style.study.key)
            _list(style, made / "tables" / style.study.key)
        (made / PAGE).write_text(page.page(payload.payload(styles)), encoding="utf-8")
        written = sorted(path.relative_to(made).as_posix() for path in made.rglob("*.*"))
        (made / _LIST).write_text(json.dumps(written, indent=1) + "\n")
        older = _listed(out)
        # The page last: until then the old one stands, and it needs no other file.
        for file in sorted([*written, _LIST], key=lambda file: file == PAGE):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            (made / file).replace(out / file)
        _clear(out, older - set(written))
    return [out / PAGE, *(out / file for file in written if file != PAGE)]


def _draw(style: Style, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, figure in _figures(style):
        for kind in ("png", "svg"):
            drawing.save(figure, folder / f"{name}.{kind}")


def _figures(style: Style) -> Iterator[tuple[str, Figure]]:
    study = style.study
    run = payload.chosen(study)
    if run is None:  # every run diverged
        return
    yield "accuracy", figures.accuracy(style)
    yield "tradeoff", figures.tradeoff(style)
    scale = contours.scale(study.means)
    surfaces = [surface for surface in contours.surfaces(study, scale) if surface.drawn]
    if surfaces:
        yield "contours", figures.contours(style, surfaces, scale)
    name = next(study.name(point) for point in study.means if run in point.runs)
    dense = best.adamw(study.means)
    if run["result"]["layers"]:
        yield "layers", figures.layers(style, run, name)
    if run["curve"]:
        yield "curves", figures.curves(style, run, dense.runs[0] if dense else None, name)


def _list(style: Style, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, text in tables.files(style).items():
        (folder / name).write_text(text, encoding="utf-8")


def _listed(out: Path) -> set[str]:
    """The files of the report that is there, by its own list; none if that makes no sense."""
    try:
        names = json.loads((out / _LIST).read_text())
    except (OSError, ValueError):
        return set()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return set()
    return {name for name in names if _is_ours(PurePosixPath(name))}


def _is_ours(path: PurePosixPath) -> bool:
    """Whether a report could have written it: nothing else is ever deleted."""
    return (
        len(path.parts) == 3 and path.parts[0] in ("figures", "tables") and ".." not in path.parts
    )


def _clear(out: Path, files: set[str]) -> None:
    for file in sorted(files):
        (out / file).unlink(missing_ok=True)
        for folder in (out / file).parents[:2]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
