"""The actions and logs of SparsityCallback, and the ways to give Trainer an optimizer."""

from __future__ import annotations

import math

import pytest
import torch

import pdecay
from pdecay import Lp

transformers = pytest.importorskip("transformers", reason="pip install pdecay[transformers]")
pytest.importorskip("accelerate", reason="pip install pdecay[transformers]")

from pdecay.integrations.transformers import SparsityCallback  # noqa: E402

from .test_trainer import Tokens, make_model, make_optimizer, make_trainer  # noqa: E402


class Tracker(transformers.TrainerCallback):
    """A tracker as in report_to: Trainer calls it before the user's callbacks."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def short_trainer(folder, *callbacks, **more):
    settings = {"max_steps": 6, "logging_steps": 3, "save_strategy": "no", **more}
    return make_trainer(folder, callbacks=list(callbacks), **settings)


def zeros(model):
    return pdecay.sparsity(model, 0.0).total


def test_trackers_receive_total_and_layers(tmp_path):
    tracker = Tracker()
    trainer = short_trainer(tmp_path, tracker, SparsityCallback(0.5, end=0.5))
    trainer.train()
    logged = [(step, logs) for step, logs in tracker.logs if "sparsity" in logs]
    assert [step for step, _ in logged] == [3, 6]
    report = pdecay.sparsity(trainer.model)
    logs = logged[-1][1]
    assert "loss" in logs
    assert math.isclose(logs["sparsity"], report.total)
    layers = {f"sparsity/{layer.name}": layer.sparsity for layer in report.layers if layer.decayed}
    assert len(layers) == 6
    assert {key: value for key, value in logs.items() if key.startswith("sparsity/")} == layers
    history = [entry for entry in trainer.state.log_history if "sparsity" in entry]
    assert [entry["sparsity"] for entry in history] == [entry["sparsity"] for _, entry in logged]


def test_layers_can_be_left_out(tmp_path):
    tracker = Tracker()
    short_trainer(tmp_path, tracker, SparsityCallback(layers=False)).train()
    assert any("sparsity" in logs for _, logs in tracker.logs)
    assert not any("/" in key for _, logs in tracker.logs for key in logs)


def test_freeze_keeps_zeros_of_a_sparse_model(tmp_path):
    model = make_model()
    with torch.no_grad():
        for parameter in pdecay.param_groups(model)[0]["params"]:
            parameter.masked_fill_(torch.rand_like(parameter) < 0.5, 0.0)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer = short_trainer(tmp_path, SparsityCallback(freeze=0.0), model=model)
    trainer.train()
    decayed = {layer.name for layer in pdecay.sparsity(model).layers if layer.decayed}
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]), name
        if name in decayed:
            assert torch.equal(weight == 0, before[name] == 0), name


def test_freeze_waits_for_its_share_of_the_training(tmp_path):
    scales = []

    class Scales(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            scales.append(optimizer.param_groups[0]["decay_scale"])

    short_trainer(tmp_path, SparsityCallback(freeze=0.5), Scales()).train()
    assert [scale > 0.5 for scale in scales] == [True, True, False, False, False, False]
    assert min(scales) > 0


def test_prune_at_the_end(tmp_path):
    trainer = short_trainer(tmp_path, SparsityCallback(prune=1e-2))
    trainer.train()
    weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
    assert zeros(trainer.model) > 0.05
    assert weights[weights != 0].abs().min() >= 1e-2


def test_prune_with_a_share_keeps_the_trained_weights(tmp_path):
    trainer = short_trainer(tmp_path, SparsityCallback(prune=0.9))
    with pytest.warns(UserWarning, match="not pruned: prune_: the threshold 0.9 is too high"):
        trainer.train()
    assert zeros(trainer.model) < 0.5


def test_missed_target_warns(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    with pytest.warns(UserWarning, match=r"the target is 90.0%: the training stopped before"):
        short_trainer(tmp_path, SparsityCallback(0.9), Stop()).train()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": 0.9, "freeze": 0.5}, ValueError, "give target or freeze"),
        ({"target": 1.5}, ValueError, "target"),
        ({"freeze": 2.0}, ValueError, "freeze must be a share from 0 to 1"),
        ({"end": 0.5}, TypeError, "end need a target"),
        ({"prune": -1.0}, ValueError, "prune"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        SparsityCallback(**arguments)


@pytest.mark.parametrize("arguments", [{"target": 0.9}, {"freeze": 0.0}])
def test_optimizer_without_decay_is_refused(tmp_path, arguments):
    model = make_model()
    adam = torch.optim.AdamW(model.parameters())
    trainer = short_trainer(tmp_path, SparsityCallback(**arguments), model=model, optimizer=adam)
    with pytest.raises(TypeError, match=r"needs an optimizer that decays \(PAdam.*got AdamW"):
        trainer.train()


def arguments_for(folder, **more):
    settings = {"max_steps": 6, "learning_rate": 7e-3, "per_device_train_batch_size": 4}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return transformers.TrainingArguments(str(folder), **settings, **quiet, **more)


class SparseTrainer(transformers.Trainer):
    """The recipe of the documentation: the optimizer is made from the arguments."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            groups = pdecay.param_groups(self.model if model is None else model)
            self.optimizer = pdecay.PAdam(groups, lr=self.args.learning_rate, decay=Lp(0.8, 1e-2))
        return self.optimizer


