"""Train a small GPT on this file, then write with it, fused: `python examples/gpt.py`.

Characters are tokens. The model trains in torch for some dozens of steps on the text of this very
script, and continues it greedily: by torch, by `fuse`, and by `torch.compile` with this package as
its backend. Prints the steps and the text; the exit code is 1 if any two differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.bench.models import GPT
from cudnngraph.cli.arguments import device as known_device
from cudnngraph.models.dynamo import backend

LENGTH = 48


def trained(text: torch.Tensor, tokens: int, steps: int) -> nn.Module:
    """A model that has read the text."""
    torch.manual_seed(0)
    model = GPT(tokens, width=64, layers=2, length=LENGTH).to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (16,)).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3d}: loss {loss.item():.2f}")
    return model.eval()


def write(model: nn.Module, start: torch.Tensor, count: int) -> list[int]:
    """The most likely ``count`` characters behind ``start`` (1, LENGTH), one after the other."""
    window, made = start, []
    for _ in range(count):
        with torch.no_grad():
            following = model(window)[:, -1].argmax(-1, keepdim=True)
        window = torch.cat([window[:, 1:], following], 1)
        made.append(int(following))
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, default=default)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args(arguments)
    read = Path(__file__).read_text(encoding="utf-8")
    alphabet = sorted(set(read))
    text = torch.tensor([alphabet.index(letter) for letter in read], device=args.device)
    model = trained(text, len(alphabet), args.steps)
    start = text[:LENGTH].unsqueeze(0)
    fused = cg.fuse(model, start, capture=True)
    print(fused.report)
    written = {
        "torch": write(model, start, 40),
        "fused": write(fused, start, 40),
        "compiled": write(torch.compile(model, backend=backend), start, 40),
    }
    for name, letters in written.items():
        print(f"{name}: {''.join(alphabet[at] for at in letters)!r}")
    return int(len({tuple(letters) for letters in written.values()}) != 1)


if __name__ == "__main__":
    sys.exit(main())
