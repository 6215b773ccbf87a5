"""Settings that the tests of all kernels share."""

import torch

# (p, lam): decays that bring many weights of scale 0.05 close to zero within 200 steps
TERMS = {
    "0": [(0, 5e-5)],
    "0.3": [(0.3, 5e-4)],
    "0.5": [(0.5, 5e-3)],
    "0.8": [(0.8, 5e-2)],
    "1": [(1, 5e-2)],
    "1.2": [(1.2, 0.5)],
    "1.5": [(1.5, 0.5)],
    "1.9": [(1.9, 5.0)],
    "2": [(2, 5.0)],
    "3": [(3, 50.0)],
    "elastic": [(0.8, 5e-2), (2, 5.0)],
    "two": [(0.8, 5e-2), (1.2, 0.5)],
    "four": [(0.8, 5e-2), (2, 5.0), (1.2, 0.5), (3, 50.0)],
    "none": [],
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
ADAM |= {"amsgrad": False, "maximize": False}
SGD = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False}
