"""The modules on a GPU: against torch autograd at each dtype, captured, repeated, in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.nn import sync
from tests import numerics
from tests.samples import BF16, F16, F32

DTYPES = [F32, F16, BF16]
LAST = torch.channels_last


def within(
    ours: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    names: Sequence[str],
    terms: int,
    exact_of_theirs: Sequence[torch.Tensor] | None = None,
) -> None:
    """No farther from float64 than torch at the same dtype, times the factor, or the bound."""
    yardsticks = zip(exact, exact_of_theirs or exact, strict=True)
    for name, a, c, (b, d) in zip(names, ours, theirs, yardsticks, strict=True):
        assert a.shape == b.shape and a.dtype == c.dtype
        limit = max(
            numerics.TORCH_FACTOR * numerics.relative_error(c.to(dtype), d),
            numerics.bound(dtype, terms=terms),
        )
        error = numerics.relative_error(a.to(dtype), b)
        assert error <= limit, f"{name}: {error:.3g} from float64, allowed {limit:.3g}"


def by_torch(
    block: Any, x: torch.Tensor, z: torch.Tensor | None, positive: torch.Tensor | None = None
) -> torch.Tensor:
    """By torch's modules. ``positive`` says where a relu lets through, in place of its operand."""
    y = block.conv(x)
    y = y if block.norm is None else block.norm(y)
    y = y if z is None else y + z
    if positive is not None and isinstance(block.activation, torch.nn.ReLU):
        return torch.where(positive, y, 0.0)
    return block.activation(y)  # type: ignore[no-any-return]


BLOCKS: dict[str, dict[str, Any]] = {
    "block": {},
    "no norm": {"norm": None},
    "stride": {"stride": 2},
    "groups": {"groups": 4, "activation": "silu"},
    "dilation": {"dilation": 2, "padding": 2},
    "1x1": {"kernel_size": 1, "padding": 0, "bias": False},
    "transposed": {"kernel_size": 4, "stride": 2, "transposed": True},
}


