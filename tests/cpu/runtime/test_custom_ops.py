"""The functions under torch.compile and torch.export: one op each, with the real strides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph import functional as CF
from cudnngraph.runtime import custom_ops
from tests.samples import F32, F64

EXACT = 1e-9
GEOMETRY = "(('stride',1,),('padding',1,),('dilation',1,),('groups',1,),)"
CONV = f"(('transposed',False,),('geometry',{GEOMETRY},),('activation','relu',),('attrs',(),),)"


def conv_call(channels_last: bool = False, wrt: tuple[bool, ...] = (True, True)) -> tuple[Any, ...]:
    """Arguments of the op for relu(conv(x, w, padding=1))."""
    gen = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=gen) for s in ((2, 3, 5, 5), (4, 3, 3, 3)))
    if channels_last:
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    x.requires_grad_(wrt[0])
    w.requires_grad_(wrt[1])
    return [x, w], "conv_act", [True, True, False, False], CONV, "None", [], [], list(wrt)


def compiled(function: Any, dynamic: bool | None = None) -> Any:
    """Traced as a whole, differentiated ahead of time, run as it is: needs no C compiler."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("wrt", [(True, True), (False, True), (False, False)], ids=str)
def test_opcheck_of_the_forward(wrt: tuple[bool, bool], channels_last: bool) -> None:
    torch.library.opcheck(custom_ops.forward, conv_call(channels_last, wrt))


def test_a_name_stands_for_one_function() -> None:
    def attention(g: cg.Graph, x: cg.Value) -> cg.Value:
        return g.relu(x)

    with pytest.raises(ValueError, match="two functions of graphs are named 'attention'"):
        custom_ops.function()(attention)


def test_opcheck_of_the_backward() -> None:
    given = conv_call()
    tensors = [t.detach() for t in given[0]]
    described = custom_ops._described(tensors, *given[1:])
    made = custom_ops._made(*described)
    results = custom_ops.forward(tensors, *given[1:])
    known = dict(zip(made.forward.inputs, tensors, strict=True))
    known |= dict(zip(made.forward.outputs, results, strict=True))
    known |= {name: torch.ones_like(results[0]) for name in made.backward.incoming.values()}
    ordered = [known[name] for name in made.backward.backward.inputs]
    torch.library.opcheck(custom_ops.backward, (ordered, *described))


def test_opcheck_of_attention_with_a_mask_and_an_lse() -> None:
    q = torch.randn(2, 4, 3, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, 3, 8, requires_grad=True) for _ in range(2))
    options = "(('is_causal',True,),('scale',None,),('window',None,),('return_lse',True,),)"
    keep = torch.ones(3, 3, dtype=torch.bool)
    there = [True, True, True, True, False, False]
    wrt = [True, True, True, False]
    given = ([q, k, v, keep], "attention", there, options, "None", [], [], wrt)
    torch.library.opcheck(custom_ops.forward, given)


def one_step(fast: Any, plain: Any, x: torch.Tensor) -> None:
    """Both give the same result, in the same strides, and the same gradient of x."""
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = fast(a), plain(b)
    assert y.stride() == expected.stride()
    y.square().sum().backward()
    expected.square().sum().backward()
    assert float((y - expected).detach().abs().max()) < EXACT
    assert float((a.grad - b.grad).abs().max()) < EXACT  # type: ignore[operator]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_of_blocks_compiles_without_a_break(training: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        cg.FusedConvBlock(3, 4, 3, padding=1),
        cg.FusedConvTransposeBlock(
            4, 2, 2, stride=2, norm=None, activation="leaky_relu", negative_slope=0.2
        ),
        cg.FusedConvBlock(2, 4, 3, padding="same", momentum=None, track_running_stats=True),
    ).double()
    plain.train(training)
    other = copy.deepcopy(plain)
    fast = compiled(other)
    for _ in range(3):
        x = torch.randn(2, 3, 6, 6, dtype=F64)
        one_step(fast, plain, x)
    for p, q in zip(other.parameters(), plain.parameters(), strict=True):
        assert float((p.grad - q.grad).abs().max()) < EXACT  # type: ignore[operator]
    for s, t in zip(other.buffers(), plain.buffers(), strict=True):
        assert float((s.double() - t.double()).abs().max()) < EXACT
    assert int(other[0].norm.num_batches_tracked) == (3 if training else 0)


