"""The fused steps: Adam, SGD and the bare decay, each with the p-norm decay in one pass over memory.

`native` runs them in C on the CPU (`build` compiles it at first use), `compiled` through
`torch.compile` on any device. Both have the same three functions: `adam_`, `sgd_`, `shrink_`.
"""
