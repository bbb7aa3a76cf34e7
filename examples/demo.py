"""Four graphs on a photograph, each compared with torch: `make demo`, or `python examples/demo.py`.

The photograph ships with matplotlib. On a GPU the graphs run as cuDNN plans in float16,
channels_last; on a CPU the reference executor runs them in float32. Every result is compared with
torch in float64, and the exit code is 1 if one is farther from it than ``TOLERANCE`` allows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.cbook import get_sample_data
from PIL import Image
from rich.console import Console
from rich.table import Table

import cudnngraph as cg
from cudnngraph.cli.arguments import device as known_device

# Largest |result - float64| / |float64|, both Euclidean norms over the whole tensor.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 1e-3}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A graph, the tensors for its inputs by name, and a function of them that does it in torch."""

    title: str
    graph: cg.Graph
    tensors: Tensors
    in_torch: Callable[..., torch.Tensor]


# -- the four graphs -------------------------------------------------------------------------------


def sharpen(photo: torch.Tensor) -> Case:
    """Add back 1.5 times what a 5x5 blur takes away, in each channel; keep within [0, 1]."""
    row = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    kernel = -1.5 * torch.outer(row, row)
    kernel[2, 2] += 2.5
    tensors = {
        "x": channels_last(F.pad(photo, (2, 2, 2, 2), mode="replicate")),
        "w": channels_last(kernel.repeat(3, 1, 1, 1).to(photo)),
    }

    g = cg.Graph("sharpen")
    x, w = declare(g, tensors)
    g.output("y", g.clamp(g.conv(x, w, groups=3), 0.0, 1.0))

    def in_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, groups=3).clamp(0.0, 1.0)

    return Case("sharpen: depthwise conv + clamp", g, tensors, in_torch)


