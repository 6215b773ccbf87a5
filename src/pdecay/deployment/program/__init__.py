"""Models as programs: graphs of torch operators that run without the model's Python code.

    capture     record a model, deployed or not, by torch.export
    restore     build a module from a recorded program
    graph       the JSON form of a graph; only torch operators are allowed in it
    structure   nested inputs and outputs as flat lists of tensors
    sizes       the sizes of the inputs that a program takes
    conditions  conditions on these sizes
    operator    the operator that represents a sparse layer in a graph

A program contains data and names of operators, no pickles and no Python code.
"""

from pdecay.deployment.program.capture import Captured, capture
from pdecay.deployment.program.restore import SavedModel, restore

__all__ = ["Captured", "SavedModel", "capture", "restore"]
