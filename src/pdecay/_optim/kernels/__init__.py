"""Fused kernels: an optimizer's own update and the p-norm decay in one pass over memory.

`native` runs them in C on the CPU, `compiled` through `torch.compile` on any device. Both have the
functions `adam_`, `sgd_` and `decay_`. `selection` chooses between them.
"""
