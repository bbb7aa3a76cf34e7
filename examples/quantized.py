"""A float32 network of two convolutions in int8 and FP8: calibrate, quantise, compare.

    python examples/quantized.py [--device cpu]

The largest values of the network's data, taken with `reduction(mode="amax")` from a first batch,
give the scales of its data; each output channel of a weight has a scale of its own. On a GPU each
quantised convolution with its scales, bias, ReLU and rounding is one cuDNN plan.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise

import torch

import cudnngraph as cg
from cudnngraph.cli.arguments import device as known_device

BATCH, CHANNELS, SIZE = 8, (16, 32, 16), 24
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# Rounding weights and data to 8 bits makes about two thirds of these.
BOUNDS = {torch.int8: 0.026, torch.float8_e4m3fn: 0.08, torch.float8_e5m2: 0.16}
Tensors = dict[str, torch.Tensor]


def network(device: torch.device) -> Tensors:
    """Random weights (K, C, 3, 3) and biases (K,) of two convolutions."""
    gen = torch.Generator().manual_seed(0)
    made = {}
    for layer, (c, k) in enumerate(pairwise(CHANNELS), 1):
        weight = torch.randn(k, c, 3, 3, generator=gen) * (2.0 / (9 * c)) ** 0.5
        made[f"w{layer}"] = weight.to(device, memory_format=torch.channels_last)
        made[f"b{layer}"] = (torch.randn(k, generator=gen) * 0.1).to(device)
    return made


def calibrated(net: Tensors, x: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The network's result in float32, and the largest values of its input and hidden data."""
    g = cg.Graph("float_network")
    given = {name: g.input(name, like=value) for name, value in {**net, "x": x}.items()}
    h = g.conv_bias_act(given["x"], given["w1"], given["b1"], padding=1)
    g.output("y", g.conv_bias_act(h, given["w2"], given["b2"], activation=None, padding=1))
    g.output("x_max", g.reduction(given["x"], mode="amax"))
    g.output("h_max", g.reduction(h, mode="amax"))
    return tuple(g.compile(device)(**net, x=x))


def quantised_weight(
    weight: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in 8 bits and the scale (K,) of each of its output channels."""
    g = cg.Graph("largest")
    g.output("y", g.reduction(g.input("w", like=weight), (1, 2, 3), mode="amax"))
    scale = g.compile(device)(w=weight) / LARGEST[dtype]
    g = cg.Graph("rounding")
    w, s = g.input("w", like=weight), g.input("s", like=scale)
    g.output("y", g.quantize(w, s, dim=0, dtype=dtype))
    return g.compile(device)(w=weight, s=scale), scale


def quantised(
    net: Tensors, x: torch.Tensor, maxima: Tensors, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, cg.Executable]:
    """The result of the network in 8 bits, and what ran it."""
    s_x, s_h = maxima["x"] / LARGEST[dtype], maxima["h"] / LARGEST[dtype]
    tensors = {"x": x, "s_x": s_x, "s_h": s_h, "b1": net["b1"], "b2": net["b2"]}
    for layer, s_data in ((1, s_x), (2, s_h)):
        weight, s_w = quantised_weight(net[f"w{layer}"], dtype, device)
        tensors |= {f"w{layer}": weight, f"s{layer}": s_w * s_data}
    g = cg.Graph("quantised_network")
    v = {name: g.input(name, like=value) for name, value in tensors.items()}
    h = g.quantize(v["x"], v["s_x"], dtype=dtype)
    h = g.quantized_conv_bias_act(
        h, v["w1"], v["s1"], v["b1"], out_scale=v["s_h"], dtype=dtype, padding=1
    )
    y = g.quantized_conv_bias_act(h, v["w2"], v["s2"], v["b2"], activation=None, padding=1)
    g.output("y", y)
    exe = g.compile(device)
    return exe(**tensors), exe


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, default=default)
    device = parser.parse_args(arguments).device
    net = network(device)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, CHANNELS[0], SIZE, SIZE, generator=gen)
    x = x.to(device, memory_format=torch.channels_last)
    y, x_max, h_max = calibrated(net, x, device)
    failed = False
    for dtype, bound in BOUNDS.items():
        made, exe = quantised(net, x, {"x": x_max, "h": h_max}, dtype, device)
        error = float((made - y).norm() / y.norm())
        name = str(dtype).removeprefix("torch.")
        print(f"{name}: off by {error:.2%} of float32, in {len(exe.steps)} steps")
        failed |= error > bound
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
