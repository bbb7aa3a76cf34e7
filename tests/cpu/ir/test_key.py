"""The key: the same for graphs that mean the same, different for every change that matters."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.ir.key import Difference, Key, diff, encode, graph_key, nearest, step_digest
from cudnngraph.ir.spec import GraphSpec
from tests.samples import Case, enumerate_cases

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POLICY = cg.Policy(allow_tf32=False)


def key_of(g: cg.Graph, policy: cg.Policy = POLICY, **options: Any) -> Key:
    return graph_key(g.spec(), policy, **options)


def block(**change: Any) -> cg.Graph:
    """conv → bias → leaky_relu → times a number; ``change`` replaces one thing."""
    has: dict[str, Any] = {
        "graph": "block",
        "names": ("x", "w", "b", "y"),
        "node": None,
        "x": (2, 16, 8, 8),
        "k": 32,
        "dtype": F16,
        "bias_dtype": F16,
        "x_layout": "channels_last",
        "w_layout": "channels_last",
        "y": {},
        "conv": {"padding": 1},
        "slope": 0.1,
        "factor": 2.0,
        "options": {},
        "order": (0, 1, 2),
        "second": False,
    }
    assert not set(change) - set(has), "an unknown change would compare a graph with itself"
    has |= change
    names = has["names"]
    declarations = (
        lambda g: g.input(names[0], has["x"], has["dtype"], layout=has["x_layout"]),
        lambda g: g.input(
            names[1], (has["k"], has["x"][1], 3, 3), has["dtype"], layout=has["w_layout"]
        ),
        lambda g: g.input(names[2], (has["k"],), has["bias_dtype"]),
    )
    g = cg.Graph(has["graph"], **has["options"])
    made = {place: declarations[place](g) for place in has["order"]}
    y = g.bias(g.conv(made[0], made[1], name=has["node"], **has["conv"]), made[2])
    y = g.leaky_relu(y, has["slope"])
    if has["second"]:
        g.output("pre", y)
    g.output(names[3], y * has["factor"], **has["y"])
    return g


SAME: list[tuple[str, dict[str, Any]]] = [
    ("again", {}),
    ("the graph's name", {"graph": "another"}),
    ("the tensors' names", {"names": ("image", "filters", "offset", "result")}),
    ("names that swap roles", {"names": ("w", "x", "y", "b")}),
    ("a node's name", {"node": "stem"}),
    ("the order of the inputs", {"order": (2, 0, 1)}),
    ("padding written per dim", {"conv": {"padding": (1, 1)}}),
    ("padding written in pairs", {"conv": {"padding": ((1, 1), (1, 1))}}),
    ("padding written 'same'", {"conv": {"padding": "same"}}),
    (
        "defaults written out",
        {"conv": {"padding": 1, "stride": (1, 1), "dilation": 1, "groups": 1}},
    ),
    ("a whole number for a float", {"factor": 2}),
    ("the layout as strides", {"y": {"stride": (32 * 64, 1, 8 * 32, 32)}}),
    ("the dtype written out", {"y": {"dtype": F16}}),
    ("the compute dtype written out", {"options": {"compute_dtype": F32}}),
]

DIFFERENT: list[tuple[str, dict[str, Any], set[str]]] = [
    ("dims of x", {"x": (4, 16, 8, 8)}, {"inputs", "outputs", "intermediates"}),
    ("channels", {"k": 24}, {"inputs", "outputs", "intermediates"}),
    ("dtype", {"dtype": BF16, "bias_dtype": BF16}, {"inputs", "outputs"}),
    ("dtype of the bias", {"bias_dtype": F32}, {"inputs"}),
    ("strides of x", {"x_layout": "contiguous"}, {"inputs"}),
    ("strides of the weight", {"w_layout": "contiguous"}, {"inputs"}),
    ("strides of y", {"y": {"layout": "contiguous"}}, {"outputs"}),
    ("dtype of y", {"y": {"dtype": F32}}, {"outputs"}),
    ("an attribute: padding", {"conv": {"padding": ((2, 0), (1, 1))}}, {"ops"}),
    (
        "an attribute: dilation",
        {"conv": {"padding": 2, "dilation": 2}},
        {"ops"},
    ),
    ("an attribute: slope", {"slope": 0.1000001}, {"ops"}),
    ("a baked scalar", {"factor": 2.0000002}, {"ops"}),
    ("the sign of a baked zero", {"factor": -0.0}, {"ops"}),
    (
        "compute dtype",
        {"options": {"compute_dtype": F16}},
        {"compute_dtype", "intermediates"},
    ),
    ("intermediate dtype", {"options": {"intermediate_dtype": F16}}, {"intermediates"}),
    (
        "an intermediate that is an output too",
        {"second": True},
        {"outputs", "intermediates", "alignment_bytes"},
    ),
]


@pytest.mark.parametrize("change", [row[1] for row in SAME], ids=[row[0] for row in SAME])
def test_what_means_the_same_has_the_same_key(change: dict[str, Any]) -> None:
    a, b = key_of(block()), key_of(block(**change))
    assert diff(a, b) == ()
    assert a == b
    assert a.digest == b.digest


@pytest.mark.parametrize(
    ("change", "components"), [row[1:] for row in DIFFERENT], ids=[row[0] for row in DIFFERENT]
)
def test_what_differs_changes_the_key_and_the_difference_is_named(
    change: dict[str, Any], components: set[str]
) -> None:
    a, b = (
        key_of(block(factor=0.0) if change == {"factor": -0.0} else block()),
        key_of(block(**change)),
    )
    assert a.digest != b.digest
    assert {difference.component for difference in diff(a, b)} == components


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allow_tf32", True),
        ("deterministic", True),
        ("workspace_limit", 0),
        ("workspace_limit", 1 << 20),
        ("fallback", "error"),
    ],
)
def test_each_field_of_the_policy_is_a_component_of_its_own(field: str, value: Any) -> None:
    a, b = key_of(block()), key_of(block(), replace(POLICY, **{field: value}))
    (difference,) = diff(a, b)
    assert difference.component == f"policy.{field}"
    assert json.loads(difference.b or "") == value
    assert a.digest != b.digest


def test_how_a_plan_is_found_is_not_in_the_key() -> None:
    assert key_of(block(), replace(POLICY, tune="cached")) == key_of(block())


def test_the_promised_alignment_is_in_the_key() -> None:
    a, b = key_of(block()), key_of(block(), alignment_bytes={"x": 4})
    (difference,) = diff(a, b)
    assert difference.component == "alignment_bytes"
    assert key_of(block(), alignment_bytes={"x": 16}) == a


def test_the_order_of_independent_declarations_does_not_matter() -> None:
    def branches(swap: bool) -> cg.Graph:
        g = cg.Graph("g")
        x, y = g.input("x", (4, 8), F32), g.input("y", (4, 8), F32)
        if swap:
            b = y.tanh()
            a = x.exp()
        else:
            a = x.exp()
            b = y.tanh()
        g.output("z", a - b)
        return g

    assert key_of(branches(False)) == key_of(branches(True))


def test_names_of_outputs_do_not_order_the_graph() -> None:
    def two(first: str, second: str) -> cg.Graph:
        g = cg.Graph("g")
        x = g.input("x", (4, 8), F32)
        g.output(first, x.exp())
        g.output(second, x.tanh())
        return g

    assert key_of(two("a", "b")) == key_of(two("b", "a"))


def test_operands_that_swap_change_the_key() -> None:
    def difference(swap: bool) -> cg.Graph:
        g = cg.Graph("g")
        x, y = g.input("x", (4, 8), F32), g.input("y", (4, 8), F32)
        # The same names and shapes: only which one is read first differs.
        g.output("z", (y.exp() - x) if swap else (x.exp() - x * y))
        return g

    def square(both: bool) -> cg.Graph:
        g = cg.Graph("g")
        x, y = g.input("x", (4, 8), F32), g.input("y", (4, 8), F32)
        g.output("z", x.exp() - (x if both else y))
        g.output("u", y.exp())
        return g

    assert key_of(difference(False)) != key_of(difference(True))
    assert key_of(square(False)) != key_of(square(True))


def test_nodes_that_no_output_needs_are_not_in_the_key() -> None:
    g = block()
    g._values["%bias"].tanh()
    assert key_of(g) == key_of(block())


def test_debug_settings_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(block())
    for name, value in {"CUDNNGRAPH_LOG": "debug", "CUDNNGRAPH_CACHE_DIR": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    assert key_of(block()) == before


def test_the_digest_is_stable_over_processes_and_versions_of_this_file() -> None:
    """A golden value: when it changes on purpose, versions.KEY must change with it."""
    g = cg.Graph("g")
    g.output("y", g.input("x", (2, 3), F32).leaky_relu(0.25))
    key = key_of(g)
    assert dict(key.components) == {
        "schema": "5",
        "ops": '[["leaky_relu", ["%0"], ["%1"], {"negative_slope": "0x1.0000000000000p-2"}]]',
        "inputs": '{"%0": [[2, 3], [3, 1], "torch.float32"]}',
        "outputs": '[["%1", [2, 3], [3, 1], "torch.float32"]]',
        "intermediates": "{}",
        "compute_dtype": '"torch.float32"',
        "alignment_bytes": '{"%0": 16, "%1": 16}',
        "policy.allow_tf32": "false",
        "policy.deterministic": "false",
        "policy.workspace_limit": "null",
        "policy.fallback": '"partition"',
        "policy.kernels": "null",
        "policy.exclude_engines": "[]",
    }
    assert str(key) == key.digest[:16]
    assert len(key.digest) == 64


def test_a_component_that_only_one_key_has_is_named() -> None:
    a, b = Key((("ops", "1"), ("x", "2"))), Key((("ops", "1"), ("y", "3")))
    assert [(d.component, d.a, d.b) for d in diff(a, b)] == [("x", "2", None), ("y", None, "3")]


def test_the_nearest_key_differs_in_the_fewest_components() -> None:
    def of(**parts: str) -> Key:
        return Key(tuple(parts.items()))

    key = of(ops="1", inputs="2", outputs="3")
    far, near = of(ops="1", inputs="8", outputs="9"), of(ops="7", inputs="2", outputs="3")
    same_distance = of(ops="6", inputs="2", outputs="3")
    assert nearest(key, []) is None
    assert nearest(key, iter([far, near, same_distance])) == (near, (Difference("ops", "1", "7"),))
    assert nearest(key, [near, key]) == (key, ())


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, object(), lambda x: x, {1: 2}, {"a": {3}}, b"bytes", 1j, Colour.RED],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_canonical_form_is_not_keyed(value: Any) -> None:
    with pytest.raises(cg.UnkeyableError):
        encode(value)
    with pytest.raises(cg.UnkeyableError):
        encode([1, {"deep": (value,)}])


def test_a_number_and_its_text_do_not_collide() -> None:
    values: list[Any] = [
        1,
        1.0,
        "1",
        True,
        None,
        "null",
        0,
        0.0,
        -0.0,
        False,
        "0x0.0p+0",
        [1],
        [[1]],
    ]
    encoded = [json.dumps(encode(value)) for value in values]
    clash = [
        (a, b)
        for i, a in enumerate(values)
        for b in values[:i]
        if encoded[i] == encoded[values.index(b)] and repr(a) != repr(b)
    ]
    assert clash == []


def test_an_unresolved_switch_is_not_keyed() -> None:
    with pytest.raises(cg.UnkeyableError, match="allow_tf32=None follows a switch outside"):
        key_of(block(), cg.Policy())


def test_no_two_samples_share_a_key_unless_they_are_the_same_graph() -> None:
    seen: dict[str, tuple[str, Any]] = {}
    for case in enumerate_cases():
        spec = case.build().spec()
        digest = graph_key(spec, POLICY).digest
        names = {old: new for old, new in spec.canonical_names().items()}
        shape = str(
            replace(
                spec.rename(names), name="g", inputs=tuple(sorted(names[n] for n in spec.inputs))
            )
        )
        if digest in seen:
            assert seen[digest][1] == shape, f"{case.id} and {seen[digest][0]} share a key"
        seen[digest] = (case.id, shape)
    assert len(seen) > 300


# -- a property over random graphs -----------------------------------------------------------------

UNARY = ("relu", "exp", "neg", "tanh", "sigmoid", "abs")
BINARY = ("add", "sub", "mul", "maximum")

# One op: (name, two places among the values so far, counted from the last)
STEPS = st.lists(
    st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=8,
)


def random_graph(
    steps: list[tuple[str, int, int]], label: Callable[[int], str] = lambda i: f"t{i}"
) -> cg.Graph:
    """Three inputs and one op per step; all values that nobody uses are summed up."""
    g = cg.Graph("random")
    values = [g.input(label(i), (2, 4), F32) for i in range(3)]
    for op, first, second in steps:
        a, b = values[first % len(values)], values[second % len(values)]
        values.append(getattr(g, op)(a) if op in UNARY else getattr(g, op)(a, b))
    total = values[0]
    for value in values[1:]:
        total = g.add(total, value)
    g.output("out", total)
    return g


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, names=st.permutations(["alpha", "beta", "gamma"]))
def test_random_graphs_keep_their_key_under_new_names(
    steps: list[tuple[str, int, int]], names: list[str]
) -> None:
    a = key_of(random_graph(steps))
    assert a == key_of(random_graph(steps, lambda i: names[i]))


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, place=st.integers(0, 99), other=st.sampled_from(UNARY + BINARY))
def test_random_graphs_change_their_key_with_any_op(
    steps: list[tuple[str, int, int]], place: int, other: str
) -> None:
    index = place % len(steps)
    op, first, second = steps[index]
    changed = [*steps[:index], (other, first, second), *steps[index + 1 :]]
    assert (key_of(random_graph(steps)) == key_of(random_graph(changed))) == (op == other)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_random_graphs_keep_their_key_through_renaming_the_spec(
    steps: list[tuple[str, int, int]],
) -> None:
    spec = random_graph(steps).spec()
    renamed = spec.rename({name: f"other_{name}" for name in spec.tensors})
    assert graph_key(spec, POLICY) == graph_key(renamed, POLICY)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, data=st.data())
def test_random_graphs_keep_their_key_when_independent_ops_change_places(
    steps: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    wants = []  # for each step, the places of the values it reads
    for place, (op, first, second) in enumerate(steps):
        read = (first,) if op in UNARY else (first, second)
        wants.append([number % (3 + place) for number in read])
    g = cg.Graph("reordered")
    made = {i: g.input(f"t{i}", (2, 4), F32) for i in data.draw(st.permutations(range(3)))}
    rest = set(range(len(steps)))
    while rest:
        ready = sorted(place for place in rest if made.keys() >= set(wants[place]))
        place = data.draw(st.sampled_from(ready))
        made[3 + place] = getattr(g, steps[place][0])(*(made[i] for i in wants[place]))
        rest.remove(place)
    total = made[0]
    for place in range(1, 3 + len(steps)):
        total = g.add(total, made[place])
    g.output("out", total)
    assert key_of(g) == key_of(random_graph(steps))


# -- every single change to every sample -----------------------------------------------------------

CASES = enumerate_cases()


def other(value: Any) -> Iterator[Any]:
    """Values that are almost ``value``; of a tuple, each with one item changed."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield math.nextafter(value, math.inf)
    elif isinstance(value, str):
        yield value + "_"
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from ((*value[:place], new, *value[place + 1 :]) for new in other(item))
        yield (*value, 1)
    else:
        assert value is None, f"no change is known for {value!r}"
        yield 0


