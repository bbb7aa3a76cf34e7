"""Softmax, losses, dropout, optimizers and pixel shuffles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests.samples.case import (
    BF16,
    F16,
    F32,
    F64,
    SHORT,
    Case,
    Shape,
    Tensors,
    gradient_case,
    grads_of,
    normal,
    small_whole,
    table_case,
    uniform,
)


def softmaxes() -> Iterator[Case]:
    for dtype in (F16, BF16, F32, F64):
        for op in ("softmax", "log_softmax"):
            run = getattr(F, op)
            yield table_case(
                "softmax",
                op,
                {"x": ((24, 64), dtype, None)},
                lambda g, v, op=op: {"y": getattr(g, op)(v["x"], -1)},
                lambda t, run=run: {"y": run(t["x"], -1)},
                {"x": normal(3.0)},
                terms=64,
            )
    for name, shape, dim, at in (
        ("channels", (2, 16, 6, 10), 1, None),
        ("channels_last", (2, 16, 6, 10), 1, "channels_last"),
        ("first", (24, 64), 0, None),
        ("gaps", (24, 64), 1, (100, 1)),
    ):
        yield table_case(
            "softmax",
            f"softmax_{name}",
            {"x": (shape, F16, at)},
            lambda g, v, dim=dim: {"y": g.softmax(v["x"], dim)},
            lambda t, dim=dim: {"y": F.softmax(t["x"], dim)},
            terms=64,
        )
    yield table_case(
        "softmax",
        "softmax_between",
        {"x": ((24, 64), F16, None), "w": ((64, 64), F16, None)},
        lambda g, v: {"y": g.softmax((v["x"] @ v["w"]) * 0.125, -1) @ v["w"]},
        lambda t: {"y": F.softmax((t["x"] @ t["w"]) * 0.125, -1) @ t["w"]},
        terms=64,
        note="a torch step between products",
    )


def _loss_case(
    name: str, shape: Shape, dtype: torch.dtype, backward: bool = False, **options: Any
) -> Case:
    """Cross entropy over classes at dim 1; every fourth class or so is ignored (-1)."""
    rows = (shape[0], *shape[2:])
    options = {"ignore_index": -1, **options}

    def build() -> cg.Graph:
        g = cg.Graph("loss")
        target = g.input("t", rows, torch.int64)
        if backward:
            dy = g.input("dy", rows if options.get("reduction") == "none" else (), dtype)
            g.output("dx", g.nll_loss_backward(dy, target, shape, **options))
        else:
            g.output("y", g.cross_entropy(g.input("x", shape, dtype), target, **options))
        return g

    def eager(t: Tensors) -> Tensors:
        if backward:
            x = torch.zeros(shape, dtype=t["dy"].dtype, device=t["dy"].device)
            return {"dx": grads_of(lambda x: F.nll_loss(x, t["t"], **options), [x], t["dy"])[0]}
        return {"y": F.cross_entropy(t["x"], t["t"], **options)}

    fills = {"t": small_whole(-1, min(shape[1], 4))}
    terms = math.prod(shape)
    if backward:
        return gradient_case(f"nll_loss_{name}", dtype, build, eager, fills, terms=terms)
    label = f"loss-{name}-{SHORT[dtype]}"
    return Case(label, "loss", dtype, build, eager, fills, terms=terms)


def losses(backward: bool = False) -> Iterator[Case]:
    for dtype in (F16, BF16, F32, F64):
        yield _loss_case("mean", (64, 10), dtype, backward)
    yield _loss_case("sum", (16, 10), F32, backward, reduction="sum")
    yield _loss_case("none", (16, 10), F16, backward, reduction="none")
    yield _loss_case("pixels", (2, 5, 6, 7), F32, backward)
    yield _loss_case("one_class", (16, 1), F32, backward, ignore_index=-1)


def softmax_gradients() -> Iterator[Case]:
    for op in ("softmax", "log_softmax"):
        run = getattr(F, op)
        for dtype in (F16, BF16, F32, F64):

            def build(op: str = op, dtype: torch.dtype = dtype) -> cg.Graph:
                g = cg.Graph("gradient")
                dy, x = (g.input(key, (24, 64), dtype) for key in ("dy", "x"))
                g.output("dx", getattr(g, f"{op}_backward")(dy, getattr(g, op)(x, 1), 1))
                return g

            yield gradient_case(
                op,
                dtype,
                build,
                lambda t, run=run: {"dx": grads_of(lambda x: run(x, 1), [t["x"]], t["dy"])[0]},
                terms=64,
            )
    yield from losses(backward=True)


def _adamw_case(name: str, shape: Shape, number: Shape, **options: Any) -> Case:
    """The third step of AdamW, as torch's own rule is written."""
    options = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, **options}
    tensors = ("p", "g", "m", "v")

    def build() -> cg.Graph:
        g = cg.Graph("adamw")
        given = [g.input(key, shape, F32) for key in tensors]
        numbers = [g.input(key, number, F32) for key in ("lr", "c1", "c2")]
        for key, value in zip("pmv", g.adamw(*given, *numbers, **options), strict=True):
            g.output(f"next_{key}", value)
        return g

    def eager(t: Tensors) -> Tensors:
        p, grad, m, v = (t[key] for key in tensors)
        (beta1, beta2), decay = options["betas"], options["weight_decay"]
        p = p * (1.0 - t["lr"] * decay)
        m, v = beta1 * m + (1.0 - beta1) * grad, beta2 * v + (1.0 - beta2) * grad * grad
        spread = v.sqrt() / t["c2"].sqrt() + options["eps"]
        return {"next_p": p - t["lr"] / t["c1"] * m / spread, "next_m": m, "next_v": v}

    fills = {
        "v": uniform(0.1, 2.0),
        "lr": uniform(1e-3, 1e-2),
        "c1": uniform(0.2, 0.3),
        "c2": uniform(0.02, 0.03),
    }
    return Case(f"pointwise-adamw_{name}-fp32", "pointwise", F32, build, eager, fills)


