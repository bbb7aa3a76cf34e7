"""Thresholds that were measured on one GPU, as data by compute capability.

``rules()`` returns those of the GPU that is planned for. A GPU without measurements of its own gets
those of the H200. Each field says its unit, what it decides, and the results page of its numbers.
Fields with an ``alternative`` stand for a choice that could be measured instead. Those with a
``stage`` are measured: ``tune="autotune"`` tries each of the ``others`` where the stage asks
(:mod:`~cudnngraph.rewrite.alternatives`), and cuts of a graph in both ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch

from .import_rules import ANY, NO, ImportRules, Stage, measured

MEASURED_ON = {90: "NVIDIA H200, cuDNN 9.19"}
DEFAULT_CAPABILITY = 90
SM_COUNT = 132  # of an H200, for plans that are made without a GPU
T = TypeVar("T")


@dataclass(frozen=True)
class DeviceRules(ImportRules):
    """The thresholds of one kind of GPU; the metadata of each field say what it is."""

    attention_blocks_per_sm: int = measured(
        2,
        "blocks of queries for each multiprocessor",
        "how many blocks keep a GPU busy, so that sequences may be joined into fewer",
        alternative="short sequences apart",
    )
    attention_mask_per_query: int = measured(
        4,
        "mask values for each value of q",
        "how large the mask of joined sequences may be",
        alternative="short sequences apart",
    )
    sibling_max_weight_bytes: int = measured(
        8 << 20,
        "bytes of a weight",
        "how large the weights are that are held a second time, joined (an estimate)",
        alternative="each product by itself",
    )
    mask_copy_min_scores: int = measured(
        1 << 23,
        "attention scores",
        "from where on a mask with odd rows is copied to aligned ones",
        page="h200-masks.md",
        alternative="the mask as it is",
        stage="graph",
        others=(NO, ANY),
    )
    packed_by_flash: bool = measured(
        True,
        "yes or no",
        "whether packed attention without finite padding is torch's flash attention",
        page="h200-packed.md",
        alternative="the engines of cuDNN that keep NaN in its sequence",
        stage="graph",
        others=(False, True),
    )
    convolution_parts_in_place: bool = measured(
        False,
        "yes or no",
        "whether convolutions of few groups, and 16-bit ones with at most a sum and ReLU behind, "
        "write into the whole, for which cuDNN copies images twice (RegNetY: 29.8 us; 37.3 so)",
        page="h200-search.md",
        alternative="a kernel that joins them",
        stage="graph",
        others=(False, True),
    )
    convolution_slices_in_place: bool = measured(
        False,
        "yes or no",
        "whether 16-bit convolutions read some channels of an image where they lie, which cuDNN "
        "copies in front of each (0.98 of a RegNetY's time with copies of ours, on an H100)",
        page="h200-whole.md",
        alternative="a dense copy of them",
        stage="graph",
        others=(False, True),
    )
    product_kept_min_depth: int = measured(
        512,
        "products that an element sums up",
        "from where on a plan makes both what GELU reads behind a reshape, kept for its gradient, "
        "and what it makes: with fewer GELU is slower there than a kernel of its own",
        page="h200-kept.md",
        alternative="a kernel of the activation",
        stage="graph",
        others=(NO, ANY),
    )
    tensor_cores_min_products: int = measured(
        64,
        "elements of a window and its channels",
        "from how many on 16-bit convolutions try plans with tensor cores first (an estimate)",
        alternative="cuDNN's order",
    )
    tensor_cores_min_results: int = measured(
        32,
        "channels of a result",
        "the same for the channels of the result (an estimate)",
        alternative="cuDNN's order",
    )
    scalar_ops_apart: int = measured(
        3,
        "pointwise ops on scalars and vectors",
        "from how many on they are a plan of their own",
        alternative="one plan",
        stage="cut",
    )
    scalar_elements_apart: int = measured(
        1 << 25,
        "elements of the largest result",
        "from where on ops on scalars and vectors are a plan of their own "
        "(AdamW as one plan: as fast at 2^24 elements, 3.8 times slower at 2^26)",
        alternative="one plan",
        stage="cut",
    )
    epilogue_behind_depthwise: bool = measured(
        False,
        "yes or no",
        "whether pointwise ops join the plan of a depthwise convolution",
        page="h200-selection.md",
        alternative="one plan",
        stage="cut",
    )
    epilogue_behind_overlapping_transpose: bool = measured(
        False,
        "yes or no",
        "whether pointwise ops join a strided transposed convolution whose taps overlap",
        page="h200-selection.md",
        alternative="one plan",
        stage="cut",
    )
    product_epilogue_us_per_gflop: float = measured(
        0.2,
        "microseconds for each 10^9 operations",
        "what a 16-bit product loses in a plan that is compiled at run time for its epilogue",
        page="h200-products.md",
        alternative="one plan",
    )
    product_residual_us_per_gflop: float = measured(
        0.8,
        "microseconds for each 10^9 operations",
        "the same where the epilogue reads a tensor as large as its result",
        page="h200-products.md",
        alternative="one plan",
    )
    product_start_us: float = measured(
        10.0,
        "microseconds",
        "what a 16-bit product of cuBLASLt's takes longer than such a plan, but for its operations "
        "and but for residuals",
        page="h200-products.md",
        alternative="one plan",
    )
    product_row_bytes: int = measured(
        16,
        "bytes",
        "at what multiples the rows of a 16-bit product begin for cuBLASLt's fast kernels: with "
        "30,522 columns it took 829 us, a plan that is compiled at run time 536",
        page="h200-search.md",
        alternative="one plan",
    )
    sigmoid_us_per_million: float = measured(
        3.2,
        "microseconds for each 10^6 elements of the result",
        "what a sigmoid costs a product or a convolution in its plan (CLIP's products 3.2 and 4.0, "
        "a detector's heads 6.6 to 8.2)",
        page="h200-epilogues.md",
        alternative="one plan",
    )
    sigmoid_short_depth: int = measured(
        32,
        "channels",
        "up to how many are summed up by convolutions that lose `sigmoid_short_us`: gates of "
        "squeeze-and-excitation",
        page="h200-epilogues.md",
        alternative="one plan",
    )
    sigmoid_short_us: float = measured(
        3.5,
        "microseconds",
        "what a sigmoid costs them, however small they are",
        page="h200-epilogues.md",
        alternative="one plan",
    )
    kernel_bytes_per_us: int = measured(
        5_000_000,
        "bytes for each microsecond",
        "how much a generated kernel behind a product moves",
        page="h200-products.md",
        alternative="one plan",
    )
    kernel_launch_us: float = measured(
        1.5,
        "microseconds",
        "what one more kernel takes that moves nothing",
        page="h200-products.md",
        alternative="one plan",
    )
    rms_norm_by_matmul_max_row: int = measured(
        128,
        "values of a row",
        "the longest row whose sum of squares a matmul may compute",
        page="h200-rows.md",
        alternative="cuDNN's norm",
    )
    rms_norm_by_matmul_faster_row: int = measured(
        32,
        "values of a row",
        "the longest row whose sum of squares a matmul computes faster than cuDNN's norm",
        page="h200-rows.md",
        alternative="cuDNN's norm",
        stage="cudnn",
        others=(NO, ANY),
    )
    pointwise_min_row: int = measured(
        32,
        "elements",
        "the shortest row that a flat pointwise graph is cut into",
        alternative="one long row",
    )
    pointwise_max_row: int = measured(
        1024,
        "elements",
        "the longest row that a flat pointwise graph is cut into",
        page="h200-selection.md",
        alternative="one long row",
    )
    gelu_by_tanh_behind_matmul: bool = measured(
        True,
        "yes or no",
        "whether gelu behind a 16-bit matmul or convolution is computed by tanh, not erf",
        page="h200-models.md",
        alternative="erf",
        stage="cudnn",
        others=(False, True),
    )
    reduction_max_parts: int = measured(
        64,
        "parts of each channel",
        "into how many short reductions torch's mean and deviation of images are cut",
        alternative="one reduction for each channel",
        stage="torch",
        others=(1,),
    )
    reduction_min_rows: int = measured(
        8,
        "pixels of a part",
        "the fewest pixels of one of these reductions",
        alternative="one reduction for each channel",
    )
    resize_by_matmul_max_dim: int = measured(
        512,
        "elements of a dim",
        "the longest dim that linear interpolation enlarges by a matmul",
        alternative="torch's interpolation",
    )
    resize_by_matmul_min_elements: int = measured(
        1 << 20,
        "elements of the result",
        "from where on linear interpolation is two matmuls, which take longer below",
        alternative="torch's interpolation",
        stage="torch",
        others=(NO, ANY),
    )
    tile_min_side: int = measured(
        3,
        "elements along a dim",
        "the shortest dim that a generated kernel turns through shared memory (an estimate)",
        alternative="kernels of rows",
    )
    tile_min_elements: int = measured(
        1 << 10,
        "elements of two dims",
        "from where on generated kernels turn two dims through shared memory (an estimate)",
        alternative="kernels of rows",
    )
    tile_max_bytes: int = measured(
        16,
        "times the bytes of the other layout",
        "how much a kernel may read and write that runs in tiles (an estimate)",
        alternative="kernels of rows",
    )
    kernel_blocks_per_sm: int = measured(
        4,
        "blocks for each multiprocessor",
        "into how many a generated kernel shares out a reduction (an estimate)",
        alternative="twice or half as many",
    )
    kernel_columns: int = measured(
        16,
        "vectors side by side",
        "how wide blocks are that go down columns",
        page="h200-reductions.md",
        alternative="wider or narrower blocks",
    )
    kernel_loads_ahead: int = measured(
        8,
        "loads of a thread",
        "how many a thread begins of its chunk before it waits for the first (an estimate)",
        alternative="more threads of a block",
    )
    kernel_steps_untested: bool = measured(
        True,
        "yes or no",
        "whether a loop that reads ahead goes through whole groups of steps without a test of each "
        "(an estimate)",
        alternative="a test of each step",
    )
    kernel_partials_again_bytes: int = measured(
        10 << 20,
        "bytes",
        "how much blocks may read of partial results to put them together each for itself: what "
        "the L2 cache gives in the time of a launch (an estimate)",
        alternative="a launch that puts them together",
    )
    kernel_min_width_bytes: int = measured(
        128,
        "bytes side by side",
        "how narrow blocks may be that go down columns, so that they have fewer partial results to "
        "put together: those of 64 took 1.2 to 1.4 times as long",
        page="h200-reductions.md",
        alternative="a launch that puts them together",
    )
    kernel_columns_with_rows: bool = measured(
        True,
        "yes or no",
        "whether a generated kernel reduces columns in the pass that reduces rows: gradients of "
        "layer norms take 0.68 to 0.86 of the time of a pass of each",
        page="h200-reductions.md",
        alternative="a pass of each",
    )
    kernel_cluster_blocks: int = measured(
        8,
        "blocks",
        "how many may be a cluster that reads what it reduces and writes only once (an estimate)",
        alternative="two launches",
    )
    kernel_long_row: int = measured(
        1 << 15,
        "elements of a row",
        "from where on a generated kernel shares out rows that are fewer than multiprocessors "
        "(an estimate)",
        alternative="one block for each row",
    )
    kernel_rows_online: bool = measured(
        True,
        "yes or no",
        "whether the largest element of a long row and the sum of powers are found in one pass",
        page="h200-reductions.md",
        alternative="a pass for each",
    )
    kernel_rows_in_memory_form: bool = measured(
        True,
        "yes or no",
        "whether threads keep long rows of 16 bits in registers as memory has them (an estimate)",
        alternative="long rows are read again in every pass",
    )
    kernel_rows_aligned: bool = measured(
        True,
        "yes or no",
        "whether long rows that start at odd elements are read as vectors, but for their ends",
        page="h200-reductions.md",
        alternative="element by element",
    )
    kernel_once_threads: int = measured(
        512,
        "threads of a block",
        "how many share a long row that is read once",
        page="h200-reductions.md",
        alternative="other numbers of threads for a row",
    )
    kernel_again_threads: int = measured(
        1024,
        "threads of a block",
        "how many share a long row that is read more than once, so that the cache holds the rows "
        "that are under way",
        page="h200-reductions.md",
        alternative="other numbers of threads for a row",
    )
    kernel_row_elements: int = measured(
        4,
        "elements of a row",
        "how many one thread of a generated kernel has before more threads share a short row "
        "(an estimate)",
        alternative="other numbers of threads for a row",
    )
    kernel_min_run_bytes: int = measured(
        16,
        "bytes side by side",
        "how much of a row has to lie together for a generated kernel of rows (an estimate)",
        alternative="a kernel that goes down columns",
    )
    window_most_reads: int = measured(
        256,
        "elements that are read for one",
        "how large the windows of a generated kernel may be (an estimate)",
        alternative="torch's pooling or interpolation",
    )
    window_most_again: int = measured(
        32,
        "pointwise ops for each element",
        "how much a kernel of windows may compute again that lie over each other (an estimate)",
        alternative="two kernels",
    )
    depthwise_wait_blocks: int = measured(
        2,
        "blocks of a multiprocessor",
        "how many more would hide how long a depthwise kernel waits for memory",
        alternative="strips of other sizes",
    )
    depthwise_band_clocks: int = measured(
        140,
        "percent of an instruction of strips",
        "how long a wave of shared memory takes in a depthwise kernel of matrix products",
        page="h200-bands.md",
        alternative="strips",
    )
    depthwise_products_min_columns: int = measured(
        7,
        "columns of taps",
        "from how many on matrix products are tried first for the gradient of a depthwise weight",
        page="h200-taps.md",
        alternative="sums by threads",
    )
    depthwise_sums_wait_blocks: int = measured(
        1,
        "blocks of a multiprocessor",
        "the same for a kernel of the gradient of a depthwise weight",
        alternative="tiles of other sizes",
    )
    depthwise_sums_even: int = measured(
        90,
        "percent of all multiprocessors' places for blocks",
        "how many a kernel of the gradient of a depthwise weight has to fill (an estimate)",
        alternative="one, two or four times the blocks",
    )
    depthwise_sums_most_waves: int = measured(
        4,
        "waves of blocks",
        "by how many such a kernel may give all multiprocessors as many (an estimate)",
        alternative="one, two or four times the blocks",
    )
    kernel_region_blocks_per_sm: int = measured(
        4,
        "blocks for each multiprocessor",
        "how many each of several regions of a kernel may have: an AdamW of 150 tensors takes "
        "1.01 of torch's time by 4, 1.04 by 16, 1.08 without a limit (on an H100)",
        page="h100-updates.md",
        alternative="four times as many",
    )
    patch_most_instructions: int = measured(
        3072,
        "instructions of a thread",
        "how long a kernel of a pool's gradient may be before it waits for its own text "
        "(an estimate: 48 KB, of an instruction cache of 128 KB)",
        alternative="patches of other sizes",
    )


TABLE: dict[int, DeviceRules] = {DEFAULT_CAPABILITY: DeviceRules()}

#: Values of thresholds by name, in order.
Values = tuple[tuple[str, Any], ...]

_planned_for: ContextVar[int | None] = ContextVar("planned_for", default=None)
_followed: ContextVar[Values] = ContextVar("followed", default=())
_asked: ContextVar[set[str] | None] = ContextVar("asked", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def planning_for(capability: int) -> contextlib.AbstractContextManager[None]:
    """Have :func:`rules` return those of a described GPU, of compute capability 90 for 9.0."""
    return _set(_planned_for, capability)


@contextlib.contextmanager
def changed(**values: Any) -> Iterator[None]:
    """Have every GPU follow other thresholds, to measure or test the alternative.

    For one thread at a time. Keys and worker processes know nothing of it: use an empty cache
    directory, :func:`~cudnngraph.cache_clear` before, and ``verify="inprocess"``.
    """
    before = dict(TABLE)
    for capability, rules_of in before.items():
        TABLE[capability] = replace(rules_of, **values)
    try:
        yield
    finally:
        TABLE.update(before)


def following(values: Values) -> contextlib.AbstractContextManager[None]:
    """Have :func:`rules` return other values for some thresholds, in this thread."""
    return _set(_followed, (*_followed.get(), *values))


@contextlib.contextmanager
def noting() -> Iterator[set[str]]:
    """Collect the names of the thresholds that are asked for meanwhile, in this thread."""
    asked: set[str] = set()
    with _set(_asked, asked):
        yield asked


class _Noting:
    """Thresholds that note what is asked of them."""

    def __init__(self, found: DeviceRules, asked: set[str]) -> None:
        self._found, self._asked = found, asked

    def __getattr__(self, name: str) -> Any:
        self._asked.add(name)
        return getattr(self._found, name)


def rules() -> DeviceRules:
    """The thresholds of the GPU that is planned for: a described one, else the current device."""
    asked = _asked.get()
    return _now() if asked is None else cast(DeviceRules, _Noting(_now(), asked))


def _now() -> DeviceRules:
    capability = _planned_for.get() or _current_capability()
    found, values = TABLE.get(capability, TABLE[DEFAULT_CAPABILITY]), _followed.get()
    return _with(found, values) if values else found


@lru_cache
def _with(found: DeviceRules, values: Values) -> DeviceRules:
    return replace(found, **dict(values))


def others(stage: Stage) -> Iterator[tuple[str, Any]]:
    """The thresholds that a stage asks for, each with the values that it has not now."""
    now = _now()
    for each in fields(DeviceRules):
        if each.metadata["stage"] == stage:
            for value in each.metadata["others"]:
                if value != getattr(now, each.name):
                    yield each.name, value


def has_clusters() -> bool:
    """Whether blocks of the GPU that is planned for may be clusters: compute capability 9 or 10."""
    capability = _planned_for.get() or _current_capability()
    return capability // 10 in (9, 10)


def has_matrix_products() -> bool:
    """Whether warps of the GPU that is planned for multiply matrices of all 16-bit numbers: compute
    capability 8 or later."""
    return (_planned_for.get() or _current_capability()) >= 80


def sm_count() -> int:
    """Return the number of multiprocessors of the current GPU, or of an H200 if there is none."""
    if _planned_for.get() is None and _has_device():
        return _properties(torch.cuda.current_device())[1]
    return SM_COUNT


def _has_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _current_capability() -> int:
    return _properties(torch.cuda.current_device())[0] if _has_device() else DEFAULT_CAPABILITY


@lru_cache
def _properties(index: int) -> tuple[int, int]:
    """The compute capability and the number of multiprocessors of a GPU."""
    found = torch.cuda.get_device_properties(index)
    return 10 * found.major + found.minor, found.multi_processor_count
