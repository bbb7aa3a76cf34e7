"""A selection becomes a record and comes back as it was; what does not fit is stale."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.backend.env import EnvKey
from cudnngraph.cache import codec
from cudnngraph.cache.codec import (
    StaleRecord,
    env_components,
    pack,
    summary,
    to_record,
    unpack,
)
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.channels_last import channels_last
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import heuristic
from cudnngraph.select.decision import Selection, StepPlan
from cudnngraph.select.rules import why_not_cudnn
from plans_cache.record import PlanRecord, StepRecord, digest, entry_id, from_json
from tests.chunks import each_case
from tests.cuttings import every_cutting
from tests.fakes import FakePlan, builder, choice_for
from tests.samples import Case, enumerate_cases

F16, F32 = torch.float16, torch.float32
ENV = EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1)
POLICY = cg.Policy(allow_tf32=False)
CASES = [case for case in enumerate_cases() if case.on_gpu]


def record_of(spec: GraphSpec, selection: Selection, policy: cg.Policy = POLICY) -> PlanRecord:
    """As it is read back from a file."""
    record = to_record(spec, graph_key(spec, policy), ENV, policy, selection)
    return from_json(record.to_json())


def steps_of(record: PlanRecord, spec: GraphSpec) -> tuple[StepPlan, ...]:
    """The steps of a record for a graph under the record's policy."""
    policy = replace(POLICY, fallback=record.policy["fallback"])
    return codec.steps_of(record, legalize(spec, policy))


def chosen(spec: GraphSpec, likely: float, seed: int = 0) -> Selection:
    """A selection in which cuDNN refuses each part with the given likelihood."""
    dice = random.Random(zlib.crc32(str(spec).encode()) + seed)
    return heuristic.heuristic(spec, POLICY, builder(lambda part: dice.random() < likely))


def block() -> GraphSpec:
    g = cg.Graph("block")
    x, w = g.input("x", (2, 8, 6, 6), F16), g.input("w", (16, 8, 3, 3), F16)
    b, z = g.input("b", (16,), F16), g.input("z", (2, 16, 6, 6), F16)
    g.output("y", (g.bias(g.conv(x, w, padding=1), b) * 0.5 + z).relu())
    return canonical(g.spec())


def masked() -> GraphSpec:
    g = cg.Graph("masked")
    q, mask = g.input("q", (2, 4, 16, 16), F16), g.input("mask", (1, 1, 16, 16), torch.bool)
    g.output("o", g.relu(g.sdpa(q, q, q, mask)))
    return canonical(g.spec())


def more_than_one_op(spec: GraphSpec) -> bool:
    return sum(node.op != "constant" for node in spec.nodes) > 1


# -- there and back --------------------------------------------------------------------------------


@each_case(CASES)
def test_every_sample_comes_back_from_json_however_it_was_cut(case: Case) -> None:
    spec = canonical(case.build().spec())
    if why_not_cudnn(spec) is not None:
        pytest.skip("never stored")
    for likely in (0.0, 0.5, 1.0):
        selection = chosen(spec, likely)
        assert steps_of(record_of(spec, selection), spec) == selection.steps


@settings(max_examples=60, deadline=None)
@given(case=st.sampled_from(CASES), likely=st.sampled_from([0.2, 0.5, 0.8]), seed=st.integers(0))
def test_any_cut_comes_back(case: Case, likely: float, seed: int) -> None:
    spec = canonical(case.build().spec())
    if why_not_cudnn(spec) is None:
        selection = chosen(spec, likely, seed)
        assert steps_of(record_of(spec, selection), spec) == selection.steps


@each_case(CASES)
def test_every_cut_of_every_rewrite_comes_back_from_json(case: Case) -> None:
    spec = canonical(case.build().spec())
    if why_not_cudnn(spec) is not None:
        pytest.skip("never stored")
    ready = legalize(spec, POLICY)
    for variant in {id(each): each for each in (ready, channels_last(ready))}.values():
        for parts in every_cutting(variant):
            steps = tuple(StepPlan(part, choice_for(part), 64, ()) for part in parts)
            selection = Selection.of(ready, steps, (None,) * len(steps))
            assert steps_of(record_of(spec, selection), spec) == steps