def changes(spec: GraphSpec) -> Iterator[tuple[str, GraphSpec]]:
    """The graph with one attribute, dim, stride or dtype changed, and the component that tells."""
    for place, node in enumerate(spec.nodes):
        for number, (name, value) in enumerate(node.attrs):
            for new in other(value):
                attrs = (*node.attrs[:number], (name, new), *node.attrs[number + 1 :])
                changed = replace(node, attrs=attrs)
                nodes = (*spec.nodes[:place], changed, *spec.nodes[place + 1 :])
                yield "ops", replace(spec, nodes=nodes)
    for name, tensor in spec.tensors.items():
        component = (
            "inputs"
            if name in spec.inputs
            else "outputs"
            if name in spec.outputs
            else "intermediates"
        )
        dtype = torch.int8 if tensor.dtype != torch.int8 else torch.uint8
        variants = [replace(tensor, dtype=dtype)]
        variants += [replace(tensor, shape=shape) for shape in other(tensor.shape)]
        variants += [replace(tensor, stride=stride) for stride in other(tensor.stride)]
        for variant in variants:
            yield component, replace(spec, tensors={**spec.tensors, name: variant})
    dtype = F16 if spec.compute_dtype != F16 else F32
    yield "compute_dtype", replace(spec, compute_dtype=dtype)


