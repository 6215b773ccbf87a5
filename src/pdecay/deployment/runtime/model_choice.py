"""The choice of the version of the whole model that is deployed, by its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from pdecay.deployment.layers.modules import SparseLayer
from pdecay.deployment.model.inputs import Inputs
from pdecay.deployment.model.state import keeping_attributes
from pdecay.deployment.runtime.layer_choice import CHOICES, Choice, Choose
from pdecay.deployment.runtime.timing import Timing, interleaved

_TIE = 1.02  # times within this ratio count as equal
_MODEL_SECONDS = 0.5  # for the measurement of the whole model, at least
_TURN = 50e-3  # seconds; long enough to bring large weights back into the cache


@torch.inference_mode()
def time_models(
    models: Mapping[str, nn.Module],
    inputs: Inputs,
    seconds: float,
    say: Callable[[float, str], None],
) -> tuple[dict[str, float], dict[str, float], Timing]:
    """Return each model's seconds of an undisturbed and of the median run, and the measurement."""
    distinct = list({id(one): one for one in models.values()}.values())
    calls = [partial(inputs.call, one, copy=False) for one in distinct]
    start = time.perf_counter()

    def on_round() -> None:
        say((time.perf_counter() - start) / max(seconds, 1e-9), "the whole model")

    on_round()
    with keeping_attributes(*distinct, skip=SparseLayer):
        least = min(_MODEL_SECONDS, seconds)
        timing = interleaved(
            calls, rounds=6, seconds=least, limit=seconds, turn=_TURN, on_round=on_round
        )
    index = {id(one): k for k, one in enumerate(distinct)}
    times, medians = (
        {name: seconds[index[id(one)]] for name, one in models.items()}
        for seconds in (timing.seconds, timing.medians)
    )
    return times, medians, timing


def choose_model(times: Mapping[str, float], choose: Choose) -> Choice:
    """Return the model to deploy, of those whose outputs are correct."""
    if choose == "measured":
        return _fastest(times)
    asked = (
        {"sparse": "sparse", "dense": "smaller"}.get(choose)
        if isinstance(choose, str)
        else choose["chosen"]
    )
    return next(name for name in CHOICES[CHOICES.index(asked) :] if name in times)


def _fastest(times: Mapping[str, float]) -> Choice:
    """Prefer sparse, then smaller, among models close to the fastest and not slower than dense."""
    best = min(times[name] for name in CHOICES if name in times)
    for name in CHOICES:
        if name in times and times[name] <= min(_TIE * best, times["dense"]):
            return name
    return "dense"
