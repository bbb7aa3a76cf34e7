"""Measure products and convolutions with what stands behind them, by every way, and write the page.

    python docs/results/h200_products.py --out docs/results/h200-products.md --limit 90

Anchors of real models with the ops behind them there. Each runs as ``heuristic`` has it, by every
engine of cuDNN that takes all of it, as a bare anchor (or one with its bias) with a generated
kernel for the rest, and by torch's calls. Launches are replayed in CUDA graphs, in turns.

Several processes build plans at a time and one at a time measures. What a process that dies was
about to run is left out with that reason, and another process goes on. ``--only`` takes the rows
whose name a pattern finds; with ``--limit`` no row starts after so many seconds.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
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
from product_ways import ROWS, Row, Tell, Way, moved_bytes, parts, ways

from cudnngraph.backend.plan import Choice, Plan
from cudnngraph.errors import NotSupported
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.policy import Policy
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select.decision import StepPlan

POLICY = Policy(tune="heuristic", allow_tf32=False, kernels=True, verify="inprocess")
MOST_ENGINES = 4  # of a graph, those first that cuDNN ranks first
MOST_TRIES = 3  # plans of an engine, until one passes its check
ROUNDS = 7
DEVICE = torch.device("cuda", 0)


# -- measuring, in a process of its own ------------------------------------------------------------


class OnGpu:
    """Plans of this GPU, each checked against the reference; ``tell`` is told before those of
    engines are."""

    def __init__(self, gate: Any, skipped: Mapping[str, str], tell: Tell) -> None:
        from cudnngraph.select.kernels import Kernels

        self._gate, self._tell, self._skipped = gate, tell, skipped
        self._kernels = Kernels.on(0)
        self._checks: dict[tuple[str, bool], Any] = {}
        self._firsts: dict[str, Any] = {}
        self._made: dict[tuple[str, Choice], Plan | str] = {}

    def _of(self, spec: GraphSpec, *, more: bool) -> Any:
        from cudnngraph.ir.key import step_digest
        from cudnngraph.select.verification import Checks

        place = step_digest(spec), more
        if place not in self._checks:
            self._checks[place] = Checks(spec, POLICY, 0, gate=self._gate, more=more)
        return self._checks[place]

    def _found(self, spec: GraphSpec) -> Any:
        from cudnngraph.ir.key import step_digest
        from cudnngraph.select.verification import none_passes

        digest = step_digest(spec)
        if digest not in self._firsts:
            self._firsts[digest] = self._of(spec, more=False).first()
        found = self._firsts[digest]
        if found.plan is None:
            raise none_passes(spec, found.outcomes)
        return found

    def first(self, spec: GraphSpec) -> Plan:
        """See :class:`Engines`."""
        plan: Plan = self._found(spec).plan
        return plan

    def each(self, spec: GraphSpec, prefix: str) -> Iterator[tuple[str, Plan | str]]:
        """See :class:`Engines`."""
        checks = self._of(spec, more=True)
        tried: Counter[int] = Counter()
        labels: dict[int, str] = {}
        why: dict[int, str] = {}
        done: set[int] = set()
        for candidate in checks.candidates:
            engine = candidate.choice.engine
            wanted = engine in tried or len(tried) < MOST_ENGINES
            if engine in done or not wanted or tried[engine] >= MOST_TRIES:
                continue
            tried[engine] += 1
            labels[engine] = f"{prefix}eng{engine}"
            mark = "" if candidate.runtime_compiled else "*"
            if labels[engine] in self._skipped:
                why[engine] = self._skipped[labels[engine]]
                done.add(engine)
                continue
            self._tell(labels[engine])
            outcome, plan, _ = checks.attempt(candidate)
            why[engine] = outcome.reason
            if plan is not None:
                done.add(engine)
                del why[engine]
                yield f"eng{engine}{mark}", plan
        for engine, reason in why.items():
            yield f"eng{engine}", reason

    def kernel(self, spec: GraphSpec) -> Plan:
        """See :class:`Engines`."""
        choices = self._kernels.choices(spec)
        if not choices:
            raise NotSupported("a kernel", ["no kernel is generated for the rest"])
        (made,) = self.kernels([(spec, choices[0])])
        if isinstance(made, str):
            raise NotSupported("a kernel", [made])
        return made

    def kernels(self, asked: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        """The kernels of steps, each checked, or why there is none."""
        from cudnngraph.ir.key import step_digest
        from cudnngraph.select import verification

        found: list[Plan | str] = []
        for spec, choice in asked:
            place = step_digest(spec), choice
            if place not in self._made:
                try:
                    plan, why, _ = verification.built(spec, POLICY, choice, 0, self._gate)
                    self._made[place] = plan if why is None else why
                except NotSupported as refusal:
                    self._made[place] = refusal.reasons[0]
            found.append(self._made[place])
        return found

    def heuristic(self, spec: GraphSpec) -> tuple[tuple[StepPlan, ...], tuple[Plan | None, ...]]:
        """See :class:`Engines`."""
        from cudnngraph.select.heuristic import choose

        def build(part: GraphSpec) -> Any:
            found = self._found(part)
            return found.plan, found.outcomes

        made = choose(spec, POLICY, build, kernels=self._kernels, checked=self.kernels)
        return made.steps, made.built


def measured(number: int, skipped: Mapping[str, str], gate: Any, *, names: bool) -> dict[str, Any]:
    """What a row's ways take, in us; with ``names`` the GPU kernels of each."""
    from cudnngraph.device import timing
    from cudnngraph.select.graph_trial import GraphTrial
    from cudnngraph.select.trial import StepTrial

    row = ROWS[number]
    spec = legalize(row.spec(), POLICY)

    def tell(way: str) -> None:
        print(json.dumps({"number": number, "at": way}), flush=True)

    all_of: dict[str, Way] = {}
    for name, way in ways(spec, OnGpu(gate, skipped, tell), skipped, tell):
        all_of[name] = way
    launches: dict[str, Callable[[], None]] = {}
    graph = CutGraph(spec)
    _, bias, rest = parts(graph)
    behind = (*bias, *rest)
    kept: list[Any] = []
    with gate.alone():
        trial = GraphTrial(spec, POLICY, DEVICE)
        for name, way in all_of.items():
            if not way.chain:
                continue
            tell(name.rstrip("*"))
            try:
                launch = trial.launch(way.chain)
                launch()
                torch.cuda.synchronize()
                launches[name] = launch
            except Exception as error:  # a fault of the GPU ends this process in what follows
                way.why = f"does not run: {type(error).__name__}: {str(error)[:200]}"
                torch.cuda.synchronize()
        last = all_of.get("torch | kernel")
        if last is not None and len(last.chain) == 2 and behind:
            kept.append(StepTrial(last.chain[1][0], POLICY, DEVICE))
            launches["kernel alone"] = kept[-1].launch(last.chain[1][1])
        launches["torch alone"] = row.alone(DEVICE)  # type: ignore[assignment]
        stream: Any = torch.cuda.Stream(DEVICE)
        tell("measuring")
        with torch.no_grad():
            times = timing.measure(
                list(launches.values()), stream, rounds=ROUNDS, drop_over=float("inf"), alike=True
            )
    seen = {name: _kernels_of(call) for name, call in launches.items()} if names else {}
    return {
        "times": dict(zip(launches, times, strict=True)),
        "steps": {name: way.steps for name, way in all_of.items() if way.steps},
        "refused": {name: way.why for name, way in all_of.items() if way.why},
        "names": seen,
        "moved": moved_bytes(graph, behind),
    }


