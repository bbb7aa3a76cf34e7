"""What views show is concatenated in front of them, so that it is written where it is read."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.rewrite.concat import concat_before_views
from cudnngraph.rewrite.passes import prepared
from cudnngraph.rewrite.views import alias_views
from tests import generated

BF16, F32 = torch.bfloat16, torch.float32


def heads(*many: int, keep: bool = False, order: tuple[int, ...] = (1, 0, 2, 3)) -> cg.Graph:
    """Values by heads, (S, B, H, D), shown as (B, S, H * D) and concatenated along the last dim."""
    g = cg.Graph("heads")
    shown = []
    for number, count in enumerate(many):
        x = g.input(f"x{number}", (6, 2, count, 8), F32)
        y = g.permute((x * 2.0).tanh(), order)
        if keep:
            g.output(f"y{number}", y)
        shown.append(g.reshape(y, (2, 6, count * 8)))
    g.output("z", g.concat(shown, 2).relu())
    return g


@pytest.mark.parametrize("many", [(4, 4, 4), (4, 2, 2), (1, 3), (1, 1)])
def test_heads_are_written_in_place(many: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    g = heads(*many)
    spec = g.spec()
    seen = concat_before_views(alias_views(spec))
    (join,) = (node for node in seen.nodes if node.op == "concat")
    assert join.attr("dim") == 2
    assert seen.tensors[join.results[0]].shape == (6, 2, sum(many), 8)
    assert len(seen.nodes) == len(spec.nodes) - 2 * (len(many) - 1)
    given = [torch.randn(spec.tensors[name].shape) for name in spec.inputs]
    (wanted,) = reference.run(spec, given, torch.float64)
    (same,) = reference.run(seen, given, torch.float64)
    assert torch.equal(same, wanted)
    generated.install(monkeypatch)
    out = g.compile("cpu")(**dict(zip(spec.inputs, given, strict=True)))
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, wanted.float())


def test_a_gradient_of_heads_is_no_copy() -> None:
    """As attention gives it to one product for queries, keys and values."""
    g = cg.Graph("attention")
    form = {"shape": (2, 4, 64, 32), "dtype": BF16, "stride": (8192, 32, 128, 1)}
    q, k, v, dy = (g.input(name, **form) for name in ("q", "k", "v", "dy"))
    out, lse = g.sdpa(q, k, v, return_lse=True)
    parts = [
        g.reshape(g.permute(each, (0, 2, 1, 3)), (2, 64, 128))
        for each in g.sdpa_backward(dy, q, k, v, out, lse)
    ]
    g.output("dx", g.concat(parts, 2).relu())
    spec = prepared(g.spec())
    (join,) = (node for node in spec.nodes if node.op == "concat")
    whole = spec.tensors[join.results[0]]
    assert whole.shape == (2, 12, 64, 32)
    assert {spec.tensors[name].stride for name in join.operands} == {whole.stride}
    (gradient,) = (node for node in spec.nodes if node.op == "sdpa_backward")
    assert set(join.operands) == set(gradient.results)


@pytest.mark.parametrize(
    "graph",
    [
        heads(4, 4, keep=True),  # a caller sees what is between
        heads(4, 4, order=(1, 0, 3, 2)),  # heads are not side by side
    ],
    ids=["seen", "interleaved"],
)
def test_what_stays_as_it_is(graph: cg.Graph) -> None:
    spec = graph.spec()
    laid = alias_views(spec)
    seen = concat_before_views(laid)
    assert seen.nodes == laid.nodes
    given = [torch.randn(spec.tensors[name].shape) for name in spec.inputs]
    for made, wanted in zip(
        reference.run(seen, given, torch.float64),
        reference.run(spec, given, torch.float64),
        strict=True,
    ):
        assert torch.equal(made, wanted)
