"""Fused ops on tensors, with the signatures of torch.nn.functional and gradients.

Each is one graph, compiled for every new combination of shapes, strides, dtypes and options
(:func:`cudnngraph.specialize`). ``activation`` is a name of
:data:`~cudnngraph.graph.pointwise.ACTIVATIONS` or None, its attributes go as further keywords
(``activation="leaky_relu", negative_slope=0.2``); ``residual`` is added before it. ``out`` takes
the result and has no gradient; the ``…_into`` forms allocate nothing, which on a GPU is so once the
workspace has grown.

``policy`` is a :class:`~cudnngraph.Policy`. None stands for the default one, with ``deterministic``
as :func:`torch.use_deterministic_algorithms` says. Under ``torch.autocast`` x and the weights are
cast to its dtype, as for torch's own convolutions and attention.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any

import torch

from ..arguments import NotPlain, explained, items, number
from ..device.allocation import lasting
from ..errors import BindError, GraphError, Problem
from ..graph.builder import Graph
from ..graph.value import Ints, Padding, Value
from ..ops.meta import default_eps
from ..policy import Policy
from ..runtime import custom_ops
from ..runtime.executable import Over, transforming
from ..runtime.specialize import (
    STATICS_KEPT,
    Build,
    Recent,
    Specialized,
    Static,
    check_in_place,
    static_of,
)

Tensor = torch.Tensor

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_bias_act",
    "conv_bias_act_into",
    "conv_bn_act",
    "conv_bn_act_into",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_transpose_bias_act",
    "conv_transpose_bias_act_into",
    "conv_transpose_bn_act",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "mlp",
    "rms_norm",
    "scaled_dot_product_attention",
    "paged_attention",
    "scaled_dot_product_attention_into",
    "varlen_attention",
]


# -- the graphs ------------------------------------------------------------------------------------


@custom_ops.function("x", "residual")
def conv_act(
    g: Graph,
    x: Value,
    weight: Value,
    bias: Value | None,
    residual: Value | None,
    *,
    transposed: bool,
    geometry: tuple[tuple[str, Any], ...],
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
    alpha1: float = 1.0,
    alpha2: float = 1.0,
) -> Value:
    """act(alpha1 * conv(x, weight) + alpha2 * residual + bias)."""
    compose = g.conv_transpose_bias_act if transposed else g.conv_bias_act
    return compose(
        x,
        weight,
        bias,
        activation=activation,
        residual=residual,
        alpha1=alpha1,
        alpha2=alpha2,
        **dict(geometry),
        **dict(attrs),
    )


@custom_ops.function("x", "residual")
def conv_norm_act(
    g: Graph,
    x: Value,
    weight: Value,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    bn_weight: Value | None,
    bn_bias: Value | None,
    residual: Value | None,
    *,
    transposed: bool,
    geometry: tuple[tuple[str, Any], ...],
    training: bool,
    eps: float,
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
    momentum: float = 1.0,
) -> Value | tuple[Value, ...]:
    """act(batch_norm(conv(x, weight) + bias) + residual).

    In training with running statistics also the next ones; with a momentum of 1.0 those are the
    batch's own mean and unbiased variance.
    """
    convolve = g.conv_transpose if transposed else g.conv
    y, batch = convolve(x, weight, **dict(geometry)), ()
    y = y if bias is None else g.bias(y, bias)
    if training:
        y, _, _, *batch = g.batch_norm_train(  # type: ignore[assignment]
            y,
            bn_weight,  # type: ignore[arg-type]
            bn_bias,  # type: ignore[arg-type]
            running_mean,
            running_var,
            eps=eps,
            momentum=momentum,
        )
    else:
        y = g.batch_norm(y, running_mean, running_var, bn_weight, bn_bias, eps=eps)  # type: ignore[arg-type]
    y = y if residual is None else g.add(y, residual)
    y = g.activation(y, activation, **dict(attrs))
    return (y, *batch) if batch else y


@custom_ops.function("q", "k", "v", "attn_mask", "seq_len_q", "seq_len_kv")
def attention(
    g: Graph,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None,
    seq_len_q: Value | None,
    seq_len_kv: Value | None,
    dropout_seed: Value | None = None,
    dropout_offset: Value | None = None,
    alibi_slopes: Value | None = None,
    sink: Value | None = None,
    **options: Any,
) -> Value | tuple[Value, ...]:
    """softmax(scale * q k^T + mask) v, and the lse where asked for."""
    return g.sdpa(  # type: ignore[no-any-return]
        *(q, k, v, attn_mask),
        seq_len_q=seq_len_q,
        seq_len_kv=seq_len_kv,
        dropout_seed=dropout_seed,
        dropout_offset=dropout_offset,
        alibi_slopes=alibi_slopes,
        sink=sink,
        **options,
    )


@custom_ops.function()
def attention_varlen(
    g: Graph,
    q: Value,
    k: Value,
    v: Value,
    cu_seqlens_q: Value,
    cu_seqlens_kv: Value | None,
    **options: Any,
) -> Value | tuple[Value, ...]:
    """Attention within packed sequences; those of k and v are q's where nothing is given."""
    ends = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    return g.sdpa_varlen(q, k, v, cu_seqlens_q, ends, **options)  # type: ignore[no-any-return]


