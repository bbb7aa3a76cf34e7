"""Segment mosaics of real pictures: which of them is each pixel from?

    python examples/segmentation_decoder.py [--device cpu] [--steps 100]

Every image is put together from two of four pictures in matplotlib's sample data (a photograph, a
drawing, a scan of a head, heights of a landscape). A small encoder and a decoder of transposed
convolutions, which adds the encoder's features back in, are trained to tell their textures apart,
once by torch's modules and once by fused blocks, from the same parameters. At the end torch's
modules take the blocks' state over and label new mosaics. The exit code is 1 when the losses part
by more than 2 %, or these labels differ in more than one pixel of 10,000.
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
from cudnngraph.cli.arguments import device as known_device

WIDTH = 12
SIZE = 32  # of an image, in pixels
EVERY = 20  # steps between two lines of the table
APART = 0.02  # largest relative distance between the losses
DIFFER = 1e-4  # part of the pixels that may be labelled differently: ties but for rounding


def down(channels: int, width: int) -> nn.Sequential:
    """Half the size."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )


def up(channels: int, width: int) -> nn.Sequential:
    """Twice the size."""
    return nn.Sequential(
        nn.ConvTranspose2d(channels, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )


class Segmenter(nn.Module):
    """Scores (N, 4, H, W) of four classes for images (N, 1, H, W), by torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = down(1, WIDTH), down(WIDTH, 2 * WIDTH)
        self.up1, self.up2 = up(2 * WIDTH, WIDTH), up(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Conv2d(WIDTH, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.down1(x)
        conv, norm, act = self.up1
        wide = act(norm(conv(self.down2(half))) + half)
        return self.head(self.up2(wide))


class FusedSegmenter(nn.Module):
    """The same by fused blocks; the first transposed one adds the encoder's features itself."""

    def __init__(self, plain: Segmenter) -> None:
        super().__init__()
        self.down1 = cg.FusedConvBlock.from_torch(*plain.down1)
        self.down2 = cg.FusedConvBlock.from_torch(*plain.down2)
        self.up1 = cg.FusedConvTransposeBlock.from_torch(*plain.up1)
        self.up2 = cg.FusedConvTransposeBlock.from_torch(*plain.up2)
        self.head = cg.FusedConvBlock.from_torch(*plain.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.down1(x)
        return self.head(self.up2(self.up1(self.down2(half), half)))


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


def patch(source: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """A part (SIZE, SIZE) of a picture, of like contrast."""
    corner = [int(torch.randint(extent - SIZE, (), generator=gen)) for extent in source.shape]
    part = source[corner[0] : corner[0] + SIZE, corner[1] : corner[1] + SIZE]
    return (part - part.mean()) / (part.std() + 0.1)


def mosaics(
    sources: list[torch.Tensor], count: int, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, SIZE, SIZE), each cut in two by a line, and the picture of each pixel."""
    images, labels = [], []
    columns, rows = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="xy")
    for _ in range(count):
        first, second = torch.randperm(len(sources), generator=gen)[:2].tolist()
        angle = 2 * torch.pi * torch.rand((), generator=gen)
        side = torch.cos(angle) * (columns - SIZE / 2) + torch.sin(angle) * (rows - SIZE / 2) > 0
        images.append(torch.where(side, patch(sources[first], gen), patch(sources[second], gen)))
        labels.append(torch.where(side, first, second))
    return torch.stack(images).unsqueeze(1), torch.stack(labels)


def train(model: nn.Module, device: torch.device, steps: int) -> list[float]:
    """The loss of every step. Batches are the same on every call."""
    sources, gen = pictures(), torch.Generator().manual_seed(1)
    model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    losses = []
    for _ in range(steps):
        x, labels = (tensor.to(device) for tensor in mosaics(sources, 32, gen))
        optimizer.zero_grad()
        scores = model(x.contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, default=default)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    device = options.device
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    plain = Segmenter()
    models = {"torch": plain, "fused": FusedSegmenter(copy.deepcopy(plain))}
    losses = {name: train(model, device, options.steps) for name, model in models.items()}
    print("step  torch     fused     apart")
    worst = 0.0
    for step in range(0, options.steps, EVERY):
        theirs, ours = losses["torch"][step], losses["fused"][step]
        apart = abs(ours - theirs) / theirs
        worst = max(worst, apart)
        print(f"{step:4}  {theirs:.6f}  {ours:.6f}  {apart:.1e}")
    x, labels = mosaics(pictures(), 64, torch.Generator().manual_seed(2))
    models["torch"].load_state_dict(models["fused"].state_dict())
    found = {}
    for name, model in models.items():
        model.eval()
        with torch.no_grad():
            found[name] = model(x.to(device)).argmax(1).cpu()
    right = float((labels == found["fused"]).float().mean())
    differ = float((found["torch"] != found["fused"]).float().mean())
    print(f"pixels right: {right:.1%}; with the same state torch differs in {differ:.4%}")
    return int(worst > APART or differ > DIFFER)


if __name__ == "__main__":
    sys.exit(main())
