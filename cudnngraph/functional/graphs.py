"""The graphs of the functions, each built from values and options.

:mod:`~cudnngraph.runtime.custom_ops` knows every one by its name.
"""

from __future__ import annotations

from typing import Any

from ..graph.builder import Graph
from ..graph.value import Value
from ..runtime import custom_ops


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
    batch's own mean and unbiased variance. An empty batch has none: the running ones stay.
    """
    convolve = g.conv_transpose if transposed else g.conv
    y, batch = convolve(x, weight, **dict(geometry)), ()
    y = y if bias is None else g.bias(y, bias)
    if training and y.spec is not None and not y.spec.numel:
        y = g.bias(g.scale(y, bn_weight), bn_bias)  # type: ignore[arg-type]
        running = (running_mean, running_var)
        batch = tuple([g.identity(v) for v in running if v is not None])  # type: ignore[assignment]
    elif training:
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
    if kind == "instance_norm" and (weight is None) != (bias is None):  # the op takes both
        y = g.instance_norm(total, eps=eps)
        y = g.bias(y, bias) if weight is None else g.scale(y, weight)  # type: ignore[arg-type]
    else:
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
