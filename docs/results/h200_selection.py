"""Measure plan selection on a GPU and write the results page.

    python docs/results/h200_selection.py --out docs/results/h200-selection.md

Three new processes: the first has an empty JIT cache of the driver and tunes every case; the second
has that JIT cache and an empty plan cache, tunes every case again and measures; the third has that
plan cache too. ``--only TEXT`` takes the cases whose name has the text, ``--exhaustive`` also tries
every plan that cuDNN lists.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import cudnngraph as cg
from cudnngraph.bench.cases import Case, selection_suite
from cudnngraph.device import timing
from cudnngraph.settings import override

REPO = Path(__file__).resolve().parents[2]
REPEATED = (
    "conv 32 512 7",
    "conv 32 64 56 256",
    "conv_transpose 8 256 64 128 4",
    "two conv",
    "silu",
)
ROUNDS = 21


def compiled(case: Case, **options: object) -> tuple[cg.Executable, float]:
    """The executable and the seconds that it took."""
    start = time.perf_counter()
    exe = case.graph.compile("cuda", **options)
    return exe, time.perf_counter() - start


def shape(exe: cg.Executable) -> str:
    """The steps in short."""
    steps = []
    for step in exe.steps:
        ops = " ".join(node.op for node in step.spec.nodes if node.op != "constant")
        how = "view" if step.time_us == 0.0 else "torch"
        steps.append(f"{ops} ({how})" if step.choice is None else ops)
    return " \\| ".join(steps)


def measured(case: Case, exhaustive: bool) -> dict[str, object]:
    """One row: times in µs by contender, and what was chosen."""
    tf32 = {"allow_tf32": True} if "float32" in case.name else {}
    heuristic, _ = compiled(case, **tf32)
    tuned, search_s = compiled(case, tune="autotune", **tf32)
    tensors = case.tensors(torch.device("cuda"))
    want = case.eager(tensors)
    contenders = {"eager": lambda: case.eager(tensors)}
    for name, run in case.others.items():
        try:
            run(tensors)
            contenders[name] = lambda run=run: run(tensors)
        except RuntimeError:
            pass
    contenders |= {"heuristic": heuristic.bind(**tensors), "autotuned": tuned.bind(**tensors)}
    if exhaustive:
        cg.cache_clear()
        with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder), seeds=False):
            every, _ = compiled(case, tune="autotune", max_candidates=200, budget_s=100.0, **tf32)
        contenders["every plan"] = every.bind(**tensors)
    errors = {}
    (out,) = (tensors[name] for name in tuned.spec.outputs)
    for name in ("heuristic", "autotuned"):
        out.fill_(math.nan)
        contenders[name]()
        errors[name] = float((out - want).double().norm() / want.double().norm())
    stream = torch.cuda.Stream()
    times = timing.measure(list(contenders.values()), stream, rounds=ROUNDS, drop_over=math.inf)
    return {
        "name": case.name,
        "suite": case.suite,
        "times_us": dict(zip(contenders, times, strict=True)),
        "steps_us": sum(step.time_us or math.nan for step in tuned.steps),
        "search_s": search_s,
        "tier": tuned.tier,
        "steps": shape(tuned),
        "heuristic_steps": shape(heuristic),
        "workspace_bytes": tuned.workspace_bytes,
        "difference_from_eager": errors,
        "explain": tuned.explain(),
    }


def repeated(case: Case) -> dict[str, object]:
    """Selection five times from nothing, the winners side by side."""
    tensors = case.tensors(torch.device("cuda"))
    calls, searches = [], []
    for _ in range(5):
        cg.cache_clear()
        with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder), seeds=False):
            exe, seconds = compiled(case, tune="autotune")
        calls.append(exe.bind(**tensors))
        searches.append(seconds)
    times = timing.measure(calls, torch.cuda.Stream(), rounds=ROUNDS, drop_over=math.inf)
    return {"name": case.name, "times_us": times, "search_s": searches}


def child(mode: str, only: str, exhaustive: bool) -> None:
    """Do one process's part and print it as JSON."""
    from cudnngraph.backend import env, handles

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.zeros(1, device="cuda")
    handles.handle(0)
    rows, again = [], []
    for case in selection_suite():
        if only not in case.name:
            continue
        try:
            if mode == "measure":
                rows.append(measured(case, exhaustive))
                if case.name.startswith(REPEATED) or case.name.endswith(REPEATED):
                    again.append(repeated(case))
                print(row_text(rows[-1]), file=sys.stderr)
            else:
                exe, seconds = compiled(case, tune="autotune")
                rows.append({"name": case.name, "search_s": seconds, "tier": exe.tier})
        except Exception as error:  # the other rows are worth having
            rows.append({"name": case.name, "error": f"{type(error).__name__}: {error}"[:600]})
            print(rows[-1], file=sys.stderr)
        torch.cuda.empty_cache()
    answer = {
        "rows": rows,
        "repeated": again,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": env.cudnn_version(),
        "frontend": env.frontend_version(),
    }
    print(json.dumps(answer))