def others() -> Iterator[Case]:
    for dtype in (F16, BF16, F32):
        yield table_case(
            "pointwise",
            "dropout_add",
            {
                "x": ((24, 64), dtype, None),
                "z": ((24, 64), dtype, None),
                "keep": ((24, 64), torch.bool, None),
            },
            lambda g, v: {"y": v["z"] + g.dropout(v["x"], v["keep"], 0.25)},
            lambda t: {"y": t["z"] + torch.where(t["keep"], t["x"] / 0.75, 0.0).to(t["x"].dtype)},
            {"keep": small_whole(0, 2)},
        )
    yield _adamw_case("matrix", (24, 64), (1,))
    yield _adamw_case("vector", (4096,), (), weight_decay=0.0)
    for dtype in (F16, BF16, F32):
        yield table_case(
            "pointwise",
            f"pixels_to_{SHORT[dtype]}",
            {
                "scale": ((40, 3), F32, None),
                "shift": ((40, 3), F32, None),
                "x": ((2, 24, 40, 3), torch.uint8, None),
            },
            lambda g, v: {"y": g.normalize_images(v["x"], v["scale"], v["shift"])},
            lambda t, dtype=dtype: {
                "y": (t["x"] * t["scale"] + t["shift"])
                .permute(0, 3, 1, 2)
                .to(torch.float64 if t["scale"].dtype == torch.float64 else dtype)
            },
            {"x": small_whole(0, 256), "scale": uniform(0.01, 0.02), "shift": uniform(-2.0, -1.0)},
            result=dtype,
        )
    for kind in (F16, BF16, F32):
        yield table_case(
            "pointwise",
            f"cast_to_{str(kind).removeprefix('torch.')}",
            {"x": ((24, 64), BF16, None), "s": ((64,), F32, None)},
            lambda g, v, kind=kind: {"y": g.cast(g.relu(v["x"]) * v["s"], kind)},
            lambda t, kind=kind: {
                "y": (t["x"].relu() * t["s"]).to(
                    torch.float64 if t["s"].dtype == torch.float64 else kind
                )
            },
            {},
            result=kind,
        )
    for kind in (torch.int8, torch.int32):
        yield table_case(
            "pointwise",
            f"{str(kind).removeprefix('torch.')}_to_float",
            {"s": ((64,), F32, None), "x": ((24, 64), kind, None)},
            lambda g, v: {"y": v["x"].to_float() * v["s"]},
            lambda t: {"y": t["x"] * t["s"]},
            {"x": small_whole(-128, 128)},
        )