def make(label: str) -> Any:
    torch.manual_seed(0)
    options = {"kernel_size": 3, "padding": 1, **BLOCKS[label]}
    kind = cg.FusedConvTransposeBlock if options.pop("transposed", 0) else cg.FusedConvBlock
    block = kind(32, 64, **options).to(memory_format=LAST)
    if block.norm is not None:
        for tensor in (block.norm.weight, block.norm.bias, block.norm.running_mean):
            torch.nn.init.normal_(tensor)
        torch.nn.init.uniform_(block.norm.running_var, 0.5, 2.0)
    return block


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("label", BLOCKS)
def test_a_block_and_its_gradients_are_within_the_policy(
    label: str, training: bool, residual: bool, dtype: torch.dtype
) -> None:
    """A relu that rounding switches is a step in the gradient. So each side is compared with
    float64 gradients through the relu as that side has it."""
    base = make(label).train(training)
    shape = base.conv(torch.zeros(8, 32, 14, 14)).shape
    x64 = torch.randn(8, 32, 14, 14).to(dtype).double().to(memory_format=LAST)
    z64 = torch.randn(shape).to(dtype).double().to(memory_format=LAST) if residual else None
    grad = torch.randn(shape).to(dtype).double().to(memory_format=LAST)
    names: list[str] = []

    def results(run: Any, place: str, kind: torch.dtype, *more: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(base).to(dtype).to(place, kind)
        x = x64.to(place, kind).requires_grad_()
        z = None if z64 is None else z64.to(place, kind).requires_grad_()
        y = run(model, x, z, *more)
        # A norm takes the bias before it away: its gradient is rounding alone.
        kept = {n: p for n, p in model.named_parameters() if n != "0.bias" or model.norm is None}
        given = {"x": x, **({} if z is None else {"z": z}), **kept}
        found = torch.autograd.grad(y, list(given.values()), grad.to(place, kind))
        running = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        names[:] = ["y", *given, *running]
        return [y.detach(), *found, *running.values()]

    ours = results(lambda model, *given: model(*given), "cuda", dtype)
    theirs = results(by_torch, "cuda", dtype)
    assert ours[0].is_contiguous(memory_format=LAST)
    exact, exact_of_theirs = (
        results(by_torch, "cpu", torch.float64, (side[0] > 0).cpu()) for side in (ours, theirs)
    )
    within(ours, exact, theirs, dtype, names, 8 * 28 * 28, exact_of_theirs)


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, which has something to exchange all the same."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    monkeypatch.setattr(sync, "several_ranks", lambda group: True)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("label", ["block", "groups", "transposed"])
def test_a_synchronised_block_and_its_gradients_are_within_the_policy(
    label: str, dtype: torch.dtype, one_rank: None
) -> None:
    """The graphs of the synchronised norm; with one rank its statistics are the batch's."""
    base = nn.SyncBatchNorm.convert_sync_batchnorm(make(label))
    by_batch = make(label)
    shape = base.conv(torch.zeros(8, 32, 14, 14)).shape
    x64 = torch.randn(8, 32, 14, 14).to(dtype).double().to(memory_format=LAST)
    grad = torch.randn(shape).to(dtype).double().to(memory_format=LAST)
    names: list[str] = []

    def results(model: Any, run: Any, place: str, kind: torch.dtype, *more: Any) -> Any:
        model = copy.deepcopy(model).to(dtype).to(place, kind)
        x = x64.to(place, kind).requires_grad_()
        y = run(model, x, *more)
        kept = {n: p for n, p in model.named_parameters() if n != "0.bias"}
        found = torch.autograd.grad(y, [x, *kept.values()], grad.to(place, kind))
        running = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        names[:] = ["y", "x", *kept, *running]
        return [y.detach(), *found, *running.values()]

    ours = results(base, lambda model, x: model(x), "cuda", dtype)
    theirs = results(by_batch, lambda model, x: by_torch(model, x, None), "cuda", dtype)
    exact, exact_of_theirs = (
        results(
            by_batch,
            lambda model, x, positive: by_torch(model, x, None, positive),
            "cpu",
            torch.float64,
            (side[0] > 0).cpu(),
        )
        for side in (ours, theirs)
    )
    within(ours, exact, theirs, dtype, names, 8 * 28 * 28, exact_of_theirs)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize(
    ("options", "shared", "length"),
    [({}, 8, 128), ({"causal": True}, 8, 192), ({"causal": True}, 2, 256), ({}, 1, 64)],
    ids=["full", "causal", "grouped", "one head"],
)
def test_attention_and_its_gradients_are_within_the_policy(
    options: dict[str, Any], shared: int, length: int, dtype: torch.dtype
) -> None:
    gen = torch.Generator().manual_seed(0)
    shapes = ((2, 8, length, 64), (2, shared, length, 64), (2, shared, length, 64))
    wide = [torch.randn(s, generator=gen).to(dtype).double() for s in shapes]
    grad = torch.randn(shapes[0], generator=gen).to(dtype).double()
    attend = cg.FusedSDPA(**options)

    def torchs(q: Any, k: Any, v: Any) -> torch.Tensor:
        causal = bool(options.get("causal"))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    results = []
    for place, kind, run in (
        ("cuda", dtype, attend),
        ("cpu", torch.float64, torchs),
        ("cuda", dtype, torchs),
    ):
        leaves = [t.to(place, kind).requires_grad_() for t in wide]
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, grad.to(place, kind))])
    ours, exact, theirs = results
    within(ours, exact, theirs, dtype, ["o", "q", "k", "v"], length * 64)


def by_projections(
    m: Any, x: torch.Tensor, attn_mask: torch.Tensor | None = None, seq_len: Any = None
) -> torch.Tensor:
    """Self-attention by torch's own functions, with the parameters of ours."""
    batch, length, _ = x.shape
    heads, shared = m.num_heads, m.num_kv_heads
    packed = F.linear(x, m.in_proj_weight, m.in_proj_bias)
    split = packed.view(batch, length, heads + 2 * shared, m.head_dim).transpose(1, 2)
    q, k, v = split.split([heads, shared, shared], dim=1)
    keep = torch.ones(batch, 1, length, length, dtype=torch.bool, device=x.device)
    keep = keep if attn_mask is None else keep & attn_mask
    keep = keep.tril() if m.attend.causal else keep
    if seq_len is not None:
        inside = torch.arange(length, device=x.device) < seq_len.view(-1, 1)
        keep = keep & inside.view(batch, 1, 1, length) & inside.view(batch, 1, length, 1)
    dead = ~keep.any(-1, keepdim=True)
    o = F.scaled_dot_product_attention(q, k, v, keep | dead, enable_gqa=True)
    o = o.masked_fill(dead, 0.0)
    return m.out_proj(o.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


PROJECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {}),
    "grouped": ({"num_kv_heads": 2, "causal": True, "bias": False}, {}),
    "mask": ({}, {"attn_mask": torch.arange(128 * 128).view(128, 128) % 3 != 1}),
    "lengths": ({}, {"seq_len": torch.tensor([128, 77], dtype=torch.int32)}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("label", PROJECTED)
def test_multihead_attention_and_its_gradients_are_within_the_policy(
    label: str, dtype: torch.dtype
) -> None:
    options, given = PROJECTED[label]
    torch.manual_seed(0)
    base = cg.FusedMultiheadAttention(256, 4, **options)
    for parameter in base.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.1)
    base = base.to(dtype).double()  # the very numbers that each dtype holds
    x64, grad = (torch.randn(2, 128, 256).to(dtype).double() for _ in range(2))
    results = []
    for where, kind, run in (
        ("cuda", dtype, lambda m, x, **more: m(x, **more)),
        ("cpu", torch.float64, by_projections),
        ("cuda", dtype, by_projections),
    ):
        model = copy.deepcopy(base).to(where, kind)
        x = x64.to(where, kind).requires_grad_()
        y = run(model, x, **{name: value.to(where) for name, value in given.items()})
        of = [x, *model.parameters()]
        results.append([y.detach(), *torch.autograd.grad(y, of, grad.to(where, kind))])
    names = ["y", "x", *dict(base.named_parameters())]
    ours, exact, theirs = results
    within(ours, exact, theirs, dtype, names, 2 * 128 * 256)


