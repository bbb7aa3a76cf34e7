"""Every op of torch's that a model may contain, imported as the only node of a graph.

``CUDNNGRAPH_TEST_SAMPLES=12`` takes so many of torch's sample inputs for each op, not 2.
"""

from __future__ import annotations

import math
import operator
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from cudnngraph.errors import CannotImport
from cudnngraph.models import aten_ops
from cudnngraph.models.convert import Imported, convert
from cudnngraph.models.rules.table import RULES
from cudnngraph.models.trace import MetaTensor
from cudnngraph.runtime.compile import compile as compile_spec
from tests import atens, numerics

SAMPLES = int(os.environ.get("CUDNNGRAPH_TEST_SAMPLES", "2"))

#: Ops whose results, or some of them, torch leaves as memory is.
UNDEFINED = ("empty_like", "new_empty", "new_empty_strided", "_ctc_loss", "empty_permuted")


def last(tensor: torch.Tensor) -> torch.Tensor:
    """Images channels last, all else as it is."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor if form is None else tensor.contiguous(memory_format=form)


def seen(result: Any) -> Any:
    """Results without memory, as a trace has them."""

    def meta(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        form = (tensor.shape, tensor.stride())
        meta = torch.empty_strided(*form, dtype=tensor.dtype, device="meta")
        return MetaTensor(meta, tensor.device)

    return pytree.tree_map(meta, result)


def graph_of(call: atens.Call, result: Any) -> tuple[torch.fx.Graph, list[str], list[Any]]:
    """The call as a graph: floating operands are made within it, others are inputs."""
    graph, names, given = torch.fx.Graph(), [], []

    def operand(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(names)}")
        names.append(node.name)
        makes = leaf.is_floating_point()
        with torch.no_grad():
            given.append(-leaf if makes else leaf)
        node.meta["val"] = seen(given[-1])
        if makes:
            node = graph.call_function(torch.ops.aten.neg.default, (node,))
            node.meta["val"] = seen(leaf)
        return node

    args, kwargs = pytree.tree_map(operand, (call.args, dict(call.kwargs)))
    made = graph.call_function(call.op, args, kwargs)
    made.meta["val"] = seen(tuple(result) if isinstance(result, list) else result)
    if isinstance(result, (tuple, list)):
        outs = []
        for place, each in enumerate(result):
            out = graph.call_function(operator.getitem, (made, place))
            out.meta["val"] = seen(each)
            outs.append(out)
        graph.output(tuple(outs))
    else:
        graph.output((made,))
    return graph, names, given


def run(imported: Imported, tensors: list[torch.Tensor]) -> list[Any]:
    made: dict[str, torch.Tensor] = {}
    if imported.spec is not None:
        given = dict(imported.constants)
        for name, tensor in zip(imported.inputs, tensors, strict=True):
            if name is not None:
                form = imported.spec.tensors[name]
                memory = torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
                given[name] = memory.copy_(tensor)
        results = compile_spec(imported.spec, "cpu")(**given)
        outputs = imported.spec.outputs
        made = dict(zip(outputs, [results] if len(outputs) == 1 else results, strict=True))
    return [
        made[each] if isinstance(each, str) else tensors[each[1]] if each[0] == "input" else each[1]
        for each in imported.results
    ]


def compare(call: atens.Call, mine: list[Any], theirs: list[Any]) -> None:
    """Each result is torch's, or as near to float64."""
    exact: list[Any] | None = None
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{call.name}: result {number}"
        if bool(((a == b) | ((a != a) & (b != b))).all()):
            continue
        assert b.is_floating_point(), f"{call.name}: result {number} differs"
        if exact is None:
            wide = call.run(lambda t: t.double() if t.is_floating_point() else t)
            exact = pytree.tree_leaves(wide)
        error, own = (numerics.relative_error(x, exact[number]) for x in (a, b))
        limit = max(numerics.BOUNDS["float32"], numerics.TORCH_FACTOR * own)
        assert error <= limit, f"{call.name}: result {number} is off by {error:.2g}"


def relaid(call: atens.Call) -> atens.Call | None:
    """The call with its images channels last, where torch gives the same of them then."""
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: last(t) if t.is_floating_point() else t,
        (call.args, dict(call.kwargs)),
    )
    other = atens.Call(call.op, args, kwargs)
    try:
        results = [pytree.tree_leaves(each.run()) for each in (call, other)]
    except RuntimeError:
        return None
    for plain, turned in zip(*results, strict=True):
        if plain.shape != turned.shape or not torch.allclose(
            plain.double(), turned.double(), rtol=1e-3, atol=1e-3, equal_nan=True
        ):
            return None
    return other


def imported_alike(call: atens.Call, channels_last: bool) -> bool:
    """Whether a call is imported, the results then compared with torch's own."""
    result = call.run()
    leaves = pytree.tree_leaves(result)
    graph, names, given = graph_of(call, result)
    try:
        imported = convert(SimpleNamespace(graph=graph), {}, names, channels_last=channels_last)
    except CannotImport:
        return False
    compare(call, run(imported, given), leaves)
    return True


