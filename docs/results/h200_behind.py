"""Run every engine that cuDNN offers for ops behind, or in front of, products, convolutions, norms
and reductions; write which plans are wrong, and what becomes of NaN.

    python docs/results/h200_behind.py --out docs/results/h200-behind.md --limit 200

Each graph is small. Of every engine the first plan that builds is checked as a search checks its
winner: against the reference in float64, in guarded memory. Workers are processes of their own,
since a plan may crash: the page then names the graph, and a new process goes on behind it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from h200_masks import write

import cudnngraph as cg
from cudnngraph.select.bench import GpuBench

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHORT = {F16: "float16", BF16: "bfloat16", F32: "float32"}
PARTS = 3  # workers for one base
Value = cg.Value
Op = Callable[..., Value]

ALONE: Mapping[str, Op] = {
    "relu": lambda g, x: g.relu(x),
    "leaky_relu 0.2": lambda g, x: g.leaky_relu(x, 0.2),
    "leaky_relu -0.3": lambda g, x: g.leaky_relu(x, -0.3),
    "leaky_relu 2": lambda g, x: g.leaky_relu(x, 2.0),
    "elu 0.7": lambda g, x: g.elu(x, 0.7),
    "gelu": lambda g, x: g.gelu(x),
    "gelu_tanh": lambda g, x: g.gelu_tanh(x),
    "silu": lambda g, x: g.silu(x),
    "sigmoid": lambda g, x: g.sigmoid(x),
    "tanh": lambda g, x: g.tanh(x),
    "softplus 2": lambda g, x: g.softplus(x, beta=2.0),
    "clamp -0.4 0.7": lambda g, x: g.clamp(x, -0.4, 0.7),
    "clamp 0.5 above": lambda g, x: g.clamp(x, None, 0.5),
    "clamp -0.25 below": lambda g, x: g.clamp(x, -0.25, None),
    "relu6": lambda g, x: g.relu6(x),
    "hardswish": lambda g, x: g.hardswish(x),
    "-x": lambda g, x: -x,
    "abs": lambda g, x: g.abs(x),
    "exp": lambda g, x: g.exp(x * 0.1),
    "erf": lambda g, x: g.erf(x),
    "2 - x": lambda g, x: 2.0 - x,
    "x * 0.5": lambda g, x: x * 0.5,
    "x + 0.5": lambda g, x: x + 0.5,
    "x x": lambda g, x: x * x,
    "x + x": lambda g, x: x + x,
    "1 / (x x + 1)": lambda g, x: 1.0 / (x * x + 1.0),
    "pow": lambda g, x: g.pow(g.abs(x) + 0.5, 1.7),
    "sqrt": lambda g, x: g.sqrt(x * x + 0.5),
    "identity": lambda g, x: g.identity(x),
    "maximum 0": lambda g, x: g.maximum(x, 0.0),
    "where": lambda g, x: g.where(g.gt(x, 0.0), x, x * 0.2),
    "relu(-x)": lambda g, x: g.relu(-x),
    "2 relu": lambda g, x: g.relu(x) * 2.0,
    "relu(2 x)": lambda g, x: g.relu(x * 2.0),
    "relu + 1": lambda g, x: g.relu(x) + 1.0,
    "leaky_relu(2 x)": lambda g, x: g.leaky_relu(x * 2.0, 0.2),
    "-relu": lambda g, x: -g.relu(x),
    "x - relu": lambda g, x: x - g.relu(x),
    "relu(x x - 0.5)": lambda g, x: g.relu(x * x - 0.5),
}
# "v" stands for a vector along the columns or channels in one graph, for all of z in another.
WITH_ANOTHER: Mapping[str, Op] = {
    "x + v": lambda g, x, v: x + v,
    "x - v": lambda g, x, v: x - v,
    "v - x": lambda g, x, v: v - x,
    "x v": lambda g, x, v: x * v,
    "x / (|v| + 1)": lambda g, x, v: x / (g.abs(v) + 1.0),
    "maximum v": lambda g, x, v: g.maximum(x, v),
    "minimum v": lambda g, x, v: g.minimum(x, v),
    "relu(x + v)": lambda g, x, v: g.relu(x + v),
    "relu(x - v)": lambda g, x, v: g.relu(x - v),
    "relu(v - x)": lambda g, x, v: g.relu(v - x),
    "relu(x v)": lambda g, x, v: g.relu(x * v),
    "relu(x) + v": lambda g, x, v: g.relu(x) + v,
    "relu(x) v": lambda g, x, v: g.relu(x) * v,
    "relu(2 x + v)": lambda g, x, v: g.relu(x * 2.0 + v),
    "relu(x + 2 v)": lambda g, x, v: g.relu(x + v * 2.0),
    "2 (x + v)": lambda g, x, v: (x + v) * 2.0,
    "leaky_relu(x + v)": lambda g, x, v: g.leaky_relu(x + v, 0.2),
    "leaky_relu(x) + v": lambda g, x, v: g.leaky_relu(x, 0.2) + v,
    "gelu(x + v)": lambda g, x, v: g.gelu(x + v),
    "gelu_tanh(x + v)": lambda g, x, v: g.gelu_tanh(x + v),
    "gelu_tanh(x) + v": lambda g, x, v: g.gelu_tanh(x) + v,
    "silu(x + v)": lambda g, x, v: g.silu(x + v),
    "sigmoid(x + v)": lambda g, x, v: g.sigmoid(x + v),
    "tanh(x + v)": lambda g, x, v: g.tanh(x + v),
    "elu(x + v)": lambda g, x, v: g.elu(x + v, 0.7),
    "clamp(x + v)": lambda g, x, v: g.clamp(x + v, -0.4, 0.7),
    "softplus(x + v)": lambda g, x, v: g.softplus(x + v, beta=2.0),
    "where v": lambda g, x, v: g.where(g.gt(x, v), x, v * 0.5),
}
# Of two tensors of one shape alone.
GRADIENTS: Mapping[str, Op] = {
    "relu' z": lambda g, x, z: g.relu_backward(x, z),
    "leaky_relu' 0.2 z": lambda g, x, z: g.relu_backward(x, z, negative_slope=0.2),
    "leaky_relu' 2 z": lambda g, x, z: g.relu_backward(x, z, negative_slope=2.0),
    "silu' z": lambda g, x, z: g.silu_backward(x, z),
    "gelu' z": lambda g, x, z: g.gelu_backward(x, z),
    "gelu_tanh' z": lambda g, x, z: g.gelu_tanh_backward(x, z),
}
WITH_BOTH: Mapping[str, Op] = {
    "x + v + z": lambda g, x, v, z: x + v + z,
    "relu(x + v + z)": lambda g, x, v, z: g.relu(x + v + z),
    "relu(x + z + v)": lambda g, x, v, z: g.relu(x + z + v),
    "relu(x - v - z)": lambda g, x, v, z: g.relu(x - v - z),
    "relu(x v + z)": lambda g, x, v, z: g.relu(x * v + z),
    "relu(x + v) + z": lambda g, x, v, z: g.relu(x + v) + z,
    "relu(x + z / 2 + v)": lambda g, x, v, z: g.relu(x + z * 0.5 + v),
    "relu(2 x + z + v)": lambda g, x, v, z: g.relu(x * 2.0 + z + v),
    "leaky_relu(x + v + z)": lambda g, x, v, z: g.leaky_relu(x + v + z, 0.2),
    "leaky_relu(x + v) + z": lambda g, x, v, z: g.leaky_relu(x + v, 0.2) + z,
    "leaky_relu(x + z / 2 + v)": lambda g, x, v, z: g.leaky_relu(x + z * 0.5 + v, 0.2),
    "silu(x + v) z": lambda g, x, v, z: g.silu(x + v) * z,
    "gelu(x + v) + z": lambda g, x, v, z: g.gelu(x + v) + z,
}
OPS: tuple[tuple[str, Op, str], ...] = (
    *((name, op, "") for name, op in ALONE.items()),
    *((name, op, "v") for name, op in WITH_ANOTHER.items()),
    *((name.replace("v", "z"), op, "z") for name, op in WITH_ANOTHER.items()),
    *((name, op, "z") for name, op in GRADIENTS.items()),
    *((name, op, "vz") for name, op in WITH_BOTH.items()),
)

IMAGES = (2, 32, 12, 14)
LAST = "channels_last"
# Shapes of what goes in, by the anchor; the ops stand behind it, or in front of it ("in front").
ANCHORS: Mapping[str, tuple[Any, ...]] = {
    "matmul": ((96, 64), (64, 128)),
    "matmul, square": ((64, 64), (64, 64)),
    "matmul, batch": ((3, 96, 64), (3, 64, 128)),
    "matmul to float32": ((96, 64), (64, 128)),
    "conv 3x3": (IMAGES, (64, 32, 3, 3), LAST),
    "conv 1x1": (IMAGES, (64, 32, 1, 1), LAST),
    "conv 3x3, contiguous": (IMAGES, (64, 32, 3, 3), None),
    "conv 3x3, 4 groups": (IMAGES, (64, 8, 3, 3), LAST),
    "conv_transpose": (IMAGES, (32, 64, 2, 2), LAST),
    "conv_wgrad": ((2, 64, 12, 14), IMAGES, LAST),
    "rms_norm": ((96, 256), (256,)),
    "layer_norm": ((96, 256), (256,)),
    "normalize": ((96, 64),),
    "batch_norm_train": ((4, 64, 8, 8), (64,), LAST),
    "nothing": ((96, 256),),
    "nothing, channels last": ((2, 64, 12, 14), LAST),
    "reduction": ((96, 256),),
    "in front of matmul": ((96, 64), (64, 128)),
    "in front of rms_norm": ((96, 256), (256,)),
    "in front of layer_norm": ((96, 256), (256,)),
    "in front of reduction": ((96, 256),),
}
NARROW = (
    *("matmul, square", "matmul, batch", "matmul to float32", "conv 3x3, contiguous"),
    *("conv 3x3, 4 groups", "normalize"),
)
BASES: tuple[tuple[str, torch.dtype], ...] = tuple(
    (anchor, dtype)
    for dtype in (F16, BF16, F32)
    for anchor in ANCHORS
    if dtype == F16 or anchor not in NARROW
)


def graph(anchor: str, dtype: torch.dtype, op: Op, more: str) -> cg.Graph:
    """The graph of one anchor with one op. Not every one is declared without a mistake."""
    g = cg.Graph("behind")
    shapes = [each for each in ANCHORS[anchor] if isinstance(each, tuple)]
    at = {} if LAST not in ANCHORS[anchor] else {"layout": LAST}

    def given(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype) -> Value:
        return g.input(name, shape, kind, **(at if len(shape) == 4 else {}))  # type: ignore[arg-type]

    def applied(x: Value) -> Value:
        shape: dict[str, tuple[int, ...]] = {"z": x.shape, "v": x.shape[-1:]}
        if len(x.shape) == 4:
            shape["v"] = (1, x.shape[1], 1, 1)
        return op(g, x, *(given(name, shape[name]) for name in more))

    x = given("x", shapes[0])
    kind = anchor.removeprefix("in front of ").partition(",")[0].partition(" ")[0]
    if anchor.startswith("in front"):
        x = applied(x)
    if kind == "matmul":
        y = g.matmul(x, given("w", shapes[1]))
    elif kind == "conv":
        groups = shapes[0][1] // shapes[1][1]
        y = g.conv(x, given("w", shapes[1]), padding=shapes[1][2] // 2, groups=groups)
    elif kind == "conv_transpose":
        y = g.conv_transpose(x, given("w", shapes[1]), stride=2)
    elif kind == "conv_wgrad":
        y = g.conv_wgrad(x, given("w", shapes[1]), kernel=3, padding=1)
    elif kind == "rms_norm":
        y = g.rms_norm(x, given("w", shapes[1]))
    elif kind == "layer_norm":
        y = g.layer_norm(x, given("w", shapes[1]), given("b", shapes[1]))
    elif kind == "normalize":
        y = g.normalize(x)
    elif kind == "batch_norm_train":
        y = g.batch_norm_train(x, given("w", shapes[1], F32), given("b", shapes[1], F32))[0]
    elif kind == "reduction":
        y = g.reduction(x, (0,), "sum")
    else:
        y = x
    wide = {"dtype": F32} if anchor == "matmul to float32" else {}
    g.output("y", y if anchor.startswith("in front") else applied(y), **wide)
    return g


# -- a worker --------------------------------------------------------------------------------------


def work(base: int, part: int, start: int, until: float) -> Iterator[dict[str, Any]]:
    """Rows on each graph of a part from number ``start`` on, before and after its run."""
    device, policy = torch.device("cuda", 0), cg.Policy(allow_tf32=False, tune="autotune")
    anchor, dtype = BASES[base]
    for number, (name, op, more) in list(enumerate(OPS))[part::PARTS]:
        if number < start:
            continue
        if time.time() > until:
            yield {"number": number, "name": name, "late": True}
            continue
        yield {"number": number, "name": name}
        bench = GpuBench(policy, device)
        try:
            spec = graph(anchor, dtype, op, more).spec()
            proposals = bench.proposals(spec)
        except (cg.NotSupported, cg.GraphError):
            yield {"number": number, "engines": {}, "done": True}
            continue
        engines: dict[str, str] = {}
        barred = set()
        for candidate in proposals.candidates:
            engine = str(candidate.choice.engine)
            if engine in engines:
                continue
            outcome, plan = proposals.build(candidate)
            if plan is not None:
                engines[engine] = bench.why_wrong(spec, plan) or ""
                yield {"number": number, "engines": engines}
            elif "known to be wrong" in outcome.reason:
                barred.add(engine)
        torch.cuda.synchronize()
        lost = "" in engines.values() and _loses_nan(anchor, dtype, op, more)
        yield {
            "number": number,
            "engines": engines,
            "barred": sorted(barred),
            "lost": lost,
            "done": True,
        }


def _loses_nan(anchor: str, dtype: torch.dtype, op: Op, more: str) -> bool:
    """Whether a graph, by cuDNN's first choice, makes a number where the reference has NaN."""
    if anchor not in ("matmul", "conv 3x3", "nothing"):
        return False
    g = graph(anchor, dtype, op, more)
    exe = g.compile("cuda", policy=cg.Policy(allow_tf32=False))
    gen = torch.Generator("cuda").manual_seed(0)
    given = {}
    for name in exe.spec.inputs:
        tensor = exe.spec.tensors[name]
        values = torch.randn(tensor.shape, generator=gen, device="cuda").to(dtype)
        if name == "x":
            values[0, ..., 0] = float("nan")
        made = torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device="cuda")
        given[name] = made.copy_(values)
    ours = exe(**given).isnan().cpu()
    wanted = g.compile("cpu")(**{name: each.cpu() for name, each in given.items()}).isnan()
    return bool((wanted & ~ours).any())