def test_attention_compiles_without_a_break() -> None:
    plain = cg.FusedMultiheadAttention(16, 4, 2, causal=True, window=(2, None), dtype=F64)
    x = torch.randn(2, 5, 16, dtype=F64, requires_grad=True)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    leaves = [x, *plain.parameters()]
    y, expected = compiled(plain)(x, seq_len=lengths), plain(x, seq_len=lengths)
    found = torch.autograd.grad(y.square().sum(), leaves)
    right = torch.autograd.grad(expected.square().sum(), leaves)
    for a, b in zip((y, *found), (expected, *right), strict=True):
        assert float((a - b).detach().abs().max()) < EXACT


def test_slopes_that_require_grad_get_none_under_compile_either() -> None:
    def attend(q: torch.Tensor, slopes: torch.Tensor) -> Any:
        return CF.scaled_dot_product_attention(q, q, q, is_causal=True, alibi_slopes=slopes)

    fast = compiled(attend)
    q = torch.randn(1, 2, 3, 4, dtype=F64)
    slopes = torch.rand(2, dtype=F64, requires_grad=True)
    one_step(lambda q: fast(q, slopes), lambda q: attend(q, slopes), q)
    assert slopes.grad is None
    alone = fast(q, slopes)
    assert not alone.requires_grad and torch.equal(alone, attend(q, slopes))


