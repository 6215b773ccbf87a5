"""Example inputs for models that generate text with a key-value cache."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from pdecay._core.validation import check_count
from pdecay.deployment.model.inputs import Inputs


def generation_example(input_ids: Tensor, new_tokens: int, **inputs: Any) -> Inputs:
    """Return example inputs for ``pdecay.deploy``: a prompt and the generation of more tokens.

    ``generate`` calls a model once with the whole prompt, and then with one token at a time and
    a key-value cache. The shapes differ, and so do the fastest layers. With this example, deploy
    measures both, as often as they occur.

    Args:
        input_ids: the prompt, or the inputs of the encoder, of shape (batch, length).
        new_tokens: the number of tokens to generate. Which ones does not matter for the speed:
            the example repeats the prompt.
        inputs: further arguments of the model, for instance ``attention_mask``.

    Example::

        example = generation_example(tokenizer(prompt, return_tensors="pt").input_ids, 64)
        deployed = pdecay.deploy(model, example)
        deployed.generate(...)
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or not input_ids.numel():
        given = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids)
        raise ValueError(f"input_ids must be a tensor of shape (batch, length), got {given}")
    return _Generation(
        (), {"input_ids": input_ids, **inputs}, check_count("new_tokens", new_tokens)
    )


@dataclass(frozen=True)
class _Generation(Inputs):
    """A call with a prompt, followed by calls with one token each."""

    new_tokens: int = 1

    def call(self, model: Any, *, copy: bool = True) -> Any:
        """Return the logits of all calls. Each call of this method starts with an empty cache."""
        prompt = self.kwargs["input_ids"]
        kwargs = dict(self.kwargs)
        if "logits_to_keep" in signature(model.forward).parameters:
            kwargs["logits_to_keep"] = 1  # as in generate
        encodes = bool(model.config.is_encoder_decoder)
        if encodes:
            kwargs.setdefault("decoder_input_ids", torch.zeros_like(prompt[:, :1]))
        output = model(**kwargs, use_cache=True)
        logits = [output[0]]
        mask = kwargs.pop("attention_mask", None)
        for step in range(self.new_tokens):
            token = prompt[:, step % prompt.shape[1], None]
            if encodes:
                more = {"decoder_input_ids": token, "attention_mask": mask}
                more["encoder_outputs"] = (output.encoder_last_hidden_state,)
            else:
                if mask is not None:
                    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                more = {"input_ids": token, "attention_mask": mask}
            output = model(**more, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output[0])
        return logits
