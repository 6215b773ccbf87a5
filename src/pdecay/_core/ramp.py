"""Ramps that raise a sparsity or a threshold over the course of the training."""

from __future__ import annotations

from pdecay._core.validation import check_number, percent_hint

_STAGES = 200  # rankings along a ramp: ranking all weights at each step would be slow


def check_target(name: str, target: object) -> float:
    """Return a share above 0 and below 1, or raise ValueError."""
    share = check_number(name, target)
    if not 0 < share < 1:
        raise ValueError(f"{name} must be above 0 and below 1, got {target!r}{percent_hint(share)}")
    return share


def check_ramp(start: float, end: float) -> None:
    """Raise ValueError unless a ramp's ends are shares of the training, in order."""
    if not 0 <= check_number("start", start) < check_number("end", end) <= 1:
        raise ValueError(f"0 <= start < end <= 1 must hold, got start={start!r}, end={end!r}")


def ramp_steps(start: float, end: float, total_steps: int) -> tuple[int, int, int]:
    """Return the first and the last step of a ramp, and the number of steps between rankings."""
    first = int(start * total_steps)
    last = max(first + 1, round(end * total_steps))
    return first, last, max(1, (last - first) // _STAGES)


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
