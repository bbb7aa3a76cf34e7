"""Torch steps on a GPU: an op as eager torch runs it, writing into the tensor that it is given.

The rules of :mod:`~cudnngraph.executor.reference` say what an op means; they compute in float32.
Here an op on 16-bit data runs in 16 bits, where torch's own kernels do the arithmetic in float32
all the same, and through torch's out variant where it has one. What has neither is left to the
reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from ..backend import legacy_pooling
from ..device import tf32
from ..device.allocation import outside_graph_pool
from ..device.rules import DeviceRules, following, rules
from ..ir.spec import ALIGNMENT_BYTES, GraphSpec, Node, view_strides
from ..ops import aten
from ..ops import pooling as resample
from ..ops.attention.packed import ragged_into
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS
from ..rewrite.annotate import BOUNDED, marks
from ..rewrite.packed import prefers_flash
from . import reference
from .copies import concatenated, copied, form_of, roll_shifts, rolled
from .grouped import run_grouped
from .linear import run_linear

Tensors = Sequence[torch.Tensor]
Run = Callable[[Tensors, Tensors], object]
OutRule = Callable[[Sequence[Any], Mapping[str, Any], torch.Tensor], object]

_aten: Any = torch.ops.aten


def _out(function: Callable[..., object]) -> OutRule:
    return lambda inputs, attrs, out: function(*inputs, out=out)


def _per_channel(function: Callable[..., object]) -> OutRule:
    def run(inputs: Sequence[Any], attrs: Mapping[str, Any], out: torch.Tensor) -> object:
        x, vector = inputs
        if vector.dim() == 1:
            vector = vector.view(1, -1, *(1,) * (x.dim() - 2))
        return function(x, vector, out=out)

    return run


def _softmax(function: Any) -> OutRule:
    def run(inputs: Sequence[Any], attrs: Mapping[str, Any], out: torch.Tensor) -> object:
        (x,) = inputs
        if x.is_contiguous() and out.is_contiguous():
            return function.out(x, attrs["dim"], False, out=out)
        return out.copy_(function(x, attrs["dim"], False))

    return run


def _softmax_backward(function: Any) -> OutRule:
    def run(inputs: Sequence[Any], attrs: Mapping[str, Any], out: torch.Tensor) -> object:
        dy, y = inputs
        return out.copy_(function(dy, y, attrs["dim"], y.dtype))

    return run


def _gelu(x: torch.Tensor, out: torch.Tensor) -> object:
    """torch's CPU kernel (2.13) leaves ``out`` as it was where that lies otherwise than x."""
    if out.device.type == "cpu" and form_of(x) != form_of(out):
        return out.copy_(F.gelu(x))
    return _aten.gelu.out(x, approximate="none", out=out)


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
    """torch takes matrices that share the second operand as one, and ``out`` then has to lie so.

    A batch of one is shared too, and a has to lie so then: with strides (512, 1, 64), (2, 64, 8) by
    (1, 8, 32) raises on a GPU.
    """
    shared = a.shape[:-2] != b.shape[:-2]
    lies = out.is_contiguous() and (a.is_contiguous() or a.dim() != b.dim())
    if shared and not lies:
        return out.copy_(torch.matmul(a, b))
    return torch.matmul(a, b, out=out)