def test_a_graph_that_was_run_channels_last_comes_back_with_its_copies() -> None:
    spec = block()
    last = channels_last(spec)
    ways = every_cutting(last)
    assert len(ways) > 2
    by_copies = {tuple(node.op for node in way[0].nodes) for way in ways[1:]}
    assert by_copies == {("identity",)}
    steps = tuple(StepPlan(part, None, 0, ()) for part in ways[-1])
    record = record_of(spec, Selection.of(spec, steps, (None,) * len(steps)))
    assert record.extra == {"channels_last": True}
    assert record.summary == summary(spec), "the record is the graph's, not the rewritten one's"
    assert sum(step.ops == ("identity",) for step in record.steps) == 4
    assert steps_of(record, spec) == steps
    older = from_json(replace(record, extra={}).to_json())  # of a version that did not say so
    assert "that is not there" in stale(older, spec)


def test_the_samples_are_cut_in_every_way() -> None:
    """The tests above are not empty: whole, in pieces, op by op, with and without torch steps."""
    ways = set()
    for case in CASES:
        spec = canonical(case.build().spec())
        if why_not_cudnn(spec) is None:
            for likely in (0.0, 0.5, 1.0):
                steps = chosen(spec, likely).steps
                kinds = {"torch" if step.choice is None else "cudnn" for step in steps}
                ways.add((min(len(steps), 3), len(kinds), *sorted(kinds)))
    assert ways == {
        (count, len(kinds), *kinds)
        for count in (1, 2, 3)
        for kinds in (("cudnn",), ("torch",), ("cudnn", "torch"))
        if count >= len(kinds)
    }


def test_a_boolean_mask_comes_back_with_its_constant_of_minus_infinity() -> None:
    spec = masked()

    def refuse(part: GraphSpec) -> bool:
        return any(spec.tensors[name].dtype == torch.bool for name in spec.inputs) and any(
            node.op == "sdpa" and part.tensors[str(node.inputs[3])].dtype == torch.bool
            for node in part.nodes
        )

    selection = heuristic.heuristic(spec, POLICY, builder(refuse))
    record = record_of(spec, selection)
    assert [step.ops for step in record.steps] == [
        ("constant", "constant", "where"),
        ("sdpa", "relu"),
    ]
    back = steps_of(record, spec)
    assert back == selection.steps
    values = [node.attr("value") for node in back[0].spec.nodes if node.op == "constant"]
    assert values == [0.0, float("-inf")]


def test_choices_decisions_and_workspaces_come_back() -> None:
    spec = block()
    selection = heuristic.heuristic(spec, POLICY, builder(more_than_one_op))
    steps = steps_of(record_of(spec, selection), spec)
    assert [step.choice for step in steps] == [choice_for(step.spec) for step in steps]
    assert [step.workspace_bytes for step in steps] == [
        step.workspace_bytes for step in selection.steps
    ]
    subjects = [decision.subject for decision in steps[0].decisions]
    assert subjects[0] == f"'{spec.name}' as one plan"
    over = steps[0].decisions[-2]
    assert (over.accepted, over.workspace_bytes) == (False, 4096)
    assert over.choice is not None and over.choice.knobs == (("STAGES", 9),)


def test_the_record_says_what_it_is_of() -> None:
    spec = block()
    key = graph_key(spec, POLICY)
    record = record_of(spec, chosen(spec, 0.0))
    assert record.key == key.components
    assert record.env == env_components(ENV)
    assert record.id == entry_id(key.digest, digest(env_components(ENV)))
    assert dict(record.policy) == {**asdict(POLICY), "exclude_engines": []}
    assert record.versions["torch"] == torch.__version__
    assert record.summary == summary(spec)
    assert record.graph.startswith(f"def {spec.name}(")
    assert "groups" not in record.graph, "defaults are left out"


def test_the_environment_is_in_named_components() -> None:
    assert dict(env_components(ENV)) == {
        "cudnn_version": "91900",
        "gpu_name": '"NVIDIA H200"',
        "compute_capability": "[9, 0]",
        "sm_count": "132",
        "schema": "1",
    }


