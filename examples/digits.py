"""Train a network on handwritten digits to 90 % zeros, save it and deploy it.

python examples/digits.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import pdecay


def main(steps: int = 600) -> float:
    """Train and deploy; return the sparsity."""
    torch.manual_seed(0)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x_train, x_test, y_train, y_test = train_test_split(x.float() / 16, y, random_state=0)

    model = nn.Sequential(
        *(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    )
    optimizer = pdecay.PAdam(pdecay.param_groups(model), lr=1e-3, weight_decay=0.1)
    target = pdecay.SparsityTarget(optimizer, 0.9, total_steps=steps)

    for _ in range(steps):
        batch = torch.randint(len(x_train), (128,))
        loss = nn.functional.cross_entropy(model(x_train[batch]), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    print(f"test accuracy {accuracy:.1%}, zeros {target.sparsity:.1%}\n")
    print(pdecay.sparsity(model), "\n")
    print(pdecay.save(model, "digits.safetensors"), "\n")
    print(pdecay.deploy(model, x_test[:1]).report)
    return target.sparsity


if __name__ == "__main__":
    main()
