"""Hugging Face transformers: a callback for Trainer, sparse model folders, and generation.

_callback     SparsityCallback
_pretrained   from_pretrained and save_pretrained
_generation   generation_example, the example inputs of a model with a key-value cache

The package needs ``transformers``; Trainer also needs ``accelerate``.
"""

from pdecay.integrations.transformers._callback import SparsityCallback
from pdecay.integrations.transformers._generation import generation_example
from pdecay.integrations.transformers._pretrained import from_pretrained, save_pretrained

__all__ = ["SparsityCallback", "from_pretrained", "generation_example", "save_pretrained"]
