"""Attention on a GPU where cuDNN decides what comes out: dropout by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.decision import ALIAS
from cudnngraph.select.dropout_probe import recover_mask, with_mask
from cudnngraph.select.inputs import random_inputs
from tests import numerics
from tests.models import packed_training
from tests.samples import BF16, F16, F32

B, H, S, P = 2, 4, 192, 0.2
CUDA = torch.device("cuda")
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (40, 0)},
    "grouped": {"kv_heads": 2},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi": True, "is_causal": True},
}


def graphs(dtype: torch.dtype, **options: Any) -> tuple[GraphSpec, GraphSpec]:
    """Attention that drops by a seed, and its gradient, both with their inputs by name."""
    g = cg.Graph("dropout")
    heads = options.pop("kv_heads", H)
    q = g.input("q", (B, H, S, 64), dtype)
    k, v = (g.input(name, (B, heads, S, 64), dtype) for name in "kv")
    seed, offset = (g.input(name, (1,), torch.int64) for name in ("seed", "offset"))
    dropout = {"dropout_p": P, "dropout_seed": seed, "dropout_offset": offset}
    g.output("o", g.sdpa(q, k, v, **dropout, **options))
    gradient = cg.differentiate(g, ["q", "k", "v"])
    return gradient.forward, gradient.backward


def compiled(spec: GraphSpec) -> Any:
    exe = compile_spec(spec, "cuda")
    assert all(step.choice is not None for step in exe.steps), exe.explain()

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = exe(*inputs)
        return [made] if len(spec.outputs) == 1 else list(made)

    return run


def reach(options: dict[str, Any]) -> torch.Tensor:
    pairs = torch.ones(S, S, dtype=torch.bool, device=CUDA)
    left, right = options.get("window", (None, 0 if options.get("is_causal") else None))
    pairs = pairs if right is None else pairs.tril(right)
    return pairs if left is None else pairs.triu(-left)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dropout_by_a_seed_drops_a_share_scales_the_rest_and_agrees_with_its_gradient(
    name: str, dtype: torch.dtype
) -> None:
    forward, backward = graphs(dtype, **OPTIONS[name])
    inputs = random_inputs(forward, CUDA)
    inputs[forward.inputs.index("seed")].fill_(1234567890123)
    run = compiled(forward)
    keep = recover_mask(forward, inputs, run)
    pairs = reach(OPTIONS[name]).expand(B, H, S, S)
    if name != "alibi":  # far from the diagonal ALiBi leaves weights of zero
        share = float(keep[pairs].double().mean())
        assert abs(share - (1 - P)) < 5 * (P * (1 - P) / int(pairs.sum())) ** 0.5, share
        heads = keep[pairs].view(B * H, -1)
        assert len({tuple(head[:64].tolist()) for head in heads}) == B * H, "one mask for all heads"
    assert not bool((keep & ~pairs).any())

    whole, given = with_mask(forward, inputs, keep)
    made = run(inputs)
    exact = reference.run(whole, given, torch.float64)
    for label, ours, want in zip(forward.outputs, made, exact, strict=True):
        error, bound = numerics.relative_error(ours, want), numerics.bound(dtype, terms=S)
        assert error <= bound, f"{label}: {error:.3g} with the recovered mask, allowed {bound:.3g}"

    known = dict(zip((*forward.inputs, *forward.outputs), (*inputs, *made), strict=True))
    known["grad_o"] = torch.randn(B, H, S, 64, device=CUDA).to(dtype)
    grads = [known[label] for label in backward.inputs]
    back = compiled(backward)
    single = [n for n in backward.nodes if n.op == "sdpa_backward"]
    assert len(single) == 1
    if [n.op for n in backward.nodes] == ["sdpa_backward"]:  # no conversion of the lse before it
        place = torch.arange(S, device=CUDA)
        near = pairs & ((place - place.view(-1, 1)).abs() < 40)  # ALiBi leaves weights there
        seen = recover_mask(backward, grads, back)
        assert torch.equal(seen[near], keep[near]), "other weights are dropped"
        assert name == "alibi" or torch.equal(seen, keep), "other weights are dropped"
    other, given = with_mask(backward, grads, keep)
    exact = reference.run(other, given, torch.float64)
    for label, ours, want in zip(backward.outputs, back(grads), exact, strict=True):
        error, bound = numerics.relative_error(ours, want), 4 * numerics.bound(dtype, terms=S)
        assert error <= bound, f"{label}: {error:.3g} with the recovered mask, allowed {bound:.3g}"


def test_the_same_seed_and_offset_drop_the_same_and_others_others() -> None:
    forward, _ = graphs(F16)
    inputs = random_inputs(forward, CUDA)
    seed, offset = (inputs[forward.inputs.index(name)] for name in ("seed", "offset"))
    run = compiled(forward)

    def masks(numbers: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        made = []
        for a, b in numbers:
            seed.fill_(a)
            offset.fill_(b)
            made.append(recover_mask(forward, inputs, run))
        return made

    first, again, moved, other = masks([(7, 0), (7, 0), (7, 64), (8, 0)])
    assert torch.equal(first, again)
    for mask in (moved, other):
        agreed = float((first == mask).double().mean())
        assert abs(agreed - (P * P + (1 - P) ** 2)) < 0.01, agreed


def test_dropout_can_be_replayed_in_a_cuda_graph_with_another_seed() -> None:
    forward, _ = graphs(F16)
    inputs = random_inputs(forward, CUDA)
    seed = inputs[forward.inputs.index("seed")]
    exe = compile_spec(forward, "cuda")
    outputs = [
        torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=CUDA)
        for t in (forward.tensors[name] for name in forward.outputs)
    ]
    exe.run(*inputs, *outputs)
    first = outputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exe.run(*inputs, *outputs)
    graph.replay()
    assert torch.equal(outputs[0], first)
    seed.add_(1)
    graph.replay()
    assert not torch.equal(outputs[0], first)
    exe.run(*inputs, *outputs)
    changed = outputs[0].clone()
    graph.replay()
    assert torch.equal(outputs[0], changed)


def test_autotuned_dropout_is_checked_against_what_the_plan_drops() -> None:
    forward, _ = graphs(BF16, is_causal=True)
    exe = compile_spec(forward, "cuda", tune="autotune")
    assert all(step.choice is not None for step in exe.steps), exe.explain()
    assert "wrong" not in exe.explain()


def test_attention_modules_train_with_dropout() -> None:
    """The gradient of v is what finite sums of the output say: o is linear in v."""
    torch.manual_seed(0)
    module = cg.FusedSDPA(dropout=0.3, causal=True)
    q, k, v = (torch.randn(2, 4, 128, 64, device=CUDA, dtype=BF16) for _ in range(3))
    v.requires_grad_()
    grad = torch.randn_like(q)
    seed, offset = (torch.tensor([n], device=CUDA) for n in (5, 0))
    fixed = {"dropout_seed": seed, "dropout_offset": offset}
    attend = cg.functional.scaled_dot_product_attention
    o = attend(q, k, v, None, 0.3, True, **fixed)
    (dv,) = torch.autograd.grad(o, v, grad)
    moved = torch.randn_like(q).detach()
    there = attend(q, k, moved, None, 0.3, True, **fixed)
    along, by_grad = (there.double() * grad.double()).sum(), (dv.double() * moved.double()).sum()
    scale = (there.double().norm() * grad.double().norm()).item()
    assert abs(float(along - by_grad)) < 1e-2 * scale
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), module(q, k, v))


def test_sinks_of_one_head_at_a_time_take_their_weight() -> None:
    """A sink as high as every score takes the share of one more key."""
    q = torch.zeros(1, 4, 64, 64, device=CUDA, dtype=F16)
    k, v = torch.randn_like(q), torch.ones_like(q)
    sink = torch.full((4,), -torch.inf, device=CUDA, dtype=F32)
    sink[2] = 0.0
    o = cg.FusedSDPA()(q, k, v, sink=sink)
    want = torch.ones(4, device=CUDA)
    want[2] = 64 / 65
    assert torch.allclose(o.float().mean((0, 2, 3)), want, atol=1e-3)


# -- packed sequences and pages --------------------------------------------------------------------

LENGTHS = (70, 128, 3, 55)


def packed_inputs(dtype: torch.dtype, heads: int = 4) -> tuple[list[torch.Tensor], torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    data = [torch.randn(sum(LENGTHS), heads, 64, generator=gen).to(CUDA, dtype) for _ in range(3)]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(CUDA, torch.int32)
    return data, ends


def one_by_one(data: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    parts = zip(*(torch.split(x.double(), list(lengths)) for x in data), strict=True)
    done = []
    for each in parts:
        q, k, v = (part.transpose(0, 1) for part in each)
        done.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(done)


@pytest.mark.parametrize("finite", [False, True])
def test_packed_attention_and_its_gradients_are_those_of_each_sequence(finite: bool) -> None:
    data, ends = packed_inputs(BF16)
    leaves = [x.clone().requires_grad_() for x in data]
    attend = cg.functional.varlen_attention
    o = attend(*leaves, ends, ends, 128, 128, is_causal=True, finite_padding=finite)
    exact = [x.double().requires_grad_() for x in data]
    right, grad = one_by_one(exact, LENGTHS), torch.randn_like(data[0])
    found = torch.autograd.grad(o, leaves, grad)
    wanted = torch.autograd.grad(right, exact, grad.double())
    names = ("o", "dq", "dk", "dv")
    for name, a, b in zip(names, (o, *found), (right, *wanted), strict=True):
        error, bound = numerics.relative_error(a, b), 4 * numerics.bound(BF16, terms=128)
        assert error <= bound, f"{name}: {error:.3g}, allowed {bound:.3g}"


def test_packed_attention_of_other_lengths_is_the_same_graph_and_can_be_captured() -> None:
    data, ends = packed_inputs(F16)
    g = cg.Graph("packed")
    q, k, v = (g.input(name, x.shape, F16) for name, x in zip("qkv", data, strict=True))
    where = g.input("ends", (5,), torch.int32)
    g.output("o", g.sdpa_varlen(q, k, v, where, where, 128, 128, is_causal=True))
    exe, out = g.compile("cuda"), torch.empty_like(data[0])
    exe.run(*data, ends, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exe.run(*data, ends, out)
    for lengths in (LENGTHS, (128, 1, 127, 0), (64, 64, 64, 64)):
        ends.copy_(torch.tensor([0, *lengths]).cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        used = sum(lengths)
        want = one_by_one([x[:used] for x in data], lengths)
        assert numerics.relative_error(out[:used], want) <= numerics.bound(F16, terms=128)


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    data, ends = packed_inputs(F16)
    for x in data:
        x[70:198] = float("nan")  # the second sequence, and none of its neighbours
    o = cg.functional.varlen_attention(*data, ends, ends, 128, 128)
    assert bool(o[:70].isfinite().all()) and bool(o[198:].isfinite().all())


def test_pages_that_no_sequence_has_may_hold_anything() -> None:
    q = torch.randn(2, 8, 1, 64, device=CUDA, dtype=F16)
    caches = [torch.full((9, 2, 16, 64), float("nan"), device=CUDA, dtype=F16) for _ in range(2)]
    pages = [[7, 2, 4], [0, 8, 3]]
    lengths, table = [40, 17], torch.tensor(pages, device=CUDA, dtype=torch.int32)
    for cache in caches:
        cache[[7, 2, 4, 0, 8]] = torch.randn(5, 2, 16, 64, device=CUDA, dtype=F16)
        cache[4, :, 8:] = float("nan")  # behind the 40 keys of the first sequence
        cache[8, :, 1:] = float("nan")  # behind the 17 keys of the second
    ends = torch.tensor(lengths, device=CUDA, dtype=torch.int32)
    o = cg.functional.paged_attention(q, *caches, table, ends)
    for batch, keys in enumerate(lengths):
        k, v = (
            torch.cat([cache[page] for page in pages[batch]], 1)[:, :keys].double()
            for cache in caches
        )
        one = F.scaled_dot_product_attention(q[batch].double(), k, v, enable_gqa=True)
        assert numerics.relative_error(o[batch], one) <= numerics.bound(F16, terms=64)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_run_as_one_pointwise_plan(interleaved: bool) -> None:
    g = cg.Graph("rope")
    x = g.input("x", (2, 8, 256, 128), BF16)
    cos, sin = (g.input(name, (256, 64), BF16) for name in ("cos", "sin"))
    g.output("y", g.rope(x, cos, sin, interleaved=interleaved))
    exe = g.compile("cuda", kernels=False)
    plans = [[n.op for n in s.spec.nodes] for s in exe.steps if s.choice is not None]
    assert ["mul", "mul", "add"] in plans, exe.explain()
    exe = g.compile("cuda")
    run = [step.kind for step in exe.steps if ALIAS not in step.decisions]
    assert run == ["kernel"], exe.explain()


# -- gradients that others got wrong ---------------------------------------------------------------


def normal(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=gen).to(CUDA, BF16) for shape in shapes]


def gradients_within(
    leaves: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    grad: torch.Tensor,
    made: Sequence[torch.Tensor],
    causal: bool = False,
) -> None:
    """``made``: o and the gradients of ``leaves``, which are q, k and v, and may be a mask."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    bias = wide[3] if len(wide) > 3 else mask
    bias = bias.double() if bias is not None and bias.dtype == BF16 else bias
    o = F.scaled_dot_product_attention(*wide[:3], bias, is_causal=causal, enable_gqa=True)
    exact = [o, *torch.autograd.grad(o, wide, grad.double())]
    bound = numerics.bound(BF16, terms=leaves[1].shape[2])
    for name, ours, want in zip(("o", "dq", "dk", "dv", "dmask"), made, exact, strict=False):
        error = numerics.relative_error(ours, want)
        assert error <= bound, f"{name}: {error:.3g}, allowed {bound:.3g}"


