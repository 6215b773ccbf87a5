"""A model in a file that takes little more than its non-zeros, and back again.

    saving, loading  the two calls
    writing, reading the file as a whole, one tensor at a time
    table            its list of tensors
    codec            where the non-zeros of a tensor stand
    container        safetensors' own part of the file
    dtypes, report   what the rest shares

docs/files.md describes the file byte by byte. Whatever it claims is checked before memory is taken.
"""

from pdecay.deployment.files.container import FileFormatError
from pdecay.deployment.files.loading import load, read_metadata
from pdecay.deployment.files.report import SaveReport, StoredTensor
from pdecay.deployment.files.saving import save

__all__ = ["FileFormatError", "SaveReport", "StoredTensor", "load", "read_metadata", "save"]