@pytest.fixture(scope="module")
def calls() -> atens.Calls:
    """Calls of ATen overloads that torch's table of operators leads to.

    They are made in a thread: torch's test tools look at every frame of the stack again and again,
    and pytest's are many.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(atens.of_torchs_table, SAMPLES, SAMPLES).result()


def is_comparable(call: atens.Call) -> bool:
    if call.name.split(".")[1] in UNDEFINED:
        return False
    try:
        leaves = pytree.tree_leaves(call.run())
    except RuntimeError:
        return False
    return bool(leaves) and all(
        isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and not (leaf.is_complex() or leaf.is_quantized)
        for leaf in leaves
    )


def has_images(call: atens.Call) -> bool:
    return any(each.dim() in (4, 5) and each.is_floating_point() for each in call.tensors)


@pytest.mark.parametrize("form", ["as given", "channels_last", "traced channels_last"])
def test_every_op_gives_what_torchs_does_or_is_refused(calls: atens.Calls, form: str) -> None:
    seen, wrong = Counter[bool](), []
    for call in calls:
        given: atens.Call | None = call
        if not is_comparable(call) or (form != "as given" and not has_images(call)):
            continue
        if form == "traced channels_last" and (given := relaid(call)) is None:
            continue
        assert given is not None
        try:
            seen[imported_alike(given, form != "as given")] += 1
        except Exception as error:
            wrong.append(f"{call.name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert seen[True] > (500 if form == "as given" else 50)
    assert seen[True] > 10 * seen[False], "most are no reason to give a graph up"


# -- names that are like a known op's --------------------------------------------------------------

KNOWN = sorted(
    {packet.__name__ for packet in RULES}
    | {packet.__name__ for packet in aten_ops._ANY_LAYOUT | aten_ops.MAKE_IMAGES}
)


@pytest.fixture
def library() -> Iterator[Any]:
    made = torch.library.Library("aten", "FRAGMENT")
    yield made
    made._destroy()


def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x + 1


@pytest.mark.parametrize("form", ["{}_of_cudnngraphs_tests", "of_cudnngraphs_tests_{}"])
def test_an_op_is_not_taken_for_one_whose_name_its_own_begins_or_ends_with(
    library: Any, form: str
) -> None:
    """An op that no rule knows is called itself."""
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for known in KNOWN:
        name = form.format(known)
        library.define(f"{name}(Tensor self) -> Tensor")
        library.impl(name, tripled, "CompositeExplicitAutograd")
        call = atens.Call(getattr(torch.ops.aten, name).default, (x,), {})
        assert imported_alike(call, channels_last=True), name


def test_an_op_of_the_users_is_not_taken_for_torchs_of_the_same_name() -> None:
    library = torch.library.Library("cudnngraphs_tests", "FRAGMENT")
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    try:
        for name in KNOWN:
            library.define(f"{name}(Tensor self) -> Tensor")
            library.impl(name, tripled, "CompositeExplicitAutograd")
            op = getattr(torch.ops.cudnngraphs_tests, name).default
            assert imported_alike(atens.Call(op, (x,), {}), channels_last=True), name
            graph = torch.fx.Graph()  # and the input is no result of it
            node = graph.placeholder("x")
            made = graph.call_function(op, (node,))
            node.meta["val"], made.meta["val"] = seen(x), seen(x)
            graph.output((made,))
            imported = convert(SimpleNamespace(graph=graph), {}, ["x"])
            assert torch.equal(run(imported, [x])[0], tripled(x)), name
    finally:
        library._destroy()


# -- memory as it lies -----------------------------------------------------------------------------


def strided(*args: Any) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.as_strided.default(*args)
    return made


IMAGE, PIXELS = (2, 3, 4, 5), (2, 3, 1, 1)
STRIDED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "relabelled": (IMAGE, (IMAGE, (60, 20, 5, 1))),
    "transposed": (IMAGE, ((3, 2), (20, 60))),
    "windows": (IMAGE, ((4, 7), (3, 1), 2)),
    "flat": (IMAGE, ((120,), (1,))),
    "pixels": (PIXELS, (PIXELS, (3, 1, 3, 3))),
    "single": (PIXELS, ((), ())),
}


@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", STRIDED)
def test_memory_is_read_and_written_as_it_lay_when_the_model_was_traced(
    name: str, turned: bool
) -> None:
    shape, form = STRIDED[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = last(x) if turned else x
    src = strided(torch.arange(1.0, 1.0 + math.prod(shape)).view(shape), *form).clone()
    aten: Any = torch.ops.aten
    for channels_last in (False, True):
        for op in (aten.as_strided.default, aten.as_strided_copy.default):
            assert imported_alike(atens.Call(op, (x, *form), {}), channels_last)
        overlaps = name == "windows"
        call = atens.Call(aten.as_strided_scatter.default, (x, src, *form), {})
        assert imported_alike(call, channels_last) is not overlaps


def test_memory_that_an_operand_does_not_fill_is_not_read() -> None:
    """Memory beside a part of a tensor is unknown if the part alone is an operand."""
    graph = torch.fx.Graph()
    x = torch.arange(12.0).view(3, 4)
    node = graph.placeholder("x")
    part = graph.call_function(torch.ops.aten.slice.Tensor, (node, 1, 1, 3))
    read = graph.call_function(torch.ops.aten.as_strided.default, (part, (3,), (1,), 0))
    graph.output((read,))
    for each, value in ((node, x), (part, x[:, 1:3]), (read, x.flatten()[:3])):
        each.meta["val"] = value
    with pytest.raises(CannotImport, match="reaches memory that none of its operands fills"):
        convert(SimpleNamespace(graph=graph), {}, ["x"])
