"""The report folder: written to a temporary folder first, then moved into place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from matplotlib.figure import Figure

from pdecay.lab import drawing
from pdecay.lab.report import best, contours, figures, page, page_data, tables
from pdecay.lab.report.experiments import Experiment
from pdecay.lab.report.style import Style

_PAGE = "index.html"
_FILE_LIST = "files.json"  # the files of a report, so that the next report can delete them


def write(experiments: Sequence[Experiment], out: Path) -> list[Path]:
    """Write the page, the figures and the tables of some experiments to a folder.

    An existing report stays complete if this one fails. Files of an older report that this one
    does not contain are deleted. Other files are kept.

    Returns:
        The written files, the page first.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as folder:
        new = Path(folder)
        styles = [Style(experiment) for experiment in experiments]
        for style in styles:
            key = style.experiment.key
            for name, figure in _figures(style):
                for kind in ("png", "svg"):
                    drawing.save(figure, _prepared(new / "figures" / key / f"{name}.{kind}"))
            for name, text in tables.files(style).items():
                _prepared(new / "tables" / key / name).write_text(text, encoding="utf-8")
        (new / _PAGE).write_text(page.page(page_data.page_data(styles)), encoding="utf-8")
        written = sorted(path.relative_to(new).as_posix() for path in new.rglob("*.*"))
        (new / _FILE_LIST).write_text(json.dumps(written, indent=1) + "\n")
        older = _older_files(out)
        # The page is moved last: the old page works until then, as it needs no other file.
        for file in sorted([*written, _FILE_LIST], key=lambda file: file == _PAGE):
            (new / file).replace(_prepared(out / file))
        _delete(out, older - set(written))
    return [out / _PAGE, *(out / file for file in written if file != _PAGE)]


def _prepared(path: Path) -> Path:
    """Create the folder of a file, and return the file's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _figures(style: Style) -> Iterator[tuple[str, Figure]]:
    experiment = style.experiment
    run = page_data.initial_run(experiment)
    if run is None:  # every run diverged
        return
    yield "accuracy", figures.accuracy(style)
    yield "tradeoff", figures.tradeoff(style)
    scale = contours.colour_scale(experiment.means)
    surfaces = [one for one in contours.surfaces(experiment, scale) if one.bands]
    if surfaces:
        yield "contours", figures.contours(style, surfaces, scale)
    name = next(experiment.name(point) for point in experiment.means if run in point.runs)
    dense = best.dense_reference(experiment.means)
    if run["result"]["layers"]:
        yield "layers", figures.layers(run, name)
    if run["curve"]:
        yield "curves", figures.curves(run, dense.runs[0] if dense else None, name)


def _older_files(out: Path) -> set[str]:
    """Return the files of the report in a folder; none if its list is missing or invalid."""
    try:
        names = json.loads((out / _FILE_LIST).read_text())
    except (OSError, ValueError, RecursionError):
        return set()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return set()
    return {name for name in names if _is_report_file(PurePosixPath(name))}


def _is_report_file(path: PurePosixPath) -> bool:
    """Return whether a report can contain this path. No other file is ever deleted."""
    return (
        len(path.parts) == 3 and path.parts[0] in ("figures", "tables") and ".." not in path.parts
    )


def _delete(out: Path, files: set[str]) -> None:
    for file in sorted(files):
        if (out / file).parent.resolve() != (out.resolve() / file).parent:
            continue  # a link leads to another folder
        (out / file).unlink(missing_ok=True)
        for folder in (out / file).parents[:2]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
