"""Fit what tiles take to measured times, and say how well choices by it would have done.

    python docs/results/tile_model.py docs/results/h200-tiles.json --write

``--write`` puts the model into ``cudnngraph/backend/tiles.json``. Without a GPU. Each tile's times
are a sum of the terms of :func:`cudnngraph.backend.tiles.terms`, none of them negative, by least
squares of relative errors; its cluster is the one of few that fits best. The table holds out a
sixth of the sizes, and of the models, in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from cudnngraph.backend import tiles
from cudnngraph.backend.plan import Choice
from cudnngraph.backend.tiles import Model, Tile, Work
from cudnngraph.select.worker import to_choice

Row = dict[str, Any]
Times = dict[Choice, float]

LEAST_SIZES = 8  # of a tile that is fitted
LARGEST_ERROR = 0.13  # of a tile that is taken in place of another
GAIN = 0.95
WEIGHT_GRADIENTS = 65  # by h200-plain-tiles.json: h200-tiles.md
FEW, OF_FEW = 16, (49, (("NOT_SET", 3), ("STAGES", 5), ("TILE_SIZE", 7)))  # by h200-stems.md
PARTS = 6
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
#: The shapes of tiles by the names of their kernels (9.19); engine 4 is of compute capability 9.0,
#: engine 7 of 8.0. Of every shape with a depth of 64 there is one with 32, 20 places behind it.
SHAPES_64 = {
    **dict.fromkeys(range(4), (128, 128)),
    **dict.fromkeys(range(4, 8), (256, 64)),
    8: (128, 64),
    9: (64, 128),
    **dict.fromkeys(range(10, 14), (64, 256)),
    **dict.fromkeys(range(14, 16), (256, 32)),
    16: (128, 32),
    19: (128, 16),
}
MORE_64 = {
    **dict.fromkeys(range(40, 46), (128, 128)),
    **dict.fromkeys((48, 49, 52, 53), (128, 64)),
    54: (256, 64),
    55: (64, 64),
}
SHAPES = {(4, number): (*shape, 64) for number, shape in (SHAPES_64 | MORE_64).items()}
SHAPES |= {(4, number + 20): (*shape, 32) for number, shape in SHAPES_64.items()}
SHAPES |= {(7, 21): (128, 128, 32), (7, 22): (128, 64, 32), (7, 23): (64, 128, 32)}
SHAPES |= {(7, 24): (64, 64, 32), (7, 25): (128, 32, 32)}


def shape_of(choice: Choice) -> tuple[int, int, int] | None:
    """The shape of a plan's tile if its configuration is all that it has."""
    if [name for name, _ in choice.knobs] != ["KERNEL_CFG"]:
        return None
    return SHAPES.get((choice.engine, choice.knobs[0][1]))


def read(paths: Iterable[Path]) -> tuple[list[tuple[str, Work, Choice, Times]], dict[str, Any]]:
    """(where from, work, cuDNN's first, times) of all rows, and what was measured on."""
    found, head = [], {}
    for path in paths:
        data = json.loads(path.read_text())
        head = {name: data[name] for name in ("gpu", "cudnn", "sms", "capability")}
        for row in data["rows"]:
            if "times" in row and "work" in row:
                times = {to_choice(each[:2]): each[2] for each in row["times"]}
                found.append((row["of"], Work(**row["work"]), to_choice(row["first"]), times))
    return found, head


def least_squares(given: torch.Tensor) -> torch.Tensor:
    """The x without negative numbers of least |given x - 1|, by Lawson and Hanson's active sets."""
    scale = given.amax(0).clamp_min(1e-12)
    given = given / scale
    x = torch.zeros(given.shape[1], dtype=given.dtype)
    kept: list[int] = []
    for _ in range(3 * len(x)):
        gain = given.T @ (1 - given @ x)
        gain[kept] = -math.inf
        if float(gain.max()) < 1e-9:
            break
        kept.append(int(gain.argmax()))
        while kept:
            wanted = torch.linalg.lstsq(given[:, kept], given.new_ones(len(given), 1)).solution
            wanted = wanted[:, 0]
            if float(wanted.min()) > 0:
                x = torch.zeros_like(x)
                x[kept] = wanted
                break
            now = x[kept]
            down = wanted <= 0
            x[kept] = now + float((now / (now - wanted))[down].min()) * (wanted - now)
            kept = [place for place in kept if float(x[place]) > 1e-12]
    return x / scale


