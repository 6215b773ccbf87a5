"""The HTML page: one file that loads nothing else.

`page` inserts the files of ``assets/`` and the data into ``index.html``. Text from records cannot
be executed: the data are JSON with ``<``, ``>`` and ``&`` escaped, the script creates text nodes
and never parses HTML, and the content security policy allows only the page's own script and style,
by their digests.
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
    """Return the HTML page for the result of `page_data.page_data`."""
    style = _asset("style.css")
    script = '"use strict";\n{\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "}\n"
    parts = {
        "style": style,
        "style_digest": _digest(style),
        "script": script,
        "script_digest": _digest(script),
        "data": _escaped_json(data),
        "version": pdecay.__version__,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("index.html"))


def _asset(name: str) -> str:
    return (files("pdecay.lab.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _escaped_json(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end its script element or start a comment."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return plain
