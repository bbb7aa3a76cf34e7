"""Bound tensors: what fits, what is refused and in which words, and what a bound call promises."""

from __future__ import annotations

import gc
import threading
import weakref
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.runtime import fast_call, process, program
from cudnngraph.runtime.checks import overlap
from cudnngraph.runtime.process import PROCESS

Slices = tuple[tuple[int, int], tuple[int, int], int]
F32 = torch.float32
Tensors = dict[str, Any]


def block() -> cg.Executable:
    """relu(conv(x, w) + b) and the value before the relu, channels_last."""
    g = cg.Graph("block")
    x = g.input("x", (2, 8, 6, 5), F32, layout="channels_last")
    w = g.input("w", (16, 8, 3, 3), F32)
    y = g.bias(g.conv(x, w, padding=1), g.input("b", (16,), F32))
    g.output("pre", y)
    g.output("y", y.relu())
    return g.compile("cpu")


def tensors(outputs: bool = True) -> Tensors:
    gen = torch.Generator().manual_seed(3)
    last = torch.channels_last
    made: Tensors = {
        "x": torch.randn(2, 8, 6, 5, generator=gen).to(memory_format=last),
        "w": torch.randn(16, 8, 3, 3, generator=gen),
        "b": torch.randn(16, generator=gen),
    }
    if outputs:
        made["pre"] = torch.empty(2, 16, 6, 5, memory_format=last)
        made["y"] = torch.empty(2, 16, 6, 5, memory_format=last)
    return made


def expected(given: Tensors) -> torch.Tensor:
    return F.conv2d(given["x"], given["w"], given["b"], padding=1)


def put(name: str, value: Any) -> Callable[[Tensors], None]:
    return lambda given: given.__setitem__(name, value)


def change(name: str, how: Callable[[Any], Any]) -> Callable[[Tensors], None]:
    return lambda given: given.__setitem__(name, how(given[name]))


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda given: given.pop(name)


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    return lambda given: given.__setitem__(new, given.pop(old))


def _output_over_input(given: Tensors) -> None:
    memory = torch.zeros(2000)
    given["b"] = memory[960 - 16 : 960]
    given["y"] = memory[:960].as_strided((2, 16, 6, 5), given["y"].stride())


def _outputs_over_each_other(given: Tensors) -> None:
    memory = torch.zeros(2000)
    given["pre"] = memory[:960].as_strided((2, 16, 6, 5), given["y"].stride())
    given["y"] = memory[959:1919].as_strided((2, 16, 6, 5), given["y"].stride())


BAD_INPUTS: list[tuple[str, Callable[[Tensors], None], tuple[str, ...]]] = [
    ("missing", drop("w"), ("input 'w': is missing", "f32[16, 8, 3, 3]")),
    ("extra", put("z", torch.zeros(1)), ("tensor 'z': is not of this graph", "x, w, b")),
    ("not_a_tensor", put("b", [1.0] * 16), ("tensor 'b': is a list", "a torch.Tensor")),
    ("none", put("b", None), ("tensor 'b': is None",)),
    (
        "shape",
        put("b", torch.zeros(15)),
        ("tensor 'b': has shape (15,)", "expected (16,)", "compile a graph of that shape"),
    ),
    ("rank", put("b", torch.zeros(16, 1)), ("tensor 'b': has shape (16, 1)",)),
    (
        "stride",
        change("x", torch.Tensor.contiguous),
        (
            "tensor 'x': has stride (240, 30, 5, 1)",
            "expected (240, 1, 40, 8), channels_last",
            "memory_format=torch.channels_last",
            "declare stride=(240, 30, 5, 1)",
        ),
    ),
    (
        "stride_expanded",
        put("b", torch.zeros(1).expand(16)),
        ("tensor 'b': has stride (0,)", "expected (1,), contiguous"),
    ),
    (
        "dtype",
        change("w", torch.Tensor.half),
        ("tensor 'w': is float16", "expected float32", "convert"),
    ),
    (
        "device",
        put("b", torch.zeros(16, device="meta")),
        ("tensor 'b': is on meta", "expected cpu", "x.to('cpu')"),
    ),
]

