"""Measure norms, feed-forward layers, separable convolutions, attention, low precision, others.

    python docs/results/h200_breadth.py --out docs/results/h200-breadth.md

Each case autotuned, by cuDNN's first plan, by eager torch and by the other ways that torch has,
side by side. A page is written to ``--out`` and all numbers beside it as JSON. Suites and cases
that a run leaves out (``--suites``, ``--only``) keep the numbers that the JSON has of them.
``--quick`` takes tiny shapes and also runs on a CPU, where times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.bench.cases import Case
from cudnngraph.device import timing
from cudnngraph.ops.work import bytes_of, flops_of
from cudnngraph.runtime.compile import default_device

SUITES = ("breadth", "attention", "lowprecision")
ROUNDS = 15
ADDED = ("eager", "heuristic", "autotuned")
Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A number that is asked: a case's time is at most ``limit`` times another one.

    ``against`` is a contender of the same case, "best other" for the fastest of its other ways, or
    the name of another case.
    """

    case: str
    against: str
    limit: float
    text: str


_COPY = "at least 85 % of the bandwidth of a device copy"
_ATTENTION = "attention B2 H16 S2048 D128"
_DECODE = "attention decode B8 H32/8 1x8192 D128"
ASKED = (
    Asked("rms_norm 16384 4096", "device copy", 1 / 0.85, _COPY),
    Asked("layer_norm 16384 4096", "device copy", 1 / 0.85, _COPY),
    Asked("rms_norm 16384 4096 residual", "eager", 0.65, "at most 0.65 of eager's time"),
    Asked("linear 8192 4096 4096 bias gelu", "F.linear alone", 1.03, "at most 1.03 of F.linear"),
    Asked("linear 8192 4096 4096 bias gelu_tanh", "F.linear alone", 1.03, "the same"),
    Asked("swiglu 8192 4096 14336", "eager", 0.97, "at most 0.97 of eager's time"),
    Asked("pixels 64 224 224 3", "eager", 0.5, "at most half of eager's time"),
    Asked("adamw 67108864", "eager", 0.5, "at most half of eager's time"),
    Asked(f"{_ATTENTION} causal window 256", f"{_ATTENTION} causal", 0.5, "at most half"),
    *(
        Asked(f"{_DECODE} pages of {size}", "best other", 1.1, "at most 1.1 of torch's best")
        for size in (16, 64)
    ),
    Asked("conv 32 128 28 128 3 1 1 e4m3fn scale relu", "fp16", 0.9, "at most 0.90 of float16's"),
    Asked("sdpa B2 H16 S2048 D128 causal e4m3", "bf16", 0.8, "at most 0.80 of bfloat16's"),
)


def cases_of(suite: str, quick: bool) -> list[Case]:
    """The cases of a suite; none where it is not there."""
    try:
        module = importlib.import_module(f"cudnngraph.bench.{suite}")
    except ModuleNotFoundError as error:
        if error.name != f"cudnngraph.bench.{suite}":
            raise
        print(f"there is no suite '{suite}'", file=sys.stderr)
        return []
    if quick and suite != "breadth":
        return []
    listed: list[Case] = (
        module.breadth_suite(quick) if quick else getattr(module, f"{suite}_suite")()
    )
    return listed


def steps_of(exe: cg.Executable) -> str:
    """The steps in short; views are left out."""
    steps = []
    for step in exe.steps:
        ops = " ".join(node.op for node in step.spec.nodes if node.op != "constant")
        if step.choice is None and step.spec.nodes[-1].op in ("reshape", "permute", "transpose"):
            continue
        steps.append(f"{ops} (torch)" if step.choice is None else ops)
    return " | ".join(steps)