def _kernels_of(call: Callable[[], None]) -> list[str]:
    """The GPU kernels of a call, each with its time."""
    try:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        events = [
            event
            for event in seen.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return [
            re.sub(r"[|\s]+", " ", event.name)[:90] + f" {event.device_time:.1f}"
            for event in events
        ]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:100]}"]


def work(
    numbers: Sequence[int], skipped: Mapping[str, str], gate_path: str, until: float, names: bool
) -> None:
    """Measure rows, one JSON line each, and lines of what is at hand in between."""
    from cudnngraph.backend.candidates import offer_every_engine
    from plans_cache.gate import Gate

    offer_every_engine()
    gate = Gate(Path(gate_path), timeout_s=20.0)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for place, number in enumerate(numbers):
        if time.time() > until:
            return
        try:
            found = measured(number, skipped if place == 0 else {}, gate, names=names)
        except Exception as error:
            torch.cuda.synchronize()  # a fault ends this process
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({"number": number, "done": True, **found}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # other processes need it


# -- all rows --------------------------------------------------------------------------------------

Told = dict[int, dict[str, Any]]
MOST_DEATHS = 4  # of processes in one row


def told(
    numbers: Sequence[int],
    until: float,
    run: Callable[[Sequence[int], Mapping[str, str]], tuple[list[dict[str, Any]], str]],
) -> Told:
    """The results of rows by processes; one that dies loses the way that it was at, and another
    begins with that row. ``run`` returns what a process printed, and how it died if it did."""
    found: Told = {}
    left = list(numbers)
    skipped: dict[str, str] = {}
    while left and time.time() < until:
        lines, death = run(left, skipped)
        at = ""
        for line in lines:
            if line.get("done"):
                found[line["number"]] = line
                at = ""
            elif "at" in line:
                at = line["at"]
        before = left[0]
        left = [number for number in left if number not in found]
        if not death or not left:
            break
        skipped = skipped if left[0] == before else {}
        if not at or at in skipped or len(skipped) >= MOST_DEATHS:
            found[left[0]] = {"error": f"{death}, at '{at or 'its start'}'"}
            left, skipped = left[1:], {}
        else:
            skipped = {**skipped, at: death}
    return found


def process(
    numbers: Sequence[int], skipped: Mapping[str, str], until: float, gate: Path, names: bool
) -> tuple[list[dict[str, Any]], str]:
    """Run rows in a process: what it printed, and how it died, "" if it did not."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"CUDNNGRAPH_CACHE_DIR": folder, "TEARDOWN_CUPTI": "0"}
        task = json.dumps([list(numbers), skipped, str(gate)])
        command = [sys.executable, __file__, "--worker", task, "--until", str(until)]
        command += [] if names else ["--no-names"]
        death = ""
        try:
            limit = max(until - time.time(), 0.0) + 60.0
            made = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=limit, check=False
            )
            out = made.stdout
            if made.returncode:
                tail = [line for line in made.stderr.splitlines() if line.strip()][-1:]
                death = f"exit code {made.returncode}: {' '.join(tail)[:160]}"
        except subprocess.TimeoutExpired as late:
            out = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            death = "hangs"
    return list(parsed(out)), death


def parsed(out: str) -> Iterator[dict[str, Any]]:
    """The JSON lines of a process's output; others are not ours."""
    for line in out.splitlines():
        try:
            each = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(each, dict) and "number" in each:
            yield each


HEAD = (
    *("anchor", "behind", "heuristic", "by", "engines, whole", "anchor, kernel"),
    *("torch, kernel", "addmm, kernel", "bias by engines, kernel", "torch alone"),
    *("kernel alone", "GB/s", "best / heuristic", "best"),
)
NO_WAY = ("torch alone", "kernel alone")


def line(row: Row, found: Mapping[str, Any] | None) -> list[str]:
    """One line of the table."""
    head = [row.anchor, row.behind]
    if found is None or "times" not in found:
        said = "not begun" if found is None else str(found.get("error", "?"))
        return [*head, said.replace("|", "/"), *[""] * (len(HEAD) - 3)]
    times: Mapping[str, float] = found["times"]
    refused: Mapping[str, str] = found["refused"]

    def cell(name: str) -> str:
        if name in times:
            return f"{times[name]:.1f}"
        return refused.get(name, "-").replace("|", "/")[:80]

    def listed(prefix: str) -> str:
        mine = {n.removeprefix(prefix): us for n, us in times.items() if n.startswith(prefix)}
        made = [f"{n.removeprefix('eng')}: {us:.1f}" for n, us in mine.items()]
        made += [
            f"{n.removeprefix(prefix).removeprefix('eng')}: {why.replace('|', '/')[:60]}"
            for n, why in refused.items()
            if n.startswith(prefix) and n not in times
        ]
        return ", ".join(made) or "-"

    all_ways = {name: us for name, us in times.items() if name not in NO_WAY}
    best = min(all_ways, key=lambda name: all_ways[name], default="-")
    mine = times.get("heuristic")
    ratio = f"{all_ways[best] / mine:.2f}" if mine and best != "-" else "-"
    alone = times.get("kernel alone")
    rate = f"{found['moved'] / alone / 1e3:.0f}" if alone else "-"
    return [
        *head,
        cell("heuristic"),
        found["steps"].get("heuristic", "-").replace(" | ", "; "),
        listed("eng"),
        cell("anchor | kernel"),
        cell("torch | kernel"),
        cell("addmm | kernel"),
        listed("bias by "),
        cell("torch alone"),
        cell("kernel alone"),
        rate,
        ratio,
        best.replace(" | ", ", "),
    ]


def page(found: Told, numbers: Sequence[int], command: str, gpu: str) -> list[str]:
    """The lines of the page."""
    done = sum("times" in each for each in found.values())
    return [
        "# Products and convolutions with what stands behind them",
        "",
        f"{gpu}; {datetime.date.today()}.",
        "",
        "```",
        command,
        "```",
        "",
        "Microseconds on the GPU, medians of CUDA graph replays in turns, in a warm cache. "
        "`heuristic` is what `compile()` takes, with its steps. Engines are cuDNN's, by number, "
        "each by its first plan that is right; `*` marks those that are not compiled at run time. "
        "They take the anchor with the pointwise ops behind it; a norm behind those is a generated "
        "kernel. `anchor, kernel` is cuDNN's first choice of a bare anchor with one kernel for all "
        "the rest, `torch, kernel` the same with torch's anchor, `addmm, kernel` with torch's "
        "product with a bias, and with ReLU or GELU by tanh if it has that. `kernel alone` is the "
        "kernel behind a bare anchor, and the bytes that it moves over its time. `torch alone` is "
        "F.linear or F.conv2d, with the bias if there is one. "
        f"{done} of {len(numbers)} rows were measured.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
        *(f"| {' | '.join(line(ROWS[number], found.get(number)))} |" for number in numbers),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="rows whose name this pattern finds")
    parser.add_argument(
        "--limit", type=float, default=90.0, help="seconds after which no row starts"
    )
    parser.add_argument("--jobs", type=int, default=10, help="processes")
    parser.add_argument("--no-names", action="store_true", help="leave out the names of kernels")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        work(*args.worker, args.until, not args.no_names)
        return
    start = time.time()
    until = start + args.limit
    numbers = [n for n, row in enumerate(ROWS) if re.search(args.only, row.name)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        gate = Path(folder) / "gate" / "gpu"

        def run(mine: Sequence[int], skipped: Mapping[str, str]) -> Any:
            return process(mine, skipped, until, gate, not args.no_names)

        shares = [numbers[at :: args.jobs] for at in range(args.jobs)]
        running = [pool.submit(told, share, until, run) for share in shares if share]
        found: Told = {}
        for future in running:
            found |= future.result()
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
    gpu += f"{torch.backends.cudnn.version()}, frontend {_frontend()}"
    given = sys.argv[1:] if arguments is None else arguments
    command = f"python docs/results/{Path(__file__).name} {' '.join(given)}".rstrip()
    lines = page(found, numbers, command, gpu)
    print("\n".join(lines))
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    if args.out:
        write(lines, args.out)
        rows = [{"name": ROWS[n].name, **found.get(n, {"error": "not begun"})} for n in numbers]
        made = {"gpu": gpu, "date": str(datetime.date.today()), "command": command, "rows": rows}
        args.out.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


def _frontend() -> str:
    from cudnngraph.backend import env

    return env.frontend_version()


if __name__ == "__main__":
    main()