BAD_OUTPUTS: list[tuple[str, Callable[[Tensors], None], tuple[str, ...]]] = [
    ("missing", drop("pre"), ("output 'pre': is missing", "f32[2, 16, 6, 5] channels_last")),
    ("shape", put("y", torch.zeros(2, 16, 6, 6)), ("tensor 'y': has shape (2, 16, 6, 6)",)),
    (
        "stride",
        put("y", torch.zeros(2, 16, 6, 5)),
        ("tensor 'y': has stride (480, 30, 5, 1)", "expected (480, 1, 80, 16)"),
    ),
    ("dtype", change("y", torch.Tensor.double), ("tensor 'y': is float64", "expected float32")),
    (
        "requires_grad",
        change("y", lambda y: y.requires_grad_()),
        ("output 'y': requires grad", "detach() it"),
    ),
    (
        "over_an_input",
        _output_over_input,
        ("output 'y': overlaps input 'b'", "memory of its own", "only a graph of pointwise ops"),
    ),
    ("over_an_output", _outputs_over_each_other, ("output 'y': overlaps output 'pre'",)),
    (
        "same_output_twice",
        lambda given: given.__setitem__("y", given["pre"]),
        ("output 'y': overlaps output 'pre'",),
    ),
]


def problems_of(call: Callable[..., Any], given: Tensors) -> list[str]:
    with pytest.raises(cg.BindError) as caught:
        call(**given)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("way", ["__call__", "run", "bind"])
@pytest.mark.parametrize(
    ("wrong", "says"), [row[1:] for row in BAD_INPUTS], ids=[r[0] for r in BAD_INPUTS]
)
def test_a_wrong_input_is_one_problem_in_the_right_words(
    way: str, wrong: Callable[[Tensors], None], says: tuple[str, ...]
) -> None:
    given = tensors(outputs=way != "__call__")
    wrong(given)
    problems = problems_of(getattr(block(), way), given)
    assert len(problems) == 1, problems
    for part in says:
        assert part in problems[0]


@pytest.mark.parametrize("way", ["run", "bind"])
@pytest.mark.parametrize(
    ("wrong", "says"), [row[1:] for row in BAD_OUTPUTS], ids=[r[0] for r in BAD_OUTPUTS]
)
def test_a_wrong_output_is_one_problem_and_nothing_is_written(
    way: str, wrong: Callable[[Tensors], None], says: tuple[str, ...]
) -> None:
    given = tensors()
    wrong(given)
    before = {n: t.detach().clone() for n, t in given.items() if isinstance(t, torch.Tensor)}
    problems = problems_of(getattr(block(), way), given)
    assert len(problems) == 1, problems
    for part in says:
        assert part in problems[0]
    for name, value in before.items():
        assert torch.equal(given[name].detach().nan_to_num(9.0), value.nan_to_num(9.0))


def test_a_wrong_name_is_named_with_the_one_that_is_missing() -> None:
    given = tensors()
    rename("w", "weight")(given)
    problems = problems_of(block().run, given)
    assert [p.split(";")[0] for p in problems] == [
        "tensor 'weight': is not of this graph",
        "input 'w': is missing",
    ]
    assert "one of x, w, b, pre, y" in problems[0]


def test_every_mistake_of_a_call_is_in_one_raise() -> None:
    given = tensors()
    given |= {"x": given["x"].double(), "b": torch.zeros(3), "extra": torch.zeros(1), "y": 5}
    del given["w"]
    with pytest.raises(cg.BindError) as caught:
        block().bind(**given)
    where = [problem.where for problem in caught.value.problems]
    assert where == ["tensor 'extra'", "input 'w'", "tensor 'x'", "tensor 'b'", "tensor 'y'"]
    assert str(caught.value).startswith("cannot bind tensors to graph 'block', 5 problems:\n  - ")


def test_tensors_may_be_given_by_position_in_the_order_of_declaration() -> None:
    given = tensors()
    exe = block()
    by_name = exe(**tensors(outputs=False))
    by_place = exe(given["x"], given["w"], given["b"])
    assert torch.equal(by_place.y, by_name.y)
    exe.run(given["x"], given["w"], b=given["b"], pre=given["pre"], y=given["y"])
    assert torch.equal(given["y"], by_name.y)


def test_too_many_positions_and_a_tensor_given_twice_are_refused() -> None:
    given = tensors(outputs=False)
    with pytest.raises(cg.BindError, match="4 tensors by position; expected at most 3: x, w, b"):
        block()(given["x"], given["w"], given["b"], given["b"])
    with pytest.raises(cg.BindError, match="tensor 'x': is given twice"):
        block()(given["x"], **given)