def _normalize(x: torch.Tensor, eps: float, out: torch.Tensor) -> object:
    """With norms in float32 at least: in float16 torch's eps is 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.div(x, norms.clamp_min_(eps), out=out)


OUT: Mapping[str, OutRule] = {
    "softmax": _softmax(_aten._softmax),
    "log_softmax": _softmax(_aten._log_softmax),
    "softmax_backward": _softmax_backward(_aten._softmax_backward_data),
    "log_softmax_backward": _softmax_backward(_aten._log_softmax_backward_data),
    "ragged_offsets": ragged_into,
    "identity": lambda inputs, attrs, out: copied(inputs[0], out),
    "cast": lambda inputs, attrs, out: copied(inputs[0], out),
    "bias": _per_channel(torch.add),
    "scale": _per_channel(torch.mul),
    "relu": lambda inputs, attrs, out: torch.clamp_min(inputs[0], 0, out=out),
    "leaky_relu": lambda inputs, attrs, out: _aten.leaky_relu.out(
        inputs[0], attrs["negative_slope"], out=out
    ),
    "elu": lambda inputs, attrs, out: _aten.elu.out(inputs[0], attrs["alpha"], out=out),
    "gelu": lambda inputs, attrs, out: _gelu(inputs[0], out),
    "gelu_tanh": lambda inputs, attrs, out: _aten.gelu.out(inputs[0], approximate="tanh", out=out),
    "expand": lambda inputs, attrs, out: out.copy_(
        reference.RULES["expand"](inputs, attrs)  # type: ignore[arg-type]
    ),
    "normalize": lambda inputs, attrs, out: _normalize(inputs[0], attrs["eps"], out),
    "concat": lambda inputs, attrs, out: concatenated(inputs, attrs["dim"], out),
    "silu": lambda inputs, attrs, out: _aten.silu.out(inputs[0], out=out),
    "mish": lambda inputs, attrs, out: _aten.mish.out(inputs[0], out=out),
    "clamp": lambda inputs, attrs, out: torch.clamp(inputs[0], attrs["min"], attrs["max"], out=out),
    "matmul": lambda inputs, attrs, out: _matmul(inputs[0], inputs[1], out),
    **resample.INTO,
    **{
        name: _out(getattr(torch, name))
        for name in (
            *("sigmoid", "tanh", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf"),
            *("add", "sub", "mul", "div", "pow", "minimum", "maximum"),
            *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        )
    },
}

# Without an out variant, but better run in 16 bits than in float32.
NATIVE: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], torch.Tensor]] = {
    "conv": reference.RULES["conv"],  # type: ignore[dict-item]
    "conv_transpose": reference.RULES["conv_transpose"],  # type: ignore[dict-item]
    "reduction": reference.RULES["reduction"],  # type: ignore[dict-item]
    "instance_norm": lambda inputs, attrs: F.instance_norm(
        inputs[0], weight=_vector(inputs[1]), bias=_vector(inputs[2]), eps=attrs["eps"]
    ),
    "layer_norm": lambda inputs, attrs: F.layer_norm(
        inputs[0], inputs[1].shape, inputs[1], inputs[2], attrs["eps"]
    ),
    "rms_norm": lambda inputs, attrs: _plus(
        F.rms_norm(inputs[0], inputs[1].shape, inputs[1], attrs["eps"]), inputs[2]
    ),
    "nll_loss": reference.RULES["nll_loss"],  # type: ignore[dict-item]
    "nll_loss_backward": reference.RULES["nll_loss_backward"],  # type: ignore[dict-item]
    **{op: rule for op, rule in resample.RULES.items() if op not in resample.INTO},
}


def _vector(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.flatten()


def _plus(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias


# A quirk of torch: these write another floating dtype than they read; the others' out variants
# refuse.
_CASTS = frozenset(
    (
        *("bias", "scale", "add", "sub", "mul", "div", "pow", "minimum", "maximum", "normalize"),
        *("sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf"),
        *("concat", "expand"),
    )
)


def prepare(
    spec: GraphSpec, *, allow_tf32: bool, device: torch.device
) -> Callable[[Tensors, Tensors], None]:
    """Return a function that runs ``spec`` from inputs into outputs, on the current stream."""
    with following(marks(spec)):
        run = _single(spec, device)
    run = run or (lambda inputs, outputs: reference.run_into(spec, inputs, outputs))
    tensors = spec.tensors.values()
    if any(OPS[node.op].has("multiplies") for node in spec.nodes) and any(
        tensor.dtype == torch.float32 for tensor in tensors
    ):
        return lambda inputs, outputs: _in_precision(run, inputs, outputs, allow_tf32)

    def quietly(inputs: Tensors, outputs: Tensors) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                run(inputs, outputs)
        else:
            run(inputs, outputs)

    return quietly


def _run_aten(spec: GraphSpec, node: Node) -> Run:
    """An op of torch; into the given tensors where those are as torch would make them, since out
    variants of images take no other strides."""
    attrs = dict(node.attrs)
    operands = [spec.inputs.index(name) for name in node.operands]
    like, wanted = (_alike(spec, names) for names in (node.operands, spec.outputs))
    made = aten.forms(attrs, like)
    turns = roll_shifts(attrs, like[0].dim()) if attrs["overload"] == "aten.roll.default" else None
    if turns is not None:
        return lambda inputs, outputs: rolled(inputs[operands[0]], turns, outputs[0])
    place = {name: at for at, name in enumerate(spec.outputs)}
    places = [place.get(str(name)) for name in (*node.outputs, *made)][: len(made)]
    found = aten.out_variant(attrs["overload"])
    fits = found is not None and all(
        result is not None and (at is None or form_of(wanted[at]) == form_of(result))
        for at, result in zip(places, made, strict=True)
    )
    if found is None or not fits:
        plain = aten.overload(attrs["overload"])

        def compute(inputs: Tensors, outputs: Tensors) -> None:
            results = aten.call(plain, attrs, [inputs[at] for at in operands])
            for at, result in zip(places, results, strict=True):
                if at is not None:
                    outputs[at].copy_(result)

        return compute
    function, names = found

    def run(inputs: Tensors, outputs: Tensors) -> object:
        given = [inputs[at] for at in operands]
        outs = {
            name: torch.empty_strided(
                unasked.shape, unasked.stride(), dtype=unasked.dtype, device=given[0].device
            )
            if at is None
            else outputs[at]
            for name, at, unasked in zip(names, places, made, strict=True)
        }
        return aten.call(function, attrs, given, **outs)

    return run


def _run_instance_norm_backward(spec: GraphSpec, node: Node, device: torch.device) -> Run | None:
    """By torch's batch norm of several GPUs, for which each image's channels are channels of one.

    On float32: of 16-bit images torch's kernels round products and partial sums to 16 bits (its
    ``Float2`` in Normalization.cuh), which puts the sums off by 3e-4 (fp16) and 4e-3 (bf16) on an
    H200. None on a CPU, which has no such kernels, and for empty images.
    """
    n, c, *pixels = spec.tensors[node.operands[0]].shape
    if device.type != "cuda" or n * c * math.prod(pixels) == 0:
        return None
    operands = [spec.inputs.index(name) for name in node.operands]
    place = {name: at for at, name in enumerate(spec.outputs)}
    places = [None if name is None else place.get(name) for name in node.outputs]
    count = _number(float(math.prod(pixels)).hex(), device, torch.int32).view(1)

    def run(inputs: Tensors, outputs: Tensors) -> None:
        dy, x, mean, inv_std, *vector = (inputs[at] for at in operands)
        images = (
            each.to(mean.dtype, memory_format=torch.contiguous_format).reshape(1, n * c, *pixels)
            for each in (dy, x)
        )
        weight = vector[0].reshape(c).to(mean.dtype).repeat(n) if vector else None
        given = (*images, mean.reshape(-1), inv_std.reshape(-1), weight)
        sum_dy, sum_dy_xmu, dweight, dbias = _aten.batch_norm_backward_reduce(
            *given, True, bool(vector), bool(vector)
        )
        dx = _aten.batch_norm_backward_elemt(*given, sum_dy, sum_dy_xmu, count)
        vectors = (each.view(n, c).sum(0) for each in (dweight, dbias) if vector)
        for at, result in zip(places, (dx, *vectors), strict=False):
            if at is not None:
                outputs[at].copy_(result.reshape(outputs[at].shape))

    return run


FLASH_CAPABILITY = (8, 0)


def _run_packed(spec: GraphSpec, node: Node, device: torch.device) -> Run | None:
    """Packed attention by torch's flash attention; None if :func:`prefers_flash` says no, or if the
    GPU is too old for it."""
    kinds = {spec.tensors[str(name)].dtype for name in node.inputs[:3]}
    narrow = len(kinds) == 1 and kinds <= {*LOW_PRECISION}
    if device.type != "cuda" or not narrow or not prefers_flash(node, spec.tensors):
        return None
    if torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return None
    operands = [spec.inputs.index(str(name)) for name in node.inputs[:5]]
    place = {name: at for at, name in enumerate(spec.outputs)}
    places = [None if name is None else place.get(name) for name in node.outputs]
    left, right = node.attr("window") or (None, None)
    band = {
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
    }
    longest = node.attr("max_seqlen_q"), node.attr("max_seqlen_kv")
    causal, scale = node.attr("is_causal"), node.attr("scale")

    def run(inputs: Tensors, outputs: Tensors) -> None:
        given = [inputs[at] for at in operands]
        whole = torch.contiguous_format
        data = (
            x.clone(memory_format=whole) if x.data_ptr() % ALIGNMENT_BYTES else x for x in given[:3]
        )
        given = [*data, *(ends.contiguous() for ends in given[3:])]
        o, lse, *_ = _aten._flash_attention_forward(
            *given, *longest, 0.0, causal, False, scale=scale, **band
        )
        if places[0] is not None:
            outputs[places[0]].copy_(o)
        if places[1] is not None:
            # Its lse of a row without a key, and of one of NaN, is inf; o is 0 there, or NaN.
            lse = lse.t()
            outputs[places[1]].copy_(torch.where(lse == math.inf, o[..., 0] - math.inf, lse))

    return run


def _run_group_affine(spec: GraphSpec, node: Node, device: torch.device) -> Run | None:
    """By torch's means and deviations of channels, which read 16-bit images as they lie and give
    float32. None for empty images, and for float64, of which the reference is as good.

    The mean and the variance of a group are those of its channels' mean + deviation and mean -
    deviation: numbers of which torch's layer norm has them in one kernel.
    """
    x = spec.tensors[node.operands[0]]
    if x.numel == 0 or x.dtype == torch.float64:
        return None
    place = {name: at for at, name in enumerate(spec.outputs)}
    shift_at, factor_at = (None if name is None else place.get(name) for name in node.outputs)
    operands = [None if name is None else spec.inputs.index(name) for name in node.inputs]
    groups, eps = node.attr("num_groups"), node.attr("eps")
    signs, measured = _signs(device), rules()

    def run(inputs: Tensors, outputs: Tensors) -> None:
        x, weight = (None if at is None else inputs[at] for at in operands)
        assert x is not None
        rows = _by_channel(x, groups, measured)
        means = torch.mean(rows, 1, dtype=torch.float32)
        deviations = _aten.std.correction_out(rows, [1], correction=0, out=torch.empty_like(means))
        n, parts, _, width = means.shape
        points = means.new_empty(n, groups, 2, parts, width)
        torch.addcmul(means, signs, deviations, out=points.permute(2, 0, 3, 1, 4))
        _, mean, inverse = _aten.native_layer_norm(points, points.shape[2:], None, None, eps)
        if shift_at is not None:
            shift = outputs[shift_at].view(n, groups, width)
            torch.mul(mean.view(n, groups, 1).expand_as(shift), -1.0, out=shift)
        if factor_at is not None:
            factor, inverse = outputs[factor_at].view(n, groups, width), inverse.view(n, groups, 1)
            if weight is None:
                factor.copy_(inverse.expand_as(factor))
            else:
                torch.mul(inverse, weight.view(groups, width), out=factor)

    return run


def _by_channel(x: torch.Tensor, groups: int, measured: DeviceRules) -> torch.Tensor:
    """Images as (N, rows, parts, groups, channels of a group), whose rows are to be reduced: every
    channel in so many parts as make it fast. By hand on an H200, 67 MB of 128 channels: mean and
    deviation take 544 us in one part, 83 us in 64 parts."""
    n, c, *size = x.shape
    last = x.movedim(1, -1)
    if not last.is_contiguous():
        return x.reshape(n, c, -1).transpose(1, 2).view(n, -1, 1, groups, c // groups)
    pixels, parts = math.prod(size), 1
    most, fewest = measured.reduction_max_parts, measured.reduction_min_rows
    while 2 * parts <= most and pixels % (2 * parts * fewest) == 0:
        parts *= 2
    return last.view(n, pixels // parts, parts, groups, c // groups)


def _alike(spec: GraphSpec, names: Sequence[str]) -> list[torch.Tensor]:
    """Tensors without memory, as those of ``names`` are."""
    return [spec.tensors[name].empty("meta") for name in names]


def launcher(
    spec: GraphSpec, inputs: Tensors, outputs: Tensors, *, allow_tf32: bool
) -> Callable[[], None]:
    """Return a function that runs ``spec`` on these ``inputs`` into these ``outputs``."""
    device = outputs[0].device
    return partial(prepare(spec, allow_tf32=allow_tf32, device=device), inputs, outputs)


def _in_precision(run: Run, inputs: Tensors, outputs: Tensors, allow_tf32: bool) -> None:
    with torch.no_grad(), tf32.scope(allow_tf32):
        run(inputs, outputs)


def _single(spec: GraphSpec, device: torch.device) -> Run | None:
    """A graph of one op (and its constants) by torch's own call, None where that will not do."""
    nodes = [node for node in spec.nodes if node.op != "constant"]
    if len(nodes) == 1 and nodes[0].op == "aten":
        return _run_aten(spec, nodes[0])
    if len(nodes) == 1 and nodes[0].op == "instance_norm_backward":
        return _run_instance_norm_backward(spec, nodes[0], device)
    if len(nodes) == 1 and nodes[0].op == "sdpa_varlen":
        return _run_packed(spec, nodes[0], device)
    if len(nodes) == 1 and OPS[nodes[0].op].has("grouped"):
        return run_grouped(spec, nodes[0], device)
    if len(nodes) == 1 and nodes[0].op == "group_affine":
        return _run_group_affine(spec, nodes[0], device)
    if len(nodes) != 1 or len(nodes[0].results) != 1:
        return run_linear(spec)
    (node,) = nodes
    rule = _rule(node, spec, device)
    if rule is None:
        return None
    constants = {
        each.results[0]: torch.tensor(each.attr("value"), dtype=torch.float64, device="cpu")
        for each in spec.nodes
        if each.op == "constant"
    }
    places = [spec.inputs.index(name) if name in spec.inputs else None for name in node.inputs]
    fixed = [None if name is None else constants.get(name) for name in node.inputs]
    attrs = dict(node.attrs)

    def run(inputs: Tensors, outputs: Tensors) -> object:
        given = [
            other if place is None else inputs[place]
            for place, other in zip(places, fixed, strict=True)
        ]
        return rule(given, attrs, outputs[0])

    return run


