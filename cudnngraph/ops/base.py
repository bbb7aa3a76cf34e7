"""The op table: for each op its ports, its attributes and its inference rule.

A rule gets a :class:`Call`, checks the operands, brings the attributes into their one canonical
form and answers with a :class:`Result` per output port: shape, dtype and the order in which the
dims lie in memory. Rules report mistakes through :meth:`Call.problem` and answer None when the
result cannot be known. Adding an op means one row here, one in ``reference.RULES``, one in
``backend.lowering.driver.RULES``, one in ``grad.RULES`` and its samples; a test asserts that the
tables agree.

Letters in shapes: N batch, C input channels, K output channels, R S kernel; B batch, H heads,
S sequence, D head dim; M N rows and columns of a product, K what it sums over.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ..errors import Problem
from ..ir.spec import TensorSpec, is_channels_last, is_contiguous, memory_order, numel, view_strides
from . import aten

MAX_RANK = 8

#: Stands in the table for an attribute that has no default.
REQUIRED = inspect.Parameter.empty

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: From here on softplus is the identity, as torch has it by default.
SOFTPLUS_THRESHOLD = 20

#: The 8-bit floating formats: data of products and attention, results of quantize, nothing else.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED = (torch.int8, *FP8)

#: A sum of so many products of two int8 numbers may be 2^31, which int32 does not hold.
INT32_TERMS = 1 << 17


@dataclass(frozen=True)
class Result:
    """What inference knows of one output: shape, dtype, and its dims from slowest to fastest."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]


@dataclass
class Call:
    """One op with its operands, as a rule sees it. ``attrs`` is brought into canonical form.

    ``numbers`` are the ports at which a Python number stands, which has no dtype of its own.
    """

    op: str
    name: str
    inputs: Mapping[str, TensorSpec | None]
    attrs: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    numbers: frozenset[str] = frozenset()

    def problem(self, what: str, expected: str = "", mend: str = "") -> None:
        """Report one mistake of this op."""
        self.problems.append(Problem(f"{self.op} '{self.name}'", what, expected, mend))

    def __getitem__(self, port: str) -> TensorSpec:
        value = self.inputs[port]
        assert value is not None, f"{self.op} needs {port}"
        return value

    def get(self, port: str) -> TensorSpec | None:
        """The operand at an optional port."""
        return self.inputs[port]


InferRule = Callable[[Call], Sequence[Result | None] | None]


@dataclass(frozen=True)
class Op:
    """One row of the table.

    ``inputs`` names the ports in order, optional ones end in "?". ``attrs`` maps each attribute to
    its default, to :data:`REQUIRED` where it has none. ``pointwise`` marks an op that works element
    by element (it may join an epilogue), ``view`` one whose result is its operand seen in another
    way: where strides allow, the same memory; ``torch_only`` one that cuDNN's Python frontend does
    not have.

    A single port that ends in "*" takes one operand or more: x* is x0, x1 and so on.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    infer: InferRule
    pointwise: bool = False
    view: bool = False
    torch_only: bool = False

    @property
    def ports(self) -> tuple[str, ...]:
        """Port names without their marks."""
        return tuple(port.rstrip("?*") for port in self.inputs)

    def ports_of(self, count: int) -> tuple[str, ...]:
        """The names of the ports of a node with ``count`` operands, open ones counted."""
        if self.inputs and self.inputs[0].endswith("*"):
            return tuple(f"{self.ports[0]}{place}" for place in range(count))
        return self.ports

    def required(self, port: str) -> bool:
        """Whether ``port`` must be connected."""
        return f"{port}?" not in self.inputs


# -- attributes ------------------------------------------------------------------------------------


_FLOAT32_MAX = torch.finfo(torch.float32).max


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _each_dim(value: Any, rank: int) -> tuple[Any, ...]:
    """What is given for each spatial dim, or once for all of them, also in a tuple as torch's."""
    many = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,)
    return many * rank if len(many) == 1 else many


def _int_tuple(call: Call, attr: str, rank: int, low: int) -> tuple[int, ...] | None:
    """Canonical form: one int a spatial dim."""
    value = call.attrs[attr]
    many = _each_dim(value, rank)
    if not all(_whole(item) for item in many):
        call.problem(
            f"{attr}={value!r} is not made of whole numbers", "an int, or one per spatial dim"
        )
        return None
    if len(many) != rank:
        call.problem(
            f"{attr}={value!r} has {len(many)} numbers", f"1 or {rank}, one per spatial dim of x"
        )
        return None
    if any(item < low for item in many):
        sign = "negative" if low == 0 else "not positive"
        call.problem(f"{attr}={value!r} is {sign}", f"every {attr} >= {low}")
        return None
    if not _fits_int(call, attr, many):
        return None
    many = tuple(int(item) for item in many)
    call.attrs[attr] = many
    return many


def _fits_int(call: Call, attr: str, many: Sequence[int]) -> bool:
    """Torch and cuDNN hold the geometry of windows in 32 bits."""
    if all(item < 1 << 31 for item in many):
        return True
    call.problem(f"{attr}={call.attrs[attr]!r} does not fit 32 bits", f"every {attr} < {1 << 31}")
    return False


def _padding(
    call: Call, rank: int, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
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
    many = _each_dim(value, rank)
    if any(isinstance(item, (tuple, list)) for item in many):
        listed = [tuple(item) if isinstance(item, (tuple, list)) else (item, item) for item in many]
    else:
        listed = [(item, item) for item in many]
    if not all(len(pair) == 2 and all(_whole(item) for item in pair) for pair in listed):
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
    if not _fits_int(call, "padding", [item for pair in listed for item in pair]):
        return None
    pairs = tuple((int(before), int(after)) for before, after in listed)
    call.attrs["padding"] = pairs
    return pairs


def _number(call: Call, attr: str) -> float | None:
    """Canonical form: a finite float."""
    value = call.attrs[attr]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        call.problem(f"{attr}={value!r} is not a number", "a finite number")
        return None
    if not math.isfinite(value):
        call.problem(f"{attr}={value!r} is not finite", "a finite number")
        return None
    given = [spec for spec in call.inputs.values() if spec is not None]
    if given and abs(float(value)) > _FLOAT32_MAX and all(x.dtype != torch.float64 for x in given):
        call.problem(f"{attr}={value!r} is no float32", f"at most {_FLOAT32_MAX:.7g} in size")
        return None
    call.attrs[attr] = float(value)
    return float(value)


def _eps(call: Call) -> float | None:
    """Canonical form: a float >= 0."""
    eps = _number(call, "eps")
    if eps is not None and eps < 0:
        call.problem(f"eps={eps!r} is negative", "eps >= 0")
        return None
    return eps


def _flag(call: Call, attr: str) -> bool:
    value = call.attrs[attr]
    if not isinstance(value, bool):
        call.problem(f"{attr}={value!r} is not a bool", "True or False")
        return False
    return value


# -- operands --------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


def _float_operand(call: Call, port: str) -> bool:
    spec = call[port]
    if spec.dtype in FLOATS:
        return True
    call.problem(
        f"{port} '{spec.name}' is {dtype_name(spec.dtype)}",
        "float16, bfloat16, float32 or float64",
        "dequantize or convert it first"
        if spec.dtype in (*QUANTIZED, torch.int32)
        else "convert it first",
    )
    return False


def _same_dtype(call: Call, first: str, *others: str) -> bool:
    ok = _float_operand(call, first)
    for port in others:
        if call[port].dtype != call[first].dtype:
            call.problem(
                f"{port} '{call[port].name}' is {dtype_name(call[port].dtype)}, "
                f"{first} '{call[first].name}' is {dtype_name(call[first].dtype)}",
                "the same dtype for both",
                f"convert {port}",
            )
            ok = False
    return ok


def _factors(call: Call, first: str, second: str) -> torch.dtype | None:
    """The dtype of what the products of two operands of one dtype are summed up to; None if wrong.

    Of int8 that is int32, of FP8 (either format, or one of each) float32.
    """
    a, b = call[first], call[second]
    if a.dtype == b.dtype == torch.int8:
        return torch.int32
    if a.dtype in FP8 and b.dtype in FP8:
        return torch.float32
    if a.dtype in QUANTIZED or b.dtype in QUANTIZED:
        call.problem(
            f"{second} '{b.name}' is {dtype_name(b.dtype)}, "
            f"{first} '{a.name}' is {dtype_name(a.dtype)}",
            "int8 for both, FP8 for both or one floating dtype for both",
            "quantize one, or dequantize the other",
        )
        return None
    return a.dtype if _same_dtype(call, first, second) else None


def _fits_int32(call: Call, operand: str, terms: int) -> None:
    """Report a sum of int8 products that int32 need not hold."""
    if call[operand].dtype == torch.int8 and terms >= INT32_TERMS:
        call.problem(
            f"sums up {terms} products of int8, which int32 need not hold",
            f"fewer than {INT32_TERMS}",
            "cut it and add the parts",
        )


def _same_shape(call: Call, first: str, *others: str) -> bool:
    ok = True
    for port in others:
        if call[port].shape != call[first].shape:
            call.problem(
                f"{port} '{call[port].name}' has shape {call[port].shape}",
                f"{call[first].shape}, the shape of {first}",
            )
            ok = False
    return ok


def _param_dtype(call: Call, port: str, data: str = "x") -> bool:
    """Parameters share the dtype of the data or are float32 beside 16-bit data."""
    param, x = call[port], call[data]
    if param.dtype == x.dtype and x.dtype in FLOATS:
        return True
    if param.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16):
        return True
    call.problem(
        f"{port} '{param.name}' is {dtype_name(param.dtype)}, "
        f"{data} '{x.name}' is {dtype_name(x.dtype)}",
        f"{dtype_name(x.dtype)}"
        + ("" if x.dtype in (torch.float32, torch.float64) else " or float32"),
        f"convert {port}",
    )
    return False


def _like_order(spec: TensorSpec) -> tuple[int, ...]:
    """The memory order that a result shaped like ``spec`` takes: its own, where that is one."""
    if any(s == 0 and n > 1 for n, s in zip(spec.shape, spec.stride, strict=True)):
        return tuple(range(len(spec.shape)))
    return memory_order(spec.shape, spec.stride)


