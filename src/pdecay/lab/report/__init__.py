"""From records to a page, figures and tables.

The way data flow: `study` groups the records, `best` and `contours` compute, `style` gives colours
and markers; `figures` and `tables` draw and list, `payload` and `page` make the page of the same
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pdecay.lab.report.study import Study, studies
from pdecay.lab.train import records

__all__ = ["Study", "load", "write"]


def load(paths: Iterable[str | Path]) -> list[Study]:
    """The studies in some files and folders of records.

    Raises:
        RecordError: something is missing, broken or newer than this version; or there is no record.
    """
    paths = list(paths)
    found = studies(records.read(paths))
    if not found:
        places = ", ".join(map(str, paths))
        raise records.RecordError(
            f"there are no records in {places}: run pdecay train or pdecay sweep first"
        )
    return found


def write(found: list[Study], out: Path) -> list[Path]:
    """Write the page, the figures and the tables of some studies to a folder.

    Everything is made beside its place and moved there when all of it is done, the page last: an
    older report stays whole if this one fails. Files that an older report wrote and this one does
    not are deleted; no other file is touched.

    Returns:
        The files, the page first.
    """
    # matplotlib is heavy, and not needed to read records
    from pdecay.lab.report import folder

    return folder.write(found, out)
