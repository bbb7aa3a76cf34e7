"""The attention modules against torch's, and against scores written out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.samples import BF16, F16, F32, F64, philox_words

EXACT = 1e-9
S = 7


def qkv(heads: int = 4, shared: int = 4, keys: int = S, dim_v: int = 8) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = [(3, heads, S, 8), (3, shared, keys, 8), (3, shared, keys, dim_v)]
    return [torch.randn(s, generator=gen, dtype=F64).requires_grad_() for s in shapes]


def written_out(q: Any, k: Any, v: Any, keep: torch.Tensor, scale: float | None = None) -> Any:
    """torch's attention over a boolean mask, with zeros in rows without a key."""
    nothing = ~keep.any(-1, keepdim=True)
    o = F.scaled_dot_product_attention(q, k, v, keep | nothing, scale=scale, enable_gqa=True)
    return o.masked_fill(nothing, 0.0)


def check(ours: Any, theirs: Any, leaves: list[torch.Tensor]) -> None:
    grad = torch.randn(theirs.shape, dtype=F64)
    found = torch.autograd.grad(ours, leaves, grad)
    right = torch.autograd.grad(theirs, leaves, grad)
    for a, b in zip((ours, *found), (theirs, *right), strict=True):
        assert a.shape == b.shape and float((a - b).detach().abs().max()) < EXACT


def place(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows).view(-1, 1), torch.arange(keys).view(1, -1)


@pytest.mark.parametrize(
    ("options", "keys", "band"),
    [
        ({}, S, lambda r, c: (c >= 0) & (r >= 0)),
        ({"causal": True}, S, lambda r, c: c <= r),
        ({"causal": True}, 4, lambda r, c: c <= r),
        ({"causal": True, "diagonal_alignment": "bottom_right"}, 9, lambda r, c: c <= r + 2),
        ({"causal": True, "diagonal_alignment": "bottom_right"}, 4, lambda r, c: c <= r - 3),
        ({"window": (2, 1)}, S, lambda r, c: (c >= r - 2) & (c <= r + 1)),
        ({"window": (3, None), "causal": True}, S, lambda r, c: (c >= r - 3) & (c <= r)),
    ],
    ids=["full", "causal", "few", "bottom right", "bottom right few", "window", "causal window"],
)
def test_bands_are_those_of_a_mask(options: dict[str, Any], keys: int, band: Any) -> None:
    leaves = qkv(keys=keys)
    module = cg.FusedSDPA(scale=0.4, **options)
    keep = band(*place(S, keys)).expand(3, 1, S, keys)
    check(module(*leaves), written_out(*leaves, keep, 0.4), leaves)


@pytest.mark.parametrize("shared", [4, 2, 1])
def test_heads_are_shared_in_groups(shared: int) -> None:
    leaves = qkv(shared=shared, dim_v=5)
    theirs = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    check(cg.FusedSDPA(causal=True)(*leaves), theirs, leaves)


def test_lengths_of_sequences_cut_rows_and_keys() -> None:
    leaves = qkv()
    rows, keys = torch.tensor([7, 3, 0]), torch.tensor([5, 7, 2])
    r, c = place(S, S)
    keep = (r < rows.view(-1, 1, 1, 1)) & (c < keys.view(-1, 1, 1, 1))
    ours = cg.FusedSDPA()(*leaves, seq_len_q=rows.int(), seq_len_kv=keys.int())
    check(ours, written_out(*leaves, keep), leaves)


def test_a_mask_of_floats_gets_a_gradient_also_where_it_broadcasts() -> None:
    leaves = qkv()
    bias = torch.randn(1, 4, 1, S, dtype=F64, requires_grad=True)
    theirs = F.scaled_dot_product_attention(*leaves, bias)
    check(cg.FusedSDPA()(*leaves, bias), theirs, [*leaves, bias])


def test_a_row_without_a_key_gives_zeros_and_no_nan() -> None:
    leaves = qkv()
    keep = torch.ones(S, S, dtype=torch.bool)
    keep[2] = False
    o, lse = cg.FusedSDPA()(*leaves, keep, return_lse=True)
    assert not o[:, :, 2].detach().any() and bool((lse[:, :, 2] == -torch.inf).all())
    o.sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in leaves)  # type: ignore[union-attr]


def test_expanded_and_packed_operands_and_a_gradient_of_stride_0() -> None:
    packed = torch.randn(3, S, 3, 4, 8, dtype=F64, requires_grad=True)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    ours, theirs = cg.FusedSDPA()(q, k, v), F.scaled_dot_product_attention(q, k, v)
    check(ours, theirs, [packed])
    k1 = torch.randn(1, 1, S, 8, dtype=F64, requires_grad=True)
    k2 = k1.expand(3, 4, S, 8)
    q = torch.randn(3, 4, S, 8, dtype=F64)
    ours, theirs = (f(q, k2, k2) for f in (cg.FusedSDPA(), F.scaled_dot_product_attention))
    for reduce in (torch.sum, lambda y: y.square().sum()):  # the first one's gradient is expanded
        (found,) = torch.autograd.grad(reduce(ours), k1, retain_graph=True)
        (right,) = torch.autograd.grad(reduce(theirs), k1, retain_graph=True)
        assert float((found - right).abs().max()) < EXACT


