"""Functions, modules and graphs under torch's function transforms, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import cudnngraph as cg
from cudnngraph import functional as CF
from cudnngraph.runtime import custom_ops, transforms

F64 = torch.float64
EXACT = 1e-9
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]


def made(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]


def close(ours: Any, theirs: Any) -> None:
    ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) < EXACT


def statistics(c: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, c, dtype=F64), torch.linspace(0.5, 2, c, dtype=F64)


#: ours, torch's, and the shapes of the operands; the first one has the batch.
CASES: dict[str, Case] = {
    "conv2d": (
        lambda x, w, b: CF.conv2d(x, w, b, padding=1, activation="silu"),
        lambda x, w, b: F.silu(F.conv2d(x, w, b, padding=1)),
        ((2, 4, 5, 6), (3, 4, 3, 3), (3,)),
    ),
    "conv2d, residual": (
        lambda x, w, z: CF.conv2d(x, w, residual=z, activation="tanh"),
        lambda x, w, z: torch.tanh(F.conv2d(x, w) + z),
        ((2, 4, 5, 5), (3, 4, 3, 3), (2, 3, 3, 3)),
    ),
    "conv_transpose1d": (
        lambda x, w: CF.conv_transpose1d(x, w, stride=2),
        lambda x, w: F.conv_transpose1d(x, w, stride=2),
        ((2, 4, 5), (4, 3, 3)),
    ),
    "conv_bn_act": (
        lambda x, w: CF.conv_bn_act(x, w, *statistics(3), activation="sigmoid"),
        lambda x, w: torch.sigmoid(F.batch_norm(F.conv2d(x, w), *statistics(3))),
        ((2, 4, 5, 5), (3, 4, 3, 3)),
    ),
    "conv_bn_act, training": (
        lambda x, w: CF.conv_bn_act(x, w, None, None, training=True, activation="sigmoid"),
        lambda x, w: torch.sigmoid(F.batch_norm(F.conv2d(x, w), None, None, training=True)),
        ((2, 4, 5, 5), (3, 4, 3, 3)),
    ),
    "linear": (
        lambda x, w, b: CF.linear(x, w, b, activation="gelu"),
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        ((2, 3, 6), (5, 6), (5,)),
    ),
    "mlp": (
        lambda x, u, a, d: CF.mlp(x, u, a, d),
        lambda x, u, a, d: F.linear(F.gelu(F.linear(x, u, a)), d),
        ((3, 6), (8, 6), (8,), (5, 8)),
    ),
    "layer_norm": (
        lambda x, w, b: CF.layer_norm(x, (6,), w, b),
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        ((2, 3, 6), (6,), (6,)),
    ),
    "layer_norm, all dims": (
        lambda x, w: CF.layer_norm(x, (2, 6), w),
        lambda x, w: F.layer_norm(x, (2, 6), w),
        ((2, 6), (2, 6)),
    ),
    "group_norm": (
        lambda x, w, b: CF.group_norm(x, 2, w, b, activation="silu"),
        lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)),
        ((2, 4, 3, 5), (4,), (4,)),
    ),
    "attention": (
        lambda q, k, v: CF.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    ),
    "attention, mask": (
        lambda q, k, v, m: CF.scaled_dot_product_attention(q, k, v, m),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), (2, 1, 5, 7)),
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def loss(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda *tensors: function(*tensors).square().sum()


def test_gradients_by_every_operand(case: Case) -> None:
    ours, theirs, shapes = case
    tensors = made(*shapes)
    wrt = tuple(range(len(tensors)))
    close(grad(loss(ours), wrt)(*tensors), grad(loss(theirs), wrt)(*tensors))


def test_a_gradient_by_one_operand_alone(case: Case) -> None:
    ours, theirs, shapes = case
    tensors = made(*shapes)
    for at in range(len(tensors)):
        close(grad(loss(ours), at)(*tensors), grad(loss(theirs), at)(*tensors))


def test_jacobians(case: Case) -> None:
    ours, theirs, shapes = case
    tensors = made(*shapes)
    close(jacrev(ours, 1)(*tensors), jacrev(theirs, 1)(*tensors))


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("mapped", ["first", "second", "all"])
def test_mapped_operands(case: Case, mapped: str, dim: int) -> None:
    ours, theirs, shapes = case
    dims = [
        dim if mapped == "all" or at == ("first", "second").index(mapped) else None
        for at in range(len(shapes))
    ]
    tensors = [
        each if d is None else torch.stack([each, 2 * each, each - 1], d)
        for each, d in zip(made(*shapes), dims, strict=True)
    ]
    close(vmap(ours, tuple(dims))(*tensors), vmap(theirs, tuple(dims))(*tensors))


def test_gradients_of_each_sample(case: Case) -> None:
    ours, theirs, shapes = case
    first, *rest = made(*shapes)
    many = torch.stack([first, 2 * first, first - 1])
    dims, wrt = (0, *(None for _ in rest)), tuple(range(len(shapes)))
    close(
        vmap(grad(loss(ours), wrt), dims)(many, *rest),
        vmap(grad(loss(theirs), wrt), dims)(many, *rest),
    )


def test_the_gradient_of_what_is_mapped(case: Case) -> None:
    ours, theirs, shapes = case
    first, *rest = made(*shapes)
    many = torch.stack([first, 2 * first])
    dims, wrt = (0, *(None for _ in rest)), tuple(range(len(shapes)))

    def mapped(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda *tensors: vmap(function, dims)(*tensors).square().sum()

    close(grad(mapped(ours), wrt)(many, *rest), grad(mapped(theirs), wrt)(many, *rest))


def test_two_mapped_dims(case: Case) -> None:
    ours, theirs, shapes = case
    first, *rest = made(*shapes)
    many = torch.stack([torch.stack([first, -first, first + 1]), torch.stack([2 * first] * 3)])
    dims = (0, *(None for _ in rest))
    close(vmap(vmap(ours, dims), dims)(many, *rest), vmap(vmap(theirs, dims), dims)(many, *rest))


def test_autograd_around_a_map(case: Case) -> None:
    ours, theirs, shapes = case
    results = []
    for function in (ours, theirs):
        first, *rest = [each.requires_grad_() for each in made(*shapes)]
        dims = (0, *(None for _ in rest))
        vmap(function, dims)(torch.stack([first, 2 * first]), *rest).square().sum().backward()
        results.append(tuple(each.grad for each in (first, *rest)))
    close(*results)


@pytest.mark.parametrize("folds", [True, False], ids=["a batch", "a weight"])
def test_a_mapped_batch_is_one_call_and_other_operands_are_one_each(
    folds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    run = transforms.Halves.run
    monkeypatch.setattr(transforms.Halves, "run", lambda *given: calls.append(1) or run(*given))
    x, w = made((5, 2, 4, 6, 6), (3, 4, 3, 3)) if folds else made((2, 4, 6, 6), (5, 3, 4, 3, 3))
    vmap(CF.conv2d, (0, None) if folds else (None, 0))(x, w)
    assert len(calls) == (1 if folds else 5)


def test_forward_mode_is_refused() -> None:
    x, w = made((2, 4, 5, 5), (3, 4, 3, 3))
    for call in (
        lambda: jvp(lambda x: CF.conv2d(x, w), (x,), (x,)),
        lambda: jacfwd(lambda x: CF.conv2d(x, w))(x),
        lambda: jvp(cg.FusedConvBlock(4, 3, 3, dtype=F64).eval(), (x,), (x,)),
        lambda: jvp(grad(loss(lambda x: CF.conv2d(x, w))), (x,), (x,)),
    ):
        with pytest.raises(cg.FeatureMissing, match=r"no forward-mode.*torch\.func\.vjp"):
            call()


def test_dual_numbers_are_refused_and_plain_ones_beside_them_are_not() -> None:
    x, w = made((2, 4, 5, 5), (3, 4, 3, 3))
    f = cg.specialize(lambda g, x: g.exp(x))
    exe = f.lookup(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for call in (lambda: CF.conv2d(dual, w), lambda: f(dual), lambda: exe(dual)):
            with pytest.raises(cg.FeatureMissing, match="no forward-mode derivative"):
                call()
        close(CF.conv2d(x, w), F.conv2d(x, w))
        close(exe(x), x.exp())


def test_second_derivatives_are_refused() -> None:
    x, w = made((2, 4, 5, 5), (3, 4, 3, 3))
    first = grad(lambda x: CF.conv2d(x, w).square().sum())
    with pytest.raises(cg.FeatureMissing, match="double backward"):
        grad(lambda x: first(x).sum())(x)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (
        lambda: cg.FusedConvBlock(4, 3, 3, activation="silu", dtype=F64).eval(),
        (2, 4, 5, 5),
    ),
    "block without a norm": (
        lambda: cg.FusedConvBlock(4, 3, 3, norm=None, activation="silu", dtype=F64),
        (2, 4, 5, 5),
    ),
    "transposed": (
        lambda: cg.FusedConvTransposeBlock(4, 3, 3, activation="silu", dtype=F64).eval(),
        (2, 4, 5, 5),
    ),
    "separable": (
        lambda: cg.FusedDepthwiseSeparable(4, 3, 3, activation="silu", dtype=F64).eval(),
        (2, 4, 5, 5),
    ),
    "layer norm": (lambda: cg.FusedLayerNorm(6, dtype=F64), (2, 3, 6)),
    "rms norm": (lambda: cg.FusedRMSNorm(6, dtype=F64), (2, 3, 6)),
    "mlp": (lambda: cg.FusedMLP(6, 8, gated=True, dtype=F64), (2, 3, 6)),
    "attention": (lambda: cg.FusedMultiheadAttention(8, 2, causal=True, dtype=F64), (2, 5, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_a_modules_parameters_for_each_sample(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make()
    params = {key: p.detach() for key, p in module.named_parameters()}
    many = torch.randn(3, *shape, dtype=F64)

    def value(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, params, (x,)).square().sum()

    each = vmap(grad(value), (None, 0))(params, many)
    for at in range(3):
        module.zero_grad()
        module(many[at]).square().sum().backward()
        for key, p in module.named_parameters():
            assert p.grad is not None
            close(each[key][at], p.grad)


def test_running_statistics_are_not_updated_in_a_transform() -> None:
    block = cg.FusedConvBlock(4, 3, 3, dtype=F64)
    x = torch.randn(2, 4, 5, 5, dtype=F64)
    with pytest.raises(cg.FeatureMissing, match=r"running statistics in place.*eval\(\)"):
        grad(lambda x: block(x).sum())(x)


def test_graphs_of_the_users_own() -> None:
    def build(g: cg.Graph, x: cg.Value, w: cg.Value, *, slope: float) -> tuple[cg.Value, cg.Value]:
        y = g.leaky_relu(g.matmul(x, w), slope)
        return y, g.reduction(y, 0)

    def theirs(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.leaky_relu(x @ w, 0.2)
        return y, y.sum(0)

    f = cg.specialize(training=True)(build)
    ours: Any = lambda x, w: tuple(f(x, w, slope=0.2))  # noqa: E731
    x, w = made((3, 4), (4, 5))
    many = torch.stack([x, 2 * x, -x])
    close(vmap(ours, (0, None))(many, w), vmap(theirs, (0, None))(many, w))
    close(jacrev(ours, 1)(x, w)[1], jacrev(theirs, 1)(x, w)[1])
    close(vjp(ours, x, w)[1]((many[0] @ w, w[0]))[0], vjp(theirs, x, w)[1]((many[0] @ w, w[0]))[0])
    trainable = f.lookup(x, w, slope=0.2)
    pair: Any = lambda x, w: trainable(x, w)[0]  # noqa: E731
    close(vmap(pair, (2, None))(many.movedim(0, 2), w), vmap(ours, (0, None))(many, w)[0])
    close(grad(loss(pair), 1)(x, w), grad(loss(lambda *t: theirs(*t)[0]), 1)(x, w))


def test_several_gradients_at_a_time_are_refused_in_words() -> None:
    x, w = made((2, 4, 6, 6), (3, 4, 3, 3))

    def run(x: torch.Tensor) -> torch.Tensor:
        return CF.conv2d(x, w)

    with pytest.raises(cg.FeatureMissing, match=r"one gradient at a time.*torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(run, x, vectorize=True)
    close(jacrev(run)(x), torch.autograd.functional.jacobian(run, x))


def test_an_executable_for_inference_says_that_it_has_no_gradient() -> None:
    g = cg.Graph("squash")
    g.output("y", g.tanh(g.input("x", (3, 4), F64)))
    exe, (many,) = g.compile("cpu"), made((5, 3, 4))
    close(vmap(exe)(many), many.tanh())
    with pytest.raises(cg.FeatureMissing, match=r"'squash' was compiled for inference.*training"):
        grad(lambda x: exe(x).sum())(many[0])
    with pytest.raises(cg.BindError, match=r"'x': has shape \(4, 3\); expected \(3, 4\)"):
        vmap(exe)(many.mT)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, 2)], ids=str)
def test_the_op_is_mapped(dims: tuple[int | None, int | None]) -> None:
    options = {
        "transposed": False,
        "geometry": (("stride", 1), ("padding", 1), ("dilation", 1), ("groups", 1)),
        "activation": None,
        "attrs": (),
    }

    def op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return custom_ops.call("conv_act", (x, w, None, None), options, None, 1)[0]

    x, w = made((2, 4, 6, 6), (3, 4, 3, 3))
    tensors = [
        each if dim is None else torch.stack([each, -each, each + 1], dim)
        for each, dim in zip((x, w), dims, strict=True)
    ]
    theirs = vmap(lambda x, w: F.conv2d(x, w, padding=1), dims)(*tensors)
    close(vmap(op, dims)(*tensors), theirs)
    cotangents = made((4, 2, 3, 6, 6))[0]
    pull = vjp(lambda x: F.conv2d(x, w, padding=1), x)[1]
    x.requires_grad_()
    y = op(x, w)

    def back(grad: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, x, grad, retain_graph=True)[0]

    close(vmap(back)(cotangents), vmap(pull)(cotangents)[0])
