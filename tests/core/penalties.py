"""Penalties of one norm and sums of several, for the tests of all penalties."""

from pdecay import Lp

PENALTIES = [
    Lp(0, 0.3),
    Lp(0.5, 0.1),
    Lp(1, 0.2),
    Lp(1.5, 0.7),
    Lp(2, 0.4),
    Lp(3, 0.1),
    Lp(4, 2),
    Lp(0.8, 1e-3) + Lp(2, 2e-3),
    Lp(1, 0.1) + Lp(2, 0.2) + Lp(3, 0.3),
    Lp(0, 0.1) + Lp(0.5, 0) + Lp(0.5, 0.2) + Lp(3.5, 0.3) + Lp(2, 0.4),
]