@custom_ops.function()
def attention_paged(
    g: Graph,
    q: Value,
    k_cache: Value,
    v_cache: Value,
    page_table: Value,
    seq_len_kv: Value,
    seq_len_q: Value | None,
    page_table_v: Value | None,
    **options: Any,
) -> Value | tuple[Value, ...]:
    """Attention to what lies in the pages of a cache."""
    return g.sdpa_paged(  # type: ignore[no-any-return]
        *(q, k_cache, v_cache, page_table, seq_len_kv),
        seq_len_q=seq_len_q,
        page_table_v=page_table_v,
        **options,
    )


@custom_ops.function("x", "residual")
def summed_norm_act(
    g: Graph,
    x: Value,
    residual: Value | None,
    weight: Value | None,
    bias: Value | None,
    *,
    kind: str,
    eps: float,
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
    num_groups: int = 0,
) -> Value | tuple[Value, ...]:
    """act(norm(x + residual)), and the sum where there is one."""
    total = x if residual is None else g.add(x, residual)
    groups = (num_groups,) if kind == "group_norm" else ()
    y = getattr(g, kind)(total, *groups, weight, bias, eps=eps)
    y = g.activation(y, activation, **dict(attrs))
    return y if residual is None else (y, total)


@custom_ops.function("x", "residual")
def separable(
    g: Graph,
    x: Value,
    residual: Value | None,
    weight: Value,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    bn_weight: Value | None,
    bn_bias: Value | None,
    weight_1: Value,
    bias_1: Value | None,
    mean_1: Value | None,
    var_1: Value | None,
    bn_weight_1: Value | None,
    bn_bias_1: Value | None,
    *,
    stages: tuple[tuple[tuple[str, Any], ...], ...],
) -> Value | tuple[Value, ...]:
    """A convolution behind another, each with what :func:`conv_norm_act` has; with their batches'
    statistics where those are to be kept."""
    batch: list[Value] = []
    tensors = (
        (weight, bias, mean, var, bn_weight, bn_bias, None),
        (weight_1, bias_1, mean_1, var_1, bn_weight_1, bn_bias_1, residual),
    )
    for options, (w, b, *norm, added) in zip(stages, tensors, strict=True):
        given: Any = dict(options)
        if norm[0] is None and not given["training"]:  # no norm
            for word in ("training", "eps"):
                given.pop(word)
            x = conv_act(g, x, w, b, added, **given)  # type: ignore[assignment]
            continue
        made: Any = conv_norm_act(g, x, w, b, *norm, added, **given)
        x, *now = made if isinstance(made, tuple) else (made,)
        batch += now
    return (x, *batch) if batch else x


@custom_ops.function("x", "residual")
def linear_act(
    g: Graph,
    x: Value,
    weight: Value,
    bias: Value | None,
    residual: Value | None,
    *,
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
) -> Value:
    """act(x weight^T + bias + residual)."""
    y = g.linear(x, weight, bias)
    y = y if residual is None else g.add(y, residual)
    return g.activation(y, activation, **dict(attrs))


@custom_ops.function("x")
def gated_mlp(
    g: Graph,
    x: Value,
    up: Value,
    up_bias: Value | None,
    gate: Value | None,
    gate_bias: Value | None,
    down: Value,
    down_bias: Value | None,
    *,
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
) -> Value:
    """Both layers of :meth:`cudnngraph.Graph.mlp`."""
    return g.mlp(
        x,
        up,
        up_bias,
        down,
        down_bias,
        gate=gate,
        gate_bias=gate_bias,
        activation=activation,
        **dict(attrs),
    )


# -- calling them ----------------------------------------------------------------------------------

_DETERMINISTIC = Policy(deterministic=True)


def _policy(given: Policy | None) -> Policy | None:
    if given is None and torch.are_deterministic_algorithms_enabled():
        return _DETERMINISTIC
    return given