def test_an_input_may_have_any_name_that_is_an_identifier() -> None:
    g = cg.Graph("g")
    names = ("self", "args", "tensors", "device")
    values = [g.input(name, (3,), F32) for name in names]
    g.output("name", values[0] + values[1] + values[2] + values[3])
    exe = g.compile("cpu")
    out = torch.zeros(3)
    given = {name: torch.ones(3) for name in names}
    assert torch.equal(exe(**given), torch.full((3,), 4.0))
    exe.run(**given, name=out)
    assert torch.equal(out, torch.full((3,), 4.0))
    exe.bind(**given, name=out.zero_())()
    assert torch.equal(out, torch.full((3,), 4.0))


def test_several_outputs_come_as_a_named_tuple() -> None:
    given = tensors(outputs=False)
    result = block()(**given)
    assert result._fields == ("pre", "y")
    torch.testing.assert_close(result.pre, expected(given))
    assert torch.equal(result.y, result.pre.relu())


def test_strides_of_dims_of_extent_one_are_free() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4, 1, 3), F32).relu())
    x = torch.randn(4, 3).as_strided((4, 1, 3), (3, 999, 1))
    assert torch.equal(g.compile("cpu")(x=x), x.relu())


def test_an_input_that_requires_grad_runs_without_recording() -> None:
    given = tensors(outputs=False)
    given["w"].requires_grad_()
    result = block()(**given)
    assert not result.y.requires_grad
    assert result.y.grad_fn is None


def test_run_writes_only_into_the_given_outputs() -> None:
    given = tensors()
    inputs = {name: given[name].clone() for name in ("x", "w", "b")}
    where = given["y"].data_ptr()
    assert block().run(**given) is None
    assert given["y"].data_ptr() == where
    assert torch.equal(given["y"], expected(given).relu())
    for name, value in inputs.items():
        assert torch.equal(given[name], value)


def test_an_output_may_be_a_slice_of_a_larger_buffer() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (2, 3), F32).neg(), stride=(5, 1))
    buffer = torch.full((2, 5), 7.0)
    x = torch.randn(2, 3)
    g.compile("cpu").run(x=x, y=buffer[:, 1:4])
    assert torch.equal(buffer[:, 1:4], -x)
    assert torch.equal(buffer[:, [0, 4]], torch.full((2, 2), 7.0))


def test_outputs_that_are_interleaved_slices_of_one_buffer_are_accepted() -> None:
    """Their ranges of addresses overlap, their elements do not."""
    g = cg.Graph("g")
    x = g.input("x", (2, 3), F32)
    g.output("a", x.neg(), stride=(6, 1))
    g.output("b", x.abs(), stride=(6, 1))
    buffer, value = torch.zeros(2, 6), torch.randn(2, 3)
    g.compile("cpu").run(x=value, a=buffer[:, :3], b=buffer[:, 3:])
    assert torch.equal(buffer, torch.cat([-value, value.abs()], 1))


SLICES = st.tuples(
    st.tuples(st.integers(0, 3), st.integers(1, 3)),  # rows: first, count
    st.tuples(st.integers(0, 7), st.integers(1, 4)),  # columns
    st.integers(1, 2),  # every how many columns
)


@settings(max_examples=300, deadline=None)
@given(first=SLICES, second=SLICES, width=st.integers(12, 16))
def test_slices_of_one_buffer_overlap_only_where_elements_meet(
    first: Slices, second: Slices, width: int
) -> None:
    memory = torch.zeros(8 * width)
    places = torch.arange(8 * width).view(8, width)

    def cut(of: torch.Tensor, at: Slices) -> torch.Tensor:
        (row, rows), (column, columns), step = at
        return of[row : row + rows, column : column + columns * step : step]

    a, b = (cut(memory.view(8, width), at) for at in (first, second))
    shared = set(cut(places, first).flatten().tolist()) & set(
        cut(places, second).flatten().tolist()
    )
    assert overlap(a, b) == overlap(b, a)
    assert overlap(a, a)
    if shared:
        assert overlap(a, b)
    elif first[2] == second[2] == 1 and first[0][1] > 1 and second[0][1] > 1:
        (_, (ca, na), _), (_, (cb, nb), _) = first, second
        if ca + na <= cb or cb + nb <= ca:
            assert not overlap(a, b), "columns side by side were refused"


