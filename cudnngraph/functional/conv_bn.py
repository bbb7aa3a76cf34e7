"""Convolutions fused with batch norm, residual and activation, and their running statistics."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils import checkpoint

from ..arguments import explained, number
from ..device.allocation import outside_graph_pool
from ..errors import BindError, GraphError, Problem
from ..graph.value import Ints, Padding
from ..policy import Policy
from ..runtime.executable import Over, transforming
from ..runtime.specialize import STATICS_KEPT, LastCall, Static, check_in_place, intern_static
from .call import cast, needed_out, remember, run_graph, run_into, sorted_attrs
from .conv import act_options, one_layout
from .graphs import conv_norm_act, separable

Tensor = torch.Tensor


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


# Running mean and variance, outputs 1 and 2, over the inputs behind x, weight and bias, if any.
_OVER: tuple[Over, Over] = (((1, 2), (2, 3)), ((1, 3), (2, 4)))


def run_conv_norm_act(
    static: Static,
    tensors: tuple[Tensor | None, ...],
    momentum: float | Tensor,
    policy: Policy | None,
    out: Tensor | None = None,
    recent: LastCall | None = None,
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
        return run_into(conv_norm_act, policy, out, (x, weight, bias, mean, var, *rest), static)
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
        return _and_update(
            lambda: run_graph(conv_norm_act, policy, given, static, 3),
            [(mean, var, momentum)],  # type: ignore[list-item]
        )
    result = run_graph(conv_norm_act, policy, given, static, over=over)
    if over:
        torch.autograd.graph.increment_version((mean, var))  # type: ignore[arg-type]
    remember(recent, conv_norm_act, policy, tensors, given, static)
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
    if not updates:
        return run_graph(separable, policy, given, static, 1)  # type: ignore[no-any-return]
    many = 1 + 2 * len(updates)
    return _and_update(lambda: run_graph(separable, policy, given, static, many), updates)


def stages_options(*stages: tuple[Any, ...]) -> dict[str, Any]:
    """The options of :func:`separable`; each stage has those of :func:`norm_options`."""
    return {"stages": tuple(tuple(norm_options(*stage).items()) for stage in stages)}


def _and_update(run: Callable[[], Sequence[Tensor]], updates: Sequence[Update]) -> Tensor:
    """The first result of a run, whose others are the batch's means and variances.

    A checkpoint stops a run for a backward when that has saved the last tensor, so that it gives no
    results. Torch's norms have updated their statistics by then; it is run again for them.
    """
    try:
        y, *batch = run()
    except _Stopped:
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            _, *batch = run()
        _update(updates, batch)
        raise
    _update(updates, batch)
    return y


#: What a checkpoint raises to stop; nothing where this version of torch has no such.
_Stopped: Any = getattr(checkpoint, "_StopRecomputationError", ())


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _update(updates: Sequence[Update], batch: Sequence[Tensor]) -> None:
    for place, (mean, var, momentum) in enumerate(updates):
        update_running(mean, var, batch[2 * place], batch[2 * place + 1], momentum)


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
            found = outside_graph_pool(like.device, make)
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
    static = intern_static(
        norm_options,
        geometry,
        activation,
        sorted_attrs(activation_attrs),
        bool(training),
        eps,
        fixed_momentum(momentum, running_mean) if training else None,
    )
    tensors = (input, weight, bias, running_mean, running_var, bn_weight, bn_bias, residual)
    return run_conv_norm_act(static, tensors, momentum, policy, out)


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
    out = needed_out(out, "conv_bn_act_into")
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
    static = intern_static(
        norm_options,
        geometry,
        activation,
        sorted_attrs(activation_attrs),
        bool(training),
        eps,
        fixed_momentum(momentum, running_mean) if training else None,
    )
    tensors = (input, weight, bias, running_mean, running_var, bn_weight, bn_bias, residual)
    return run_conv_norm_act(static, tensors, momentum, policy, out)