def _compiled(build: Build, policy: Policy | None) -> Specialized:
    return custom_ops.specialized(build, _policy(policy))


def run_graph(
    build: Build,
    policy: Policy | None,
    tensors: Sequence[Tensor | None],
    static: Static,
    results: int = 1,
    over: Over = (),
) -> Any:
    """Run a graph's function: as an op where torch.compile traces, else directly, which is
    cheaper. A tensor, or several; ``over`` as of :meth:`Executable.call`."""
    if torch.compiler.is_compiling():
        made = custom_ops.call(build.__name__, tensors, static.values, _policy(policy), results)
        return made[0] if results == 1 else made
    return _compiled(build, policy).call(tensors, static, over)


def _into(
    build: Build,
    policy: Policy | None,
    out: Tensor,
    tensors: Sequence[Tensor | None],
    static: Static,
) -> Tensor:
    """Run into ``out``, which gets no gradient: what requires one is refused, as by torch."""
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        problem = Problem(
            "out", "is given where a tensor requires grad", "torch.no_grad(), or no out"
        )
        raise BindError(build.__name__, [problem])
    if torch.compiler.is_compiling():
        made = run_graph(build, policy, tensors, static)
        torch.ops.cudnngraph.check_out(out, made, build.__name__)
        out.copy_(made)
    else:
        _compiled(build, policy).find(tensors, static).run(*given, out)
    return out


_GEOMETRY = {
    4: ("stride", "padding", "dilation", "groups"),
    5: ("stride", "padding", "output_padding", "groups", "dilation"),
}


def act_options(
    geometry: tuple[Any, ...],
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
    alpha1: float = 1.0,
    alpha2: float = 1.0,
) -> dict[str, Any]:
    """The options of :func:`conv_act`. ``geometry`` has the values in the order of torch's
    functional: four of a convolution, five of a transposed one."""
    made: dict[str, Any] = {
        "transposed": len(geometry) == 5,
        "geometry": tuple(zip(_GEOMETRY[len(geometry)], geometry, strict=True)),
        "activation": activation,
        "attrs": attrs,
    }
    if alpha1 != 1 or alpha2 != 1:
        made |= {"alpha1": number(alpha1), "alpha2": number(alpha2)}
    return made


def norm_options(
    geometry: tuple[Any, ...],
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
    training: bool,
    eps: float,
    momentum: float | None = None,
) -> dict[str, Any]:
    """The options of :func:`conv_norm_act`; ``geometry`` as of :func:`act_options`.

    A momentum is given where the graph is to update the running statistics in place.
    """
    made = {**act_options(geometry, activation, attrs), "training": training, "eps": number(eps)}
    return made if momentum is None else {**made, "momentum": momentum}


MOMENTA_KEPT = 4
_momenta: set[float] = set()


def fixed_momentum(momentum: float | Tensor, running: Tensor | None) -> float | None:
    """A momentum that may be part of a graph: the first few that come, outside of torch.compile.

    One that changes with every step would make a graph for each; those are applied behind it, and
    so are those of running statistics in 16 bits or not there.
    """
    if type(momentum) is not float or running is None or running.dtype.itemsize < 4:
        return None
    if torch.compiler.is_compiling() or transforming():
        return None
    if momentum not in _momenta:
        if len(_momenta) >= MOMENTA_KEPT:
            return None
        _momenta.add(momentum)
    return momentum


def summed_norm_options(
    kind: str,
    eps: float,
    num_groups: int,
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
) -> dict[str, Any]:
    """The options of :func:`summed_norm_act`."""
    made = {"kind": kind, "eps": number(eps), **product_options(activation, attrs)}
    return {**made, "num_groups": num_groups} if kind == "group_norm" else made


def product_options(activation: str | None, attrs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The options of :func:`linear_act` and :func:`gated_mlp`."""
    return {"activation": activation, "attrs": attrs}


def _sorted(attrs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple([(name, attrs[name]) for name in sorted(attrs)])


def _ranked(name: str, x: Tensor, rank: int) -> None:
    if x.dim() not in (rank + 1, rank + 2):
        dims = ", ".join(("D", "H", "W")[3 - rank :])
        wanted = f"{rank + 2}: (N, C, {dims}), or {rank + 1}: (C, {dims})"
        problem = Problem(name, f"x has {x.dim()} dims {tuple(x.shape)}", wanted)
        raise GraphError(name, [problem])


def cast(*tensors: Tensor | None) -> Sequence[Any]:
    """The tensors in autocast's dtype where autocast is on, as torch casts what it multiplies."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type if tensors[0] is not None else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [
        tensor.to(dtype)
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    ]


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def one_layout(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both channels_last where either is, as torch's own convolutions do."""
    layout = _CHANNELS_LAST.get(x.dim())
    if layout is None or weight.dim() != x.dim() or transforming():  # which cannot tell
        return x, weight
    if x.is_contiguous(memory_format=layout) and weight.is_contiguous(memory_format=layout):
        return x, weight
    for tensor in (x, weight):
        if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout):
            return x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    return x, weight


