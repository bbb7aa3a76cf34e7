"""Models by heuristics as two trees of this project choose, in turns.

    git worktree add /tmp/before COMMIT
    python docs/results/two_trees.py --before /tmp/before --models "BERT-base;CLIP*" --json FILE

Models of the zoo and of ``outsiders.py`` by patterns. Each way has a process of its own and an
empty cache; calls are CUDA graph replays. Of ``--batch`` models both processes build side by side
and then wait, and one after the other is timed, three times in turn. ``--seeds`` lets both take
the choices that ship.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TURNS, ROUNDS, WARM = 3, 15, 20
HERE = Path(__file__).resolve().parents[2]
Found = dict[str, Any]


def one(name: str) -> None:
    """Build a model, then time it as often as a line comes in."""
    import torch
    from h200_search import SERVED, us
    from outsiders import entry_of

    from cudnngraph import Policy, fuse
    from cudnngraph.bench.zoo import one as made

    entry = entry_of(name)
    model, inputs, _ = made._made(entry, False, torch.device("cuda", 0))
    start = time.perf_counter()
    with torch.no_grad():
        fused: Any = fuse(model, tuple(inputs), policy=Policy(), **SERVED)
        fused(*inputs)
        torch.cuda.synchronize()
        print(json.dumps({"first_s": time.perf_counter() - start}), flush=True)
        for _ in sys.stdin:
            for _ in range(WARM):
                fused(*inputs)
            taken = [us(lambda: fused(*inputs)) for _ in range(ROUNDS)]
            print(json.dumps({"us": statistics.median(taken)}), flush=True)


class Way:
    """A model as one tree has it, in a process that waits."""

    def __init__(self, name: str, tree: Path, seeds: bool, folder: str) -> None:
        place = os.environ | {
            "CUDNNGRAPH_CACHE_DIR": tempfile.mkdtemp(dir=folder),
            "CUDNNGRAPH_SEEDS": str(int(seeds)),
        }
        # The two trees share this script, and what the tree lacks of its neighbours.
        parts = [str(tree), str(tree / "docs/results"), str(HERE / "docs/results")]
        place["PYTHONPATH"] = os.pathsep.join([*parts, os.environ.get("PYTHONPATH", "")])
        self.us: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--one", name],
            env=place,
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _line(self) -> Found | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: Found | None = json.loads(line) if line.startswith("{") else None
        return found

    def built(self) -> bool:
        """Wait until it is built; whether it is."""
        return self._line() is not None

    def time(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._line()
        self.us += [] if found is None else [found["us"]]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="the other tree")
    parser.add_argument("--models", default="*", help="patterns, by ';'")
    parser.add_argument("--batch", type=int, default=3, help="models that build side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no more after that")
    parser.add_argument("--seeds", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    from outsiders import names_of

    end, names = time.monotonic() + args.seconds, names_of(args.models)
    rows: list[Found] = []
    print("| model | before, us | after, us | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for at in range(0, len(names), args.batch):
            if time.monotonic() > end:
                break
            batch = names[at : at + args.batch]
            trees = (args.before.resolve(), HERE)
            begun = [[Way(name, tree, args.seeds, folder) for tree in trees] for name in batch]
            there = [all([way.built() for way in ways]) for ways in begun]
            for _ in range(TURNS):
                for ways, built in zip(begun, there, strict=True):
                    for way in ways if built else ():
                        way.time()
            for name, ways in zip(batch, begun, strict=True):
                for way in ways:
                    way.end()
                if not all(len(way.us) == TURNS for way in ways):
                    print(f"| {name} | failed |  |  |", flush=True)
                    continue
                before, after = (way.us for way in ways)
                ratio = statistics.median(after) / statistics.median(before)
                rows.append({"model": name, "before": before, "after": after, "ratio": ratio})
                print(
                    f"| {name} | {min(before):.1f} | {min(after):.1f} | {ratio:.3f} |", flush=True
                )
    if rows:
        mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
        print(f"\nGeometric mean of {len(rows)}: {mean:.3f}")
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
