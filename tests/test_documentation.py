"""The documentation: its Python blocks run, the printed outputs have the shown form, names exist.

Blocks with ``>>>`` are doctests, which pytest collects from the pages itself. All other Python
blocks of a page run here, in order and in one namespace.
"""

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest
import torch

import pdecay
from pdecay import Lp

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SELF_CONTAINED = ("README.md", "index.md", "quickstart.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(page: Path) -> list[tuple[str, str]]:
    """Return the (language, text) pairs of the fenced blocks of a page, without doctests."""
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text()) if ">>>" not in text]


def has_python(page: Path) -> bool:
    return any(kind == "python" for kind, _ in code_blocks(page))


def user_objects() -> dict[str, object]:
    """Return the objects that short examples take for granted: a model, its data, its length."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    batches = [torch.randn(4, 8) for _ in range(20)]
    modules = {"torch": torch, "pdecay": pdecay, "Lp": Lp}
    data = {"batches": batches, "total_steps": len(batches), "example_inputs": batches[0]}
    return {**modules, **data, "model": model, "loss_of": lambda batch: model(batch).sum()}


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(has_python, PAGES)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {} if page.name in SELF_CONTAINED else user_objects()
    printed = ""
    for kind, text in code_blocks(page):
        if kind == "python":
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                exec(compile(text, page.name, "exec"), {"__name__": "page"} | namespace, namespace)
            printed = shown.getvalue()
        elif kind == "text":
            assert form(text) in form(printed), f"{page.name}: the output has another form now"


def form(text: str) -> str:
    """Return the first line of an output without its numbers and spacing."""
    return re.sub(r"[\d.,%\s-]+", " ", text.strip().splitlines()[0] if text.strip() else "")


@pytest.mark.slow  # imports all frameworks
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_documented_names_resolve(page):
    # Dotted names in code spans, roles and autodoc directives, not those in prose or file names.
    for name in set(re.findall(r"(?:auto\w+:: |`)(pdecay(?:\.\w+)+)", page.read_text())):
        resolve(name)


def resolve(dotted: str) -> object:
    parts = dotted.split(".")
    value: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:i]))
    return value
