"""compact's own error."""

from __future__ import annotations


class CompactError(RuntimeError):
    """A model that cannot be compacted; nothing was changed."""
