"""First results and gradients beside eager torch's in float64: what is found, named and left."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnngraph as cg
import cudnngraph.functional as CF
from cudnngraph import settings
from cudnngraph.executor import reference
from cudnngraph.models import bound as bindings
from cudnngraph.models import called, dynamo
from cudnngraph.runtime import comparison, custom_ops
from cudnngraph.runtime.executable import Executable
from tests import numerics

pytestmark = pytest.mark.usefixtures("forgotten")

F64 = torch.float64
LOGGER = "cudnngraph"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects that are compared with eager, in order."""
    found: list[str] = []
    real = comparison.expected

    def noted(subject: str, run: Any, inputs: Any) -> Any:
        found.append(subject)
        return real(subject, run, inputs)

    monkeypatch.setattr(comparison, "expected", noted)
    return found


def compiled(model: Any, *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(
        model, backend="cudnngraph", dynamic=dynamic, options=options
    )
    return made


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    )


def image(batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def sabotage(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    factor: float = 1.001,
    when: Callable[[torch.Tensor], bool] = lambda x: True,
) -> None:
    """Make a step wrong: eager torch does not use the reference executor's rules."""
    real = reference.RULES[op]

    def wrong(inputs: Any, attrs: Mapping[str, Any]) -> Any:
        made = real(inputs, attrs)
        assert isinstance(made, torch.Tensor)
        return made * factor if when(made) else made

    monkeypatch.setitem(reference.RULES, op, wrong)


# -- torch.compile ---------------------------------------------------------------------------------


def test_a_wrong_step_of_inference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, "relu")
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).eval(), torch.randn(5, 6)
    with torch.no_grad():
        out = compiled(model, check=False)(x)
        assert numerics.relative_error(out, model(x).double()) == pytest.approx(1e-3, rel=1e-3)
        torch._dynamo.reset()
        run = compiled(model, check=True)
        for _ in range(2):  # it is not right the second time
            with pytest.raises(cg.WrongResult) as caught:
                run(x)
    text = str(caught.value)
    assert text.startswith("torch.compile: result 0 is off by 0.001, at most 1e-05 is right (the ")
    assert "the model itself is off by " in text


def test_the_result_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, "tanh")
    with torch.no_grad(), pytest.raises(cg.WrongResult, match=r"^torch\.compile: result 1 is off"):
        compiled(lambda x: (x.exp(), x.tanh(), x.sigmoid()), check=True)(torch.randn(7))


def wrong_gradient(call: Callable[..., Any], x: torch.Tensor) -> str:
    loss = call(x).square().sum()
    with pytest.raises(cg.WrongResult) as caught:
        loss.backward()
    return str(caught.value)


def test_a_wrong_gradient_is_found_and_its_parameter_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch, "conv_wgrad")
    model = net()
    text = wrong_gradient(compiled(model, check=True), image())
    assert text.startswith("torch.compile: the gradient of '0.weight' is off by 0.001, at most ")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_gradient_of_an_argument_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, "conv_transpose")

    def convolved(pixels: torch.Tensor) -> torch.Tensor:
        return F.conv2d(pixels, weight)

    weight = torch.randn(4, 3, 3, 3)
    text = wrong_gradient(compiled(convolved, check=True), image().requires_grad_())
    assert text.startswith("torch.compile: the gradient of 'pixels' is off by 0.001, ")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "layers.0.weight"),
        ("G['model']._modules['norm']._buffers['running_mean']", "norm.running_mean"),
        ("L['x']", "x"),
        ("L['args'][0]", "args[0]"),
    ],
)
@pytest.mark.parametrize("is_method", [False, True], ids=["attribute", "method"])
def test_inputs_have_the_names_that_the_user_gave_them(
    source: str, name: str, is_method: bool
) -> None:
    """torch 2.9 has a source's name as a method."""
    node = torch.fx.Graph().placeholder("L_x_")
    assert called.source_name(node) == "L_x_"
    text = (lambda: source) if is_method else source
    node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=text))
    assert called.source_name(node) == name


