"""Convolution, transposed or not, and a weight's gradient: rows, inference and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..ir.spec import numel
from .base import REQUIRED, InferContext, Result, Tensors, register
from .checks import (
    conv_order,
    each_dim,
    factors,
    fits_int,
    fits_int32,
    int_tuple,
    is_int,
    same_dtype,
)
from .operands import exactly, need


def _padding(
    call: InferContext,
    rank: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...] | None:
    """Canonical form: (before, after) a spatial dim. Also takes "valid", and "same" at stride 1."""
    value = call.attrs["padding"]
    if isinstance(value, str):
        if call.op != "conv" or value not in ("same", "valid"):
            call.problem(
                f"padding={value!r} is unknown",
                "an int, ints, (before, after) pairs"
                + (", 'same' or 'valid'" * (call.op == "conv")),
            )
            return None
        if value == "valid":
            pairs = ((0, 0),) * rank
        elif any(step != 1 for step in stride):
            call.problem(f"padding='same' with stride={tuple(stride)}", "stride 1", "give numbers")
            return None
        else:
            reach = [d * (r - 1) for d, r in zip(dilation, kernel, strict=True)]
            pairs = tuple((total // 2, total - total // 2) for total in reach)
        call.attrs["padding"] = pairs
        return pairs
    many = each_dim(value, rank)
    if any(isinstance(item, (tuple, list)) for item in many):
        listed = [tuple(item) if isinstance(item, (tuple, list)) else (item, item) for item in many]
    else:
        listed = [(item, item) for item in many]
    if not all(len(pair) == 2 and all(is_int(item) for item in pair) for pair in listed):
        call.problem(
            f"padding={value!r} is not made of whole numbers",
            "an int, one per spatial dim, or (before, after) pairs",
        )
        return None
    if len(listed) != rank:
        call.problem(f"padding={value!r} has {len(listed)} entries", f"1 or {rank}")
        return None
    if any(item < 0 for pair in listed for item in pair):
        mend = "slice x instead" if call.op == "conv" else "pad the result instead"
        call.problem(f"padding={value!r} is negative", "every padding >= 0", mend)
        return None
    if not fits_int(call, "padding", [item for pair in listed for item in pair]):
        return None
    pairs = tuple((int(before), int(after)) for before, after in listed)
    call.attrs["padding"] = pairs
    return pairs


def _conv_common(call: InferContext) -> tuple[int, int, torch.dtype] | None:
    """Rank, groups and the result's dtype, after the checks that both directions share.

    None when they say nothing.
    """
    x, weight = call["x"], call["weight"]
    dtype = factors(call, "x", "weight")
    ok = True
    rank = len(x.shape) - 2
    if rank not in (1, 2, 3):
        call.problem(
            f"x '{x.name}' has {len(x.shape)} dims {x.shape}", "3, 4 or 5: (N, C, spatial...)"
        )
        ok = False
    elif len(weight.shape) != len(x.shape):
        call.problem(
            f"weight '{weight.name}' has {len(weight.shape)} dims {weight.shape}, "
            f"x has {len(x.shape)}",
            f"{len(x.shape)} dims",
        )
        ok = False
    groups = call.attrs["groups"]
    if not is_int(groups) or groups < 1:
        call.problem(f"groups={groups!r} is not a positive whole number", "groups >= 1")
        groups = 1
    call.attrs["groups"] = int(groups)
    if not ok:
        return None
    if groups <= weight.shape[0]:
        per_group = weight.shape[1] if call.op == "conv" else weight.shape[0] // int(groups)
        fits_int32(call, "x", per_group * numel(weight.shape[2:]))
    return rank, int(groups), x.dtype if dtype is None else dtype


def _conv(call: InferContext) -> list[Result] | None:
    common = _conv_common(call)
    if common is None:
        return None
    rank, groups, dtype = common
    x, weight = call["x"], call["weight"]
    n, c = x.shape[:2]
    k, c_per_group = weight.shape[:2]
    kernel = weight.shape[2:]
    if c % groups:
        call.problem(f"x has {c} channels, not a multiple of groups={groups}", "C % groups == 0")
    elif c_per_group * groups != c:
        call.problem(
            f"weight has {c_per_group} input channels per group, "
            f"x has {c} channels / groups={groups}",
            f"{c // groups}",
        )
    if k % groups:
        call.problem(
            f"weight has {k} output channels, not a multiple of groups={groups}", "K % groups == 0"
        )
    if 0 in kernel:
        call.problem(f"weight '{weight.name}' has an empty kernel {tuple(kernel)}", "sizes >= 1")
    stride = int_tuple(call, "stride", rank, 1)
    dilation = int_tuple(call, "dilation", rank, 1)
    padding = _padding(call, rank, kernel, stride or (1,) * rank, dilation or (1,) * rank)
    if stride is None or dilation is None or padding is None or call.problems:
        return None
    out = []
    for dim in range(rank):
        size = x.shape[2 + dim] + sum(padding[dim])
        reach = dilation[dim] * (kernel[dim] - 1) + 1
        if reach > size:
            call.problem(
                f"kernel reaches {reach} (size {kernel[dim]}, dilation {dilation[dim]}) over "
                f"spatial dim {dim}, the padded input is {size}",
                "a kernel no larger than the padded input",
                "pad more",
            )
        out.append((size - reach) // stride[dim] + 1)
    if call.problems:
        return None
    return [Result((n, k, *out), dtype, conv_order(x, weight))]


def _conv_transpose(call: InferContext) -> list[Result] | None:
    common = _conv_common(call)
    if common is None:
        return None
    rank, groups, dtype = common
    x, weight = call["x"], call["weight"]
    n, c = x.shape[:2]
    kernel = weight.shape[2:]
    if weight.shape[0] != c:
        call.problem(
            f"weight has {weight.shape[0]} input channels, x has {c} channels",
            f"{c}",
            "a transposed weight is (C, K/groups, ...)",
        )
    if c % groups:
        call.problem(f"x has {c} channels, not a multiple of groups={groups}", "C % groups == 0")
    if 0 in kernel:
        call.problem(f"weight '{weight.name}' has an empty kernel {tuple(kernel)}", "sizes >= 1")
    stride = int_tuple(call, "stride", rank, 1)
    dilation = int_tuple(call, "dilation", rank, 1)
    extra = int_tuple(call, "output_padding", rank, 0)
    padding = _padding(call, rank, kernel, stride or (1,) * rank, dilation or (1,) * rank)
    if stride is None or dilation is None or padding is None or extra is None or call.problems:
        return None
    out = []
    for dim in range(rank):
        if extra[dim] >= max(stride[dim], dilation[dim]):
            call.problem(
                f"output_padding={extra[dim]} over spatial dim {dim} is not smaller than "
                f"max(stride={stride[dim]}, dilation={dilation[dim]})",
                f"output_padding < {max(stride[dim], dilation[dim])}",
            )
        size = x.shape[2 + dim]
        size = (size - 1) * stride[dim] - sum(padding[dim])
        size += dilation[dim] * (kernel[dim] - 1) + extra[dim] + 1
        if size < 1:
            call.problem(
                f"output size over spatial dim {dim} is {size}",
                "at least 1",
                f"padding={padding[dim]} is larger than the kernel allows",
            )
        out.append(size)
    if call.problems:
        return None
    return [Result((n, weight.shape[1] * groups, *out), dtype, conv_order(x, weight))]


def _conv_wgrad(call: InferContext) -> list[Result] | None:
    same_dtype(call, "x", "dy")
    dy, x = call["dy"], call["x"]
    rank = len(x.shape) - 2
    groups = call.attrs["groups"]
    if rank not in (1, 2, 3):
        call.problem(
            f"x '{x.name}' has {len(x.shape)} dims {x.shape}", "3, 4 or 5: (N, C, spatial...)"
        )
    elif len(dy.shape) != len(x.shape):
        call.problem(f"dy '{dy.name}' has {len(dy.shape)} dims {dy.shape}", f"{len(x.shape)} dims")
    if not is_int(groups) or groups < 1:
        call.problem(f"groups={groups!r} is not a positive whole number", "groups >= 1")
    if call.problems:
        return None
    groups = call.attrs["groups"] = int(groups)
    kernel = int_tuple(call, "kernel", rank, 1)
    stride = int_tuple(call, "stride", rank, 1)
    dilation = int_tuple(call, "dilation", rank, 1)
    if kernel is None or stride is None or dilation is None:
        return None
    padding = _padding(call, rank, kernel, stride, dilation)
    if padding is None:
        return None
    for port, spec in (("x", x), ("dy", dy)):
        if spec.shape[1] % groups:
            call.problem(
                f"{port} has {spec.shape[1]} channels, not a multiple of groups={groups}",
                "a multiple of groups",
            )
    sizes = tuple(
        (n + sum(pad) - d * (r - 1) - 1) // s + 1
        for n, pad, d, r, s in zip(x.shape[2:], padding, dilation, kernel, stride, strict=True)
    )
    if dy.shape != (x.shape[0], dy.shape[1], *sizes):
        call.problem(
            f"dy '{dy.name}' has shape {dy.shape}",
            f"(N, K, out...) = ({x.shape[0]}, K, {', '.join(map(str, sizes))}), "
            "the convolution's result",
        )
    if call.problems:
        return None
    shape = (dy.shape[1], x.shape[1] // groups, *kernel)
    return [Result(shape, x.dtype, conv_order(x, dy))]


_CONV: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


_CONVS = (F.conv1d, F.conv2d, F.conv3d)


_CONVS_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _framed(x: torch.Tensor, sides: Sequence[tuple[int, int]]) -> torch.Tensor:
    """x with so many zeros (before, after) each spatial dim; below 0, without so many elements.

    The zeros come first: what is cut at one end may be more than x has, and ``F.pad``, which cuts
    first, then fails.
    """
    added = [max(side, 0) for pair in reversed(sides) for side in pair]
    x = F.pad(x, added) if any(added) else x
    for dim, (before, after) in enumerate(sides, 2):
        start, stop = max(-before, 0), x.shape[dim] + min(after, 0)
        x = x.narrow(dim, start, stop - start)
    return x


def _run_conv(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, weight = need(inputs[0]), need(inputs[1])
    padding, stride, dilation = list(attrs["padding"]), list(attrs["stride"]), attrs["dilation"]
    sizes = []
    for dim, (before, after) in enumerate(padding):
        n, reach = x.shape[2 + dim], dilation[dim] * (weight.shape[2 + dim] - 1) + 1
        sizes.append((n + before + after - reach) // stride[dim] + 1)
        if sizes[dim] == 1 < stride[dim]:
            # No stride is taken; with one oneDNN's result is garbage (float32 of one channel, where
            # the last dim is such a one; of bfloat16 see pytorch#169688).
            padding[dim], stride[dim] = (before, reach - n - before), 1
    if x.numel() == 0 or weight.numel() == 0:  # torch refuses some; no tap meets an element
        return x.new_zeros((x.shape[0], weight.shape[0], *sizes))
    same = [before for before, _ in padding]
    if any(before != after for before, after in padding):
        x, same = _framed(x, padding), [0] * len(padding)
    return _CONVS[len(padding) - 1](x, weight, None, stride, same, dilation, attrs["groups"])


def _run_conv_transpose(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, weight = need(inputs[0]), need(inputs[1])
    padding = attrs["padding"]
    run = _CONVS_TRANSPOSED[len(padding) - 1]
    groups, dilation, stride = attrs["groups"], attrs["dilation"], attrs["stride"]
    if x.numel() == 0 or weight.numel() == 0:
        extra = attrs["output_padding"]
        many = zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, extra, strict=True)
        sizes = [(n - 1) * s - sum(pad) + d * (r - 1) + e + 1 for n, pad, d, r, s, e in many]
        return x.new_zeros((x.shape[0], weight.shape[1] * groups, *sizes))
    same = [min(pair) for pair in padding]
    y = run(x, weight, None, stride, same, attrs["output_padding"], groups, dilation)
    return _framed(
        y, [(n - before, n - after) for (before, after), n in zip(padding, same, strict=True)]
    )


def _run_conv_wgrad(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, x = need(inputs[0]), need(inputs[1])
    kernel, stride, dilation = attrs["kernel"], attrs["stride"], attrs["dilation"]
    shape = (dy.shape[1], x.shape[1] // attrs["groups"], *kernel)
    if dy.numel() == 0 or x.numel() == 0:
        return x.new_zeros(shape)
    # The part of the padded x that the kernel reaches; rows behind it meet no tap.
    many = zip(dy.shape[2:], stride, dilation, kernel, x.shape[2:], attrs["padding"], strict=True)
    sides = [
        (before, (out - 1) * s + d * (r - 1) + 1 - n - before)
        for out, s, d, r, n, (before, _) in many
    ]
    x = _framed(x, sides)
    none = [0] * len(kernel)
    _, weight, _ = torch.ops.aten.convolution_backward(
        dy,
        x,
        x.new_zeros(()).expand(shape),
        None,
        stride,
        none,
        dilation,
        False,
        none,
        attrs["groups"],
        [False, True, False],
    )
    return need(weight)


register("conv", "x weight", _conv, exactly(_run_conv), **_CONV, traits="convolution multiplies")
register(
    "conv_transpose",
    "x weight",
    _conv_transpose,
    exactly(_run_conv_transpose),
    output_padding=0,
    **_CONV,
    traits="convolution multiplies",
)
register(
    "conv_wgrad",
    "dy x",
    _conv_wgrad,
    _run_conv_wgrad,
    outputs="dweight",
    kernel=REQUIRED,
    **_CONV,
    traits="convolution_gradient multiplies",
)