def _channels_last_order(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _conv_order(x: TensorSpec, weight: TensorSpec) -> tuple[int, ...]:
    """channels_last when x or the weight is unmistakably so (torch's rule), else contiguous."""
    rank = len(x.shape)
    for spec in (x, weight):
        if is_channels_last(spec.shape, spec.stride) and not is_contiguous(spec.shape, spec.stride):
            return _channels_last_order(rank)
    return tuple(range(rank))


# -- convolution -----------------------------------------------------------------------------------


def _conv_common(call: Call) -> tuple[int, int, torch.dtype] | None:
    """Rank, groups and the result's dtype, after the checks that both directions share.

    None when they say nothing.
    """
    x, weight = call["x"], call["weight"]
    dtype = _factors(call, "x", "weight")
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
    if not _whole(groups) or groups < 1:
        call.problem(f"groups={groups!r} is not a positive whole number", "groups >= 1")
        groups = 1
    call.attrs["groups"] = int(groups)
    if not ok:
        return None
    if groups <= weight.shape[0]:
        per_group = weight.shape[1] if call.op == "conv" else weight.shape[0] // int(groups)
        _fits_int32(call, "x", per_group * numel(weight.shape[2:]))
    return rank, int(groups), x.dtype if dtype is None else dtype


def _conv(call: Call) -> list[Result] | None:
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
    stride = _int_tuple(call, "stride", rank, 1)
    dilation = _int_tuple(call, "dilation", rank, 1)
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
    return [Result((n, k, *out), dtype, _conv_order(x, weight))]


def _conv_transpose(call: Call) -> list[Result] | None:
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
    stride = _int_tuple(call, "stride", rank, 1)
    dilation = _int_tuple(call, "dilation", rank, 1)
    extra = _int_tuple(call, "output_padding", rank, 0)
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
    return [Result((n, weight.shape[1] * groups, *out), dtype, _conv_order(x, weight))]


def _conv_wgrad(call: Call) -> list[Result] | None:
    _same_dtype(call, "x", "dy")
    dy, x = call["dy"], call["x"]
    rank = len(x.shape) - 2
    groups = call.attrs["groups"]
    if rank not in (1, 2, 3):
        call.problem(
            f"x '{x.name}' has {len(x.shape)} dims {x.shape}", "3, 4 or 5: (N, C, spatial...)"
        )
    elif len(dy.shape) != len(x.shape):
        call.problem(f"dy '{dy.name}' has {len(dy.shape)} dims {dy.shape}", f"{len(x.shape)} dims")
    if not _whole(groups) or groups < 1:
        call.problem(f"groups={groups!r} is not a positive whole number", "groups >= 1")
    if call.problems:
        return None
    groups = call.attrs["groups"] = int(groups)
    kernel = _int_tuple(call, "kernel", rank, 1)
    stride = _int_tuple(call, "stride", rank, 1)
    dilation = _int_tuple(call, "dilation", rank, 1)
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
    return [Result(shape, x.dtype, _conv_order(x, dy))]


# -- per-channel ops -------------------------------------------------------------------------------


def _channels(call: Call, port: str, *, of_images: bool = False) -> bool:
    """A per-channel operand is (C,), or has C at dim 1 and 1 elsewhere at the rank of x.

    With ``of_images`` it may have N at dim 0 too: other numbers for each image.
    """
    spec, x = call[port], call["x"]
    ok = _param_dtype(call, port)
    n, c = x.shape[:2]
    ones = (1,) * (len(x.shape) - 2)
    if spec.shape not in ((c,), (1, c, *ones), *([(n, c, *ones)] if of_images else ())):
        call.problem(f"{port} '{spec.name}' has shape {spec.shape}", f"({c},), the channels of x")
        ok = False
    return ok


def _has_channels(call: Call) -> bool:
    x = call["x"]
    if len(x.shape) < 2:
        call.problem(f"x '{x.name}' has {len(x.shape)} dims {x.shape}", "at least 2: (N, C, ...)")
        return False
    return _float_operand(call, "x")


def _per_channel(port: str) -> InferRule:
    def infer(call: Call) -> list[Result] | None:
        if not _has_channels(call) or not _channels(call, port, of_images=True):
            return None
        x = call["x"]
        return [Result(x.shape, x.dtype, _like_order(x))]

    return infer


def _batch_norm(call: Call) -> list[Result] | None:
    if not _has_channels(call):
        return None
    used = [port for port in ("running_mean", "running_var", "weight", "bias") if call.get(port)]
    ok = all([_channels(call, port) for port in used])
    if _eps(call) is None or not ok:
        return None
    x = call["x"]
    return [Result(x.shape, x.dtype, _like_order(x))]


def _batch_norm_apply(call: Call) -> list[Result] | None:
    if not _has_channels(call):
        return None
    if not all([_channels(call, port) for port in ("mean", "inv_std", "weight", "bias")]):
        return None
    x = call["x"]
    return [Result(x.shape, x.dtype, _like_order(x))]


def _statistics_dtype(x: TensorSpec) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _batch_norm_train(call: Call) -> list[Result | None] | None:
    if not _has_channels(call):
        return None
    x = call["x"]
    running = [port for port in ("running_mean", "running_var") if call.get(port) is not None]
    ok = all([_channels(call, port) for port in ("weight", "bias", *running)])
    if len(running) == 1:
        call.problem(f"{running[0]} is given alone", "running_mean and running_var, or neither")
        ok = False
    values = x.numel // x.shape[1] if x.shape[1] else 0
    if values < 2:
        call.problem(
            f"x '{x.name}' has {values} values per channel {x.shape}",
            "at least 2, to have a variance",
        )
        ok = False
    eps, momentum = _eps(call), _number(call, "momentum")
    if eps is None or momentum is None or not ok:
        return None
    statistics = Result((x.shape[1],), _statistics_dtype(x), (0,))
    following: list[Result | None] = [None, None]
    if running:
        specs = [call[port] for port in running]
        following = [Result(s.shape, s.dtype, tuple(range(len(s.shape)))) for s in specs]
    return [Result(x.shape, x.dtype, _like_order(x)), statistics, statistics, *following]


def _batch_norm_backward(call: Call) -> list[Result] | None:
    if not _has_channels(call):
        return None
    ok = all([_channels(call, port) for port in ("weight", "mean", "inv_std")])
    if not _same_dtype(call, "x", "dy") or not _same_shape(call, "x", "dy") or not ok:
        return None
    x, weight = call["x"], call["weight"]
    vector = Result(weight.shape, weight.dtype, tuple(range(len(weight.shape))))
    return [Result(x.shape, x.dtype, _like_order(x)), vector, vector]


# -- normalisation of each channel of each image ---------------------------------------------------


def _per_image(call: Call) -> bool:
    """The checks that instance norm and its gradient share."""
    x = call["x"]
    if len(x.shape) < 3:
        call.problem(f"x '{x.name}' has {len(x.shape)} dims {x.shape}", "at least 3: (N, C, ...)")
        return False
    ok = _float_operand(call, "x")
    given = [port for port in ("weight", "bias") if call.inputs.get(port) is not None]
    if given and "bias" in call.inputs and len(given) == 1:
        call.problem(f"{given[0]} is given alone", "weight and bias, or neither")
        ok = False
    return all([_channels(call, port) for port in given]) and ok


def _image_statistic(x: TensorSpec) -> Result:
    """One number for each channel of each image, at the rank of x."""
    shape = (*x.shape[:2], *(1,) * (len(x.shape) - 2))
    return Result(shape, _statistics_dtype(x), _like_order(x))


def _instance_norm(call: Call) -> list[Result | None] | None:
    ok = _per_image(call)
    before = len(call.problems)
    wanted = _flag(call, "return_stats")
    if _eps(call) is None or not ok or len(call.problems) > before:
        return None
    x = call["x"]
    stat = _image_statistic(x) if wanted else None
    return [Result(x.shape, x.dtype, _like_order(x)), stat, stat]


def _group_affine(call: Call) -> list[Result | None] | None:
    before = len(call.problems)
    if not _has_channels(call):
        return None
    if call.inputs.get("weight") is not None:
        _channels(call, "weight")
    x, groups = call["x"], call.attrs["num_groups"]
    c = x.shape[1]
    whole = isinstance(groups, int) and not isinstance(groups, bool)
    if not whole or groups < 1 or c % groups:
        call.problem(f"num_groups is {groups!r}", f"a divisor of the {c} channels of x")
    if _eps(call) is None or len(call.problems) > before:
        return None
    return [_image_statistic(x)] * 2


def _instance_norm_backward(call: Call) -> list[Result | None] | None:
    if not _per_image(call):
        return None
    ok = _same_dtype(call, "x", "dy") and _same_shape(call, "x", "dy")
    x, weight = call["x"], call.get("weight")
    stat = _image_statistic(x)
    for port in ("mean", "inv_std"):
        spec = call[port]
        if (spec.shape, spec.dtype) != (stat.shape, stat.dtype):
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
                f"{dtype_name(stat.dtype)} {stat.shape}",
            )
            ok = False
    if not ok:
        return None
    vector = None
    if weight is not None:
        vector = Result(weight.shape, weight.dtype, tuple(range(len(weight.shape))))
    return [Result(x.shape, x.dtype, _like_order(x)), vector, vector]


# -- normalisation over trailing dims --------------------------------------------------------------


def _trailing_norm(*stats: str) -> InferRule:
    """``stats`` are the outputs behind y: float32, the shape of x with 1 for what is summed up."""

    def infer(call: Call) -> list[Result | None] | None:
        x, weight = call["x"], call["weight"]
        if not _float_operand(call, "x"):
            return None
        ok, count = True, len(weight.shape)
        if count == 0 or x.shape[-count:] != weight.shape:
            call.problem(
                f"weight '{weight.name}' has shape {weight.shape}",
                f"the last dims of x '{x.name}' {x.shape}",
            )
            ok = False
        for port in ("weight", "bias"):
            if call.get(port) is not None:
                ok &= _param_dtype(call, port)
        bias = call.get("bias")
        if bias is not None and bias.shape != weight.shape:
            call.problem(
                f"bias '{bias.name}' has shape {bias.shape}", f"{weight.shape}, that of the weight"
            )
            ok = False
        ok &= _eps(call) is not None
        before = len(call.problems)
        wanted = _flag(call, "return_stats")
        if not ok or len(call.problems) > before:
            return None
        order = _like_order(x)
        lead = len(x.shape) - count
        stat = Result((*x.shape[:lead], *(1,) * count), _statistics_dtype(x), order)
        return [Result(x.shape, x.dtype, order), *(stat if wanted else None for _ in stats)]

    return infer


