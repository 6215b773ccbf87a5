"""Train a small ResNet on CIFAR-10 with SGD to 95 % zeros, and deploy it.

    python examples/cifar_resnet.py

CIFAR-10 is searched in PDECAY_DATA and downloaded otherwise (163 MB). `attach` adds the decay to
torch's own optimizer; `param_groups` keeps batch norms and biases out of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pdecay
from pdecay import Lp
from pdecay.lab.data import cifar10
from pdecay.lab.models import ResNet


def scaled(pixels: Tensor) -> Tensor:
    return (pixels.float() - 120) / 64


@torch.no_grad()
def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    model.eval()
    chunks = zip(pixels.split(500), labels.split(500), strict=True)
    right = sum(int((model(scaled(x)).argmax(1) == y).sum()) for x, y in chunks)
    model.train()
    return right / len(labels)


def main(steps: int = 1500, tested: int = 10_000) -> float:
    """Train and deploy; return the sparsity."""
    torch.manual_seed(0)
    images = cifar10.load()
    x_train, y_train = images.train
    model = ResNet(width=32, blocks=(1, 1, 1), stride=2)
    optimizer = torch.optim.SGD(
        pdecay.param_groups(model), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    pdecay.attach(optimizer, Lp(0.8, 1e-2))
    target = pdecay.SparsityTarget(optimizer, 0.95, total_steps=steps)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)

    for step in range(steps):
        batch = torch.randint(len(x_train), (128,))
        x = scaled(x_train[batch])
        x = x.flip(3) if step % 2 else x
        loss = nn.functional.cross_entropy(model(x), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss:.3f}, zeros {target.sparsity:.1%}")

    x_test, y_test = (part[:tested] for part in images.test)
    print(f"test accuracy {accuracy(model, x_test, y_test):.1%}\n")
    print(pdecay.deploy(model.eval(), scaled(x_test[:1])).report)
    return target.sparsity


if __name__ == "__main__":
    main()
