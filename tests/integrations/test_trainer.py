"""SparsityCallback in transformers.Trainer, against a plain training loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch

import pdecay
from pdecay import Lp

transformers = pytest.importorskip("transformers", reason="pip install pdecay[transformers]")
pytest.importorskip("accelerate", reason="pip install pdecay[transformers]")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from pdecay.integrations.transformers import SparsityCallback, save_pretrained  # noqa: E402

STEPS, TARGET = 30, 0.9  # the ramp ends at step 26
LENGTH, VOCABULARY = 12, 20
CONFIG = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2,
          "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
          "resid_pdrop": 0.0}  # fmt: skip


def make_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**CONFIG))


def make_optimizer(model):
    return pdecay.PAdam(pdecay.param_groups(model), lr=1e-2, decay=Lp(0.8, 1e-3))


class Tokens(torch.utils.data.Dataset):
    def __init__(self, size=4 * 4 * STEPS):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": labels_of(self.ids[index])}


def labels_of(ids):
    # Nothing predicts the first token. Trainer and the plain loop must not count its label.
    labels = ids.clone()
    labels[..., 0] = -100
    return labels


def make_trainer(folder, accumulate=1, callbacks=None, **more):
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulate,
        "lr_scheduler_type": "cosine",
        "save_steps": 5,
        "logging_steps": 5,
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
    }
    model = more.pop("model", None) or make_model()
    optimizer = more.pop("optimizer", None) or make_optimizer(model)
    return Trainer(
        model=model,
        args=TrainingArguments(**{**settings, **more}),
        train_dataset=Tokens(),
        optimizers=(optimizer, None),
        callbacks=[SparsityCallback(TARGET)] if callbacks is None else callbacks,
    )


def plain_loop(accumulate):
    """Train in the same way without Trainer; return the weights."""
    batches = Tokens().ids.split(4)
    model = make_model().train()
    optimizer = make_optimizer(model)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, STEPS)
    pdecay.SparsityTarget(optimizer, TARGET, STEPS)
    for step in range(STEPS):
        micro_batches = batches[step * accumulate : (step + 1) * accumulate]
        tokens = sum(ids[:, 1:].numel() for ids in micro_batches)
        for ids in micro_batches:
            model(ids, labels=labels_of(ids), num_items_in_batch=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
    return model.state_dict()


class Kill(transformers.TrainerCallback):
    """End the process without any clean-up."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(train):
    """Run a function in a forked process, which must die by SIGKILL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads
        child = os.fork()
    if not child:
        try:
            train()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("step", [13, 27], ids=["in the ramp", "after the ramp"])
def test_killed_and_resumed_run_equals_plain_loop(tmp_path, same, accumulate, step):
    callbacks = [SparsityCallback(TARGET), Kill(step)]
    killed(lambda: make_trainer(tmp_path, accumulate, callbacks).train())
    trainer = make_trainer(tmp_path, accumulate)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert same(dict(trainer.model.state_dict()), dict(plain_loop(accumulate)))
    assert abs(pdecay.sparsity(trainer.model, 0.0).total - TARGET) < 1e-3


NEW_PROCESS = """
import json, sys
import torch
import pdecay
from pdecay.integrations.transformers import from_pretrained, generation_example

torch.set_num_threads(1)
model = from_pretrained(sys.argv[1])
ids = torch.tensor(json.loads(sys.argv[2]))
deployed = pdecay.deploy(model, generation_example(ids, 4), choose="sparse", seconds=0)
tokens = [deployed.generate(ids, **options).tolist() for options in json.loads(sys.argv[3])]
print(json.dumps([deployed.report.chosen, pdecay.sparsity(model, 0.0).total, tokens]))
"""


def test_new_process_loads_deploys_and_generates_the_same_tokens(tmp_path):
    trainer = make_trainer(tmp_path / "run", save_strategy="no")
    trainer.train()
    model = trainer.model.eval()
    save_pretrained(model, tmp_path / "model")
    ids = Tokens().ids[:2, :6]
    common = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ways = [common, {**common, "cache_implementation": "static"}, {**common, "num_beams": 2}]
    arguments = [str(tmp_path / "model"), json.dumps(ids.tolist()), json.dumps(ways)]
    run = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    chosen, sparsity, tokens = json.loads(run.stdout.splitlines()[-1])
    assert chosen == "sparse"
    assert abs(sparsity - TARGET) < 1e-3
    assert tokens == [model.generate(ids, **options).tolist() for options in ways]
