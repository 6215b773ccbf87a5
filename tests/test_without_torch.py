"""Users of JAX, Keras and scikit-learn need no torch: neither to install pdecay nor to run it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

# Installed packages cannot be removed for a test, so an import hook hides torch.
HIDE_TORCH = """
import sys

class HideTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, HideTorch())
"""

USE_OPTAX = """
from pdecay import Every, Lp
import pdecay.optax
import jax.numpy as jnp
import optax

params = {"kernel": jnp.ones((2, 2))}
for auxiliary in (None, Every(2)):
    tx = optax.chain(
        pdecay.optax.padam(0.1, decay=Lp(0.8, 0.1) + Lp(2, 0.1), auxiliary=auxiliary),
        pdecay.optax.sparsity_target(0.5, 10),
    )
    updates, state = tx.update(params, tx.init(params), params)
"""

USE_SKLEARN = """
from pdecay import Lp
from pdecay.sklearn import BridgeRegressor
import numpy as np

model = BridgeRegressor(penalty=Lp(1, 1.0), fit_intercept=False)
assert model.fit(np.eye(2), [4.0, 1.0]).coef_.round(9).tolist() == [2.0, 0.0]
"""

USE_KERAS = """
import os
os.environ["KERAS_BACKEND"] = "jax"
from pdecay import Lp
import pdecay.keras
pdecay.keras.PAdam(0.1, decay=Lp(0.8, 0.1))
"""

USE_TORCH = """
import pdecay
for name in ("PAdam", "attach", "prox"):
    try:
        getattr(pdecay, name)
    except ModuleNotFoundError as error:
        assert str(error) == f"pdecay.{name} needs PyTorch: pip install 'pdecay[torch]'", error
    else:
        raise SystemExit(f"pdecay.{name} needs no torch")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [USE_OPTAX, USE_SKLEARN, USE_KERAS], ids=["jax", "sklearn", "keras"]
)
def test_frameworks_work_without_torch(code):
    run(HIDE_TORCH + code + '\nassert "torch" not in sys.modules\n')


def test_names_that_need_torch_name_the_extra():
    run(HIDE_TORCH + USE_TORCH)


def installed(extra: str) -> set[str]:
    """Return the packages that ``pip install pdecay[extra]`` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "dependencies" not in project.get("dynamic", [])
    wanted = [Requirement(line) for line in project["dependencies"]]
    extras, done = [extra] if extra else [], set()
    while extras:
        done.add(extra := extras.pop())
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            wanted.append(requirement)
            if requirement.name == "pdecay":
                extras += requirement.extras - done
    return {requirement.name for requirement in wanted}


@pytest.mark.parametrize("extra", ["", "jax", "keras", "sklearn", "examples"])
def test_extra_does_not_install_torch(extra):
    assert "torch" not in installed(extra)


@pytest.mark.parametrize("extra", ["torch", "lab", "postgres", "onnx", "test", "dev", "bench"])
def test_extra_installs_torch(extra):
    assert "torch" in installed(extra)


def test_install_line_of_the_readme_installs_torch():
    line = re.search(r"pip install .*?\.\[(\w+)\]", README.read_text())
    assert line, "README.md has no line that installs an extra of this folder"
    assert "torch" in installed(line[1])


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
