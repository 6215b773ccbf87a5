"""P-norm weight decay for optax, the optimizer library of JAX.

>>> import jax.numpy as jnp
>>> import optax
>>> from pdecay import Lp
>>> from pdecay.optax import padam
>>> tx = padam(learning_rate=0.1, decay=Lp(0.5, 0.1))
>>> params = {"kernel": jnp.array([[1.0, -0.01]]), "bias": jnp.array([0.01])}
>>> state = tx.init(params)
>>> gradients = {"kernel": jnp.zeros((1, 2)), "bias": jnp.zeros(1)}
>>> for _ in range(5):
...     updates, state = tx.update(gradients, state, params)
...     params = optax.apply_updates(params, updates)
>>> [bool(w == 0) for w in params["kernel"][0]], float(params["bias"][0]) > 0
([False, True], True)

:func:`padam` and :func:`psgd` are complete optimizers. :func:`with_p_norm_decay` adds the decay to
any other gradient transformation, in the right order. :func:`p_norm_decay` is the decay alone; it
must be the last member of a chain. :func:`sparsity_target` and :func:`with_sparsity_target` prune
along a ramp to an exact share of zeros. This package does not import torch.
"""

from pdecay.optax._decay import PNormDecayState, p_norm_decay
from pdecay.optax._optimizers import padam, psgd, with_p_norm_decay
from pdecay.optax._target import SparsityTargetState, sparsity_target, with_sparsity_target

__all__ = [
    "PNormDecayState",
    "SparsityTargetState",
    "p_norm_decay",
    "padam",
    "psgd",
    "sparsity_target",
    "with_p_norm_decay",
    "with_sparsity_target",
]