def conv_bn_relu(photo: torch.Tensor) -> Case:
    """The first block of a ResNet: 64 filters of 7x7, stride 2, then batch norm and ReLU."""
    weight = 0.1 * torch.randn(64, 3, 7, 7)
    tensors = {
        "x": photo,
        "w": channels_last(weight.to(photo)),
        # Statistics and affine parameters stay in float32, beside data of 16 bits too.
        "mean": torch.randn(64).to(photo.device),
        "var": torch.rand(64).add(0.5).to(photo.device),
        "gamma": torch.rand(64).add(0.5).to(photo.device),
        "beta": torch.randn(64).to(photo.device),
    }

    g = cg.Graph("conv_bn_relu")
    x, w, mean, var, gamma, beta = declare(g, tensors)
    g.output("y", g.conv_bn_act(x, w, mean, var, gamma, beta, stride=2, padding=3))

    def in_torch(
        x: torch.Tensor,
        w: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        return F.relu(F.batch_norm(F.conv2d(x, w, stride=2, padding=3), mean, var, gamma, beta))

    return Case("block: conv + batch_norm + relu", g, tensors, in_torch)


def upsample(photo: torch.Tensor) -> Case:
    """Twice the size by bilinear interpolation, a little brighter, kept within [0, 1]."""
    row = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 4
    tensors = {
        "x": photo,
        "w": channels_last(torch.outer(row, row).repeat(3, 1, 1, 1).to(photo)),
        "b": torch.full((3,), 0.05).to(photo),
    }

    g = cg.Graph("upsample")
    x, w, b = declare(g, tensors)
    y = g.conv_transpose(x, w, stride=2, padding=1, groups=3)
    g.output("y", g.clamp(g.bias(y, b), 0.0, 1.0))

    def in_torch(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w, b, stride=2, padding=1, groups=3).clamp(0.0, 1.0)

    return Case("upsample: conv_transpose + bias + clamp", g, tensors, in_torch)


def attention(photo: torch.Tensor) -> Case:
    """Every 16x16 patch looks at all patches: 768 numbers a patch, as 12 heads of 64."""
    patches = F.unfold(photo.float() - photo.float().mean(), kernel_size=16, stride=16)
    heads = patches.view(1, 12, 64, -1).transpose(2, 3).to(photo.dtype).contiguous()
    tensors = {"q": heads, "k": heads, "v": heads}

    g = cg.Graph("attention")
    q, k, v = declare(g, tensors)
    g.output("o", g.sdpa(q, k, v))

    return Case("attention over patches: sdpa", g, tensors, F.scaled_dot_product_attention)


def declare(g: cg.Graph, tensors: Tensors) -> list[cg.Value]:
    """An input of the graph for each tensor, with its shape, dtype and strides."""
    return [g.input(name, like=tensor) for name, tensor in tensors.items()]


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with its channels next to each other in memory."""
    return tensor.contiguous(memory_format=torch.channels_last)


# -- running and measuring -------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Result of a case: its plan, its time and torch's, and its error."""

    title: str
    plan: str
    time_ms: float
    torch_ms: float
    error: float
    result: torch.Tensor


def measure(case: Case, device: torch.device) -> Row:
    """Compile a case, run it bound to its tensors, and hold it against torch."""
    exe = case.graph.compile(device)
    result = exe(**case.tensors)
    expected = case.in_torch(*(tensor.cpu().double() for tensor in case.tensors.values()))
    error = (result.cpu().double() - expected).norm() / expected.norm()

    (name,) = exe.spec.outputs
    call = exe.bind(**case.tensors, **{name: result})
    return Row(
        case.title,
        plan_of(exe),
        median_ms(call, device),
        median_ms(lambda: case.in_torch(*case.tensors.values()), device),
        error.item(),
        result,
    )


def plan_of(exe: cg.Executable) -> str:
    """The plan of each step. `exe.explain()` says more: knobs, workspace, rejected plans."""
    if exe.device.type == "cpu":
        return "reference"
    plans = ["torch" if s.choice is None else f"engine {s.choice.engine}" for s in exe.steps]
    if len(plans) == 1:
        return plans[0]
    ops = ["+".join(n.op for n in s.spec.nodes if n.op != "constant") for s in exe.steps]
    return "\n".join(f"{op}: {plan}" for op, plan in zip(ops, plans, strict=True))


@torch.no_grad()
def median_ms(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The median time of a call. On a GPU a repeat is 50 calls between two events."""
    times = []
    for _ in range(repeats + 1):  # the first is a warm-up
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(device))
            for _ in range(50):
                call()
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            times.append(start.elapsed_time(end) / 50)
        else:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


# -- the picture and the table ---------------------------------------------------------------------


def load_photo(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The photograph as (1, 3, H, W), values within [0, 1], channels_last."""
    path = get_sample_data("grace_hopper.jpg", asfileobj=False)
    pixels = np.array(Image.open(path).convert("RGB"))
    photo = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    return channels_last((photo.float() / 255).to(device, dtype))


def picture(name: str) -> Path:
    """A file that Pillow can write, by its name."""
    path = Path(name)
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise argparse.ArgumentTypeError(f"expected a name like picture.png, got '{name}'")
    return path


def save_picture(image: torch.Tensor, path: Path) -> None:
    """Write (1, 3, H, W) with values within [0, 1]; the name says in which format."""
    pixels = image[0].permute(1, 2, 0).float().mul(255).round().to(torch.uint8)
    Image.fromarray(pixels.cpu().numpy()).save(path)


def print_table(rows: list[Row], device: torch.device, tolerance: float) -> None:
    """One line for each graph; errors over the tolerance are marked."""
    table = Table()
    for column in ("graph", "device", "plan"):
        table.add_column(column)
    for column in ("time, ms", "torch, ms", "relative error"):
        table.add_column(column, justify="right")
    for row in rows:
        error = f"{row.error:.1e}" + ("" if row.error <= tolerance else " FAILED")
        times = f"{row.time_ms:.3g}", f"{row.torch_ms:.3g}"
        table.add_row(row.title, str(device), row.plan, *times, error)
    # Away from a terminal rich would assume 80 columns and fold the cells.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run the four cases, print the table, write the picture; 1 if a result is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device",
        type=known_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)",
    )
    parser.add_argument("--out", type=picture, default="out/sharpened.png", help="the picture")
    args = parser.parse_args(argv)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: no folder {args.out.parent} can be made: {error.strerror}")

    device = args.device
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    photo = load_photo(device, dtype)
    torch.manual_seed(0)

    height, width = photo.shape[2:]
    print(f"photograph of {width} x {height} pixels, {dtype}, channels_last, on {name}")
    rows = [
        measure(make_case(photo), device)
        for make_case in (sharpen, conv_bn_relu, upsample, attention)
    ]
    tolerance = TOLERANCE[dtype]
    print_table(rows, device, tolerance)
    print(f"relative error: distance from torch in float64; at most {tolerance:g} is accepted")

    save_picture(rows[0].result, args.out)
    print(f"sharpened picture: {args.out}")

    failed = [row.title for row in rows if not row.error <= tolerance]
    for title in failed:
        print(f"FAILED: {title}: the relative error is over {tolerance:g}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
