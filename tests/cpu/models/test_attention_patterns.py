"""Attention that models write out: one op, and the same numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.canonical import canonical
from cudnngraph.models.convert import Imported, convert, import_model
from cudnngraph.models.export import export
from cudnngraph.rewrite.passes import prepared
from tests import thresholds
from tests.cpu.rewrite.test_row_layout import copies
from tests.cpu.rewrite.test_views_behind import ops, same_numbers
from tests.models import Windows

B, H, S, D = 2, 4, 10, 8
E = H * D
Scores = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Written(nn.Module):
    """Self-attention whose weights ``weigh`` makes of q and k."""

    def __init__(self, weigh: Scores) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weigh = weigh
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.dropout = nn.Dropout(0.1)
        self.bias = nn.Parameter(torch.randn(1, H, S, S))
        self.heat = nn.Parameter(torch.linspace(-1.0, 4.0, H).view(H, 1, 1))
        self.register_buffer("lower", torch.ones(S, S).tril().view(1, 1, S, S))
        self.register_buffer("band", torch.ones(S, S).tril(2).triu(-2).bool())
        self.register_buffer("empty", (torch.arange(S) == 3).view(S, 1).expand(S, S).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, E) → (B, S, E)."""
        q, k, v = self.qkv(x).view(-1, S, 3, H, D).permute(2, 0, 3, 1, 4)
        y = self.dropout(self.weigh(self, q, k)) @ v
        return self.out(y.transpose(1, 2).reshape(-1, S, E))


def plain(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1)


def in_float32(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)


