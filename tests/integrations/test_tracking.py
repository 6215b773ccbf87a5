"""Sparsity in experiment trackers."""

import pytest
import torch

import pdecay
from pdecay.integrations.tracking import log_sparsity

from . import loops


def trained(log, **options):
    model = loops.build()
    optimizer = pdecay.PAdam(pdecay.param_groups(model), lr=1e-2, decay=loops.DECAY)
    handle = log_sparsity(model, optimizer, log, **options)
    for x, y in loops.loader():
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, handle


def test_function_of_a_dictionary_and_a_step():
    logged = []
    model, handle = trained(lambda metrics, step: logged.append((step, metrics)), every=4, step=100)
    assert [step for step, _ in logged] == [104, 108]
    assert logged[-1][1]["sparsity"] == pdecay.sparsity(model).total
    assert set(logged[0][1]) == {"sparsity", "sparsity/0.weight", "sparsity/3.weight"}
    handle.detach()


def test_total_only():
    logged = []
    trained(lambda metrics, step: logged.append(metrics), every=8, layers=False)
    assert [set(metrics) for metrics in logged] == [{"sparsity"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        model, _ = trained(writer, every=4)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars("sparsity")
    assert [event.step for event in scalars] == [4, 8]
    assert scalars[-1].value == pytest.approx(pdecay.sparsity(model).total)
    assert events.Scalars("sparsity/0.weight")
