"""Measure whole models on a GPU and write the results page.

    python docs/results/h200_models.py --out docs/results/h200-models.md

Each model runs in float16, channels_last, by torch eager, by eager in a CUDA graph, by
``torch.compile(mode="reduce-overhead")`` with freezing, and fused: autotuned, and by heuristics.
All are called in turn in one process. ``--only TEXT`` takes the models whose name has the text, so
that a run fits a few minutes; rows of other models that the JSON beside the page holds are kept.
``--tune`` searches plans and measures nothing, so that a later run finds them in the cache.
``--quick`` runs small models of the same kinds, also on a CPU, without torch.compile.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.bench.measure import captured
from cudnngraph.bench.models import TORCHVISION, WHOLE, Whole
from cudnngraph.device import timing
from cudnngraph.settings import override

ROUNDS = 15
SAMPLE_MS = 20.0  # about how long the calls of one sample take together


ASKED = {  # torch.compile's time divided by ours
    "ResNet-50 batch 32, 224": 1.18,
    "ResNet-50 batch 1, 224": 1.45,
    "DeepLabV3-ResNet-50 batch 4, 512": 1.10,
    "U-Net batch 8, 256": 1.15,
}
QUICK = (
    Whole("small ResNet", lambda: models.ResNet((1, 1), 16, 10), (2, 3, 64, 64)),
    Whole(
        "small DeepLab",
        lambda: models.DeepLab(models.ResNet((1, 1, 1), 8, dilated=True), 16, 5),
        (1, 3, 64, 64),
    ),
    Whole("small U-Net", lambda: models.UNet(8, 3), (1, 3, 32, 32)),
    Whole("small GPT", lambda: models.GPT(31, 64, 2, 16), (2, 12), tokens=31),
)
GLUE_ASKED = 0.08
PRODUCTS = {"conv", "conv_transpose", "matmul"}  # no glue when torch runs one either


# -- time ------------------------------------------------------------------------------------------


def sampler(call: Callable[[], object], device: torch.device) -> timing.Sample:
    """Microseconds of one call, over as many as take a while, called one after the other."""

    def once(count: int) -> float:
        if device.type == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) * 1e6 / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / count

    for _ in range(3):
        call()
    count = max(1, min(100, math.ceil(SAMPLE_MS * 1e3 / max(once(3), 1.0))))
    return lambda: once(count)


def steps_us(bound: object) -> list[dict]:
    """Every step that launches something, timed alone where its tensors lie."""
    exe = bound.executable
    program = exe._program
    tensors = {name: tensor for name, tensor in bound.tensors.items()}
    names = exe._names
    named = {names[name]: tensor for name, tensor in tensors.items()}
    stream = torch.cuda.Stream()
    from cudnngraph.backend import handles

    with torch.cuda.stream(stream):
        launches = program.launches(named, handles.raw_stream(program.device.index))

    def call(launch: Callable) -> Callable[[], None]:
        return lambda: launch(handles.handle_on_current_stream(program.device.index))

    running = [s for n, s in enumerate(exe.steps) if n not in program._layout.free]
    rows = []
    for step, launch in zip(running, launches, strict=True):
        (us,) = timing.measure([call(launch)], stream)
        nodes = [node.op for node in step.spec.nodes if node.op != "constant"]
        first = step.spec.tensors[step.spec.inputs[0]]
        rows.append(
            {
                "ops": " ".join(nodes),
                "runs_on": "torch" if step.choice is None else f"cuDNN {step.choice}",
                "input": str(first),
                "output": str(step.spec.tensors[step.spec.outputs[0]]),
                "us": us,
                "tuned_us": step.time_us,
            }
        )
    return rows


# -- one model -------------------------------------------------------------------------------------


def agreement(net: nn.Module, x: torch.Tensor, ours: torch.Tensor) -> dict[str, float]:
    """The share of results whose class is that of the model in float64: ours, and its own."""
    of_tokens = not x.is_floating_point()
    dim = -1 if of_tokens else 1
    exact = copy.deepcopy(net).double()(x if of_tokens else x.double()).argmax(dim)
    own = net(x).argmax(dim)
    return {
        "fused": float((ours.argmax(dim) == exact).double().mean()),
        "torch": float((own == exact).double().mean()),
    }


def example(model: Whole, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """The model, and what it is called with."""
    torch.manual_seed(0)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    net = models.randomized(model.make()).to(device, dtype)
    return net.to(memory_format=torch.channels_last), model.example(device, dtype)


def tuned(model: Whole, device: torch.device) -> str:
    """Search the plans of a model; how long that took."""
    net, x = example(model, device)
    start = time.perf_counter()
    cg.fuse(net, x, policy=cg.Policy(tune="autotune"), check=False)
    return f"{model.name}: tuned in {time.perf_counter() - start:.0f} s"


def measured(model: Whole, device: torch.device, *, compiled: bool, heuristic: bool) -> dict:
    """One row."""
    net, x = example(model, device)
    row: dict = {"name": model.name, "asked": ASKED.get(model.name)}
    contenders: dict[str, Callable[[], object]] = {"eager": lambda: net(x)}
    if device.type == "cuda":
        contenders["eager, CUDA graph"] = captured(lambda: net(x))
    start = time.perf_counter()
    fused = cg.fuse(net, x, policy=cg.Policy(tune="autotune"), capture=True)
    row["fuse_s"] = time.perf_counter() - start
    bound = fused.bound(x)
    contenders["fused"] = bound
    row["errors"] = fused.report.errors
    row["agreement"] = agreement(net, x, fused(x))
    row["report"] = str(fused.report)
    row["counts"] = dict(fused.report.counts)
    row["tier"] = fused.report.tier
    row["workspace_bytes"] = fused.report.workspace_bytes
    start = time.perf_counter()
    again = cg.fuse(net, x, policy=cg.Policy(tune="cached"), capture=True, check=False)
    row["again_s"] = time.perf_counter() - start
    del again
    if heuristic:
        cg.cache_clear()
        with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder)):
            first = cg.fuse(net, x, policy=cg.Policy(tune="heuristic"), capture=True)
        contenders["fused, heuristic"] = first.bound(x)
    if compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True
        start = time.perf_counter()
        by_inductor = torch.compile(net, mode="reduce-overhead")

        def run() -> object:
            torch.compiler.cudagraph_mark_step_begin()
            return by_inductor(x)

        for _ in range(5):
            run()
        row["compile_s"] = time.perf_counter() - start
        contenders["torch.compile"] = run
    samples = [sampler(call, device) for call in contenders.values()]
    times = timing.interleave(samples, rounds=ROUNDS, drop_over=math.inf)
    row["times_us"] = dict(zip(contenders, times, strict=True))
    if device.type == "cuda":
        row["steps"] = steps_us(bound)
        plans = sum(step["us"] for step in row["steps"] if step["runs_on"] != "torch")
        by_torch = sum(step["us"] for step in row["steps"] if step["runs_on"] == "torch")
        row["plans_us"], row["torch_us"] = plans, by_torch
        row["gaps_us"] = row["times_us"]["fused"] - plans - by_torch
    return row


# -- the page --------------------------------------------------------------------------------------


def text_of(row: dict) -> str:
    """A row of the table."""
    times = row["times_us"]
    names = ("eager", "eager, CUDA graph", "torch.compile", "fused, heuristic", "fused")
    cells = [f"{times[name] / 1e3:.3f}" if name in times else "-" for name in names]
    ratio = f"{times['torch.compile'] / times['fused']:.2f}" if "torch.compile" in times else "-"
    asked = f"{row['asked']:.2f}" if row["asked"] else "-"
    return f"| {row['name']} | {' | '.join(cells)} | {ratio} | {asked} |"


def parity_of(row: dict) -> str:
    """A row of the table of results."""
    ours, own = row["errors"][0]
    same = row["agreement"]
    return f"| {row['name']} | {ours:.1e} | {own:.1e} | {same['fused']:.3%} | {same['torch']:.3%} |"


def glue_of(row: dict) -> str:
    """A row of the table of where the time goes."""
    total, gaps = row["times_us"]["fused"], row["gaps_us"]
    by_torch = [step for step in row["steps"] if step["runs_on"] == "torch"]
    rest = sum(step["us"] for step in by_torch if not set(step["ops"].split()) & PRODUCTS)
    products = sum(step["us"] for step in row["steps"]) - rest
    counts = ", ".join(f"{count} {kind}" for kind, count in row["counts"].items())
    search = f"{row['fuse_s']:.0f}" if row["tier"] == "built" else "-"
    return (
        f"| {row['name']} | {counts} | {products / 1e3:.3f} | {rest / 1e3:.3f} "
        f"| {gaps / 1e3:.3f} | {(rest + gaps) / total:.1%} | {search} "
        f"| {row['again_s']:.1f} |"
    )


def steps_of(row: dict, most: int = 12) -> list[str]:
    """The steps that take most of the time, equal ones together."""
    alike: dict[tuple[str, str, str, str], list[float]] = {}
    for step in row["steps"]:
        key = (step["ops"], step["input"], step["output"], step["runs_on"])
        alike.setdefault(key, []).append(step["us"])
    total = row["times_us"]["fused"]
    lines = [
        f"### {row['name']}",
        "",
        "| ops | first operand | result | runs on | steps | µs each | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for (ops, first, result, runs), us in sorted(alike.items(), key=lambda each: -sum(each[1])):
        if most == 0:
            break
        most -= 1
        lines.append(
            f"| {ops} | {first} | {result} | {runs} | {len(us)} | {statistics.fmean(us):.1f} "
            f"| {sum(us) / total:.1%} |"
        )
    return [*lines, ""]


def page(result: dict, command: str) -> str:
    """The results page."""
    rows = result["rows"]
    lines = [
        "# Whole models",
        "",
        f"{result['device']}, torch {result['torch']}, {result['date']}.",
        "",
        "```",
        command,
        "```",
        "",
        "Milliseconds of a call in float16 (float32 on a CPU), channels_last: medians, all "
        "contenders of a row called in turn. Eager is torch with `cudnn.benchmark`; "
        "torch.compile has "
        '`mode="reduce-overhead"` and freezing; `fused` is `cg.fuse(model, x, capture=True)`, '
        "autotuned, its inputs bound.",
        "",
        "| model | eager | eager, CUDA graph | torch.compile | fused, heuristic | fused "
        "| torch.compile / fused | asked |",
        "|---|---|---|---|---|---|---|---|",
        *map(text_of, rows),
        "",
    ]
    compared = [row for row in rows if "agreement" in row]
    if compared:
        lines += [
            "## Parity",
            "",
            "Relative error to the model in float64, and the share of images (of pixels, of "
            "tokens) whose class is float64's: fused, and of torch in the same dtype. Weights are "
            "random, so classes lie closer together than a trained model's.",
            "",
            "| model | error, fused | error, torch | same class, fused | same class, torch |",
            "|---|---|---|---|---|",
            *map(parity_of, compared),
            "",
        ]
    with_steps = [row for row in rows if "steps" in row]
    if with_steps:
        lines += [
            "## Where the time goes",
            "",
            "Milliseconds: steps timed one by one where their tensors lie: plans, and the products "
            "that torch's own call runs faster; the other torch steps; gaps are what the whole "
            "takes beyond their sum (colder caches, launches; below zero where steps run side by "
            f"side). Glue is other steps and gaps; asked: at most {GLUE_ASKED:.0%}. The last "
            "columns are seconds that `fuse` took, tuning (- where `--tune` had done that before), "
            "and in the same process again.",
            "",
            "| model | steps | products | other steps | gaps | glue | tuned in | again |",
            "|---|---|---|---|---|---|---|---|",
            *map(glue_of, with_steps),
            "",
        ]
        for row in with_steps:
            if row["asked"]:
                lines += steps_of(row)
    failed = [row for row in result.get("failed", [])]
    if failed:
        lines += ["## Failed", "", *(f"- {row['name']}: {row['error']}" for row in failed), ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--heuristic", action="store_true")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    data = args.json or (args.out.with_suffix(".json") if args.out else None)
    kept = json.loads(data.read_text())["rows"] if data and data.exists() else []
    rows = {row["name"]: row for row in kept}
    failed: list[dict] = []
    result: dict = {}
    listed = [*WHOLE, *(TORCHVISION if models.has_torchvision() else ())]
    for model in QUICK if args.quick else listed:
        if args.only not in model.name:
            continue
        try:
            compiled = not (args.no_compile or args.quick)
            with torch.no_grad():
                if args.tune:
                    print(tuned(model, device), flush=True)
                    continue
                rows[model.name] = measured(
                    model, device, compiled=compiled, heuristic=args.heuristic
                )
            print(text_of(rows[model.name]), flush=True)
            if "steps" in rows[model.name]:
                print(glue_of(rows[model.name]), flush=True)
        except Exception as error:  # the other rows are worth having
            traceback.print_exc()
            failed.append({"name": model.name, "error": f"{type(error).__name__}: {error}"[:2000]})
        result = {
            "rows": list(rows.values()),
            "failed": failed,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU (reference)",
            "torch": torch.__version__,
            "date": str(datetime.datetime.now(datetime.timezone.utc).date()),
        }
        write(result, args.out, data)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if result and not args.out:
        print(text_of_page(result))
    return int(bool(failed))


def text_of_page(result: dict) -> str:
    """The page, and the command that makes it."""
    return page(result, "python docs/results/h200_models.py --out docs/results/h200-models.md")


def write(result: dict, out: Path | None, data: Path | None) -> None:
    """Write what there is so far; what a person wrote under "Notes" stays."""
    if out:
        before = out.read_text() if out.exists() else ""
        _, mark, notes = before.partition("\n## Notes\n")
        out.write_text(text_of_page(result) + mark + notes)
    if data:
        data.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