def _rule(node: Node, spec: GraphSpec, device: torch.device) -> OutRule | None:
    """Return how torch, or a cuDNN call outside of graphs, runs one op into a tensor."""
    by_torch = _torch_rule(node, spec, device)
    if device.type != "cuda" or by_torch is None or not dict(node.attrs).get(BOUNDED):
        return by_torch
    attrs = dict(node.attrs)
    forms = (spec.tensors[node.operands[0]], spec.tensors[node.results[0]])
    if not legacy_pooling.takes(node.op, attrs, *forms):
        return by_torch
    pool = legacy_pooling.pooling(attrs, *forms)
    if pool is None:
        return by_torch
    return lambda inputs, attrs, out: pool(inputs[0], out) or by_torch(inputs, attrs, out)


def _torch_rule(node: Node, spec: GraphSpec, device: torch.device) -> OutRule | None:
    if node.op in OUT and _runs_in_own_dtype(node, spec):
        if node.op == "interpolate":
            x, out = _alike(spec, (*node.operands, *node.results))
            return resample.enlarging(dict(node.attrs), x, out, device) or OUT[node.op]
        return OUT[node.op]
    if OPS[node.op].view:
        shape, made = spec.tensors[node.operands[0]].shape, spec.tensors[node.results[0]]
        if node.op == "reshape" and view_strides(made.shape, made.stride, shape) is not None:
            return lambda inputs, attrs, out: copied(inputs[0], out.view(shape))
        show: Any = reference.RULES[node.op]
        return lambda inputs, attrs, out: copied(show(inputs, attrs), out)
    if node.op == "where":
        return _choosing(node, spec, device)
    kinds = {spec.tensors[name].dtype for name in (*node.operands, *node.results)}
    kinds -= {torch.int64}  # classes
    if node.op in NATIVE and len(kinds) == 1:
        compute = NATIVE[node.op]
        return lambda inputs, attrs, out: out.copy_(compute(inputs, attrs))
    return None


