"""The fused steps: an optimizer's own update and the p-norm decay, in one pass over memory.

`native` runs them in C on the CPU (`build` compiles it at first use), `compiled` through
`torch.compile` on any device. Both have the same three functions: `adam_`, `sgd_`, `shrink_`.
"""
