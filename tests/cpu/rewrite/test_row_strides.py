"""What matmuls and norms read by rows lies in rows, also if computed of a transposed image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec, is_contiguous
from cudnngraph.models.convert import import_model
from cudnngraph.ops.table import OPS
from cudnngraph.rewrite.passes import prepared
from cudnngraph.rewrite.row_strides import lay_batches, lay_rows
from cudnngraph.rewrite.views import alias_views
from tests.cpu.rewrite.test_views_behind import same_numbers

F16 = torch.float16
B, C, T = 2, 16, 6


class Encoder(nn.Module):
    """Convolutions of a signal, positions, and layers with a residual stream, as Whisper has."""

    def __init__(self, layers: int, *, positions: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, C, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(T, C)) if positions else None
        self.norm = nn.LayerNorm(C) if norm else nn.Identity()
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(C, 2 * C) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * C, C) for _ in range(layers))
        self.last = nn.LayerNorm(C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(F.gelu(self.conv(x)).transpose(1, 2))
        h = h if self.positions is None else h + self.positions
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            h = h + down(F.gelu(up(norm(h))))
        y: torch.Tensor = self.last(h)
        return y


def imported(model: nn.Module, *shape: int) -> GraphSpec:
    spec = import_model(model.half().eval(), (torch.zeros(shape).half(),)).spec
    assert spec is not None
    return canonical(spec)


def against_rows(spec: GraphSpec) -> list[str]:
    """The results (B, T, C) that do not lie in rows, but for views of others' memory."""
    made = [node.results[0] for node in spec.nodes if not OPS[node.op].view]
    forms = {name: spec.tensors[name] for name in made}
    return [name for name, f in forms.items() if f.shape == (B, T, C) and f.stride[-1] != 1]


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_a_residual_stream_behind_a_transposition_lies_in_rows(positions: bool, norm: bool) -> None:
    torch.manual_seed(0)
    spec = imported(Encoder(3, positions=positions, norm=norm), B, 4, T)
    ready = prepared(spec)
    same_numbers(spec, ready)
    assert len(against_rows(spec)) > 3
    assert against_rows(ready) == []
    (out,) = spec.outputs  # as torch's layer_norm makes it
    assert is_contiguous(spec.tensors[out].shape, spec.tensors[out].stride)
    assert ready.tensors[out] == spec.tensors[out]


def stream(*, last: str = "matmul", extra: str = "") -> GraphSpec:
    """Results of an operand of transposed memory, in front of an op that reads rows or none."""
    g = cg.Graph("stream")
    x = g.input("x", (B, T, C), F16, stride=(T * C, 1, T))
    h = g.add(x, g.input("positions", (T, C), F16))
    y = g.silu(h)
    if last == "matmul":
        z: Any = g.matmul(y, g.input("w", (C, C), F16))
    elif last == "norm":
        z = g.layer_norm(y, g.input("gain", (C,), F16))
        z = g.matmul(z, g.input("w", (C, C), F16))
    elif last == "batched":
        z = g.matmul(y, g.input("w", (B, C, C), F16))
    else:
        z = g.reduction(y, 1, "sum")
    g.output("z", z)
    if extra == "output":
        g.output("y", y)
    if extra == "aten":
        g.output("own", g.aten([y], "aten.digamma.default", (("tensor", 0),)))
    if extra == "view":
        g.output("turned", g.exp(g.transpose(y, 1, 2)))
    return canonical(g.spec())


def strides(spec: GraphSpec) -> dict[str, bool]:
    """Whether the results of pointwise ops and norms lie in rows."""
    kinds = ("add", "silu", "layer_norm")
    made = {node.op: spec.tensors[node.results[0]] for node in spec.nodes if node.op in kinds}
    return {op: form.stride[-1] == 1 for op, form in made.items()}


def test_all_that_is_computed_of_the_operand_lies_in_rows() -> None:
    spec = stream(last="norm")
    assert strides(spec) == {"add": False, "silu": False, "layer_norm": False}
    laid = lay_rows(alias_views(spec))
    assert strides(laid) == {"add": True, "silu": True, "layer_norm": True}
    assert lay_rows(laid) is laid
    same_numbers(spec, laid)


@pytest.mark.parametrize("last", ["batched", "sum"])
def test_what_nothing_reads_by_rows_stays(last: str) -> None:
    spec = alias_views(stream(last=last))
    assert lay_rows(spec) is spec