# -- all of them -----------------------------------------------------------------------------------


def told(base: int, part: int, until: float, gpu: int) -> list[dict[str, Any]]:
    """Results of one part's workers by graph; a new worker follows one that crashes or hangs.

    A graph without a result counts as not begun.
    """
    numbers = range(part, len(OPS), PARTS)
    found: dict[int, dict[str, Any]] = {}
    start, silent = part, 0
    while start < len(OPS) and silent < 3:
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "CUDNNGRAPH_CACHE_DIR": folder}
            command = [sys.executable, __file__, "--worker", *map(str, (base, part, start, until))]
            try:
                run = subprocess.run(
                    command,
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=max(until - time.time(), 0.0) + 30.0,
                )
                out, code, error = run.stdout, run.returncode, run.stderr.splitlines()
            except subprocess.TimeoutExpired as late:
                out = (late.stdout or b"").decode()  # type: ignore[union-attr]
                code, error = 1, ["hangs"]
        last = None
        for line in out.splitlines():
            try:
                each = json.loads(line)
            except json.JSONDecodeError:  # not ours, or cut short
                continue
            last = found[each["number"]] = found.get(each["number"], {}) | each
        if code == 0:
            break
        if last is None:
            silent += 1
            print(f"{BASES[base]} from {start}: {error[-3:]}", file=sys.stderr)
            continue
        if "done" not in last:
            last["crash"] = next(
                (each for each in error if "CUDA error" in each or each == "hangs"),
                f"exit code {code}",
            )
        start = last["number"] + PARTS
    return [found.get(number, {"number": number, "late": True}) for number in numbers]