def test_create_optimizer_uses_the_arguments(tmp_path):
    model = make_model()
    args = arguments_for(tmp_path, save_strategy="no", lr_scheduler_type="constant")
    trainer = SparseTrainer(
        model, args, train_dataset=Tokens(), callbacks=[SparsityCallback(0.6, end=0.5)]
    )
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 7e-3
    assert abs(zeros(model) - 0.6) < 1e-3


def test_optimizer_class_does_not_get_the_learning_rate_of_the_arguments(tmp_path):
    args = arguments_for(tmp_path, weight_decay=0.1)
    settings = {"decay": Lp(0.8, 1e-2)}
    trainer = transformers.Trainer(
        make_model(),
        args,
        train_dataset=Tokens(),
        optimizer_cls_and_kwargs=(pdecay.PAdam, settings),
    )
    first, second = trainer.create_optimizer().param_groups
    assert first["lr"] == 1e-3  # PAdam's default
    assert first["weight_decay"] == 0.1  # from the arguments
    assert first["decay"] == [[0.8, 1e-2]]
    assert all(parameter.ndim == 1 for parameter in second["params"])  # these do not decay


def test_zero_tensor_changes_groups_that_are_made_after_the_weights_are_loaded():
    # Trainer loads the weights of a checkpoint before it calls create_optimizer.
    model = make_model()
    model.transformer.wpe.weight.data.zero_()
    assert len(pdecay.param_groups(model)[0]["params"]) == 5
    with pytest.warns(UserWarning, match=r"all zero and would never change"):
        assert len(pdecay.param_groups(model, include="*wpe*")[0]["params"]) == 6


def test_attached_optimizer(tmp_path):
    model = make_model()
    adam = torch.optim.AdamW(pdecay.param_groups(model, decay=Lp(0.8, 1e-2)), lr=1e-2)
    pdecay.attach(adam, None)
    callback = SparsityCallback(0.6, end=0.5)
    short_trainer(tmp_path, callback, model=model, optimizer=adam).train()
    assert abs(zeros(model) - 0.6) < 1e-3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate_equals_plain_loop(tmp_path, same, accumulate):
    from accelerate import Accelerator

    steps, batches = 10, Tokens().ids.split(4)[: 10 * accumulate]

    def train(loader, model, optimizer, backward, accumulating):
        for ids in loader:
            with accumulating(model):
                backward(model(ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = make_model()
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model))
    pdecay.SparsityTarget(optimizer, 0.8, steps, end=0.6)
    half = len(batches) // 2
    train(batches[:half], prepared, optimizer, accelerator.backward, accelerator.accumulate)
    accelerator.save_state(str(tmp_path))

    # A new process would start here.
    resumed = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    again = make_model()
    prepared, optimizer = resumed.prepare(again, make_optimizer(again))
    pdecay.SparsityTarget(optimizer, 0.8, steps, end=0.6)
    resumed.load_state(str(tmp_path))
    train(batches[half:], prepared, optimizer, resumed.backward, resumed.accumulate)

    plain = make_model()
    own = make_optimizer(plain)
    pdecay.SparsityTarget(own, 0.8, steps, end=0.6)
    for step in range(steps):
        for ids in batches[step * accumulate : (step + 1) * accumulate]:
            (plain(ids, labels=ids).loss / accumulate).backward()
        own.step()
        own.zero_grad()
    assert abs(zeros(again) - 0.8) < 1e-3
    assert same(dict(again.state_dict()), dict(plain.state_dict()))
