"""Plans that cuDNN offers and that are wrong: data, with the reason and the source of each entry.

An entry names the releases, the GPUs and the engines that it applies to, and has a predicate that
picks out graphs. A plan that an entry names is rejected with its reason, like any candidate. Where
every plan of a pattern is wrong the lowering refuses the pattern instead (``lowering/``).

What is not known counts as wrong: an entry applies to every release and every GPU except those that
it excludes, and it excludes only what was measured to be right, or what the source of the report
excludes. The two mistakes do not cost the same. An entry that is too wide costs time, and tuning
finds the next best plan; one that is too narrow gives wrong numbers or ends the process. An
engine's id may stand for another kernel in another release, which is one more way to be too wide.
A measurement narrows an entry: tests/gpu/test_reported.py runs each with its plans let through.

New entries come from ``cudnngraph check --full``, which tries every engine on the GPU at hand.
What it finds is barred there at once (:mod:`~cudnngraph.backend.found_bad`); an entry here spares
others.

A record names its plan, and :func:`why_bad` is asked again when the record is loaded. So a new
entry reaches records that were kept before it, and no schema has to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec, is_channels_last, numel
from ..ops.table import OPS, tensor_at


@dataclass(frozen=True)
class KnownBad:
    """One entry: which plans are wrong, where, and how it is known.

    Attributes:
        applies: picks out the graphs.
        reason: what is wrong, for the message.
        source: where it was measured or who reported it.
        engines: engine ids; None: every engine, where the report names none.
        since: the first cuDNN release with the fault, 91900 is 9.19.0; None: not known.
        until: the first one without it; None: not known to be mended.
        gpus: compute capabilities that have it, 90 is 9.0; None: not known to depend on the GPU.
        measured: (release, compute capability) pairs on which this project saw it.
        tf32: True: only where TF32 is allowed, False: only where it is not; None: both.
    """

    applies: Callable[[GraphSpec], bool]
    reason: str
    source: str
    engines: frozenset[int] | None
    since: int | None = None
    until: int | None = None
    gpus: frozenset[int] | None = None
    measured: frozenset[tuple[int, int]] = frozenset()
    tf32: bool | None = None

    def covers(self, engine: int, cudnn_version: int, capability: int, allow_tf32: bool) -> bool:
        """Whether the entry is about this engine, on this release and GPU, with or without TF32."""
        return (
            (self.engines is None or engine in self.engines)
            and (self.since is None or self.since <= cudnn_version)
            and (self.until is None or cudnn_version < self.until)
            and (self.gpus is None or capability in self.gpus)
            and (self.tf32 is None or self.tf32 == allow_tf32)
        )


# Quirks of cuDNN: the ops that these name are those whose plans were seen to be wrong.


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
            or (node.op in ("sdpa", "sdpa_fp8") and tensor_at(node, "seq_len_kv") is not None)
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


def _multiplies_with_gaps(spec: GraphSpec) -> bool:
    """A matrix product with an input or output that leaves elements out between its own."""

    def has_gaps(tensor: TensorSpec) -> bool:
        distinct = numel(
            n for n, step in zip(tensor.shape, tensor.stride, strict=True) if step != 0
        )
        return tensor.extent > distinct

    return any(node.op == "matmul" for node in spec.nodes) and any(
        has_gaps(spec.tensors[name]) for name in (*spec.inputs, *spec.outputs)
    )


def _multiplies_then_computes(spec: GraphSpec) -> bool:
    """A matrix product with pointwise ops in its plan."""
    return any(node.op == "matmul" for node in spec.nodes) and any(
        OPS[node.op].pointwise for node in spec.nodes
    )


def _convolves_volumes(spec: GraphSpec, *dtypes: torch.dtype) -> bool:
    """A convolution in three dimensions of such data, with a kernel of more than one element."""
    for node in spec.nodes:
        if node.op not in ("conv", "conv_transpose", "conv_wgrad"):
            continue
        weight = node.results[0] if node.op == "conv_wgrad" else node.operands[1]
        shape = spec.tensors[weight].shape
        if len(shape) == 5 and numel(shape[2:]) > 1 and spec.tensors[weight].dtype in dtypes:
            return True
    return False


def _convolves_16_bit_volumes(spec: GraphSpec) -> bool:
    return _convolves_volumes(spec, torch.float16, torch.bfloat16)


def _convolves_float32_volumes(spec: GraphSpec) -> bool:
    return _convolves_volumes(spec, torch.float32)


# Seen on an H200 of compute capability 9.0 with cuDNN 9.19.0, the only release and architecture
# that this project has run on. No note or report of a later release says that one is mended.
_H200 = frozenset({(91900, 90)})

TABLE: tuple[KnownBad, ...] = (
    KnownBad(
        engines=frozenset({8}),
        applies=_convolves_into_another_layout,
        reason="engine 8 writes channels_last whatever the strides of the output are",
        source="seen on an H200 with cuDNN 9.19.0: relative error over 1, or NaN",
        measured=_H200,
    ),
    KnownBad(
        engines=frozenset({8}),
        applies=_computes_beside_a_convolution,
        reason="engine 8 gets a residual wrong that is changed before it is added",
        source="seen on an H200 with cuDNN 9.19.0: relative error over 0.1, or NaN",
        measured=_H200,
    ),
    KnownBad(
        engines=frozenset({2, 9}),
        applies=_attends_over_padding,
        reason="engines 2 and 9 multiply keys past a sequence's end by 0, so NaN there spreads, "
        "and write nothing for a sequence without keys",
        source="seen on an H200 with cuDNN 9.19.0. The second half is mended in 9.25 "
        "(cudnn-frontend#943), the first is not known to be",
        measured=_H200,
    ),
    KnownBad(
        engines=frozenset({0, 11, 52}),
        applies=_adds_two_scaled,
        reason="the engines of conv * a + z * b + bias take the factors for host scalars and crash",
        source="seen on an H200 with cuDNN 9.19.0: segmentation fault in execute",
        measured=_H200,
    ),
    KnownBad(
        engines=frozenset({0}),
        tf32=False,
        applies=_multiplies_float32_matrices,
        reason="engine 0 (cuBLASLt) multiplies float32 in TF32 and carries no note of it",
        source="seen on an H200 with cuDNN 9.19.0: relative error 3e-4",
        measured=_H200,
    ),
    KnownBad(
        engines=frozenset({0}),
        applies=_multiplies_then_bends,
        reason="engine 0 (cuBLASLt) makes a ReLU of a leaky and of a clipped one, and GELU by tanh "
        "of that by erf",
        source="seen on an H200 with cuDNN 9.19.0: relative error 0.2 for a slope of 0.2; 1e-4",
        measured=_H200,
    ),
    KnownBad(
        engines=frozenset({4}),
        applies=_broadcasts_beside_a_weight_gradient,
        reason="engine 4 for a gradient of weights reads what is broadcast from the wrong place",
        source="seen on an H200 with cuDNN 9.19.0: relative error over 0.1, or NaN",
        measured=_H200,
    ),
    KnownBad(
        engines=frozenset({0, 28}),
        applies=_convolves_int8_into_int32,
        reason="engines 0 and 28 of an int8 convolution by itself get its int32 sums wrong",
        source="seen on an H200 with cuDNN 9.19.0: every element, by a factor of 1e4 "
        "(as float32 read for int32 would be)",
        measured=_H200,
    ),
    KnownBad(
        since=91901,  # in 9.19.0 products have no engine of that id
        until=92400,
        engines=frozenset({11}),
        applies=_multiplies_with_gaps,
        reason="engine 11 of a matrix product takes operands with gaps for dense ones",
        source="NVIDIA, cudnn-frontend#442: mended in cuDNN 9.24.0",
    ),
    KnownBad(
        until=92301,
        gpus=frozenset({120}),
        engines=None,
        applies=_multiplies_then_computes,
        reason="generated kernels of a matrix product with pointwise ops read outside of their "
        "operands now and then, which ends the CUDA context",
        source="vllm#35566, by a core dump on an RTX PRO 6000 with cuDNN 9.19.0; mended in 9.23.1",
    ),
    KnownBad(
        since=90800,
        until=91500,
        engines=None,
        applies=_convolves_16_bit_volumes,
        reason="convolutions of large 16-bit volumes are wrong",
        source="pytorch#163539 and #166643: cuDNN 9.8 to 9.14, seen on Hopper",
    ),
    KnownBad(
        since=91002,
        until=91600,
        engines=None,
        tf32=True,
        applies=_convolves_float32_volumes,
        reason="a TF32 kernel for convolutions of volumes is broken, in cases that are not named",
        source="NVIDIA, pytorch#167024: cuDNN 9.10.2 to 9.15",
    ),
)


def why_bad(
    spec: GraphSpec,
    engine: int,
    cudnn_version: int,
    *,
    capability: int,
    allow_tf32: bool = False,
) -> str | None:
    """The reason why plans of ``engine`` must not be used for ``spec``, or None.

    ``capability`` is the GPU's compute capability, 90 for 9.0.
    """
    if all(OPS[node.op].pointwise for node in spec.nodes):
        return None
    for entry in TABLE:
        if entry.covers(engine, cudnn_version, capability, allow_tf32) and entry.applies(spec):
            return f"known to be wrong: {entry.reason}"
    return None