def _normalize(call: Call) -> list[Result] | None:
    x = call["x"]
    if not x.shape:
        call.problem(f"x '{x.name}' has no dims", "at least one: rows of numbers")
        return None
    if not _float_operand(call, "x") or _eps(call) is None:
        return None
    return [Result(x.shape, x.dtype, _like_order(x))]


def _trailing_norm_backward(*stats: str) -> InferRule:
    """``stats`` are the ports behind the weight: float32, x's shape with 1 for what is summed."""

    def infer(call: Call) -> list[Result | None] | None:
        x, weight = call["x"], call["weight"]
        ok = _same_dtype(call, "x", "dy") and _same_shape(call, "x", "dy")
        count = len(weight.shape)
        if count == 0 or x.shape[-count:] != weight.shape:
            call.problem(
                f"weight '{weight.name}' has shape {weight.shape}",
                f"the last dims of x '{x.name}' {x.shape}",
            )
            return None
        ok &= _param_dtype(call, "weight")
        shape = (*x.shape[: len(x.shape) - count], *(1,) * count)
        for port in stats:
            stat = call[port]
            if stat.shape != shape or stat.dtype != _statistics_dtype(x):
                call.problem(
                    f"{port} '{stat.name}' is {dtype_name(stat.dtype)} {stat.shape}",
                    f"{dtype_name(_statistics_dtype(x))} {shape}",
                )
                ok = False
        before = len(call.problems)
        with_bias = _flag(call, "bias_grad")
        if not ok or len(call.problems) > before:
            return None
        vector = Result(weight.shape, weight.dtype, _like_order(weight))
        return [Result(x.shape, x.dtype, _like_order(x)), vector, vector if with_bias else None]

    return infer


# -- matrix product --------------------------------------------------------------------------------


def _matmul(call: Call) -> list[Result] | None:
    x, y = call["x"], call["y"]
    for port in ("x", "y"):
        if not 2 <= len(call[port].shape) <= 4:
            call.problem(
                f"{port} '{call[port].name}' has {len(call[port].shape)} dims {call[port].shape}",
                "2, 3 or 4: " + ("(..., M, K)" if port == "x" else "(..., K, N)"),
            )
            return None
    dtype = _factors(call, "x", "y")
    ok = dtype is not None
    _fits_int32(call, "x", x.shape[-1])
    if x.shape[-1] != y.shape[-2]:
        call.problem(
            f"y '{y.name}' {y.shape} has {y.shape[-2]} rows, x '{x.name}' {x.shape} has "
            f"{x.shape[-1]} columns",
            f"y (..., {x.shape[-1]}, N)",
            "transpose y" if x.shape[-1] == y.shape[-1] else "",
        )
        ok = False
    try:
        batch = _broadcast_shapes([x.shape[:-2], y.shape[:-2]])
    except ValueError:
        call.problem(
            f"batch dims do not broadcast: x '{x.name}' {x.shape}, y '{y.name}' {y.shape}",
            "equal sizes, or 1, before the last two dims",
        )
        return None
    shape = (*batch, x.shape[-2], y.shape[-1])
    if dtype is None or not ok or call.problems:
        return None
    return [Result(shape, dtype, tuple(range(len(shape))))]


# -- quantisation ----------------------------------------------------------------------------------


def _quantization(call: Call) -> bool:
    """Checks the scale, a float32 number or vector along ``dim`` of x, and the zero point."""
    x, scale = call["x"], call.get("scale")
    before = len(call.problems)
    point = call.attrs["zero_point"]
    if not _whole(point) or point != 0:
        call.problem(
            f"zero_point={point!r}", "0: quantisation is symmetric here", "shift the data instead"
        )
    else:
        call.attrs["zero_point"] = 0
    if scale is None:
        call.attrs["dim"] = 1
        return len(call.problems) == before
    if scale.dtype != torch.float32:
        call.problem(
            f"scale '{scale.name}' is {dtype_name(scale.dtype)}", "float32", "convert scale"
        )
    if scale.shape in ((), (1,)):
        call.attrs["dim"] = 1  # says nothing
        return len(call.problems) == before
    dim = _dim(call, "dim", len(x.shape))
    if dim is not None and scale.shape != (x.shape[dim],):
        call.problem(
            f"scale '{scale.name}' has shape {scale.shape}",
            f"() or (1,) for all of x, or ({x.shape[dim]},) along dim {dim} of x {x.shape}",
        )
    return len(call.problems) == before


def _dequantize(call: Call) -> list[Result] | None:
    x = call["x"]
    ok = x.dtype in (*QUANTIZED, torch.int32, torch.float32)
    if not ok:
        call.problem(
            f"x '{x.name}' is {dtype_name(x.dtype)}",
            "int8, FP8, or the int32 or float32 that their products give",
            "multiply or scale it",
        )
    if not _quantization(call) or not ok:
        return None
    return [Result(x.shape, torch.float32, _like_order(x))]


def _quantize(call: Call) -> list[Result] | None:
    x, given = call["x"], call.attrs["dtype"]
    ok = _float_operand(call, "x")
    kinds = {dtype_name(dtype): dtype for dtype in QUANTIZED}
    name = dtype_name(given) if isinstance(given, torch.dtype) else given
    dtype = kinds.get(name) if isinstance(name, str) else None
    if dtype is None:
        call.problem(f"dtype={given!r} is no 8-bit dtype", " or ".join(f"torch.{k}" for k in kinds))
    if not _quantization(call) or not ok or dtype is None:
        return None
    call.attrs["dtype"] = name
    return [Result(x.shape, dtype, _like_order(x))]


# -- pointwise -------------------------------------------------------------------------------------