def test_a_bound_call_reads_the_inputs_as_they_are_when_it_is_called() -> None:
    given = tensors()
    call = block().bind(**given)
    for scale in (1.0, -2.0, 0.5):
        given["x"].mul_(scale)
        call()
        assert torch.equal(given["pre"], block()(**{n: given[n] for n in "xwb"}).pre)


def test_a_bound_call_prepares_nothing_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    call = block().bind(**given)

    def prepare(*args: object) -> None:
        raise AssertionError("a bound call went through its tensors by name")

    monkeypatch.setattr(program.Program, "launches", prepare)
    monkeypatch.setattr(program.Program, "run", prepare)
    given["y"].fill_(-7)
    call()
    assert torch.equal(given["y"], given["pre"].relu())
    assert given["y"].max() > 0


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_a_capture_keeps_the_plans_and_takes_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capturing: bool, bound: bool
) -> None:
    """The graph's memory goes with the graph; that of the pool is for runs outside of captures."""
    blocks: list[tuple[str, Any]] = []

    def give(kind: str) -> Callable[..., torch.Tensor]:
        def block(device: int, stream: int, size_bytes: int) -> torch.Tensor:
            made = torch.empty(size_bytes, dtype=torch.uint8)
            blocks.append((kind, weakref.ref(made)))
            return made

        return block

    pooled = torch.empty(64, dtype=torch.uint8)
    plans = (None, object())
    monkeypatch.setattr(PROCESS, "captured", {})
    monkeypatch.setattr(process, "_allocate", give("graph"))
    monkeypatch.setattr(PROCESS.workspace, "get", lambda *args: pooled)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(handles, "raw_stream", lambda index: 0)
    seen: list[torch.Tensor | None] = []

    class Program:
        device = torch.device("cuda", 0)
        scratch_bytes = 64
        uses_cudnn = False

        def launches(self, tensors: object, stream: int) -> list[Callable[[Any], None]]:
            seen.append(PROCESS.scratch(0, stream, 64, plans))
            return [lambda handle: None]

        def ran_first(self, calls: list[Callable[[], None]]) -> bool:
            return False

        def play(self, calls: list[Callable[[Any], None]]) -> None:
            assert capturing

        def plans(self) -> Any:
            return plans

        def _steps_on(self, tensors: object, starts: object, block: Any, handle: Any) -> None:
            seen.append(block)

    made: Any = Program()
    call = cg.BoundCall(made, {})
    for _ in range(2):
        call._launch(0) if bound else program.Program._run_here(made, [], [])
    if capturing:
        assert [kind for kind, _ in blocks] == ["graph"] * 2, "none is used for two captures"
        assert list(PROCESS.captured.values()) == [plans]
        seen.clear()
        gc.collect()
        assert all(block() is None for _, block in blocks)
    else:
        assert not blocks and not PROCESS.captured
        assert all(block is pooled for block in seen)


def test_a_capture_is_a_bound_call_on_a_cpu() -> None:
    given = tensors()
    call = block().capture(**given)
    assert call.graph is None
    given["x"].mul_(2.0)
    call()
    torch.testing.assert_close(given["y"], expected(given).relu())
    with pytest.raises(cg.BindError, match="cannot bind tensors to graph 'block'"):
        block().capture(x=given["x"])


def test_a_bound_call_keeps_its_tensors_alive() -> None:
    given = tensors()
    y = given["y"]
    want = expected(given).relu()
    call = block().bind(**given)
    del given
    junk = [torch.full((2, 8, 6, 5), 1e9) for _ in range(20)]
    call()
    assert torch.equal(y, want)
    assert len(junk) == 20


def test_pointwise_graphs_may_write_over_an_input() -> None:
    g = cg.Graph("g")
    x, z = g.input("x", (4, 5), F32), g.input("z", (4, 5), F32)
    g.output("y", (x * z + 1.0).relu())
    exe = g.compile("cpu")
    a, b = torch.randn(4, 5), torch.randn(4, 5)
    want = (a * b + 1.0).relu()
    exe.run(x=a, z=b, y=a)
    assert torch.equal(a, want)