@pytest.mark.parametrize("name", ["full", "causal", "grouped", "mask"])
def test_a_deterministic_backward_gives_the_same_bits_again(name: str) -> None:
    """pytorch#146734: plans that add the parts of dq up as they come give others each time."""
    shared = 2 if name == "grouped" else 8
    *data, grad, mask = normal(
        (2, 8, 2048, 64), *((2, shared, 2048, 64),) * 2, (2, 8, 2048, 64), (1, 1, 2048, 2048)
    )
    causal = name in ("causal", "grouped")
    attend = cg.FusedSDPA(causal=causal, policy=cg.Policy(deterministic=True))
    leaves = [x.requires_grad_() for x in (*data, *([mask] if name == "mask" else []))]

    def step() -> list[torch.Tensor]:
        o = attend(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, grad)]

    first = step()
    for _ in range(5):
        for label, a, b in zip(("o", "dq", "dk", "dv", "dmask"), first, step(), strict=False):
            differ = int((a != b).sum())
            assert torch.equal(a, b), f"{label}: {differ} of {a.numel()} elements differ"
    gradients_within(leaves, None, grad, first, causal)


@pytest.mark.parametrize("low", [False, True], ids=["", "low lse"])
@pytest.mark.parametrize("keys", [128, 65536])
def test_one_row_has_the_gradient_of_few_and_of_many_keys(keys: int, low: bool) -> None:
    """cudnn-frontend#1072, pytorch#138529: dk and dv of S_q = 1 were NaN where lse is low, and
    65536 keys an error. The gradient is that of a sum, of stride 0."""
    data = normal((1, 2, 1, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    if low:  # every score is about -120
        data[0][..., 0], data[1][..., 0] = -120.0, 8.0
    leaves = [x.requires_grad_() for x in data]
    o = cg.FusedSDPA()(*leaves)
    found = torch.autograd.grad(o.sum(), leaves)
    gradients_within(leaves, None, torch.ones_like(o), [o, *found])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("length", [64, 192, 320, 704])
def test_a_low_lse_under_a_mask_gives_finite_gradients(length: int, kind: str) -> None:
    """pytorch#196678: dq was NaN where half of the last 128 keys are there and lse < -88.7, so that
    exp(-lse) is more than float32 holds."""
    *data, grad = normal(*((1, 2, length, 64),) * 4)
    data[0][..., 0], data[1][..., 0] = -120.0, 8.0
    mask = torch.ones(length, length, dtype=torch.bool, device=CUDA).tril()
    if kind == "float":
        mask = torch.zeros(length, length, dtype=BF16, device=CUDA).masked_fill(~mask, -torch.inf)
    leaves = [x.requires_grad_() for x in data]
    o = cg.FusedSDPA()(*leaves, mask)
    gradients_within(leaves, mask, grad, [o, *torch.autograd.grad(o, leaves, grad)])


@pytest.mark.parametrize("length", [64, 100, 192, 197, 320, 1000])
@pytest.mark.parametrize("kind", ["causal", "window", "grouped"])
def test_a_low_lse_along_the_diagonal_gives_finite_gradients(length: int, kind: str) -> None:
    """Causal masks hide what is past the last key or row: no lengths need to be passed."""
    shared = 1 if kind == "grouped" else 2
    *data, grad = normal((1, 2, length, 64), *((1, shared, length, 64),) * 2, (1, 2, length, 64))
    data[0][..., 0], data[1][..., 0] = -120.0, 8.0
    leaves = [x.requires_grad_() for x in data]
    window = (64, 0) if kind == "window" else None
    o = cg.FusedSDPA(causal=True, window=window)(*leaves)
    found = [o, *torch.autograd.grad(o, leaves, grad)]
    mask = torch.ones(length, length, dtype=torch.bool, device=CUDA).tril().triu(-64)
    gradients_within(leaves, mask if window else None, grad, found, window is None)


def test_attention_into_an_unaligned_output_is_refused_by_name() -> None:
    """pytorch#195650: plans write 16 bytes at a time. A gradient at such an address is copied."""
    q, k, v, grad = normal(*((2, 4, 128, 64),) * 4)
    attend = cg.functional.scaled_dot_product_attention
    memory = torch.zeros(q.numel() + 1, device=CUDA, dtype=BF16)
    apart = memory[1:].view(q.shape)
    with pytest.raises(cg.BindError, match=r"starts 2 bytes past a multiple of 16.*clone"):
        attend(q, k, v, out=apart)
    assert not memory.any()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = attend(*leaves)
    apart.copy_(grad)
    gradients_within(leaves, None, grad, [o, *torch.autograd.grad(o, leaves, apart)])


@pytest.mark.parametrize("kind", ["bool", "float", "shared"])
def test_masks_of_odd_rows_are_copied_to_aligned_ones(kind: str) -> None:
    """Twice, with other numbers, and with rows that are hidden altogether."""
    q, k, v, _ = normal(*((8, 8, 385, 64),) * 4)
    g = cg.Graph("odd")
    of_mask = (385, 385) if kind == "shared" else (8, 1, 385, 385)
    dtype = torch.bool if kind == "bool" else BF16
    values = [g.input(name, q.shape, BF16) for name in "qkv"]
    g.output("o", g.sdpa(*values, g.input("mask", of_mask, dtype)))
    exe = g.compile()
    kinds = [step.spec.nodes[-1].op for step in exe.steps]
    assert kinds == ["where" if kind == "bool" else "identity", "sdpa"]
    assert exe.steps[-1].choice is not None
    for share in (0.9, 0.5):
        keep = torch.rand(of_mask, device=CUDA) < share
        keep[..., 7, :] = False
        mask = keep
        if kind != "bool":
            added = torch.randn(of_mask, device=CUDA, dtype=BF16)
            mask = added.masked_fill(~keep, -torch.inf)
        exact = reference.run(exe.spec, [x.cpu() for x in (q, k, v, mask)], torch.float64)
        o = exe(q, k, v, mask)
        assert not o[:, :, 7].any()
        assert numerics.relative_error(o.cpu(), exact[0]) <= numerics.bound(BF16, terms=385)


@pytest.mark.parametrize("keys", [193, 197, 577])
def test_what_lies_in_the_gaps_behind_rows_of_masks_is_not_read(keys: int) -> None:
    q, k, v, _ = normal(*((2, 4, keys, 64),) * 4)
    memory = torch.full((keys, -(-keys // 8) * 8), torch.nan, device=CUDA, dtype=BF16)
    mask = memory[:, :keys].normal_()
    g = cg.Graph("gaps")
    values = [g.input(name, q.shape, BF16) for name in "qkv"]
    g.output("o", g.sdpa(*values, g.input("mask", like=mask)))
    for tune in ("heuristic", "autotune"):
        exe = g.compile(tune=tune)
        assert [step.choice is not None for step in exe.steps] == [True]
        (exact,) = reference.run(exe.spec, [x.cpu() for x in (q, k, v, mask)], torch.float64)
        o = exe(q, k, v, mask)
        assert numerics.relative_error(o.cpu(), exact) <= numerics.bound(BF16, terms=keys)


def test_a_boolean_mask_for_what_the_graph_makes_is_of_plans() -> None:
    """Queries behind a projection, as models have them."""
    x, k, v, _ = normal((2, 193, 256), *((2, 4, 193, 64),) * 3)
    (w,) = normal((256, 256))
    mask = torch.rand(193, 193, device=CUDA) < 0.8
    g = cg.Graph("projected")
    projected = g.matmul(g.input("x", x.shape, BF16), g.input("w", w.shape, BF16))
    q = g.transpose(g.reshape(projected, (2, 193, 4, 64)), 1, 2)
    kv = [g.input(name, k.shape, BF16) for name in "kv"]
    o = g.sdpa(q, *kv, g.input("mask", mask.shape, torch.bool), scale=0.01)
    g.output("o", o)
    exe = g.compile()
    (step,) = (s for s in exe.steps if s.spec.nodes[-1].op == "sdpa")
    assert step.choice is not None, exe.explain()
    given = (x, w, k, v, mask)
    (exact,) = reference.run(exe.spec, [t.cpu() for t in given], torch.float64)
    error = numerics.relative_error(exe(*given).cpu(), exact)
    assert error <= 4 * numerics.bound(BF16, terms=256)


def test_packed_attention_of_what_the_graph_makes_is_of_plans() -> None:
    """On slices of one buffer: the gradient reads them copied."""
    g = packed_training()
    exe = g.compile()
    ops = {s.spec.nodes[-1].op: s.choice for s in exe.steps}
    assert ops["sdpa_varlen"] is not None and ops["sdpa_varlen_backward"] is not None
    x, do = (each.to(F16) for each in normal((64, 3, 4, 64), (64, 4, 64)))
    ends = torch.tensor([0, 3, 20, 20, 51], dtype=torch.int32, device=CUDA)
    given = {"x": x, "ends": ends, "do": do}
    want = reference.run(exe.spec, [given[name].cpu() for name in g.spec().inputs], torch.float64)
    made = exe(*(given[name] for name in g.spec().inputs))
    for ours, exact in zip(made, want, strict=True):
        used = slice(0, 51)
        error = numerics.relative_error(ours[used].cpu(), exact[used])
        assert error <= 4 * numerics.bound(F16, terms=64)
