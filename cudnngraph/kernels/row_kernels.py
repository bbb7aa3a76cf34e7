"""Kernels of rows: the lanes that a schedule asks for, or as many as one thread can go through."""

from __future__ import annotations

from contextlib import suppress

from ..ir.spec import GraphSpec
from .lane_by_lane import LaneByLane
from .rows import MOST_THREADS, WARP, Rows, Schedule, narrower, reads_plainly, rows_of
from .source import Source
from .tape import Refused
from .write import Narrower, Writer, keeps_none


def write(
    spec: GraphSpec, schedule: Schedule, rows: Rows | None = None, most_blocks: int = 0
) -> Source:
    """The kernel of a region. Raises :class:`Refused`.

    ``most_blocks`` bounds the blocks that go through one long row; 0 for none.
    """
    rows = rows or rows_of(spec)
    check(rows, schedule)
    writer, lines, blocks = written(spec, schedule, rows, most_blocks)
    return writer.source_of(lines, blocks)


def written(
    spec: GraphSpec, schedule: Schedule, rows: Rows, most_blocks: int
) -> tuple[Writer, list[str], int]:
    """A region's writer, the lines of its function and the number of its blocks. The lanes are side
    by side, or written together, or fewer."""
    asked = schedule
    while True:
        with suppress(Narrower):
            side_by_side = Writer(spec, schedule, rows, most_blocks)
            return side_by_side, *side_by_side.lines()
        schedule = narrower(rows, schedule)
        if schedule.lanes == 1 and not rows.reductions:
            with suppress(Narrower):
                by_lane = LaneByLane(spec, asked, rows, most_blocks)
                return by_lane, *by_lane.lines()


def check(rows: Rows, schedule: Schedule) -> None:
    """Raise Refused for a schedule that is not one of the rows: a choice may be of another version,
    which counted them otherwise."""
    lanes, team, threads = schedule.lanes, schedule.team, schedule.threads
    ends = lanes > 0 and rows.has_ends(lanes)
    if lanes < 1 or (ends and (rows.start is None or not keeps_none(rows, schedule))):
        raise Refused(f"{lanes} lanes of rows of {rows.inner.extent}")
    if ends and (team < 2 * lanes or lanes & (lanes - 1)):
        raise Refused(f"{lanes} lanes of rows with ends, for a team of {team} threads")
    if not 0 < threads <= MOST_THREADS or threads % WARP:
        raise Refused(f"a block of {threads} threads")
    if rows.reductions and team & (team - 1):
        raise Refused(f"a team of {team} threads")
    if not (rows.reductions or schedule.chunks == 1 or (schedule.chunks and reads_plainly(rows))):
        raise Refused(f"{schedule.chunks} chunks of one long row")
