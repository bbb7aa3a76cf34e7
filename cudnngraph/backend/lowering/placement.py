"""Place the dims of operands and results where cuDNN wants them, by the role of the port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...ir.spec import GraphSpec, Node, TensorSpec
from ...ops.base import LOW_PRECISION, Role
from ...ops.table import OPS, by_port, by_result, tensor_at
from .base import Refused, Shape


def cudnn_dims(spec: GraphSpec, name: str) -> tuple[Shape, Shape]:
    """Shape and stride of an input or output with its dims set out as its users take them."""
    tensor = spec.tensors[name]
    views: set[tuple[Shape, Shape]] = set()
    for node in spec.nodes:
        for port, operand in by_port(node).items():
            if operand != name:
                continue
            place = PLACEMENT.get(_role(OPS[node.op].roles, port, tensor))
            views.add(
                place(spec, node, tensor) if place else (_unexpanded(spec, tensor), tensor.stride)
            )
        if name in node.results:
            result = result_spec(spec, node, name)
            views.add((result.shape, result.stride))
    if len(views) > 1:
        raise Refused(f"'{name}' is used with its dims in two different places")
    return views.pop() if views else (tensor.shape, tensor.stride)


def _pad_sequences(
    spec: GraphSpec, node: Node, tensor: TensorSpec, keys: bool
) -> tuple[Shape, Shape]:
    """Shape and stride of packed tokens (T, H, D), or (T, H), as (B, H, longest, D)."""
    name = tensor_at(node, "ragged")
    if name is None:  # cutting gives offsets to 16-bit data, unless flash attention is to run
        if spec.tensors[str(tensor_at(node, "q"))].dtype in LOW_PRECISION:
            raise Refused("torch's flash attention is faster where nothing is promised")
        raise Refused("cuDNN attention takes float16 and bfloat16 only")
    batch = spec.tensors[name].shape[1] - 1
    longest = node.attr("max_seqlen_kv" if keys else "max_seqlen_q")
    _, heads, *rest = tensor.shape
    token, head, *steps = tensor.stride
    shape = (batch, heads, longest, *(rest or [1]))
    return shape, (longest * token, head, token, *(steps or [1]))


def _scale_place(spec: GraphSpec, node: Node, scale: TensorSpec) -> tuple[Shape, Shape]:
    """Shape and stride of a quantisation's scale: one for all of x, or along one of its dims."""
    rank = len(spec.tensors[str(node.inputs[0])].shape)
    if scale.numel == 1:
        return (1,) * rank, (1,) * rank
    return _place_dims(scale, (node.attr("dim"),), rank)


def _place_dims(tensor: TensorSpec, dims: Sequence[int], rank: int) -> tuple[Shape, Shape]:
    """Shape and stride with the tensor's dims at ``dims``, and ones elsewhere."""
    place = dict(zip(dims, zip(tensor.shape, tensor.stride, strict=True), strict=True))
    sizes, steps = zip(*(place.get(dim, (1, 1)) for dim in range(rank)), strict=True)
    return sizes, steps


def check_places(spec: GraphSpec) -> None:
    """Refuse what is computed with its dims in one place and used with them in another."""
    producer = {name: node for node in spec.nodes for name in node.results}
    for node in spec.nodes:
        for port, name in by_port(node).items():
            if name not in producer:
                continue
            shape = spec.tensors[name].shape
            made = result_spec(spec, producer[name], name).shape
            wanted: Shape = shape
            role = _role(OPS[node.op].roles, port, spec.tensors[name])
            if role in ("channels", "scale", "expanded"):
                wanted = PLACEMENT[role](spec, node, spec.tensors[name])[0]
            rank = max(len(made), len(wanted))
            if (1,) * (rank - len(made)) + tuple(made) != (1,) * (rank - len(wanted)) + tuple(
                wanted
            ):
                raise Refused(f"'{name}' is computed and used with its dims in different places")


def _unexpanded(spec: GraphSpec, tensor: TensorSpec) -> tuple[int, ...]:
    """The shape of a tensor; in a pointwise graph an expanded dim of an input counts as 1."""
    if tensor.name in spec.outputs or any(not OPS[node.op].pointwise for node in spec.nodes):
        return tensor.shape
    return tuple(1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride, strict=True))


def result_spec(spec: GraphSpec, node: Node, name: str) -> TensorSpec:
    """The tensor of a result with its dims where cuDNN wants them."""
    tensor = spec.tensors[name]
    port = next(port for port, made in by_result(node).items() if made == name)
    place = PLACEMENT.get(_role(OPS[node.op].result_roles, port, tensor))
    if place is None:
        return tensor
    shape, stride = place(spec, node, tensor)
    return TensorSpec(name, tuple(shape), tuple(stride), tensor.dtype)


def _role(roles: Mapping[str, Role], port: str, tensor: TensorSpec) -> Role | None:
    """The role of a port or result; None if the tensor there has the dims of the first result."""
    role = roles.get(port)
    return None if role == "channels" and len(tensor.shape) != 1 else role


def _along_channels(spec: GraphSpec, node: Node, tensor: TensorSpec) -> tuple[Shape, Shape]:
    tail = (1,) * (len(spec.tensors[str(node.inputs[0])].shape) - 2)
    return (1, *tensor.shape, *tail), (1, *tensor.stride, *tail)


def _left_by_reduction(spec: GraphSpec, node: Node, tensor: TensorSpec) -> tuple[Shape, Shape]:
    rank = len(spec.tensors[str(node.inputs[0])].shape)
    if not rank:
        return tensor.shape, tensor.stride
    keep, dims = node.attr("keepdim"), node.attr("dims")
    dropped = () if keep is True else tuple(d for d in dims if d not in (keep or ()))
    return _place_dims(tensor, [dim for dim in range(rank) if dim not in dropped], rank)


def _of_pages(spec: GraphSpec, node: Node, tensor: TensorSpec) -> tuple[Shape, Shape]:
    sequences, count = tensor.shape
    return (sequences, 1, count, 1), (tensor.stride[0], count, 1, 1)


Placed = Callable[[GraphSpec, Node, TensorSpec], tuple[Shape, Shape]]

#: Where cuDNN wants the dims of an operand or result, by the role of its port: shape and stride.
PLACEMENT: Mapping[Role | None, Placed] = {
    "channels": _along_channels,
    "scale": _scale_place,
    "expanded": lambda spec, node, t: _place_dims(t, node.attr("dims"), len(node.attr("shape"))),
    "lengths": lambda spec, node, t: ((*t.shape, 1, 1, 1), (*t.stride, 1, 1, 1)),
    "starts": lambda spec, node, t: ((t.shape[1] - 1, 1, 1, 1), (1, 1, 1, 1)),  # lengths of q
    "pages": _of_pages,
    "tokens_q": lambda spec, node, t: _pad_sequences(spec, node, t, False),
    "tokens_kv": lambda spec, node, t: _pad_sequences(spec, node, t, True),
    "heads": lambda spec, node, t: ((1, *t.shape, 1, 1), (*t.shape, *t.stride, 1, 1)),
    "row_stats": lambda spec, node, t: ((*t.shape, 1), (*t.stride, 1)),
    "scalar": lambda spec, node, t: ((1, 1, 1, 1), (1, 1, 1, 1)),
    "reduced": _left_by_reduction,
}
