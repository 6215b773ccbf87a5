"""foreach on the CPU: torch's own update, and the decay in C, as attach does by default."""

import pytest
import torch
from torch.optim import SGD, AdamW

import pdecay
from pdecay import PSGD, Lp, PAdam
from pdecay._optim import engine
from tests.optim.stepping import DECAY, parameters, steps
from tests.optim.test_optimizers import ELASTIC, TestEqualsAttach, weights_of

CASES, compare = TestEqualsAttach.CASES, TestEqualsAttach().compare
del TestEqualsAttach  # pytest would run its tests here, too


class TestForeachInC:
    def check(self, cls, plain, same, decay=DECAY, params=parameters, **flags):
        ours = cls(params(), lr=0.05, decay=decay, foreach=True, **flags)
        theirs = plain(params(), lr=0.05, foreach=True, **{"weight_decay": 0.0, **flags})
        pdecay.attach(theirs, decay)
        compare(ours, theirs, same)

    @pytest.mark.parametrize("decay", [DECAY, ELASTIC, Lp(0, 0.01), Lp(1, 0.2), Lp(3, 1.0), None])
    @pytest.mark.parametrize(("cls", "plain", "flags"), CASES)
    def test_equals_attach_with_every_flag(self, cls, plain, flags, decay, same):
        self.check(cls, plain, same, decay, **flags)

    @pytest.mark.parametrize(
        "dtypes",
        [
            (torch.float64,),
            (torch.bfloat16,),
            (torch.float16,),
            (torch.complex64,),
            (torch.float32, torch.bfloat16, torch.float64),
        ],
        ids=str,
    )
    @pytest.mark.parametrize(("cls", "plain"), [(PAdam, AdamW), (PSGD, SGD)])
    def test_equals_attach_with_other_dtypes(self, cls, plain, dtypes, same):
        self.check(
            cls, plain, same, params=lambda: [w for dtype in dtypes for w in parameters(dtype)]
        )

    @pytest.mark.parametrize("metric", ["magnitude", "adaptive"])
    def test_torch_computes_no_power(self, metric, monkeypatch):
        ours = PAdam(parameters(), decay=DECAY, foreach=True, metric=metric)
        exact = PAdam(parameters(), decay=DECAY, foreach=True, metric=metric, fused=False)
        monkeypatch.setattr(engine, "decay_factors", None)  # would fail if it were called
        steps(ours, 2)
        with pytest.raises(TypeError, match="not callable"):
            steps(exact, 2)

    def test_half_precision_lengths_stay_in_single_precision(self, same):
        """C would read lengths in Adam's metric as bfloat16, so torch computes the factors."""
        one, other = (
            PAdam(parameters(torch.bfloat16), lr=0.05, foreach=True, metric="adaptive", fused=fused)
            for fused in (None, False)
        )
        steps(one, 4)
        steps(other, 4)
        assert same(weights_of(one), weights_of(other))