def test_the_summary_is_one_readable_line() -> None:
    assert summary(block()) == (
        "conv → bias → mul → add → relu: f16[2, 8, 6, 6], f16[16, 8, 3, 3], f16[16], "
        "f16[2, 16, 6, 6] → f16[2, 16, 6, 6]"
    )


# -- stale -----------------------------------------------------------------------------------------


def changed(record: PlanRecord, place: int, **change: Any) -> PlanRecord:
    steps = list(record.steps)
    steps[place] = replace(steps[place], **change)
    return from_json(replace(record, steps=tuple(steps)).to_json())


@pytest.fixture
def cut() -> tuple[GraphSpec, PlanRecord]:
    """The block as two steps: the convolution, and what follows it."""
    spec = block()
    selection = heuristic.heuristic(spec, POLICY, builder(lambda part: len(part.nodes) == 6))
    assert [len(step.spec.nodes) for step in selection.steps] == [1, 5]
    return spec, record_of(spec, selection)


def stale(record: PlanRecord, spec: GraphSpec) -> str:
    with pytest.raises(StaleRecord) as caught:
        steps_of(record, spec)
    return str(caught.value)


def test_what_was_chosen_before_a_rewrite_is_stale_but_where_nothing_is_rewritten() -> None:
    """A mask of odd rows was read as it lies once, and is copied now."""
    g = cg.Graph("odd")
    q = g.input("q", (16, 16, 193, 8), F16)
    g.output("o", g.sdpa(q, q, q, g.input("mask", (193, 193), F16)))
    spec = canonical(g.spec())
    before = Selection((StepPlan(spec, choice_for(spec), 64, ()),), (None,))
    assert stale(record_of(spec, before), spec) == "step 1 has other tensors than in the record"
    whole = record_of(spec, before, replace(POLICY, fallback="error"))
    assert steps_of(whole, spec) == before.steps


def test_too_few_steps_are_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    short = replace(record, steps=record.steps[:1])
    assert stale(short, spec) == "op 'bias1' is in no step of the record"
    none = replace(record, steps=())
    assert stale(none, spec) == "op 'conv0' is in no step of the record"


def test_too_many_steps_are_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    extra = replace(record, steps=(*record.steps, record.steps[0]))
    assert stale(extra, spec) == "step 3 has an op 'conv0' that is not there, or twice"


def test_steps_in_another_order_are_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    assert stale(replace(record, steps=record.steps[::-1]), spec) == (
        "step 1 of the record reads what no earlier one makes"
    )


def test_nodes_of_another_name_are_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    other = changed(record, 0, nodes=("elsewhere",))
    assert stale(other, spec) == "step 1 has an op 'elsewhere' that is not there, or twice"


def test_ops_in_another_order_within_a_step_are_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    other = changed(record, 1, nodes=record.steps[1].nodes[::-1])
    assert stale(other, spec) == "step 2 of the record has other ops than the graph"


def test_a_step_without_its_constant_is_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    names = tuple(name for name in record.steps[1].nodes if not name.startswith("constant"))
    assert len(names) == len(record.steps[1].nodes) - 1
    kinds = tuple(op for op in record.steps[1].ops if op != "constant")
    assert stale(changed(record, 1, nodes=names, ops=kinds), spec) == (
        "step 2 of the record has other ops than the graph"
    )


def test_an_op_named_twice_in_a_step_is_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    twice = (*record.steps[0].nodes, *record.steps[0].nodes)
    assert stale(changed(record, 0, nodes=twice, ops=("conv", "conv")), spec) == (
        "step 1 has an op 'conv0' that is not there, or twice"
    )


def test_a_mask_that_is_converted_for_no_attention_is_stale() -> None:
    """The nodes of the rewritten graph, without those of the conversion."""
    spec = masked()
    record = record_of(spec, chosen(spec, 1.0))
    assert record.steps[0].ops == ("constant", "constant", "where")
    assert stale(replace(record, steps=record.steps[1:]), spec).startswith("step 1")


