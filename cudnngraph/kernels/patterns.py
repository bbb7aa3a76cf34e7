"""The patterns of generated kernels: by which one a region runs, and by which schedule.

A pattern is a schedule type with a module that writes kernels by it. A choice names a schedule: its
knobs are the schedule's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from ..backend.plan import KERNEL, Choice
from ..errors import NotSupported
from ..ir.spec import GraphSpec
from . import (
    banded,
    depthwise,
    depthwise_gradient,
    pieces,
    pool_gradient,
    row_lists,
    row_sums,
    running,
    split,
    tap_products,
    tap_sums,
    tiles,
)
from .banded import Banded
from .depthwise import Strips
from .pieces import Pieces
from .pool_gradient import Patches
from .row_kernels import write
from .row_lists import Lists
from .row_sums import Bins
from .rows import (
    MOST_KEPT,
    MOST_THREADS,
    SMALL_BLOCK,
    WARP,
    Rows,
    Schedule,
    reads_plainly,
    rows_of,
    schedule_for,
    why_slow,
)
from .running import Scan
from .scalars import NARROW, ROUNDED
from .source import Source
from .split import Split
from .tap_products import TapProducts
from .tap_sums import TapSums
from .tape import Cut, Refused
from .tiling import Tiling, tiles_of, tilings, why_tiles_first

Pattern = (
    Schedule
    | Split
    | Tiling
    | Strips
    | Banded
    | TapSums
    | TapProducts
    | Pieces
    | Patches
    | Bins
    | Lists
    | Scan
)

#: The knobs of a choice by the pattern that they are the schedule of.
_KNOBS: Mapping[type[Pattern], tuple[str, ...]] = {
    Schedule: ("lanes", "team", "rows", "chunks"),
    Split: ("threads", "blocks", "columns"),
    Tiling: ("lanes", "along", "across", "threads"),
    Pieces: ("lanes", "threads", "blocks"),
    Strips: ("lanes", "wide", "high", "vectors", "blocks"),
    Banded: ("images", "wide", "high", "rows", "vectors", "warps"),
    Bins: ("table_rows", "columns", "threads"),
    Lists: ("listed_rows", "columns", "numbers", "threads"),
    Patches: ("lanes", "patch_wide", "patch_high", "threads"),
    Scan: ("lanes", "threads", "ahead"),
    TapProducts: ("high", "stage"),
    TapSums: ("lanes", "taps", "wide", "high", "vectors", "threads", "resident", "blocks"),
}

MOST_NAME = 64  # characters of a function's
_MAY_BE_0 = ("chunks", "vectors")


def choice_of(schedule: Pattern) -> Choice:
    """The name of a kernel for a given region."""
    names = _KNOBS[type(schedule)]
    return Choice(KERNEL, tuple((name, getattr(schedule, name)) for name in names))


def schedule_of(choice: Choice) -> Pattern:
    """The schedule that a choice names. Raises :class:`NotSupported`."""
    names, values = tuple(name for name, _ in choice.knobs), dict(choice.knobs)
    for kind, known in _KNOBS.items():
        least = min((v for name, v in values.items() if name not in _MAY_BE_0), default=0)
        if names == known and least > 0 <= min(values.values()):
            return kind(**values)
    raise NotSupported("a generated kernel", [f"{choice} is no schedule"])


def by_rule(spec: GraphSpec, processors: int) -> Choice:
    """The choice for a region by rule, on a GPU with so many processors. Raises :class:`Refused`.

    It is known to be written.
    """
    if row_sums.has_sum(spec):
        summed = row_lists.schedules(spec, processors)[0]
        _written(spec, summed)
        return choice_of(summed)
    if tap_sums.has_gradient(spec):
        sums = _taps(spec, processors)[0]
        _written(spec, sums)
        return choice_of(sums)
    if depthwise.has_depthwise(spec):
        refused = Refused("no depthwise convolution")
        for tried in _depthwise(spec, processors):
            try:
                _written(spec, tried)
            except Refused as reason:
                refused = reason
            else:
                return choice_of(tried)
        raise refused
    if pool_gradient.has_gradient(spec):
        with suppress(Refused):
            patches = pool_gradient.patches(spec, processors)[0]
            pool_gradient.write(spec, patches)
            return choice_of(patches)
    if running.has_running(spec):
        scan = running.schedules(spec, processors)[0]
        running.write(spec, scan)
        return choice_of(scan)
    if len(pieces.pieces_of(spec)) > 1:
        with suppress(Refused):
            several = pieces.schedules(processors)[0]
            pieces.write(spec, several)
            return choice_of(several)
    try:
        rows = rows_of(spec)
        why = why_tiles_first(spec, rows)
        if why is not None:
            raise Cut(why)
        tiling = tiles.by_rule(spec, rows, processors)
        if tiling is not None:
            return choice_of(tiling)
        schedule = schedule_for(rows, processors)
        if why_slow(rows, schedule, processors) is None:
            write(spec, schedule, rows)
            return choice_of(schedule)
    except Cut:
        raise
    except Refused:
        if not split.reduces(spec):
            raise
    shared = split.split_for(processors)
    split.write(spec, shared)
    return choice_of(shared)


def choices(spec: GraphSpec, processors: int) -> list[Choice]:
    """The choices that are worth measuring, the one by rule first. Raises :class:`Refused`."""
    found: dict[Choice, None] = {by_rule(spec, processors): None}
    if row_sums.has_sum(spec):
        return list(found | dict.fromkeys(map(choice_of, row_lists.schedules(spec, processors))))
    if tap_sums.has_gradient(spec):
        return list(found | dict.fromkeys(map(choice_of, _taps(spec, processors))))
    if depthwise.has_depthwise(spec):
        return list(found | dict.fromkeys(map(choice_of, _depthwise(spec, processors))))
    if running.has_running(spec):
        return list(found | dict.fromkeys(map(choice_of, running.schedules(spec, processors))))
    if isinstance(schedule_of(next(iter(found))), Patches):
        found |= dict.fromkeys(map(choice_of, pool_gradient.patches(spec, processors)))
    if isinstance(schedule_of(next(iter(found))), Pieces):
        found |= dict.fromkeys(map(choice_of, pieces.schedules(processors)))
    with suppress(Refused):
        rows = rows_of(spec)
        with suppress(Refused):
            turned = tilings(tiles_of(spec, rows), processors)
            found |= dict.fromkeys(map(choice_of, turned))
        schedule = schedule_for(rows, processors)
        if why_slow(rows, schedule, processors) is None:
            found |= dict.fromkeys(map(choice_of, _schedules(rows, schedule)))
    if split.reduces(spec):
        shared = split.split_for(processors)
        found |= dict.fromkeys(map(choice_of, (shared, *split.variants(shared))))
    return list(found)


def _taps(spec: GraphSpec, processors: int) -> list[Pattern]:
    """The schedules of a gradient of depthwise taps, those first that are likely the faster."""
    sums: list[Pattern] = [*tap_sums.schedules(spec, processors)]
    with suppress(Refused):
        products = tap_products.schedules(spec, processors)
        place = 0 if tap_products.comes_first(spec, products[0], processors) else 1
        sums[place:place] = products
    return sums


def _depthwise(spec: GraphSpec, processors: int) -> list[Pattern]:
    """The schedules of a depthwise convolution, those first that are likely the faster."""
    strips = depthwise.strips(spec, processors)
    try:
        bands = banded.schedules(spec, processors)
    except Refused:
        return [*strips]
    if bands and banded.clocks(spec, bands[0], processors) < depthwise.clocks(
        spec, strips[0], processors
    ):
        return [*bands, *strips]
    return [*strips[:1], *bands, *strips[1:]]


def source(spec: GraphSpec, choice: Choice) -> Source:
    """The kernel of a region, in CUDA C++. Raises :class:`NotSupported`.

    Where every output is rounded to 16 bits, exp and quotients are computed to 20 bits or more;
    where some are, GELU to 1e-7.
    """
    schedule = schedule_of(choice)
    try:
        made = _written(spec, schedule).called(_name(spec))
    except Refused as reason:
        raise NotSupported(f"graph '{spec.name}'", [str(reason)]) from None
    short = [spec.tensors[name].dtype in (torch.float16, torch.bfloat16) for name in spec.outputs]
    if all(short):
        return replace(made, text=f"#define {ROUNDED}\n{made.text}")
    if any(short) and any(node.op.startswith("gelu") for node in spec.nodes):
        return replace(made, text=f"#define {NARROW}\n{made.text}")
    return made


def _name(spec: GraphSpec) -> str:
    """A name that says what is computed."""
    ops = [
        node.attr("overload").split(".")[1].strip("_") if node.op == "aten" else node.op
        for node in spec.nodes
        if node.op not in ("constant", "identity", "cast")
    ]
    return "_".join(["cudnngraph", *dict.fromkeys(ops or ["copy"])])[:MOST_NAME].rstrip("_")


def _written(spec: GraphSpec, schedule: Pattern) -> Source:
    if isinstance(schedule, Strips):
        return depthwise.write(spec, schedule)
    if isinstance(schedule, Banded):
        return banded.write(spec, schedule)
    if isinstance(schedule, TapSums):
        return depthwise_gradient.write(spec, schedule)
    if isinstance(schedule, TapProducts):
        return tap_products.write(spec, schedule)
    if isinstance(schedule, Bins):
        return row_sums.write(spec, schedule)
    if isinstance(schedule, Lists):
        return row_lists.write(spec, schedule)
    if isinstance(schedule, Patches):
        return pool_gradient.write(spec, schedule)
    if isinstance(schedule, Pieces):
        return pieces.write(spec, schedule)
    if isinstance(schedule, Scan):
        return running.write(spec, schedule)
    if isinstance(schedule, Split):
        return split.write(spec, schedule)
    if isinstance(schedule, Tiling):
        return tiles.write(spec, schedule)
    return write(spec, schedule)


def _schedules(rows: Rows, by_rule: Schedule) -> list[Schedule]:
    """Schedules of rows: that by rule, fewer lanes, and other teams."""
    fewer, teams = by_rule.lanes // 2, (by_rule.team, by_rule.team // 2, by_rule.team * 2)
    if not rows.reductions:
        found = [Schedule(many, team) for many in (by_rule.lanes, rows.lanes) for team in teams]
        # Two vectors of each tensor in flight: side by side, and a block apart.
        wide = 2 * rows.lanes if rows.inner.extent % (2 * rows.lanes) == 0 else 0
        found += [Schedule(many, by_rule.team) for many in (fewer, wide) if many]
        if reads_plainly(rows):
            found += [Schedule(rows.lanes, team, 1, 2) for team in teams]
            found.append(Schedule(rows.lanes, by_rule.team // 2, 1, 4))
        return found
    found = [by_rule]
    for many in filter(None, (by_rule.lanes, fewer)):
        for team in teams:
            if not 1 <= team <= MOST_THREADS:
                continue
            chunks = -(-rows.inner.extent // (many * team))
            resident = chunks if chunks * many <= MOST_KEPT else 0
            if resident and team == by_rule.team and not by_rule.chunks:
                found.append(Schedule(many, team, 1, 0))  # read again, with registers to spare
            least = max(1, WARP // team)  # rows that a block is whole warps of
            found += [
                Schedule(many, team, together, resident)
                for together in (least, 2 * least, 4 * least, SMALL_BLOCK // team)
                if 0 < together * team <= max(team, 256)
            ]
    return found
