"""P-norm weight decay for Keras 3, on TensorFlow, JAX and torch.

    from pdecay import Lp
    from pdecay.keras import PAdam, SparsityTarget

    model.compile(PAdam(1e-3, decay=Lp(0.8, 1e-2)), "sparse_categorical_crossentropy")
    model.fit(x, y, epochs=20, callbacks=[SparsityTarget(0.9)])  # ends with 90 % zeros

:func:`with_p_norm_decay` adds the decay to any Keras optimizer class. :class:`PAdam` and
:class:`PSGD` are Keras' Adam and SGD with it. The callback :class:`SparsityLogger` logs the share
of zeros, and :class:`SparsityTarget` steers the decay to a given share. :func:`freeze_zeros` keeps
zeros while the other weights train on, and :func:`sparsity` counts them.

Keras chooses its backend by the environment variable ``KERAS_BACKEND``. This package imports torch
only if the backend is torch. Import it before ``keras.saving.load_model``: the import makes its
optimizers known to Keras.
"""

from pdecay.keras._callbacks import SparsityLogger, SparsityTarget, sparsity
from pdecay.keras._optimizers import (
    PSGD,
    PAdam,
    PNormDecay,
    freeze_zeros,
    with_p_norm_decay,
)

__all__ = [
    "PSGD",
    "PAdam",
    "PNormDecay",
    "SparsityLogger",
    "SparsityTarget",
    "freeze_zeros",
    "sparsity",
    "with_p_norm_decay",
]