def test_a_gradient_of_stride_0_and_packed_operands() -> None:
    packed = torch.randn(2, 128, 3, 4, 64, device="cuda", dtype=BF16, requires_grad=True)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    (found,) = torch.autograd.grad(cg.FusedSDPA()(q, k, v).sum(), packed)
    (right,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), packed)
    wide = packed.detach().double().cpu().requires_grad_()
    y = F.scaled_dot_product_attention(*wide.permute(2, 0, 3, 1, 4))
    (exact,) = torch.autograd.grad(y.sum(), wide)
    within([found], [exact], [right], BF16, ["packed"], 128 * 64)


def step(block: Any, x: torch.Tensor) -> list[torch.Tensor]:
    y = block(x)
    return [y, *torch.autograd.grad(y.square().mean(), [x, *block.parameters()])]


def test_deterministic_repeats_are_equal_bit_by_bit() -> None:
    block = make("block").to("cuda", F16)
    block.policy = cg.Policy(deterministic=True)
    x = torch.randn(8, 32, 14, 14, device="cuda", dtype=F16).to(memory_format=LAST)
    x.requires_grad_()
    first = step(block, x)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(block, x), strict=True))


def test_forward_and_backward_are_captured_in_a_cuda_graph() -> None:
    block = make("block").to("cuda", F16)
    x = torch.randn(8, 32, 14, 14, device="cuda", dtype=F16).to(memory_format=LAST)
    x.requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(block, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step(block, x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, step(block, x), strict=True):
        assert numerics.relative_error(a, b.double()) <= numerics.bound(F16)


def test_make_graphed_callables_takes_a_module() -> None:
    block = make("block").to("cuda", F16)
    x = torch.randn(8, 32, 14, 14, device="cuda", dtype=F16).to(memory_format=LAST)
    x.requires_grad_()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(block), (x,))
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    for a, b in zip(step(graphed, x), step(block, x), strict=True):
        assert numerics.relative_error(a, b.double()) <= numerics.bound(F16)


