"""Ramps that raise a sparsity or a threshold over the course of the training."""

from __future__ import annotations


def linear_ramp(step: float, begin: float, end: float) -> float:
    """Return 0 up to `begin`, 1 from `end` on, and a straight line between them."""
    if step <= begin:
        return 0.0
    return 1.0 if step >= end else (step - begin) / (end - begin)


def cubic_ramp(step: float, begin: float, end: float) -> float:
    """Return ``1 - (1 - x)^3`` of the linear ramp x: steep at first, then flatter.

    Early in the training many weights are redundant, so the ramp rises fastest there.
    """
    return 1 - (1 - linear_ramp(step, begin, end)) ** 3