def fitted(
    timed: Sequence[tuple[Work, float]], shape: tuple[int, int, int], cluster: Any, sms: int
) -> Tile:
    rows = [[term / us for term in tiles.terms(work, shape, cluster, sms)] for work, us in timed]
    given = torch.tensor(rows, dtype=torch.float64)
    us = least_squares(given)
    error = float((given @ us - 1).square().mean().sqrt())
    return Tile(shape, cluster, tuple(float(f"{each:.4g}") for each in us), round(error, 4))


def model_of(rows: Sequence[tuple[str, Work, Choice, Times]], head: dict[str, Any]) -> Model:
    timed: dict[Choice, list[tuple[Work, float]]] = defaultdict(list)
    for _, work, _, times in rows:
        for choice, us in times.items():
            timed[choice].append((work, us))
    found = {}
    for choice, each in timed.items():
        shape = shape_of(choice)
        if shape is not None and len(each) >= LEAST_SIZES:
            tried = [fitted(each, shape, cluster, head["sms"]) for cluster in CLUSTERS]
            found[choice] = min(tried, key=lambda tile: tile.error)
    found = dict(sorted(found.items(), key=lambda each: (each[0].engine, each[0].knobs)))
    return Model(head["cudnn"], head["capability"], found, LARGEST_ERROR, GAIN)


def shares(
    rows: Sequence[tuple[str, Work, Choice, Times]], model: Model, sms: int
) -> list[tuple[float, float]]:
    """Of cuDNN's first choice: what the model's takes, and what the fastest does."""
    found = []
    for _, work, first, times in rows:
        if first in times and first.engine in (4, 7):
            choices = [first, *(each for each in times if each != first)]
            better = model.best(choices, [model.us(work, each, sms) for each in choices])
            taken = choices[better[0]] if better else first
            found.append((times[taken] / times[first], min(times.values()) / times[first]))
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("times", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows, head = read(args.times)
    drawn = [row for row in rows if row[0] == "drawn"]
    models = sorted({row[0] for row in rows} - {"drawn"})
    found: dict[str, list[tuple[float, float]]] = {"drawn": [], "models": []}
    for part in range(PARTS):
        out = set(models[part::PARTS])
        left = [row for place, row in enumerate(drawn) if place % PARTS != part]
        left += [row for row in rows if row[0] != "drawn" and row[0] not in out]
        model = model_of(left, head)
        found["drawn"] += shares(drawn[part::PARTS], model, head["sms"])
        apart = [row for row in rows if row[0] in out]
        found["models"] += shares(apart, model, head["sms"])
    print("| sizes | steps | by the model | by the fastest | 3 % faster | 3 % slower | at worst |")
    print("|" + "---|" * 7)
    for name, each in found.items():
        taken, best = ([pair[place] for pair in each] for place in (0, 1))
        means = [math.exp(statistics.fmean(map(math.log, one))) for one in (taken, best)]
        counts = sum(one < 0.97 for one in taken), sum(one > 1.03 for one in taken)
        print(
            f"| {name} | {len(each)} | {means[0]:.3f} | {means[1]:.3f} | {counts[0]} | "
            f"{counts[1]} | {max(taken):.2f} |"
        )
    model = model_of(rows, head)
    print("\n| plan | tile | cluster | error |\n" + "|---" * 4 + "|")
    for choice, tile in model.tiles.items():
        shape, cluster = ("x".join(map(str, each)) for each in (tile.shape, tile.cluster))
        print(f"| {choice} | {shape} | {cluster} | {tile.error:.3f} |")
    if args.write:
        listed = [
            [choice.engine, choice.knobs, tile.shape, tile.cluster, tile.us, tile.error]
            for choice, tile in model.tiles.items()
        ]
        lines = ",\n".join("  " + json.dumps(each) for each in listed)
        told = {"gpu": head["gpu"], "cudnn": head["cudnn"], "capability": head["capability"]}
        told |= {"largest_error": LARGEST_ERROR, "gain": GAIN}
        told |= {"weight_gradients": WEIGHT_GRADIENTS, "few": FEW, "of_few": OF_FEW}
        text = json.dumps(told)[:-1] + f', "tiles": [\n{lines}\n]}}\n'
        (Path(tiles.__file__).parent / "tiles.json").write_text(text)


if __name__ == "__main__":
    main()