def scaled_before(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return ((q * D**-0.5) @ k.transpose(-2, -1) + m.bias).softmax(3)


def causal(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(D))
    return F.softmax(scores.masked_fill(m.lower[:, :, :S, :S] == 0, float("-inf")), dim=-1)


def banded(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / 2.0
    return torch.where(m.band, scores, -5e4).softmax(-1)


def filled(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    nothing = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    return torch.where(m.band, q @ k.transpose(-2, -1), nothing).softmax(-1)


def masked_and_biased(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1) / 3.0).masked_fill(~m.band, -math.inf) + m.bias
    return F.softmax(scores.float(), dim=-1).type_as(q)


def by_numbers_of_the_input(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    hidden = q[:, :1, :1, 0].unsqueeze(-1) > 1e3  # nothing
    return (q @ k.transpose(-2, -1)).masked_fill(hidden, -math.inf).softmax(-1)


def cosines(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """As a Swin transformer of the second version."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return F.softmax(scores * m.heat.clamp(max=3.0).exp() + m.bias, dim=-1)


def hot_and_biased(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax(m.heat * (q @ k.transpose(-2, -1)) + m.bias, dim=-1)


def very_hot(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Queries times so much would be more than 16 bits hold."""
    scores = (q * 1e-3) @ k.transpose(-2, -1) * m.heat * (m.heat.abs() * 33.0)
    return F.softmax(scores, dim=-1)


def hot_and_scaled(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = m.heat * ((q @ k.transpose(-2, -1)) / 4.0)
    return F.softmax(scores.masked_fill(~m.band, -math.inf), dim=-1)


@pytest.mark.parametrize(
    "mix", ["", "images last", "no images", "hidden too", "of the input", "twice"]
)
def test_windows_that_have_a_mask_of_their_own(mix: str) -> None:
    model = Windows(mix).half().eval()
    for images in (2, 3):
        x = torch.randn(images, 10, E).half()
        report = cg.fuse(model, x).report
        assert report is not None and report.errors[0][0] < 1e-3
        spec = import_model(model, (x,)).spec
        assert spec is not None
        found = [node for node in spec.nodes if node.op == "sdpa"]
        if mix in ("of the input", "twice"):
            assert not found
            continue
        # (images W) or, the other way around, (W images): in either case the batch is windowed.
        (node,) = found
        assert report.opaque == ()
        heads = 1 if mix == "hidden too" else H
        assert spec.tensors[node.operands[3]].shape == (2 * images, heads, 5, 5)
        assert node.operands[3] in spec.inputs  # all masks, once and for all


def half() -> torch.Tensor:
    return torch.randn(B, S, E, generator=torch.Generator().manual_seed(1)).half()


def imported(weigh: Scores, x: torch.Tensor | None = None) -> Imported:
    x = half() if x is None else x
    model = Written(weigh).to(x.dtype).eval()
    errors = cg.fuse(model, x).report.errors  # type: ignore[union-attr]  # checked in float64
    assert errors[0][0] < 1e-3
    found = import_model(model, (x,))
    assert found.spec is not None
    return found


WRITTEN: dict[Scores, dict[str, Any]] = {
    plain: {"scale": 1 / math.sqrt(D)},
    in_float32: {"scale": D**-0.5},
    scaled_before: {"scale": D**-0.5, "mask": (1, H, S, S)},
    causal: {"scale": 1 / math.sqrt(D), "window": (None, 0)},
    banded: {"scale": 0.5, "window": (2, 2)},
    filled: {"scale": 1.0, "window": (2, 2)},
    masked_and_biased: {"scale": 1 / 3.0, "mask": (1, H, S, S)},
    by_numbers_of_the_input: {"scale": 1.0, "mask": (B, 1, 1, 1)},
    cosines: {"scale": 32.0, "mask": (1, H, S, S)},
    hot_and_scaled: {"scale": 8 * 0.25, "window": (2, 2)},
    hot_and_biased: {"scale": 8.0, "mask": (1, H, S, S)},
    very_hot: {"scale": 1e-3 * 8.0 * 256.0},
}


def test_a_scale_of_each_head_is_as_long_as_the_rows_that_it_scales() -> None:
    """So that the plan that normalizes them has it too."""
    spec = imported(cosines).spec
    assert spec is not None
    normalized = {node.results[0] for node in spec.nodes if node.op == "normalize"}
    (scaled,) = (n for n in spec.nodes if n.op == "mul" and normalized & set(n.operands))
    assert {spec.tensors[name].shape for name in scaled.operands} == {(B, H, S, D), (1, H, 1, D)}


@pytest.mark.parametrize("weigh", WRITTEN, ids=lambda weigh: weigh.__name__)
def test_attention_that_is_written_out_is_one_op(weigh: Scores) -> None:
    found, want = imported(weigh), WRITTEN[weigh]
    spec = found.spec
    assert spec is not None
    assert found.opaque == ()
    assert "softmax" not in ops(spec) and ops(spec).count("matmul") == 2
    (node,) = (node for node in spec.nodes if node.op == "sdpa")
    assert node.attr("scale") == pytest.approx(want["scale"], rel=1e-12)
    assert node.attr("window") == want.get("window")
    mask = node.inputs[3]
    assert (None if mask is None else spec.tensors[mask].shape) == want.get("mask")


def kept_scores(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1)
    return F.softmax(scores, dim=-1) + 0.0 * scores.amax()


def mask_before_scale(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.transpose(-2, -1) + m.bias) / math.sqrt(D), dim=-1)


def along_queries(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ k.transpose(-2, -1), dim=-2)


def a_row_of_nothing(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Hidden altogether by a number: the mean of v, not nothing."""
    return F.softmax((q @ k.transpose(-2, -1)).masked_fill(m.empty, -6e4), dim=-1)


def hardly_hidden(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.transpose(-2, -1)).masked_fill(m.band, -10.0), dim=-1)


def squared(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.transpose(-2, -1)).square(), dim=-1)


def hidden_by_two(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Each leaves every row something, both together leave the first row nothing."""
    scores = (q @ k.transpose(-2, -1)).masked_fill(m.lower == 0, -6e4)
    return scores.masked_fill(torch.arange(S) == 0, -6e4).softmax(-1)


def a_number_and_what_is_added(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    padding = torch.where(torch.arange(S) == 0, -6e4, 0.0).to(q.dtype)
    scores = torch.where(m.lower > 0, q @ k.transpose(-2, -1), -6e4) + padding
    return scores.float().softmax(-1).to(q.dtype)


def a_boolean_that_is_added(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ k.transpose(-2, -1) + m.band, dim=-1)


def by_a_number_where_it_is_not_known(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    hidden = q[:, :1, :1, 0].unsqueeze(-1) > 0.0
    return (q @ k.transpose(-2, -1)).masked_fill(hidden, -6e4).softmax(-1)


def mask_before_heat(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.transpose(-2, -1) + m.bias) * m.heat, dim=-1)


def heat_of_the_input(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.transpose(-2, -1)) * q[:, :, :1, :1], dim=-1)


def heat_of_queries(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.transpose(-2, -1)) * m.bias[..., :1], dim=-1)


def hidden_before_heat(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A hidden score that is multiplied by a negative number is hidden no more."""
    scores = (q @ k.transpose(-2, -1)).masked_fill(m.lower == 0, -6e4)
    return F.softmax(scores * m.heat, dim=-1)


def chosen_before_heat(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.softmax(torch.where(m.lower > 0, q @ k.transpose(-2, -1), -6e4) * m.heat, dim=-1)


def heat_in_float32(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)).float() * m.heat.float().exp()
    return F.softmax(scores, dim=-1).to(q.dtype)


@pytest.mark.parametrize(
    "weigh",
    [
        *(mask_before_heat, heat_of_the_input, heat_of_queries, heat_in_float32),
        *(hidden_before_heat, chosen_before_heat),
        *(kept_scores, mask_before_scale, along_queries, a_row_of_nothing, hardly_hidden, squared),
        *(by_a_number_where_it_is_not_known, hidden_by_two, a_number_and_what_is_added),
        a_boolean_that_is_added,
    ],
    ids=lambda weigh: weigh.__name__,
)
def test_what_is_not_quite_attention_stays_as_written(weigh: Scores) -> None:
    spec = imported(weigh).spec
    assert spec is not None
    assert "sdpa" not in ops(spec) and ops(spec).count("matmul") == 4


def test_scores_that_the_mask_repeats_stay_as_written() -> None:
    def three_masks(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1)
        return F.softmax(scores.masked_fill(~m.band.expand(3, 1, S, S), -math.inf), dim=-1)

    spec = imported(three_masks, half()[:1]).spec
    assert spec is not None and "sdpa" not in ops(spec)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_masks_that_are_added_in_float32_are_summed_in_it(dtype: torch.dtype) -> None:
    """A row of which all lies low keeps what tells its keys apart."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Linear(E, 3 * E).to(dtype)
            self.register_buffer("low", torch.zeros(S, S))
            self.low[2] = -1e5
            self.register_buffer("slopes", -0.5 * torch.arange(S).float() * torch.ones(S, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(-1, S, 3, H, D).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-2, -1)).float() + self.low + self.slopes
            return scores.softmax(-1).to(dtype) @ v

    model, x = Sums().eval(), half().to(dtype)
    spec = import_model(model, (x,)).spec
    assert spec is not None
    (node,) = (node for node in spec.nodes if node.op == "sdpa")
    assert spec.tensors[node.operands[3]].dtype == torch.float32
    report = cg.fuse(model, x).report
    assert report is not None and report.errors[0][0] < 1e-2


def test_attention_in_float32_stays_as_written() -> None:
    spec = imported(plain, half().float()).spec
    assert spec is not None and "sdpa" not in ops(spec)


class Block(nn.Module):
    """torch's attention as most call it: the weights are asked for and not taken."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(E)
        self.attention = nn.MultiheadAttention(E, H, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_attention_with_weights_is_attention_without_copies(batch_first: bool) -> None:
    """Its heads are counted with the batch; they are given apart, where they lie."""
    model = Block(batch_first=batch_first).half().eval()
    report = cg.fuse(model, half()).report
    assert report is not None and report.opaque == ()
    found = import_model(model, (half(),))
    assert found.spec is not None
    spec = canonical(found.spec)
    ready = prepared(spec)
    same_numbers(spec, ready)
    assert copies(ready) == []
    assert [op for op in ops(ready) if op not in ("reshape", "permute", "transpose", "slice")] == [
        *("layer_norm", "matmul", "add", "sdpa", "matmul", "add", "add")
    ]
    (node,) = (node for node in ready.nodes if node.op == "sdpa")
    batch = B if batch_first else S
    rows = S if batch_first else B
    assert ready.tensors[node.operands[0]].shape == (batch, H, rows, D)


@pytest.mark.parametrize("kind", ["plain", "mask", "masks", "alibi"])
def test_heads_are_told_apart_where_nothing_depends_on_them(kind: str) -> None:
    g = cg.Graph("heads")
    x, w = g.input("x", (S * B, E), torch.float16), g.input("w", (E, 3 * E), torch.float16)
    packed = g.reshape(g.matmul(x, w), (S, B, 3 * E))
    parts = []
    for number in range(3):
        part = g.slice(packed, 2, number * E, (number + 1) * E)
        part = g.transpose(g.reshape(part, (S, B * H, D)), 0, 1)
        parts.append(g.reshape(part, (B * H, 1, S, D)))
    masks = {"mask": (1, 1, S, S), "masks": (B * H, 1, S, S)}
    mask = g.input("m", masks[kind], torch.float16) if kind in masks else None
    o = g.sdpa(*parts, mask, alibi=kind == "alibi")
    g.output("o", g.reshape(g.transpose(g.reshape(o, (B * H, S, D)), 0, 1), (S, B, E)))
    spec = canonical(g.spec())
    ready = prepared(spec)
    same_numbers(spec, ready)
    (node,) = (node for node in ready.nodes if node.op == "sdpa")
    apart = kind in ("plain", "mask")
    assert ready.tensors[node.operands[0]].shape == ((B, H, S, D) if apart else (B * H, 1, S, D))
    assert len(copies(ready)) == (0 if apart else 3)


class Attention(nn.Module):
    """torch's own, on heads of one projection, by a mask or by none."""

    def __init__(
        self, mask: torch.Tensor | None = None, *, causal: bool = False, of_input: bool = False
    ) -> None:
        super().__init__()
        self.qkv, self.causal, self.of_input = nn.Linear(E, 3 * E), causal, of_input
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, sequences of each, S, E) → the same."""
        q, k, v = self.qkv(x).view(-1, x.shape[-2], 3, H, D).permute(2, 0, 3, 1, 4)
        mask = x[0, 0, :, :1] if self.of_input else self.mask
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return y.transpose(1, 2).reshape(x.shape)


def converted(model: nn.Module, x: torch.Tensor) -> Imported:
    """A model as for a GPU: its numbers are those that it has otherwise, and nothing more is
    copied."""
    made = export(model.to(x.dtype).eval(), (x,), {})
    plain, ready = (
        convert(made.module, made.constants, made.placeholders, on_gpu=on_gpu)
        for on_gpu in (False, True)
    )
    torch.testing.assert_close(*exact(plain, x), *exact(ready, x), rtol=1e-12, atol=1e-12)
    assert plain.spec is not None and ready.spec is not None
    one, other = (len(copies(prepared(canonical(each.spec)))) for each in (plain, ready))
    assert one == other, "they lie behind one another already"
    return ready


def joined(model: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of q where short sequences are taken as one; the numbers are the same."""
    ready = converted(model, x)
    assert ready.spec is not None
    return [ready.spec.tensors[n.operands[0]].shape for n in ready.spec.nodes if n.op == "sdpa"]


def exact(imported: Imported, x: torch.Tensor) -> list[torch.Tensor]:
    """Its results, in float64."""
    assert imported.spec is not None
    given = {**imported.constants, **dict(zip(imported.inputs, [x], strict=True))}
    return reference.run(imported.spec, [given[n] for n in imported.spec.inputs], torch.float64)


class Einsum(nn.Module):
    """Attention as einsum has it, of heads or of windows of heads, its keys scaled."""

    def __init__(self, bias: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(E, 3 * E)
        self.bias = nn.Parameter(torch.randn(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, ..., S, E) → the same."""
        q, k, v = (t.unflatten(-1, (H, D)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        dims = "b h" if x.dim() == 3 else "b g h"
        scores = torch.einsum(f"{dims} i d, {dims} j d -> {dims} i j", q, k * D**-0.5)
        weights = F.softmax(scores + self.bias, dim=-1)
        y = torch.einsum(f"{dims} i j, {dims} j d -> {dims} i d", weights, v)
        return y.transpose(-3, -2).flatten(-2)


@pytest.mark.parametrize(
    ("bias", "shape", "one"),
    [
        ((H, S, S), (B, S, E), True),
        ((1, H, S, S), (B, 3, S, E), True),
        ((S, S), (B, 3, S, E), True),
        ((1, 1, H, S, 1), (B, 3, S, E), True),
        ((3, H, S, S), (B, 3, S, E), False),  # other numbers for each window
    ],
    ids=str,
)
def test_attention_by_einsum_is_one_op(
    bias: tuple[int, ...], shape: tuple[int, ...], one: bool
) -> None:
    model = Einsum(bias).half().eval()
    x = torch.randn(shape).half()
    found = import_model(model, (x,))
    assert found.spec is not None
    assert ("sdpa" in ops(found.spec)) == one
    (y,) = exact(found, x)
    torch.testing.assert_close(y, copy.deepcopy(model).double()(x.double()), rtol=1e-12, atol=1e-12)
    if one:
        assert found.opaque == ()
        (node,) = (node for node in found.spec.nodes if node.op == "sdpa")
        assert node.attr("scale") == pytest.approx(D**-0.5, rel=1e-12)
        assert found.spec.tensors[node.operands[0]].shape == (math.prod(shape[:-2]), H, S, D)
        assert "mul" not in ops(found.spec)
        assert copies(prepared(canonical(found.spec))) == []


@pytest.mark.parametrize("mask", ["none", "added", "boolean", "of each"])
def test_short_sequences_are_taken_as_one(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are rows for, of a number that divides an example's, none by the others."""
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)
    torch.manual_seed(0)
    masks = {
        "none": None,
        "added": torch.randn(H, 1, 49).half(),
        "boolean": torch.rand(49, 49) < 0.9,
        "of each": torch.randn(12, 1, 49, 49).half(),
    }
    assert joined(Attention(masks[mask]), torch.randn(2, 6, 49, E).half()) == [(6, H, 98, D)]
    if mask == "none":
        assert joined(Attention(), torch.randn(1, 12, 16, E).half()) == [(2, H, 96, D)]
        assert joined(Attention(), torch.randn(3, 7, 16, E).half()) == [(3, H, 112, D)]


def test_windows_are_taken_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)
    assert joined(Windows(), torch.randn(3, 10, E).half()) == [(3, H, 10, D)]
    assert joined(Windows("hidden too"), torch.randn(3, 10, E).half()) == [(3, H, 10, D)]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Attention(causal=True), (1, 6, 49)),
        (Attention(), (1, 6, 65)),  # two are more than a block has rows
        (Attention(), (1, 5, 49)),  # five are no twos
        (Attention(), (6, 49)),  # each is an example
        (Attention(of_input=True), (1, 6, 49)),  # the mask is not known
    ],
    ids=["causal", "long", "odd", "examples", "mask of the input"],
)
def test_others_are_left_as_they_are(
    model: Attention, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)
    ((batch, *_),) = joined(model, torch.randn(*shape, E).half())
    assert batch == math.prod(shape[:-1])


@pytest.mark.parametrize("kind", ["added", "boolean", "even"])
def test_constant_masks_are_added_in_aligned_rows(kind: str) -> None:
    """Once for what shares them; those that are aligned as they lie are the model's own."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = {"added": torch.randn(65, 65), "boolean": torch.rand(65, 65) < 0.9}
            self.attention = Attention(kinds.get(kind, torch.randn(65, 66).half()[:, :65]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.attention(x).view(x.shape))

    (mask,) = masks_of(converted(Twice(), torch.randn(1, 6, 65, E).half()))
    assert mask.dtype == torch.float16
    assert mask.stride() == ((66, 1) if kind == "even" else (72, 1))


class SequencesFirst(Attention):
    """Examples are the second dim of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(0, 1).contiguous()).transpose(0, 1)