@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_of_another_type_is_stale(cut: tuple[GraphSpec, PlanRecord], place: int) -> None:
    spec, record = cut
    name, _ = record.steps[place].outputs[0]
    other = changed(record, place, outputs=((name, "f32[2, 16, 6, 6]"),))
    assert stale(other, spec).endswith("has other tensors than in the record")


def test_tensors_in_another_order_are_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    other = changed(record, 0, inputs=record.steps[0].inputs[::-1])
    assert stale(other, spec) == "step 1 has other tensors than in the record"


def test_a_record_of_another_graph_is_stale(cut: tuple[GraphSpec, PlanRecord]) -> None:
    assert stale(cut[1], masked()) == "step 1 has an op 'conv0' that is not there, or twice"


def test_a_step_that_torch_runs_needs_no_choice(cut: tuple[GraphSpec, PlanRecord]) -> None:
    spec, record = cut
    by_torch: dict[str, Any] = {"kind": "torch", "engine": None, "knobs": ()}
    assert steps_of(changed(record, 1, **by_torch), spec)[1].choice is None


# -- serialized plans ------------------------------------------------------------------------------

PARTS = st.lists(st.binary(max_size=40), max_size=6)


class Bytes(FakePlan):
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content


def packed(parts: list[bytes]) -> bytes:
    return pack([Bytes(part) for part in parts])  # type: ignore[misc]


@given(parts=PARTS)
def test_what_is_packed_is_unpacked(parts: list[bytes]) -> None:
    assert unpack(packed(parts), len(parts)) == parts


def test_equal_plans_are_kept_once() -> None:
    class Counted(Bytes):
        calls = 0

        def serialize(self) -> bytes:
            self.calls += 1
            return super().serialize()

    text = b"p" * 1000
    shared = Counted(text)
    blob = pack([shared, None, Bytes(b"other"), shared, Bytes(text)])  # type: ignore[list-item]
    assert unpack(blob, 5) == [text, b"", b"other", text, text]
    assert shared.calls == 1
    assert len(blob) == 5 * 8 + 1000 + len(b"other")


def test_a_blob_of_an_older_program_is_unpacked() -> None:
    parts = [b"one", b"", b"one"]
    older = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    assert unpack(older, 3) == parts


@pytest.mark.parametrize("place", [1, 2, 5])
def test_a_plan_that_comes_again_has_come_before(place: int) -> None:
    blob = packed([b"one"]) + (1 << 63 | place).to_bytes(8, "little")
    with pytest.raises(ValueError, match="cut short"):
        unpack(blob, 2)


def test_a_torch_step_takes_an_empty_place() -> None:
    blob = pack([None, Bytes(b"plan"), None])  # type: ignore[list-item]
    assert unpack(blob, 3) == [b"", b"plan", b""]


@given(parts=PARTS.filter(bool), data=st.data())
def test_every_truncation_is_noticed(parts: list[bytes], data: st.DataObject) -> None:
    blob = packed(parts)
    length = data.draw(st.integers(0, len(blob) - 1))
    with pytest.raises(ValueError, match="cut short"):
        unpack(blob[:length], len(parts))


@given(parts=PARTS, more=st.binary(min_size=1, max_size=20))
def test_bytes_behind_the_last_plan_are_noticed(parts: list[bytes], more: bytes) -> None:
    with pytest.raises(ValueError, match="more than the record's steps"):
        unpack(packed(parts) + more, len(parts))


def test_another_number_of_plans_is_noticed() -> None:
    blob = packed([b"one", b"two"])
    with pytest.raises(ValueError, match="more than the record's steps"):
        unpack(blob, 1)
    with pytest.raises(ValueError, match="cut short"):
        unpack(blob, 3)


def test_a_length_beyond_all_memory_is_noticed() -> None:
    with pytest.raises(ValueError, match="cut short"):
        unpack(b"\xff" * 8 + b"plan", 1)


def test_a_record_is_data_that_json_holds() -> None:
    """No field of a step is lost on the way: each is in the text."""
    spec = block()
    text = json.loads(record_of(spec, chosen(spec, 0.0)).to_json())
    fields = {field for field in StepRecord.__dataclass_fields__ if field != "extra"}
    assert set(text["steps"][0]) == fields
