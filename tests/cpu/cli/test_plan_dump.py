"""`cudnngraph plan-dump`: the table, the filters, one entry in full, the JSON, the pictures."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cudnngraph import cli
from cudnngraph.cli import records as entries
from cudnngraph.cli.plan_dump import bar
from cudnngraph.explain import draw
from plans_cache import PlanRecord, PlanStore, StepRecord
from plans_cache.record import MAX_TIME_US
from plans_cache.store import Entry, Hit
from tests import python
from tests.workers import cache_example

SVG = "{http://www.w3.org/2000/svg}"
Dump = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The directory, and the ids by name."""
    folder = tmp_path_factory.mktemp("cache") / "plans"
    return folder, cache_example.make(folder)


@pytest.fixture
def ids(example: tuple[Path, dict[str, str]]) -> dict[str, str]:
    return example[1]


@pytest.fixture
def dump(example: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> Dump:
    """Runs the command on the example: exit code, output, errors."""

    def call(*argv: str, folder: Path | None = None) -> tuple[int, str, str]:
        code = cli.main(
            ["plan-dump", "--no-seeds", "--dir", str(folder or example[0]), *map(str, argv)]
        )
        return code, *capsys.readouterr()

    return call


def cells(text: str) -> list[list[str]]:
    """A piped table: its head and rows, without the line below it."""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()[:-1]]


def shown(text: str, ids: dict[str, str]) -> list[str]:
    """The entries of a piped table by name, in its order."""
    names = {id[:12]: name for name, id in ids.items()}
    return [names[row[0]] for row in cells(text)[1:]]


# -- the table -------------------------------------------------------------------------------------


def test_every_plan_is_a_row_of_the_table(dump: Dump, ids: dict[str, str]) -> None:
    code, out, err = dump()
    assert (code, err) == (0, "")
    head, *rows = cells(out)
    assert head == list(entries.COLUMNS)
    assert len(rows) == len(ids) == 7
    by_id = {row[0]: row[1:] for row in rows}
    assert by_id[ids["tuned"][:12]] == [
        "conv → bias → relu",
        "8x64x56x56, 64x64x3x3, 64 → 8x64x56x56",
        "f16",
        "channels_last",
        "NVIDIA H200",
        "9.19.0",
        "4.0 KiB",
        "10.0 µs",
        "disk",
        "1 h",
        "engine 44 (IDX_MODE=0 TILE_SIZE=2)",
    ]
    cut = by_id[ids["cut"][:12]]
    assert (cut[0], cut[6], cut[7]) == ("conv | bias → gelu", "1.5 KiB", "-")
    assert cut[-1] == "engine 0 | engine 3 (TILE_SIZE=1)"
    assert by_id[ids["torch"][:12]][-1] == "torch"
    assert by_id[ids["old"][:12]][5] == "9.10.2"
    assert out.splitlines()[-1].startswith("7 plans, ")
    assert "\x1b" not in out and not set("┃│┏") & set(out)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (["gpu=h200"], {"tuned", "padded", "cut", "torch", "sdpa", "old"}),
        (["engine=4"], set()),
        (["engine=44"], {"tuned", "padded", "old"}),
        (["engine=44", "cudnn=9.19"], {"tuned", "padded"}),
        (["op=sdpa"], {"torch", "sdpa"}),
        (["op=sdpa", "dtype=f32"], {"torch"}),
        (["op=bias"], {"tuned", "padded", "cut", "a100", "old"}),
        (["TILE_SIZE=2"], {"tuned"}),
        (["blob=yes"], {"tuned", "sdpa"}),
        (["shapes=54x54"], {"padded"}),
        (["A100"], {"a100"}),
        (["tier=seed"], set()),
    ],
)
def test_filters_keep_what_meets_them_all(
    wanted: Sequence[str], names: set[str], dump: Dump, ids: dict[str, str]
) -> None:
    code, out, _ = dump(*(part for text in wanted for part in ("--filter", text)))
    if not names:
        assert (code, out.startswith("no plan matches in ")) == (1, True)
        return
    assert (code, set(shown(out, ids))) == (0, names)
    assert out.splitlines()[-1].startswith(f"{len(names)} of 7 plans, ")


