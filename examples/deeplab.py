"""Segment a photograph with DeepLabV3, by torch and fused: `python examples/deeplab.py`.

The photograph ships with matplotlib. The model is torchvision's deeplabv3_resnet50 where that is
installed, else the same layers written in plain torch; either way its weights are random, so the
regions are pretty and mean nothing. Prints the fused steps, how far results are from torch, and the
time of both; writes the regions as a picture. The exit code is 1 if classes differ in more than 1 %
of the pixels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.cbook import get_sample_data
from PIL import Image
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.cli.arguments import device as known_device


def make_model() -> tuple[nn.Module, str]:
    """The model, without trained weights, and where it is from."""
    torch.manual_seed(0)
    try:
        from torchvision.models.segmentation import deeplabv3_resnet50
    except (ImportError, RuntimeError):
        return models.randomized(models.deeplab_resnet50()), "written in plain torch"
    return models.randomized(deeplabv3_resnet50(weights=None, weights_backbone=None)), "torchvision"


def load_photo(size: int) -> torch.Tensor:
    """(1, 3, size, size) in [0, 1]: the middle of matplotlib's portrait of Grace Hopper."""
    with get_sample_data("grace_hopper.jpg") as file:
        picture = Image.open(file).convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    picture = picture.crop((left, top, left + side, top + side)).resize((size, size))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255


def normalized(photo: torch.Tensor) -> torch.Tensor:
    """As ImageNet's models take it."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (photo - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)


def classes_of(result: object) -> torch.Tensor:
    """The class of each pixel; torchvision's model returns a dict."""
    scores = result["out"] if isinstance(result, dict) else result
    assert isinstance(scores, torch.Tensor)
    return scores.argmax(1)


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call over a second, in ms."""
    times: list[float] = []
    call()
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < 1.0:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def save(classes: torch.Tensor, photo: torch.Tensor, path: Path) -> None:
    """The photograph tinted by class."""
    colours = torch.from_numpy(np.random.default_rng(3).integers(40, 255, (256, 3)))
    tint = colours[classes[0].cpu()].permute(2, 0, 1)[None] / 255.0
    tint = F.interpolate(tint.float(), size=photo.shape[2:])
    mixed = (0.5 * photo + 0.5 * tint)[0].permute(1, 2, 0).mul(255).byte().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(mixed).save(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, default=default)
    parser.add_argument("--size", type=int, help="side of the picture (default: 512, CPU: 128)")
    parser.add_argument("--autotune", action="store_true", help="measure plans first (minutes)")
    parser.add_argument("--out", type=Path, default=Path("out/regions.png"))
    args = parser.parse_args(arguments)
    device = args.device
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, source = make_model()
    print(f"DeepLabV3-ResNet-50, {source}, random weights")
    photo = load_photo(args.size or (512 if device.type == "cuda" else 128))
    x = normalized(photo).to(device, dtype).contiguous(memory_format=torch.channels_last)
    model = model.to(device, dtype).to(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    policy = cg.Policy(tune="autotune") if args.autotune else None
    fused = cg.fuse(model, x, policy=policy, capture=True)
    print(fused.report)
    with torch.no_grad():
        ours, theirs = classes_of(fused(x)), classes_of(model(x))
        times = {
            name: median_ms(lambda call=call: call(x), device)  # type: ignore[misc]
            for name, call in (("torch", model), ("fused", fused))
        }
    same = float((ours == theirs).float().mean())
    print(f"pixels of the same class: {same:.2%}")
    print(f"torch {times['torch']:.2f} ms, fused {times['fused']:.2f} ms")
    save(ours, photo, args.out)
    print(f"regions: {args.out}")
    return int(same < 0.99)


if __name__ == "__main__":
    sys.exit(main())
