"""Imports between the packages of pdecay point one way."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "pdecay"

# Each package may import those before it.
ORDER = ("_utils", "_core", "_native", "prox", "_optim", "_sparsity", "deployment", "lab", "cli")
# No other package imports these. Each may import the packages up to the given one.
LEAVES = {
    "functional": "_optim",
    "optax": "_core",
    "keras": "_core",
    "sklearn": "_native",
    "integrations": "deployment",
}

FILES = [
    path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem in LEAVES
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    package = package_of(path)
    allowed = ORDER[: ORDER.index(LEAVES.get(package, package)) + 1]
    for module in imported(path):
        target = module.split(".")[1] if "." in module else "pdecay"
        if target == package or target not in (*ORDER, *LEAVES):
            continue
        assert target in allowed, f"{package} must not import {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_stay_in_their_package(path):
    package = package_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pdecay.")):
            continue
        if node.module.split(".")[1] == package:
            continue
        for alias in node.names:
            module = SOURCE.joinpath(*node.module.split(".")[1:], alias.name)
            is_module = module.with_suffix(".py").exists() or module.is_dir()
            assert is_module or not alias.name.startswith("_"), f"{node.module}.{alias.name}"


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the modules of pdecay that a file imports, at any level."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pdecay":
            if node.module == "pdecay":
                modules |= {home_of(alias.name) for alias in node.names}
            else:
                modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.startswith("pdecay.")}
    return modules


def home_of(name: str) -> str:
    """Return the module that defines a name of the public surface."""
    import pdecay

    return f"pdecay.{pdecay._HOME.get(name, name)}"
