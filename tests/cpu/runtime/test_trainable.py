"""Executables under torch autograd: the gradients, and that no more is done than is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import cudnngraph as cg
from cudnngraph.runtime import trainable
from tests.gradients import differentiable, floating_inputs, ours, upstream
from tests.samples import F32, F64, Case, enumerate_cases, make_inputs

Tensors = dict[str, torch.Tensor]


def one_of_each_family() -> list[Case]:
    found: dict[str, Case] = {}
    for case in enumerate_cases():
        if differentiable(case) and "dirty" not in case.id:
            found.setdefault(f"{case.family} {case.dtype}", case)
    return list(found.values())


def block(dtype: torch.dtype = F64) -> tuple[cg.Graph, Tensors]:
    """relu(batch_norm(conv(x, w) + b) + z), its statistics and its inputs."""
    gen = torch.Generator().manual_seed(1)
    shapes = {
        "x": (3, 2, 5, 5),
        "w": (4, 2, 3, 3),
        "b": (4,),
        "gamma": (4,),
        "beta": (4,),
        "z": (3, 4, 5, 5),
    }
    tensors = {n: torch.randn(s, generator=gen, dtype=dtype) for n, s in shapes.items()}
    g = cg.Graph("block")
    x, w, b, gamma, beta, z = (g.input(name, like=t) for name, t in tensors.items())
    y, mean, inv_std = g.batch_norm_train(g.bias(g.conv(x, w, padding=1), b), gamma, beta)
    g.output("y", g.relu(y + z))
    g.output("mean", mean)
    g.output("inv_std", inv_std)
    return g, tensors


def with_grad(tensors: Tensors, *names: str) -> Tensors:
    return {
        name: t.clone().requires_grad_(not names or name in names) for name, t in tensors.items()
    }


# -- the gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", one_of_each_family(), ids=str)
def test_autograd_gives_what_the_gradient_graph_gives(case: Case) -> None:
    graph = case.build()
    spec = graph.spec()
    wrt = tuple(n for n in floating_inputs(spec) if n not in ("mean", "var"))
    gradient = cg.differentiate(spec, wrt)
    inputs = make_inputs(case, "cpu")
    grads = upstream(gradient)
    leaves = {n: t.detach().requires_grad_(n in wrt) for n, t in inputs.items()}
    results = graph.compile("cpu", training=True)(**leaves)
    outputs = dict(zip(spec.outputs, [results] if len(spec.outputs) == 1 else results, strict=True))
    found = torch.autograd.grad(
        [outputs[name] for name in grads], [leaves[n] for n in wrt], list(grads.values())
    )
    expected = ours(gradient, inputs, grads)
    for name, grad in zip(wrt, found, strict=True):
        assert grad.dtype == inputs[name].dtype
        assert torch.equal(grad.nan_to_num(), expected[name].nan_to_num()), name


def test_gradcheck_of_a_training_block() -> None:
    g, tensors = block()
    exe = g.compile("cpu", training=True)
    leaves = with_grad(tensors)
    assert torch.autograd.gradcheck(lambda *given: exe(*given).y, tuple(leaves.values()))


def test_gradcheck_of_attention_with_a_mask() -> None:
    @cg.specialize(training=True)
    def attend(g: cg.Graph, q: cg.Value, k: cg.Value, v: cg.Value, mask: cg.Value) -> cg.Value:
        return g.sdpa(q, k, v, mask, is_causal=True)  # type: ignore[no-any-return]

    shapes = [(2, 4, 3, 5), (2, 2, 3, 5), (2, 2, 3, 4), (1, 4, 3, 3)]
    leaves = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("how", ["expanded", "transposed", "channels_last"])
def test_an_incoming_gradient_may_lie_in_any_way(how: str) -> None:
    g, tensors = block()
    exe = g.compile("cpu", training=True)
    leaves = with_grad(tensors)
    grad = torch.randn(3, 4, 5, 5, dtype=F64)
    grad = {
        "expanded": grad[:1, :1, :1, :1].expand(3, 4, 5, 5),
        "transposed": grad.transpose(2, 3),
        "channels_last": grad.contiguous(memory_format=torch.channels_last),
    }[how]
    there = torch.autograd.grad(exe(**leaves).y, list(leaves.values()), grad)
    here = torch.autograd.grad(exe(**leaves).y, list(leaves.values()), grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def test_an_output_that_nobody_uses_counts_as_zero() -> None:
    g = cg.Graph("two")
    x = g.input("x", (3,), F64)
    g.output("a", x * 2.0)
    g.output("b", x * x)
    x1 = torch.tensor([1.0, 2.0, 3.0], dtype=F64, requires_grad=True)
    exe = g.compile("cpu", training=True)
    assert torch.autograd.grad(exe(x1).b.sum(), x1)[0].tolist() == [2.0, 4.0, 6.0]
    assert torch.autograd.grad(exe(x1).a.sum(), x1)[0].tolist() == [2.0, 2.0, 2.0]


# -- no more than is needed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needed", "ops"),
    [
        (("z",), {"relu_backward"}),
        (("b", "z"), {"relu_backward", "batch_norm_backward", "reduction"}),
        (("w",), {"relu_backward", "batch_norm_backward", "conv_wgrad"}),
        (("x",), {"relu_backward", "batch_norm_backward", "conv_transpose"}),
    ],
)
def test_only_the_needed_gradients_are_computed(needed: tuple[str, ...], ops: set[str]) -> None:
    g, tensors = block()
    exe = g.compile("cpu", training=True)
    leaves = with_grad(tensors, *needed)
    exe(**leaves).y.sum().backward()
    (wrt,) = exe._pairs
    assert wrt == needed
    backward = exe.pair(wrt).backward.spec
    assert backward.outputs == tuple(f"grad_{name}" for name in needed)
    assert {node.op for node in backward.nodes if node.op != "constant"} == ops
    assert all((leaf.grad is not None) == (name in needed) for name, leaf in leaves.items())


def test_what_only_the_residual_needs_saves_the_result_alone() -> None:
    g, _ = block()
    pair = g.compile("cpu", training=True).pair(("z",))
    assert pair.gradient.saved == ("y",)
    assert pair.forward.spec.outputs == ("y", "mean", "inv_std")


@pytest.mark.parametrize("why", ["no_grad", "no input requires grad"])
def test_without_a_gradient_the_plain_graph_runs(why: str) -> None:
    g, tensors = block()
    exe = g.compile("cpu", training=True)
    leaves = with_grad(tensors) if why == "no_grad" else tensors
    with torch.set_grad_enabled(why != "no_grad"):
        result = exe(**leaves)
    assert not exe._pairs and result.y.grad_fn is None
    assert torch.equal(result.y, g.compile("cpu")(**tensors).y)


def test_statistics_are_outputs_without_a_gradient() -> None:
    g, tensors = block()
    result = g.compile("cpu", training=True)(**with_grad(tensors))
    assert type(result).__name__ == "block_result" and result._fields == ("y", "mean", "inv_std")
    assert [t.requires_grad for t in result] == [True, False, False]


def saved_bytes(run: Any) -> int:
    """Return the bytes that autograd keeps, each storage counted once."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(kept.values())