def _choosing(node: Node, spec: GraphSpec, device: torch.device) -> OutRule | None:
    """``where`` into a tensor, of tensors of its dtype and of numbers, which lie on the device."""
    dtype = spec.tensors[node.results[0]].dtype
    numbers = {
        each.results[0]: float(each.attr("value")) for each in spec.nodes if each.op == "constant"
    }
    chosen = node.operands[1:]
    if any(spec.tensors[name].dtype != dtype for name in chosen if name not in numbers):
        return None
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    fixed = [
        _number(numbers[name].hex(), device, dtype) if name in numbers else None for name in chosen
    ]

    def run(inputs: Sequence[Any], attrs: Mapping[str, Any], out: torch.Tensor) -> object:
        x, y = (a if b is None else b for a, b in zip(inputs[1:], fixed, strict=True))
        return torch.where(inputs[0], x, y, out=out)

    return run


@cache
def _signs(device: torch.device) -> torch.Tensor:
    """1 and -1 on a device, for good, as below."""
    return outside_graph_pool(
        device, lambda: torch.tensor([1.0, -1.0], device=device).view(2, 1, 1, 1, 1)
    )


@cache
def _number(hexadecimal: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A number on a device, for good: CUDA graphs of others may read it."""
    value = float.fromhex(hexadecimal)  # 0.0 == -0.0
    return outside_graph_pool(device, lambda: torch.tensor(value, dtype=dtype, device=device))


def _runs_in_own_dtype(node: Node, spec: GraphSpec) -> bool:
    """Whether torch's kernel, on these dtypes, computes in float32 and rounds once."""
    if len(node.operands) != len(node.inputs):
        return False
    constants = {each.results[0] for each in spec.nodes if each.op == "constant"}
    real = [spec.tensors[name].dtype for name in node.operands if name not in constants]
    result = spec.tensors[node.results[0]].dtype
    if not real or node.op in ("identity", "cast"):
        return bool(real)
    if node.op == "matmul":  # no mixed dtypes
        return {*real, result} in ({torch.float16}, {torch.bfloat16}, {torch.float32})
    if result == torch.bool:
        return len(set(real)) == 1
    if node.op not in _CASTS:
        return set(real) == {result}
    floats = (torch.float16, torch.bfloat16, torch.float32)
    if result not in floats or any(dtype not in floats for dtype in real):
        return False
    # One dtype throughout, or float32 operands among them, which torch promotes to.
    return set(real) == {result} or torch.float32 in real
