"""The public surface: one list of names, each of which resolves and is documented."""

import ast
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import pdecay

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pdecay" / "__init__.py"


@pytest.mark.parametrize("name", pdecay.__all__)
def test_public_name_resolves_and_has_a_docstring(name):
    assert getattr(pdecay, name).__doc__


def test_type_checkers_and_runtime_see_the_same_names():
    tree = ast.parse(SOURCE.read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert {seen.pop(name) for name in pdecay._SUBMODULES} == {"pdecay"}
    assert seen == {name: f"pdecay.{home}" for name, home in pdecay._HOME.items()}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'pdecay' has no attribute 'PAdamW'"):
        pdecay.PAdamW  # noqa: B018


def test_dir_lists_public_names_only():
    assert set(dir(pdecay)) == {*pdecay.__all__, "__version__"}


def test_help_reads_as_a_table_of_contents():
    text = pydoc.plain(pydoc.render_doc(pdecay))
    for name in ("PAdam", "SparsityTarget", "deploy", "attach(optimizer"):
        assert name in text
    assert "_HOME" not in text


def test_import_does_not_load_torch():
    code = "import pdecay, sys; pdecay.Lp(0.8, 1e-2); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
