"""Refuse ops, and combinations of neighbours, that cuDNN does not have or gets wrong.

Some ops are no part of a cuDNN plan; others cuDNN's engines take side by side and get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.spec import GraphSpec, Node, is_channels_last, is_contiguous, same_layout
from ...ops.table import OPS
from .base import Refused
from .context import Context
from .dims import DimMap, padded
from .pointwise import COMMUTATIVE

#: Ops of a graph that read inputs alone. With so many cuDNN 9.19 takes some seconds.
MOST_SOURCES = 13


def torch_only(ctx: Context | None, node: Node) -> Any:
    """An op that moves elements and computes nothing."""
    raise Refused(f"{node.op} is no part of a cuDNN plan: a torch step, or strides of a tensor")


def torchs_own(ctx: Context | None, node: Node) -> Any:
    """An op that only torch has."""
    raise Refused(f"{node.attr('overload')} is torch's own op, no part of a plan: a torch step")


def not_as_a_plan(ctx: Context | None, node: Node) -> Any:
    """cuDNN 9.19 on an H200: engine 0 adds up the gradients of weight and bias by a kernel on the
    default stream, whatever the handle's; engine 2 took longer than torch wherever it was tried."""
    raise Refused(f"{node.op}: cuDNN leaves the stream of the call, or is slower; a torch step")


def no_resample(ctx: Context | None, node: Node) -> Any:
    """Pooling and interpolation, which cuDNN has and its Python frontend has not."""
    why = f"{node.op}: cuDNN's Python frontend has no resampling; a torch step"
    raise Refused(why + ", or behind a ReLU cuDNN's older call" * (node.op == "max_pool"))


def no_softmax(ctx: Context | None, node: Node) -> Any:
    """By reductions and pointwise ops softmax passes over its data three times as often."""
    raise Refused(f"{node.op}: cuDNN's Python frontend has it in attention alone; a torch step")


def no_loss(ctx: Context | None, node: Node) -> Any:
    """Scores that are read at the index of a class."""
    raise Refused(f"{node.op}: cuDNN reads nothing at an index; a torch step")


def no_group_norm(ctx: Context | None, node: Node) -> Any:
    """cuDNN's norms are of channels or of rows; groups of images with channels last are neither."""
    raise Refused(f"{node.op}: cuDNN's norms have no groups of channels; a torch step")


def no_groups(ctx: Context | None, node: Node) -> Any:
    """The frontend's grouped products are kernels in Python of other packages, and none is here."""
    raise Refused(f"{node.op}: cuDNN has no products of groups of rows; a torch step")


REFUSALS: Sequence[Callable[[Context | None, Node], Any]] = (
    torch_only,
    torchs_own,
    not_as_a_plan,
    no_resample,
    no_softmax,
    no_loss,
    no_group_norm,
    no_groups,
)


def check_beside_norms(spec: GraphSpec, view: DimMap) -> None:
    """Refuse ops in a norm's plan that cuDNN's engines take and get wrong (seen on 9.19)."""
    ops = {node.op for node in spec.nodes}
    fused = [node for node in spec.nodes if OPS[node.op].pointwise and node.operands]
    # An RMS norm by a product, which is of three dims, is right in all of them.
    if "layer_norm" in ops or ("rms_norm" in ops and view.seen_rank > 3):
        _check_beside_rows(spec, fused)
    elif "batch_norm_train" in ops:
        _check_behind_batch_norm(spec, fused)


def _check_beside_rows(spec: GraphSpec, fused: Sequence[Node]) -> None:
    """Beside a norm of rows they leave their memory in an op that reads one tensor twice, or takes
    what the norm made behind a tensor of its size; of gradients in float32 the build crashes."""
    behind = {name for node in spec.nodes if not OPS[node.op].pointwise for name in node.results}
    for node in fused:
        first, *others = node.operands
        full = spec.tensors[first].numel == spec.tensors[node.results[0]].numel
        second = full and first not in behind and not behind.isdisjoint(others)
        if not behind.isdisjoint(node.operands):
            behind.update(node.results)
        if len({*node.operands}) < len(node.operands):
            raise Refused(f"{node.op} of a tensor and itself, where cuDNN crashes beside a norm")
        if second and not (node.op in COMMUTATIVE and first in spec.inputs):
            raise Refused(
                f"{node.op} with the norm's result second: cuDNN does not take it, or crashes"
            )
        if OPS[node.op].has("activation_gradient"):
            raise Refused(f"{node.op} beside a norm: cuDNN does not take it, or crashes")


def check_beside_attention(spec: GraphSpec) -> None:
    """Refuse pointwise ops behind attention that write across its rows.

    If the attention is causal, cuDNN 9.19 crashes as it looks for plans.
    """
    if len(spec.nodes) < 2 or not any(OPS[node.op].has("attention") for node in spec.nodes):
        return
    for name in (node.results[0] for node in spec.nodes if OPS[node.op].pointwise):
        made = spec.tensors[name]
        if name in spec.outputs and made.shape and made.stride[-1] != 1 < made.shape[-1]:
            raise Refused(f"'{name}' lies across the rows of attention, where cuDNN crashes")


