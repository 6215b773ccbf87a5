"""A small GPT-2 with random weights."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 40
SIZES = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
         "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
         "resid_pdrop": 0.0}  # fmt: skip


def make_model(**sizes):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**SIZES, **sizes})).eval()


@torch.no_grad()
def sparse_model(zeros=0.8, **sizes):
    """Return a model with random zeros, and with weights large enough to affect the outputs."""
    model = make_model(**sizes)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8).masked_fill_(torch.rand_like(parameter) < zeros, 0.0)
    return model


@torch.no_grad()
def model_with_dead_units():
    """Return a sparse model with a dead head, four unread and three constant hidden units."""
    model = sparse_model()
    first, second = model.transformer.h
    first.attn.c_proj.weight[8:16] = 0
    second.mlp.c_proj.weight[:4] = 0
    second.mlp.c_fc.weight[:, 4:7] = 0
    second.mlp.c_fc.bias.fill_(0.5)
    return model


def prompt(batch=2, length=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)