def _remember(
    recent: Recent | None,
    build: Build,
    policy: Policy | None,
    tensors: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
    static: Static,
) -> None:
    """Note what served a call, where that was given the very tensors that the call came with."""
    if recent is None or torch.compiler.is_compiling():
        return
    if all(map(is_, tensors, given)):
        recent.remember(static, policy, tensors, _compiled(build, policy).find(given, static))


def run_conv_act(
    static: Static,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    policy: Policy | None,
    out: Tensor | None = None,
    recent: Recent | None = None,
) -> Tensor:
    """:func:`conv_act` on tensors; its options come of :func:`act_options`. ``recent`` is the
    caller's, to find again what served it."""
    if x.dim() == weight.dim() - 1:  # one image
        added, into = (each if each is None else each.unsqueeze(0) for each in (residual, out))
        made = run_conv_act(static, x.unsqueeze(0), weight, bias, added, policy, into)
        return made.squeeze(0) if out is None else out
    tensors = (x, weight, bias, residual)
    if recent is not None:
        found: Tensor | None = recent.serve(static, policy, tensors)
        if found is not None:
            return found
    x, weight, bias = cast(x, weight, bias)
    if out is not None:
        return _into(conv_act, policy, out, (x, weight, bias, residual), static)
    x, weight = one_layout(x, weight)
    given = (x, weight, bias, residual)
    result: Tensor = run_graph(conv_act, policy, given, static)
    _remember(recent, conv_act, policy, tensors, given, static)
    return result


# -- convolution -----------------------------------------------------------------------------------


