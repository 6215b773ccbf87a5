"""ignite and skorch reproduce the plain loop; 8-bit optimizers decay by the reference's factor."""

import io

import pytest
import torch
from torch import nn

from pdecay import Lp, SparsityTarget, attach

from . import loops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
STEPS = loops.EPOCHS * loops.BATCHES


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ignite_resumes_as_the_plain_loop(accumulate):
    pytest.importorskip("ignite")
    from ignite.engine import Events, create_supervised_trainer

    def start():
        model = loops.build()
        optimizer = loops.padam(model)
        SparsityTarget(optimizer, loops.TARGET, STEPS // accumulate)
        loss = nn.CrossEntropyLoss()
        options = {"gradient_accumulation_steps": accumulate}
        return model, optimizer, create_supervised_trainer(model, optimizer, loss, **options)

    model, optimizer, trainer = start()
    file = io.BytesIO()

    @trainer.on(Events.EPOCH_COMPLETED(once=3))
    def save():
        state = {"model": model, "optimizer": optimizer, "trainer": trainer}
        torch.save({name: one.state_dict() for name, one in state.items()}, file)

    trainer.run(loops.loader(), max_epochs=loops.EPOCHS)
    expected = loops.plain_loop(accumulate)
    loops.assert_equal(model, expected)

    resumed, optimizer, trainer = start()
    file.seek(0)
    state = torch.load(file)
    for name, one in (("model", resumed), ("optimizer", optimizer), ("trainer", trainer)):
        one.load_state_dict(state[name])
    trainer.run(loops.loader(), max_epochs=loops.EPOCHS)
    loops.assert_equal(resumed, expected)


def test_skorch_resumes_as_the_plain_loop(tmp_path):
    skorch = pytest.importorskip("skorch")

    class Target(skorch.callbacks.Callback):
        def on_train_begin(self, net, **kwargs):
            SparsityTarget(net.optimizer_, loops.TARGET, STEPS)

    def start(epochs):
        return skorch.NeuralNet(
            loops.build(),
            criterion=nn.CrossEntropyLoss,
            optimizer=loops.PAdam,
            optimizer__decay=loops.DECAY,
            lr=1e-2,
            batch_size=16,
            max_epochs=epochs,
            train_split=None,
            callbacks=[Target()],
            verbose=0,
        )

    x, y = loops.data().tensors
    files = {name: tmp_path / name for name in ("f_params", "f_optimizer", "f_history")}
    first = start(3).fit(x.numpy(), y.numpy())
    first.save_params(**files)
    net = start(loops.EPOCHS - 3).initialize()
    net.load_params(**files)
    net.partial_fit(x.numpy(), y.numpy())
    loops.assert_equal(net.module_, loops.plain_loop())


def eight_bit_optimizers():
    def torchao(params):
        from torchao.optim import AdamW8bit

        return AdamW8bit(params, lr=1e-2, weight_decay=0.0)

    def bitsandbytes(params):
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(params, lr=1e-2, weight_decay=0.0, min_8bit_size=1024)

    return [torchao, bitsandbytes]


@pytest.mark.parametrize("make", eight_bit_optimizers(), ids=lambda make: make.__name__)
@torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes long
def test_eight_bit_optimizer_decays_by_the_factor(make):
    pytest.importorskip(make.__name__)
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(128, 64)) for _ in range(2))
    ours.data.normal_(std=0.1)
    penalty = Lp(0.8, 0.1)
    optimizer, plain = make([ours]), make([theirs])
    lr = float(optimizer.param_groups[0]["lr"])  # torchao's is a float32 tensor
    attach(optimizer, penalty, fused=False)
    for _ in range(5):
        w_old = ours.detach().clone()
        theirs.data.copy_(w_old)
        ours.grad = torch.randn_like(w_old)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        plain.step()
        assert not torch.equal(theirs, w_old)
        assert torch.equal(ours, theirs * penalty.factor(w_old, lr))
    names = {name for state in optimizer.state.values() for name in state}
    assert not {"exp_avg", "state1"}.isdisjoint(names)

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = nn.Parameter(ours.detach().clone())
    resumed = make([again])
    attach(resumed, penalty, fused=False)
    resumed.load_state_dict(torch.load(file, weights_only=False))  # torchao's own tensor type
    for param in (ours, again):
        param.grad = torch.ones_like(param)
    optimizer.step()
    resumed.step()
    assert torch.equal(ours, again)


@pytest.mark.parametrize("make", eight_bit_optimizers(), ids=lambda make: make.__name__)
def test_eight_bit_optimizer_reaches_the_target(make):
    pytest.importorskip(make.__name__)

    def attached(model):
        optimizer = make(model.parameters())
        attach(optimizer, loops.DECAY)
        return optimizer

    with torch.compiler.set_stance("force_eager"):
        model = loops.plain_loop(make=attached)
    assert loops.zeros(model) == pytest.approx(0.9, abs=0.002)


@pytest.mark.parametrize("make", eight_bit_optimizers(), ids=lambda make: make.__name__)
@torch.compiler.set_stance("force_eager")
def test_target_ranks_tensors_with_eight_bit_state(make):
    pytest.importorskip(make.__name__)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 128))  # torchao keeps 32-bit state of fewer than 4096
    optimizer = make([weight])
    attach(optimizer, loops.DECAY)
    target = SparsityTarget(optimizer, 0.5, total_steps=10)
    large = torch.arange(64) % 2 == 1
    for _ in range(10):
        weight.grad = torch.randn(64, 128) * torch.where(large, 10.0, 0.1)[:, None]
        optimizer.step()
    assert target.sparsity == 0.5
    assert (weight[large] == 0).sum() < (weight[~large] == 0).sum() / 2