def test_rows_are_sorted_by_the_quantity_and_not_by_its_text(
    dump: Dump, ids: dict[str, str]
) -> None:
    _, out, _ = dump("--sort", "age")
    assert shown(out, ids) == ["sdpa", "torch", "tuned", "padded", "cut", "a100", "old"]
    _, out, _ = dump("--sort", "time", "--filter", "time=µs", "--reverse")
    assert shown(out, ids) == ["torch", "sdpa", "a100", "old", "tuned"]
    _, out, _ = dump("--sort", "cudnn")
    assert shown(out, ids)[0] == "old"
    _, out, _ = dump()
    assert [ids[name] for name in shown(out, ids)] == sorted(ids.values())


def test_an_id_alone_keeps_the_entries_that_begin_so(dump: Dump, ids: dict[str, str]) -> None:
    code, out, _ = dump(ids["cut"][:8])
    assert (code, shown(out, ids)) == (0, ["cut"])
    assert dump("0123456789")[0] == 1


def test_an_empty_or_missing_cache_is_said_and_no_failure(dump: Dump, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert dump(folder=folder) == (0, f"no plan is in {folder}\n", "")
        assert dump("--filter", "H200", folder=folder)[0] == 1


@pytest.mark.parametrize(
    ("argv", "listed"),
    [
        ([], False),
        (["--seeds"], True),
        (["--filter", "tier=seed"], True),
        (["--filter", "tier=seed", "--no-seeds"], False),
        (["{id}"], True),
        (["--full", "{id}"], True),
    ],
)
def test_what_ships_is_listed_when_it_is_asked_for(
    argv: list[str],
    listed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = cache_example.records(time.time())["a100"]
    gpu = tmp_path / "seeds" / "nvidia-a100"
    gpu.mkdir(parents=True)
    (gpu / f"{seed.id}.json").write_text(seed.to_json())
    monkeypatch.setattr(entries, "PACKAGED_SEEDS", tmp_path / "seeds")
    given = [text.format(id=seed.id[:12]) for text in argv]
    code = cli.main(["plan-dump", "--dir", str(tmp_path / "none"), *given])
    out = capsys.readouterr().out
    assert (code, seed.id[:12] in out) == (0 if listed or not argv else 1, listed)
    assert listed or out.startswith("no plan is in ")
    assert ("--seeds lists those that ship" in out) == (not argv)


def test_the_directory_is_that_of_the_settings_when_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with entries.settings.override(cache_dir=tmp_path / "kept"):
        assert cli.main(["plan-dump", "--no-seeds"]) == 0
    assert capsys.readouterr().out == f"no plan is in {tmp_path / 'kept'}\n"


# -- a terminal ------------------------------------------------------------------------------------


def in_terminal(
    width: int, dump: Dump, monkeypatch: pytest.MonkeyPatch, *argv: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = dump(*argv)
    return code, re.sub(r"\x1b\[[0-9;]*m", "", out)


def test_a_wide_terminal_gets_every_column_drawn(
    dump: Dump, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = in_terminal(300, dump, monkeypatch)
    assert code == 0
    assert all(name in out.splitlines()[1] for name in entries.COLUMNS)
    assert "┃" in out and "too narrow" not in out


def test_a_narrow_terminal_gets_whole_cells_of_fewer_columns(
    dump: Dump, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = in_terminal(80, dump, monkeypatch)
    assert code == 0
    table = [line for line in out.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80
    assert "…" not in out
    assert all(id[:12] in out for id in ids.values())
    assert "too narrow for layout, age, cudnn, shapes" in out
    assert "10.0 µs" in out


@pytest.mark.parametrize("width", [20, 40])
def test_a_terminal_too_narrow_for_whole_cells_gets_every_character(
    width: int, dump: Dump, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = in_terminal(width, dump, monkeypatch, "--filter", "TILE_SIZE=2")
    cells = [line.split("│")[1:-1] for line in out.splitlines() if line[:1] == "│"]
    assert {len(line) for line in cells} == {4}
    whole = ["".join("".join(column).split()) for column in zip(*cells, strict=True)]
    assert whole == [
        ids["tuned"][:12],
        "conv→bias→relu",
        "10.0µs",
        "engine44(IDX_MODE=0TILE_SIZE=2)",
    ]


# -- one entry -------------------------------------------------------------------------------------


def test_full_shows_code_candidates_with_bars_and_the_key(dump: Dump, ids: dict[str, str]) -> None:
    code, out, _ = dump("--full", ids["tuned"][:10])
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == ids["tuned"]
    assert "t2 = conv(t0, t1, padding=((1, 1), (1, 1))) # f32[8, 64, 56, 56] channels_last" in lines
    assert "NVIDIA H200, cuDNN 9.19.0, frontend 1.28.0" in lines
    assert "step 1 of 1: conv → bias → relu" in lines
    at = lines.index("time workspace candidate reason") + 1
    tile = "engine 44 (IDX_MODE=0 TILE_SIZE={})"
    assert lines[at : at + 5] == [
        f"taken 10.0 µs {'█' * 10} 4.0 KiB {tile.format(2)} fastest of 3 measured",
        f"15.0 µs {'█' * 15} 8.0 KiB {tile.format(4)} slower by 50 %",
        f"30.0 µs {'█' * 30} 16.0 KiB {tile.format(8)} slower by 200 %",
        "- - engine 26 barred by the policy",
        f"- 32.0 KiB {tile.format(16)} does not build: CUDNN_STATUS_NOT_SUPPORTED",
    ]
    assert "policy.allow_tf32: false" in lines
    assert "sm_count: 132" in lines


def test_full_shows_what_was_taken_in_place_of_thresholds(
    dump: Dump, example: tuple[Path, dict[str, str]], ids: dict[str, str], tmp_path: Path
) -> None:
    whole = PlanStore(example[0], seeds=None).get(ids["tuned"])
    assert isinstance(whole, Hit)
    assert "what was measured" not in dump("--full", ids["tuned"])[1]
    extra = {"instead": {"packed_by_flash": False}, "imported": {"average_by_convolution": []}}
    PlanStore(tmp_path / "plans", seeds=None).put(dataclasses.replace(whole.record, extra=extra))
    _, out, _ = dump("--full", ids["tuned"], folder=tmp_path / "plans")
    assert 'rewritten by what was measured: {"packed_by_flash": false}' in out
    assert 'its model imported by what was measured: {"average_by_convolution": []}' in out


def test_full_shows_the_longest_times_that_a_record_may_have(dump: Dump, tmp_path: Path) -> None:
    made = cache_example.records(time.time())["tuned"]
    (step,) = made.steps
    times = (0.0, MAX_TIME_US, 5e-324, None, 1.0)
    candidates = tuple(
        dataclasses.replace(each, time_us=time_us)
        for each, time_us in zip(step.candidates, times, strict=True)
    )
    longest = dataclasses.replace(step, time_us=MAX_TIME_US, candidates=candidates)
    made = dataclasses.replace(made, steps=(longest,) * 3)
    assert PlanStore(tmp_path / "plans", seeds=None).put(made)
    code, out, err = dump("--full", made.id, folder=tmp_path / "plans")
    assert (code, err) == (0, "")
    assert "time 3000000000000.0 µs\n" in out
    assert out.count("█" * 30) == 3 and "█" * 31 not in out
    body = json.loads(dump("--json", folder=tmp_path / "plans")[1])
    assert body["entries"][0]["time_us"] == 3 * MAX_TIME_US


def test_full_shows_each_step_and_why_the_graph_was_cut(dump: Dump, ids: dict[str, str]) -> None:
    _, out, _ = dump("--full", ids["cut"])
    assert "step 1 of 2: conv\n  engine 0, workspace 1.5 KiB, time -" in out
    assert "step 2 of 2: bias → gelu\n  engine 3 (TILE_SIZE=1)" in out
    assert "no engine supports gelu behind a convolution" in out


def test_an_id_that_is_not_there_is_one_line(dump: Dump, tmp_path: Path) -> None:
    assert dump("--full", "ffff" * 16)[0::2] == (
        1,
        f"error: no entry's id begins with '{'ffff' * 16}'\n",
    )
    code, out, err = dump("--full", "", folder=tmp_path)
    assert (code, out, err) == (1, "", "error: no entry's id begins with ''\n")


def test_an_unclear_id_lists_what_it_could_be() -> None:
    record = cache_example.records(time.time())["cut"]
    found = [
        entries.Stored(entries.Entry(id + "0" * 60, "disk", None, record, 100, 0, 60.0), record)
        for id in ("ab01", "ab02", "cd03")
    ]
    assert entries.find(found, "cd").id == "cd03" + "0" * 60
    with pytest.raises(entries.CacheError) as caught:
        entries.find(found, "ab")
    assert str(caught.value) == (
        "2 ids begin with 'ab': ab0100000000, ab0200000000; give more of it"
    )


@pytest.mark.parametrize(
    ("time_us", "slowest_us", "length"),
    [(30.0, 30.0, 30), (10.0, 30.0, 10), (0.1, 3000.0, 1), (None, 30.0, 0), (0.0, 0.0, 0)],
)
def test_bars_are_as_long_as_the_time(
    time_us: float | None, slowest_us: float, length: int
) -> None:
    assert bar(time_us, slowest_us) == "█" * length


# -- JSON ------------------------------------------------------------------------------------------


def test_json_is_one_object_of_a_fixed_shape(
    dump: Dump, ids: dict[str, str], example: tuple[Path, dict[str, str]]
) -> None:
    code, out, _ = dump("--json", "--sort", "age")
    assert code == 0
    body: dict[str, Any] = json.loads(out)
    assert list(body) == ["schema", "directory", "entries", "damaged"]
    assert (body["schema"], body["directory"], body["damaged"]) == (1, str(example[0]), [])
    assert [each["id"] for each in body["entries"]][-1] == ids["old"]
    (tuned,) = (each for each in body["entries"] if each["id"] == ids["tuned"])
    assert list(tuned) == [
        *("id", "summary", "graph", "inputs", "outputs", "dtypes", "layout", "gpu", "cudnn"),
        *("frontend", "steps", "policy", "workspace_bytes", "time_us", "tier", "created", "age_s"),
        "unused_s",
        *("record_bytes", "blob_bytes", "path"),
    ]
    assert tuned["inputs"][0] == "f16[8, 64, 56, 56] channels_last"
    assert tuned["steps"] == [
        {
            "kind": "cudnn",
            "ops": ["conv", "bias", "relu"],
            "engine": 44,
            "knobs": {"IDX_MODE": 0, "TILE_SIZE": 2},
            "workspace_bytes": 4096,
            "time_us": 10.0,
            "candidates": 5,
        }
    ]
    assert tuned["blob_bytes"] == len(cache_example.BLOB)
    assert Path(tuned["path"]).is_file()
    assert 3600 <= tuned["age_s"] < 3900


def test_json_of_nothing_is_still_the_object(dump: Dump) -> None:
    code, out, _ = dump("--json", "--filter", "nowhere")
    assert (code, json.loads(out)["entries"]) == (1, [])


def test_json_of_one_entry_holds_the_record_itself(dump: Dump, ids: dict[str, str]) -> None:
    code, out, _ = dump("--full", ids["tuned"], "--json")
    body = json.loads(out)
    assert (code, list(body)) == (0, ["schema", "entry", "record"])
    assert body["record"]["steps"][0]["candidates"][0]["time_us"] == 15.0
    assert body["entry"]["id"] == body["record"]["id"] == ids["tuned"]


# -- damage and hostility --------------------------------------------------------------------------


def test_a_damaged_file_is_named_and_the_rest_is_shown(dump: Dump, tmp_path: Path) -> None:
    ids = cache_example.make(tmp_path / "plans", damaged=True)
    code, out, err = dump("--json", folder=tmp_path / "plans")
    assert code == 1
    assert err.startswith(f"damaged: {ids['old']}: ")
    body = json.loads(out)
    assert len(body["entries"]) == 6
    assert [each["id"] for each in body["damaged"]] == [ids["old"]]


def _hostile() -> PlanRecord:
    record = cache_example.records(time.time())["cut"]
    evil = '\x1b[2J\x07\u202e<b a="1">&\ufffe]]>"\\'
    steps = tuple(
        dataclasses.replace(
            step,
            ops=tuple(evil for _ in step.ops),
            inputs=tuple((name, evil) for name, _ in step.inputs),
            knobs=((evil, 1),),
        )
        for step in record.steps
    )
    key = (("ops", "][" * 3), ("inputs", '{"%0": [[1, 2], [1], "torch.float16"], "x": 7}'))
    env = (("gpu_name", json.dumps(evil)), ("cudnn_version", '"x"'))
    return dataclasses.replace(
        record, summary=evil, graph=evil, steps=steps, key=(*key, ("outputs", "7")), env=env
    )


def test_texts_of_a_record_cannot_steer_the_terminal(dump: Dump, tmp_path: Path) -> None:
    hostile = _hostile()
    assert PlanStore(tmp_path / "plans", seeds=None).put(hostile)
    for argv in ([], ["--full", hostile.id], ["--filter", "nothing"], ["--json"]):
        _, out, err = dump(*argv, folder=tmp_path / "plans")
        assert not set("\x1b\x07\u202e") & set(out + err)
    _, out, _ = dump("--full", hostile.id, folder=tmp_path / "plans")
    assert r"\x1b[2J\x07\x202e<b" in out


_TENSOR = '[[1, 2], [2, 1], "torch.float16"]'


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("key", "inputs", '{"%0": [[Infinity, 2], [2, 1], "torch.float16"]}'),
        ("key", "inputs", f'{{"%{"9" * 5000}": {_TENSOR}, "%1": {_TENSOR}}}'),
        ("key", "compute_dtype", '"0x1.0p+9999"'),
        ("env", "cudnn_version", f'"{"9" * 5000}"'),
        ("env", "cudnn_version", "[" * 970 + "]" * 970),
    ],
    ids=["infinite", "long name", "float", "long version", "deep"],
)
def test_a_foreign_record_is_one_line_among_the_others(
    part: str, name: str, value: str, dump: Dump, tmp_path: Path
) -> None:
    folder = tmp_path / "plans"
    ids = cache_example.make(folder)
    record = cache_example.records(time.time())["tuned"]
    components = {**dict(getattr(record, part)), name: value}
    foreign = dataclasses.replace(record, **{part: tuple(components.items())})
    assert PlanStore(folder, seeds=None).put(foreign)
    for argv in ([], ["--sort", "cudnn"], ["--sort", "shapes"], ["--filter", "conv"], ["--json"]):
        code, out, err = dump(*argv, folder=folder)
        assert (code, err) == (0, "")
        assert foreign.id[:12] in out and ids["tuned"][:12] in out
    assert dump("--full", foreign.id, folder=folder)[0] == 0
    assert cli.main(["plans", "diff", foreign.id, ids["tuned"], "--dir", str(folder)]) == 0
    assert cli.main(["plans", "explain-miss", foreign.id, "--dir", str(folder)]) == 0


def test_what_is_nested_too_deep_to_be_written_is_left_out() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert entries.json_text(value) == "…"
    assert entries.json_text({"a": [1, None]}) == '{"a": [1, null]}'


def test_tensors_are_sorted_by_their_numbers() -> None:
    records = cache_example.records(time.time())
    pairs = {f"%{n}": [[n + 1], [1], "torch.float16"] for n in (10, 9, 0, 2)}
    key = {**dict(records["tuned"].key), "inputs": json.dumps(pairs)}
    one = entries.Stored(
        Entry("0" * 64, "disk", None, None, 0, 0, 0.0),
        dataclasses.replace(records["tuned"], key=tuple(key.items())),
    )
    assert [each.shape for each in one.tensors[0]] == [(1,), (3,), (10,), (11,)]


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tuned", "cut", "torch", "sdpa"])
def test_the_svg_has_one_box_for_each_step_and_one_for_each_op(
    name: str, dump: Dump, ids: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.svg"
    code, out, _ = dump(ids[name], "--graph", str(file))
    assert (code, out) == (0, f"{ids[name][:12]} drawn into {file}\n")
    record = cache_example.records(time.time())[name]
    root = ET.parse(file).getroot()
    assert root.tag == f"{SVG}svg"
    boxes = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "box"]
    assert len(boxes) == len(record.steps)
    ops = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "op"]
    assert len(ops) == sum(len(step.ops) for step in record.steps)
    texts = [each.text for each in root.iter(f"{SVG}text")]
    for number, step in enumerate(record.steps, 1):
        title = "cuDNN" if step.kind == "cudnn" else "torch"
        assert f"step {number}: {title}" in texts
        for tensor, kind in (*step.inputs, *step.outputs):
            assert f"{tensor}: {kind}" in texts


def test_boxes_of_steps_stand_below_each_other_within_the_picture() -> None:
    root = ET.fromstring(draw.svg(cache_example.records(time.time())["cut"]))
    boxes = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "box"]
    (y0, h0), (y1, h1) = [(float(b.attrib["y"]), float(b.attrib["height"])) for b in boxes]
    assert y0 + h0 < y1
    assert y1 + h1 <= float(root.attrib["height"])
    assert float(boxes[0].attrib["x"]) + float(boxes[0].attrib["width"]) < float(
        root.attrib["width"]
    )


def test_what_skips_a_step_runs_around_it_and_no_text_is_cut_off() -> None:
    kind = "f16[8, 64, 56, 56] channels_last"
    record = cache_example.records(time.time())["cut"]
    first, second = record.steps

    def step(ins: Sequence[str], outs: Sequence[str]) -> StepRecord:
        types = [tuple((name, kind) for name in names) for names in (ins, outs)]
        return dataclasses.replace(second, inputs=types[0], outputs=types[1])

    steps = (
        dataclasses.replace(first, inputs=(("t0", "f16"),), outputs=(("t2", kind), ("t3", kind))),
        step(["t2"], ["t4"]),
        step(["t4", "t2", "t3"], ["t5"]),
    )
    root = ET.fromstring(draw.svg(dataclasses.replace(record, steps=steps)))
    paths = [each.attrib["d"] for each in root.iter(f"{SVG}path") if each.get("marker-end")]
    assert len(paths) == 6  # t0, t5, two from step to step, two around step 2
    around = [path for path in paths if path.count("H") == 2]
    assert len(around) == len({path.split(" H")[1] for path in around}) == 2
    for each in root.iter(f"{SVG}text"):
        x, wide = float(each.attrib["x"]), 7.25 * len(str(each.text))
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[each.attrib["text-anchor"]]
        assert x - share * wide >= 0 and x + (1 - share) * wide <= float(root.attrib["width"])


def test_the_dot_has_one_cluster_for_each_step(
    dump: Dump, ids: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.dot"
    assert dump(ids["cut"], "--graph", str(file))[0] == 0
    text = file.read_text(encoding="utf-8")
    assert text.count("subgraph cluster_") == 2
    assert text.count("{") == text.count("}")
    assert 's1_0 -> s2_0 [label="f32[2, 4, 8, 8]", ltail=cluster_1, lhead=cluster_2];' in text
    assert '"t0: f32[2, 3, 8, 8]" -> s1_0' in text


def test_a_hostile_record_still_gives_a_well_formed_picture() -> None:
    hostile = _hostile()
    root = ET.fromstring(draw.svg(hostile))
    assert [each.get("class") for each in root.iter(f"{SVG}g")] == ["step cudnn"] * 2
    for line in draw.dot(hostile).splitlines():
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", line)
        assert '"' not in bare and "<b" not in bare


def test_a_picture_that_cannot_be_written_is_one_line(
    dump: Dump, ids: dict[str, str], tmp_path: Path
) -> None:
    code, _, err = dump(ids["cut"], "--graph", str(tmp_path / "no" / "plan.svg"))
    assert (code, err.count("\n"), "cannot be written" in err) == (1, 1, True)


# -- wrong calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--filter", "colour=red"], "no field 'colour' to filter by; there are id, graph"),
        (["--sort", "colour"], "invalid choice: 'colour'"),
        (["--graph", "plan.svg"], "--graph needs an ID"),
        (["abc", "--graph", "plan.png"], "ends in .svg or .dot"),
        (["abc", "--full", "abc"], "--full takes the ID itself"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(argv: list[str], said: str, dump: Dump) -> None:
    code, out, err = dump(*argv)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_directory_that_cannot_be_used_is_one_line(dump: Dump, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code, out, err = dump(folder=file)
    assert (code, out) == (1, "")
    assert err == f"error: the cache directory cannot be used: {file} is not a directory\n"


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan-dump", "--help"]) == 0
    assert "Exit code: 0 when all went well; 1" in " ".join(capsys.readouterr().out.split())


def test_it_runs_piped_in_a_process_and_imports_neither_cudnn_nor_cuda(
    example: tuple[Path, dict[str, str]],
) -> None:
    code = (
        "import sys, torch; theirs = set(sys.modules); "  # torch imports cuda from 2.15 on
        "from cudnngraph.cli import main; "
        f"code = main(['plan-dump', '--dir', {str(example[0])!r}, '--sort', 'age']); "
        "assert not {'cudnn', 'cuda', 'rich'} & (set(sys.modules) - theirs); sys.exit(code)"
    )
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = python.run("-c", code, cwd=Path(__file__).parents[3], env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == list(entries.COLUMNS)


def test_a_reader_that_has_read_enough_causes_no_traceback(
    example: tuple[Path, dict[str, str]],
) -> None:
    command = [sys.executable, "-m", "cudnngraph", "plan-dump", "--dir", str(example[0])]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (141, b"")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
    ],
)
def test_what_stops_a_command_is_one_line(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr(cli.plan_dump, "run", run)
    assert cli.main(["plan-dump"]) == code
    assert capsys.readouterr() == ("", said)


def redirected(
    folder: Path, redirection: str, before: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    command = f"exec {sys.executable} -m cudnngraph plan-dump --no-seeds --dir {folder}"
    return subprocess.run(
        ["sh", "-c", f"{before} {command} {redirection}"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **env},
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.skipif(os.name != "posix", reason="redirects as sh does")
def test_any_standard_output_will_do(example: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    closed = redirected(example[0], ">&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    both = redirected(example[0], ">&- 2>&-")
    assert both.returncode == 0
    ascii_only = redirected(example[0], "", PYTHONIOENCODING="ascii")
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert "conv ? bias ? relu" in ascii_only.stdout
    full = redirected(example[0], f"> {tmp_path / 'file'}", before="ulimit -f 0;")
    assert (full.returncode, full.stderr) == (1, "error: [Errno 27] File too large\n")
