"""Types of arguments that the examples share: what argparse calls, and tells the complaint of."""

from __future__ import annotations

import argparse

import torch


def device(text: str) -> torch.device:
    """A device that torch can run on here; ``type=device`` of an argument."""
    try:
        found = torch.device(text)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:1, got '{text}'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and not (found.index or 0) < count:
        seen = f"CUDA devices that torch sees here: {count}"
        raise argparse.ArgumentTypeError(f"{seen}; got '{text}'")
    return found