@pytest.mark.parametrize(
    ("model", "shape", "joined_shape"),
    [
        (Attention(), (3, 4, 21, E), (3, H, 84, D)),  # six would fit, of another example too
        (SequencesFirst(), (10, 6, E), (6, H, 10, D)),
    ],
    ids=["examples first", "sequences first"],
)
def test_what_is_not_finite_stays_in_its_example(
    model: nn.Module,
    shape: tuple[int, ...],
    joined_shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)
    x = torch.randn(shape).half()
    made = export(model.half().eval(), (x,), {})
    imported = convert(made.module, made.constants, made.placeholders, on_gpu=True)
    (clean,) = exact(imported, x)
    dim = int(isinstance(model, SequencesFirst))
    x.select(dim, 0).fill_(math.inf)
    (y,) = exact(imported, x)
    assert imported.spec is not None
    (node,) = (node for node in imported.spec.nodes if node.op == "sdpa")
    assert imported.spec.tensors[node.operands[0]].shape == joined_shape
    assert not y.select(dim, 0).isfinite().all()
    assert torch.equal(y.narrow(dim, 1, 2), clean.narrow(dim, 1, 2))


def test_inputs_that_count_their_examples_otherwise_join_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)

    class Two(Attention):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + y

    x = torch.randn(2, 4, 21, E).half()
    for shape, batch in (((2, 1, 1, E), 2), ((1, 1, 1, E), 2), ((21, E), 8)):
        made = export(Two().half().eval(), (x, torch.randn(shape).half()), {})
        spec = convert(made.module, made.constants, made.placeholders, on_gpu=True).spec
        assert spec is not None
        (node,) = (node for node in spec.nodes if node.op == "sdpa")
        assert spec.tensors[node.operands[0]].shape[0] == batch


