"""Train a small residual network on handwritten digits, by torch's modules and by fused blocks.

    python examples/train_digits.py [--device cpu] [--steps 200] [--amp]

The images are the 1797 digits of 8 x 8 pixels that ship with scikit-learn. The network is trained
twice from the same parameters; the losses are printed side by side. The exit code is 1 when they
part by more than 2 %. ``--amp`` trains in bfloat16 autocast, where they are printed only.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import cudnngraph as cg
from cudnngraph.cli.arguments import device as known_device

WIDTH = 16
TRAINED = 1500  # images; the rest is to be recognised
EVERY = 20  # steps between two lines of the table
APART = 0.02  # largest relative distance between the losses


class Residual(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + x), by torch's modules."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.second = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + x)


class FusedResidual(nn.Module):
    """The same by two fused blocks; the second one adds x before its relu."""

    def __init__(self, plain: Residual) -> None:
        super().__init__()
        self.first = cg.FusedConvBlock.from_torch(*plain.first)
        self.second = cg.FusedConvBlock.from_torch(*plain.second, nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x), x)


def network() -> nn.Sequential:
    """A stem, two residual blocks, and a classifier of ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        Residual(WIDTH),
        Residual(WIDTH),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, 10),
    )


def fused(plain: nn.Sequential) -> nn.Sequential:
    """A copy of the network with blocks in place of torch's modules."""
    model = copy.deepcopy(plain)
    for name, child in list(model.named_children()):
        if isinstance(child, Residual):
            setattr(model, name, FusedResidual(child))
    print(cg.nn.replace(model))
    return model


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The images (N, 1, 8, 8) of values about 0, and which digit each is, in a fixed order."""
    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 8.0 - 1.0
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.from_numpy(data.target)[order]


def train(model: nn.Module, device: torch.device, steps: int, amp: bool) -> list[float]:
    """The loss of every step. Batches are the same on every call."""
    images, labels = (tensor[:TRAINED].to(device) for tensor in digits())
    images = images.contiguous(memory_format=torch.channels_last)
    gen = torch.Generator().manual_seed(1)
    model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        batch = torch.randint(TRAINED, (64,), generator=gen).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            scores = model(images[batch].contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(scores.float(), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accuracy(model: nn.Module, device: torch.device) -> float:
    """Over the images that were not trained on, by the running statistics."""
    images, labels = (tensor[TRAINED:].to(device) for tensor in digits())
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, default=default)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--amp", action="store_true")
    options = parser.parse_args(arguments)
    device = options.device
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    plain = network()
    models = {"torch": plain, "fused": fused(plain)}
    losses = {
        name: train(model, device, options.steps, options.amp) for name, model in models.items()
    }
    print("step  torch     fused     apart")
    worst = 0.0
    for step in range(0, options.steps, EVERY):
        theirs, ours = losses["torch"][step], losses["fused"][step]
        apart = abs(ours - theirs) / theirs
        worst = max(worst, apart)
        print(f"{step:4}  {theirs:.6f}  {ours:.6f}  {apart:.1e}")
    reached = {name: accuracy(model, device) for name, model in models.items()}
    print("accuracy: " + ", ".join(f"{name} {value:.1%}" for name, value in reached.items()))
    return int(worst > APART and not options.amp)


if __name__ == "__main__":
    sys.exit(main())