def test_results_of_several_shapes_may_each_be_written_over_what_they_are_made_of() -> None:
    g = cg.Graph("g")
    x, z, s = g.input("x", (4, 5), F32), g.input("z", (7,), F32), g.input("s", (1,), F32)
    g.output("y", g.mul(x, s))
    g.output("w", g.add(z, s))
    exe = g.compile("cpu")
    a, b, c = torch.randn(4, 5), torch.randn(7), torch.randn(1)
    wanted = a * c, b + c
    exe.run(x=a, z=b, s=c, y=a, w=b)
    torch.testing.assert_close((a, b), wanted)
    with pytest.raises(cg.BindError, match="output 'w': overlaps input 'x'"):
        exe.run(x=a, z=b, s=c, y=torch.empty(4, 5), w=a.view(-1)[:7])


def test_writing_over_an_input_that_is_read_shifted_is_refused() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), F32).relu())
    memory = torch.zeros(8)
    with pytest.raises(cg.BindError, match="output 'y': overlaps input 'x'"):
        g.compile("cpu").run(x=memory[:4], y=memory[1:5])


def test_writing_over_an_input_that_is_broadcast_is_refused() -> None:
    g = cg.Graph("g")
    x, row = g.input("x", (4, 4), F32), g.input("row", (4,), F32)
    g.output("y", x + row)
    memory = torch.zeros(4, 4)
    with pytest.raises(cg.BindError, match="output 'y': overlaps input 'row'"):
        g.compile("cpu").run(x=torch.ones(4, 4), row=memory[0], y=memory)


def test_writing_over_an_input_that_another_output_broadcasts_is_refused() -> None:
    """A plan would read x[i] for a whole row of z after it has written y[i] there."""
    g = cg.Graph("g")
    x, row = g.input("x", (4, 1), F32), g.input("row", (6,), F32)
    g.output("y", x.neg())
    g.output("z", x + row)
    memory = torch.ones(4, 1)
    with pytest.raises(cg.BindError, match="output 'y': overlaps input 'x'"):
        g.compile("cpu").run(x=memory, row=torch.ones(6), y=memory, z=torch.zeros(4, 6))


def test_one_executable_serves_many_threads() -> None:
    exe, given = block(), tensors(outputs=False)
    want = exe(**given).y
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            if not torch.equal(exe(**given).y, want):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_graphs_of_one_key_share_a_program_under_their_own_names() -> None:
    def scaled(a: str, b: str, first: str) -> cg.Executable:
        g = cg.Graph(f"graph_{a}")
        given = {
            name: g.input(name, (3,), F32) for name in sorted((a, b), key=lambda n: n != first)
        }
        g.output("out", given[a] - 2.0 * given[b])
        return g.compile("cpu")

    one, other = scaled("p", "q", "p"), scaled("u", "v", "v")
    assert one.key == other.key
    assert one._program is other._program
    assert other.spec.inputs == ("v", "u")
    p, q = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    assert torch.equal(one(p=p, q=q), p - 2 * q)
    assert torch.equal(other(u=p, v=q), p - 2 * q)
    assert torch.equal(other(q, p), p - 2 * q)  # by position: in its own order of declaration
    assert [set(step.spec.inputs) for step in other.steps] == [{"u", "v"}]


def test_explain_names_the_graph_the_device_and_the_plan() -> None:
    text = block().explain()
    assert text.startswith("def block(\n    x: f32[2, 8, 6, 5] channels_last,")
    assert "device cpu" in text
    assert "step 1: conv → bias → relu" in text
    assert "plan: reference" in text
    assert "taken: the reference executor: the tensors are on the CPU" in text


def test_kernels_are_launched_by_the_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need no scratch memory also while a CUDA graph is captured."""
    told, bound = SimpleNamespace(stream=5, capturing=False), list[Any]()
    names = {
        "current": lambda: 0,
        "stream_of": lambda index: told.stream,
        "capturing": lambda: told.capturing,
    }
    monkeypatch.setattr(fast_call, "_here", lambda index: dict(names))
    plan: Any = SimpleNamespace(bound=lambda *given: lambda: bound.append(given))
    launches = [fast_call.PlanLaunch(plan, array("Q", [16, at]), 64) for at in (32, 48)]
    scratch: Any = fast_call.build_launch(launches, 0, 5, True)
    alone: Any = fast_call.build_launch(launches, 0, 5, False)
    assert scratch() and alone()
    assert bound == [(each.pointers, 64, 5) for each in launches] * 2
    told.capturing = True
    assert not scratch() and alone()
    told.stream = 6
    assert not alone() and len(bound) == 6
