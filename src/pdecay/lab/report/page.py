"""The page: one HTML file that needs nothing else.

The files of ``assets/`` are put together with the data. Whatever a record holds cannot leave its
place: the data are JSON in which ``<``, ``>`` and ``&`` are escaped, the script writes text and
never HTML, and the page's own security policy lets no other script run and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import pdecay

_SCRIPTS = ("core", "best", "tip", "scatter", "contours", "run", "tables", "main")


def page(data: Mapping[str, Any]) -> str:
    """The page around `data`, which is what `payload.payload` gives."""
    style = _part("style.css")
    script = '"use strict";\n{\n' + "\n".join(_part(f"{name}.js") for name in _SCRIPTS) + "}\n"
    parts = {
        "style": style,
        "style_digest": _digest(style),
        "script": script,
        "script_digest": _digest(script),
        "data": _json(data),
        "version": pdecay.__version__,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("index.html"))


def _part(name: str) -> str:
    return (files("pdecay.lab.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _json(data: Mapping[str, Any]) -> str:
    """JSON that a script element can hold: no text of it can end the element or begin a comment."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return plain
