"""Arguments of fused models that are padded up to buckets, and results that are cut back."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.models import Of, image

LENGTHS = {"ids": {1: (8, 16, 32)}, "mask": {1: (8, 16, 32)}}


class Encoder(nn.Module):
    """Attends to tokens that a mask shows."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.embed, self.norm = nn.Embedding(50, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def attended(self, x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        hidden = None if mask is None else mask[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=hidden, is_causal=causal)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = self.attended(self.embed(ids), mask, False)
        weights = hidden @ hidden.transpose(1, 2)  # (B, S, S)
        return {
            "hidden": hidden,
            "weights": weights,
            "first": hidden[:, 0],
            "classes": hidden.argmax(-1),
        }


class Causal(Encoder):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.attended(self.embed(ids), None, True)


def tokens(length: int, batch: int = 2) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    if length > 2:
        mask[-1, length // 2 :] = 0
    return {"ids": torch.randint(0, 50, (batch, length)), "mask": mask}


def compare(fused: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        ours, theirs = fused(*args, **kwargs), model(*args, **kwargs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        pairs = list(zip(ours.values(), theirs.values(), strict=True))
    else:
        pairs = [(ours, theirs)]
    for mine, own in pairs:
        exact = own.double() if own.is_floating_point() else own
        numerics.check(mine, exact, own.dtype, terms=numerics.LONG_REDUCTION_TERMS + 1)


# -- right results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
def test_lengths_run_in_buckets(check: bool) -> None:
    model = Encoder().eval()
    fused = cg.fuse(model, (), kwargs=tokens(10), dynamic=LENGTHS, check=check)
    assert fused.report is not None
    assert len(fused.report.errors) == (3 if check else 0)
    bound = fused.bound(**tokens(11))
    for length in (9, 16, 10, 13):
        compare(fused, model, **tokens(length))
        assert fused.bound(**tokens(length)) is bound
    assert [None if x is None else tuple(x.shape) for x in bound.inputs] == [(2, 16), (2, 16)]
    for length in (1, 3, 8, 17, 31, 32):
        compare(fused, model, **tokens(length))
    assert len(fused) == 3
    compare(fused, model, **tokens(12, batch=3))
    assert len(fused) == 4


def test_powers_of_two_are_buckets_of_any_length() -> None:
    model = Causal().eval()
    fused = cg.fuse(model, torch.arange(5)[None], dynamic={0: {-1: "pow2"}})
    for length in (5, 6, 7, 8, 9, 33, 1, 2):
        compare(fused, model, torch.randint(0, 50, (1, length)))
    assert len(fused) == 5, "of 1, 2, 8, 16 and 64"


def test_examples_in_a_batch_run_in_buckets() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    fused = cg.fuse(model, image(3, 3, 6, 6), dynamic={"input": {0: (1, 2, 4)}})
    for batch in (1, 2, 3, 4, 3):
        compare(fused, model, image(batch, 3, 6, 6))
    assert len(fused) == 3


def test_the_value_of_the_padding_is_given() -> None:
    model = Of(lambda m, x: (x.amin(-1), x)).eval()
    low = {"args[0]": {1: (8,), "pad": 1e9}}
    fused = cg.fuse(model, image(2, 5), dynamic=low)
    x = image(2, 6)
    ours, again = fused(x)
    assert torch.equal(ours, x.amin(-1)) and torch.equal(again, x)
    model = Of(lambda m, x: (~x).any(-1)).eval()
    seen = cg.fuse(model, torch.ones(2, 5).bool(), dynamic={0: {1: (8,), "pad": 1}})
    assert not seen(torch.ones(2, 3).bool()).any()


def test_several_dims_follow_arguments_of_their_own() -> None:
    """Also where two have one length by chance, or one is not padded."""
    sizes = (4, 8)
    dynamic = {"args[0]": {0: sizes}, "args[1]": {0: sizes}, "args[2]": {0: sizes}}
    model = Of(lambda m, x, y, z: (x @ y.T, z + 1, (y @ x.T).relu(), x[0])).eval()
    fused = cg.fuse(model, (image(3, 5), image(2, 5), image(1, 5)), dynamic=dynamic)
    lengths = [
        (3, 3, 3),
        (2, 3, 4),
        (4, 3, 2),
        (4, 4, 4),
        (1, 4, 1),
        (3, 3, 2),
        (2, 3, 3),
        (7, 3, 5),
    ]
    for n, m, k in (*lengths, *lengths):
        given = image(n, 5), image(m, 5), image(k, 5)
        for ours, theirs in zip(fused(*given), model(*given), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(fused) == 2


def test_tensors_in_containers_are_named_by_their_place() -> None:
    model = Encoder().eval()
    whole = Of(lambda m, batch: m.part(batch["ids"], batch["more"][0]), part=model).eval()

    def batch(length: int) -> dict[str, Any]:
        given = tokens(length)
        return {"ids": given["ids"], "more": [given["mask"], "kept"]}

    lengths = {1: (8, 16)}
    fused = cg.fuse(
        whole, (batch(5),), dynamic={"args[0]['ids']": lengths, "args[0]['more'][0]": lengths}
    )
    for length in (5, 7, 12):
        compare(fused, whole, batch(length))
    assert len(fused) == 2
    text = r"argument 'args\[0\]': has several items; expected a tensor, as dynamic= pads it \(name"
    with pytest.raises(cg.BindError, match=text):
        cg.fuse(whole, (batch(5),), dynamic={"args[0]": lengths})


def test_one_tensor_in_two_places_is_padded_once() -> None:
    model = Of(lambda m, x, y: x * y if x is y else x - y).eval()
    x, lengths = image(3), {0: (4,)}
    fused = cg.fuse(model, (x, x), dynamic={0: lengths, 1: lengths})
    torch.testing.assert_close(fused(x, x), x * x)
    torch.testing.assert_close(fused(x, x + 1), torch.full((3,), -1.0))
    assert len(fused) == 2


def test_arguments_that_are_left_out_are_not_padded() -> None:
    model = Encoder().eval()
    fused = cg.fuse(model, (), kwargs=tokens(8), dynamic=LENGTHS)
    ids = tokens(8)["ids"]
    compare(fused, model, ids)  # as long as a bucket: nothing is padded
    compare(fused, model, ids, None)


def test_results_are_the_callers_unless_they_are_to_be_used_again() -> None:
    model, lengths = Of(lambda m, x: x * 2).eval(), {0: {0: (8,)}}
    fused = cg.fuse(model, image(5), dynamic=lengths)
    first = fused(torch.ones(5))
    fused(torch.zeros(5))
    assert torch.equal(first, torch.full((5,), 2.0))
    assert first.untyped_storage().nbytes() == 5 * first.element_size()
    reusing = cg.fuse(model, image(5), dynamic=lengths, reuse_results=True)
    first, second = reusing(torch.ones(5)), reusing(torch.zeros(3))
    assert first.data_ptr() == second.data_ptr() and second.shape == (3,)


def test_numbers_and_lengths_change_together() -> None:
    model = Of(lambda m, x, t: x * t).eval()
    fused = cg.fuse(model, (image(5), 1.0), dynamic={0: {0: (8, 16)}})
    for length, t in ((5, 2.0), (6, 3.0), (8, 4.0), (12, 5.0), (13, 6.0)):
        x = image(length)
        torch.testing.assert_close(fused(x, t), x * t)
    assert len(fused) == 2


# -- padding that changes results ------------------------------------------------------------------


def test_padding_that_the_model_attends_to_is_noticed() -> None:
    model = Encoder().eval()
    text = (
        r"Encoder: result 0 is off by .*; dynamic= pads 'ids' from 10 to 16 at dim 1, and the "
        r"model's results depend on the padding: it attends to it.* Give a mask that hides it "
        r"\(attention_mask, in dynamic= too\), or leave the argument out of dynamic="
    )
    with pytest.raises(cg.WrongResult, match=text):
        cg.fuse(model, tokens(10)["ids"], dynamic={"ids": {1: (8, 16)}})
    with pytest.raises(cg.WrongResult, match=text):
        cg.fuse(model, tokens(10)["ids"], dynamic={"ids": {1: (8, 16)}}, check=False)


def test_a_bucket_is_looked_at_when_it_is_first_padded() -> None:
    model = Of(lambda m, x: (x, x.mean(-1))).eval()
    fused = cg.fuse(model, image(2, 8), dynamic={0: {1: (8, 16)}})
    for length in (7, 7, 12):
        with pytest.raises(cg.WrongResult, match=r"result 1 is off by .* depend on the padding"):
            fused(image(2, length))
    torch.testing.assert_close(fused(torch.ones(2, 16))[1], torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_little_padding_is_held_against_much(dtype: torch.dtype) -> None:
    """One token of many changes a mean by less than 16 bits tell."""
    model = Of(lambda m, x: x.mean(1)).eval()
    x = torch.ones(2, 511, 4, dtype=dtype)
    with pytest.raises(cg.WrongResult, match=r"'args\[0\]' from \d+ to 512 at dim 1, and the mod"):
        cg.fuse(model, x, dynamic={0: {1: (512,)}})


def test_a_wrong_graph_is_not_called_a_matter_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnngraph.models import form

    real = form.convert

    def wrong(*args: Any, **kwargs: Any) -> Any:
        imported = real(*args, **kwargs)
        off = {name: tensor * 1.001 for name, tensor in imported.constants.items()}
        return dataclasses.replace(imported, constants=off)

    monkeypatch.setattr(form, "convert", wrong)
    with pytest.raises(cg.WrongResult, match="Linear: result 0 is off by") as caught:
        cg.fuse(nn.Linear(4, 4).eval(), image(3, 4), dynamic={0: {0: (8,)}})
    assert "padding" not in str(caught.value)


def test_sizes_that_follow_otherwise_cannot_be_cut() -> None:
    model = Of(lambda m, x: torch.cat([x, x])).eval()
    text = (
        r"Of \('args\[0\]' from 5 to 8 at dim 0\): result 0 is \(16,\), and \(10,\) without "
        "padding: a size that follows an argument's and is not the same cannot be cut back"
    )
    with pytest.raises(cg.WrongResult, match=text):
        cg.fuse(model, image(5), dynamic={0: {0: (8,)}})


def test_sizes_that_follow_at_some_lengths_alone_are_noticed() -> None:
    """As of a model that pads to a multiple itself."""
    model = Of(lambda m, x: F.pad(x, (0, -x.shape[0] % 4)) * 2).eval()
    text = (
        "other dims of results follow the argument's than before|result 0 is .16,., and .12,. wit"
    )
    with pytest.raises(cg.WrongResult, match=text):
        cg.fuse(model, image(12), dynamic={0: {0: (16,)}})


# -- what is refused -------------------------------------------------------------------------------


def test_lengths_beyond_the_last_bucket_are_refused() -> None:
    fused = cg.fuse(Causal().eval(), torch.arange(5)[None], dynamic={"ids": {1: (8, 16)}})
    text = (
        "argument 'ids': has size 17 at dim 1; expected at most 16, the largest bucket "
        r"\(give dynamic= a larger one, or 'pow2'\)"
    )
    with pytest.raises(cg.BindError, match=text):
        fused(torch.arange(17)[None])
    assert len(fused) == 1


def test_an_argument_of_that_length_that_is_not_padded_is_named_by_the_error() -> None:
    text = r"dynamic= pads 'ids' from 10 to 16 at dim 1: name every argument of that size in it"
    with pytest.raises(cg.CannotImport, match=text):
        cg.fuse(Encoder().eval(), (), kwargs=tokens(10), dynamic={"ids": {1: (16,)}})


@pytest.mark.parametrize(
    ("argument", "dynamic", "text"),
    [
        (torch.ones(3), {0: {1: (8,)}}, "'x': has 1 dims; expected at least 2, as dynamic="),
        (torch.ones(3), {0: {-2: (8,)}}, "'x': has 1 dims; expected at least 2, as dyn"),
        (torch.ones(3), {0: {0: (8,), -1: 9}}, "1 dims, of which -1 is 0; expected each dim once"),
        ("text", {"x": {1: (8,)}}, "'x': is a str; expected a tensor, as dynamic= pads it .lea"),
        (torch.ones(3).int(), {0: {0: 8, "pad": 0.5}}, "is int32, and padded with 0.5; expected a"),
        (torch.ones(3).bool(), {0: {0: 8, "pad": 2}}, "is bool, and padded with 2; expected a 'pa"),
        (torch.ones(3).int(), {0: {0: 8, "pad": float("nan")}}, "is int32, and padded with nan; e"),
        (torch.ones(3).half(), {0: {0: 8, "pad": 1e5}}, "float16, and padded with 100000.0; e"),
        (torch.ones(3).char(), {0: {0: 8, "pad": 300}}, "is int8, and padded with 300; expected"),
        (torch.eye(3).to_sparse(), {0: {0: 8}}, "'x': has the layout torch.sparse_coo; expected t"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_padded_are_named(argument: Any, dynamic: Any, text: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    with pytest.raises(cg.BindError, match=text):
        cg.fuse(Model().eval(), (argument,), dynamic=dynamic)


EXPECTED = r"; expected sizes as \(128, 256, 512\), or 'pow2'"


@pytest.mark.parametrize(
    ("dynamic", "text"),
    [
        (3, r"dynamic=3; expected a mapping such as \{'input_ids': \{1: \(128, 256\)\}\}"),
        (("x",), r"dynamic=\('x',\); expected a mapping such as"),
        ({"x": 3}, r"dynamic\['x'\]=3; expected a mapping such as"),
        ({"x": {}}, r"dynamic\['x'\] has no dim; expected \{dim: sizes as"),
        ({"x": {"pad": 1}}, r"dynamic\['x'\] has no dim"),
        ({"x": {1: ()}}, r"dynamic\['x'\]\[1\]=\(\)" + EXPECTED),
        ({"x": {1: (8, 0)}}, r"dynamic\['x'\]\[1\]=\(8, 0\)" + EXPECTED),
        ({"x": {1: (8, True)}}, r"dynamic\['x'\]\[1\]=\(8, True\)" + EXPECTED),
        ({"x": {1: "pow3"}}, r"dynamic\['x'\]\[1\]='pow3'" + EXPECTED),
        ({"x": {1: {8}}}, r"dynamic\['x'\]\[1\] is a set" + EXPECTED),
        ({"x": {1.5: (8,)}}, r"dynamic\['x'\] has the key 1\.5; expected a dim, or 'pad'"),
        ({"x": {"dim": (8,)}}, r"dynamic\['x'\] has the key 'dim'; expected a dim, or 'pad'"),
        ({"x": {1: (8,), "pad": "no"}}, r"dynamic\['x'\]\['pad'\]='no'; expected a number"),
        ({"x": {1: (8,), "pad": {}}}, r"dynamic\['x'\]\['pad'\] is a dict; expected a number"),
        ({"y": {1: (8,)}}, r"dynamic names 'y'; Model\.forward takes x, mask"),
        ({"y['a']": {1: (8,)}}, r"dynamic names 'y\['a'\]'; Model\.forward takes x, mask"),
        ({None: {1: (8,)}}, "dynamic names None; expected an argument's name or position"),
        ({-1: {1: (8,)}}, "dynamic names -1; expected an argument's name or position"),
        ({5: {1: (8,)}}, "dynamic names position 5; Model.forward takes x, mask"),
    ],
)  # fmt: skip
def test_what_says_no_buckets_is_refused(dynamic: Any, text: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Any, mask: Any = None) -> Any:
            return x

    with pytest.raises(cg.PolicyError, match=text):
        cg.fuse(Model().eval(), image(2, 3), dynamic=dynamic)


def test_a_length_that_the_model_cannot_be_tried_at_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forward(m: Any, x: Any) -> Any:
        if x.shape[0] < 6:
            raise ValueError("too short")
        return x * 2

    with caplog.at_level(logging.INFO, logger="cudnngraph"):
        fused = cg.fuse(Of(forward).eval(), image(7), dynamic={0: {0: (8,)}})
    assert "Of is not checked at a shorter size: too short" in caplog.text
    assert torch.equal(fused(torch.ones(6)), torch.full((6,), 2.0))