def times_us(contenders: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Microseconds of each: on a GPU by the protocol of :mod:`cudnngraph.device.timing`."""
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        return timing.measure(contenders, stream, rounds=ROUNDS, drop_over=math.inf)
    taken = []
    for run in contenders:
        run()
        samples = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e6)
        taken.append(statistics.median(samples))
    return taken


def first(made: Any) -> torch.Tensor:
    """The first result of several."""
    return made[0] if isinstance(made, tuple) else made


def measured(case: Case, suite: str, device: torch.device) -> Row:
    """One row: times in µs by contender, and what was chosen."""
    heuristic = case.graph.compile(device)
    start = time.perf_counter()
    tuned = case.graph.compile(device, tune="autotune")
    search_s = time.perf_counter() - start
    in_place = bool(getattr(case, "in_place", ()))  # then each has tensors of its own
    shared = case.tensors(device)

    def own() -> dict[str, torch.Tensor]:
        return case.tensors(device) if in_place else shared

    ways = {"eager": case.eager, **case.others}
    contenders: dict[str, Callable[[], object]] = {}
    want: torch.Tensor | None = None
    for name, way in ways.items():
        tensors = own()
        try:
            made = first(way(tensors)).clone()
        except (RuntimeError, NotImplementedError) as error:  # torch has no kernel for it here
            print(f"{case.name}: {name}: {error}"[:200], file=sys.stderr)
            continue
        want = made if name == "eager" else want
        contenders[name] = lambda way=way, tensors=tensors: way(tensors)
    output = tuned.spec.outputs[0]
    errors = {}
    for name, exe in (("heuristic", heuristic), ("autotuned", tuned)):
        tensors = own()
        exe.run(**tensors)
        if want is not None:
            off = (tensors[output].double() - want.double()).norm() / want.double().norm()
            errors[name] = float(off)
    for name, exe in (("heuristic", heuristic), ("autotuned", tuned)):
        contenders[name] = exe.bind(**own())
    spec = case.graph.spec()
    return {
        "name": case.name,
        "suite": suite,
        "times_us": dict(zip(contenders, times_us(list(contenders.values()), device), strict=True)),
        "bytes": bytes_of(spec),
        "flops": flops_of(spec),
        "search_s": search_s,
        "steps": steps_of(tuned),
        "heuristic_steps": steps_of(heuristic),
        "workspace_bytes": tuned.workspace_bytes,
        "difference_from_eager": errors,
        "explain": tuned.explain(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def rate(row: Row) -> str:
    """TFLOP/s of products, GB/s of the rest."""
    us = row["times_us"]["autotuned"]
    if row["flops"] > 100 * row["bytes"]:
        return f"{row['flops'] / us * 1e-6:.0f} TFLOP/s"
    return f"{row['bytes'] / us * 1e-3:.0f} GB/s"


def row_text(row: Row) -> str:
    """A row of the table."""
    times = row["times_us"]
    tuned, eager = times["autotuned"], times.get("eager", math.nan)
    rest = ", ".join(f"{name} {us:.1f}" for name, us in times.items() if name not in ADDED)
    steps = row["steps"].replace("|", "\\|")
    return (
        f"| {row['name']} | {tuned:.1f} | {times['heuristic']:.1f} | {eager:.1f} | {rest} "
        f"| {tuned / eager:.2f} | {rate(row)} | {steps} |"
    )


def judged(asked: Asked, rows: Mapping[str, Row]) -> Row | None:
    """The measurement for a number that is asked; None if there is none."""
    row = rows.get(asked.case)
    if row is None:
        return None
    times = row["times_us"]
    if asked.against == "best other":
        base = min((us for name, us in times.items() if name not in ADDED), default=None)
    elif asked.against in times:
        base = times[asked.against]
    else:
        base = rows[asked.against]["times_us"]["autotuned"] if asked.against in rows else None
    if base is None:
        return None
    ratio = times["autotuned"] / base
    return {
        "case": asked.case,
        "against": asked.against,
        "asked": asked.text,
        "limit": asked.limit,
        "measured": ratio,
        "met": ratio <= asked.limit,
    }


def page(answer: Row) -> str:
    """The results page."""
    rows = [row for row in answer["rows"] if "error" not in row]
    lines = [
        "# Norms, feed-forward layers, separable convolutions, and others",
        "",
        f"{answer['device']}, torch {answer['torch']}, cuDNN {answer['cudnn']}, frontend "
        f"{answer['frontend']}; {answer['date'][:10]}.",
        "",
        "```",
        answer["command"],
        "```",
        "",
        "Time in µs: medians of CUDA graph replays, all contenders of a row interleaved in one "
        "process, warm L2. `heuristic` is `compile()`, `autotuned` is "
        '`compile(tune="autotune")` with default budgets. GB/s are of the graph\'s inputs and '
        "outputs alone.",
    ]
    for suite in dict.fromkeys(row["suite"] for row in rows):
        lines += [
            "",
            f"## {suite}",
            "",
            "| case | autotuned | heuristic | eager | other ways | autotuned / eager | rate "
            "| steps of the tuned plan |",
            "|---|---|---|---|---|---|---|---|",
            *(row_text(row) for row in rows if row["suite"] == suite),
        ]
    lines += [
        "",
        "## Asked",
        "",
        "| case | asked | limit | measured | |",
        "|---|---|---|---|---|",
        *(
            f"| {each['case']} | {each['asked']} (against {each['against']}) | {each['limit']:.3f} "
            f"| {each['measured']:.3f} | {'met' if each['met'] else 'not met'} |"
            for each in answer["asked"]
        ),
    ]
    failed = [row for row in answer["rows"] if "error" in row]
    if failed:
        lines += ["", "## Failed", "", *(f"- {row['name']}: {row['error']}" for row in failed)]
    return "\n".join([*lines, ""])


def versions(device: torch.device) -> Row:
    """The device and the versions of the measurement."""
    if device.type != "cuda":
        return {"device": "CPU", "torch": torch.__version__, "cudnn": "-", "frontend": "-"}
    from cudnngraph.backend import env

    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cudnn": env.cudnn_version(),
        "frontend": env.frontend_version(),
    }


def run(args: argparse.Namespace) -> Row:
    """Measure what is asked for; the rest is as the JSON file has it."""
    device = default_device()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cudnn.benchmark = True
    elif not args.quick:
        raise SystemExit("there is no GPU: --quick runs tiny shapes on the CPU")
    old: Row = {}
    if args.json and args.json.exists():
        old = json.loads(args.json.read_text(encoding="utf-8"))
    rows: dict[str, Row] = {row["name"]: row for row in old.get("rows", ())}
    for suite in args.suites:
        for case in cases_of(suite, args.quick):
            if args.only not in case.name:
                continue
            try:
                rows[case.name] = measured(case, suite, device)
                print(row_text(rows[case.name]), file=sys.stderr)
            except Exception as error:  # the other rows are worth having
                text = f"{type(error).__name__}: {error}"[:600]
                rows[case.name] = {"name": case.name, "suite": suite, "error": text}
                print(rows[case.name], file=sys.stderr)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    found = {name: row for name, row in rows.items() if "error" not in row}
    return {
        "command": shlex.join(["python", "docs/results/h200_breadth.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **versions(device),
        "rows": list(rows.values()),
        "asked": [each for asked in ASKED if (each := judged(asked, found)) is not None],
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="default: beside --out")
    parser.add_argument("--suites", type=lambda text: text.split(","), default=list(SUITES))
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.out and not args.json:
        args.json = args.out.with_suffix(".json")
    answer = run(args)
    text = page(answer)
    if args.out:  # what a person wrote under "Notes" stays
        before = args.out.read_text(encoding="utf-8") if args.out.exists() else ""
        _, mark, notes = before.partition("\n## Notes\n")
        args.out.write_text(text + mark + notes, encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(answer, indent=1), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
