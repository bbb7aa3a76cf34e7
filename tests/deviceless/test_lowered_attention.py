"""Packed and paged attention, and dropout, as the frontend is told of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.deviceless import propose_for
from cudnngraph.backend.lowering.context import Alias
from cudnngraph.ops.table import OPS
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.rewrite.packed import insert_ragged_offsets

TARGET = "nvidia-h200"
ATTENTION = [name for name in OPS if OPS[name].has("attention")]


@pytest.mark.usefixtures("driver")
def test_packed_tokens_are_shown_as_sequences_with_offsets_into_one_table() -> None:
    g = cg.Graph("packed")
    q = g.input("q", (107, 8, 64), torch.float16, stride=(3 * 8 * 64, 64, 1))  # of a packed buffer
    k, v = (g.input(name, (150, 2, 64), torch.float16) for name in "kv")
    ends = [g.input(name, (4,), torch.int32) for name in ("cu_q", "cu_kv")]
    o, lse = g.sdpa_varlen(q, k, v, *ends, 64, 80, is_causal=True, return_lse=True)
    g.output("o", o, stride=(8 * 64, 64, 1))
    g.output("lse", lse)
    offsets, attention = cg.explain(g, TARGET).steps
    widths = dict(offsets.spec.nodes[0].attrs)
    assert widths == {"widths_q": (3 * 8 * 64, 8 * 64, 8), "widths_kv": (2 * 64,)}
    lowered, _ = propose_for(attention.spec, TARGET)
    names = (*attention.spec.inputs, *attention.spec.outputs)
    told = {
        name: lowered.graph.find_tensor(uid) for name, uid in zip(names, lowered.uids, strict=True)
    }
    longest = {"q": 64, "o": 64, "lse": 64, "k": 80, "v": 80}
    token = {"q": 3 * 8 * 64, "o": 8 * 64, "lse": 8, "k": 2 * 64, "v": 2 * 64}
    for name, rows in longest.items():
        heads, depth = (2 if name in "kv" else 8), (1 if name == "lse" else 64)
        head = 1 if name == "lse" else 64
        assert list(told[name].dim) == [3, heads, rows, depth], name
        assert list(told[name].stride) == [rows * token[name], head, token[name], 1], name
    (ragged,) = (name for name in names if name not in longest)
    assert list(told[ragged].dim) == [3, 1, 1, 1]
    aliases = [extra for extra in lowered.extras if isinstance(extra, Alias)]
    assert {extra.position for extra in aliases} == {attention.spec.inputs.index(ragged)}
    row_bytes = 16  # four numbers of four bytes
    assert sorted(extra.offset_bytes for extra in aliases) == [row_bytes * n for n in range(1, 6)]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("sliced", ["qkv", "do", "dk", ""])
def test_the_gradient_of_packed_attention_has_its_operands_laid_as_its_results(sliced: str) -> None:
    """Else cuDNN 9.19 reads a misaligned address on an H200, which ends the process."""
    g = cg.Graph("packed")
    shape, wide = (107, 4, 64), (3 * 4 * 64, 64, 1)
    q, k, v = (
        g.input(name, shape, torch.float16, stride=wide if sliced == "qkv" else None)
        for name in "qkv"
    )
    do = g.input("do", shape, torch.float16, stride=wide if sliced == "do" else None)
    o, lse = g.input("o", shape, torch.float16), g.input("lse", (107, 4), torch.float32)
    ends = [g.input(name, (4,), torch.int32) for name in ("cu_q", "cu_kv")]
    grads = g.sdpa_varlen_backward(do, q, k, v, o, lse, *ends, 64, 64)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        g.output(name, grad, stride=wide if sliced == name else None)
    copied = {"qkv": ["q", "k", "v"], "do": ["do"], "dk": ["k"], "": []}[sliced]
    found = cg.explain(g, TARGET)
    copies = [step for step in found.steps if "identity" in step.ops]
    assert [step.spec.inputs for step in copies] == [(name,) for name in copied]
    (last,) = (step for step in found.steps if "sdpa_varlen_backward" in step.ops)
    assert last.runs_on == "cuDNN"
    (node,) = last.spec.nodes
    for port, result in (("q", "dq"), ("k", "dk"), ("v", "dv")):
        name = node.inputs[OPS[node.op].ports.index(port)]
        assert last.spec.tensors[str(name)].stride == last.spec.tensors[result].stride, port
    apart = insert_ragged_offsets(g.spec())
    (place,) = (n for n, node in enumerate(apart.nodes) if node.op == "sdpa_varlen_backward")
    bare = subgraph_of(CutGraph(apart), [apart.nodes[place]])
    if not copied:
        assert propose_for(bare, TARGET)[1]
        return
    with pytest.raises(cg.NotSupported, match=f"{copied[0]} and .* of packed attention's gradient"):
        propose_for(bare, TARGET)


@pytest.mark.usefixtures("driver")
def test_one_page_table_for_keys_and_values_is_passed_twice() -> None:
    g = cg.Graph("paged")
    q = g.input("q", (2, 8, 1, 64), torch.float16)
    k, v = (g.input(f"{n}_cache", (12, 2, 16, 64), torch.float16) for n in "kv")
    table, lengths = g.input("table", (2, 4), torch.int32), g.input("lengths", (2,), torch.int32)
    g.output("o", g.sdpa_paged(q, k, v, table, lengths))
    spec = g.spec()
    lowered, _ = propose_for(spec, TARGET)
    told = lowered.graph.find_tensor(lowered.uids[spec.inputs.index("table")])
    assert (list(told.dim), list(told.stride)) == ([2, 1, 4, 1], [4, 4, 1, 1])
    (alias,) = (extra for extra in lowered.extras if isinstance(extra, Alias))
    assert (alias.position, alias.offset_bytes) == (spec.inputs.index("table"), 0)


SEEDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (9, 0)},
    "mask": {"mask": ((2, 4, 64, 64), torch.bfloat16)},
    "float32 mask": {"mask": ((2, 4, 64, 64), torch.float32)},
    "one row for all": {"mask": ((2, 1, 1, 64), torch.bfloat16)},
    "lengths": {"lengths": True},
    "lengths of finite padding": {"lengths": True, "finite_padding": True},
    "bottom right": {"is_causal": True, "diagonal_alignment": "bottom_right"},
    "softcap": {"softcap": 0.7},
    "softcap and mask": {"softcap": 0.7, "mask": ((2, 4, 64, 64), torch.bfloat16)},
    "alibi": {"alibi": True, "is_causal": True},
    "alibi both ways": {"alibi": True},
    "sink": {"sink": True},
}
BY_TORCH = {"float32 mask", "one row for all", "lengths", "bottom right", "alibi both ways"}


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", SEEDED)
def test_an_attention_that_drops_by_a_seed_runs_where_its_gradient_does(name: str) -> None:
    """Or the two would drop different weights: the generators of cuDNN and torch steps differ."""
    options = dict(SEEDED[name])
    g = cg.Graph("attention")
    q, k, v = (g.input(port, (2, 4, 64, 64), torch.bfloat16) for port in "qkv")
    for of in ("seed", "offset"):
        options[f"dropout_{of}"] = g.input(of, (1,), torch.int64)
    if "mask" in options:
        options["attn_mask"] = g.input("mask", *options.pop("mask"))
    if options.pop("lengths", False):
        options["seq_len_kv"] = g.input("lengths", (2,), torch.int32)
    if options.pop("sink", False):
        options["sink"] = g.input("sink", (4,), torch.float32)
    g.output("o", g.sdpa(q, k, v, dropout_p=0.1, **options))
    gradient = cg.differentiate(g, [n for n in g.spec().inputs if n in ("q", "mask", "sink")])
    places = {
        step.runs_on
        for spec in (gradient.forward, gradient.backward)
        for step in cg.explain(spec, TARGET).steps
        if set(step.ops) & set(ATTENTION)
    }
    assert places == {"torch" if name in BY_TORCH | {"softcap and mask"} else "cuDNN"}


@pytest.mark.usefixtures("driver")
def test_the_gradient_of_attention_with_a_dropout_mask_is_refused() -> None:
    """cuDNN 9.19 leaves the row sums of do * o as if nothing had been dropped."""
    g = cg.Graph("attention")
    shape, names = (2, 4, 64, 64), ("q", "k", "v", "do", "o")
    q, k, v, do, o = (g.input(name, shape, torch.float16) for name in names)
    lse = g.input("lse", (2, 4, 64), torch.float32)
    dropped = g.input("dropped", shape, torch.float16)
    grads = g.sdpa_backward(do, q, k, v, o, lse, dropout_p=0.75, dropout_mask=dropped)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=False):
        g.output(name, grad)
    with pytest.raises(cg.NotSupported) as caught:
        propose_for(g.spec(), TARGET)
    assert caught.value.reasons == ("cuDNN's gradient of dropout by a mask is wrong",)


@pytest.mark.parametrize("kind", ["plain", "grouped", "mask", "packed"])
def test_a_deterministic_gradient_of_attention_has_plans_of_its_own(kind: str) -> None:
    """cuDNN adds up dq in no fixed order unless it is told not to, and no note says so."""
    shape = (2, 4, 512, 64)
    g = cg.Graph("attention")
    if kind == "packed":
        q, k, v = (g.input(name, (1024, 4, 64), torch.float16) for name in "qkv")
        ends = g.input("ends", (3,), torch.int32)
        g.output("o", g.sdpa_varlen(q, k, v, ends, ends, 512, 512, is_causal=True))
    else:
        q = g.input("q", shape, torch.float16)
        heads = 2 if kind == "grouped" else 4
        k, v = (g.input(name, (2, heads, 512, 64), torch.float16) for name in "kv")
        mask = g.input("mask", (2, 4, 512, 512), torch.float16) if kind == "mask" else None
        g.output("o", g.sdpa(q, k, v, mask, is_causal=mask is None))
    graph = cg.differentiate(g, wrt=("q", "k", "v")).backward
    needs = []
    for deterministic in (False, True):
        steps = cg.explain(graph, deterministic=deterministic).steps
        (step,) = (step for step in steps if step.ops[-1].startswith("sdpa"))
        assert step.runs_on == "cuDNN", step.refusals
        needs.append({plan.workspace_bytes for plan in step.plans})
    assert needs[0].isdisjoint(needs[1])


@pytest.mark.usefixtures("driver")
def test_what_is_written_across_rows_is_no_part_of_causal_attention() -> None:
    """cuDNN 9.19 crashes as it looks for such a plan."""
    shape = (2, 4, 64, 64)
    g = cg.Graph("across")
    q, k, v = (g.input(name, shape, torch.float16) for name in "qkv")
    g.output("y", g.relu(g.sdpa(q, k, v, is_causal=True)), stride=(4 * 64 * 64, 64 * 64, 1, 64))
    with pytest.raises(cg.NotSupported, match="'y' lies across the rows of attention"):
        propose_for(g.spec(), TARGET)
    runs = {step.ops: step.runs_on for step in cg.explain(g, TARGET).steps}
    assert runs["sdpa",] == "cuDNN"