def test_a_new_value_of_a_buffer_is_compared_and_none_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    real = bindings.Direct.results

    def wrong(self: Any, tensors: Sequence[Any], **options: Any) -> list[Any]:
        results = real(self, tensors, **options)
        return [r * 1.1 if isinstance(r, torch.Tensor) and r.shape == (8,) else r for r in results]

    monkeypatch.setattr(bindings.Direct, "results", wrong)
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(cg.WrongResult, match=r"the new '1\.running_mean' is off by 0\.1,"):
        compiled(model, check=True)(image())
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())


def test_a_checked_training_step_leaves_what_an_unchecked_one_leaves(compared: list[str]) -> None:
    found = []
    for check in (False, True):
        torch._dynamo.reset()
        model, x = net(), image().requires_grad_()
        torch.manual_seed(7)
        compiled(model, check=check)(x).square().sum().backward()
        grads = [p.grad for p in (*model.parameters(), x)]
        found.append([*model.buffers(), *grads, torch.get_rng_state()])
    assert compared == ["torch.compile"] * 2, "a forward and a backward"
    for mine, other in zip(*found, strict=True):
        assert mine is not None and torch.equal(mine, other)
    exact = net().double()
    numerics.check(found[1][0], _stepped(exact, image()), torch.float32, terms=72)
    assert int(found[1][2]) == 1, "batches are counted once"


