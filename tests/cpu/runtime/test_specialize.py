"""Graphs as functions: one executable for each kind of call, and nothing done twice."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.device import tf32
from cudnngraph.graph import builder as graph_module
from cudnngraph.runtime import compile as compiling
from tests import numerics

module: Any = sys.modules["cudnngraph.runtime.specialize"]
LastCall, Static = module.LastCall, module.Static

F16, F32, F64 = torch.float16, torch.float32, torch.float64


def block(g: cg.Graph, x: cg.Value, w: cg.Value, b: cg.Value | None = None, *, act: str = "relu"):  # type: ignore[no-untyped-def]
    """A convolution with its epilogue."""
    return g.conv_bias_act(x, w, b, activation=act)


def tensors(
    batch: int = 2, dtype: torch.dtype = F64, channels_last: bool = False
) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 3, 6, 6, generator=gen, dtype=F64)
    w = torch.randn(4, 3, 3, 3, generator=gen, dtype=F64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    return [x.to(dtype), w.to(dtype)]


# -- what is computed ------------------------------------------------------------------------------


def test_it_computes_what_the_graph_says() -> None:
    f = cg.specialize(block)
    x, w = tensors()
    b = torch.linspace(-1, 1, 4, dtype=F64)
    want = torch.conv2d(x, w, b)
    numerics.check(f(x, w, b), want.relu(), F64)
    numerics.check(f(x, w, b, act="tanh"), want.tanh(), F64)
    numerics.check(f(x, w), torch.conv2d(x, w).relu(), F64)


def test_one_result_is_a_tensor_and_several_are_a_named_tuple() -> None:
    @cg.specialize
    def one(g: cg.Graph, x: cg.Value) -> cg.Value:
        return g.neg(x)

    @cg.specialize
    def single(g: cg.Graph, x: cg.Value) -> tuple[cg.Value, ...]:
        return (g.neg(x),)

    @cg.specialize
    def two(g: cg.Graph, x: cg.Value) -> tuple[cg.Value, ...]:
        return g.neg(x), g.abs(x)

    x = torch.tensor([-1.0, 2.0], dtype=F64)
    assert torch.equal(one(x), -x)
    assert one.lookup(x).spec.outputs == ("out",)
    assert torch.equal(single(x), -x)
    made = two(x)
    assert isinstance(made, tuple)
    assert made._fields == ("out0", "out1")
    assert torch.equal(made.out0, -x) and torch.equal(made.out1, x.abs())


def test_the_graph_is_named_after_the_function_and_so_are_its_inputs() -> None:
    f = cg.specialize(block)
    spec = f.lookup(*tensors()).spec
    assert (spec.name, spec.inputs) == ("block", ("x", "w"))
    assert (f.__name__, f.__doc__) == ("block", "A convolution with its epilogue.")
    assert repr(f) == "<specialized block, 1 executable(s)>"
    nameless = cg.specialize(lambda g, x: g.relu(x))
    assert nameless.lookup(torch.ones(2)).spec.name == "graph"


# -- what makes an executable of its own -----------------------------------------------------------


def test_a_call_like_one_before_has_its_executable() -> None:
    f = cg.specialize(block)
    first = f.lookup(*tensors())
    assert f.lookup(*tensors()) is first
    assert f.lookup(*(tensor + 1.0 for tensor in tensors())) is first
    assert f.lookup(*tensors(), None) is not first, "an operand that is left open is a call apart"
    assert len(f) == 2


@pytest.mark.parametrize(
    "other",
    [
        tensors(batch=3),
        tensors(dtype=F32),
        tensors(channels_last=True),
        [*tensors(), torch.ones(4, dtype=F64)],
        [torch.zeros(2, 3, 6, 12, dtype=F64)[..., ::2], tensors()[1]],
    ],
    ids=["shape", "dtype", "strides", "one more", "gaps"],
)
def test_what_differs_has_an_executable_of_its_own(other: list[torch.Tensor]) -> None:
    f = cg.specialize(block)
    first, second = f.lookup(*tensors()), f.lookup(*other)
    assert first is not second
    assert second.spec.tensors["x"].shape == other[0].shape
    assert second.spec.tensors["x"].stride == other[0].stride()
    assert second.spec.tensors["x"].dtype == other[0].dtype
    assert f.lookup(*tensors()) is first and f.lookup(*other) is second
    assert len(f) == 2


def test_the_device_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        """A tensor that says it is on the GPU of its number of elements."""

        @property
        def device(self) -> torch.device:
            return torch.device("cuda", self.numel() // 2)

    asked: list[object] = []

    def compile(self: cg.Graph, device: torch.device, **options: Any) -> object:
        asked.append(object())
        return asked[-1]

    monkeypatch.setattr(cg.Graph, "compile", compile)
    f = cg.specialize(lambda g, x: g.relu(x))
    here, there = torch.ones(2), torch.ones(2).as_subclass(OnGpu)
    assert f.lookup(here) is f.lookup(here) is not f.lookup(there)
    assert f.lookup(there) is asked[1] and len(asked) == 2


def test_a_tensor_without_data_is_not_taken_for_one_on_the_cpu() -> None:
    f = cg.specialize(lambda g, x: g.relu(x))
    x = torch.ones(2)
    f(x)
    with pytest.raises(cg.BindError, match="'x': is on meta; expected a CPU or a CUDA device"):
        f(x.to("meta"))


SPARSE = torch.eye(4).to_sparse()
QUANTIZED = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (torch.ones(4, 4, device="meta"), "'w': is on meta; expected a CPU or a CUDA device"),
        (None, "w is missing"),
        ("a text", "'w': is a str; expected a torch.Tensor"),
        (SPARSE, r"'w': has the layout torch.sparse_coo; expected torch.strided \(to_dense"),
        (SPARSE.to_sparse_csr(), "'w': has the layout torch.sparse_csr"),
        (QUANTIZED, r"'w': is qint8; expected plain numbers \(dequantize"),
        (torch.nested.nested_tensor([torch.ones(4, 4)]), "'w': is a nested tensor"),
        (torch.nn.UninitializedParameter(), "'w': is not initialized"),
    ],
    ids=["meta", "none", "text", "sparse", "csr", "quantized", "nested", "lazy"],
)
@pytest.mark.parametrize("training", [False, True])
def test_an_operand_that_cannot_be_read_is_named(
    weight: Any, says: str, training: bool, known: bool
) -> None:
    def product(g: cg.Graph, x: cg.Value, w: cg.Value) -> cg.Value:
        if w is None:
            raise cg.GraphError("product", [cg.Problem("matmul", "w is missing")])
        return g.matmul(x, w)

    f = cg.specialize(training=training)(product)
    if known:
        f(torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises((cg.BindError, cg.GraphError), match=says):
        f(torch.ones(4, 4), weight)
    x = torch.ones(4, 4)
    assert float(f(x, x).sum()) == 64


def test_operands_of_several_devices_are_named() -> None:
    f = cg.specialize(lambda g, x, w, b: g.linear(x, w, b))
    x, w, b = torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)
    f(x, w, b)
    elsewhere = _on("cuda:0", b)
    with pytest.raises(cg.BindError) as caught:
        f(x, w, elsewhere)
    assert [str(problem) for problem in caught.value.problems] == [
        "tensor 'b': is on cuda:0; expected cpu, where 'x' is (b.to('cpu'))"
    ]
    with pytest.raises(cg.BindError, match="2 problems"):
        f(_on("cuda:0", x), w, b)


def _on(device: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor that says that it is on a device, which need not be there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(like.shape, dtype=like.dtype, device=device)


def test_a_tensor_without_memory_is_no_operand_on_a_gpu() -> None:
    f = cg.specialize(lambda g, x: g.relu(x))
    with pytest.raises(cg.BindError, match="'x': is a FakeTensor; expected a tensor with memory"):
        f(_on("cuda:0", torch.ones(2)))


def test_what_is_no_function_of_a_graph_is_named() -> None:
    with pytest.raises(cg.GraphError, match="build is an int; expected a function of a graph"):
        cg.specialize(3)  # type: ignore[call-overload]
    with pytest.raises(cg.PolicyError, match=r"policy is a str; expected a cudnngraph\.Policy"):
        cg.specialize(lambda g, x: x, policy="autotune")  # type: ignore[call-overload]


def test_static_arguments_belong_to_the_call_whatever_their_order() -> None:
    seen: list[dict[str, int]] = []

    @cg.specialize
    def scaled(g: cg.Graph, x: cg.Value, *, a: int = 1, b: int = 1) -> cg.Value:
        seen.append({"a": a, "b": b})
        return x * float(a) + float(b)

    x = torch.ones(3, dtype=F64)
    assert scaled(x, a=2, b=3).tolist() == [5.0] * 3
    assert scaled(x, b=3, a=2).tolist() == [5.0] * 3
    assert scaled(x, a=3, b=2).tolist() == [5.0] * 3
    assert scaled(x, a=2).tolist() == [3.0] * 3
    assert seen == [{"a": 2, "b": 3}, {"a": 3, "b": 2}, {"a": 2, "b": 1}]
    with pytest.raises(cg.GraphError, match="option 'a': is a list, which has no hash; expected"):
        scaled(x, a=[2])  # type: ignore[arg-type]


def test_none_in_one_place_is_not_none_in_another() -> None:
    @cg.specialize
    def either(g: cg.Graph, x: cg.Value, y: cg.Value | None, z: cg.Value | None) -> cg.Value:
        if y is not None:
            return x + y
        assert z is not None
        return x * z

    two, three = torch.full((3,), 2.0), torch.full((3,), 3.0)
    assert either(two, three, None).tolist() == [5.0] * 3
    assert either(two, None, three).tolist() == [6.0] * 3
    assert len(either) == 2


# -- TF32 ------------------------------------------------------------------------------------------


@pytest.fixture
def switches() -> Iterator[None]:
    kept = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = kept


def flip(name: str) -> None:
    owner = getattr(torch.backends, name) if name == "cudnn" else torch.backends.cuda.matmul
    owner.allow_tf32 = not owner.allow_tf32


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("switch", ["cudnn", "matmul"])
def test_torchs_tf32_switches_are_followed_for_float32_alone(switch: str) -> None:
    f = cg.specialize(block)
    wide, narrow = tensors(dtype=F32), tensors(dtype=F16)
    before, kept = f.lookup(*wide), f.lookup(*narrow)
    flip(switch)
    after = f.lookup(*wide)
    assert after is not before
    assert f.lookup(*narrow) is kept
    flip(switch)
    assert f.lookup(*wide) is before
    if switch == "cudnn":  # the one that convolutions follow
        assert {before.policy.allow_tf32, after.policy.allow_tf32} == {True, False}


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize(
    ("policy", "options"),
    [(cg.Policy(allow_tf32=False), {}), (None, {"allow_tf32": False})],
    ids=["policy", "option"],
)
def test_a_policy_that_says_so_follows_no_switch(
    policy: cg.Policy | None, options: dict[str, Any]
) -> None:
    f = cg.specialize(policy=policy, **options)(block)
    first = f.lookup(*tensors(dtype=F32))
    flip("cudnn")
    assert f.lookup(*tensors(dtype=F32)) is first
    assert first.policy.allow_tf32 is False


def test_the_setting_of_the_backend_is_followed() -> None:
    f = cg.specialize(block)
    first = f.lookup(*tensors())
    with settings.override(backend="reference"):
        assert f.lookup(*tensors()) is not first
    assert f.lookup(*tensors()) is first


# -- policies --------------------------------------------------------------------------------------


def test_policy_and_options_go_to_compile() -> None:
    f = cg.specialize(policy=cg.Policy(deterministic=True), workspace_limit=1024)(block)
    policy = f.lookup(*tensors()).policy
    assert (policy.deterministic, policy.workspace_limit) == (True, 1024)
    wrong = cg.specialize(colour="red")(block)
    with pytest.raises(cg.PolicyError, match="unknown option colour"):
        wrong(*tensors())


# -- mistakes --------------------------------------------------------------------------------------


def test_too_many_tensors_are_counted() -> None:
    f = cg.specialize(lambda g, x, y: x + y)
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"takes 2 arguments, 3 were given"):
        f(x, x, x)
    assert len(f) == 0


def test_too_few_tensors_are_pythons_own_mistake() -> None:
    f = cg.specialize(block)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        f(tensors()[0])
    assert len(f) == 0


def test_a_graph_that_does_not_fit_is_reported_and_not_kept() -> None:
    f = cg.specialize(block)
    x, w = tensors()
    with pytest.raises(cg.GraphError, match="weight has 3 input channels per group, x has 2"):
        f(x[:, :2].contiguous(), w)
    assert len(f) == 0


# -- what a call costs -----------------------------------------------------------------------------


def test_a_call_like_one_before_builds_freezes_and_keys_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[int] = []

    @cg.specialize
    def f(g: cg.Graph, x: cg.Value, w: cg.Value) -> cg.Value:
        built.append(1)
        return g.relu(g.conv(x, w))

    x, w = tensors(dtype=F32)
    want = f(x, w)

    def never(*args: object, **options: object) -> None:
        raise AssertionError("done again")

    for owner, name in (
        (graph_module.Graph, "__init__"),
        (graph_module.Graph, "spec"),
        (graph_module.Graph, "compile"),
        (compiling, "graph_key"),
        (compiling, "resolve_policy"),
        (compiling, "_program"),
        (f, "_compile"),
    ):
        monkeypatch.setattr(owner, name, never)
    assert torch.equal(f(x, w), want)
    assert f.lookup(x, w) is f.lookup(x + 1.0, w)
    assert built == [1]


# -- how many are kept -----------------------------------------------------------------------------


def test_the_oldest_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXECUTABLES_KEPT", 3)
    f = cg.specialize(lambda g, x: g.relu(x))
    made = {n: f.lookup(torch.ones(n)) for n in (1, 2, 3)}
    assert all(f.lookup(torch.ones(n)) is made[n] for n in (1, 2, 3))
    fourth = f.lookup(torch.ones(4))
    assert len(f) == 3
    assert f.lookup(torch.ones(4)) is fourth and f.lookup(torch.ones(3)) is made[3]
    assert f.lookup(torch.ones(1)) is not made[1], "the first was let go"
    assert len(f) == 3


def test_clear_forgets() -> None:
    f = cg.specialize(lambda g, x: g.relu(x))
    first = f.lookup(torch.ones(1))
    f.clear()
    assert len(f) == 0
    assert f.lookup(torch.ones(1)) is not first


def test_threads_that_call_at_once_share_one_executable() -> None:
    ready = threading.Barrier(8)

    @cg.specialize
    def f(g: cg.Graph, x: cg.Value) -> cg.Value:
        ready.wait(timeout=30)  # all of them compile
        return g.relu(x)

    found: list[cg.Executable] = []
    results: list[torch.Tensor] = []

    def call() -> None:
        found.append(f.lookup(torch.ones(3)))
        results.append(f(torch.tensor([-1.0, 0.0, 2.0])))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(results) == 8
    assert len(set(map(id, found))) == 1 and len(f) == 1
    assert all(result.tolist() == [0.0, 0.0, 2.0] for result in results)


def test_the_newer_switches_of_torch_are_read_where_the_older_ones_are_barred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def barred() -> bool:
        raise RuntimeError("the newer per-op switches are in use")

    monkeypatch.setattr(torch._C, "_get_cudnn_allow_tf32", barred)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tf32.switches() == (
            torch.backends.cudnn.conv.fp32_precision,
            torch.backends.cuda.matmul.fp32_precision,
        )


# -- what served the last call ---------------------------------------------------------------------


class Served:
    """Stands for an executable that serves what it is told to."""

    def __init__(self) -> None:
        self.fits = True
        self.seen: list[Any] = []

    def again(self, tensors: list[torch.Tensor], over: Any = ()) -> Any:
        self.seen.append((tensors, over))
        return "served" if self.fits else None


def test_what_served_a_call_serves_the_next_one_like_it() -> None:
    recent, executable, static = LastCall(), Served(), Static({})
    x, b = torch.ones(2), torch.ones(3)
    assert recent.serve(static, None, (x, None, b)) is None, "there was none"
    recent.remember(static, None, (x, None, b), executable)
    assert recent.serve(static, None, (x, None, b), ((1, 2),)) == "served"
    ((given, over),) = executable.seen
    assert given[0] is x and given[1] is b and len(given) == 2 and over == ((1, 2),)
    executable.fits = False
    assert recent.serve(static, None, (x, None, b)) is None


@contextmanager
def switched(name: str) -> Iterator[None]:
    if name == "autocast":
        with torch.autocast("cpu"):
            yield
    elif name == "settings":
        with settings.override(backend="reference"):
            yield
    elif name == "deterministic":
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)
    else:
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = not before
        yield
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("name", ["autocast", "settings", "deterministic", "tf32"])
def test_another_state_takes_a_closer_look(name: str) -> None:
    recent, executable, static = LastCall(), Served(), Static({})
    x = torch.ones(2)
    recent.remember(static, None, (x,), executable)
    with switched(name):
        assert recent.serve(static, None, (x,)) is None
    assert recent.serve(static, None, (x,)) == "served"


def test_other_options_tensors_and_policies_take_a_closer_look_and_a_copy_knows_nothing() -> None:
    recent, executable, static = LastCall(), Served(), Static({})
    x = torch.ones(2)
    recent.remember(static, None, (x, None), executable)
    assert recent.serve(Static({}), None, (x, None)) is None
    assert recent.serve(static, cg.Policy(), (x, None)) is None
    assert recent.serve(static, None, (x, x)) is None, "one was absent"
    for other in (copy.deepcopy(recent), pickle.loads(pickle.dumps(recent))):
        assert other.last is None and other.asked is None
    assert not executable.seen


def test_options_are_put_together_again_when_they_change() -> None:
    recent, made = LastCall(), []

    def options(a: int, b: tuple[int, ...]) -> dict[str, Any]:
        made.append((a, b))
        return {"a": a, "b": b}

    first = recent.static_of(options, 1, (2, 3))
    assert recent.static_of(options, 1, (2, 3)) is first
    other = recent.static_of(options, 1, (2, 4))
    assert (other.values, first.values) == ({"a": 1, "b": (2, 4)}, {"a": 1, "b": (2, 3)})
    assert recent.static_of(options, 1, (2, 3)) is first, "and found, not made"
    assert made == [(1, (2, 3)), (1, (2, 4))]
