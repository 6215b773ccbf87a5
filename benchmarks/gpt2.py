"""A GPT-2 trained with Trainer to 90 % zeros, saved, loaded in a new process and deployed.

    python benchmarks/gpt2.py train FOLDER      # some minutes on two cores; resumes if killed
    python benchmarks/gpt2.py measure FOLDER   # about a minute; writes benchmarks/records/gpt2.json

`train` needs tinyshakespeare.txt in PDECAY_DATA. The model starts with random weights and predicts
bytes. `measure` checks that the loaded and the deployed model generate the tokens of the trained
one, with a dynamic cache, a static cache and beams, and times ``generate`` in turns.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import pdecay
from pdecay import Lp
from pdecay.deployment.runtime.timing import interleaved
from pdecay.integrations.transformers import (
    SparsityCallback,
    from_pretrained,
    generation_example,
    save_pretrained,
)
from provenance import provenance

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "gpt2.json"
TARGET, STEPS, BATCH, LENGTH = 0.9, 80, 4, 64
PROMPT, NEW_TOKENS, EXAMPLE_TOKENS = 64, 64, 16
WAYS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "3 beams": {"num_beams": 3},
}


class Bytes(Dataset):
    """Non-overlapping pieces of a text."""

    def __init__(self, text: bytes) -> None:
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def text() -> bytes:
    return (Path(os.environ["PDECAY_DATA"]) / "tinyshakespeare.txt").read_bytes()


def train(folder: Path) -> None:
    set_seed(0)
    sizes = {"n_positions": PROMPT + NEW_TOKENS, "n_embd": 384, "n_layer": 4, "n_head": 6}
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(vocab_size=128, bos_token_id=0, eos_token_id=0, **sizes, **drops)
    model = GPT2LMHeadModel(config)
    optimizer = pdecay.PAdam(pdecay.param_groups(model), lr=2e-3, decay=Lp(0.8, 1e-2))
    pieces = Bytes(text())
    held_out = torch.utils.data.Subset(pieces, range(len(pieces) - 200, len(pieces)))
    args = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_steps=10,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=torch.utils.data.Subset(pieces, range(len(pieces) - 200)),
        eval_dataset=held_out,
        optimizers=(optimizer, None),
        callbacks=[SparsityCallback(TARGET, layers=False)],
    )
    checkpoint = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    model.eval()
    report = save_pretrained(model, folder)
    tokens = {way: generate(model, prompt(), **options).tolist() for way, options in WAYS.items()}
    result = {
        "steps": trainer.state.global_step,
        "held-out loss, nats per byte": round(loss, 3),
        "sparsity": pdecay.sparsity(model, 0.0).total,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "file bytes": report.nbytes,
        "dense bytes": report.dense_nbytes,
        "tokens": tokens,
    }
    (folder / "trained.json").write_text(json.dumps(result))
    print({key: value for key, value in result.items() if key != "tokens"})


def prompt() -> torch.Tensor:
    return torch.tensor([list(text()[-PROMPT:])])


@torch.inference_mode()
def generate(model: torch.nn.Module, ids: torch.Tensor, **options: object) -> torch.Tensor:
    mask = torch.ones_like(ids)
    limits = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, do_sample=False, **limits, **options)


def measure(folder: Path) -> None:
    trained = json.loads((folder / "trained.json").read_text())
    tokens = trained.pop("tokens")
    model = from_pretrained(folder)
    record = {
        **provenance("transformers", "accelerate"),
        "trained": trained,
        "prompt": PROMPT,
        "new tokens": NEW_TOKENS,
    }
    deployed = pdecay.deploy(model, generation_example(prompt(), EXAMPLE_TOKENS))
    print(deployed.report)
    calls = [partial(generate, one, prompt()) for one in (model, deployed)]
    dense, sparse = interleaved(calls, rounds=5, seconds=4.0).seconds
    record["deployed"] = {
        "generate, dense, ms": round(1e3 * dense, 1),
        "generate, deployed, ms": round(1e3 * sparse, 1),
        "speedup of generate": round(dense / sparse, 2),
        "speedup on the example": round(deployed.report.speedup, 2),
        "sparse layers": sum(one.choice == "sparse" for one in deployed.report.layers),
        "removed units": deployed.report.removed,
        "dense bytes": deployed.report.dense_bytes,
        "deployed bytes": deployed.report.deployed_bytes,
        "same tokens": {
            way: all(
                generate(one, prompt(), **options).tolist() == tokens[way]
                for one in (model, deployed)
            )
            for way, options in WAYS.items()
        },
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["deployed"], indent=1))


if __name__ == "__main__":
    command, where = sys.argv[1:]
    {"train": train, "measure": measure}[command](Path(where))
