"""Plan records: what is written comes back, and nothing else is taken for a record."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnngraph.ir.key import Key
from plans_cache import Candidate, PlanRecord, RecordError, StepRecord, entry_id, from_json
from plans_cache.record import MAX_CREATED, MAX_DEPTH, MAX_RECORD_BYTES, MAX_TIME_US, BlobRef
from tests.workers.store_worker import record

Json = dict[str, Any]


def signed(body: Json) -> str:
    """``body`` with the checksum that belongs to it, computed here on its own."""
    rest = {name: value for name, value in body.items() if name != "checksum"}
    content = json.dumps(rest, separators=(",", ":"), ensure_ascii=False)
    rest["checksum"] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps(rest)


def body() -> Json:
    loaded: Json = json.loads(record(7, 3).to_json())
    return loaded


# -- what is written comes back --------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_and_is_written_the_same_again() -> None:
    text = record(7, 3).to_json()
    again = from_json(text)
    assert again == record(7, 3)
    assert again.steps[0].engine == 3
    assert again.steps[0].knobs == (("SPLIT_K", 1), ("TILE_SIZE", 2))
    assert again.steps[0].candidates[1].accepted is False
    assert again.to_json() == text
    assert from_json(text.encode()) == again


def test_order_that_means_nothing_does_not_change_the_text() -> None:
    one = replace(record(7), policy={"a": 1, "b": 2}, versions={"x": "1", "y": "2"})
    other = replace(record(7), policy={"b": 2, "a": 1}, versions={"y": "2", "x": "1"})
    assert one.to_json() == other.to_json()


texts = st.text(max_size=20)
names = st.dictionaries(texts, st.integers(-(2**63) + 1, 2**63 - 1), max_size=3)
numbers = st.none() | st.floats(0, MAX_TIME_US)
candidates = st.builds(
    Candidate,
    subject=texts,
    accepted=st.booleans(),
    reason=texts,
    engine=st.none() | st.integers(0, 2**31),
    knobs=names.map(lambda found: tuple(found.items())),
    time_us=numbers,
    workspace_bytes=st.none() | st.integers(0, 2**62),
)
steps = st.builds(
    lambda engine, pairs, **rest: StepRecord(
        nodes=tuple(name for name, _ in pairs),
        ops=tuple(op for _, op in pairs),
        kind="torch" if engine is None else "cudnn",
        engine=engine,
        **rest,
    ),
    engine=st.none() | st.integers(0, 2**31),
    pairs=st.lists(st.tuples(texts, texts), max_size=3),
    inputs=st.dictionaries(texts, texts, max_size=3).map(lambda found: tuple(found.items())),
    outputs=st.just((("t1", "f16[1]"),)),
    time_us=numbers,
    candidates=st.lists(candidates, max_size=3).map(tuple),
)
components = st.lists(st.tuples(texts, texts), max_size=4).map(tuple)
records = st.builds(
    PlanRecord,
    key=components,
    env=components,
    summary=texts,
    graph=texts,
    steps=st.lists(steps, max_size=3).map(tuple),
    policy=st.dictionaries(texts, st.none() | st.booleans() | st.integers(0, 9) | texts),
    versions=st.dictionaries(texts, texts),
    created=st.floats(0, MAX_CREATED),
    blob=st.none() | st.just(BlobRef(3, "0" * 64)),
)


@settings(max_examples=60, deadline=None)
@given(records)
def test_any_record_comes_back(made: PlanRecord) -> None:
    again = from_json(made.to_json())
    assert again == made
    assert again.id == made.id


def test_unknown_fields_are_kept_at_every_level() -> None:
    newer = body()
    newer["clock_mhz"] = {"sm": [1980, None, 0.5]}
    newer["steps"][0]["stream"] = "side"
    newer["steps"][0]["candidates"][0]["occupancy"] = 0.75
    found = from_json(signed(newer))
    assert found.extra == {"clock_mhz": {"sm": [1980, None, 0.5]}}
    assert found.steps[0].extra == {"stream": "side"}
    assert found.steps[0].candidates[0].extra == {"occupancy": 0.75}
    assert from_json(found.to_json()) == found
    assert '"occupancy": 0.75' in found.to_json()


def test_the_largest_numbers_come_back_and_digits_in_texts_are_no_numbers() -> None:
    largest = {"int": 2**63 - 1, "-int": -(2**63) + 1, "float": 1.7976931348623157e308, "e": 1e-300}
    made = replace(record(7), policy=largest, summary="9" * 400 + ' 1e999 \\" [[' + "[" * MAX_DEPTH)
    assert from_json(made.to_json()) == made


def test_a_digest_is_that_of_the_key_of_the_graph() -> None:
    key, env = Key(record(7).key), Key((("gpu", '"é"'),))
    made = replace(record(7), env=env.components)
    assert made.key_digest == key.digest
    assert made.env_digest == env.digest
    assert made.id == entry_id(key.digest, env.digest)
    assert len({made.id, record(7).id, record(8).id}) == 3


def test_time_and_workspace_of_the_whole_are_of_all_steps() -> None:
    step = record(0).steps[0]
    two = replace(record(0), steps=(step, replace(step, workspace_bytes=10, time_us=7.5)))
    assert (two.time_us, two.workspace_bytes) == (20.0, 4096)
    assert replace(two, steps=(step, replace(step, time_us=None))).time_us is None
    assert replace(two, steps=()).workspace_bytes == 0


# -- what is no record -----------------------------------------------------------------------------


def put(path: str, value: Any) -> Callable[[Json], None]:
    def edit(whole: Json) -> None:
        place: Any = whole
        *first, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        for word in first:
            place = place[word]
        place[last] = value

    return edit


def drop(name: str) -> Callable[[Json], None]:
    return lambda whole: whole.pop(name)


WRONG: list[tuple[Callable[[Json], Any], str]] = [
    (drop("schema"), "record: the field 'schema' is missing"),
    (drop("steps"), "record: the field 'steps' is missing"),
    (drop("id"), "record: the field 'id' is missing"),
    (put("schema", 2), "record.schema: 2, expected 1"),
    (put("schema", True), "record.schema: True, expected an integer"),
    (put("summary", 5), "record.summary: 5, expected text"),
    (put("graph", "one line"), "record.graph: 'one line', expected a list"),
    (put("graph", ["a", None]), "record.graph[1]: NoneType, expected text"),
    (put("policy", []), "record.policy: list, expected an object"),
    (put("versions", {"torch": 2.9}), "record.versions.torch: 2.9, expected text"),
    (put("created", -1), "record.created: -1, expected a number >= 0"),
    (put("created", "now"), "record.created: 'now', expected a number >= 0"),
    (put("created", False), "record.created: False, expected a number >= 0"),
    (put("created", 1e308), "record.created: 1e+308, expected at most 2.53402e+11"),
    (put("created", MAX_CREATED + 1), "record.created: 253402300800, expected at most"),
    (put("created", 2**63 - 1), "record.created: 9223372036854775807, expected at most"),
    (put("key", [["schema"]]), "record.key[0]: 1 texts, expected a name and a value"),
    (put("key", {"schema": "1"}), "record.key: dict, expected a list"),
    (put("key.1.1", '["conv", 8]'), "record.id: is not that of the components"),
    (put("env.0.1", "92000"), "record.id: is not that of the components"),
    (put("key_digest", "0" * 64), "record.key_digest: is not that of the components"),
    (put("env_digest", "0" * 64), "record.env_digest: is not that of the components"),
    (put("id", "0" * 63), "record.id: '000000"),
    (put("blob", 3), "record.blob: 3, expected an object"),
    (put("blob", {"size_bytes": 3}), "record.blob: the field 'sha256' is missing"),
    (
        put("blob", {"size_bytes": -3, "sha256": "0" * 64}),
        "record.blob.size_bytes: -3, expected an integer >= 0",
    ),
    (
        put("blob", {"size_bytes": 3, "sha256": "0" * 64, "path": "/"}),
        "record.blob: unknown field 'path'",
    ),
    (put("steps", {}), "record.steps: dict, expected a list"),
    (put("steps.0", None), "record.steps[0]: NoneType, expected an object"),
    (
        put("steps.0.kind", "cuda"),
        "record.steps[0].kind: 'cuda', expected 'cudnn', 'kernel' or 'torch'",
    ),
    (put("steps.0.kind", "torch"), "record.steps[0]: kind 'torch' with engine 3"),
    (put("steps.0.engine", None), "record.steps[0]: kind 'cudnn' with engine None"),
    (put("steps.0.engine", -1), "record.steps[0].engine: -1, expected an integer >= 0"),
    (put("steps.0.engine", 3.0), "record.steps[0].engine: 3.0, expected an integer"),
    (put("steps.0.engine", "3"), "record.steps[0].engine: '3', expected an integer"),
    (put("steps.0.ops", ["conv"]), "record.steps[0]: 2 nodes, 1 ops"),
    (
        put("steps.0.knobs", {"TILE": True}),
        "record.steps[0].knobs.TILE: True, expected an integer",
    ),
    (put("steps.0.inputs", [["t0", "f16"]]), "record.steps[0].inputs: list, expected an object"),
    (
        put("steps.0.workspace_bytes", -4096),
        "record.steps[0].workspace_bytes: -4096, expected an integer >= 0",
    ),
    (
        put("steps.0.candidates.1.accepted", 0),
        "record.steps[0].candidates[1].accepted: 0, expected true or false",
    ),
    (
        put("steps.0.candidates.1.time_us", "fast"),
        "record.steps[0].candidates[1].time_us: 'fast', expected a number >= 0",
    ),
    (
        put("steps.0.candidates.1.time_us", 1e308),
        "record.steps[0].candidates[1].time_us: 1e+308, expected at most 1e+12",
    ),
    (put("steps.0.time_us", 1e13), "record.steps[0].time_us: 10000000000000.0, expected at most"),
    (put("steps.0.time_us", -1e308), "record.steps[0].time_us: -1e+308, expected a number >= 0"),
    (put("extra", {"a": [1, {"b": -(2**63)}]}), "record: the number -9223372036854775808 does not"),
    (put("policy", {"1" * 30: 2**63}), "record: the number 9223372036854775808 does not fit"),
    (put("extra", 2**63), "record: the number 9223372036854775808 does not fit 64 bits"),
    (put("extra", 10**5000), "record: the number 100000000000000000000000 does not fit 64 bits"),
    (put("extra", math.nan), "record: NaN is not a number of JSON"),
    (put("extra", -math.inf), "record: -Infinity is not a number of JSON"),
    (put("summary", "\ud800"), "record: half of a surrogate pair in a text"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_field_is_refused_with_its_place(edit: Callable[[Json], Any], message: str) -> None:
    """The checksum is right each time: it is the field itself that is looked at."""
    whole = body()
    from_json(signed(whole))
    edit(whole)
    try:
        text = signed(whole)
    except UnicodeEncodeError:
        text = json.dumps({**whole, "checksum": "0" * 64})
    except ValueError:  # Python does not print an integer of 5,001 digits either
        whole["extra"] = "BIG"
        text = signed(whole).replace('"BIG"', "1" + "0" * 5000)
    with pytest.raises(RecordError) as error:
        from_json(text)
    assert str(error.value).startswith(message)


def test_a_changed_value_is_refused_by_the_checksum() -> None:
    text = record(7, 3).to_json()
    changed = text.replace('"engine": 3', '"engine": 4')
    assert changed != text
    with pytest.raises(RecordError, match=r"record\.checksum: does not match the content"):
        from_json(changed)
    assert from_json(text.replace("\n", "\r\n")) == record(7, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "record: not JSON: Expecting value: line 1 column 1"),
        ("{", "record: not JSON"),
        ("[]", "record: list, expected an object"),
        ("null", "record: NoneType, expected an object"),
        ('{"schema": 1, "schema": 1}', "record: the field 'schema' is there twice"),
        ('{"schema": 1e999}', "record: the number 1e999 is too large"),
        ('{"schema": -1E+999}', "record: the number -1E+999 is too large"),
        ('{"schema": 0.1e310}', "record: the number 0.1e310 is too large"),
        ('{"schema": ' + "9" * 309 + ".0}", "record: the number 999999999999999999999999 is too"),
        ('{"schema": -9223372036854775808}', "record: the number -9223372036854775808 does not"),
        ('{"a\\"b": "\\\\", "c": 1e999}', "record: the number 1e999 is too large"),
        (b"\xff\xfe{}", "record: not UTF-8"),
        ("[" * (MAX_DEPTH + 1), f"record: nested more than {MAX_DEPTH} deep"),
        ('{"a":' * 100_000, f"record: nested more than {MAX_DEPTH} deep"),
        ("[" * MAX_DEPTH, "record: not JSON"),
        (" " * (MAX_RECORD_BYTES + 1), f"record: over {MAX_RECORD_BYTES} bytes long"),
        ('"' + "[" * 1000 + '"', "record: '[[[["),
        ('"\\"' + "[" * 1000, "record: not JSON: Unterminated string"),
        ("\\" * 100_000, "record: not JSON"),
        ('\\"' * 100_000, "record: not JSON"),
        ("9" * 100_000, "record: the number 999999999999999999999999 does not fit 64 bits"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_text_that_is_no_record_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(RecordError) as error:
        from_json(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"created": math.nan}, "record cannot be written: Out of range float values"),
        ({"policy": {"limit": {1, 2}}}, "record cannot be written: Object of type set"),
        ({"created": -1.0}, "record.created: -1.0, expected a number >= 0"),
        ({"created": 1e308}, "record.created: 1e+308, expected at most 2.53402e+11"),
        ({"schema": 2}, "record.schema: 2, expected 1"),
        ({"graph": "x" * MAX_RECORD_BYTES}, f"record: over {MAX_RECORD_BYTES} bytes long"),
        ({"summary": "\udfff"}, "record cannot be written: 'utf-8' codec can't encode"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_could_not_be_read_again_is_not_written(change: Json, message: str) -> None:
    with pytest.raises(RecordError) as error:
        replace(record(7), **change).to_json()
    assert str(error.value).startswith(message)
