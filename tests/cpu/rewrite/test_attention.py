"""Attention that no engine of cuDNN's reads as it lies: as matmuls, or in rows that are filled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.ops.table import by_port
from cudnngraph.rewrite.attention import attention_with_engines, is_in_rows
from cudnngraph.rewrite.passes import prepared
from tests.cpu.rewrite.test_views_behind import ops, same_numbers

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
B, H = 2, 3


def strides(s: int, d: int, *, across: bool) -> tuple[int, ...]:
    """Of (B, H, S, D) with D the fastest dim, or S."""
    return (H * s * d, s * d, 1, s) if across else (H * s * d, s * d, d, 1)


def attention(
    s: int,
    d: int,
    *,
    width: int | None = None,
    dtype: torch.dtype = F16,
    across: str = "",
    gradient: bool = False,
    heads: int = H,
    **options: Any,
) -> GraphSpec:
    """Attention with an op behind it; the operands in ``across`` have S as their fastest dim."""
    g = cg.Graph("attention")
    names = ("q", "k", "v", "do", "o") if gradient else ("q", "k", "v")
    given = {}
    for name in names:
        columns = width or d if name in ("v", "do", "o") else d
        of = heads if name in ("k", "v") else H
        stride = strides(s, columns, across=name in across)
        stride = (stride[0] // H * of, *stride[1:])
        given[name] = g.input(name, (B, of, s, columns), dtype, stride=stride)
    q, k, v = (given[name] for name in "qkv")
    if gradient:
        lse = g.input("lse", (B, H, s), F32)
        grads = g.sdpa_backward(given["do"], q, k, v, given["o"], lse, **options)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            g.output(name, grad)
        return canonical(g.spec())
    made = g.sdpa(q, k, v, **options)
    if options.get("return_lse"):
        made, lse = made
        g.output("lse", lse)
    g.output("y", g.relu(made))
    return canonical(g.spec())


@pytest.mark.parametrize("scale", [None, 0.25, 1.0, 2.0, -3.0])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("across", ["", "qk", "qkv"])
def test_attention_over_channels_is_two_products_and_a_softmax(
    across: str, dtype: torch.dtype, scale: float | None
) -> None:
    spec = attention(6, 20, width=28, across=across, dtype=dtype, scale=scale)
    ready = prepared(spec)
    made = [op for op in ops(ready) if op not in ("transpose", "identity")]
    factor = [] if scale == 1.0 else ["mul"]
    first = dtype == F16 and (scale is None or abs(scale) < 1.0)
    want = ["matmul", "softmax", "matmul", "relu"]
    want = factor + want if first else [want[0], *factor, *want[1:]]
    assert made == want
    same_numbers(spec, ready)


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ({"is_causal": True}, 1),
        ({"return_lse": True}, 2),
        ({"softcap": 2.0}, 1),
        ({"heads": 1}, 1),
        ({"window": (2, 1)}, 1),
    ],
    ids=str,
)
def test_other_attention_is_filled_up_to_eights(options: dict[str, Any], outputs: int) -> None:
    spec = attention(6, 20, width=28, across="v", **options)
    ready = prepared(spec)
    assert len(ready.outputs) == outputs and "softmax" not in ops(ready)
    (node,) = (node for node in ready.nodes if node.op == "sdpa")
    forms = [ready.tensors[str(by_port(node)[port])] for port in "qkv"]
    assert [form.shape[-1] for form in forms] == [24, 24, 32]
    assert all(map(is_in_rows, (*forms, ready.tensors[node.results[0]])))
    assert node.attr("scale") == 1 / math.sqrt(20)
    same_numbers(spec, ready)


@pytest.mark.parametrize("across", ["q", "kv", "qkv"])
@pytest.mark.parametrize("d", [8, 12])
def test_many_scores_are_computed_of_rows(across: str, d: int) -> None:
    spec = attention(40, d, across=across)
    ready = prepared(spec)
    assert "softmax" not in ops(ready)
    (node,) = (node for node in ready.nodes if node.op == "sdpa")
    assert all(is_in_rows(ready.tensors[name]) for name in (*node.operands, *node.results))
    copies = [op for op in ops(ready) if op in ("identity", "aten")]
    assert len(copies) == (3 if d % 8 else len(across))
    same_numbers(spec, ready)


@pytest.mark.parametrize("across", ["", "qk", "do", "qkvdo"])
def test_gradients_are_computed_of_rows(across: str) -> None:
    spec = attention(10, 12, width=20, across=across, gradient=True)
    ready = prepared(spec)
    (node,) = (node for node in ready.nodes if node.op == "sdpa_backward")
    rows = [name for name in (*node.operands, *node.results) if name != "lse"]
    forms = [ready.tensors[name] for name in rows if len(ready.tensors[name].shape) == 4]
    assert len(forms) == 8 and all(map(is_in_rows, forms))
    same_numbers(spec, ready)


def test_an_operand_of_two_ports_is_filled_once() -> None:
    g = cg.Graph("shared")
    q, kv = (g.input(name, (B, H, 40, 12), F16) for name in ("q", "kv"))
    g.output("y", g.sdpa(q, kv, kv))
    spec = canonical(g.spec())
    ready = prepared(spec)
    assert ops(ready).count("aten") == 2
    same_numbers(spec, ready)


def test_what_an_engine_reads_and_float32_stay() -> None:
    for spec in (attention(40, 16), attention(6, 200), attention(6, 20, across="qkv", dtype=F32)):
        assert attention_with_engines(spec) is spec