def _broadcast_shapes(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """torch's rule: from the last dim back, sizes are equal or 1."""
    rank = max(map(len, shapes))
    out = []
    for sizes in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        real = {size for size in sizes if size != 1}
        if len(real) > 1:
            raise ValueError(f"{sizes} do not broadcast")
        out.append(real.pop() if real else 1)
    return tuple(out)


def _broadcast(call: Call, ports: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Common shape and memory order of operands that broadcast as torch does."""
    specs = [call[port] for port in ports]
    try:
        shape = _broadcast_shapes([spec.shape for spec in specs])
    except ValueError:
        listed = ", ".join(f"{port} '{call[port].name}' {call[port].shape}" for port in ports)
        call.problem(
            f"shapes do not broadcast: {listed}", "equal sizes, or 1, from the last dim back"
        )
        return None
    for spec in specs:
        if spec.shape == shape:
            return shape, _like_order(spec)
    return shape, tuple(range(len(shape)))


def _promoted(call: Call, ports: Sequence[str]) -> torch.dtype | None:
    """float32 beside a 16-bit dtype gives float32; no other mix has a rule.

    As in torch, values that have dims decide; where there is none, those of no dims; where there is
    none of these either, Python numbers.
    """
    if not all([_float_operand(call, port) for port in ports]):
        return None
    given = [port for port in ports if port not in call.numbers] or list(ports)
    solid = [port for port in given if call[port].shape != ()] or given
    dtypes = dict.fromkeys(call[port].dtype for port in solid)
    if len(dtypes) == 1:
        return next(iter(dtypes))
    if len(dtypes) == 2 and torch.float32 in dtypes and torch.float64 not in dtypes:
        return torch.float32
    listed = ", ".join(
        f"{port} '{call[port].name}' {dtype_name(call[port].dtype)}" for port in solid
    )
    call.problem(
        f"dtypes do not mix: {listed}",
        "one dtype, or float32 beside one 16-bit dtype",
        "convert one",
    )
    return None


def _unary(*attrs: str) -> InferRule:
    def infer(call: Call) -> list[Result] | None:
        ok = _float_operand(call, "x")
        numbers_ = [_number(call, attr) for attr in attrs]
        x = call["x"]
        return [Result(x.shape, x.dtype, _like_order(x))] if ok and None not in numbers_ else None

    return infer


def _softplus(call: Call) -> Sequence[Result | None] | None:
    result = _unary("beta")(call)
    if result is not None and call.attrs["beta"] <= 0:
        call.problem(f"beta={call.attrs['beta']!r} is not positive", "beta > 0")
        return None
    return result


def _clamp(call: Call) -> list[Result] | None:
    ok = _float_operand(call, "x")
    given = [attr for attr in ("min", "max") if call.attrs[attr] is not None]
    if not given:
        call.problem("min and max are both None", "at least one of them")
        return None
    limits = [_number(call, attr) for attr in given]
    x = call["x"]
    return [Result(x.shape, x.dtype, _like_order(x))] if ok and None not in limits else None


def _binary(call: Call) -> list[Result] | None:
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("x", "y"))
    return [Result(common[0], dtype, common[1])] if dtype is not None and common else None


def _comparison(call: Call) -> list[Result] | None:
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("x", "y"))
    return [Result(common[0], torch.bool, common[1])] if dtype is not None and common else None


def _bool_operand(call: Call, port: str) -> bool:
    if call[port].dtype == torch.bool:
        return True
    call.problem(
        f"{port} '{call[port].name}' is {dtype_name(call[port].dtype)}", "bool", "compare it first"
    )
    return False


def _logical(*ports: str) -> InferRule:
    def infer(call: Call) -> list[Result] | None:
        ok = all([_bool_operand(call, port) for port in ports])
        common = _broadcast(call, ports)
        return [Result(common[0], torch.bool, common[1])] if ok and common else None

    return infer


def _where(call: Call) -> list[Result] | None:
    ok = _bool_operand(call, "condition")
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("condition", "x", "y"))
    return [Result(common[0], dtype, common[1])] if ok and dtype is not None and common else None


def _activation_backward(port: str, *attrs: str) -> InferRule:
    """The gradient dy through an activation whose input or output stands at ``port``."""

    def infer(call: Call) -> list[Result] | None:
        dtype = _promoted(call, ("dy", port))
        same = _same_shape(call, port, "dy")
        numbers_ = [_number(call, attr) for attr in attrs]
        if dtype is None or not same or None in numbers_:
            return None
        dy = call["dy"]
        return [Result(dy.shape, dtype, _like_order(dy))]

    return infer


def _to_float(call: Call) -> list[Result] | None:
    x = call["x"]
    if x.dtype not in (torch.uint8, torch.int8, torch.int32):
        call.problem(f"x '{x.name}' is {dtype_name(x.dtype)}", "uint8, int8 or int32")
        return None
    return [Result(x.shape, torch.float32, _like_order(x))]


def _constant(call: Call) -> list[Result] | None:
    return [Result((), torch.float32, ())] if _number(call, "value") is not None else None


# -- shape -----------------------------------------------------------------------------------------

MODES = ("sum", "mean", "max", "min", "amax")


def _dims(call: Call, attr: str, value: Any, rank: int) -> tuple[int, ...] | None:
    """Canonical form: dims counted from the front, each once."""
    many = (value,) if _whole(value) else value
    if not isinstance(many, (tuple, list)) or not all(_whole(dim) for dim in many):
        call.problem(f"{attr}={value!r} is not made of whole numbers", "a dim, or several")
        return None
    if any(not -rank <= dim < rank for dim in many):
        call.problem(f"{attr}={value!r} is out of range", f"dims of a tensor of {rank} dims")
        return None
    front = tuple(int(dim) % rank for dim in many)
    if len(set(front)) != len(front):
        call.problem(f"{attr}={value!r} names a dim twice", "each dim once")
        return None
    return front


def _reduction(call: Call) -> list[Result] | None:
    ok = _float_operand(call, "x")
    x, mode = call["x"], call.attrs["mode"]
    rank = len(x.shape)
    if mode not in MODES:
        call.problem(f"mode={mode!r} is unknown", " or ".join(map(repr, MODES)))
        ok = False
    given, keep = call.attrs["dims"], call.attrs["keepdim"]
    dims = tuple(range(rank)) if given is None else _dims(call, "dims", given, rank)
    if dims is None:
        return None
    dims = tuple(sorted(dims))
    if not dims and rank:
        call.problem(f"dims={given!r} names no dim", "at least one, or None for all")
        ok = False
    kept = (dims if keep else ()) if isinstance(keep, bool) else _dims(call, "keepdim", keep, rank)
    if kept is None:
        return None
    if not set(kept) <= set(dims):
        call.problem(f"keepdim={keep!r} names dims that are not reduced", f"some of {dims}")
        ok = False
    if mode != "sum" and any(x.shape[dim] == 0 for dim in dims):
        call.problem(f"{mode} over no element of x '{x.name}' {x.shape}", "mode='sum'")
        ok = False
    if not ok:
        return None
    kept = tuple(sorted(kept))
    call.attrs["dims"] = dims
    # One canonical form: True for all and False for none, else the dims.
    call.attrs["keepdim"] = bool(dims) if kept == dims else kept or False
    stay = [dim for dim in range(rank) if dim not in dims or dim in kept]
    shape = tuple(1 if dim in dims else x.shape[dim] for dim in stay)
    order = tuple(stay.index(dim) for dim in _like_order(x) if dim in stay)
    return [Result(shape, x.dtype, order)]


def _expand(call: Call) -> list[Result] | None:
    x, shape = call["x"], call.attrs["shape"]
    if not isinstance(shape, (tuple, list, torch.Size)) or any(
        not _whole(n) or n < 0 for n in shape
    ):
        call.problem(f"shape={shape!r} is not a shape", "whole numbers >= 0")
        return None
    shape = tuple(int(n) for n in shape)
    rank, given = len(shape), call.attrs["dims"]
    if given is None and len(x.shape) > rank:
        call.problem(f"x '{x.name}' has {len(x.shape)} dims {x.shape}", f"at most {rank}")
        return None
    last = tuple(range(rank - len(x.shape), rank))
    dims = last if given is None else _dims(call, "dims", given, rank)
    if dims is None:
        return None
    if len(dims) != len(x.shape) or list(dims) != sorted(dims):
        call.problem(f"dims={given!r} for x {x.shape}", "the place of each dim of x, ascending")
        return None
    if any(n not in (1, shape[dim]) for n, dim in zip(x.shape, dims, strict=True)):
        call.problem(
            f"x '{x.name}' has shape {x.shape}",
            f"1 or {tuple(shape[dim] for dim in dims)}, the sizes of dims {dims} of {shape}",
        )
        return None
    call.attrs["shape"], call.attrs["dims"] = shape, dims
    order = _like_order(x) if x.shape == shape else tuple(range(rank))
    return [Result(shape, x.dtype, order)]


# -- softmax and its loss --------------------------------------------------------------------------


def _softmax(call: Call) -> list[Result] | None:
    x = call["x"]
    ok = _float_operand(call, "x")
    if _dim(call, "dim", len(x.shape)) is None or not ok:
        return None
    return [Result(x.shape, x.dtype, _like_order(x))]


def _softmax_backward(call: Call) -> list[Result] | None:
    dy, y = call["dy"], call["y"]
    ok = _same_dtype(call, "y", "dy") and _same_shape(call, "y", "dy")
    if _dim(call, "dim", len(y.shape)) is None or not ok:
        return None
    return [Result(dy.shape, dy.dtype, _like_order(y))]


REDUCTIONS_OF_LOSS = ("mean", "sum", "none")


def _loss_options(call: Call, classes: tuple[int, ...]) -> bool:
    """Checks what a loss over (N, C, ...) and its gradient share."""
    before = len(call.problems)
    target, reduction = call["target"], call.attrs["reduction"]
    if reduction not in REDUCTIONS_OF_LOSS:
        known = " or ".join(map(repr, REDUCTIONS_OF_LOSS))
        call.problem(f"reduction={reduction!r} is unknown", known)
    if not _whole(call.attrs["ignore_index"]):
        call.problem(f"ignore_index={call.attrs['ignore_index']!r}", "a whole number")
    if len(classes) < 2 or classes[1] < 1:
        call.problem(f"x has shape {classes}", "(N, C, ...) with at least one class")
    elif target.shape != (classes[0], *classes[2:]):
        call.problem(
            f"target '{target.name}' has shape {target.shape}",
            f"{(classes[0], *classes[2:])}, a class for each row of x {classes}",
        )
    if target.dtype != torch.int64:
        call.problem(f"target '{target.name}' is {dtype_name(target.dtype)}", "int64", "convert it")
    if len(call.problems) > before:
        return False
    call.attrs["ignore_index"] = int(call.attrs["ignore_index"])
    return True


def _loss_shape(call: Call) -> tuple[int, ...]:
    return call["target"].shape if call.attrs["reduction"] == "none" else ()


def _nll_loss(call: Call) -> list[Result] | None:
    x = call["x"]
    if not _float_operand(call, "x") or not _loss_options(call, x.shape):
        return None
    shape = _loss_shape(call)
    return [Result(shape, x.dtype, tuple(range(len(shape))))]


def _nll_loss_backward(call: Call) -> list[Result] | None:
    dy, shape = call["dy"], _whole_tuple(call, "shape")
    if shape is None or not _float_operand(call, "dy") or not _loss_options(call, shape):
        return None
    call.attrs["shape"] = shape
    if dy.shape != _loss_shape(call):
        call.problem(f"dy '{dy.name}' has shape {dy.shape}", f"{_loss_shape(call)}, the loss's")
        return None
    return [Result(shape, dy.dtype, tuple(range(len(shape))))]


# -- attention -------------------------------------------------------------------------------------

ALIGNMENTS = ("top_left", "bottom_right")

#: The ops of attention and its gradients.
ATTENTION = (
    *("sdpa", "sdpa_backward", "sdpa_paged", "sdpa_fp8"),
    *("sdpa_varlen", "sdpa_varlen_backward"),
)


def _sdpa_shapes(call: Call) -> bool:
    q, k, v = call["q"], call["k"], call["v"]
    for port in ("q", "k", "v"):
        if len(call[port].shape) != 4:
            call.problem(
                f"{port} '{call[port].name}' has {len(call[port].shape)} dims {call[port].shape}",
                "4: (B, H, S, D)",
            )
            return False
    before = len(call.problems)
    for port in ("k", "v"):
        if call[port].shape[0] != q.shape[0]:
            call.problem(
                f"{port} has batch {call[port].shape[0]}, q has {q.shape[0]}", "equal batches"
            )
    if k.shape[1] != v.shape[1]:
        call.problem(f"v has {v.shape[1]} heads, k has {k.shape[1]}", "equal heads of k and v")
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        call.problem(
            f"q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} heads of k and v",
            "H_q % H_kv == 0",
        )
    if k.shape[2] != v.shape[2]:
        call.problem(f"v has length {v.shape[2]}, k has {k.shape[2]}", "equal lengths of k and v")
    if k.shape[3] != q.shape[3]:
        call.problem(
            f"k has head dim {k.shape[3]}, q has {q.shape[3]}", "equal head dims of q and k"
        )
    if q.shape[3] == 0:
        call.problem("q has head dim 0", "a head dim >= 1")
    return len(call.problems) == before


def _sdpa_mask(call: Call) -> None:
    mask, q, k = call.get("attn_mask"), call["q"], call["k"]
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or (
        q.dtype == torch.float64 and mask.dtype == torch.float32
    ):
        call.problem(
            f"attn_mask '{mask.name}' is {dtype_name(mask.dtype)}, q is {dtype_name(q.dtype)}",
            f"bool (True attends), {dtype_name(q.dtype)} or float32 (added to the scores)",
        )
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    padded = (1,) * (4 - len(mask.shape)) + mask.shape
    if len(mask.shape) > 4 or any(m not in (1, n) for m, n in zip(padded, full, strict=True)):
        call.problem(
            f"attn_mask '{mask.name}' has shape {mask.shape}",
            f"one that broadcasts to (B, H, S_q, S_kv) = {full}",
        )


def _sdpa_lengths(call: Call) -> None:
    q = call["q"]
    given = [port for port in ("seq_len_q", "seq_len_kv") if call.get(port) is not None]
    for port in given:
        spec = call[port]
        if spec.dtype != torch.int32:
            call.problem(f"{port} '{spec.name}' is {dtype_name(spec.dtype)}", "int32", "convert it")
        if spec.shape != (q.shape[0],):
            call.problem(f"{port} '{spec.name}' has shape {spec.shape}", f"(B,) = ({q.shape[0]},)")


def _sdpa_window(call: Call) -> None:
    window = call.attrs["window"]
    if window is None:
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        call.problem(
            f"window={window!r} is not a pair", "(left, right), each a number of keys or None"
        )
        return
    for side, value in zip(("left", "right"), window, strict=True):
        if value is not None and (not _whole(value) or value < 0):
            call.problem(f"window {side}={value!r}", "a whole number >= 0, or None for no bound")
            return
    left, right = (None if value is None else int(value) for value in window)
    if call.attrs["is_causal"] is True:
        right = 0
    call.attrs["window"] = None if left is None and right is None else (left, right)


def _per_head(call: Call, port: str) -> None:
    """A number for each head of q."""
    spec, q = call.get(port), call["q"]
    if spec is None:
        return
    kind = _statistics_dtype(q)
    if spec.dtype != kind or spec.shape != (q.shape[1],):
        call.problem(
            f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
            f"{dtype_name(kind)} (H,) = ({q.shape[1]},)",
        )


def _sdpa_dropout(call: Call) -> None:
    q, k = call["q"], call["k"]
    seed, offset, mask = (call.get(f"dropout_{of}") for of in ("seed", "offset", "mask"))
    p = _number(call, "dropout_p")
    if p is None:
        return
    if not 0.0 <= p < 1.0:
        call.problem(f"dropout_p={p!r}", "a probability from 0 to below 1")
        return
    if (seed is None) != (offset is None):
        given, other = ("seed", "offset") if offset is None else ("offset", "seed")
        call.problem(f"dropout_{given} without dropout_{other}", "both, or neither")
    elif seed is not None and mask is not None:
        call.problem("dropout_mask beside dropout_seed", "one of the two: a mask needs no seed")
    elif p > 0.0 and seed is None and mask is None:
        call.problem(
            f"dropout_p={p!r} without anything that says what is dropped",
            "dropout_seed and dropout_offset, or dropout_mask",
        )
    elif p == 0.0 and (seed is not None or mask is not None):
        call.problem("dropout_p=0.0 with a seed or a mask", "dropout_p > 0", "leave them out")
    for port in ("dropout_seed", "dropout_offset"):
        spec = call.get(port)
        if spec is not None and (spec.dtype != torch.int64 or spec.numel != 1):
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
                "one int64, of shape () or (1,)",
            )
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask is not None and (mask.dtype not in (torch.bool, q.dtype) or mask.shape != full):
        call.problem(
            f"dropout_mask '{mask.name}' is {dtype_name(mask.dtype)} {mask.shape}",
            f"bool (True keeps), or 0 and 1 in {dtype_name(q.dtype)}, "
            f"of shape (B, H, S_q, S_kv) = {full}",
        )


def _sdpa_scores(call: Call) -> None:
    """What else changes the scores: ALiBi and the soft cap."""
    if _flag(call, "alibi") and call.get("alibi_slopes") is not None:
        call.problem("alibi=True beside alibi_slopes", "one of the two")
    _per_head(call, "alibi_slopes")
    if call.attrs["softcap"] is not None:
        cap = _number(call, "softcap")
        if cap is not None and cap <= 0:
            call.problem(f"softcap={cap!r}", "a number > 0, or None for no cap")


def _sdpa_band(call: Call, *, diagonal: bool = False) -> None:
    """One canonical form of the scale and of the band: causal is the band with no key to the right
    of the diagonal. ``diagonal``: where that lies matters without a band too."""
    causal = _flag(call, "is_causal")
    if "finite_padding" in call.attrs:
        _flag(call, "finite_padding")
    if call.attrs["diagonal_alignment"] not in ALIGNMENTS:
        call.problem(
            f"diagonal_alignment={call.attrs['diagonal_alignment']!r} is unknown",
            " or ".join(map(repr, ALIGNMENTS)),
        )
    _sdpa_window(call)
    if call.attrs["scale"] is not None:
        _number(call, "scale")
    elif call["q"].shape[-1]:
        call.attrs["scale"] = 1.0 / math.sqrt(call["q"].shape[-1])
    if causal and call.attrs["window"] is None:
        call.attrs["window"] = (None, 0)
    call.attrs["is_causal"] = False
    if call.attrs["window"] is None and not diagonal:
        call.attrs["diagonal_alignment"] = "top_left"


def _sdpa_checked(call: Call, *data: str) -> bool:
    """The checks that both directions share; ``data`` are the operands of the dtype of q."""
    before = len(call.problems)
    _same_dtype(call, "q", *data)
    if not _sdpa_shapes(call):
        return False
    _sdpa_mask(call)
    _sdpa_lengths(call)
    _sdpa_dropout(call)
    _sdpa_scores(call)
    distances = call.attrs["alibi"] is True or call.get("alibi_slopes") is not None
    _sdpa_band(call, diagonal=distances)
    if call.get("seq_len_q") is None and call.get("seq_len_kv") is None:
        call.attrs["finite_padding"] = False
    return len(call.problems) == before


def _sdpa(call: Call) -> list[Result | None] | None:
    want_lse = _flag(call, "return_lse")
    if not _sdpa_checked(call, "k", "v"):
        return None
    _per_head(call, "sink")
    if call.problems:
        return None
    q, v = call["q"], call["v"]
    shape = (*q.shape[:3], v.shape[3])
    lse = Result(q.shape[:3], _statistics_dtype(q), (0, 1, 2)) if want_lse else None
    return [Result(shape, q.dtype, _like_order(q)), lse]


FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def _sdpa_fp8_operands(call: Call) -> None:
    """Data of one FP8 dtype, which is that of the result; scales of one float32 each."""
    q = call["q"]
    for port in ("q", "k", "v"):
        spec = call[port]
        if spec.dtype not in FP8:
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)}",
                "float8_e4m3fn or float8_e5m2",
                "quantize it, or use sdpa",
            )
        elif spec.dtype != q.dtype and q.dtype in FP8:
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)}, q '{q.name}' is "
                f"{dtype_name(q.dtype)}",
                "one dtype",
            )
    for port in FP8_SCALES:
        spec = call[port]
        if spec.dtype != torch.float32 or spec.shape not in ((), (1,)):
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
                "float32 () or (1,): one number",
            )
    given = call.attrs["dtype"]
    name = dtype_name(given) if isinstance(given, torch.dtype) else given
    if name not in (None, dtype_name(q.dtype)):
        call.problem(f"dtype={given!r}", f"None or torch.{dtype_name(q.dtype)}, that of q")
    call.attrs["dtype"] = dtype_name(q.dtype)


def _sdpa_fp8(call: Call) -> list[Result | None] | None:
    want_lse = _flag(call, "return_lse")
    _sdpa_fp8_operands(call)
    if not _sdpa_shapes(call):
        return None
    _sdpa_lengths(call)
    _sdpa_band(call)
    if call.problems:
        return None
    q, v = call["q"], call["v"]
    shape = (*q.shape[:3], v.shape[3])
    lse = Result(q.shape[:3], torch.float32, (0, 1, 2)) if want_lse else None
    largest = Result((), torch.float32, ())
    return [Result(shape, q.dtype, _like_order(q)), lse, largest, largest]


def _sdpa_backward(call: Call) -> list[Result | None] | None:
    want_mask = _flag(call, "mask_grad")
    if not _sdpa_checked(call, "k", "v", "o", "do"):
        return None
    q, v, lse, mask = call["q"], call["v"], call["lse"], call.get("attn_mask")
    shape = (*q.shape[:3], v.shape[3])
    for port in ("o", "do"):
        if call[port].shape != shape:
            call.problem(
                f"{port} '{call[port].name}' has shape {call[port].shape}",
                f"(B, H, S_q, D_v) = {shape}",
            )
    if lse.shape != q.shape[:3] or lse.dtype != _statistics_dtype(q):
        call.problem(
            f"lse '{lse.name}' is {dtype_name(lse.dtype)} {lse.shape}",
            f"{dtype_name(_statistics_dtype(q))} (B, H, S_q) = {q.shape[:3]}",
        )
    if want_mask and (mask is None or mask.dtype not in FLOATS):
        call.problem(
            "mask_grad=True without an additive mask", "attn_mask of a floating dtype", "leave it"
        )
    if call.problems:
        return None
    like = [Result(s.shape, s.dtype, _like_order(s)) for s in (q, call["k"], v)]
    if not want_mask or mask is None:
        return [*like, None]
    return [*like, Result(mask.shape, mask.dtype, _like_order(mask))]


def _rank(call: Call, port: str, dims: str) -> bool:
    spec, rank = call[port], dims.count(",") + 1
    if len(spec.shape) == rank:
        return True
    call.problem(
        f"{port} '{spec.name}' has {len(spec.shape)} dims {spec.shape}", f"{rank}: ({dims})"
    )
    return False


def _int32(call: Call, port: str, shape: tuple[int, ...], letters: str) -> None:
    spec = call.get(port)
    if spec is not None and (spec.dtype != torch.int32 or spec.shape != shape):
        call.problem(
            f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
            f"int32 {letters} = {shape}",
        )


def _heads(call: Call, k: str, v: str) -> None:
    """What q and the others have in common where heads are dim 1 and D is the last one."""
    q = call["q"]
    if call[k].shape[-1] != q.shape[-1] or q.shape[-1] == 0:
        call.problem(
            f"{k} has head dim {call[k].shape[-1]}, q has {q.shape[-1]}",
            "equal head dims of q and k, >= 1",
        )
    if call[v].shape[1] != call[k].shape[1]:
        call.problem(
            f"{v} has {call[v].shape[1]} heads, {k} has {call[k].shape[1]}", "equal heads of both"
        )
    elif call[k].shape[1] == 0 or q.shape[1] % call[k].shape[1]:
        call.problem(
            f"q has {q.shape[1]} heads, not a multiple of the {call[k].shape[1]} heads of {k}",
            "H_q % H_kv == 0",
        )


def _sdpa_paged(call: Call) -> list[Result | None] | None:
    want_lse = _flag(call, "return_lse")
    _same_dtype(call, "q", "k_cache", "v_cache")
    paged = "pages, H_kv, page, D"
    ranks = [_rank(call, "q", "B, H, S_q, D"), _rank(call, "page_table", "B, pages")]
    ranks += [_rank(call, port, paged) for port in ("k_cache", "v_cache")]
    if not all(ranks):
        return None
    q, k, v, table = (call[port] for port in ("q", "k_cache", "v_cache", "page_table"))
    _heads(call, "k_cache", "v_cache")
    _sdpa_band(call)
    if k.shape[2] != v.shape[2] or k.shape[2] == 0:
        call.problem(
            f"v_cache has pages of {v.shape[2]} keys, k_cache of {k.shape[2]}", "equal pages, >= 1"
        )
    for port in ("page_table", "page_table_v"):
        _int32(call, port, (q.shape[0], table.shape[1]), "(B, pages of a sequence)")
    for port in ("seq_len_q", "seq_len_kv"):
        _int32(call, port, (q.shape[0],), "(B,)")
    if call.problems:
        return None
    lse = Result(q.shape[:3], _statistics_dtype(q), (0, 1, 2)) if want_lse else None
    return [Result((*q.shape[:3], v.shape[3]), q.dtype, _like_order(q)), lse]


def _varlen_checked(call: Call, *data: str) -> bool:
    """The checks that both directions of packed attention share."""
    before = len(call.problems)
    _same_dtype(call, "q", *data)
    if not all([_rank(call, port, "T, H, D") for port in ("q", *data)]):
        return False
    k, v = call["k"], call["v"]
    _heads(call, "k", "v")
    if k.shape[0] != v.shape[0]:
        call.problem(f"v has {v.shape[0]} tokens, k has {k.shape[0]}", "as many of both")
    _sdpa_band(call)
    for attr in ("max_seqlen_q", "max_seqlen_kv"):
        value = call.attrs[attr]
        if not _whole(value) or value < 1:
            call.problem(f"{attr}={value!r}", "a whole number >= 1, the longest sequence")
        else:  # which is no longer than all of them
            tokens = call[attr.removeprefix("max_seqlen_").rstrip("v")].shape[0]
            call.attrs[attr] = max(1, min(int(value), tokens))
    given = [call.get(port) for port in ("cu_seqlens_q", "cu_seqlens_kv", "ragged")]
    if given[2] is None:
        if given[0] is None or given[1] is None:
            call.problem("has no cu_seqlens", "cu_seqlens_q and cu_seqlens_kv, (B + 1,) int32")
            return False
        count = given[0].shape[0] if given[0].shape else 0
        if count < 2:
            call.problem(
                f"cu_seqlens_q '{given[0].name}' has shape {given[0].shape}",
                "(B + 1,): 0, then the end of each sequence",
            )
        for port in ("cu_seqlens_q", "cu_seqlens_kv"):
            _int32(call, port, (count,), "(B + 1,)")
    return len(call.problems) == before


def _sdpa_varlen(call: Call) -> list[Result | None] | None:
    want_lse = _flag(call, "return_lse")
    if not _varlen_checked(call, "k", "v") or call.problems:
        return None
    q, v = call["q"], call["v"]
    lse = Result(q.shape[:2], _statistics_dtype(q), (0, 1)) if want_lse else None
    return [Result((*q.shape[:2], v.shape[2]), q.dtype, _like_order(q)), lse]


def _sdpa_varlen_backward(call: Call) -> list[Result | None] | None:
    if not _varlen_checked(call, "k", "v", "o", "do"):
        return None
    q, k, v, lse = (call[port] for port in ("q", "k", "v", "lse"))
    shape = (*q.shape[:2], v.shape[2])
    for port in ("o", "do"):
        if call[port].shape != shape:
            call.problem(
                f"{port} '{call[port].name}' has shape {call[port].shape}",
                f"(T_q, H, D_v) = {shape}",
            )
    if lse.shape != q.shape[:2] or lse.dtype != _statistics_dtype(q):
        call.problem(
            f"lse '{lse.name}' is {dtype_name(lse.dtype)} {lse.shape}",
            f"{dtype_name(_statistics_dtype(q))} (T_q, H) = {q.shape[:2]}",
        )
    if call.problems:
        return None
    return [Result(s.shape, s.dtype, _like_order(s)) for s in (q, k, v)]


def _ragged_offsets(call: Call) -> list[Result] | None:
    if not all([_rank(call, port, "B + 1") for port in ("cu_seqlens_q", "cu_seqlens_kv")]):
        return None
    count = call["cu_seqlens_q"].shape[0]
    for port in ("cu_seqlens_q", "cu_seqlens_kv"):
        _int32(call, port, (count,), "(B + 1,)")
    rows = 2
    for attr in ("widths_q", "widths_kv"):
        widths = _whole_tuple(call, attr)
        if widths is None or min(widths, default=1) < 1:
            call.problem(f"{attr}={call.attrs[attr]!r}", "a tuple of whole numbers >= 1")
            return None
        call.attrs[attr] = widths
        rows += len(widths)
    return None if call.problems else [Result((rows, count), torch.int32, (0, 1))]


# -- views and concatenation -----------------------------------------------------------------------


def _dim(call: Call, attr: str, rank: int) -> int | None:
    """Canonical form: a dim counted from the first one."""
    value = call.attrs[attr]
    if not _whole(value):
        call.problem(f"{attr}={value!r} is not a whole number", f"a dim of x, {rank} in all")
        return None
    if not -rank <= value < rank:
        call.problem(f"{attr}={value!r} is no dim of x", f"{-rank} to {rank - 1}" if rank else "")
        return None
    call.attrs[attr] = int(value) % rank
    return int(value) % rank


def _whole_tuple(call: Call, attr: str) -> tuple[int, ...] | None:
    value = call.attrs[attr]
    many = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else None
    if many is None or not all(_whole(item) for item in many):
        call.problem(f"{attr}={value!r} is not made of whole numbers", "a tuple of ints")
        return None
    return tuple(int(item) for item in many)


def _reshape(call: Call) -> list[Result] | None:
    x, shape = call["x"], _whole_tuple(call, "shape")
    if shape is None:
        return None
    if len(shape) > MAX_RANK:
        call.problem(f"shape={shape} has {len(shape)} dims", f"at most {MAX_RANK}")
        return None
    if min(shape, default=0) < -1 or shape.count(-1) > 1:
        call.problem(f"shape={shape} has sizes below 0", "sizes >= 0, and -1 for one of them")
        return None
    rest = numel(n for n in shape if n != -1)
    fits = x.numel == rest if -1 not in shape else rest != 0 and x.numel % rest == 0
    if not fits:
        call.problem(
            f"shape={shape} does not hold the {x.numel} elements of x '{x.name}' {x.shape}",
            "as many elements",
        )
        return None
    shape = tuple(x.numel // rest if n == -1 else n for n in shape)
    call.attrs["shape"] = shape
    strides = view_strides(x.shape, x.stride, shape)
    if strides is None:  # a copy
        return [Result(shape, x.dtype, tuple(range(len(shape))))]
    return [Result(shape, x.dtype, _like_order(TensorSpec("", shape, strides, x.dtype)))]


def _permuted(x: TensorSpec, dims: Sequence[int]) -> list[Result]:
    """``dims`` are those of x in their new order."""
    order = tuple(dims.index(dim) for dim in _like_order(x))
    return [Result(tuple(x.shape[dim] for dim in dims), x.dtype, order)]


def _transpose(call: Call) -> list[Result] | None:
    x = call["x"]
    a, b = (_dim(call, attr, len(x.shape)) for attr in ("dim0", "dim1"))
    if a is None or b is None:
        return None
    call.attrs.update(dim0=min(a, b), dim1=max(a, b))
    dims = list(range(len(x.shape)))
    dims[a], dims[b] = b, a
    return _permuted(x, dims)


def _permute(call: Call) -> list[Result] | None:
    x, dims = call["x"], _whole_tuple(call, "dims")
    if dims is None:
        return None
    rank = len(x.shape)
    counted = tuple(dim % rank if -rank <= dim < rank else dim for dim in dims)
    if sorted(counted) != list(range(rank)):
        call.problem(f"dims={dims} is no order of the dims of x '{x.name}' {x.shape}", "each once")
        return None
    call.attrs["dims"] = counted
    return _permuted(x, counted)


def _slice(call: Call) -> list[Result] | None:
    x = call["x"]
    dim = _dim(call, "dim", len(x.shape))
    bounds = [call.attrs[attr] for attr in ("start", "stop", "step")]
    for attr, value in zip(("start", "stop", "step"), bounds, strict=True):
        if not _whole(value) and not (attr == "stop" and value is None):
            call.problem(f"{attr}={value!r} is not a whole number", "an int")
            return None
    if bounds[2] < 1:
        call.problem(f"step={bounds[2]} is not positive", "step >= 1")
        return None
    if dim is None:
        return None
    taken = range(*slice(*bounds).indices(x.shape[dim]))
    start, stop = (taken[0], taken[-1] + 1) if taken else (0, 0)
    call.attrs.update(start=start, stop=stop, step=int(bounds[2]) if len(taken) > 1 else 1)
    shape = (*x.shape[:dim], len(taken), *x.shape[dim + 1 :])
    return [Result(shape, x.dtype, _like_order(x))]


def _concat(call: Call) -> list[Result] | None:
    ports = list(call.inputs)
    first = call[ports[0]]
    dim = _dim(call, "dim", len(first.shape))
    if dim is None:
        return None
    ok = True
    for port in ports[1:]:
        spec = call[port]
        if spec.dtype != first.dtype:
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)}, "
                f"x0 '{first.name}' is {dtype_name(first.dtype)}",
                "one dtype",
                f"convert {port}",
            )
            ok = False
        if len(spec.shape) != len(first.shape) or any(
            n != m
            for place, (n, m) in enumerate(zip(spec.shape, first.shape, strict=True))
            if place != dim
        ):
            call.problem(
                f"{port} '{spec.name}' has shape {spec.shape}, x0 '{first.name}' {first.shape}",
                f"equal sizes but for dim {dim}",
            )
            ok = False
    if not ok:
        return None
    specs = [call[port] for port in ports]
    total = sum(spec.shape[dim] for spec in specs)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    return [Result(shape, first.dtype, _common_order(specs))]


def _common_order(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The memory order of the largest operand where all lie so, else the logical one."""
    order = _like_order(max(specs, key=lambda spec: spec.numel))
    for spec in specs:
        own = [dim for dim in _like_order(spec) if spec.shape[dim] > 1]
        if own != [dim for dim in order if spec.shape[dim] > 1]:
            return tuple(range(len(order)))
    return order


# -- torch's own ops -------------------------------------------------------------------------------


def _aten_problem(call: Call) -> str | None:
    """What is wrong with the attributes, or None."""
    name, args, kwargs = (call.attrs[attr] for attr in ("overload", "args", "kwargs"))
    if not isinstance(name, str) or not isinstance(args, tuple) or not isinstance(kwargs, tuple):
        return f"overload={name!r}, args={args!r}, kwargs={kwargs!r} is no name and two tuples"
    try:
        schema = aten.overload(name)._schema
        named = sorted(aten.places((*args, *(value for _, value in kwargs))))
    except (TypeError, ValueError, IndexError) as error:
        return str(error)
    if schema.is_mutable:
        return f"{name} writes over its operands"
    if sorted(set(named)) != list(range(len(call.inputs))):
        return f"args and kwargs name the operands {named}, there are {len(call.inputs)}"
    return None


def _aten(call: Call) -> list[Result | None] | None:
    """torch itself is asked, on tensors without memory."""
    wrong = _aten_problem(call)
    if wrong is not None:
        call.problem(
            wrong, "the name of an overload, and its arguments as cudnngraph.ops.aten has them"
        )
        return None
    specs = [call[port] for port in call.inputs]
    like = [
        torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        for spec in specs
    ]
    try:
        results = aten.forms(call.attrs, like)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        call.problem(f"{call.attrs['overload']} does not take these operands: {lines[0]}")
        return None
    if not 0 < len(results) <= aten.RESULTS or not isinstance(results[0], torch.Tensor):
        call.problem(
            f"{call.attrs['overload']} gives {len(results)} results",
            f"1 to {aten.RESULTS} tensors",
        )
        return None
    made: list[Result | None] = []
    for result in results:
        if result is None:
            made.append(None)
            continue
        seen = TensorSpec("", tuple(result.shape), tuple(result.stride()), result.dtype)
        made.append(Result(seen.shape, seen.dtype, _like_order(seen)))
    return made + [None] * (aten.RESULTS - len(made))


# -- pooling and interpolation ---------------------------------------------------------------------


def _spatial_rank(call: Call, port: str = "x") -> int | None:
    """How many spatial dims an image has; torch pools none without channels or elements."""
    spec = call[port]
    rank = len(spec.shape) - 2
    if not _float_operand(call, port):
        return None
    if rank not in (1, 2, 3):
        call.problem(
            f"{port} '{spec.name}' has {len(spec.shape)} dims {spec.shape}",
            "3, 4 or 5: (N, C, spatial...)",
        )
        return None
    if 0 in spec.shape[1:]:
        call.problem(
            f"{port} '{spec.name}' has shape {spec.shape}", "at least one channel and one element"
        )
        return None
    return rank


def _image_order(x: TensorSpec) -> tuple[int, ...]:
    """channels_last where x is unmistakably so (torch's rule), else contiguous."""
    return _conv_order(x, x)


def in_padding(size: int, windows: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether one of the windows over a dim of ``size`` holds nothing of it.

    Only one that begins before the dim can, by a step over all of it: its first tap from 0 on comes
    too late. Of such a window torch's max pooling says an index that is not there, and its gradient
    writes to that place.
    """
    first = range(-padding, 0, stride)[:windows] if size < dilation else ()
    return any(start % dilation >= size for start in first)


def _pooled_sizes(call: Call, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The spatial sizes of what a pool makes of an image; its attributes in canonical form."""
    rank = len(shape)
    kernel = _int_tuple(call, "kernel_size", rank, 1)
    if call.attrs["stride"] is None:
        call.attrs["stride"] = call.attrs["kernel_size"]
    stride = _int_tuple(call, "stride", rank, 1)
    padding = _int_tuple(call, "padding", rank, 0)
    dilation = _int_tuple(call, "dilation", rank, 1) if "dilation" in call.attrs else (1,) * rank
    ceil = _flag(call, "ceil_mode")
    if "count_include_pad" in call.attrs:
        _flag(call, "count_include_pad")
    if kernel is None or stride is None or padding is None or dilation is None or call.problems:
        return None
    out = []
    for dim in range(rank):
        reach = dilation[dim] * (kernel[dim] - 1) + 1
        size = shape[dim] + 2 * padding[dim]
        if padding[dim] > kernel[dim] // 2:
            call.problem(
                f"padding={padding[dim]} over spatial dim {dim} is more than half of "
                f"kernel_size={kernel[dim]}",
                f"padding <= {kernel[dim] // 2}",
            )
        if rank == 3 and "count_include_pad" in call.attrs and kernel[dim] > shape[dim]:
            call.problem(  # torch asks it of averages of volumes alone
                f"kernel_size={kernel[dim]} over spatial dim {dim} is more than the size "
                f"{shape[dim]} of a volume",
                f"kernel_size <= {shape[dim]}, whatever the padding",
            )
        steps, rest = divmod(size - reach, stride[dim])
        # A window that begins in the padding behind the image is left out, as torch does.
        steps += ceil and rest > 0 and (steps + 1) * stride[dim] < shape[dim] + padding[dim]
        if steps < 0:
            call.problem(
                f"the window reaches {reach} (kernel_size {kernel[dim]}, dilation {dilation[dim]}) "
                f"over spatial dim {dim}, the padded input is {size}",
                "a window no larger than the padded input",
            )
        elif not call.problems and in_padding(
            shape[dim], steps + 1, stride[dim], padding[dim], dilation[dim]
        ):
            call.problem(
                f"a window over spatial dim {dim} lies in the padding alone (size {shape[dim]}, "
                f"kernel_size {kernel[dim]}, padding {padding[dim]}, dilation {dilation[dim]})",
                "an element of x in every window",
                "dilate less, or pad less",
            )
        out.append(steps + 1)
    return None if call.problems else tuple(out)


def _pool(call: Call) -> list[Result] | None:
    rank = _spatial_rank(call)
    out = None if rank is None else _pooled_sizes(call, call["x"].shape[2:])
    return None if out is None else [_image_result(call["x"], out)]


def _image_result(x: TensorSpec, sizes: Sequence[int]) -> Result:
    return Result((*x.shape[:2], *sizes), x.dtype, _image_order(x))


def _adaptive_sizes(call: Call, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Canonical form: one size per spatial dim; None in its place stands for the input's own."""
    given = call.attrs["output_size"]
    many = _each_dim(given, len(shape))
    if len(many) == len(shape):
        many = tuple(n if want is None else want for n, want in zip(shape, many, strict=True))
    call.attrs["output_size"] = many
    return _int_tuple(call, "output_size", len(shape), 1)


def _adaptive_pool(call: Call) -> list[Result] | None:
    rank = _spatial_rank(call)
    out = None if rank is None else _adaptive_sizes(call, call["x"].shape[2:])
    return None if out is None else [_image_result(call["x"], out)]


MODES_OF_RANK = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
    3: ("nearest", "nearest-exact", "trilinear"),
}


def _resized(call: Call, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The spatial sizes of what interpolation makes of an image; one of the attributes gives it."""
    rank, mode = len(shape), call.attrs["mode"]
    if mode not in MODES_OF_RANK[rank]:
        known = ", ".join(map(repr, MODES_OF_RANK[rank]))
        call.problem(f"mode={mode!r} with {rank} spatial dims", f"one of {known}")
        return None
    if call.attrs["align_corners"] is None:
        call.attrs["align_corners"] = False
    if _flag(call, "align_corners") and mode.startswith("nearest"):
        call.problem(f"align_corners=True with mode={mode!r}", "a mode that interpolates linearly")
    size, scale = call.attrs["size"], call.attrs["scale_factor"]
    if (size is None) == (scale is None):
        call.problem(f"size={size!r} and scale_factor={scale!r}", "one of them")
        return None
    if scale is None:
        out = _int_tuple(call, "size", rank, 1)
        return None if call.problems else out
    many = _each_dim(scale, rank)
    if len(many) != rank or not all(
        isinstance(f, numbers.Real) and not isinstance(f, bool) and 0 < float(f) < math.inf
        for f in many
    ):
        call.problem(f"scale_factor={scale!r}", f"a positive number, or {rank} of them")
        return None
    call.attrs["scale_factor"] = many = tuple(map(float, many))
    out = tuple(int(n * f) for n, f in zip(shape, many, strict=True))
    if 0 in out:
        call.problem(f"scale_factor={scale!r} makes of {tuple(shape)} sizes {out}", "sizes >= 1")
    return None if call.problems else out


def _interpolate(call: Call) -> list[Result] | None:
    rank = _spatial_rank(call)
    out = None if rank is None else _resized(call, call["x"].shape[2:])
    return None if out is None else [_image_result(call["x"], out)]


def _pool_backward(call: Call) -> list[Result] | None:
    """The gradient of x from dy; x is an operand where its elements count, else its sizes are."""
    rank = _spatial_rank(call, "dy")
    if rank is None:
        return None
    dy, x = call["dy"], call.inputs.get("x")
    if x is None:
        sizes = _int_tuple(call, "input_size", rank, 1)
    else:
        sizes = x.shape[2:] if _same_dtype(call, "x", "dy") else None
    if sizes is None or (x is not None and _spatial_rank(call) is None):
        return None
    if x is not None and len(x.shape) != len(dy.shape):
        call.problem(f"dy '{dy.name}' has {len(dy.shape)} dims {dy.shape}", f"{len(x.shape)} dims")
        return None
    if "mode" in call.attrs:
        out = _resized(call, sizes)
    else:
        out = (_adaptive_sizes if "output_size" in call.attrs else _pooled_sizes)(call, sizes)
    if out is None:
        return None
    like = dy if x is None else x
    if dy.shape != (*like.shape[:2], *out):
        n, c = like.shape[:2]
        call.problem(
            f"dy '{dy.name}' has shape {dy.shape}",
            f"(N, C, out...) = ({n}, {c}, {', '.join(map(str, out))}), the forward's result",
        )
        return None
    return [_image_result(like, sizes)]


# -- the table -------------------------------------------------------------------------------------

_CONV: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_POOL: dict[str, Any] = {"kernel_size": REQUIRED, "stride": None, "padding": 0}
_MAX: dict[str, Any] = {**_POOL, "dilation": 1, "ceil_mode": False}
_AVG: dict[str, Any] = {**_POOL, "ceil_mode": False, "count_include_pad": True}
_LOSS: dict[str, Any] = {"reduction": "mean", "ignore_index": -100}
_RESIZED: dict[str, Any] = {
    "size": None,
    "scale_factor": None,
    "mode": "nearest",
    "align_corners": False,
}
_BAND: dict[str, Any] = {
    "scale": None,
    "is_causal": False,
    "diagonal_alignment": "top_left",
    "window": None,
}
_LONGEST: dict[str, Any] = {"max_seqlen_q": REQUIRED, "max_seqlen_kv": REQUIRED}
_SCORES: dict[str, Any] = {"dropout_p": 0.0, "alibi": False, "softcap": None}
_PADDING: dict[str, Any] = {"finite_padding": False}
_DROPOUT = "dropout_seed? dropout_offset? dropout_mask?"


def _rows() -> list[Op]:
    def op(
        name: str,
        inputs: str,
        infer: InferRule,
        outputs: str = "y",
        pointwise: bool = False,
        view: bool = False,
        torch_only: bool = False,
        **attrs: Any,
    ) -> Op:
        ports = tuple(inputs.split())
        return Op(name, ports, tuple(outputs.split()), attrs, infer, pointwise, view, torch_only)

    def unary(name: str, **attrs: Any) -> Op:
        return op(name, "x", _unary(*attrs), pointwise=True, **attrs)

    def binary(name: str, infer: InferRule) -> Op:
        return op(name, "x y", infer, pointwise=True)

    def resample(name: str, inputs: str, infer: InferRule, **attrs: Any) -> Op:
        outputs = "dx" if name.endswith("_backward") else "y"
        return op(name, inputs, infer, outputs, torch_only=True, **attrs)

    return [
        op("conv", "x weight", _conv, **_CONV),
        op("conv_transpose", "x weight", _conv_transpose, output_padding=0, **_CONV),
        op("matmul", "x y", _matmul),
        op(
            "layer_norm",
            "x weight bias?",
            _trailing_norm("mean", "inv_std"),
            outputs="y mean inv_std",
            eps=1e-5,
            return_stats=False,
        ),
        op(
            "rms_norm",
            "x weight bias?",
            _trailing_norm("inv_std"),
            outputs="y inv_std",
            eps=1e-5,
            return_stats=False,
        ),
        op("normalize", "x", _normalize, eps=1e-12),
        op(
            "sdpa",
            f"q k v attn_mask? seq_len_q? seq_len_kv? {_DROPOUT} alibi_slopes? sink?",
            _sdpa,
            outputs="o lse",
            **_BAND,
            return_lse=False,
            **_SCORES,
            **_PADDING,
        ),
        op(
            "sdpa_paged",
            "q k_cache v_cache page_table seq_len_kv seq_len_q? page_table_v?",
            _sdpa_paged,
            outputs="o lse",
            **{**_BAND, "diagonal_alignment": "bottom_right"},
            return_lse=False,
            **_PADDING,
        ),
        op(
            "sdpa_varlen",
            "q k v cu_seqlens_q? cu_seqlens_kv? ragged?",
            _sdpa_varlen,
            outputs="o lse",
            **_BAND,
            **_LONGEST,
            return_lse=False,
            **_PADDING,
        ),
        op(
            "sdpa_varlen_backward",
            "do q k v o lse cu_seqlens_q? cu_seqlens_kv? ragged?",
            _sdpa_varlen_backward,
            outputs="dq dk dv",
            **_BAND,
            **_LONGEST,
        ),
        op(
            "ragged_offsets",
            "cu_seqlens_q cu_seqlens_kv",
            _ragged_offsets,
            widths_q=REQUIRED,
            widths_kv=REQUIRED,
        ),
        op(
            "sdpa_fp8",
            f"q k v {' '.join(FP8_SCALES)} seq_len_q? seq_len_kv?",
            _sdpa_fp8,
            outputs="o lse amax_s amax_o",
            dtype=None,
            scale=None,
            is_causal=False,
            diagonal_alignment="top_left",
            window=None,
            return_lse=False,
        ),
        op("conv_wgrad", "dy x", _conv_wgrad, outputs="dweight", kernel=REQUIRED, **_CONV),
        op(
            "layer_norm_backward",
            "dy x weight mean inv_std",
            _trailing_norm_backward("mean", "inv_std"),
            outputs="dx dweight dbias",
            bias_grad=True,
        ),
        op(
            "rms_norm_backward",
            "dy x weight inv_std",
            _trailing_norm_backward("inv_std"),
            outputs="dx dweight dbias",
            bias_grad=True,
        ),
        op(
            "sdpa_backward",
            f"do q k v o lse attn_mask? seq_len_q? seq_len_kv? {_DROPOUT} alibi_slopes?",
            _sdpa_backward,
            outputs="dq dk dv dmask",
            **_BAND,
            mask_grad=False,
            **_SCORES,
            **_PADDING,
        ),
        op(
            "batch_norm_train",
            "x weight bias running_mean? running_var?",
            _batch_norm_train,
            outputs="y mean inv_std next_running_mean next_running_var",
            eps=1e-5,
            momentum=0.1,
        ),
        op(
            "batch_norm_backward",
            "dy x weight mean inv_std",
            _batch_norm_backward,
            outputs="dx dweight dbias",
        ),
        op(
            "instance_norm",
            "x weight? bias?",
            _instance_norm,
            outputs="y mean inv_std",
            eps=1e-5,
            return_stats=False,
        ),
        op(
            "instance_norm_backward",
            "dy x mean inv_std weight?",
            _instance_norm_backward,
            outputs="dx dweight dbias",
        ),
        op("reduction", "x", _reduction, dims=None, mode="sum", keepdim=False),
        op("expand", "x", _expand, pointwise=True, shape=REQUIRED, dims=None),
        op(
            "batch_norm",
            "x running_mean running_var weight? bias?",
            _batch_norm,
            pointwise=True,
            eps=1e-5,
        ),
        op("batch_norm_apply", "x mean inv_std weight bias", _batch_norm_apply, pointwise=True),
        op("dequantize", "x scale", _dequantize, pointwise=True, dim=1, zero_point=0),
        op(
            "quantize",
            "x scale?",
            _quantize,
            pointwise=True,
            dtype=REQUIRED,
            dim=1,
            zero_point=0,
        ),
        op("bias", "x bias", _per_channel("bias"), pointwise=True),
        op("scale", "x scale", _per_channel("scale"), pointwise=True),
        unary("relu"),
        unary("leaky_relu", negative_slope=0.01),
        unary("elu", alpha=1.0),
        unary("gelu"),
        unary("gelu_tanh"),
        unary("silu"),
        unary("sigmoid"),
        unary("tanh"),
        op("softplus", "x", _softplus, pointwise=True, beta=1.0),
        op("clamp", "x", _clamp, pointwise=True, min=None, max=None),
        op(
            "relu_backward",
            "dy y",
            _activation_backward("y", "negative_slope"),
            outputs="dx",
            pointwise=True,
            negative_slope=0.0,
        ),
        *(
            op(f"{name}_backward", "dy x", _activation_backward("x"), outputs="dx", pointwise=True)
            for name in ("gelu", "gelu_tanh", "silu")
        ),
        unary("identity"),
        op("to_float", "x", _to_float, pointwise=True),
        unary("neg"),
        unary("abs"),
        unary("exp"),
        unary("log"),
        unary("sqrt"),
        unary("rsqrt"),
        unary("reciprocal"),
        unary("erf"),
        *(
            binary(name, _binary)
            for name in ("add", "sub", "mul", "div", "pow", "minimum", "maximum")
        ),
        *(binary(name, _comparison) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        op("logical_and", "x y", _logical("x", "y"), pointwise=True),
        op("logical_or", "x y", _logical("x", "y"), pointwise=True),
        op("logical_not", "x", _logical("x"), pointwise=True),
        op("where", "condition x y", _where, pointwise=True),
        op("reshape", "x", _reshape, view=True, shape=REQUIRED),
        op("transpose", "x", _transpose, view=True, dim0=REQUIRED, dim1=REQUIRED),
        op("permute", "x", _permute, view=True, dims=REQUIRED),
        op("slice", "x", _slice, view=True, dim=REQUIRED, start=0, stop=None, step=1),
        op("concat", "x*", _concat, dim=0),
        op(
            "aten",
            "x*",
            _aten,
            outputs=" ".join(("y", *(f"y{n}" for n in range(1, aten.RESULTS)))),
            torch_only=True,
            overload=REQUIRED,
            args=REQUIRED,
            kwargs=(),
        ),
        op("concat", "x*", _concat, torch_only=True, dim=0),
        op(
            "group_affine",
            "x weight?",
            _group_affine,
            outputs="shift factor",
            torch_only=True,
            num_groups=REQUIRED,
            eps=1e-5,
        ),
        *(
            row
            for name in ("softmax", "log_softmax")
            for row in (
                op(name, "x", _softmax, torch_only=True, dim=REQUIRED),
                op(
                    f"{name}_backward",
                    "dy y",
                    _softmax_backward,
                    outputs="dx",
                    torch_only=True,
                    dim=REQUIRED,
                ),
            )
        ),
        op("nll_loss", "x target", _nll_loss, torch_only=True, **_LOSS),
        op(
            "nll_loss_backward",
            "dy target",
            _nll_loss_backward,
            outputs="dx",
            torch_only=True,
            shape=REQUIRED,
            **_LOSS,
        ),
        resample("max_pool", "x", _pool, **_MAX),
        resample("max_pool_backward", "dy x", _pool_backward, **_MAX),
        resample("avg_pool", "x", _pool, **_AVG),
        resample("avg_pool_backward", "dy", _pool_backward, input_size=REQUIRED, **_AVG),
        *(
            row
            for kind, operands, sizes in (
                ("avg", "dy", {"input_size": REQUIRED}),
                ("max", "dy x", {}),
            )
            for row in (
                resample(f"adaptive_{kind}_pool", "x", _adaptive_pool, output_size=REQUIRED),
                resample(
                    f"adaptive_{kind}_pool_backward",
                    operands,
                    _pool_backward,
                    output_size=REQUIRED,
                    **sizes,
                ),
            )
        ),
        resample("interpolate", "x", _interpolate, **_RESIZED),
        resample("interpolate_backward", "dy", _pool_backward, input_size=REQUIRED, **_RESIZED),
        op("constant", "", _constant, pointwise=True, value=0.0),
    ]


OPS: Mapping[str, Op] = MappingProxyType({row.name: row for row in _rows()})


def is_default(op: str, attr: str, value: Any) -> bool:
    """Whether an attribute stands at a value that a reader need not see."""
    default = OPS[op].attrs.get(attr)
    if value == default:
        return True
    flat = value
    while isinstance(flat, tuple) and flat and all(item == flat[0] for item in flat):
        flat = flat[0]
    return bool(flat == default and not isinstance(default, bool))
