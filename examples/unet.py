"""Train a small U-Net to find discs, then fuse it: `python examples/unet.py`.

Pictures of discs on a ramp of noise; the network marks the pixels of the discs. It trains in torch
for a few dozen steps, and is then fused for use: batch norms go into the weights, and what is
concatenated on the way up is written in its place. Prints the steps and compares the masks; the
exit code is 1 if they differ in more than 0.1 % of the pixels, or if it has not learned.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.bench.models import UNet
from cudnngraph.cli.arguments import device as known_device

SIDE = 32


def pictures(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 3, SIDE, SIDE) pictures, and (N, SIDE, SIDE) masks of the discs in them."""
    at = torch.arange(SIDE).float()
    centre = SIDE * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 3 + 5 * torch.rand(count, 1, 1, generator=generator)
    far = (at.view(1, -1, 1) - centre[:, 0]) ** 2 + (at.view(1, 1, -1) - centre[:, 1]) ** 2
    mask = far < radius**2
    ramp = (at / SIDE).view(1, 1, 1, -1)
    noise = 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return ramp + noise + 0.7 * mask.unsqueeze(1), mask.long()


def trained(device: torch.device, steps: int) -> torch.nn.Module:
    """A network that finds discs."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = UNet(width=8, levels=2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, mask = (tensor.to(device) for tensor in pictures(16, generator))
        loss = F.cross_entropy(model(x), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:3d}: loss {loss.item():.3f}")
    return model.eval()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, default=default)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args(arguments)
    device = args.device
    model = trained(device, args.steps)
    x, mask = (tensor.to(device) for tensor in pictures(32, torch.Generator().manual_seed(1)))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    fused = cg.fuse(model, x, dtype=dtype, capture=True)
    print(fused.report)
    with torch.no_grad():
        ours, theirs = fused(x).argmax(1), model(x).argmax(1)
    right = float((ours == mask).float().mean())
    differ = float((ours != theirs).float().mean())
    print(f"pixels marked rightly: {right:.1%}; other than torch: {differ:.3%}")
    return int(right < 0.95 or differ > 0.001)


if __name__ == "__main__":
    sys.exit(main())
