"""Inspection of weight files: zeros, dead units, bytes, and the distribution of magnitudes.

    sources     opens a sparse file, a safetensors file or a torch.save checkpoint
    torch_files reads torch.save checkpoints without torch.load
    pickles     reads pickles as plain data
    counts      counts one tensor, block by block
    histogram   counts and draws log10 |w|
    inspection  the result and its table

A tensor of a sparse file is never expanded. Only its stored elements are read, so any file can be
inspected, whatever memory its tensors would take.
"""

from pdecay.deployment.inspect.inspection import Inspection, inspect

__all__ = ["Inspection", "inspect"]