@explained
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv(input, weight) + residual + bias), as F.conv1d where neither is given."""
    _ranked("conv1d", input, 1)
    geometry = (stride, padding, dilation, groups)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv(input, weight) + residual + bias), as F.conv2d where neither is given."""
    _ranked("conv2d", input, 2)
    geometry = (stride, padding, dilation, groups)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv(input, weight) + residual + bias), as F.conv3d where neither is given."""
    _ranked("conv3d", input, 3)
    geometry = (stride, padding, dilation, groups)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = "relu",
    residual: Tensor | None = None,
    alpha1: float = 1.0,
    alpha2: float = 1.0,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(alpha1 * conv(input, weight) + alpha2 * residual + bias) in 1, 2 or 3 spatial dims."""
    geometry = (stride, padding, dilation, groups)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs), alpha1, alpha2)
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_bias_act_into(
    out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """:func:`conv_bias_act` into ``out``, whose strides are those that the call would give."""
    return conv_bias_act(input, weight, bias, out=out, **options)


@explained
def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv_transpose(input, weight) + residual + bias), else F.conv_transpose1d."""
    _ranked("conv_transpose1d", input, 1)
    geometry = (stride, padding, output_padding, groups, dilation)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv_transpose(input, weight) + residual + bias), else F.conv_transpose2d."""
    _ranked("conv_transpose2d", input, 2)
    geometry = (stride, padding, output_padding, groups, dilation)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv_transpose(input, weight) + residual + bias), else F.conv_transpose3d."""
    _ranked("conv_transpose3d", input, 3)
    geometry = (stride, padding, output_padding, groups, dilation)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_transpose_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = "relu",
    residual: Tensor | None = None,
    alpha1: float = 1.0,
    alpha2: float = 1.0,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(alpha1 * conv_transpose(input, weight) + alpha2 * residual + bias), 1 to 3 dims."""
    geometry = (stride, padding, output_padding, groups, dilation)
    static = static_of(act_options, geometry, activation, _sorted(activation_attrs), alpha1, alpha2)
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_transpose_bias_act_into(
    out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """:func:`conv_transpose_bias_act` into ``out``, of the strides that the call would give."""
    return conv_transpose_bias_act(input, weight, bias, out=out, **options)


# -- convolution and batch norm --------------------------------------------------------------------


# Running mean and variance, outputs 1 and 2, over the inputs behind x, weight and bias, if any.
_OVER: tuple[Over, Over] = (((1, 2), (2, 3)), ((1, 3), (2, 4)))


def run_conv_norm_act(
    static: Static,
    tensors: tuple[Tensor | None, ...],
    momentum: float | Tensor,
    policy: Policy | None,
    out: Tensor | None = None,
    recent: Recent | None = None,
) -> Tensor:
    """:func:`conv_norm_act` on its tensors, and the update of the running statistics in place; its
    options come of :func:`norm_options`. ``recent`` as of :func:`run_conv_act`."""
    x, weight, bias, mean, var, *rest = tensors
    values = static.values
    training = values["training"]
    tracks = training and mean is not None and var is not None
    over: Over = ()
    if tracks and "momentum" in values:
        over = _OVER[bias is not None]
    if recent is not None and (over or not tracks):
        found: Tensor | None = recent.serve(static, policy, tensors, over)
        if found is not None:
            if over:
                torch.autograd.graph.increment_version((mean, var))  # type: ignore[arg-type]
            return found
    x, weight, bias = cast(x, weight, bias)
    if out is not None:
        if training:
            problem = Problem("out", "is given with training=True", "training=False")
            raise BindError("conv_bn_act", [problem])
        return _into(conv_norm_act, policy, out, (x, weight, bias, mean, var, *rest), static)
    x, weight = one_layout(x, weight)
    if training and (rest[0] is None or rest[1] is None):
        channels = sum(weight.shape[:1])
        if values["transposed"]:
            channels = sum(weight.shape[1:2]) * dict(values["geometry"])["groups"]  # type: ignore[call-overload]
        ones, zeros = _no_affine(channels, x)
        rest[0] = ones if rest[0] is None else rest[0]
        rest[1] = zeros if rest[1] is None else rest[1]
    given = (x, weight, bias, mean, var, *rest)
    result: Tensor
    if tracks and not over:
        check_in_place("conv_bn_act")
        result, now_mean, now_var = run_graph(conv_norm_act, policy, given, static, 3)
        update_running(mean, var, now_mean, now_var, momentum)  # type: ignore[arg-type]
        return result
    result = run_graph(conv_norm_act, policy, given, static, over=over)
    if over:
        torch.autograd.graph.increment_version((mean, var))  # type: ignore[arg-type]
    _remember(recent, conv_norm_act, policy, tensors, given, static)
    return result


Update = tuple[Tensor, Tensor, float | Tensor]


def run_separable(
    static: Static,
    x: Tensor,
    residual: Tensor | None,
    parts: Sequence[Sequence[Tensor | None]],
    updates: Sequence[Update],
    policy: Policy | None,
) -> Tensor:
    """:func:`separable` on its tensors. ``updates`` are the running statistics to update in place,
    with their momentum."""
    first, second = parts
    x, w, b, w_1, b_1 = cast(x, *first[:2], *second[:2])
    x, w = one_layout(x, w)
    x, w_1 = one_layout(x, w_1)
    norms = [list(part[2:]) for part in parts]
    stages: Any = static.values["stages"]
    for options, norm, weight in zip(stages, norms, (w, w_1), strict=True):
        if dict(options)["training"]:
            ones, zeros = _no_affine(sum(weight.shape[:1]), x)
            norm[2:] = [
                given if given is not None else other
                for given, other in zip(norm[2:], (ones, zeros), strict=True)
            ]
    given = (x, residual, w, b, *norms[0], w_1, b_1, *norms[1])
    result = run_graph(separable, policy, given, static, 1 + 2 * len(updates))
    if not updates:
        return result  # type: ignore[no-any-return]
    y, *batch = result
    for place, (mean, var, momentum) in enumerate(updates):
        update_running(mean, var, batch[2 * place], batch[2 * place + 1], momentum)
    return y  # type: ignore[no-any-return]


def stages_options(*stages: tuple[Any, ...]) -> dict[str, Any]:
    """The options of :func:`separable`; each stage has those of :func:`norm_options`."""
    return {"stages": tuple(tuple(norm_options(*stage).items()) for stage in stages)}


@torch.no_grad()
def update_running(
    mean: Tensor, var: Tensor, now_mean: Tensor, now_var: Tensor, momentum: float | Tensor
) -> None:
    """Move the running statistics towards the batch's, in place."""
    if isinstance(momentum, Tensor):
        mean.lerp_(now_mean.to(mean.dtype), momentum)
        var.lerp_(now_var.to(var.dtype), momentum)
    else:
        now = (now_mean.to(mean.dtype), now_var.to(var.dtype))
        try:
            torch._foreach_lerp_((mean, var), now, momentum)
        except RuntimeError as error:
            if -1e38 < momentum < 1e38:
                raise
            problem = Problem("momentum", f"{momentum!r}: {error}", "a number that a float holds")
            raise GraphError("running statistics", [problem]) from None


_vectors: dict[Hashable, tuple[Tensor, Tensor]] = {}


def _no_affine(channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Ones and zeros (K,) for a norm without weight or bias, in float32 or float64."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    if not _is_plain(like):
        return like.new_ones(channels, dtype=wide), like.new_zeros(channels, dtype=wide)
    key = (channels, wide, like.device)
    found = _vectors.get(key)
    if found is None:
        options: Any = {"dtype": wide, "device": like.device}

        def make() -> tuple[Tensor, Tensor]:
            return torch.ones(channels, **options), torch.zeros(channels, **options)

        if like.is_cuda and torch.cuda.is_current_stream_capturing():  # the graph's memory
            return make()
        if len(_vectors) >= STATICS_KEPT:  # other streams and graphs may use what there is
            return make()
        with torch.inference_mode(False):
            found = lasting(like.device, make)
        if like.is_cuda:
            torch.cuda.current_stream(like.device).synchronize()  # before any stream reads them
        _vectors[key] = found
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Whether what is made beside a tensor outlasts the call: nothing traces or transforms it,
    no mode is on, and it is of no subclass, such as a fake tensor."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


@explained
def conv_bn_act(
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    activation: str | None = "relu",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(batch_norm(conv(input, weight) + bias) + residual) in 1, 2 or 3 spatial dims.

    As F.batch_norm: with ``training=True`` by the batch's statistics, and the running ones, which
    may then be None, are updated in place (their variance unbiased); bn_weight and bn_bias may be
    None; momentum may be a tensor without dims. Else by the running ones, as a scale and a bias
    in the convolution's epilogue.
    """
    geometry = (stride, padding, dilation, groups)
    static = static_of(
        norm_options,
        geometry,
        activation,
        _sorted(activation_attrs),
        bool(training),
        eps,
        fixed_momentum(momentum, running_mean) if training else None,
    )
    tensors = (input, weight, bias, running_mean, running_var, bn_weight, bn_bias, residual)
    return run_conv_norm_act(static, tensors, momentum, policy, out)


@explained
def conv_bn_act_into(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """:func:`conv_bn_act` with ``training=False`` into ``out``, of the strides it would give."""
    return conv_bn_act(
        input, weight, running_mean, running_var, bn_weight, bn_bias, out=out, **options
    )


@explained
def conv_transpose_bn_act(
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    activation: str | None = "relu",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """:func:`conv_bn_act` with a transposed convolution."""
    geometry = (stride, padding, output_padding, groups, dilation)
    static = static_of(
        norm_options,
        geometry,
        activation,
        _sorted(activation_attrs),
        bool(training),
        eps,
        fixed_momentum(momentum, running_mean) if training else None,
    )
    tensors = (input, weight, bias, running_mean, running_var, bn_weight, bn_bias, residual)
    return run_conv_norm_act(static, tensors, momentum, policy, out)


# -- norms -----------------------------------------------------------------------------------------


def _norm(
    kind: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    attrs: dict[str, Any],
    policy: Policy | None,
    num_groups: int = 0,
) -> Any:
    static = static_of(summed_norm_options, kind, eps, num_groups, activation, _sorted(attrs))
    tensors = (x, residual, weight, bias)
    result = run_graph(summed_norm_act, policy, tensors, static, 1 if residual is None else 2)
    return result if residual is None else tuple(result)


def _trailing(name: str, x: Tensor, shape: Sequence[int], weight: Tensor | None) -> Tensor:
    """The weight of a norm over the last dims of x, ones where there is none."""
    try:
        sizes = tuple(items(shape))
    except NotPlain as reason:
        problem = Problem(name, f"normalized_shape {reason}", "a tuple of whole numbers")
        raise GraphError(name, [problem]) from None
    if weight is None:
        return x.new_ones(sizes)
    if tuple(weight.shape) != sizes:
        what = f"weight has shape {tuple(weight.shape)}"
        problem = Problem(name, what, f"{sizes}, the normalized_shape")
        raise GraphError(name, [problem])
    return weight


@explained
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.layer_norm(input + residual)) over the last dims; with a residual the pair (y, sum).

    Parameters have the dtype of the input or are float32; y has the input's. The sum is what comes
    out of the addition, in the input's dtype. Autocast changes nothing here.
    """
    weight = _trailing("layer_norm", input, normalized_shape, weight)
    return _norm(
        "layer_norm", input, residual, weight, bias, eps, activation, activation_attrs, policy
    )


@explained
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.rms_norm(input + residual)) over the last dims; with a residual the pair (y, sum).

    ``eps`` defaults to the smallest step at 1 in the dtype that torch's computes in, which is
    float32 for 16 bits. Parameters have the input's dtype or are float32; y has the input's.
    """
    weight = _trailing("rms_norm", input, normalized_shape, weight)
    eps = default_eps(input.dtype) if eps is None else eps
    return _norm(
        "rms_norm", input, residual, weight, bias, eps, activation, activation_attrs, policy
    )


@explained
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.group_norm(input + residual)) of (N, C, ...); with a residual the pair (y, sum).

    Weight and bias (C,) have the dtype of the input or are float32. y is contiguous, also where the
    input is channels_last.
    """
    return _norm(
        "group_norm",
        input,
        residual,
        weight,
        bias,
        eps,
        activation,
        activation_attrs,
        policy,
        num_groups,
    )


@explained
def instance_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.instance_norm(input + residual)) of (N, C, ...); with a residual the pair (y, sum).

    By the statistics of each channel of each image, never by running ones. y lies as the input.
    """
    return _norm(
        "instance_norm", input, residual, weight, bias, eps, activation, activation_attrs, policy
    )


# -- products --------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """x with 2 to 4 dims, as products of a graph have them."""
    if 2 <= x.dim() <= 4:
        return x
    return x.unsqueeze(0) if x.dim() < 2 else x.flatten(0, -2)


def _rows_of(x: Tensor, lead: Sequence[int]) -> Tensor:
    """The rows of x as it broadcasts to these dims and its last one; one where all are the same."""
    if x.shape[:-1].numel() == 1:
        return x.reshape(1, -1)
    return x.expand(*lead, x.shape[-1]).flatten(0, -2)


def _broadcast(
    x: Tensor, residual: Tensor, features: Sequence[int]
) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Rows of x and of a residual that broadcasts with the product, and the shape of the result."""
    made = (*x.shape[:-1], *features)
    try:
        shape: Sequence[int] = torch.broadcast_shapes(made, residual.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        what = f"has shape {tuple(residual.shape)}, which does not broadcast"
        problem = Problem("residual", what, f"the result's, {made}")
        raise GraphError("linear_act", [problem]) from None
    if len(shape) <= 4:
        return _rows(x), _rows(residual if residual.dim() else residual.unsqueeze(0)), shape
    lead = shape[:-1]
    return _rows_of(x, lead), _rows_of(residual, lead), shape


@explained
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(F.linear(input, weight, bias) + residual): input (..., K), weight (N, K) → (..., N)."""
    x, weight, bias, residual = cast(input, weight, bias, residual)
    static = static_of(product_options, activation, _sorted(activation_attrs))
    features = weight.shape[:1]  # of a weight without dims the graph says what is wrong
    shape: Sequence[int] = (*x.shape[:-1], *features)
    if residual is None or residual.shape == shape:
        rows, added = _rows(x), None if residual is None else _rows(residual)
    else:
        rows, added, shape = _broadcast(x, residual, features)
    y: Tensor = run_graph(linear_act, policy, (rows, weight, bias, added), static)
    return y.view(shape)


@explained
def mlp(
    input: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str | None = "gelu",
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """Two linear layers with an activation between, gated where there is a gate.

    input (..., K), up and gate (F, K), down (N, F) → (..., N): down's of act(up's), or with a gate
    of act(gate's) * up's.
    """
    tensors = cast(input, up, up_bias, gate, gate_bias, down, down_bias)
    static = static_of(product_options, activation, _sorted(activation_attrs))
    y: Tensor = run_graph(gated_mlp, policy, (_rows(tensors[0]), *tensors[1:]), static)
    return y.view(*input.shape[:-1], *down.shape[:1])


# -- attention -------------------------------------------------------------------------------------


def attention_options(
    is_causal: bool,
    scale: float | None,
    window: Any,
    diagonal_alignment: str,
    dropout_p: float,
    alibi: bool,
    softcap: float | None,
    finite_padding: bool,
    return_lse: bool,
) -> dict[str, Any]:
    """The options of :func:`attention`."""
    return {
        "is_causal": is_causal,
        "scale": scale,
        "window": window,
        "diagonal_alignment": diagonal_alignment,
        "dropout_p": dropout_p,
        "alibi": alibi,
        "softcap": softcap,
        "finite_padding": finite_padding,
        "return_lse": return_lse,
    }


@explained
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    diagonal_alignment: str = "top_left",
    seq_len_q: Tensor | None = None,
    seq_len_kv: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    dropout_offset: Tensor | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    finite_padding: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    policy: Policy | None = None,
) -> Any:
    """F.scaled_dot_product_attention over (B, H, S, D), with a window, lengths, sinks and the lse.

    Keywords are those of :meth:`cudnngraph.Graph.sdpa`; with ``return_lse=True`` the pair (o, lse),
    whose lse has no gradient. A row that may attend to no key gives zeros. Fewer heads of key and
    value than of query are shared in groups, whatever ``enable_gqa`` says. A float mask that
    requires grad gets one, and so does a sink. Seed and offset of a dropout are drawn from torch's
    generator of query's device unless they are given.
    """
    query, key, value, attn_mask = cast(query, key, value, attn_mask)
    if dropout_p and dropout_seed is None and dropout_offset is None:
        drawn = torch.randint(2**63 - 1, (4,), device=query.device)
        dropout_seed, dropout_offset = drawn[:1], drawn[2:3]  # 16 bytes apart, as plans want it
    static = static_of(
        attention_options,
        *(is_causal, scale, window, diagonal_alignment),
        *(dropout_p, alibi, softcap, finite_padding, return_lse),
    )
    tensors = (
        *(query, key, value, attn_mask, seq_len_q, seq_len_kv),
        *(dropout_seed, dropout_offset, alibi_slopes, sink),
    )
    if out is not None:
        if return_lse:
            problem = Problem("out", "is given with return_lse=True", "one of the two")
            raise BindError("attention", [problem])
        return _into(attention, policy, out, tensors, static)
    result = run_graph(attention, policy, tensors, static, 2 if return_lse else 1)
    return tuple(result) if return_lse else result


@explained
def scaled_dot_product_attention_into(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """:func:`scaled_dot_product_attention` into ``out``, which lies as query does."""
    result: Tensor = scaled_dot_product_attention(query, key, value, out=out, **options)
    return result


def _band_options(
    is_causal: bool,
    scale: float | None,
    window: Any,
    diagonal_alignment: str,
    finite_padding: bool,
    return_lse: bool,
    *longest: int,
) -> dict[str, Any]:
    return {
        "is_causal": is_causal,
        "scale": scale,
        "window": window,
        "diagonal_alignment": diagonal_alignment,
        "finite_padding": finite_padding,
        "return_lse": return_lse,
        **dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest, strict=False)),
    }


@explained
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    diagonal_alignment: str = "top_left",
    finite_padding: bool = False,
    return_lse: bool = False,
    policy: Policy | None = None,
) -> Any:
    """Attention within sequences packed one behind the other, (T, H, D).

    Arguments are those of :meth:`cudnngraph.Graph.sdpa_varlen`. The sequences may change from call
    to call; another number of them, of tokens, or another longest one is another graph. One tensor
    for both ``cu_seqlens`` says that those of q and k are the same: torch's flash attention then
    serves causal masks and windows from the top left too.
    """
    query, key, value = cast(query, key, value)
    band = (is_causal, scale, window, diagonal_alignment, finite_padding, return_lse)
    static = static_of(_band_options, *band, max_seqlen_q, max_seqlen_kv)
    same = cu_seqlens_kv is cu_seqlens_q
    tensors = (query, key, value, cu_seqlens_q, None if same else cu_seqlens_kv)
    result = run_graph(attention_varlen, policy, tensors, static, 2 if return_lse else 1)
    return tuple(result) if return_lse else result


@explained
def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_len_kv: Tensor,
    *,
    seq_len_q: Tensor | None = None,
    page_table_v: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    diagonal_alignment: str = "bottom_right",
    finite_padding: bool = False,
    return_lse: bool = False,
    policy: Policy | None = None,
) -> Any:
    """Attention of (B, H, S_q, D) to keys and values in the pages of a cache, for inference.

    Arguments are those of :meth:`cudnngraph.Graph.sdpa_paged`.
    """
    band = (is_causal, scale, window, diagonal_alignment, finite_padding, return_lse)
    static = static_of(_band_options, *band)
    tensors = (query, k_cache, v_cache, page_table, seq_len_kv, seq_len_q, page_table_v)
    result = run_graph(attention_paged, policy, tensors, static, 2 if return_lse else 1)
    return tuple(result) if return_lse else result