@settings(max_examples=50, deadline=None)
@given(case=st.sampled_from(CASES))
def test_every_change_to_a_sample_changes_one_component(case: Case) -> None:
    spec = case.build().spec()
    key = graph_key(spec, POLICY)
    seen = {key.digest}
    for component, changed in changes(spec):
        now = graph_key(changed, POLICY)
        assert [difference.component for difference in diff(key, now)] == [component]
        assert now.digest not in seen, "two changes gave one key"
        seen.add(now.digest)
    assert len(seen) > 4


@settings(max_examples=50, deadline=None)
@given(case=st.sampled_from(CASES), alignment=st.sampled_from([1, 2, 4, 8, 32, 256]))
def test_every_alignment_of_a_sample_is_in_its_key(case: Case, alignment: int) -> None:
    spec = case.build().spec()
    names = (*spec.inputs, *spec.outputs)
    keys = {graph_key(spec, POLICY, alignment_bytes={name: alignment}).digest for name in names}
    assert len(keys | {graph_key(spec, POLICY).digest}) == len(names) + 1


POLICIES = st.builds(
    cg.Policy,
    tune=st.sampled_from(["heuristic", "autotune", "cached"]),
    allow_tf32=st.booleans(),
    deterministic=st.booleans(),
    workspace_limit=st.none() | st.integers(0, 3),
    fallback=st.sampled_from(["partition", "error"]),
    exclude_engines=st.lists(st.sampled_from(["eng1", "eng2"])).map(tuple),
    max_candidates=st.integers(1, 2),
    budget_s=st.sampled_from([0.0, 1.5]),
    total_s=st.sampled_from([0.0, 1.5]),
)
SEARCH = {"policy.tune", "policy.max_candidates", "policy.budget_s", "policy.total_s"}


