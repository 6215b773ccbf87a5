"""Train a character-level GPT on Tiny Shakespeare to 90 % zeros, and let the sparse model write.

    python examples/char_gpt.py

The text is searched in PDECAY_DATA and downloaded otherwise (1.1 MB).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pdecay
from pdecay.lab.data import shakespeare
from pdecay.lab.models import GPT

BLOCK = 64


def batch_of(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(tokens) - BLOCK, (size,))
    rows = torch.stack([tokens[i : i + BLOCK + 1] for i in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def write(model: nn.Module, prompt: Tensor, length: int) -> Tensor:
    for _ in range(length):
        logits = model(prompt[:, -BLOCK:])[:, -1]
        prompt = torch.cat([prompt, torch.multinomial(logits.softmax(1), 1)], dim=1)
    return prompt[0]


def main(steps: int = 1500, length: int = 300) -> float:
    """Train, deploy and write; return the sparsity."""
    torch.manual_seed(0)
    text = shakespeare.load()
    model = GPT(len(text.symbols), BLOCK, layers=4, heads=4, width=128)
    optimizer = pdecay.PAdam(pdecay.param_groups(model), lr=3e-3, weight_decay=0.1)
    target = pdecay.SparsityTarget(optimizer, 0.9, total_steps=steps)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=3e-5)

    for step in range(steps):
        x, y = batch_of(text.train, 32)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss:.3f}, zeros {target.sparsity:.1%}")

    x, y = batch_of(text.test, 256)
    with torch.no_grad():
        right = (model.eval()(x).argmax(2) == y).float().mean()
    print(f"accuracy on unseen text {right:.1%}, zeros {target.sparsity:.1%}\n")
    deployed = pdecay.deploy(model, x[:1])
    print(deployed.report, "\n")
    print(text.decode(write(deployed, x[:1], length)))
    return target.sparsity


if __name__ == "__main__":
    main()
