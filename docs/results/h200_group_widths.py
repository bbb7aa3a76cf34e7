"""Measure convolutions of groups, and the same with several groups as one, and write the results
page.

    python docs/results/h200_group_widths.py --out docs/results/h200-group-widths.md

3x3, channels_last; forward with bias and ReLU in float16, gradients of the image and of the weight
in bfloat16. Groups that are one read zeros in their weight for the channels of the others, which
are made beforehand. Microseconds of a call in a CUDA graph. ``--only`` and ``--ops`` choose.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from h200_masks import page

import cudnngraph as cg
from cudnngraph.bench.measure import captured, kernels_of, times_us
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.settings import override

OPS = ("forward", "image gradient", "weight gradient")
MOST_WIDTH = 300  # channels of a group
Case = tuple[str, int, int, int, int, int]  # model, images, channels, results, groups, side
CASES: tuple[Case, ...] = (
    ("ResNeSt-50", 32, 64, 128, 2, 56),
    ("ResNeSt-50", 32, 128, 256, 2, 28),
    ("ResNeSt-50", 32, 256, 512, 2, 14),
    ("ResNeSt-50", 32, 512, 1024, 2, 7),
    ("RegNetY-3.2GF", 32, 216, 216, 9, 28),
    ("RegNetY-3.2GF", 32, 576, 576, 24, 14),
    ("RegNetY-3.2GF", 32, 1512, 1512, 63, 7),
    ("ResNeXt-50", 32, 128, 128, 32, 56),
    ("ResNeXt-50", 32, 256, 256, 32, 28),
    ("ResNeXt-50", 32, 512, 512, 32, 14),
    ("RegNetX-400MF", 32, 160, 160, 10, 14),
    ("NFNet-F0", 32, 768, 768, 6, 12),
    ("NFNet-F0", 32, 256, 256, 2, 24),
    ("ResNeXt-50", 64, 128, 128, 32, 56),
)


def graph(op: str, case: Case, groups: int) -> GraphSpec:
    """The convolution or its gradient, of so many groups."""
    _, n, channels, results, _, side = case
    dtype = torch.float16 if op == "forward" else torch.bfloat16
    g = cg.Graph("groups")

    def image(name: str, many: int) -> cg.Value:
        return g.input(name, (n, many, side, side), dtype, layout="channels_last")

    def weight() -> cg.Value:
        form = (results, channels // groups, 3, 3)
        return g.input("w", form, dtype, layout="channels_last")

    if op == "forward":
        bias = g.input("b", (results,), dtype)
        x = image("x", channels)
        g.output("y", g.conv_bias_act(x, weight(), bias, padding=1, groups=groups))
    elif op == "image gradient":
        dy = image("dy", results)
        g.output("dx", g.conv_transpose(dy, weight(), padding=1, groups=groups))
    else:
        dy, x = image("dy", results), image("x", channels)
        g.output("dw", g.conv_wgrad(dy, x, kernel=3, padding=1, groups=groups))
    return g.spec()


def counts(case: Case) -> list[int]:
    """As how many groups a convolution runs: as it is first, and with several as one."""
    _, _, channels, _, groups, _ = case
    fit = [m for m in range(2, groups + 1) if groups % m == 0]
    fit = [m for m in fit if channels // groups * m <= MOST_WIDTH]
    return [groups, *(groups // m for m in fit[-4:])]


def measure(spec: GraphSpec, tune: str) -> tuple[float, int, str]:
    """Microseconds, bytes of workspace, and the kernel that takes longest."""
    cg.cache_clear()
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder)):
        policy = cg.Policy(tune=tune, budget_s=6)  # type: ignore[arg-type]
        made = compile_spec(spec, device, policy=policy)
    names = (*spec.inputs, *spec.outputs)
    call = captured(
        made.bind(**{name: spec.tensors[name].empty("cuda").normal_() for name in names})
    )
    (us,) = times_us([call], "gpu", device)
    return us, made.workspace_bytes, kernels_of(call, 1)[0][0]


def rows(only: str, ops: list[str]) -> Iterator[list[str]]:
    """Those of the table."""
    for case in CASES:
        model, n, channels, results, groups, side = case
        if only not in model:
            continue
        for op in ops:
            for count in counts(case):
                spec = graph(op, case, count)
                us, workspace, kernel = measure(spec, "heuristic")
                yield [
                    f"{model} {n} x {channels} → {results} x {side}²",
                    *(op, str(groups), str(count), f"{us:.1f}"),
                    f"{measure(spec, 'autotune')[0]:.1f}",
                    *(f"{workspace / 2**20:.0f}", kernel[:44]),
                ]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases of models whose name has this text")
    parser.add_argument("--ops", type=lambda text: text.split(","), default=list(OPS))
    args, rest = parser.parse_known_args()
    head = ("convolution", "op", "groups", "as", "heuristic", "autotuned", "workspace, MiB")
    page(
        "group-widths",
        "Groups of convolutions, several as one",
        "Microseconds of a call.",
        (*head, "the kernel of heuristics that takes longest"),
        rows(args.only, args.ops),
        rest,
        "h200_group_widths.py",
    )


if __name__ == "__main__":
    main()