MODELS: dict[str, tuple[Any, Any]] = {
    "block": (lambda: cg.FusedConvBlock(3, 4, 3), lambda n: (n, 3, 6, 6)),
    "block of images of any size": (lambda: cg.FusedConvBlock(3, 4, 3), lambda n: (2, 3, n, 2 * n)),
    "transposed": (
        lambda: cg.FusedConvTransposeBlock(3, 4, 2, stride=2),
        lambda n: (n, 3, 4, n),
    ),
    "depthwise-separable": (lambda: cg.FusedDepthwiseSeparable(3, 4), lambda n: (n, 3, 6, 6)),
    "attention": (
        lambda: cg.FusedMultiheadAttention(16, 4, 2, causal=True),
        lambda n: (2, n, 16),
    ),
    "norm": (lambda: cg.FusedLayerNorm(16), lambda n: (n, 3, 16)),
    "mlp": (lambda: cg.FusedMLP(16, 32), lambda n: (n, 3, 16)),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_that_change_are_left_open(name: str, training: bool) -> None:
    """More of them than torch compiles again for: it would give up, the whole being traced."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    plain = build().double().train(training)
    other = copy.deepcopy(plain)
    fast = compiled(other)
    for n in range(3, 15):
        one_step(fast, plain, torch.randn(shape(n), dtype=F64))
    for p, q in zip(other.parameters(), plain.parameters(), strict=True):
        assert float((p.grad - q.grad).abs().max()) < EXACT  # type: ignore[operator]


def test_images_of_open_sizes_keep_their_layout() -> None:
    block = cg.FusedConvBlock(3, 4, 3, norm=None)
    fast = compiled(block)
    for n in range(3, 15):
        x = torch.randn(n, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        y, expected = fast(x), block(x)
        assert torch.equal(y, expected) and y.stride() == expected.stride()
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_numbers_that_change_are_no_reason_to_give_up() -> None:
    """torch leaves a module's number open once it has met two of them."""
    x = torch.randn(2, 3, 6, 6)
    fast = torch.compile(lambda m, x: m(x), fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    for number in (1e-3, 2e-3, 3e-3, 0.5):
        block = cg.FusedConvBlock(
            3, 4, 3, eps=number, activation="leaky_relu", negative_slope=number
        ).eval()
        assert torch.equal(fast(block, x), block(x))
    q = torch.randn(2, 3, 8, 8)
    for number in (0.25, 0.5, 0.75):
        attention = cg.FusedSDPA(scale=number, causal=True)
        made = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
        assert torch.equal(made(q, q, q), attention(q, q, q))


WEIGHT = torch.randn(4, 4, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
# A function of a tensor and an int, the tensor's shape, and values of the int.
COUNTS: dict[str, tuple[Any, tuple[int, ...], range]] = {
    "padding": (lambda x, n: CF.conv2d(x, WEIGHT, padding=n), (2, 4, 7, 7), range(1, 5)),
    "stride": (lambda x, n: CF.conv2d(x, WEIGHT, stride=(n, 1)), (2, 4, 7, 7), range(1, 5)),
    "groups": (lambda x, n: CF.group_norm(x, 12 // n), (2, 12, 5), range(1, 5)),
    "window": (  # more of them than torch compiles again for
        lambda x, n: CF.scaled_dot_product_attention(x, x, x, window=(n, 0)),
        (1, 2, 16, 8),
        range(12),
    ),
    "longest sequence": (
        lambda x, n: CF.varlen_attention(x, x, x, ENDS, ENDS, n, n, is_causal=True),
        (5, 2, 8),
        range(3, 15),
    ),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", COUNTS)
def test_a_whole_number_that_changes_is_no_reason_to_give_up(
    name: str, dynamic: bool | None
) -> None:
    function, shape, numbers = COUNTS[name]
    fast = compiled(function, dynamic)
    for n in numbers:
        x = torch.randn(shape, dtype=F64)
        one_step(lambda x, n=n: fast(x, n), lambda x, n=n: function(x, n), x)


class Upsampled(nn.Module):
    """To the size of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = cg.FusedConvTransposeBlock(3, 4, 3, stride=2).eval()

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> Any:
        return self.up(x, output_size=skip.shape[2:])


def test_an_output_size_is_that_of_another_tensor() -> None:
    model = Upsampled().eval()
    fast = compiled(model)
    for n in range(3, 15):
        given = torch.randn(2, 3, n, n), torch.randn(2, 1, 2 * n + 2, 2 * n + 1)
        assert torch.equal(fast(*given), model(*given))


@pytest.mark.parametrize("strict", [False, True])
def test_an_output_size_that_is_left_open_is_exported(strict: bool) -> None:
    model = Upsampled().eval()
    n = torch.export.Dim("n", min=3, max=64)
    given = torch.randn(2, 3, 4, 5), torch.randn(2, 1, 10, 11)
    open_sizes = ({2: n}, {2: 2 * n + 2})
    program = torch.export.export(model, given, dynamic_shapes=open_sizes, strict=strict)
    for size in (3, 9, 33):
        given = torch.randn(2, 3, size, 5), torch.randn(2, 1, 2 * size + 2, 11)
        assert torch.equal(program.module()(*given), model(*given))


def test_dropout_draws_anew_in_a_compiled_model() -> None:
    torch.manual_seed(0)
    attention = cg.FusedSDPA(dropout=0.4)
    fast = compiled(attention)
    q, k = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8)
    v = torch.eye(64)[None, None]  # the result is the weights
    first, second = fast(q, k, v), fast(q, k, v)
    for weights in (first, second):
        assert 0.3 < float((weights == 0).double().mean()) < 0.5
    assert not torch.equal(first == 0, second == 0)
    q = q.requires_grad_()
    fast(q, k, v).sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())


def test_a_compiled_function_writes_to_a_given_tensor() -> None:
    w, out = torch.randn(4, 3, 3, 3), torch.empty(2, 4, 4, 4)
    x = torch.randn(2, 3, 6, 6)
    fast = compiled(lambda x, out: CF.conv2d(x, w, activation="relu", out=out))
    with torch.no_grad():
        made = fast(x, out)
        assert made.data_ptr() == out.data_ptr()
        assert torch.equal(out, CF.conv2d(x, w, activation="relu"))


@pytest.mark.parametrize(
    ("out", "wrong"),
    [
        (torch.empty(3, 2, 4, 4, 4), "has shape"),
        (torch.empty(2, 4, 4, 4, dtype=F64), "is float64; expected float32"),
        (torch.empty(2, 4, 4, 8)[..., ::2], "has stride"),
        (torch.empty(2, 4, 4, 4).contiguous(memory_format=torch.channels_last), "has stride"),
        (torch.empty(2, 4, 4, 4, device="meta"), "is on meta"),
    ],
    ids=["shape", "dtype", "stride", "layout", "device"],
)
def test_a_tensor_that_does_not_fit_is_refused_where_it_is_traced(
    out: torch.Tensor, wrong: str
) -> None:
    def into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return CF.conv_bias_act_into(out, x, torch.ones(4, 3, 3, 3))

    x = torch.ones(2, 3, 6, 6)
    with pytest.raises(cg.BindError, match=f"tensor 'out': {wrong}"):
        into(x, out)
    # torch 2.15 quotes the text of an error twice.
    with pytest.raises(RuntimeError, match=rf"BindError.*tensor \\?'out\\?': {wrong}"):
        compiled(into)(x, out)


def test_tensors_of_sizes_that_change_are_written_to() -> None:
    w = torch.randn(4, 3, 3, 3)
    fast = compiled(lambda x, out: CF.conv2d(x, w, out=out))
    for n in range(3, 15):
        x, out = torch.randn(n, 3, 6, 6), torch.empty(n, 4, 4, 4)
        assert torch.equal(fast(x, out), CF.conv2d(x, w))


@pytest.mark.parametrize("shape", [(3, 1), (1, 4), (2, 3, 4), (2, 1, 3, 4)], ids=str)
def test_a_residual_of_linear_broadcasts_under_compile(shape: tuple[int, ...]) -> None:
    w, z = torch.randn(4, 5, dtype=F64), torch.randn(shape, dtype=F64)
    fast = compiled(lambda x: CF.linear(x, w, residual=z))
    for n in range(2, 14):
        x = torch.randn(n, 1, 2, 3, 5, dtype=F64)
        one_step(fast, lambda x: CF.linear(x, w, residual=z), x)


def test_a_compiled_function_takes_sizes_that_change() -> None:
    w = torch.randn(4, 3, 3, 3, dtype=F64)
    fast = compiled(lambda x: CF.conv2d(x, w, activation="silu", padding=[1, 1]))
    for batch in (2, 3, 5):
        x = torch.randn(batch, 3, 6, 6, dtype=F64)
        assert torch.equal(fast(x), CF.conv2d(x, w, activation="silu", padding=1))


def test_autocast_and_channels_last_hold_under_compile() -> None:
    block = cg.FusedConvBlock(3, 4, 3, norm=None)
    fast = compiled(block)
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = fast(x), block(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert y.stride() == expected.stride() and y.is_contiguous(memory_format=torch.channels_last)


def test_only_the_needed_gradients_are_part_of_a_compiled_graph() -> None:
    tensors, *rest = conv_call(wrt=(False, True))
    made = custom_ops._made(*custom_ops._described(tensors, *rest))
    assert made.backward.backward.outputs == ("grad_weight",)
    results = custom_ops.forward(tensors, *rest)
    (grad,) = torch.autograd.grad(results[0].sum(), tensors[1])
    expected = torch.autograd.grad(
        CF.conv2d(*tensors, padding=1, activation="relu").sum(), tensors[1]
    )
    assert torch.equal(grad, expected[0])


def test_double_backward_of_the_op_says_what_is_missing() -> None:
    tensors, *rest = conv_call()
    y = custom_ops.forward(tensors, *rest)[0]
    (dx,) = torch.autograd.grad(y.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(cg.FeatureMissing, match=r"graph 'conv_act': its gradient has no gradient"):
        torch.autograd.grad(dx.sum(), tensors[1])


def test_a_policy_reaches_the_executables_of_the_op() -> None:
    policy = cg.Policy(deterministic=True, workspace_limit=1 << 20, exclude_engines=("eng8",))
    numbers: list[float] = []
    counts: list[int] = []
    fields = custom_ops._policy_text(policy, numbers, counts)
    given = (*conv_call()[:4], fields, numbers, counts, [True, False])
    made = custom_ops._made(*custom_ops._described(*given))
    assert made.policy == policy
    assert made.executable("backward", torch.device("cpu")).policy.deterministic


def test_an_exported_model_has_the_op_and_computes_the_same() -> None:
    block = cg.FusedConvBlock(3, 4, 3).eval()
    x = torch.randn(2, 3, 6, 6)
    program = torch.export.export(block, (x,))
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.cudnngraph.forward.default in targets
    assert torch.equal(program.module()(x), block(x))
    assert program.module()(x).dtype == F32


NO_MINIMUM = pytest.mark.xfail(
    torch.__version__ < (2, 12),
    reason="torch 2.11 does not know that min(4 n, 8 n) is 4 n, and refuses n",
)


@pytest.mark.parametrize("name", ["block", pytest.param("attention", marks=NO_MINIMUM)])
def test_a_model_is_exported_with_a_size_left_open(name: str) -> None:
    build, shape = MODELS[name]
    model = build().eval()
    dims = {shape(5).index(5): torch.export.Dim("n", min=2, max=64)}
    program = torch.export.export(model, (torch.randn(shape(5)),), dynamic_shapes=(dims,))
    for n in (2, 7, 33):
        x = torch.randn(shape(n))
        assert torch.equal(program.module()(x), model(x))