def _stepped(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    model(x.double())
    return model[1].running_mean  # type: ignore[union-attr, return-value]


def test_the_gradients_of_a_checked_step_are_those_of_float64() -> None:
    model = net()
    exact = copy.deepcopy(model).double()
    x = image()
    compiled(model, check=True)(x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    for (name, mine), want in zip(model.named_parameters(), exact.parameters(), strict=True):
        if name != "0.bias":  # the batch norm behind it takes it away
            assert mine.grad is not None and want.grad is not None
            assert numerics.relative_error(mine.grad, want.grad) < 1e-5, name


def test_a_second_call_is_not_compared_again(compared: list[str]) -> None:
    model, x = net(), image()
    run = compiled(model, check=True)
    for _ in range(3):
        run(x).square().sum().backward()
    assert len(compared) == 2
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            run(x)
    assert len(compared) == 3


def test_nothing_is_compared_unless_asked_for(compared: list[str]) -> None:
    with settings.override(check=False):
        compiled(net())(image()).sum().backward()
    assert compared == []
    torch._dynamo.reset()
    with settings.override(check=True):
        compiled(net())(image()).sum().backward()
    assert len(compared) == 2
    torch._dynamo.reset()
    with settings.override(check=True), torch.no_grad():
        compiled(net(), check=False)(image())
    assert len(compared) == 2


def test_the_suites_compare_by_default() -> None:
    assert settings.current().check


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_set_of_shapes_is_compared_once(
    dynamic: bool | None, monkeypatch: pytest.MonkeyPatch, compared: list[str]
) -> None:
    sabotage(monkeypatch, "relu", when=lambda y: y.shape[0] == 5)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    run = compiled(model, dynamic=dynamic, check=True)
    with torch.no_grad():
        for batch in (2, 3, 2, 4, 3):
            x = torch.randn(batch, 6)
            numerics.check(run(x), copy.deepcopy(model).double()(x.double()), torch.float32)
        # dynamo's first graph is of two examples alone, its second one of any number.
        assert len(compared) == (3 if dynamic else 4)
        with pytest.raises(cg.WrongResult, match="result 0 is off"):
            run(torch.randn(5, 6))


def test_sizes_that_are_left_open_train() -> None:
    run, model = compiled(net(), dynamic=True, check=True), net()
    for batch in (2, 3, 4):
        mine, theirs = (image(batch).requires_grad_() for _ in range(2))
        run(mine).square().sum().backward()
        model(theirs).square().sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_dropout_is_compared_with_the_same_random_numbers(
    caplog: pytest.LogCaptureFixture, compared: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    x = torch.randn(32, 64)
    with caplog.at_level(logging.WARNING, LOGGER):
        torch.manual_seed(3)
        made = compiled(model, check=True)(x)
        torch.manual_seed(3)
        want = model(x)
    assert torch.equal(made == 0, want == 0), "it draws what it draws without a check"
    assert caplog.messages == []
    assert compared != []


@torch.library.custom_op("cudnngraph_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_that_draws_unsaid_is_left_out_and_the_rest_is_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = bindings.Direct.results

    def another(self: Any, *given: Any, **options: Any) -> list[Any]:
        torch.rand(1)  # it draws in another order than eager torch
        return real(self, *given, **options)

    monkeypatch.setattr(bindings.Direct, "results", another)
    x = torch.randn(16)
    with torch.no_grad(), caplog.at_level(logging.WARNING, LOGGER):
        torch.manual_seed(5)
        noise, right = compiled(lambda x: (noisy(x), x.tanh()), check=True)(x)
        after = torch.get_rng_state()
    assert [text.split(":")[1] for text in caplog.messages] == [
        " result 0 is not compared with eager"
    ]
    torch.manual_seed(5)
    torch.rand(1)
    assert torch.equal(noise, x + torch.rand_like(x))
    assert torch.equal(torch.get_rng_state(), after), "the comparison has drawn"
    numerics.check(right, x.double().tanh(), torch.float32)
    sabotage(monkeypatch, "tanh")
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(cg.WrongResult, match=r"result 1 is off by 0\.001"):
        compiled(lambda x: (noisy(x), x.tanh()), check=True)(x)


@pytest.mark.parametrize("seed", range(6))
def test_a_gradient_that_cancels_is_no_wrong_one(seed: int) -> None:
    """The gradient of a bias in front of a batch norm is zero: the one number found is rounding."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1), nn.GELU())
    compiled(model, check=True)(torch.randn(3, 3, 9, 9)).square().sum().backward()
    bias, weight = model[0].bias, model[0].weight
    assert isinstance(bias, nn.Parameter) and isinstance(weight, nn.Parameter)
    assert bias.grad is not None and weight.grad is not None
    assert float(bias.grad.abs()) < 1e-4 * float(weight.grad.norm())


def test_autocast_is_measured_by_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), image(8)
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(model, check=True)(x)
    y.float().square().sum().backward()
    exact = copy.deepcopy(model).double().train()(x.double())
    assert 1e-4 < numerics.relative_error(y, exact) < 2e-2
    torch._dynamo.reset()
    sabotage(monkeypatch, "relu", 1.06)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(cg.WrongResult, match=r"is off by 0\.0[56]"),
    ):
        compiled(model, check=True)(x)


def test_a_function_of_ours_in_a_graph_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = image(), torch.randn(4, 3, 3, 3, requires_grad=True)
    run = compiled(lambda x, w: CF.conv2d(x, w, activation="relu"), check=True)
    run(x, w).square().sum().backward()
    wide = w.detach().double().requires_grad_()
    F.conv2d(x.double(), wide).relu().square().sum().backward()
    assert w.grad is not None and wide.grad is not None
    assert numerics.relative_error(w.grad, wide.grad) < 1e-5
    real = custom_ops._run
    monkeypatch.setattr(custom_ops, "_run", lambda *given: [1.01 * t for t in real(*given)])
    torch._dynamo.reset()
    with pytest.raises(cg.WrongResult, match=r"result 0 is off by 0\.01"):
        compiled(lambda x, w: CF.conv2d(x, w, activation="relu"), check=True)(x, w)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_check_that_is_no_bool_is_refused(value: Any) -> None:
    with pytest.raises(cg.PolicyError, match=r"^check=.*; expected True or False$"):
        dynamo.backend(torch.fx.GraphModule({}, torch.fx.Graph()), [], options={"check": value})


# -- float64 ---------------------------------------------------------------------------------------


def traced(function: Callable[..., Any], *given: torch.Tensor) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    made: torch.fx.GraphModule = make_fx(function, tracing_mode="fake")(*given)
    return made


def test_a_graph_runs_in_float64_whatever_it_casts_to() -> None:
    x, w = torch.randn(4, 6), torch.randn(5, 6)

    def narrow(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ w.bfloat16().t()).float().softmax(-1)

    run = comparison.fx_run(traced(narrow, x, w))
    (exact,), (own,) = run([x, w], F64), run([x, w], None)
    want = (x.double() @ w.double().t()).softmax(-1)
    assert exact.dtype == F64 and numerics.relative_error(exact, want) < 1e-14
    assert torch.equal(own, narrow(x, w))


@torch.library.custom_op("cudnngraph_tests::of_float32", mutates_args=())
def of_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise NotImplementedError(f"no kernel for {x.dtype}")
    return x * x


@of_float32.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_without_a_float64_kernel_runs_in_float32() -> None:
    x = torch.randn(9)
    run = comparison.fx_run(traced(lambda x: torch.ops.cudnngraph_tests.of_float32(x).exp(), x))
    (exact,) = run([x], F64)
    assert torch.equal(exact, (x * x).double().exp())


def test_the_bits_of_a_tensor_are_those_of_its_own_dtype() -> None:
    x = torch.randn(9)
    run = comparison.fx_run(traced(lambda x: ((x + 0).view(torch.int32) & ~1).view(x.dtype) * 2, x))
    (exact,), (own,) = run([x], F64), run([x], None)
    assert exact.dtype == F64 and torch.equal(exact, own.double())


def test_without_memory_for_float64_it_is_float32_that_is_compared_with() -> None:
    dtypes = []

    def run(inputs: Sequence[Any], dtype: torch.dtype | None) -> list[torch.Tensor]:
        dtypes.append(dtype)
        if dtype == F64:
            raise torch.OutOfMemoryError("no memory")
        return [inputs[0].to(dtype or inputs[0].dtype).exp()]

    x = torch.randn(50).bfloat16()
    eager = comparison.Expected(run, [x])
    assert dtypes == [None, F64, torch.float32]
    ((error, own),) = eager.check("it", ["result 0"], [x.exp()])
    assert error == own and 1e-4 < error < 4e-3
    with pytest.raises(cg.WrongResult, match=r"^it: result 0 is off by 0\.0[45]"):
        eager.check("it", ["result 0"], [x.exp() * 1.05])


# -- the yardstick ---------------------------------------------------------------------------------


def test_a_result_may_be_twice_as_far_off_as_the_models_own() -> None:
    exact = torch.full((100,), 1.0, dtype=F64)
    yardstick = comparison.Yardstick((exact * 1.001).float(), exact)
    error, own = yardstick.check("it", (exact * 0.9981).float()) or (0.0, None)
    assert error == pytest.approx(1.9e-3, rel=1e-3) and own == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(cg.WrongResult) as caught:
        yardstick.check("it", (exact * 0.9979).float())
    text = "it is off by 0.0021, at most 0.002 is right (the model itself is off by 0.001)"
    assert str(caught.value) == text


def test_what_is_zero_is_measured_by_the_models_distance() -> None:
    exact = torch.zeros(4, dtype=F64)
    yardstick = comparison.Yardstick(torch.full((4,), 1e-9), exact)
    assert yardstick.check("it", torch.full((4,), 1.9e-9)) is not None
    with pytest.raises(cg.WrongResult, match="it is off by inf"):
        yardstick.check("it", torch.full((4,), 2.1e-9))


def test_places_may_differ_in_twice_as_many_elements_as_the_models_own() -> None:
    """One in a hundred may in any case; bools and whole numbers are alike or not."""
    exact, own, mine = (torch.zeros(1000, dtype=torch.int64) for _ in range(3))
    own[:30], mine[-59:] = 1, 2
    assert comparison.Yardstick(own, exact).check("it", mine) is None
    mine[-61:] = 2
    with pytest.raises(cg.WrongResult, match=r"^it: 9\.1% of it differ from the model's$"):
        comparison.Yardstick(own, exact).check("it", mine)
    assert comparison.Yardstick(exact, exact).check("it", (mine > 0).long() * 0) is None
    own[:] = 0
    with pytest.raises(cg.WrongResult, match=r"it: 6\.1% of it differ"):
        comparison.Yardstick(own, exact).check("it", mine)
    with pytest.raises(cg.WrongResult, match=r"it: 6\.1% of it differ"):
        comparison.Yardstick(own, None).check("it", mine)


def test_the_largest_of_16_bits_is_compared_as_far_as_rounding_tells_them_apart() -> None:
    torch.manual_seed(0)
    sizes = ((3, 32), (32, 64), (64, 128))
    layers = [[nn.Conv1d(m, n, 1), nn.BatchNorm1d(n), nn.ReLU()] for m, n in sizes]
    model = nn.Sequential(*(each for layer in layers for each in layer))
    run = compiled(lambda x: torch.max(model(x), 2)[0], check=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(torch.randn(8, 3, 512))
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (torch.ones(3), r"it is torch\.float32 \(3,\), the model's torch\.float32 \(4,\)"),
        (torch.ones(4).half(), r"it is torch\.float16 \(4,\), the model's torch\.float32 \(4,\)"),
        (torch.full((4,), float("nan")), "it is off by inf, at most 1e-05 is right"),
        (None, r"it is None, the model's a tensor \(4,\)"),
    ],
)
def test_a_result_of_another_form_is_wrong(mine: Any, text: str) -> None:
    with pytest.raises(cg.WrongResult, match=text):
        comparison.Yardstick(torch.ones(4), torch.ones(4, dtype=F64)).check("it", mine)


def test_complex_results_are_compared_in_both_parts() -> None:
    exact = torch.randn(8, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    yardstick = comparison.Yardstick(exact.to(torch.complex64), exact)
    assert yardstick.check("it", exact.to(torch.complex64)) is not None
    with pytest.raises(cg.WrongResult, match="it is off by"):
        yardstick.check("it", exact.conj().resolve_conj().to(torch.complex64))


# -- training=True ---------------------------------------------------------------------------------


def block() -> tuple[cg.Graph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    g = cg.Graph("block")
    x, w = g.input("x", (2, 3, 6, 6), torch.float32), g.input("w", (4, 3, 3, 3), torch.float32)
    g.output("y", g.relu(g.conv(x, w)))
    return g, {"x": torch.randn(2, 3, 6, 6), "w": torch.randn(4, 3, 3, 3)}


def spoilt(monkeypatch: pytest.MonkeyPatch, which: Callable[[Executable], int | None]) -> None:
    """Multiply one output of some executables."""
    real = Executable.outputs_for

    def wrong(self: Executable, *given: Any, **options: Any) -> list[torch.Tensor]:
        results = real(self, *given, **options)
        at = which(self)
        if at is not None:
            results[at].mul_(1.001)
        return results

    monkeypatch.setattr(Executable, "outputs_for", wrong)


def test_a_wrong_result_of_a_training_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, lambda exe: 0)
    g, given = block()
    exe = g.compile("cpu", training=True, check=True)
    match = r"^graph 'block': output 'y' is off by 0\.001, at most 1e-05 is right"
    for leaves in (given, {name: t.clone().requires_grad_() for name, t in given.items()}):
        for _ in range(2):
            with pytest.raises(cg.WrongResult, match=match):
                exe(**leaves)


def test_products_in_tf32_are_compared_by_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whatever torch's own switches say: the model itself ran without it."""
    spoilt(monkeypatch, lambda exe: 0)
    g, given = block()
    for allowed in (True, False):
        exe = g.compile("cpu", training=True, check=True, allow_tf32=allowed)
        with pytest.raises(cg.WrongResult, match="at most 1e-05 is right"):
            exe(**given)
    monkeypatch.setattr(Executable, "in_tf32", True)
    g.compile("cpu", training=True, check=True)(**given)


@pytest.mark.parametrize("name", ["x", "w"])
def test_a_wrong_gradient_of_a_training_graph_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, given = block()
    gradient = cg.differentiate(g.spec(), ("x", "w"))

    def which(exe: Executable) -> int | None:
        outputs = exe.spec.outputs
        at = gradient.outgoing[name]
        return outputs.index(at) if at in outputs else None

    spoilt(monkeypatch, which)
    leaves = {each: t.requires_grad_() for each, t in given.items()}
    y = g.compile("cpu", training=True, check=True)(**leaves)
    with pytest.raises(cg.WrongResult, match=rf"the gradient of '{name}' is off by 0\.001, at"):
        y.sum().backward()
    assert given["x"].grad is None and given["w"].grad is None


def test_a_training_graph_is_compared_once(compared: list[str]) -> None:
    g, given = block()
    exe = g.compile("cpu", training=True, check=True)
    assert exe.check
    for _ in range(3):
        exe(**given)
    assert compared == ["graph 'block'"]
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    for _ in range(3):
        exe(**leaves).sum().backward()
    assert len(compared) == 3
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    F.conv2d(wide["x"], wide["w"]).relu().sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None and wide[name].grad is not None
        assert numerics.relative_error(leaf.grad, 3 * wide[name].grad) < 1e-6  # type: ignore[operator]
    with settings.override(check=False):
        assert not g.compile("cpu", training=True).check
    with settings.override(check=True):
        assert g.compile("cpu", training=True).check


def test_running_statistics_written_in_place_move_once_and_not_where_a_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = image(), torch.randn(4, 3, 3, 3, requires_grad=True)

    def step(check: bool) -> list[torch.Tensor]:
        stats = [torch.zeros(4), torch.ones(4)]
        with settings.override(check=check):
            CF.conv_bn_act(x, w, *stats, training=True, momentum=0.25).sum().backward()
        return stats

    checked, plain = step(True), step(False)
    y = F.conv2d(x.double(), w.detach().double())
    for mine, other, want in zip(
        checked,
        plain,
        (0.25 * y.mean((0, 2, 3)), 0.75 + 0.25 * y.var((0, 2, 3))),
        strict=True,
    ):
        assert torch.equal(mine, other)
        numerics.check(mine, want, torch.float32, terms=72)
    spoilt(monkeypatch, lambda exe: 0)
    other = torch.randn(2, 3, 7, 7)  # another form is another graph
    stats = [torch.zeros(4), torch.ones(4)]
    with settings.override(check=True), pytest.raises(cg.WrongResult, match="is off by"):
        CF.conv_bn_act(other, w, *stats, training=True, momentum=0.25)
    assert torch.equal(stats[0], torch.zeros(4)) and torch.equal(stats[1], torch.ones(4))


def test_dropout_by_a_seed_is_left_out_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, compared: list[str]
) -> None:
    g = cg.Graph("dropping")
    q, k, v = (g.input(name, (1, 2, 8, 4), torch.float32) for name in "qkv")
    seed, offset = (g.input(name, (1, 1, 1, 1), torch.int64) for name in ("seed", "offset"))
    g.output("o", g.sdpa(q, k, v, dropout_p=0.5, dropout_seed=seed, dropout_offset=offset))
    data = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    seeds = [torch.full((1, 1, 1, 1), 7), torch.zeros(1, 1, 1, 1, dtype=torch.int64)]
    with caplog.at_level(logging.WARNING, LOGGER):
        made = g.compile("cpu", training=True, check=True)(*data, *seeds)
    assert made.isfinite().all() and compared == []
    assert caplog.messages == [
        "graph 'dropping' drops by a seed, and is left out of the comparison with eager"
    ]


def test_fake_tensors_are_not_compared_and_the_next_call_is(compared: list[str]) -> None:
    g, given = block()
    exe = g.compile("cpu", training=True, check=True)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in given.items()}
        assert exe(**fake).shape == (2, 4, 4, 4)
    assert compared == []
    exe(**given)
    assert compared == ["graph 'block'"]


def test_a_check_is_for_training_alone_and_a_bool() -> None:
    g, _ = block()
    with pytest.raises(cg.PolicyError, match="check is for training=True"):
        g.compile("cpu", check=True)
    with pytest.raises(cg.PolicyError, match=r"check .*; expected True, False or None"):
        g.compile("cpu", training=True, check=1)  # type: ignore[call-overload]


def test_autocast_does_not_widen_the_yardstick_of_a_graph() -> None:
    x = torch.randn(40)

    def run(inputs: Sequence[Any], dtype: torch.dtype | None) -> list[torch.Tensor]:
        return [F.linear(*(each.to(dtype or each.dtype) for each in inputs))]

    with torch.autocast("cpu", torch.bfloat16):
        eager = comparison.Expected(run, [x, torch.randn(9, 40)])
    assert eager.own[0].dtype == torch.float32
    ((_, own),) = eager.check("it", ["result 0"], eager.own)
    assert own is not None and own < 1e-6


def test_specialize_hands_the_check_on(compared: list[str]) -> None:
    block = cg.specialize(training=True, check=True)(lambda g, x: g.exp(x))
    x = torch.randn(5, requires_grad=True)
    for _ in range(2):
        block(x).sum().backward()
    assert len(compared) == 2
    numerics.check(x.grad, 2 * x.detach().double().exp(), torch.float32)
