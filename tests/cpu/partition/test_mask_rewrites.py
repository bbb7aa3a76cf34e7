"""Masks of attention before the cut: converted once, aligned, or left as they are."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec, contiguous_strides
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.rewrite.masks import align_masks, bool_masks_to_additive
from cudnngraph.rewrite.passes import prepared
from tests import thresholds
from tests.cuttings import every_cutting
from tests.partitions import BF16, F16, F32, attention, ops, same_results


def test_attentions_that_share_a_mask_share_no_converted_one() -> None:
    """Steps hand tensors on by name: the same name in two dtypes would be read as the wrong one."""
    g = cg.Graph("g")
    mask = g.input("mask", (1, 1, 8, 8), torch.bool)
    for number, dtype in enumerate((F16, BF16)):
        q = g.input(f"q{number}", (2, 4, 8, 8), dtype)
        g.output(f"o{number}", g.sdpa(q, q, q, mask))
    steps = every_cutting(bool_masks_to_additive(g.spec()))[-1]
    assert sorted(op for step in steps for op in ops(step)) == ["sdpa", "sdpa", "where", "where"]
    made = [name for step in steps for name in step.outputs]
    assert len(made) == len(set(made)) == 4


def test_attentions_of_one_dtype_share_a_converted_mask() -> None:
    g = cg.Graph("g")
    mask = g.input("mask", (3, 7, 7), torch.bool)
    for number in range(2):
        q = g.input(f"q{number}", (2, 3, 7, 8), F16)
        g.output(f"o{number}", g.sdpa(q, q, q, mask))
    spec = bool_masks_to_additive(g.spec())
    (convert,) = (node for node in spec.nodes if node.op == "where")
    made = spec.tensors[convert.results[0]]
    assert (made.dtype, made.stride) == (F16, (7 * 8, 8, 1))
    assert same_results(g.spec(), spec)


LARGE = (16, 16, 193, 8)  # over eight million scores


def with_masks(*kinds: tuple[tuple[int, ...], torch.dtype], width: int = 193) -> GraphSpec:
    """An attention by each of the masks, given by shape and dtype; rows ``width`` apart."""
    g = cg.Graph("g")
    q = g.input("q", LARGE, F16)
    for number, (shape, dtype) in enumerate(kinds):
        stride = contiguous_strides((*shape[:-1], width))
        mask = g.input(f"m{number}", shape, dtype, stride=stride)
        g.output(f"o{number}", g.sdpa(q, q, q, mask))
        g.output(f"p{number}", g.sdpa(q, q, q, mask, scale=1.0))
    return g.spec()


def test_masks_whose_rows_start_at_odd_elements_are_copied_once_each() -> None:
    spec = with_masks(((193, 193), F16), ((16, 1, 193, 193), F16), ((1, 16, 193, 193), F16))
    made = align_masks(spec)
    copies = [node for node in made.nodes if node.op == "identity"]
    assert [node.operands[0] for node in copies] == ["m0", "m1", "m2"]
    for node in copies:
        mask = made.tensors[node.results[0]]
        assert (mask.stride[-2:], mask.dtype) == ((200, 1), F16)
    assert {node.operands[3] for node in made.nodes if node.op == "sdpa"} == {
        node.results[0] for node in copies
    }
    assert ("identity",) in {tuple(ops(step)) for step in every_cutting(made)[-1]}


@pytest.mark.parametrize("dtype", [torch.bool, F16], ids=str)
def test_masks_are_aligned_where_the_data_are_made_by_the_graph(dtype: torch.dtype) -> None:
    """The data are declared float32, and passed between steps in 16 bits."""
    g = cg.Graph("g")
    x, mask = g.input("x", (16 * 193, 16 * 8), F16), g.input("mask", (193, 193), dtype)
    y = g.permute(g.reshape(g.relu(x), (16, 193, 16, 8)), (0, 2, 1, 3))
    g.output("o", g.sdpa(y, y, y, mask if dtype == torch.bool else g.add(mask, mask)))
    spec = canonical(g.spec())
    made = prepared(spec)
    (node,) = (node for node in made.nodes if node.op == "sdpa")
    read = CutGraph(made).crossing(node.operands[3])
    assert (read.dtype, read.stride) == (F16, (200, 1))
    assert same_results(spec, made)


def test_views_of_masks_that_are_aligned_are_left_as_they_are() -> None:
    g = cg.Graph("g")
    q, mask = g.input("q", LARGE, F16), g.input("mask", (193, 200), F16)
    g.output("o", g.sdpa(q, q, q, g.slice(mask, 1, 0, 193)))
    assert not [node for node in prepared(g.spec()).nodes if node.op == "identity"]


@pytest.mark.parametrize(
    "spec",
    [
        with_masks(((193, 193), F16), width=194),
        with_masks(((193, 193), F32)),
        with_masks(((16, 1, 1, 193), F16), width=194),
        with_masks(((1, 193), F16)),
        with_masks(((16, 16, 193, 193), F16)),
    ],
    ids=["even", "float32", "row", "one row", "of each image and head"],
)
def test_other_masks_are_left_as_they_are(spec: GraphSpec) -> None:
    assert align_masks(spec) is spec


def test_masks_of_little_attention_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    g = cg.Graph("g")
    q, mask = g.input("q", (2, 3, 7, 8), F16), g.input("m", (7, 7), F16)
    g.output("o", g.sdpa(q, q, q, mask))
    spec = g.spec()
    assert align_masks(spec) is spec
    thresholds.change(monkeypatch, mask_copy_min_scores=1)
    made = align_masks(spec)
    assert made is not spec
    assert same_results(spec, made)


def test_a_boolean_mask_of_attention_becomes_an_additive_one() -> None:
    spec = bool_masks_to_additive(attention(F16, torch.bool))
    convert, attend = every_cutting(spec)[-1]
    assert ops(convert) == ["where"]
    assert ops(attend) == ["sdpa"]
    assert convert.inputs == ("mask",)
    assert set(attend.inputs) == {"q", "k", "v", *convert.outputs}
    given = torch.eye(8, dtype=torch.bool)
    (added,) = reference.run(convert, [given])
    assert added.dtype == F16
    assert torch.equal(added == 0, given)
    assert torch.equal(added == -torch.inf, ~given)


@pytest.mark.parametrize(
    ("dtype", "mask"), [(F16, None), (F16, F16), (BF16, BF16), (F32, torch.bool)], ids=str
)
def test_other_attention_is_left_as_it_is(dtype: torch.dtype, mask: torch.dtype | None) -> None:
    spec = attention(dtype, mask)
    assert bool_masks_to_additive(spec) is spec
