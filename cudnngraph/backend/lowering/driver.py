"""The lowering itself: a GraphSpec becomes a graph of the cuDNN frontend, one rule per op.

Nothing is left to the frontend's inference: every tensor, virtual ones included, gets its dims,
strides and dtype here, and every graph input and output an explicit uid, in the order in which the
runtime passes pointers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...device.rules import following
from ...errors import NotSupported
from ...ir.spec import GraphSpec, Node
from ...ops import pooling
from ...ops.base import FP8
from ...ops.infer import check_node
from ...ops.table import by_port
from ...rewrite.annotate import marks
from .. import handles
from .attention import sdpa, sdpa_backward, sdpa_fp8, sdpa_paged, sdpa_varlen, sdpa_varlen_backward
from .base import Refused
from .casts import without_casts
from .context import Context, Extra, Rule, dtypes
from .conv import conv_wgrad, convolution
from .dims import view_of
from .matmul import matmul
from .norm import (
    batch_norm,
    batch_norm_apply,
    batch_norm_backward,
    batch_norm_train,
    norm,
    norm_backward,
    normalize,
    rms_norm,
)
from .placement import check_places, cudnn_dims, result_spec
from .pointwise import (
    COMMUTATIVE,
    call,
    clamp,
    commutative,
    dequantize,
    elu,
    expand,
    gelu,
    gelu_tanh,
    gelu_tanh_backward,
    leaky_relu,
    logical,
    mish,
    quantize,
    reduction,
    relu_backward,
    softplus,
    where,
)
from .refusals import (
    REFUSALS,
    check_beside_attention,
    check_beside_convolutions,
    check_beside_norms,
    check_beside_products,
    check_sources,
    no_group_norm,
    no_groups,
    no_loss,
    no_resample,
    no_softmax,
    not_as_a_plan,
    torch_only,
    torchs_own,
)

FP8_CAPABILITY = (8, 9)


@dataclass
class Lowered:
    """A frontend graph ready for planning.

    ``uids`` are those of the spec's inputs and outputs, in that order, ascending; ``extras``
    follow.
    """

    graph: Any
    uids: tuple[int, ...]
    extras: tuple[Extra, ...]

    def __del__(self) -> None:
        handles.let_go(self.graph)


RULES: Mapping[str, Rule] = {
    "conv": convolution(transposed=False),
    "conv_transpose": convolution(transposed=True),
    "conv_wgrad": conv_wgrad,
    "matmul": matmul,
    "grouped_matmul": no_groups,
    "grouped_matmul_wgrad": no_groups,
    "layer_norm": norm("layernorm"),
    "rms_norm": rms_norm,
    "normalize": normalize,
    "layer_norm_backward": norm_backward("layernorm_backward"),
    "rms_norm_backward": norm_backward("rmsnorm_backward"),
    "sdpa": sdpa,
    "sdpa_fp8": sdpa_fp8,
    "sdpa_backward": sdpa_backward,
    "sdpa_paged": sdpa_paged,
    "sdpa_varlen": sdpa_varlen,
    "sdpa_varlen_backward": sdpa_varlen_backward,
    "ragged_offsets": torch_only,
    "batch_norm_train": batch_norm_train,
    "batch_norm_backward": batch_norm_backward,
    "instance_norm": norm("instancenorm"),
    "instance_norm_backward": not_as_a_plan,
    "group_affine": no_group_norm,
    "reduction": reduction,
    "expand": expand,
    "batch_norm": batch_norm,
    "batch_norm_apply": batch_norm_apply,
    "dequantize": dequantize,
    "quantize": quantize,
    "bias": call("bias"),
    "scale": call("scale"),
    "relu": call("relu"),
    "leaky_relu": leaky_relu,
    "elu": elu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": call("swish"),
    "sigmoid": call("sigmoid"),
    "tanh": call("tanh"),
    "softplus": softplus,
    "mish": mish,
    "clamp": clamp,
    "relu_backward": relu_backward,
    "gelu_backward": call("gelu_backward"),
    "gelu_tanh_backward": gelu_tanh_backward,
    "silu_backward": call("swish_backward"),
    "identity": call("identity"),
    "cast": call("identity"),
    "to_float": call("identity"),
    "neg": call("neg"),
    "abs": call("abs"),
    "exp": call("exp"),
    "log": call("log"),
    "sqrt": call("sqrt"),
    "rsqrt": call("rsqrt"),
    "reciprocal": call("reciprocal"),
    "erf": call("erf"),
    **{op: commutative(method) for op, method in COMMUTATIVE.items()},
    "sub": call("sub"),
    "div": call("div"),
    "pow": call("pow"),
    "eq": call("cmp_eq"),
    "ne": call("cmp_neq"),
    "lt": call("cmp_lt"),
    "le": call("cmp_le"),
    "gt": call("cmp_gt"),
    "ge": call("cmp_ge"),
    "logical_and": logical("logical_and"),
    "logical_or": logical("logical_or"),
    "logical_not": logical("logical_not"),
    "where": where,
    "constant": lambda ctx, node: ctx.scalar(node.attr("value")),
    "reshape": torch_only,
    "transpose": torch_only,
    "permute": torch_only,
    "slice": torch_only,
    "concat": torch_only,
    "aten": torchs_own,
    **{name: no_resample for name in pooling.RULES},
    **{
        f"{name}{suffix}": refuse
        for name, refuse in (
            ("softmax", no_softmax),
            ("log_softmax", no_softmax),
            ("nll_loss", no_loss),
        )
        for suffix in ("", "_backward")
    },
}


def lower(spec: GraphSpec, frontend: Any, **graph_options: Any) -> Lowered:
    """Build the frontend's graph for ``spec`` and validate it.

    ``graph_options`` go to the frontend's graph: ``handle=`` on a GPU, ``device_property=`` and
    ``sm_version=`` without one. Raises :class:`NotSupported` where no rule applies or cuDNN's own
    validation refuses.
    """
    with following(marks(spec)):
        return _lowered(without_casts(spec), frontend, graph_options)


def _lowered(spec: GraphSpec, frontend: Any, graph_options: dict[str, Any]) -> Lowered:
    for name, tensor in spec.tensors.items():
        if tensor.dtype not in dtypes(frontend):
            raise NotSupported(
                f"graph '{spec.name}'",
                [f"'{name}' is {tensor.dtype}, which cuDNN graphs do not take"],
            )
    if any(tensor.dtype in FP8 for tensor in spec.tensors.values()):
        major, minor = divmod(graph_options.get("sm_version") or _capability(), 10)
        if (major, minor) < FP8_CAPABILITY:
            reason = f"FP8 needs compute capability 8.9 or higher, this GPU has {major}.{minor}"
            raise NotSupported(f"graph '{spec.name}'", [f"{reason}; declare float16 data"])
    graph = frontend.pygraph(
        name=spec.name,
        io_data_type=frontend.data_type.FLOAT,
        intermediate_data_type=frontend.data_type.FLOAT,
        compute_data_type=frontend.data_type.FLOAT,
        **graph_options,
    )
    try:
        check_places(spec)
        for node in spec.nodes:
            for refuse in REFUSALS:
                if RULES[node.op] is refuse:
                    refuse(None, node)
        ctx = Context(frontend, graph, spec, view_of(spec))
        check_beside_norms(spec, ctx.view)
        check_beside_attention(spec)
        check_sources(spec)
        for uid, name in enumerate(spec.inputs, 1):
            dims, strides = ctx.view.dims(*cudnn_dims(spec, name))
            kind = spec.tensors[name].dtype
            tensor = graph.tensor(
                dim=dims,
                stride=strides,
                data_type=ctx.dtype(torch.int8 if kind == torch.bool else kind),
                uid=uid,
                name=name,
            )
            if kind == torch.bool:  # cuDNN packs real bools 8 to a byte, torch does not
                tensor = graph.cmp_gt(tensor, ctx.scalar(0.5))
                ctx.virtual(tensor, spec.tensors[name])
            ctx.values[name] = tensor
        wanted = {name for node in spec.nodes for name in node.operands} | set(spec.outputs)
        for node in spec.nodes:
            result = RULES[node.op](ctx, node)
            results = result if isinstance(result, (tuple, list)) else (result,)
            for port, (result_name, tensor) in enumerate(zip(node.outputs, results, strict=False)):
                if result_name is None:
                    continue
                ctx.values[result_name] = tensor
                if node.op == "constant" or result_name in ctx.as_is:
                    continue
                declared = result_spec(spec, node, result_name)
                if len(node.outputs) > 1 and result_name not in wanted:
                    ctx.discard(tensor, replace(declared, dtype=_own_dtype(spec, node, port)))
                else:
                    ctx.declare(tensor, declared)
        for uid, name in enumerate(spec.outputs, len(spec.inputs) + 1):
            tensor = ctx.values[name]
            if spec.tensors[name].dtype == torch.bool:
                ctx.virtual(tensor, spec.tensors[name])
                tensor = graph.binary_select(ctx.scalar(1.0), ctx.scalar(0.0), tensor)
                ctx.declare(tensor, replace(spec.tensors[name], dtype=torch.int8))
            tensor.set_output(True).set_uid(uid)
        check_beside_convolutions(ctx)
        check_beside_products(ctx)
        graph.validate()
        graph.build_operation_graph()
    except Refused as refused:
        raise NotSupported(f"graph '{spec.name}'", [str(refused)]) from None
    except (frontend.cudnnGraphNotSupportedError, RuntimeError) as error:
        raise NotSupported(f"graph '{spec.name}'", [first_line(str(error))], str(error)) from None
    total = len(spec.inputs) + len(spec.outputs)
    return Lowered(graph, tuple(range(1, total + 1)), tuple(ctx.extras))


def _capability() -> int:
    """Return the compute capability of the current GPU, as 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _own_dtype(spec: GraphSpec, node: Node, port: int) -> torch.dtype:
    """The dtype that a result has of itself, whatever it is kept in."""
    operands = {
        name: None if operand is None else spec.tensors[operand]
        for name, operand in by_port(node).items()
    }
    result = check_node(node.op, node.name, operands, dict(node.attrs)).results[port]
    return spec.tensors[str(node.outputs[port])].dtype if result is None else result.dtype


def first_line(message: str) -> str:
    """The sentence of a library message that says something."""
    for line in message.splitlines():
        text = line.strip(" _\t")
        if text:
            return text[:300]
    return "no reason given"