def _requested_bytes() -> int:
    """Return the bytes of tensors; ``memory_allocated`` has up to 1 MB more for each."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def test_no_more_memory_is_held_between_forward_and_backward_than_torch_holds() -> None:
    block = make("block").to("cuda", F16)
    x = torch.randn(32, 32, 28, 28, device="cuda", dtype=F16).to(memory_format=LAST)
    x.requires_grad_()
    held = []
    for run in (block, lambda x: by_torch(block, x, None)):
        for _ in range(3):
            run(x).sum().backward()
        block.zero_grad()
        x.grad = None
        torch.cuda.synchronize()
        before = _requested_bytes()
        y = run(x)
        held.append(_requested_bytes() - before)
        del y
    assert 0 < held[0] <= held[1]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast_trains_float32_parameters(dtype: torch.dtype) -> None:
    block = make("block").cuda()
    x = torch.randn(8, 32, 14, 14, device="cuda").to(memory_format=LAST)
    with torch.autocast("cuda", dtype):
        y, theirs = block(x), by_torch(block, x, None)
    assert y.dtype == theirs.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad.dtype == F32 for p in block.parameters())


def test_torch_compile_runs_the_block_as_one_op() -> None:
    block = make("block").to("cuda", F16)
    other = copy.deepcopy(block)
    x = torch.randn(8, 32, 14, 14, device="cuda", dtype=F16).to(memory_format=LAST)
    x.requires_grad_()
    fast = torch.compile(other, fullgraph=True)
    names = ["y", "x", *dict(block.named_parameters())]
    for name, a, b in zip(names, step(block, x), step(fast, x), strict=True):
        assert a.stride() == b.stride()
        if name != "0.bias":
            assert numerics.relative_error(a, b.double()) <= 2 * numerics.bound(F16), name


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_torch_compile_takes_the_block_into_its_cuda_graphs(trains: bool) -> None:
    """While it warms one up, what is allocated is the graph's, and may not stay: plans' constants
    and workspace lie elsewhere."""
    torch._dynamo.reset()
    cg.cache_clear()
    block = make("block").to("cuda").train(trains)
    x = torch.randn(8, 32, 14, 14, device="cuda").to(memory_format=LAST).requires_grad_(trains)
    fast = torch.compile(copy.deepcopy(block), mode="reduce-overhead", fullgraph=True)

    def run(module: Any) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        if trains:
            return [each.clone() for each in step(module, x)]
        with torch.no_grad():
            return [module(x).clone()]

    for _ in range(4):
        found = run(fast)
    names = ["y", "x", *dict(block.named_parameters())][: len(found)]
    for name, a, b in zip(names, found, run(block), strict=True):
        if name != "0.bias":  # a norm takes it out: zero but for rounding
            assert numerics.relative_error(a, b.double()) <= numerics.bound(F32, terms=1 << 12)


@pytest.mark.parametrize("kind", ["block", "attention"])
def test_torch_compile_leaves_sizes_open(kind: str) -> None:
    """More sizes than it compiles again for, and the strides that it was told."""
    torch._dynamo.reset()
    if kind == "block":
        model: Any = make("block").to("cuda", F16)
    else:
        model = cg.FusedMultiheadAttention(64, 4, 2, causal=True, device="cuda", dtype=F16)
    other = copy.deepcopy(model)
    fast = torch.compile(other, fullgraph=True)
    for n in range(4, 15):
        if kind == "block":
            x = torch.randn(n, 32, 14, 14, device="cuda", dtype=F16).to(memory_format=LAST)
        else:
            x = torch.randn(2, 8 * n, 64, device="cuda", dtype=F16)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, right = fast(a), model(b)
        grad = torch.randn_like(right)
        (da,), (db,) = (torch.autograd.grad(*each, grad) for each in ((ours, a), (right, b)))
        assert ours.stride() == right.stride()
        for made, want in ((ours, right), (da, db)):
            assert numerics.relative_error(made.detach(), want.detach().double()) <= 2 * (
                numerics.bound(F16)
            ), n


def test_out_is_written_in_place_and_allocates_nothing() -> None:
    x = torch.randn(8, 32, 14, 14, device="cuda", dtype=F16).to(memory_format=LAST)
    w = torch.randn(64, 32, 3, 3, device="cuda", dtype=F16).to(memory_format=LAST)
    b = torch.randn(64, device="cuda", dtype=F16)
    out = cg.functional.conv_bias_act(x, w, b, padding=1)
    expected = out.clone()
    out.zero_()
    cg.functional.conv_bias_act_into(out, x, w, b, padding=1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    cg.functional.conv_bias_act_into(out, x, w, b, padding=1)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(out, expected)


@pytest.mark.parametrize("training", [False, True])
def test_a_module_that_changes_between_calls_is_called_as_it_is(training: bool) -> None:
    """The program of a call serves the next one only if nothing has changed that matters."""
    torch.manual_seed(0)
    block = cg.FusedConvBlock(32, 32, 3, padding=1).cuda().half()
    block = block.to(memory_format=torch.channels_last).train(training)
    block.norm.float()
    x = torch.randn(2, 32, 9, 8, device="cuda").half().to(memory_format=torch.channels_last)

    def check(x: torch.Tensor) -> None:
        want = copy.deepcopy(block).double().to_torch()(x.double()).detach()
        with torch.no_grad():
            for _ in range(4):  # the long way, and then the short one
                numerics.check(block(x), want, F16)

    check(x)
    check(x[:1])
    check(x.contiguous())
    with torch.no_grad():
        block.conv.weight.mul_(2.0)
    check(x)
    block.conv.padding = (0, 0)
    check(x)
    block.conv.weight.data = block.conv.weight.data.contiguous(memory_format=torch.channels_last)
    block.norm.eps = 0.5
    check(x)
    block.norm.momentum = 0.5
    for wanted in (False, True):
        for parameter in block.parameters():
            parameter.requires_grad_(wanted)
        y = block(x)
        assert y.requires_grad is wanted
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert block(x.float()).dtype == torch.bfloat16
    check(x)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_residual_of_a_wider_dtype_makes_the_sum_of_it(dtype: torch.dtype) -> None:
    """Under autocast the convolution and its bias are in 16 bits, and what is added need not be."""
    torch.manual_seed(0)
    block = cg.FusedConvBlock(32, 32, 3, padding=1, norm=None).to("cuda")
    x = torch.randn(2, 32, 14, 14, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        y, want = block(x, x), (block.conv(x) + x).relu()
    assert y.dtype == want.dtype == F32
    assert numerics.relative_error(y, want.double()) <= numerics.bound(dtype, terms=32 * 9)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())