def test_an_output_stays_and_so_does_what_torch_reads() -> None:
    for extra in ("output", "aten"):
        spec = stream(last="norm", extra=extra)
        laid = lay_rows(alias_views(spec))
        assert strides(laid)["layer_norm"] and not strides(laid)["silu"]
        assert all(laid.tensors[n] == spec.tensors[n] for n in (*spec.inputs, *spec.outputs))
        same_numbers(spec, laid)


def test_a_view_of_what_is_laid_shows_its_new_memory() -> None:
    spec = stream(last="norm", extra="view")
    laid = lay_rows(alias_views(spec))
    (view,) = (node for node in laid.nodes if node.op == "transpose")
    assert laid.tensors[view.results[0]].stride == (T * C, 1, C)
    same_numbers(spec, laid)


@pytest.mark.parametrize("images", [1, 3])
def test_results_stay_if_more_would_be_read_against_the_new_order(images: int) -> None:
    """One product reads the sum of so many operands in another order."""
    g = cg.Graph("once")
    xs = [g.input(f"x{n}", (B, T, C), F16, stride=(T * C, 1, T)) for n in range(images)]
    g.output("z", g.matmul(g.relu(sum(xs[1:], xs[0])), g.input("w", (C, C), F16)))
    spec = canonical(g.spec())
    laid = lay_rows(spec)
    assert (laid is spec) == (images > 1)
    same_numbers(spec, laid)


def attention(*, dtype: torch.dtype = torch.float32, seen: bool = False) -> GraphSpec:
    """Linear attention of heads (B, H, S, D) in (B, S, H, D) memory, its products in float32."""
    g = cg.Graph("linear")
    heads = [
        g.input(name, (B, 3, T, C), F16, stride=(T * 3 * C, C, 3 * C, 1)) for name in ("q", "k")
    ]
    v = g.input("v", (B, 3, T, C), F16, stride=(T * 3 * C, C, 3 * C, 1))
    q, k = (g.cast(g.relu(each), dtype) for each in heads)
    sums = g.matmul(g.transpose(k, 2, 3), g.cast(v, dtype))
    g.output("o", g.matmul(q, sums))
    if seen:
        g.output("q_wide", q)
    return canonical(g.spec())


def batches(spec: GraphSpec) -> list[bool]:
    """Of each operand of a matmul, whether its batch dims are one in memory."""
    forms = [spec.tensors[name] for n in spec.nodes if n.op == "matmul" for name in n.operands]
    return [form.stride[0] == form.stride[1] * form.shape[1] for form in forms]


def test_casts_for_products_of_batches_lie_batch_by_batch() -> None:
    spec = attention()
    ready = prepared(spec)
    same_numbers(spec, ready)
    assert batches(spec) == [False, False, False, True]
    assert batches(ready) == [True] * 4
    for laid in (ready, lay_batches(alias_views(spec))):
        assert lay_batches(laid) is laid
        same_numbers(spec, laid)


def test_what_16_bit_products_alone_read_lies_batch_by_batch_and_the_rest_is_copied() -> None:
    g = cg.Graph("channels")
    form = {"dtype": F16, "stride": (T * 3 * C, C, 1, 3 * C)}
    q, k, v = (g.input(name, (B, 3, C, T), **form) for name in "qkv")
    q, k = g.normalize(q), g.relu(k)
    g.output("o", g.matmul(g.matmul(q, g.transpose(k, 2, 3)), v))
    g.output("k_too", g.reduction(k, 3))  # a reader to which the layout matters too
    spec = canonical(g.spec())
    laid = lay_batches(alias_views(spec))
    assert batches(laid) == [True] * 4
    moved = [node.operands[0] for node in laid.nodes if node.op == "identity"]
    made = {node.results[0]: node.op for node in laid.nodes}
    assert [made.get(name, "input") for name in moved] == ["transpose", "input"]
    assert lay_batches(laid) is laid
    same_numbers(spec, laid)


def test_casts_of_16_bits_lie_batch_by_batch_and_outputs_keep_their_strides() -> None:
    spec = alias_views(attention(dtype=torch.bfloat16))
    laid = lay_batches(spec)
    assert batches(laid) == [True] * 4
    assert [node.op for node in laid.nodes] == [node.op for node in spec.nodes]
    same_numbers(spec, laid)
    spec = alias_views(attention(seen=True))
    laid = lay_batches(spec)
    assert laid.tensors[laid.outputs[1]] == spec.tensors[spec.outputs[1]]
    same_numbers(spec, laid)
