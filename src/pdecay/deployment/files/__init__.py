"""Model files that store little more than the non-zero weights.

    model_io     save and load a model or a state dict
    matching     the tensors of a model that a file fills
    writer       write a file, one tensor at a time
    programs     the program of a model in its file
    pretrained   folders of Hugging Face models
    reader       read and check an untrusted file, one tensor at a time
    table        the list of tensors in a sparse file
    codec        encode the positions of non-zero elements
    container    the safetensors header
    dtypes       element types
    save_report  the report that save returns

docs/files.md specifies the format byte by byte. Every size that a file claims is checked before
memory is allocated for it.
"""

from pdecay.deployment.files.container import FileFormatError
from pdecay.deployment.files.model_io import load, read_metadata, read_rows, save
from pdecay.deployment.files.save_report import SaveReport, StoredTensor

__all__ = [
    "FileFormatError",
    "SaveReport",
    "StoredTensor",
    "load",
    "read_metadata",
    "read_rows",
    "save",
]
