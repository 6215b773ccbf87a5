"""What is in a file of weights: zeros, dead units, bytes, and how large the weights are.

    sources     opens a sparse file, a safetensors file or a file of torch.save
    counts      reads one tensor, block by block
    histogram   of log10 |w|, in text
    report      the table
    picture     the histogram as a figure

Nothing is expanded: a tensor of a sparse file is counted by what is stored of it, so that any file
can be looked at, whatever it would take in memory.
"""

from pdecay.deployment.inspect.report import Inspection, inspect

__all__ = ["Inspection", "inspect"]
