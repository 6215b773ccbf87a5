"""Removing what contributes nothing: a smaller model that computes the same.

How it is done, in the order of the modules: the model's operations on an example are written down
(:mod:`trace`); for each kind of operation it is known (:mod:`rules`) which positions of its tensors
belong together (:mod:`units`), which elements vary and which are read (:mod:`analysis`); so it is
seen which units may go (:mod:`plan`), they are cut out (:mod:`surgery`), the code that kept their
number is told the new one (:mod:`fitting`), and the outputs are compared (:mod:`verify`).
"""

from pdecay.deployment.compact.compaction import compact
from pdecay.deployment.compact.report import CompactReport, Left, SmallerTensor
from pdecay.deployment.model.errors import CompactError

__all__ = ["CompactError", "CompactReport", "Left", "SmallerTensor", "compact"]
