"""Row by row ops on rows as they lie in memory: the same numbers, and fewer copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import cudnngraph as cg
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec, is_contiguous
from cudnngraph.models.convert import import_model
from cudnngraph.ops.table import OPS
from cudnngraph.ops.views import lies_there
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.partition.regions import regions
from cudnngraph.rewrite import row_layout
from cudnngraph.rewrite.passes import prepared
from cudnngraph.rewrite.row_layout import propagate_row_layout
from cudnngraph.rewrite.views import alias_views
from tests.cpu.rewrite.test_views_behind import ops, same_numbers

F16 = torch.float16
S, B, E = 6, 4, 16


def copies(spec: GraphSpec) -> list[str]:
    """The views that have to copy, in whatever dtype."""
    return [n.name for n in spec.nodes if OPS[n.op].view and not lies_there(spec.tensors, n)]


class Block(nn.Module):
    """A layer of a transformer as torchvision's have it: norms first, torch's own attention."""

    def __init__(self, features: int, heads: int, *, batch_first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attention = nn.MultiheadAttention(features, heads, batch_first=batch_first)
        wide = 4 * features
        self.mlp = nn.Sequential(nn.Linear(features, wide), nn.GELU(), nn.Linear(wide, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.second(x))


def transformer(*, batch_first: bool = True) -> GraphSpec:
    torch.manual_seed(0)
    layers = [Block(E, 2, batch_first=batch_first) for _ in range(2)]
    model: Any = nn.Sequential(*layers).half().eval()
    spec = import_model(model, (torch.randn(B, S, E).half(),)).spec
    assert spec is not None
    return canonical(spec)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_of_torchs_attention_copies_nothing(batch_first: bool) -> None:
    spec = transformer(batch_first=batch_first)
    assert copies(
        alias_views(spec)
    )  # the heads of q, k and v; batch first the rows of projections too
    ready = prepared(spec)
    same_numbers(spec, ready)
    assert copies(ready) == []
    graph = CutGraph(ready)
    parts = [subgraph_of(graph, group) for group in regions(graph)]
    work = [part for part in parts if not all(map(graph.is_free, part.nodes))]
    assert [" ".join(ops(part)) for part in work] == 2 * [
        *("layer_norm", "matmul add", "sdpa", "matmul add add"),
        *("layer_norm", "matmul add gelu", "matmul add add"),
    ]
    for part in work:
        tensors = [part.tensors[name] for name in (*part.inputs, *part.outputs)]
        assert "sdpa" in ops(part) or all(
            is_contiguous(t.shape, t.stride) for t in tensors if len(t.shape) == 3
        )


def test_heads_that_a_reshape_would_copy_are_shown() -> None:
    """(S, B, 3E) → q as (B, H, S, D): a slice, heads beside the batch, and back."""
    g = cg.Graph("heads")
    x, w = g.input("x", (S * B, E), F16), g.input("w", (E, 3 * E), F16)
    packed = g.reshape(g.matmul(x, w), (S, B, 3 * E))
    heads = []
    for part in range(3):
        q = g.slice(packed, 2, part * E, (part + 1) * E)
        q = g.transpose(g.reshape(q, (S, B * 2, E // 2)), 0, 1)
        heads.append(g.reshape(q, (B, 2, S, E // 2)))
    g.output("o", g.sdpa(*heads))
    spec = canonical(g.spec())
    assert len(copies(alias_views(spec))) == 3
    ready = prepared(spec)
    assert copies(ready) == []
    same_numbers(spec, ready)
    (node,) = (node for node in ready.nodes if node.op == "sdpa")
    q, k, v = (ready.tensors[name] for name in node.operands)
    assert q.stride == k.stride == v.stride == (3 * E, E // 2, 3 * E * B, 1)


def turned(g: cg.Graph) -> Any:
    """Rows that a product has to copy: (S, B, E) in memory that is batch first."""
    return g.reshape(g.transpose(g.input("x", (B, S, E), F16), 0, 1), (S * B, E))


def test_a_product_whose_rows_are_wanted_so_is_copied_once() -> None:
    """Nothing takes the order back, and the product is larger than what it reads."""
    g = cg.Graph("rows")
    g.output("y", g.relu(g.matmul(turned(g), g.input("w", (E, 3 * E), F16))))
    spec = canonical(g.spec())
    ready = prepared(spec)
    (copied,) = copies(ready)
    (node,) = (node for node in ready.nodes if node.name == copied)
    assert ready.tensors[node.results[0]].numel == S * B * E
    same_numbers(spec, ready)


def test_a_product_back_in_its_order_is_no_copy() -> None:
    g = cg.Graph("rows")
    y = g.matmul(turned(g), g.input("w", (E, 3 * E), F16))
    y = g.gelu(g.add(y, g.input("b", (3 * E,), F16)))
    y = g.matmul(y, g.input("v", (3 * E, E), F16))
    back = g.transpose(g.reshape(y, (S, B, E)), 0, 1)
    g.output("y", g.rms_norm(g.add(back, g.input("r", (B, S, E), F16)), g.input("s", (E,), F16)))
    spec = canonical(g.spec())
    assert copies(alias_views(spec))
    ready = prepared(spec)
    assert ops(ready) == ["matmul", "add", "gelu", "matmul", "add", "rms_norm"]
    same_numbers(spec, ready)


def test_what_torchs_own_ops_read_keeps_its_strides() -> None:
    g = cg.Graph("aten")
    y = g.matmul(turned(g), g.input("w", (E, E), F16))
    back = g.transpose(g.reshape(y, (S, B, E)), 0, 1)
    z = g.aten([g.relu(back)], "aten.cumsum.default", (("tensor", 0), 0), ())
    g.output("z", z)
    spec = alias_views(canonical(g.spec()))
    assert propagate_row_layout(spec) is spec


def test_graphs_that_copy_nothing_are_given_back() -> None:
    g = cg.Graph("plain")
    y = g.matmul(g.input("x", (B, S, E), F16), g.input("w", (E, E), F16))
    g.output("y", g.transpose(g.relu(y), 0, 1))
    spec = alias_views(canonical(g.spec()))
    assert propagate_row_layout(spec) is spec


@pytest.mark.parametrize("dims", [0, 1, 3, 4])
def test_a_number_of_whatever_dims_scales_rows(dims: int) -> None:
    g = cg.Graph("scaled")
    x = g.input("x", (3, 6, 1, E), F16, stride=(E, 3 * E, E, 1))
    y = g.mul(x, g.input("s", (1,) * dims, F16))
    y = g.matmul(g.reshape(y, (18, E)), g.input("w", (E, E), F16))
    r = g.input("r", (3, 6, E), F16, stride=(E, 3 * E, 1))
    g.output("y", g.add(g.reshape(y, (3, 6, E)), r))
    spec = canonical(g.spec())
    same_numbers(spec, prepared(spec))


def test_a_slice_of_all_of_a_product() -> None:
    g = cg.Graph("slice")
    y = g.matmul(g.input("x", (S, E), F16), g.input("w", (E, E), F16))
    g.output("y", g.add(g.slice(y, 0, 0, None), g.input("r", (S, E), F16)))
    spec = canonical(g.spec())
    same_numbers(spec, prepared(spec))


CHAIN = st.lists(
    st.sampled_from(
        [
            *("split", "join", "swap", "turn", "merge", "heads", "part", "project", "norm"),
            *("bias", "relu", "residual", "scale", "back"),
        ]
    ),
    min_size=2,
    max_size=12,
)


@given(CHAIN, st.booleans())
@example(["turn", "merge", "project", "bias", "split", "swap", "norm"], False)
@example(["heads", "merge", "swap", "project", "residual", "back", "merge"], True)
@example([*["swap", "split"] * 2, "swap", "part", "turn", "merge", "split"], False)
@settings(deadline=None)
def test_any_chain_gives_the_same_numbers(chain: list[str], shared: bool) -> None:
    """However its rows lie, and whether or not it is worth it."""
    g = cg.Graph("rows")
    y: Any = g.input("x", (S, B, E), F16)
    first = y
    for number, kind in enumerate(chain):
        shape = y.spec.shape
        rank = len(shape)
        if kind == "split" and shape[0] % 2 == 0 and rank < 6:
            y = g.reshape(y, (2, shape[0] // 2, *shape[1:]))
        elif kind == "heads" and shape[-1] % 4 == 0 and rank < 6:
            y = g.reshape(y, (*shape[:-1], shape[-1] // 4, 4))
        elif kind == "join" and rank > 1:
            y = g.reshape(y, (*shape[:-2], shape[-2] * shape[-1]))
        elif kind == "merge" and rank > 2:
            y = g.reshape(y, (shape[0] * shape[1], *shape[2:]))
        elif kind == "swap" and rank > 2:
            y = g.transpose(y, 0, rank - 2)
        elif kind == "turn":
            y = g.permute(y, (*range(1, rank), 0))
        elif kind == "part" and shape[0] > 1:
            y = g.slice(y, 0, 1, None)
        elif kind == "project" and 2 <= rank <= 4:
            y = g.matmul(y, g.input(f"w{number}", (shape[-1], 2 * shape[-1]), F16))
            y = g.mul(y, 0.1)
        elif kind == "norm":
            y = g.layer_norm(y, g.input(f"s{number}", shape[-1:], F16))
        elif kind == "bias":
            y = g.add(y, g.input(f"b{number}", shape[-1:], F16))
        elif kind == "residual":
            y = g.add(y, y if shared else g.input(f"r{number}", shape, F16))
        elif kind == "relu":
            y = g.relu(y)
        elif kind == "scale":
            y = g.mul(y, 0.5)
        elif kind == "back" and y.spec.numel == first.spec.numel:
            y = g.add(g.reshape(y, first.spec.shape), first)
    if shared:
        g.output("half", g.mul(y, 2.0))
    g.output("y", y if y is not first else g.relu(y))
    spec = alias_views(canonical(g.spec()))
    made = row_layout._RowLayout(spec).run()
    assert made is not None
    same_numbers(spec, made)
    for node in made.nodes:  # every view but copies lies in its operand
        if OPS[node.op].view and node.results[0] not in made.outputs:
            form = made.tensors[node.results[0]]
            there = lies_there(made.tensors, node) or is_contiguous(form.shape, form.stride)
            assert there or form == spec.tensors.get(form.name), "or where the graph has its copy"
    kept = propagate_row_layout(spec)
    assert row_layout.copied_elements(kept) <= row_layout.copied_elements(spec)
    same_numbers(spec, prepared(canonical(g.spec())))
