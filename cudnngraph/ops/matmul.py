"""Matrix products, of whole matrices and of groups of rows: rows, inference and references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .base import InferContext, Result, Tensors, dtype_name, register
from .checks import broadcast_shapes, factors, fits_int32, same_dtype
from .operands import exactly, need


def _matmul(call: InferContext) -> list[Result] | None:
    x, y = call["x"], call["y"]
    for port in ("x", "y"):
        if not 2 <= len(call[port].shape) <= 4:
            call.problem(
                f"{port} '{call[port].name}' has {len(call[port].shape)} dims {call[port].shape}",
                "2, 3 or 4: " + ("(..., M, K)" if port == "x" else "(..., K, N)"),
            )
            return None
    dtype = factors(call, "x", "y")
    ok = dtype is not None
    fits_int32(call, "x", x.shape[-1])
    if x.shape[-1] != y.shape[-2]:
        call.problem(
            f"y '{y.name}' {y.shape} has {y.shape[-2]} rows, x '{x.name}' {x.shape} has "
            f"{x.shape[-1]} columns",
            f"y (..., {x.shape[-1]}, N)",
            "transpose y" if x.shape[-1] == y.shape[-1] else "",
        )
        ok = False
    try:
        batch = broadcast_shapes([x.shape[:-2], y.shape[:-2]])
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


register(
    "matmul",
    "x y",
    _matmul,
    exactly(lambda inputs, attrs: torch.matmul(need(inputs[0]), need(inputs[1]))),
    traits="multiplies",
)


# -- groups of rows --------------------------------------------------------------------------------


def _ranks(call: InferContext, **forms: str) -> bool:
    """Whether operands have as many dims as their forms say."""
    before = len(call.problems)
    for port, form in forms.items():
        spec, rank = call[port], form.count(",") + 1
        if len(spec.shape) != rank:
            what = f"{port} '{spec.name}' has {len(spec.shape)} dims {spec.shape}"
            call.problem(what, f"{rank}: ({form})")
    return len(call.problems) == before


def _ends(call: InferContext, groups: int | None = None) -> int | None:
    """The number of groups, None if the ends are none, or not those of ``groups``."""
    ends = call["ends"]
    if ends.dtype != torch.int32:
        call.problem(f"ends '{ends.name}' is {dtype_name(ends.dtype)}", "int32", "convert ends")
        return None
    wanted = "the end of each group" if groups is None else "an end for each matrix of y"
    if len(ends.shape) != 1 or groups not in (None, ends.shape[0]):
        shape = f"(G,) = ({groups},)" if groups is not None else "(G,)"
        call.problem(f"ends '{ends.name}' has shape {ends.shape}", f"{shape}, {wanted}")
        return None
    return ends.shape[0]


def _grouped_matmul(call: InferContext) -> list[Result] | None:
    if not _ranks(call, x="M, K", y="G, K, N"):
        return None
    x, y = call["x"], call["y"]
    same_dtype(call, "x", "y")
    _ends(call, y.shape[0])
    if x.shape[1] != y.shape[1]:
        call.problem(
            f"y '{y.name}' {y.shape} has matrices of {y.shape[1]} rows, x '{x.name}' {x.shape} "
            f"has {x.shape[1]} columns",
            f"y (G, {x.shape[1]}, N)",
            "transpose the last two dims of y" if x.shape[1] == y.shape[2] else "",
        )
    return None if call.problems else [Result((x.shape[0], y.shape[2]), x.dtype, (0, 1))]


def _grouped_matmul_wgrad(call: InferContext) -> list[Result] | None:
    if not _ranks(call, x="M, K", dy="M, N"):
        return None
    x, dy = call["x"], call["dy"]
    same_dtype(call, "x", "dy")
    groups = _ends(call)
    if x.shape[0] != dy.shape[0]:
        call.problem(
            f"dy '{dy.name}' has {dy.shape[0]} rows, x '{x.name}' has {x.shape[0]}",
            f"({x.shape[0]}, N)",
        )
    if groups is None or call.problems:
        return None
    return [Result((groups, x.shape[1], dy.shape[1]), x.dtype, (0, 1, 2))]


def _groups(ends: torch.Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """The rows of each group that has any; the host waits for the ends."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        end = min(end, rows)
        if end > start:
            yield group, slice(start, end)
            start = end


def multiplied_by_groups(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x (M, K), y (G, K, N), ends (G,) → (M, N): what ``grouped_matmul`` means."""
    made = x[:, :0] @ y[:0].sum(0)[:0]  # zeros that have a gradient, where no group has rows too
    for group, rows in _groups(ends, x.shape[0]):
        made[rows] = x[rows] @ y[group]
    return made


def _run_grouped_wgrad(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, dy, ends = map(need, inputs)
    made = (x[:0].t() @ dy[:0]).repeat(ends.shape[0], 1, 1)  # zeros, as above
    for group, rows in _groups(ends, x.shape[0]):
        made[group] = x[rows].t() @ dy[rows]
    return made


register(
    "grouped_matmul",
    "x y ends",
    _grouped_matmul,
    lambda inputs, attrs: multiplied_by_groups(*map(need, inputs)),
    torch_only=True,
    traits="multiplies grouped",
)
register(
    "grouped_matmul_wgrad",
    "x dy ends",
    _grouped_matmul_wgrad,
    _run_grouped_wgrad,
    torch_only=True,
    traits="multiplies grouped",
)
