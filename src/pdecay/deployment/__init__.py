"""Deployment: from sparse weights to a smaller and faster model.

model      example inputs, output comparison, model state and errors; the others build on it
compact    removal of dead units
layers     sparse layers and their CPU kernel
runtime    deploy: the faster of dense and sparse for every layer
files      the sparse file format
export     ONNX and torch.export files
inspect    reports on models and files
"""