def run(mode: str, args: argparse.Namespace, cache: Path, jit: Path) -> dict[str, object]:
    """One new process."""
    command = [sys.executable, __file__, "--child", mode, "--only", args.only]
    done = subprocess.run(
        [*command, *(["--exhaustive"] if args.exhaustive else [])],
        cwd=REPO,
        env={**os.environ, "CUDNNGRAPH_CACHE_DIR": str(cache), "CUDA_CACHE_PATH": str(jit)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{mode}: exit code {done.returncode}")
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def best_other(row: dict) -> float:
    """The least of what is not ours, and of the first plan."""
    return min(us for name, us in row["times_us"].items() if name != "autotuned")


def row_text(row: dict) -> str:
    """A row of the table."""
    times = row["times_us"]
    eager, tuned, first = times["eager"], times["autotuned"], times["heuristic"]
    ours = ("eager", "heuristic", "autotuned", "every plan")
    rest = ", ".join(f"{name} {us:.1f}" for name, us in times.items() if name not in ours)
    every = f" {times['every plan']:.1f} |" if "every plan" in times else ""
    return (
        f"| {row['name']} | {eager:.1f} | {rest} | {first:.1f} | {tuned:.1f} |{every} "
        f"{first / eager:.2f} | {tuned / eager:.2f} | {tuned / best_other(row):.2f} "
        f"| {row['steps']} |"
    )


def page(cold: dict, warm: dict, second: dict, command: str) -> str:
    """The results page."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    rows = [row for row in warm["rows"] if "error" not in row]
    every = " every plan |" if rows and "every plan" in rows[0]["times_us"] else ""
    lines = [
        "# Plan selection",
        "",
        f"{warm['gpu']}, torch {warm['torch']}, cuDNN {warm['cudnn']}, frontend "
        f"{warm['frontend']}; {today}.",
        "",
        "```",
        command,
        "```",
        "",
        "GPU time in µs: medians of CUDA graph replays, all contenders of a row interleaved in one "
        "process, warm L2. Eager is torch with `cudnn.benchmark`, TF32 allowed. `heuristic` is "
        '`compile()`, `autotuned` is `compile(tune="autotune")` with default budgets.',
        "",
        f"| case | eager | other ways of torch | heuristic | autotuned |{every} heuristic / eager "
        "| autotuned / eager | autotuned / best of the row | steps of the tuned plan |",
        "|---|---|---|---|---|" + ("---|" if every else "") + "---|---|---|---|",
        *map(row_text, rows),
        "",
    ]
    ratios = {
        name: [row["times_us"][name] / row["times_us"]["eager"] for row in rows]
        for name in ("heuristic", "autotuned")
    }
    for name, values in ratios.items():
        geomean = math.exp(statistics.fmean(map(math.log, values)))
        lines.append(
            f"- {name}: {1 / geomean:.2f} times faster than eager (geometric mean of "
            f"{len(values)}); worst case {max(values):.2f} times eager's time."
        )
    searches = {
        name: {row["name"]: row["search_s"] for row in each["rows"] if "search_s" in row}
        for name, each in (("cold", cold), ("warm", warm), ("second", second))
    }
    convs = [row["name"] for row in rows if row["suite"] == "conv" and row["name"][:4] == "conv"]
    lines += [
        "",
        "## Time of the search",
        "",
        "| | JIT cache of the driver empty | JIT cache filled | second process |",
        "|---|---|---|---|",
        f"| a convolution, median s | {_middle(searches['cold'], convs):.2f} "
        f"| {_middle(searches['warm'], convs):.2f} | {_middle(searches['second'], convs):.3f} |",
        f"| a convolution, worst s | {_worst(searches['cold'], convs)} "
        f"| {_worst(searches['warm'], convs)} | {_worst(searches['second'], convs)} |",
        f"| all {len(rows)} cases, s | {sum(searches['cold'].values()):.1f} "
        f"| {sum(searches['warm'].values()):.1f} | {sum(searches['second'].values()):.2f} |",
        "",
        "In the second process every plan came from the disk: "
        + ", ".join(sorted({str(row.get("tier")) for row in second["rows"]}))
        + ".",
        "",
        "## Selection five times",
        "",
        "| case | times of the five winners, µs | slowest / fastest | search, s |",
        "|---|---|---|---|",
    ]
    for row in warm["repeated"]:
        times = row["times_us"]
        lines.append(
            f"| {row['name']} | {', '.join(f'{us:.1f}' for us in times)} "
            f"| {max(times) / min(times):.3f} | {', '.join(f'{s:.1f}' for s in row['search_s'])} |"
        )
    failed = [row for each in (cold, warm, second) for row in each["rows"] if "error" in row]
    if failed:
        lines += ["", "## Failed", "", *(f"- {row['name']}: {row['error']}" for row in failed)]
    return "\n".join([*lines, ""])


def _middle(seconds: dict[str, float], names: list[str]) -> float:
    return statistics.median([seconds[name] for name in names if name in seconds] or [math.nan])


def _worst(seconds: dict[str, float], names: list[str]) -> str:
    name = max((name for name in names if name in seconds), key=seconds.__getitem__, default="")
    return f"{seconds[name]:.2f} ({name})" if name else "-"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--child", choices=("tune", "measure", "load"))
    args = parser.parse_args()
    if args.child:
        child(args.child, args.only, args.exhaustive)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        cold = run("tune", args, place / "first", place / "jit")
        warm = run("measure", args, place / "second", place / "jit")
        second = run("load", args, place / "second", place / "jit")
    text = page(
        cold,
        warm,
        second,
        "python docs/results/h200_selection.py --out docs/results/h200-selection.md",
    )
    if args.out:  # what a person wrote under "Notes" stays
        _, mark, notes = (args.out.read_text() if args.out.exists() else "").partition(
            "\n## Notes\n"
        )
        args.out.write_text(text + mark + notes)
    if args.json:
        args.json.write_text(json.dumps({"cold": cold, "warm": warm, "second": second}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
