"""The exceptions of deployment."""

from __future__ import annotations


class DeploymentError(RuntimeError):
    """Base class of the errors that a deployment step raises. Nothing is changed or written."""


class CompactError(DeploymentError):
    """A model cannot be compacted."""


class ExportError(DeploymentError):
    """A model cannot be exported, or the exported program does not reproduce its outputs."""
