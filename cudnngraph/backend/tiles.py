"""Which of cuDNN's tiles is fastest for a product or a convolution, by a model of what one takes.

Engines that compile at run time multiply in tiles of several shapes, and cuDNN's ranking is often
not in the order of their times. Their times over many sizes were measured on one kind of GPU
(docs/results/h200-tiles.md), and for each tile a sum of few terms was fitted to them:
``tiles.json`` has it, for the version of cuDNN and the compute capability that it was measured
with. Elsewhere the ranking stays as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..ir.spec import GraphSpec, Node, aligned, is_channels_last, numel
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS
from ..ops.work import bytes_of
from .plan import Choice

#: Pointwise ops that take a tile longer, each by instructions of its own kind.
_ERF = frozenset({"gelu", "erf"})
_EXPONENTIAL = frozenset({"elu", "exp", "gelu_tanh", "mish", "sigmoid", "silu", "softplus", "tanh"})


@dataclass(frozen=True)
class Work:
    """A product of 16-bit matrices, or a convolution as one, and what stands behind it.

    Attributes:
        rows: of the result; the pixels of all images.
        columns: of the result; the channels of a convolution's.
        depth: what each element of a window sums up; the channels of a convolution's image.
        window: elements of a convolution's window; 1 for a product.
        erf: ops behind it that compute an error function.
        exponential: ops behind it that compute an exponential.
        extra: tensors as large as the result that they read.
        megabytes: what is read and written, each tensor once.
    """

    rows: int
    columns: int
    depth: int
    window: int
    erf: int
    exponential: int
    extra: int
    megabytes: float


@dataclass(frozen=True)
class Tile:
    """What is known of plans of one engine and configuration.

    Attributes:
        shape: rows, columns and depth that a block multiplies at a time.
        cluster: blocks that run together, along rows and along columns.
        us: microseconds for each of :func:`terms`.
        error: the root mean square of the relative errors of what was fitted.
    """

    shape: tuple[int, int, int]
    cluster: tuple[int, int]
    us: tuple[float, ...]
    error: float


def work_of(spec: GraphSpec) -> Work | None:
    """The work of a step, None if it is no such product with pointwise ops behind it."""
    nodes = [node for node in spec.nodes if node.op != "constant"]
    anchors = [node for node in nodes if not OPS[node.op].pointwise]
    if len(anchors) != 1 or anchors[0].op not in ("conv", "matmul"):
        return None
    anchor = anchors[0]
    left, right = (spec.tensors[name] for name in anchor.operands[:2])
    given = set(spec.inputs)
    if not given.issuperset(anchor.operands[:2]):
        return None  # computed in front of it
    if left.dtype not in LOW_PRECISION or right.dtype not in LOW_PRECISION:
        return None
    made = spec.tensors[anchor.results[0]].shape
    if anchor.op == "conv":
        if anchor.attr("groups") > 1:
            return None
        rows, columns = made[0] * numel(made[2:]), made[1]
        depth, window = right.shape[1], numel(right.shape[2:])
    else:
        if numel(right.shape[:-2]) > 1:
            return None  # as many products as there are matrices
        rows, columns = numel(made[:-1]), made[-1]
        depth, window = left.shape[-1], 1
    behind = [node for node in nodes if node is not anchor]
    return Work(
        rows=rows,
        columns=columns,
        depth=depth,
        window=window,
        erf=sum(node.op in _ERF for node in behind),
        exponential=sum(node.op in _EXPONENTIAL for node in behind),
        extra=len(_whole(spec, behind, numel(made)) & given),
        megabytes=bytes_of(spec) / 1e6,
    )


def gradient_of_weight(spec: GraphSpec) -> Node | None:
    """The node of a step that is the gradient of a 16-bit convolution's weight alone, of a window,
    over channels-last images; else None."""
    node, *others = (node for node in spec.nodes if node.op != "constant")
    if others or node.op != "conv_wgrad" or node.attr("groups") > 1:
        return None
    images = [spec.tensors[name] for name in node.operands]
    last = all(is_channels_last(image.shape, image.stride) for image in images)
    if not last or any(image.dtype not in LOW_PRECISION for image in images):
        return None
    return node if max(node.attr("kernel")) > 1 and {*node.attr("dilation")} == {1} else None


def _whole(spec: GraphSpec, nodes: Sequence[Node], elements: int) -> set[str]:
    """The operands of nodes that have as many elements as the result."""
    operands = {name for node in nodes for name in node.operands}
    return {name for name in operands if numel(spec.tensors[name].shape) == elements}


def terms(work: Work, shape: Sequence[int], cluster: Sequence[int], sms: int) -> list[float]:
    """What the time of a work in such tiles is a sum of, on a GPU of ``sms`` multiprocessors.

    Each of them multiplies one tile after the other, so that most terms grow by waves of tiles.
    """
    rows, columns = (
        math.ceil(math.ceil(extent / tile) / together) * together
        for extent, tile, together in zip(
            (work.rows, work.columns), shape[:2], cluster, strict=True
        )
    )
    waves, share = math.ceil(rows * columns / sms), max(1.0, rows * columns / sms)
    steps = work.window * math.ceil(work.depth / shape[2])
    windowed = work.window > 1
    return [
        1.0,
        waves * steps,
        share * steps,
        waves,
        waves * work.erf,
        waves * work.exponential,
        waves * work.extra,
        work.megabytes,
        waves * steps * windowed,
        waves * windowed,
    ]


@dataclass(frozen=True)
class Model:
    """The tiles of one kind of GPU.

    Attributes:
        tiles: by engine and knobs.
        largest_error: of a tile that may be taken in place of cuDNN's first.
        gain: a tile is taken if it is predicted to take at most so much of the first one's time.
        weight_gradients: the engine of this capability for gradients of weights with windows, whose
            plans were faster where cuDNN ranks those of older engines first and images have more
            channels than ``few``; None if none is known.
        few: channels of an image.
        of_few: the plan that was the fastest for gradients of weights with no more.
    """

    cudnn: int
    capability: int
    tiles: Mapping[Choice, Tile]
    largest_error: float
    gain: float
    weight_gradients: int | None = None
    few: int = 0
    of_few: Choice | None = None

    def us(self, work: Work, choice: Choice, sms: int) -> float | None:
        """The microseconds that a plan is predicted to take, None if its tile is not known."""
        tile = self.tiles.get(choice)
        if tile is None:
            return None
        found = terms(work, tile.shape, tile.cluster, sms)
        return sum(us * term for us, term in zip(tile.us, found, strict=True))

    def best(
        self, choices: Sequence[Choice], us: Sequence[float | None]
    ) -> tuple[int, float] | None:
        """The place of the choice to be tried before the first, and the share of the first's time
        that it is predicted to take, of what all are predicted to take; None for the first
        itself."""
        first = us[0] if us else None
        if not first:
            return None
        shares = {
            place: each / first
            for place, (choice, each) in enumerate(zip(choices, us, strict=True))
            if each is not None and self.tiles[choice].error <= self.largest_error
        }
        place = min(shares, key=lambda each: shares[each], default=0)
        return (place, shares[place]) if place and shares[place] <= self.gain else None

    def gradient_first(self, spec: GraphSpec, choices: Sequence[Choice]) -> int:
        """The place of the plan to be tried first for a gradient of a weight; 0 for cuDNN's first,
        and for other steps."""
        newest, node = self.weight_gradients, gradient_of_weight(spec)
        if node is None or newest is None or not choices or choices[0].engine == newest:
            return 0
        channels = [spec.tensors[name].shape[1] for name in node.operands]
        if channels[1] <= self.few:
            places = (at for at, each in enumerate(choices) if each == self.of_few)
            return next(places, 0)
        if {*node.attr("stride")} != {1} or any(aligned(each) != each for each in channels):
            return 0
        return next((at for at, each in enumerate(choices) if each.engine == newest), 0)


@cache
def _model() -> Model:
    data: Any = json.loads((resources.files(__package__) / "tiles.json").read_text())
    return model_of(data)


def model_of(data: Mapping[str, Any]) -> Model:
    """A model as it is stored."""
    tiles = {}
    for engine, knobs, *rest in data["tiles"]:
        shape, cluster, us, error = rest
        tiles[_choice(engine, knobs)] = Tile(tuple(shape), tuple(cluster), tuple(us), error)
    named = {name: data[name] for name in ("largest_error", "gain", "weight_gradients", "few")}
    of_few = _choice(*data["of_few"])
    return Model(data["cudnn"], data["capability"], tiles, **named, of_few=of_few)


def _choice(engine: int, knobs: Sequence[Sequence[Any]]) -> Choice:
    """A plan as it is stored."""
    return Choice(engine, tuple((name, value) for name, value in knobs))


def model_for(cudnn: int, capability: int) -> Model | None:
    """What is known for a version of cuDNN (91900: any 9.19) and a compute capability (90: 9.0)."""
    found = _model()
    alike = found.cudnn // 100 == cudnn // 100 and found.capability == capability
    return found if alike else None
