"""Reshapes, transposes, permutations, slices and concatenations: shapes and layouts are torch's."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.ir.spec import TensorSpec, dense_strides, numel, same_layout, view_strides
from cudnngraph.ops.infer import check_node

F16 = torch.float16
SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 6])


@st.composite
def dense(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of up to four dims without gaps, its dims in any order of memory."""
    shape = draw(st.lists(SIZES, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    count = numel(shape)
    return torch.arange(count, dtype=F16).as_strided(shape, dense_strides(shape, order))


@st.composite
def reshaped(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor and another shape of as many elements."""
    x = draw(dense())
    left, shape = x.numel(), []
    while left > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= shape[-1]
    return x, (*shape, left)


def result(x: torch.Tensor, view: object) -> tuple[cg.GraphSpec, torch.Tensor]:
    """The graph of one view of x, and what it computes on a CPU."""
    g = cg.Graph("view")
    g.output("y", view(g.input("x", like=x)))  # type: ignore[operator]
    return g.spec(), g.compile("cpu")(x=x)


@settings(deadline=None)
@given(reshaped())
def test_a_shape_has_strides_exactly_where_torch_can_view_it(
    drawn: tuple[torch.Tensor, tuple[int, ...]],
) -> None:
    x, shape = drawn
    strides = view_strides(x.shape, x.stride(), shape)
    try:
        theirs = x.view(shape)
    except RuntimeError:
        assert strides is None
        return
    assert strides is not None
    assert same_layout(shape, strides, theirs.stride())


@settings(deadline=None)
@given(reshaped())
def test_a_reshape_has_the_layout_and_the_elements_of_torch(
    drawn: tuple[torch.Tensor, tuple[int, ...]],
) -> None:
    x, shape = drawn
    spec, y = result(x, lambda v: v.reshape(shape))
    theirs = x.reshape(shape)
    assert same_layout(shape, spec.tensors["y"].stride, theirs.stride())
    assert torch.equal(y, theirs)


@settings(deadline=None)
@given(dense(), st.data())
def test_a_permutation_has_the_layout_and_the_elements_of_torch(
    x: torch.Tensor, data: st.DataObject
) -> None:
    dims = tuple(data.draw(st.permutations(range(x.dim()))))
    spec, y = result(x, lambda v: v.permute(dims))
    theirs = x.permute(dims)
    assert same_layout(theirs.shape, spec.tensors["y"].stride, theirs.stride())
    assert torch.equal(y, theirs)


def test_a_slice_of_channels_last_stays_so_without_the_gaps() -> None:
    g = cg.Graph("slice")
    x = g.input("x", (2, 16, 6, 10), F16, layout="channels_last")
    assert x.slice(1, 4, 12).stride == (8 * 60, 1, 10 * 8, 8)


def test_a_concatenation_is_channels_last_where_every_operand_with_channels_is() -> None:
    g = cg.Graph("concat")
    x = g.input("x", (2, 16, 6, 10), F16, layout="channels_last")
    one = g.input("one", (2, 1, 6, 10), F16)
    plain = g.input("plain", (2, 4, 6, 10), F16)
    assert g.concat([x, one], 1).stride == (17 * 60, 1, 10 * 17, 17)
    assert g.concat([x, plain], 1).stride == (20 * 60, 60, 10, 1)


def test_attributes_have_one_form_however_they_are_written() -> None:
    def attrs(view: object) -> dict[str, object]:
        spec, _ = result(torch.zeros(4, 6), view)
        return dict(spec.nodes[0].attrs)

    assert attrs(lambda v: v.reshape([-1, 3])) == {"shape": (8, 3)}
    assert attrs(lambda v: v.transpose(-1, 0)) == {"dim0": 0, "dim1": 1}
    assert attrs(lambda v: v.permute([-1, 0])) == {"dims": (1, 0)}
    assert attrs(lambda v: v.slice(-1, -5, 100, 2)) == {"dim": 1, "start": 1, "stop": 6, "step": 2}
    assert attrs(lambda v: v.slice(1, 2, 5, 3)) == {"dim": 1, "start": 2, "stop": 3, "step": 1}
    assert attrs(lambda v: v.slice(0, 3, 1)) == {"dim": 0, "start": 0, "stop": 0, "step": 1}


def test_a_concatenation_prints_as_a_call_with_its_operands() -> None:
    g = cg.Graph("join")
    x, y = g.input("x", (2, 3), F16), g.input("y", (2, 5), F16)
    g.output("z", g.concat([x, y, x], dim=1))
    assert "z = concat(x, y, x, dim=1)  # f16[2, 11]" in str(g)


def test_an_attribute_without_a_default_has_to_be_there() -> None:
    x = TensorSpec("x", (2, 3), (3, 1), F16)
    problems = check_node("transpose", "t1", {"x": x}, {"dim0": 1}).problems
    assert [str(problem) for problem in problems] == [
        "transpose 't1': dim1 is missing; expected a value for dim1"
    ]
