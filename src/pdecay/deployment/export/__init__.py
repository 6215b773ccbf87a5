"""Export of models to files that run without their Python code.

onnx        ONNX files, verified in ONNX Runtime
torch_file  ``.pt2`` programs of torch.export, and pickled ``.pt`` modules
"""

from pdecay.deployment.export.onnx import OnnxFile, export_onnx
from pdecay.deployment.export.torch_file import TorchFile, export_torch

__all__ = ["OnnxFile", "TorchFile", "export_onnx", "export_torch"]