@given(a=POLICIES, b=POLICIES)
def test_policies_share_a_key_if_they_differ_in_how_a_plan_is_found_alone(
    a: cg.Policy, b: cg.Policy
) -> None:
    spec = block().spec()
    differ = [f"policy.{f.name}" for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]
    found = [difference.component for difference in diff(graph_key(spec, a), graph_key(spec, b))]
    assert found == [name for name in differ if name not in SEARCH]


@pytest.mark.parametrize(
    "effort",
    [{"tune": "autotune"}, {"max_candidates": 3}, {"budget_s": 0.5}, {"total_s": 0.5}],
    ids=str,
)
def test_how_hard_a_plan_is_looked_for_is_not_in_the_key(effort: dict[str, Any]) -> None:
    assert key_of(block(), replace(POLICY, **effort)) == key_of(block())


def test_engines_that_are_barred_are_in_the_key() -> None:
    barred = key_of(block(), replace(POLICY, exclude_engines=("eng8",)))
    (difference,) = diff(key_of(block()), barred)
    assert difference.component == "policy.exclude_engines"
    assert (difference.a, difference.b) == ("[]", '["eng8"]')


@settings(max_examples=50, deadline=None)
@given(case=st.sampled_from(CASES), data=st.data())
def test_no_name_and_no_order_of_a_sample_is_in_its_key(case: Case, data: st.DataObject) -> None:
    spec = case.build().spec()
    tensors = sorted(spec.tensors)
    mixed = data.draw(st.permutations(tensors))
    renamed = spec.rename(dict(zip(tensors, mixed, strict=True)))
    nodes = data.draw(st.permutations(renamed.nodes))
    same = replace(
        renamed,
        name="other",
        tensors={name: renamed.tensors[name] for name in data.draw(st.permutations(tensors))},
        nodes=tuple(replace(node, name=f"n{number}") for number, node in enumerate(nodes)),
        inputs=tuple(data.draw(st.permutations(renamed.inputs))),
    )
    assert graph_key(same, POLICY) == graph_key(spec, POLICY)


def test_what_has_no_key_is_like_nothing_before_or_after() -> None:
    """The memory of a graph that is gone may be that of the next."""

    def digest(factor: float) -> str:
        g = cg.Graph("masked")
        g.output("y", g.mul(g.input("x", (2, 3), torch.float32), 2.0))
        spec = g.spec()
        constant, *rest = spec.nodes
        spec = replace(spec, nodes=(replace(constant, attrs=(("value", factor),)), *rest))
        assert step_digest(spec) == step_digest(spec)
        return step_digest(spec)

    assert digest(2.0) == digest(2.0) != digest(3.0)
    assert len({digest(-math.inf) for _ in range(50)}) == 50
