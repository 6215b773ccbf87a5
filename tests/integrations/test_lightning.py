"""Lightning, Fabric and LightningCLI reproduce the plain loop, also after a killed run."""

import logging

import pytest
import torch
from torch import nn

from pdecay import EMA, SWA, PAdam, SparsityTarget, attach, sparsity

from . import loops

lightning = pytest.importorskip("lightning")
from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.cli import LightningCLI  # noqa: E402

from pdecay.integrations.lightning import SparsityCallback  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    def __init__(self, make=loops.padam):
        super().__init__()
        self.model = loops.build()
        self.make = make

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return self.make(self.model)

    def train_dataloader(self):
        return loops.loader()


class KilledError(Exception):
    pass


class Kill(Callback):
    """Raise an exception in the middle of an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.current_epoch == self.epoch and index == loops.BATCHES // 2:
            raise KilledError


def trainer_with(folder, *callbacks, **options):
    settings = {"max_epochs": loops.EPOCHS, "accelerator": "cpu", "devices": 1, "logger": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"default_root_dir": folder, "enable_checkpointing": False}
    return Trainer(**settings | options, callbacks=list(callbacks))


def attached(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    attach(optimizer, loops.DECAY)
    return optimizer


@pytest.mark.parametrize("killed_in", [2, 4], ids=["before the ramp's end", "after it"])
@pytest.mark.parametrize(
    ("options", "clip", "make"),
    [
        ({}, None, loops.padam),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, 0.5, loops.padam),
        ({"accumulate_grad_batches": 2}, None, attached),
    ],
    ids=["plain", "accumulated and clipped", "attached"],
)
def test_killed_run_resumes_as_the_plain_loop(options, clip, make, killed_in, tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_epochs=1, save_last=True)
    first = trainer_with(
        *(tmp_path, SparsityCallback(loops.TARGET, end=0.7), saves, Kill(killed_in)),
        **options | {"enable_checkpointing": True},
    )
    with pytest.raises(KilledError):
        first.fit(Module(make))
    module, again = Module(make), SparsityCallback(loops.TARGET, end=0.7)
    trainer = trainer_with(tmp_path, again, **options)
    trainer.fit(module, ckpt_path=saves.last_model_path)
    accumulate = options.get("accumulate_grad_batches", 1)
    assert trainer.global_step == loops.EPOCHS * loops.BATCHES // accumulate
    expected = loops.plain_loop(accumulate, clip, make, end=0.7)
    loops.assert_equal(module.model, expected)
    assert loops.zeros(expected) == pytest.approx(loops.TARGET, abs=0.002)
    assert trainer.logged_metrics["sparsity"] == pytest.approx(loops.TARGET, abs=0.002)
    assert "sparsity/model.0.weight" in trainer.logged_metrics


def test_target_in_configure_optimizers(tmp_path):
    def make(model):
        optimizer = loops.padam(model)
        SparsityTarget(optimizer, loops.TARGET, loops.EPOCHS * loops.BATCHES)
        return optimizer

    module = Module(make)
    trainer_with(tmp_path, SparsityCallback(every_n_steps=3)).fit(module)
    loops.assert_equal(module.model, loops.plain_loop())


def test_number_of_steps_between_logs_is_checked():
    with pytest.raises(ValueError, match="every_n_steps must be a whole number >= 1, got 0"):
        SparsityCallback(every_n_steps=0)


@pytest.mark.parametrize(
    "average",
    [
        lambda: WeightAveraging(avg_fn=EMA(0.99)),
        lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=0.2, avg_fn=SWA()),
    ],
    ids=["EMA", "SWA"],
)
def test_averages_keep_the_zeros(average, tmp_path):
    module = Module()
    trainer_with(tmp_path, SparsityCallback(loops.TARGET), average()).fit(module)
    assert sparsity(module.model, 0.0).total == pytest.approx(loops.TARGET, abs=0.002)


def test_average_that_fills_the_zeros_warns_in_any_order_of_callbacks(tmp_path):
    average = StochasticWeightAveraging(1e-2, swa_epoch_start=0.2)
    trainer = trainer_with(tmp_path, SparsityCallback(loops.TARGET), average)
    with pytest.warns(UserWarning, match=r"of the decayed weights are zero, but the target is"):
        trainer.fit(Module())


def test_freeze_and_prune(tmp_path):
    module = Module()
    callback = SparsityCallback(freeze=0.5, prune=1e-2)
    trainer_with(tmp_path, callback).fit(module)
    assert module.trainer.optimizers[0].param_groups[0]["decay_scale"] < 1e-20
    weight = module.model[0].weight
    assert not ((weight != 0) & (weight.abs() < 1e-2)).any()


def test_prune_with_a_share_keeps_the_trained_weights(tmp_path):
    module = Module()
    trainer = trainer_with(tmp_path, SparsityCallback(prune=0.9))
    with pytest.warns(UserWarning, match="not pruned: prune_: the threshold 0.9 is too high"):
        trainer.fit(module)
    assert module.model[0].weight.any()


class TwoOptimizers(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.scales = []

    def configure_optimizers(self):
        other = torch.optim.SGD([self.model[0].bias], lr=1e-3)
        return loops.padam(self.model), other

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
        self.scales.append(self.optimizers()[0].param_groups[0]["decay_scale"])


# max_steps counts the steps of all optimizers
@pytest.mark.parametrize("length", [{}, {"max_epochs": -1, "max_steps": 40}])
def test_several_optimizers_count_the_steps_of_one(length, tmp_path):
    module = TwoOptimizers()
    trainer_with(tmp_path, SparsityCallback(freeze=0.5), **length).fit(module)
    assert sum(scale == 1 for scale in module.scales) == len(module.scales) // 2
    module = TwoOptimizers()
    trainer_with(tmp_path, SparsityCallback(0.9), **length).fit(module)
    assert sparsity(module).total == pytest.approx(0.9, abs=0.01)


def test_errors_say_what_to_do(tmp_path):
    plain = Module(lambda model: torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"exactly one optimizer that decays.*got 0 among: SGD"):
        trainer_with(tmp_path, SparsityCallback(0.9)).fit(plain)
    endless = trainer_with(tmp_path, SparsityCallback(0.9), max_epochs=-1)
    with pytest.raises(ValueError, match="pass total_steps= to the callback"):
        endless.fit(Module())
    with pytest.raises(TypeError, match="floor need a target"):
        SparsityCallback(floor=0.1)


def test_fabric_reproduces_the_plain_loop():
    fabric = Fabric(accelerator="cpu", devices=1)
    model = loops.build()
    wrapped, optimizer = fabric.setup(model, loops.padam(model))
    batches = fabric.setup_dataloaders(loops.loader())
    target = SparsityTarget(optimizer, loops.TARGET, loops.EPOCHS * loops.BATCHES // 2)
    for _ in range(loops.EPOCHS):
        for index, (x, y) in enumerate(batches):
            fabric.backward(nn.functional.cross_entropy(wrapped(x), y) / 2)
            if index % 2:
                fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    assert target.last_step == loops.EPOCHS * loops.BATCHES // 2
    loops.assert_equal(model, loops.plain_loop(2, 0.5))


class ForCLI(Module):
    """The command line configures the optimizer."""

    def __init__(self):
        super().__init__()

    configure_optimizers = None


def test_command_line_accepts_pairs_as_a_decay(tmp_path):
    arguments = ["--optimizer=pdecay.PAdam", "--optimizer.lr=0.01"]
    arguments += ["--optimizer.decay=[[0.8, 0.1], [2, 0.01]]"]
    arguments += ["--trainer.callbacks+=pdecay.integrations.lightning.SparsityCallback"]
    arguments += ["--trainer.callbacks.target=0.9", "--trainer.callbacks.floor=0.01"]
    cli = LightningCLI(ForCLI, args=[*arguments, "--trainer.logger=false"], run=False)
    optimizer = cli.model.configure_optimizers()
    assert isinstance(optimizer, PAdam)
    assert optimizer.param_groups[0]["decay"] == [[0.8, 0.1], [2.0, 0.01]]
    assert optimizer.param_groups[0]["decay_1d"] is False
    assert any(isinstance(one, SparsityCallback) for one in cli.trainer.callbacks)