def rows(results: Mapping[int, Sequence[dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """One line of the table per base."""
    for base, (anchor, dtype) in enumerate(BASES):
        all_of = results.get(base, [])
        tried: Counter[str] = Counter()
        barred: Counter[str] = Counter()
        for each in all_of:
            tried.update(each.get("engines", {}).keys())
            barred.update(each.get("barred", ()))
        whole = sum(bool(each.get("engines")) for each in all_of)
        wrong = sum(bool(why) for each in all_of for why in each.get("engines", {}).values())
        crashed = sum("crash" in each for each in all_of)
        late = sum("late" in each for each in all_of)
        yield (
            f"{anchor} {SHORT[dtype]}",
            f"{whole} of {len(all_of) - late}",
            *(
                " ".join(f"{e}: {n}" for e, n in sorted(c.items(), key=lambda i: int(i[0])))
                for c in (tried, barred)
            ),
            str(wrong),
            str(crashed),
        )


def findings(results: Mapping[int, Sequence[dict[str, Any]]]) -> Iterator[str]:
    """A line for each wrong plan and crash."""
    for base, (anchor, dtype) in enumerate(BASES):
        for each in results.get(base, []):
            what = f"{anchor} {SHORT[dtype]}, `{each['name']}`"
            if "crash" in each:
                yield f"- {what}: crashed, {each['crash'][:120]}"
            for engine, why in each.get("engines", {}).items():
                if why:
                    yield f"- {what}: engine {engine}: {why}"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--limit", type=float, default=200.0, help="seconds after which none starts"
    )
    parser.add_argument("--jobs", type=int, default=14, help="workers for each GPU")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--worker", nargs=4, metavar=("BASE", "PART", "START", "UNTIL"))
    args = parser.parse_args(arguments)
    if args.worker:
        base, part, start = map(int, args.worker[:3])
        for each in work(base, part, start, float(args.worker[3])):
            print(json.dumps(each), flush=True)
        return
    until = time.time() + args.limit
    tasks = [(base, part) for base in range(len(BASES)) for part in range(PARTS)]
    results: dict[int, list[dict[str, Any]]] = {base: [] for base, _ in tasks}
    with ThreadPoolExecutor(args.jobs * len(args.gpus)) as pool:
        running = [
            (base, pool.submit(told, base, part, until, args.gpus[number % len(args.gpus)]))
            for number, (base, part) in enumerate(tasks)
        ]
        for base, future in running:
            results[base] += future.result()
    head = ("ops around", "in one plan", "plans by engine", "barred", "wrong", "crashes")
    late = sum("late" in each for some in results.values() for each in some)
    lost = sorted({each["name"] for some in results.values() for each in some if each.get("lost")})
    lines = [
        "# Ops around products, convolutions and norms, by every engine",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; {datetime.date.today()}.",
        "",
        "```",
        "python docs/results/h200_behind.py --out docs/results/h200-behind.md",
        "```",
        "",
        f"{len(OPS)} graphs a row: an anchor with one to four pointwise ops behind or in front. "
        "For each engine that cuDNN proposes the first plan that builds ran once and was compared "
        "with the reference in float64, as a search does. Barred are engines whose plans are known "
        "to be wrong. Graphs that are not in one plan are cut, which the test tier covers. "
        f"{late} were not begun within the limit.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows(results)),
        "",
        "Wrong plans and crashes:",
        "",
        *(list(findings(results)) or ["- none"]),
        "",
        "With NaN in x a number comes out where the reference has NaN, alone, behind a product or "
        f"behind a convolution, of: {', '.join(f'`{name}`' for name in lost) or 'no op'}.",
    ]
    print("\n".join(lines[13:]))
    if args.out:
        write(lines, args.out)


if __name__ == "__main__":
    main()
