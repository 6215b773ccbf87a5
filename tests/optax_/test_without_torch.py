"""JAX users need no torch."""

import subprocess
import sys

CODE = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from pdecay import Every, Lp
import pdecay.optax
import jax.numpy as jnp
import optax

try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch was not blocked")
params = {"kernel": jnp.ones((2, 2))}
for auxiliary in (None, Every(2)):
    tx = optax.chain(
        pdecay.optax.padam(0.1, decay=Lp(0.8, 0.1) + Lp(2, 0.1), auxiliary=auxiliary),
        pdecay.optax.sparsity_target(0.5, 10),
    )
    updates, state = tx.update(params, tx.init(params), params)
assert "torch" not in sys.modules
"""


def test_import_and_step_without_torch():
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
