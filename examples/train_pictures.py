"""Train a small residual network on real pictures: which of them is a patch from?

    python examples/train_pictures.py [--device cpu] [--steps 200] [--amp]

No data set of digits ships with what this project depends on, so the images are real ones that do:
patches of four pictures in matplotlib's sample data, whose texture the network has to know. It is
trained twice from the same parameters, by torch's modules and by fused blocks; the losses are
printed side by side. The exit code is 1 when they part by more than 2 %. ``--amp`` trains in
bfloat16 autocast, where they are printed only.
"""

from __future__ import annotations

import argparse
import copy
import sys

import matplotlib.cbook
import numpy as np
import torch
from PIL import Image
from torch import nn

import cudnngraph as cg

WIDTH = 8
SIZE = 24  # of a patch, in pixels
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
    """A stem, two residual blocks, and a classifier of four classes."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        Residual(WIDTH),
        Residual(WIDTH),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, 4),
    )


def fused(plain: nn.Sequential) -> nn.Sequential:
    """A copy of the network with blocks in place of torch's modules."""
    model = copy.deepcopy(plain)
    for name, child in list(model.named_children()):
        if isinstance(child, Residual):
            setattr(model, name, FusedResidual(child))
    print(cg.nn.replace(model))
    return model


def pictures() -> list[torch.Tensor]:
    """Four pictures (H, W), each of mean 0 and variance 1: a photograph, a drawing, a scan of a
    head, and heights of a landscape."""
    made = []
    for name in ("grace_hopper.jpg", "Minduka_Present_Blue_Pack.png"):
        with matplotlib.cbook.get_sample_data(name) as file:
            made.append(np.array(Image.open(file).convert("L"), dtype=np.float32))
    with matplotlib.cbook.get_sample_data("s1045.ima.gz") as file:
        made.append(np.frombuffer(file.read(), np.uint16).astype(np.float32).reshape(256, 256))
    made.append(matplotlib.cbook.get_sample_data("jacksboro_fault_dem.npz")["elevation"])
    tensors = [torch.from_numpy(np.array(picture, dtype=np.float32)) for picture in made]
    return [(picture - picture.mean()) / picture.std() for picture in tensors]


def batch(
    sources: list[torch.Tensor], count: int, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` patches (N, 1, SIZE, SIZE) of like contrast, and which picture each is of."""
    which = torch.randint(len(sources), (count,), generator=gen)
    patches = []
    for number in which.tolist():
        height, width = sources[number].shape
        row = int(torch.randint(height - SIZE, (), generator=gen))
        column = int(torch.randint(width - SIZE, (), generator=gen))
        patch = sources[number][row : row + SIZE, column : column + SIZE]
        patches.append(((patch - patch.mean()) / (patch.std() + 0.1)).unsqueeze(0))
    return torch.stack(patches), which


def train(model: nn.Module, device: torch.device, steps: int, amp: bool) -> list[float]:
    """The loss of every step. Batches are the same on every call."""
    sources, gen = pictures(), torch.Generator().manual_seed(1)
    model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        x, which = (tensor.to(device) for tensor in batch(sources, 64, gen))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            scores = model(x.contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(scores.float(), which)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accuracy(model: nn.Module, device: torch.device) -> float:
    """Over patches that were not trained on, by the running statistics."""
    x, which = batch(pictures(), 256, torch.Generator().manual_seed(2))
    model.eval()
    with torch.no_grad():
        return float((model(x.to(device)).argmax(1).cpu() == which).float().mean())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--amp", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
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
