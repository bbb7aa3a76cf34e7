"""Tune models, and keep what their searches measured of single steps.

    python docs/results/search_steps.py --models "EfficientNet-B0;CLIP*" --jobs 4 --json FOLDER

Models of the zoo and of ``outsiders.py`` by patterns, one process each. ``FOLDER`` gets for each
model ``tiles`` rows, plans of one step beside each other, as ``h200_tiles.py`` writes them (for
``tile_model.py``), and ``epilogues`` rows: a step as the one plan that heuristics took, and apart.
Both searches and heuristics go without the choices that ship.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h200_search
from outsiders import names_of

from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.backend.tiles import work_of
from cudnngraph.ir import wire
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec, Node
from cudnngraph.ops.table import OPS
from cudnngraph.select import heuristic, regions
from cudnngraph.select.worker import from_choice

Row = dict[str, Any]
Steps = list[tuple[GraphSpec, Choice | None, float]]  # of one way: the steps, and their times


@dataclass
class Way:
    """A way to run a step: its place in the order of trials, and whether its time is final."""

    rank: int
    choice: Choice | None
    us: float
    final: bool


@dataclass
class Noted:
    """What was seen of a model: choices by heuristics, and of its search the ways to run each step
    and the ways to cut each region, with how often the model has it."""

    heuristic: dict[str, Choice | None] = field(default_factory=dict)
    steps: list[tuple[GraphSpec, list[Way]]] = field(default_factory=list)
    regions: list[tuple[GraphSpec, int, list[Steps]]] = field(default_factory=list)


def noting() -> Noted:
    """Have heuristics and searches of this process noted."""
    noted = Noted()
    chosen, settled = heuristic.Cut.selection, regions.RegionSearch._settled
    tuned = regions.RegionSearch.tuned

    def selection(self: Any) -> Any:
        found = chosen(self)
        noted.heuristic |= {step_digest(step.spec): step.choice for step in found.steps}
        return found

    def settle(self: Any, begun: Any, *, compare: bool) -> Any:
        region = settled(self, begun, compare=compare)
        cut = [
            [(part.spec, way.choice, way.time_us) for part, way in rival.runs.steps]
            for rival in region.rivals
            if not any(part.by for part, _ in rival.runs.steps)
        ]
        noted.regions.append((begun.spec, begun.count, cut))
        return region

    def tune(self: Any, progress: Any) -> Any:
        found = tuned(self, progress)
        for step in self._steps.values():
            ways = [Way(way.rank, way.choice, way.time_us, way.final) for way in step.ways]
            noted.steps.append((step.spec, ways))
        return found

    heuristic.Cut.selection = selection  # type: ignore[method-assign]
    regions.RegionSearch._settled = settle  # type: ignore[method-assign]
    regions.RegionSearch.tuned = tune  # type: ignore[method-assign]
    return noted


def _plans(ways: Sequence[Way]) -> list[Way]:
    """The plans of cuDNN's, in the order of its ranking."""
    own = [way for way in ways if way.choice is not None and way.choice.engine != KERNEL]
    return sorted(own, key=lambda way: way.rank)


def tile_rows(name: str, noted: Noted) -> Iterator[Row]:
    """Plans that were timed alike, of steps whose work a model of tiles knows."""
    for spec, ways in noted.steps:
        work, plans = work_of(spec), _plans(ways)
        for final in (False, True):
            alike = [way for way in plans if way.final is final]
            times = [[*from_choice(way.choice), round(way.us, 3)] for way in alike if way.choice]
            if work is not None and len(times) > 1 and {4, 7} & {time[0] for time in times}:
                first = plans[0].choice
                assert first is not None
                yield {
                    "of": name,
                    "work": asdict(work),
                    "first": from_choice(first),
                    "times": times,
                }


def epilogue_rows(name: str, noted: Noted) -> Iterator[Row]:
    """Convolutions of one group, and products with a sigmoid, that were timed whole and apart."""
    ways_of = {step_digest(spec): _plans(ways) for spec, ways in noted.steps}
    for spec, count, cut in noted.regions:
        nodes = _computing(spec)
        anchors = [node for node in nodes if node.op in ("conv", "matmul")]
        plans = ways_of.get(step_digest(spec))
        if len(anchors) != 1 or len(nodes) < 2 or not plans:
            continue
        (anchor,) = anchors
        sigmoid = any(node.op == "sigmoid" for node in nodes)
        if anchor.op == "matmul" and not sigmoid:
            continue
        if anchor.op == "conv" and anchor.attr("groups") > 1:
            continue
        apart = [
            sum(us for *_, us in steps)
            for steps in cut
            if len(steps) == 2 and len(_computing(steps[0][0])) == 1
        ]
        if not apart:
            continue
        taken = noted.heuristic.get(step_digest(spec))
        whole = next((way.us for way in plans if way.choice == taken), plans[0].us)
        times = {"whole": round(whole, 2), "apart": round(min(apart), 2)}
        yield {"of": name, "count": count, **times, "spec": wire.from_spec(canonical(spec))}


def _computing(spec: GraphSpec) -> list[Node]:
    return [node for node in spec.nodes if node.op != "constant" and not OPS[node.op].view]


def measure(name: str, folder: Path) -> Row:
    """Tune a model, and write what was noted into ``folder``."""
    noted = noting()
    found = h200_search.measure(name, Path(os.environ["CUDNNGRAPH_CACHE_DIR"]))
    data = {"tiles": list(tile_rows(name, noted)), "epilogues": list(epilogue_rows(name, noted))}
    file = "".join(letter if letter.isalnum() else "_" for letter in name)
    (folder / f"{file}.json").write_text(json.dumps({"model": name, **data}))
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="*", help="patterns, by ';'")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds a model")
    parser.add_argument("--cache", type=Path, help="the directory of the tuned plans")
    parser.add_argument("--json", type=Path, required=True, help="the folder of what was noted")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.json)))
        return
    args.json.mkdir(parents=True, exist_ok=True)
    cache = args.cache or Path(tempfile.mkdtemp())
    chosen = names_of(args.models)
    place = os.environ | {"CUDNNGRAPH_CACHE_DIR": str(cache), "CUDNNGRAPH_SEEDS": "0"}

    def found_of(name: str) -> str:
        words = [sys.executable, __file__, "--one", name, "--json", str(args.json)]
        try:
            made = subprocess.run(
                words, env=place, capture_output=True, text=True, timeout=args.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return f"| {name} | over {args.limit:.0f} s |  |  |  |  |"
        if made.returncode:
            return f"| {name} | {made.stderr.splitlines()[-1][:300]} |  |  |  |  |"
        found = json.loads(made.stdout.splitlines()[-1])
        first, last = found["heuristic us"], found["autotune us"]
        seconds = f"{found['heuristic s']:.1f} | {found['autotune s']:.1f}"
        return f"| {name} | {seconds} | {first:.1f} | {last:.1f} | {last / first:.3f} |"

    print("| model | heuristic, s | tuned, s | heuristic, us | tuned, us | of the time |")
    print("|" + "---|" * 6)
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(found_of, dict.fromkeys(chosen)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
