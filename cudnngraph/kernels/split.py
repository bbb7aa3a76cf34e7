"""Kernels of several launches: reductions that blocks share out, and what is computed behind them.

A region is taken apart at its reductions. A stage computes those that wait for no others: in rows
where these lie well in memory and fill the GPU, else by a grid of blocks that each reduce a chunk
(:mod:`~cudnngraph.kernels.grid`). Partial results stand in a workspace, and are put together in the
same order at every run, with what has one number for each result, such as one over a deviation:
by each block of the functions that read it, or by a launch of its own where these read too much.
What is left is read by the next stage, or written elementwise: by the function that has gathered,
if the chunks of each result are a cluster of blocks and registers hold them.

No counter stands in the workspace, and an execution reads there what its earlier launches or blocks
of the cluster have written. So its contents do not matter, nor replays, nor other streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..device.rules import has_clusters, rules
from ..ir.spec import GraphSpec, TensorSpec, contiguous_strides, round_up
from . import columns
from .gather import MOMENTS, Gather, shared_by
from .grid import MOST_SHARED, Grid, Space, grid_of, lanes_of, parts_in, shared_bytes, space_of
from .grid_function import Apart, Function, GridFunction, Parts, indexed
from .index import Sum, Var, place
from .row_kernels import written
from .rows import (
    MOST_THREADS,
    VECTOR_BYTES,
    WARP,
    check_order,
    reachable,
    rows_of_values,
    schedule_for,
    tape_of,
    why_slow,
)
from .scalars import MEMORY, TEAM
from .source import NAME, Launch, Source, function, pointer, text_of
from .stages import (
    Outputs,
    gathers_of,
    groups_of,
    largest_reads,
    put_together,
    reductions_of,
    replaced,
    rows_inside,
    stage_of,
    widest_read,
    written_beside,
)
from .tape import Cut, Index, Place, Read, Refused, Value, Window, mapped
from .write import Narrower

THREADS = 256  # of a block
MOST_LAUNCHES = 8
MOST_ELEMENTS = 1 << 31  # that an index of 32 bits may count
ALIGNED = 256  # bytes, of tensors in the workspace


@dataclass(frozen=True)
class Split:
    """How reductions are shared out: threads of a block, about how many blocks, and about how many
    threads of a block lie side by side across memory."""

    threads: int
    blocks: int
    columns: int

    @property
    def processors(self) -> int:
        """The number of multiprocessors that the blocks are for."""
        return max(1, self.blocks // rules().kernel_blocks_per_sm)


def split_for(processors: int) -> Split:
    """The schedule by rule, for a GPU with so many processors."""
    known = rules()
    return Split(THREADS, known.kernel_blocks_per_sm * processors, known.kernel_columns)


def variants(by_rule: Split) -> list[Split]:
    """Schedules to measure beside the one by rule: other threads, blocks and columns."""
    return [
        *(replace(by_rule, threads=threads) for threads in (THREADS // 2, 2 * THREADS)),
        *(replace(by_rule, blocks=blocks) for blocks in (by_rule.blocks // 2, 2 * by_rule.blocks)),
        *(replace(by_rule, columns=columns) for columns in (WARP // 2, 2 * WARP)),
        # Few chunks of narrow columns, which may be clusters.
        *(Split(2 * THREADS, blocks, WARP // 4) for blocks in (by_rule.processors, by_rule.blocks)),
    ]


def reduces(spec: GraphSpec) -> bool:
    """Whether a region reduces anything. Raises :class:`Refused`."""
    return bool(reductions_of(tape_of(spec)))


def write(spec: GraphSpec, split: Split) -> Source:
    """The kernel of a region with reductions. Raises :class:`Refused`."""
    if not 0 < split.threads <= MOST_THREADS or split.threads % WARP:
        raise Refused(f"a block of {split.threads} threads")
    if any(tensor.numel == 0 for tensor in spec.tensors.values()):
        raise Refused("a tensor is empty")
    if any(tensor.extent >= MOST_ELEMENTS for tensor in spec.tensors.values()):
        raise Refused("a tensor that needs an index of 64 bits")
    if any(isinstance(value, Window) for value in reachable(tape_of(spec))):
        raise Refused("windows and reductions")
    lanes = VECTOR_BYTES
    while True:
        try:
            return _Composer(spec, split, lanes).source()
        except Narrower:
            lanes //= 2


class _Composer:
    """The functions of one kernel, as far as they are written."""

    def __init__(self, spec: GraphSpec, split: Split, lanes: int) -> None:
        self._spec, self._split, self._lanes = spec, split, lanes
        self._held: dict[str, tuple[TensorSpec, int]] = {}  # of the workspace, with offsets
        self._bytes = 0
        self._texts: list[str] = []
        self._launches: list[Launch] = []
        self._grids: list[tuple[Space, Grid]] = []
        self._parts: list[Apart] = []
        self._left: list[tuple[Value, TensorSpec]] = []  # outputs of which nothing is reduced

    def source(self) -> Source:
        """Write the functions."""
        spec = self._spec
        tensors = [spec.tensors[name] for name in spec.outputs]
        pending: Outputs = list(zip(tape_of(spec), tensors, strict=True))
        if any(tensor.dtype not in MEMORY for _, tensor in pending):
            raise Refused("an output is of a dtype that kernels do not write")
        while pending:
            waiting = [each for each in pending if reductions_of(each[:1])]
            self._left += [each for each in pending if each not in waiting]
            left = self._of_groups(groups_of(self._with_columns(waiting)))
            inner = self._of_inner_rows(left)
            pending = self._staged(left) if inner is None else inner
        if not self._launches:
            raise Refused("nothing is reduced")
        for count in dict.fromkeys(tensor.numel for _, tensor in self._left):
            self._plain([each for each in self._left if each[1].numel == count])
        for each in self._parts:
            if each.parts.outputs and not each.told:
                self._put_together(each)
        if len(self._launches) > MOST_LAUNCHES:
            raise Refused("a kernel of too many launches")
        places = len(spec.inputs) + len(spec.outputs)
        shared = [TEAM, MOMENTS, *shared_by("\n".join(self._texts))]
        text = text_of(places, self._texts, shared)
        first = self._launches[0]
        return Source(text, first.blocks, first.threads, tuple(self._launches), self._bytes)

    # -- functions ----------------------------------------------------------------------------

    def _around(self) -> GraphSpec:
        """All tensors that a function may read and write."""
        spec, names = self._spec, (*self._spec.inputs, *self._spec.outputs)
        held = {name: tensor for name, (tensor, _) in self._held.items()}
        tensors = {name: spec.tensors[name] for name in names} | held
        return GraphSpec(spec.name, tensors, (), (*names, *self._held), ())

    def _new(self, shape: Sequence[int]) -> TensorSpec:
        """A tensor of the workspace."""
        name = f"{NAME} {len(self._held)}"
        made = TensorSpec(name, tuple(shape), contiguous_strides(shape), torch.float32)
        self._held[name] = made, self._bytes
        self._bytes = round_up(self._bytes + 4 * made.numel, ALIGNED)
        return made

    def _forget(self, held: int, bytes: int) -> None:
        """Drop the tensors of the workspace but for the first ones."""
        for name in list(self._held)[held:]:
            del self._held[name]
        self._bytes = bytes

    def _add(
        self, lines: Sequence[str], blocks: int, threads: int, clusters: int = 1, bounds: str = ""
    ) -> None:
        """A function of lines, with the pointers that it needs. What it reads of parts is put
        together before."""
        used = set(map(int, re.findall(r"\bp(\d+)\b", "\n".join(lines))))
        names = {name for at, name in enumerate(self._around().tensors) if at in used}
        for each in self._parts:
            if not each.held and names & each.names:
                self._put_together(each)
        name = f"{NAME}_{len(self._launches)}"
        typed = []
        for at, tensor in enumerate(self._around().tensors.values()):
            if at in used:
                held = self._held.get(tensor.name)
                where = f"a.p[{at}]" if held is None else f"(w + {held[1]}u)"
                typed.append(pointer(at, tensor, where))
        own = bounds or threads
        made = function(name, own, [*typed, *lines], workspace=True, clusters=clusters)
        self._texts.append(made)
        self._launches.append(Launch(name, blocks, threads))

    def _rows(self, outputs: Outputs, always: bool = False) -> bool:
        """Whether a function of rows writes the outputs, which is added then."""
        made = self._of_rows(outputs, always)
        if made is not None:
            self._add(*made)
        return made is not None

    def _of_rows(self, outputs: Outputs, always: bool = False) -> Function | None:
        """The function of rows that writes the outputs, None where there should be none."""
        try:
            rows = rows_of_values([value for value, _ in outputs], [to for _, to in outputs])
            schedule = schedule_for(rows, self._split.processors)
            if not always and why_slow(rows, schedule, self._split.processors):
                return None
            check_order(rows)
            most = 4 * self._split.blocks
            _, lines, blocks = written(self._around(), schedule, rows, most)
            return lines, blocks, schedule.threads
        except Refused as reason:
            if always or isinstance(reason, Cut):
                raise
            return None

    def _of_groups(self, groups: Sequence[Outputs]) -> Outputs:
        """Functions of rows for groups of outputs, as few as can be; the outputs left over."""
        left: list[tuple[Value, TensorSpec]] = []
        found: list[tuple[Outputs, Function]] = []
        for group in groups:
            for at, (others, _) in enumerate(found):
                together = [*others, *group]
                made = self._of_rows(together)
                if made is not None:
                    found[at] = together, made
                    break
            else:
                made = self._of_rows(group)
                if made is None:
                    left += group
                else:
                    found.append((group, made))
        for others, made in found:
            for each in self._sharing([value for value, _ in others]):
                more = self._of_rows([*others, each])
                if more is not None:
                    others, made = [*others, each], more
                    self._left.remove(each)
            self._add(*made)
        return left

    def _with_columns(self, outputs: Outputs) -> Outputs:
        """A function of rows that reduces columns too, if outputs need both of the same rows; what
        is left of the outputs."""
        for value, _ in outputs:
            inner = {*map(id, reductions_of([value]))}
            same = [each for each in outputs if {*map(id, reductions_of(each[:1]))} <= inner]
            others = [each for each in outputs if each not in same]
            if not others:
                continue
            held, before = len(self._held), self._bytes
            try:
                found = self._of_columns(same, others)
            except (Refused, Narrower):
                found = None
            if found is not None:
                return replaced(others, found)
            self._forget(held, before)
        return outputs

    def _of_columns(self, same: Outputs, others: Outputs) -> dict[int, Value] | None:
        """Add the function of the rows of some outputs that reduces the columns that others are
        made of; what takes the place of these reductions."""
        planned = columns.planned(same, others, self._split.processors, self._split.threads)
        if planned is None:
            return None
        partial = [self._new(planned.partial) for _ in planned.columns]
        lines, blocks = planned.written(self._around(), partial)
        self._add(lines, blocks, planned.schedule.threads, bounds=planned.bounds)
        return planned.put_together(partial)

    def _of_inner_rows(self, outputs: Outputs) -> Outputs | None:
        """A function of rows for what a reduction is of, if that takes several others of its rows.

        Outputs of the same rows go with it. What is left of the outputs, None if there is none.
        """
        for each in reductions_of([value for value, _ in outputs]):
            inner = rows_inside(each)
            if not inner:
                continue
            operand, held, before = each.operand, len(self._held), self._bytes
            to = self._new(operand.shape)
            same = [one for one in outputs if {*map(id, reductions_of(one[:1]))} <= inner]
            for beside in (same, []) if same else ([],):
                made = self._of_rows([(operand, to), *beside])
                if made is not None:
                    self._add(*made)
                    left = [one for one in outputs if one not in beside]
                    return replaced(left, {id(operand): Read(to.shape, to)})
            self._forget(held, before)
        return None

    def _sharing(self, values: Sequence[Value]) -> Outputs:
        """The outputs of which nothing is reduced that read a large tensor of other values too."""
        large = largest_reads(values)
        return [each for each in self._left if large & largest_reads(each[:1])]

    def _plain(self, outputs: Outputs) -> None:
        """A function that writes outputs of one size, of which nothing is reduced any more."""
        for space, grid in self._grids:
            given = _placed(space, outputs)
            again = self._again(space, grid, [value for value, _ in outputs])
            if len(given) == len(outputs) and (space.across or again):
                if grid.chunks == 1:
                    split = self._split
                    grid = grid_of(space, split.threads, 2 * split.blocks, split.columns, steps=2)
                if not self._clustered(space, grid, given, again):
                    self._gridded(space, grid, given, again, GridFunction.applied)
                return None
        self._rows(outputs, always=True)
        return None

    # -- stages -------------------------------------------------------------------------------

    def _staged(self, outputs: Outputs) -> Outputs:
        """Compute the reductions that wait for no others; what is left of the outputs."""
        by: dict[int, Value] = {}
        written: set[int] = set()
        for gathers in gathers_of([value for value, _ in outputs]) if outputs else ():
            stage = stage_of(gathers, outputs)
            held, parts = len(self._held), (len(self._texts), self._bytes)
            plain, grids, apart = list(self._left), len(self._grids), [*map(replace, self._parts)]
            try:
                made = self._computed(gathers, stage)
            except Refused:  # one number for each result alone: any index is asked of those later
                self._forget(held, parts[1])
                self._left = plain
                del self._texts[parts[0] :], self._launches[parts[0] :], self._grids[grids:]
                self._parts = apart
                stage = [(value, None) for gather in gathers for value in gather.values]
                made = self._computed(gathers, stage)
            by |= made
            written |= {id(to) for _, to in stage if to is not None}
        left = [(value, to) for value, to in outputs if id(to) not in written]
        return replaced(left, by)

    def _computed(
        self, gathers: Sequence[Gather], stage: Sequence[tuple[Value, TensorSpec | None]]
    ) -> dict[int, Value]:
        """Functions that compute values of one number for each result; those that go to no output
        are held in the workspace, by which they are replaced."""
        given = [(value, to or self._new(value.shape)) for value, to in stage]
        found: dict[int, Value] = {
            id(value): Read(value.shape, to)
            for (value, to), (_, out) in zip(given, stage, strict=True)
            if out is None
        }
        if self._rows(given):
            return found
        split, first = self._split, gathers[0]
        lanes = min(self._lanes, lanes_of(widest_read([each.operand for each in gathers])))
        space = space_of(first.operand, first.dims, lanes)
        threads = split.threads
        while threads > WARP and shared_bytes(space, gathers, threads) > MOST_SHARED:
            threads //= 2
        grid = grid_of(space, threads, split.blocks, split.columns)
        if len(given) > sum(to is not None for _, to in stage):
            grid = self._narrow(space, grid, threads, 4 * parts_in(gathers))
        self._grids.append((space, grid))
        beside = _placed(space, self._sharing([each.operand for each in gathers]))
        self._left = [each for each in self._left if all(each[1] is not to for _, to, _ in beside)]
        found |= written_beside((value, to) for value, to, _ in beside)
        reads = [*(each.operand for each in gathers), *(value for value, _, _ in beside)]
        if grid.chunks == 1:
            outputs = [(*each, indexed(space.kept, space.kept_shape, each[1])) for each in given]
            again = self._again(space, grid, [*reads, *(value for value, _ in given)])
            self._gridded(space, grid, outputs, again, lambda at: at.reduced(gathers, beside))
            return found
        shape = (*space.kept_shape, grid.chunks)
        partial = [[self._new(shape) for _ in range(each.parts)] for each in gathers]
        again = self._again(space, grid, reads)
        self._gridded(space, grid, (), again, lambda at: at.reduced(gathers, beside, partial))
        rank = len(space.kept_shape)
        places = Place((*[1] * rank, grid.chunks), rank, type="int")
        counts = mapped(lambda chunk: grid.counted(space, chunk), places)
        by: dict[int, Value] = {}
        for gather, tensors in zip(gathers, partial, strict=True):
            by |= put_together(gather, counts, [Read(shape, tensor) for tensor in tensors])
        function = self._of_rows(replaced(given, by), always=True)
        assert function is not None
        held, written = (
            tuple(each for each, (_, to) in zip(given, stage, strict=True) if (to is None) == here)
            for here in (True, False)
        )
        parts = Parts(space, grid, tuple(gathers), tuple(map(tuple, partial)), held, written)
        launch = -1 if beside or again else len(self._launches) - 1
        self._parts.append(Apart(parts, function, launch))
        return found

    # -- partial results ----------------------------------------------------------------------

    def _put_together(self, each: Apart) -> None:
        """Add the launch that puts partial results together."""
        each.held = each.told = True
        self._add(*each.function)

    def _narrow(self, space: Space, grid: Grid, threads: int, bytes: int) -> Grid:
        """A grid of fewer chunks of narrower blocks, if each block may put these together."""
        most, least = rules().kernel_partials_again_bytes, rules().kernel_min_width_bytes
        columns = self._split.columns
        while space.across and columns * VECTOR_BYTES >= least:
            found = grid_of(space, threads, self._split.blocks, columns)
            if bytes * found.read_again(space, found.chunks) <= most:
                return found
            columns //= 2
        return grid

    def _again(self, space: Space, grid: Grid, values: Sequence[Value]) -> list[Apart]:
        """The partial results that the blocks of a function put together each for itself."""
        reads = {value.tensor.name for value in reachable(values) if isinstance(value, Read)}
        found = [
            each
            for each in self._parts
            if not each.held and each.names & reads and each.parts.space.alike(space)
        ]
        bytes = sum(
            4 * parts_in(each.parts.gathers) * grid.read_again(space, each.parts.grid.chunks)
            for each in found
        )
        return found if bytes <= rules().kernel_partials_again_bytes else []

    def _clustered(
        self,
        space: Space,
        grid: Grid,
        outputs: Sequence[tuple[Value, TensorSpec, Index]],
        again: Sequence[Apart],
    ) -> bool:
        """Whether outputs are written by the function that has gathered what they are made of, if
        the blocks of each result are a cluster."""
        most = rules().kernel_cluster_blocks if has_clusters() else 1
        if len(again) != 1 or again[0].launch != len(self._launches) - 1:
            return False
        (each,) = again
        if each.parts.grid != grid or each.parts.space != space or grid.chunks > most:
            return False
        try:
            lines = GridFunction(self._around(), space, grid, outputs, [each.parts]).clustered()
        except Refused:
            return False
        del self._texts[-1], self._launches[-1]
        self._add(lines, grid.blocks, grid.threads, grid.chunks)
        each.told, each.launch = True, -1
        return True

    def _gridded(
        self,
        space: Space,
        grid: Grid,
        outputs: Sequence[tuple[Value, TensorSpec, Index]],
        again: Sequence[Apart],
        lines: Callable[[GridFunction], list[str]],
    ) -> None:
        """Add a function over a space, the blocks of which put parts together, if they can."""
        parts = [replace(p.parts, outputs=() if p.told else p.parts.outputs) for p in again]
        try:
            made = lines(GridFunction(self._around(), space, grid, outputs, parts))
        except Refused:
            if not again:
                raise
            again = ()
            made = lines(GridFunction(self._around(), space, grid, outputs))
        self._add(made, grid.blocks, grid.threads)
        for each in again:
            each.told = True


def _placed(space: Space, outputs: Outputs) -> list[tuple[Value, TensorSpec, Index]]:
    """The outputs that a loop over a space can write as they lie, with their indices."""
    found = []
    for value, to in outputs:
        with suppress(Refused):
            index = indexed(space.index, space.shape, to)
            if _dense(place(index, to.stride), space.inner):
                found.append((value, to, index))
    return found


def _dense(at: Sum, inner: Var) -> bool:
    """Whether neighbours along a variable lie side by side."""
    return any(digit.var == inner and digit.div == by == 1 for digit, by in at.terms)
