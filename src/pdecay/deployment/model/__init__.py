"""Code that all of deployment shares: example inputs, outputs, and a model's state.

    inputs        the example inputs that a model runs on
    outputs       a model's output tensors, and the comparison of two models by them
    state         eval mode, copies and shared memory
    program       a model as a program of ``torch.export``
    errors        the exceptions

These modules import nothing else from `pdecay.deployment`.
"""
