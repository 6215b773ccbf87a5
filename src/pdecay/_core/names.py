"""Names of the parameters that do not decay although they may have two dimensions or more.

The biases of attention layers have two dimensions in flax and Keras, those of convolutions three in
equinox. The scale of a batch norm has four in haiku, and a stack of layers adds one to all. A test
for zeros recognises them only before the first training.
"""

from __future__ import annotations

EXCLUDED_NAMES = frozenset({"beta", "bias", "gamma", "offset", "scale"})