def check_sources(spec: GraphSpec) -> None:
    """Refuse a graph in which many ops read nothing but inputs.

    cuDNN 9.19 goes through their combinations: with each more it takes far longer, and of many
    it asks for more memory than there is.
    """
    made = {name for name in spec.inputs if spec.tensors[name].dtype == torch.bool}
    sources = len(made)  # a bool is compared first, by an op
    for node in spec.nodes:
        if node.op != "constant":
            sources += made.isdisjoint(node.operands)
            made.update(node.results)
    if sources > MOST_SOURCES:
        what = f"{sources} ops read inputs alone, whose combinations cuDNN goes through"
        raise Refused(f"{what}; at most {MOST_SOURCES} are shown to it")


def _check_behind_batch_norm(spec: GraphSpec, fused: Sequence[Node]) -> None:
    """Refuse operands behind a batch norm unless they have the images' shape and layout.

    cuDNN reads all others wrongly.
    """
    for node in fused:
        made = spec.tensors[node.results[0]]
        given = [spec.tensors[name] for name in node.operands]
        if any(x.numel < made.numel for x in given):
            raise Refused("what broadcasts behind a batch norm, which cuDNN gets wrong")
        places = [padded(x.shape, x.stride, len(made.shape)) for x in given]
        if not all(same_layout(made.shape, stride, made.stride) for _, stride in places):
            raise Refused("what lies otherwise than the images behind a batch norm")


@dataclass(frozen=True)
class _Repeat:
    """An operand that a pointwise op in a plan repeats along some of its result's dims."""

    name: str
    dims: frozenset[int]  # along which it is repeated
    real: frozenset[int]  # of the result, of more than one element
    given: bool  # it is read from memory, not computed in the plan
    text: str


def _repeats(ctx: Context) -> Iterator[_Repeat]:
    """Every operand that is repeated along some dims and not along others, as cuDNN sees them."""
    for node in ctx.spec.nodes:
        if not OPS[node.op].pointwise or node.results[0] in ctx.as_is:
            continue
        made = ctx.values[node.results[0]].get_dim()
        real = frozenset(dim for dim, extent in enumerate(made) if extent > 1)
        for name in node.operands:
            seen = ctx.values[name].get_dim()
            dims = frozenset(dim for dim in real if seen[dim] == 1)
            if dims and dims != real:
                given = name in ctx.spec.inputs and ctx.spec.tensors[name].dtype != torch.bool
                yield _Repeat(name, dims, real, given, f"'{name}' of {seen} is {{}}over {made}")


def check_beside_products(ctx: Context) -> None:
    """Refuse a column that a plan computes and that all of a batch of products share.

    It was read from the wrong place (seen on 9.19); one as large as a product, and a row, were not.
    """
    if all(node.op != "matmul" for node in ctx.spec.nodes):
        return
    for each in _repeats(ctx):
        if not each.given and each.dims >= {0, 2}:
            what = each.text.format("computed and repeated ")
            raise Refused(f"{what} beside a product, which cuDNN gets wrong")


def check_beside_convolutions(ctx: Context) -> None:
    """Refuse operands that cuDNN's engines repeat wrongly beside a convolution.

    They read them from the wrong place, or from an address that faults (seen on 9.19, whatever
    strides they are given). Right is what is as large as the result, one number a channel, one
    number for all, and behind a forward convolution one number a pixel, unless the plan itself
    computes it.
    """
    spec = ctx.spec
    ops = {node.op for node in spec.nodes if OPS[node.op].has("convolution")}
    if not ops:
        return
    fuses = any(OPS[node.op].pointwise and node.operands for node in spec.nodes)
    if fuses and any(_mistakes_the_weight(spec, node) for node in spec.nodes if node.op in ops):
        raise Refused(
            "images of one pixel beside a weight that is not channels_last, which the engines that "
            "fuse read as if it were"
        )
    for each in _repeats(ctx):
        pixel = each.dims == {1} and each.given and "conv_transpose" not in ops
        if each.dims != each.real - {1} and not pixel:
            what = each.text.format("repeated ")
            raise Refused(f"{what} beside a convolution, which cuDNN gets wrong")


def _mistakes_the_weight(spec: GraphSpec, node: Node) -> bool:
    """Whether a convolution's images lie both ways at once, so that only its weight tells how."""
    x, weight = (spec.tensors[name] for name in node.operands)
    images = (x, spec.tensors[node.results[0]])
    return not is_channels_last(weight.shape, weight.stride) and all(
        is_channels_last(shape, stride) and is_contiguous(shape, stride)
        for shape, stride in ((image.shape, image.stride) for image in images)
    )
