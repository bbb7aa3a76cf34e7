"""Plans that cuDNN offers and that are wrong: data, with the reason and the source of each entry.

An entry applies to a range of cuDNN versions and to plans of certain engines, for graphs that its
predicate picks out. A plan that an entry names is rejected with its reason, like any candidate.
Where every plan of a pattern is wrong the lowering refuses the pattern instead (``lower.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..ir import GraphSpec, Node, is_channels_last, numel
from ..ops import OPS


@dataclass(frozen=True)
class KnownBad:
    """One entry, for cuDNN from ``since`` on and below ``until`` (None: not known to be mended)."""

    since: int
    until: int | None
    engines: frozenset[int]
    applies: Callable[[GraphSpec], bool]
    reason: str
    source: str
    with_tf32: bool = True  # also where TF32 is allowed


def _convolves_into_another_layout(spec: GraphSpec) -> bool:
    """A convolution whose data tensors do not all lie channels last, without gaps."""
    if all(node.op not in ("conv", "conv_transpose") for node in spec.nodes):
        return False
    rank = max(len(tensor.shape) for tensor in spec.tensors.values())
    data = (spec.tensors[name] for name in (*spec.inputs, *spec.outputs))
    return not all(
        is_channels_last(tensor.shape, tensor.stride)
        for tensor in data
        if len(tensor.shape) == rank
    )


def _computes_beside_a_convolution(spec: GraphSpec) -> bool:
    """A pointwise op on more than one number a channel, independent of the convolution."""
    after: set[str] = set()
    convolves = False
    for node in spec.nodes:
        if node.op in ("conv", "conv_transpose") or after & set(node.operands):
            convolves = convolves or not OPS[node.op].pointwise
            after |= set(node.results)
    return convolves and any(
        len(shape) > 1 and numel(shape) > shape[1]
        for node in spec.nodes
        if not after & set(node.results)
        for shape in (spec.tensors[name].shape for name in node.results)
    )


def _attends_over_padding(spec: GraphSpec) -> bool:
    """Attention with lengths of the keys, of which nothing is promised."""
    return any(
        (
            node.op in ("sdpa_paged", "sdpa_varlen")
            or (
                node.op in ("sdpa", "sdpa_fp8")
                and node.inputs[OPS[node.op].ports.index("seq_len_kv")] is not None
            )
        )
        and not dict(node.attrs).get("finite_padding", False)
        for node in spec.nodes
    )


def _multiplies_float32_matrices(spec: GraphSpec) -> bool:
    """A matrix product of float32 data."""
    return any(
        node.op == "matmul" and spec.tensors[node.operands[0]].dtype == torch.float32
        for node in spec.nodes
    )


def _multiplies_then_bends(spec: GraphSpec) -> bool:
    """A matrix product, and a leaky ReLU, a clamp that is no ReLU, or GELU in its plan."""
    bent = any(
        node.op in ("leaky_relu", "gelu")
        or (node.op == "clamp" and (node.attr("min"), node.attr("max")) != (0.0, None))
        for node in spec.nodes
    )
    return bent and any(node.op == "matmul" for node in spec.nodes)


def _broadcasts_beside_a_weight_gradient(spec: GraphSpec) -> bool:
    """The gradient of a convolution's weights with an operand that is repeated along some dims."""
    made = [spec.tensors[node.results[0]] for node in spec.nodes if node.op == "conv_wgrad"]
    return any(
        1 < spec.tensors[name].numel < gradient.numel
        for gradient in made
        for node in spec.nodes
        if OPS[node.op].pointwise
        for name in node.operands
    )


def _convolves_int8_into_int32(spec: GraphSpec) -> bool:
    """A convolution of int8 whose sums leave the plan as they are."""
    return any(
        node.op == "conv"
        and spec.tensors[node.operands[0]].dtype == torch.int8
        and node.results[0] in spec.outputs
        for node in spec.nodes
    )


def _adds_two_scaled(spec: GraphSpec) -> bool:
    """A convolution's result times something, plus another product."""
    producer = {name: node for node in spec.nodes for name in node.results}

    def product(name: str) -> Node | None:
        node = producer.get(name)
        return node if node is not None and node.op in ("mul", "scale") else None

    def of_convolution(node: Node) -> bool:
        sources = (producer.get(name) for name in node.operands)
        return any(source is not None and source.op == "conv" for source in sources)

    for node in spec.nodes:
        factors = [product(name) for name in node.operands] if node.op == "add" else [None]
        if all(factor is not None for factor in factors):
            return any(factor is not None and of_convolution(factor) for factor in factors)
    return False


TABLE: tuple[KnownBad, ...] = (
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({8}),
        applies=_convolves_into_another_layout,
        reason="engine 8 writes channels_last whatever the strides of the output are",
        source="seen on an H200 with cuDNN 9.19.0: relative error over 1, or NaN",
    ),
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({8}),
        applies=_computes_beside_a_convolution,
        reason="engine 8 gets a residual wrong that is changed before it is added",
        source="seen on an H200 with cuDNN 9.19.0: relative error over 0.1, or NaN",
    ),
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({2, 9}),
        applies=_attends_over_padding,
        reason="engines 2 and 9 multiply keys past a sequence's end by 0, so NaN there spreads, "
        "and write nothing for a sequence without keys",
        source="seen on an H200 with cuDNN 9.19.0; empty sequences also cudnn-frontend#943",
    ),
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({0, 11, 52}),
        applies=_adds_two_scaled,
        reason="the engines of conv * a + z * b + bias take the factors for host scalars and crash",
        source="seen on an H200 with cuDNN 9.19.0: segmentation fault in execute",
    ),
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({0}),
        with_tf32=False,
        applies=_multiplies_float32_matrices,
        reason="engine 0 (cuBLASLt) multiplies float32 in TF32 and carries no note of it",
        source="seen on an H200 with cuDNN 9.19.0: relative error 3e-4",
    ),
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({0}),
        applies=_multiplies_then_bends,
        reason="engine 0 (cuBLASLt) makes a ReLU of a leaky and of a clipped one, and GELU by tanh "
        "of that by erf",
        source="seen on an H200 with cuDNN 9.19.0: relative error 0.2 for a slope of 0.2; 1e-4",
    ),
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({4}),
        applies=_broadcasts_beside_a_weight_gradient,
        reason="engine 4 for a gradient of weights reads what is broadcast from the wrong place",
        source="seen on an H200 with cuDNN 9.19.0: relative error over 0.1, or NaN",
    ),
    KnownBad(
        since=91900,
        until=None,
        engines=frozenset({0, 28}),
        applies=_convolves_int8_into_int32,
        reason="engines 0 and 28 of an int8 convolution by itself get its int32 sums wrong",
        source="seen on an H200 with cuDNN 9.19.0: every element, by a factor of 1e4 "
        "(as float32 read for int32 would be)",
    ),
)


def why_bad(
    spec: GraphSpec, engine: int, cudnn_version: int, *, allow_tf32: bool = False
) -> str | None:
    """The reason why plans of ``engine`` must not be used for ``spec``, or None."""
    for entry in TABLE:
        if (
            entry.since <= cudnn_version
            and (entry.until is None or cudnn_version < entry.until)
            and engine in entry.engines
            and (entry.with_tf32 or not allow_tf32)
            and any(not OPS[node.op].pointwise for node in spec.nodes)
            and entry.applies(spec)
        ):
            return f"known to be wrong: {entry.reason}"
    return None