def test_the_output_lies_as_q_does() -> None:
    q, k, v = (t.detach() for t in qkv())
    sideways = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert cg.FusedSDPA()(sideways, k, v).stride() == sideways.stride()


def seeds(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a seed and an offset of dropout, drawn by a generator of that seed."""
    gen = torch.Generator().manual_seed(number)
    drawn = torch.empty(4, dtype=torch.int64).random_(generator=gen)
    return drawn[:1], drawn[2:3]


def dropped_out(q: Any, k: Any, v: Any, keep: torch.Tensor, p: float) -> Any:
    weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
    return (weights * keep / (1.0 - p)) @ v


def test_dropout_follows_torchs_generator_while_a_module_trains() -> None:
    leaves, module = qkv(), cg.FusedSDPA(dropout=0.4)
    seed, offset = seeds(11)
    words = philox_words(int(seed), int(offset), 3 * 4 * S * S)
    keep = torch.from_numpy(words >= round(0.4 * 2**32)).view(3, 4, S, S)
    assert 0.5 < float(keep.double().mean()) < 0.7
    torch.manual_seed(11)
    check(module(*leaves), dropped_out(*leaves, keep, 0.4), leaves)
    torch.manual_seed(11)
    same = module(*leaves)
    torch.manual_seed(12)
    assert not torch.equal(module(*leaves), same)
    module.eval()
    assert torch.equal(module(*leaves), cg.FusedSDPA()(*leaves))


def test_dropout_of_a_given_seed_and_offset() -> None:
    leaves = [leaf.detach() for leaf in qkv()]
    attend = cg.functional.scaled_dot_product_attention

    def run(seed: int, offset: int) -> torch.Tensor:
        numbers = (torch.tensor([n]) for n in (seed, offset))
        return attend(*leaves, None, 0.4, **dict(zip(SEEDS, numbers, strict=True)))

    assert torch.equal(run(5, 8), run(5, 8))
    assert not torch.equal(run(5, 8), run(5, 12))
    assert not torch.equal(run(5, 8), run(6, 8))


SEEDS = ("dropout_seed", "dropout_offset")


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_dropout_that_is_no_probability_is_named(p: float) -> None:
    with pytest.raises(cg.GraphError, match=f"dropout={p}; expected a number from 0 to below 1"):
        cg.FusedSDPA(dropout=p)
    with pytest.raises(cg.GraphError, match=f"dropout={p}; expected a number from 0 to below 1"):
        cg.FusedMultiheadAttention(8, 2, dropout=p)


def test_sinks_slopes_and_soft_caps() -> None:
    leaves = qkv()
    sink = torch.randn(4, dtype=F64, requires_grad=True)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F64)
    scores = leaves[0] @ leaves[1].transpose(-1, -2) * 8**-0.5
    r, c = place(S, S)
    scores = 0.6 * torch.tanh(scores / 0.6) - slopes.view(-1, 1, 1) * (r - c).abs()
    column = sink.view(1, -1, 1, 1).expand(3, 4, S, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    module = cg.FusedSDPA(softcap=0.6)
    ours = module(*leaves, alibi_slopes=slopes, sink=sink)
    check(ours, weights @ leaves[2], [*leaves, sink])
    # The slopes of ALiBi itself for four heads.
    own = cg.FusedSDPA(alibi=True)(*leaves)
    given = cg.FusedSDPA()(
        *leaves, alibi_slopes=torch.tensor([4.0**-n for n in (1, 2, 3, 4)]).double()
    )
    assert float((own - given).detach().abs().max()) < EXACT
    slopes.requires_grad_()
    assert cg.FusedSDPA()(*leaves, alibi_slopes=slopes).requires_grad
    (none,) = torch.autograd.grad(
        cg.FusedSDPA()(*leaves, alibi_slopes=slopes).sum(), slopes, allow_unused=True
    )
    assert none is None


# -- with projections ------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_is_torchs_with_the_same_state_dict(bias: bool) -> None:
    theirs = nn.MultiheadAttention(16, 4, bias=bias, batch_first=True, dtype=F64)
    ours = cg.FusedMultiheadAttention(16, 4, bias=bias, dtype=F64)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 16, dtype=F64, requires_grad=True)
    keep = torch.rand(5, 5) > 0.3
    keep |= torch.eye(5, dtype=torch.bool)
    expected, _ = theirs(x, x, x, attn_mask=~keep)
    y, grad = ours(x, keep), torch.randn(2, 5, 16, dtype=F64)
    names = [name for name, _ in ours.named_parameters()]
    other = dict(theirs.named_parameters())
    found = torch.autograd.grad(y, [x, *ours.parameters()], grad)
    right = torch.autograd.grad(expected, [x, *(other[name] for name in names)], grad)
    for a, b in zip((y, *found), (expected, *right), strict=True):
        assert float((a - b).detach().abs().max()) < EXACT


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_multihead_attention_at_each_dtype_is_as_close_as_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True).to(dtype).double()
    x64, grad = (torch.randn(2, 9, 32).to(dtype).double() for _ in range(2))

    def results(module: Any, kind: torch.dtype, run: Any) -> list[torch.Tensor]:
        module = copy.deepcopy(module).to(kind)
        x = x64.to(kind).requires_grad_()
        y = run(module, x)
        of = [x, *(dict(module.named_parameters())[name] for name in names)]
        return [y, *torch.autograd.grad(y, of, grad.to(kind))]

    names = [name for name, _ in theirs.named_parameters()]
    torchs = lambda m, x: m(x, x, x, need_weights=False)[0]  # noqa: E731
    exact, other = results(theirs, F64, torchs), results(theirs, dtype, torchs)
    ours = results(
        cg.FusedMultiheadAttention.from_torch(theirs), dtype, lambda module, x: module(x)
    )
    for name, a, b, c in zip(["y", "x", *names], ours, exact, other, strict=True):
        assert a.dtype == dtype
        numerics.check(a.detach(), b.detach(), dtype, c.detach(), terms=32 * 18, what=name)


def test_multihead_attention_under_autocast_trains_float32_parameters() -> None:
    module = cg.FusedMultiheadAttention(32, 4)
    x = torch.randn(2, 9, 32)
    with torch.autocast("cpu", BF16):
        y = module(x)
    y.float().sum().backward()
    assert y.dtype == BF16
    assert all(p.grad is not None and p.grad.dtype == F32 for p in module.parameters())
    assert numerics.relative_error(y.detach(), module(x).detach().double()) <= 2 * numerics.bound(
        BF16
    )


def test_multihead_attention_from_torch_shares_the_parameters() -> None:
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=F64).eval()
    ours = cg.FusedMultiheadAttention.from_torch(theirs, causal=True)
    assert ours.in_proj_weight is theirs.in_proj_weight and not ours.training
    x = torch.randn(2, 5, 16, dtype=F64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=F64)
    expected, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    assert float((ours(x) - expected).detach().abs().max()) < EXACT


def test_multihead_attention_from_torch_drops_as_torch_does() -> None:
    theirs = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True, dtype=F64)
    ours = cg.FusedMultiheadAttention.from_torch(theirs)
    assert ours.attend.dropout == 0.3 and ours.attend.training
    x = torch.randn(2, 5, 16, dtype=F64)
    assert not torch.equal(ours(x), ours(x))
    theirs.eval()
    made = cg.FusedMultiheadAttention.from_torch(theirs)
    assert not made.attend.training
    expected, _ = theirs(x, x, x, need_weights=False)
    assert float((made(x) - expected).detach().abs().max()) < EXACT


def test_multihead_attention_with_fewer_heads_of_k_and_v_and_lengths() -> None:
    ours = cg.FusedMultiheadAttention(16, 4, 2, dtype=F64)
    assert ours.in_proj_weight.shape == (32, 16)
    x = torch.randn(2, 5, 16, dtype=F64)
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    y = ours(x, seq_len=lengths)
    short = ours(x[1:, :3])
    assert float((y[1, :3] - short[0]).detach().abs().max()) < EXACT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nn.MultiheadAttention with batch_first=False"),
        (
            {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
            "nn.MultiheadAttention with add_bias_kv=True, add_zero_attn=True",
        ),
    ],
)
def test_what_torchs_module_has_more_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cg.FeatureMissing, match=f"^{message}$"):
        cg.FusedMultiheadAttention.from_torch(nn.MultiheadAttention(8, 2, **options))


def test_head_counts_that_do_not_divide_are_named() -> None:
    with pytest.raises(cg.GraphError, match="embed_dim=10 with num_heads=4"):
        cg.FusedMultiheadAttention(10, 4)
    with pytest.raises(cg.GraphError, match="num_heads=4 with num_kv_heads=3"):
        cg.FusedMultiheadAttention(8, 4, 3)


def test_copies_and_repr() -> None:
    module = cg.FusedSDPA(causal=True, window=(3, None))
    leaves = qkv()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*leaves), module(*leaves))
    assert repr(module) == "FusedSDPA(causal=True, window=(3, None))"
    assert repr(cg.FusedSDPA(dropout=0.1, alibi=True)) == "FusedSDPA(dropout=0.1, alibi=True)"


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)], ids=str)
def test_a_batch_or_a_sequence_may_be_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    module = cg.FusedMultiheadAttention(8, 2)
    y = module(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None
    assert module.in_proj_weight.grad is not None and not module.in_proj_weight.grad.any()