def test_no_more_is_saved_than_torch_saves() -> None:
    g, tensors = block(F32)
    leaves = with_grad(tensors)
    exe = g.compile("cpu", training=True)
    x, w, b, gamma, beta, z = leaves.values()

    def by_torch() -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, w, b, padding=1)
        y = torch.nn.functional.batch_norm(y, None, None, gamma, beta, training=True)
        return torch.relu(y + z)

    assert 0 < saved_bytes(lambda: exe(**leaves).y) <= saved_bytes(by_torch)


# -- what torch's other parts see ------------------------------------------------------------------


def test_double_backward_says_what_is_missing() -> None:
    g, tensors = block()
    leaves = with_grad(tensors)
    y = g.compile("cpu", training=True)(**leaves).y
    (dx,) = torch.autograd.grad(y.square().sum(), leaves["x"], create_graph=True)
    text = (
        r"^graph 'block': its gradient has no gradient of its own \(double backward\); call "
        r"autograd without create_graph=True, or use torch's own ops where second derivatives "
        r"are needed$"
    )
    with pytest.raises(cg.FeatureMissing, match=text):
        torch.autograd.grad(dx.sum(), leaves["x"])


def test_a_gradient_penalty_does_not_silently_lose_its_gradient() -> None:
    """dy is a constant here, and x alone makes the first gradient depend on anything."""
    x = torch.ones(3, dtype=F64, requires_grad=True)
    g = cg.Graph("square")
    value = g.input("x", (3,), F64)
    g.output("y", value * value)
    y = g.compile("cpu", training=True)(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(cg.FeatureMissing, match="graph 'square': its gradient has no gradient"):
        (y.sum() + dx.square().sum()).backward()


def test_a_constant_gradient_may_be_made_with_create_graph() -> None:
    g = cg.Graph("sum")
    g.output("y", g.input("x", (3,), F64) + g.input("z", (3,), F64))
    x, z = (torch.ones(3, dtype=F64, requires_grad=True) for _ in range(2))
    y = g.compile("cpu", training=True)(x, z)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert dx.tolist() == [1.0, 1.0, 1.0] and not dx.requires_grad


def test_a_saved_tensor_that_was_written_to_is_noticed() -> None:
    g, tensors = block()
    leaves = with_grad(tensors)
    y = g.compile("cpu", training=True)(**leaves).y
    with torch.no_grad():
        leaves["w"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("how", ["checkpoint", "save_on_cpu"])
def test_recomputed_and_offloaded_tensors_give_the_same_gradients(how: str) -> None:
    g, tensors = block()
    exe = g.compile("cpu", training=True)
    plain, other = with_grad(tensors), with_grad(tensors)
    exe(**plain).y.square().sum().backward()
    if how == "checkpoint":
        y = checkpoint(lambda *given: exe(*given).y, *other.values(), use_reentrant=False)
    else:
        with save_on_cpu():
            y = exe(**other).y
    y.square().sum().backward()
    assert all(torch.equal(plain[n].grad, other[n].grad) for n in plain)  # type: ignore[arg-type]


def test_saved_tensors_may_come_back_in_other_strides() -> None:
    """As what is offloaded into pinned memory does."""
    _, tensors = block()
    last = {
        n: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
        for n, t in tensors.items()
    }
    exe = cg.specialize(g_block, training=True)
    plain, other = with_grad(last), with_grad(last)
    exe(*plain.values()).square().sum().backward()
    with saved_tensors_hooks(lambda tensor: tensor.contiguous(), lambda tensor: tensor):
        y = exe(*other.values())
    y.square().sum().backward()
    assert all(torch.equal(plain[n].grad, other[n].grad) for n in plain)  # type: ignore[arg-type]


def g_block(
    g: cg.Graph,
    x: cg.Value,
    w: cg.Value,
    b: cg.Value,
    gamma: cg.Value,
    beta: cg.Value,
    z: cg.Value,
) -> cg.Value:
    y, *_ = g.batch_norm_train(g.bias(g.conv(x, w, padding=1), b), gamma, beta)
    return g.relu(y + z)  # type: ignore[no-any-return]


def test_autocast_leaves_the_dtypes_of_a_graph_alone() -> None:
    g, tensors = block(F32)
    exe = g.compile("cpu", training=True)
    leaves = with_grad(tensors)
    expected = exe(**leaves).y
    grads = torch.autograd.grad(expected.sum(), list(leaves.values()))
    with torch.autocast("cpu", torch.bfloat16):
        y = exe(**leaves).y
        found = torch.autograd.grad(y.sum(), list(leaves.values()))
        assert torch.equal(g.compile("cpu")(**tensors).y, expected)
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


def test_hooks_on_tensors_see_and_change_gradients() -> None:
    g, tensors = block()
    leaves = with_grad(tensors, "x")
    exe = g.compile("cpu", training=True)
    exe(**leaves).y.sum().backward()
    once = leaves["x"].grad.clone()  # type: ignore[union-attr]
    leaves["x"].grad = None
    y = exe(**leaves).y
    y.register_hook(lambda grad: grad * 2.0)
    y.sum().backward()
    assert torch.allclose(leaves["x"].grad, 2 * once, rtol=1e-12)  # type: ignore[arg-type]


def test_the_policy_holds_for_both_graphs() -> None:
    g, _ = block()
    pair = g.compile("cpu", training=True, deterministic=True).pair(("x", "w"))
    assert pair.forward.policy.deterministic and pair.backward.policy.deterministic


def test_on_a_gpu_nothing_is_compiled_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        trainable, "compile_spec", lambda spec, *args, **options: asked.append(spec.name)
    )
    g, _ = block()
    exe = g.compile("cuda", training=True)
    assert asked == []
    exe.pair(("w",))
    assert asked == ["block"]


def test_mistakes_in_what_is_asked_for_are_told_at_once() -> None:
    g, _ = block()
    with pytest.raises(cg.PolicyError, match="unknown option speed"):
        g.compile("cpu", training=True, speed=1)
    if not torch.cuda.is_available():
        with pytest.raises(cg.BackendUnavailable, match="torch sees no CUDA device"):
            g.compile("cuda", training=True)


def test_wrong_tensors_are_reported_as_by_an_executable() -> None:
    g, tensors = block()
    exe, plain = g.compile("cpu", training=True), g.compile("cpu")
    leaves = with_grad(tensors)
    for wrong in (
        {**leaves, "x": leaves["x"].float()},
        {**leaves, "q": leaves["x"]},
        {"x": leaves["x"]},
    ):
        with pytest.raises(cg.BindError) as ours_:
            exe(**wrong)
        with pytest.raises(cg.BindError) as theirs:
            plain(**wrong)
        assert str(ours_.value) == str(theirs.value)


def test_an_op_without_a_gradient_is_named_when_it_is_needed() -> None:
    g = cg.Graph("second")
    dy, x = g.input("dy", (3,), F64), g.input("x", (3,), F64)
    g.output("dx", g.gelu_backward(dy, x))
    exe = g.compile("cpu", training=True)
    one = torch.ones(3, dtype=F64)
    assert exe(one, one).shape == (3,)
    with pytest.raises(cg.GraphError, match="gelu_backward has no gradient of its own"):
        exe(one, one.clone().requires_grad_())


def test_threads_share_one_pair() -> None:
    g, tensors = block()
    exe = g.compile("cpu", training=True)
    results: list[torch.Tensor] = []

    def work() -> None:
        leaves = with_grad(tensors)
        exe(**leaves).y.sum().backward()
        results.append(leaves["w"].grad)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(r, results[0]) for r in results)
    assert len(exe._pairs) == 1


def test_explain_shows_the_gradient_graphs_that_were_needed() -> None:
    g, tensors = block()
    exe = g.compile("cpu", training=True)
    assert "def block(" in exe.explain() and "block_backward" not in exe.explain()
    exe(**with_grad(tensors, "z")).y.sum().backward()
    assert "def block_backward(" in exe.explain()
    assert repr(exe) == "<Trainable block on cpu, gradients of (z)>"