def masks_of(imported: Imported) -> list[torch.Tensor]:
    """The constant masks, each once."""
    assert imported.spec is not None
    names = {node.operands[3] for node in imported.spec.nodes if node.op == "sdpa"}
    return [imported.constants[name] for name in sorted(names)]


def test_masks_that_are_repeated_are_kept_once() -> None:
    mask = torch.rand(65, 65) < 0.9
    (kept,) = masks_of(
        converted(Attention(mask.expand(6, H, 65, 65)), torch.randn(1, 6, 65, E).half())
    )
    assert kept.shape == (1, 1, 65, 65)


def test_attentions_without_masks_share_that_of_what_is_taken_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)
    model = nn.Sequential(Attention(), Attention())
    (mask,) = masks_of(converted(model, torch.randn(1, 6, 21, E).half()))
    assert mask.shape == (1, 1, 126, 126)


def test_masks_that_are_larger_than_the_data_keep_sequences_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four numbers of a mask for each of q: of 4 tokens and 8 numbers each, 8 are one, not 32."""
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)
    masks = torch.randn(64, H, 4, 4).half()
    assert joined(Attention(masks), torch.randn(1, 64, 4, E).half()) == [(8, H, 32, D)]
    assert joined(Attention(masks[0, 0]), torch.randn(1, 64, 4, E).half()) == [(2, H, 128, D)]


def test_a_mask_of_one_number_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hides(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(-1, x.shape[-2], 3, H, D).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)).masked_fill(self.mask, -math.inf)
            return (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)

    (mask,) = masks_of(converted(Hides(torch.tensor(False)), torch.randn(1, 6, 65, E).half()))
    assert mask.dim() == 0 and mask.dtype == torch.float16


def test_the_mask_of_what_is_taken_as_one_is_where_the_data_are() -> None:
    """Numbers of a model may lie on the CPU, and come first."""

    class Halves(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.tensor(0.5))

    x = torch.randn(1, 528, 49, E, device="meta").half()
    made = export(Halves().half().eval().to("meta"), (x,), {})
    imported = convert(made.module, made.constants, made.placeholders, on_gpu=True)
    (mask,) = masks_of(imported)
    assert mask.shape == (1, 1, 98, 98)
    assert mask.device.type == "meta"


def test_few_sequences_are_left_for_as_many_blocks() -> None:
    assert joined(Attention(), torch.randn(2, 64, 49, E).half()) == [(128, H, 49, D)]
    assert joined(Attention(), torch.randn(2, 66, 49, E).half()) == [(66, H, 98, D)]
    assert joined(Attention(), torch.randn(2, 66, 49, E)) == [(132, H, 49, D)], "float32"
