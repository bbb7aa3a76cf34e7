"""`cudnngraph plans export` and `import`: records, blobs, seeds, and hostile files."""

from __future__ import annotations

import base64
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cudnngraph import cli
from cudnngraph.cli import records, transfer
from plans_cache import Hit, PlanStore
from plans_cache.record import MAX_CREATED, PlanRecord, is_id
from tests.commands import Cli
from tests.cpu.plans_cache.test_record import signed
from tests.workers import cache_example

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("no_gpu")


# -- seeds -----------------------------------------------------------------------------------------


def shipped(record: PlanRecord) -> PlanRecord:
    """Without serialized plans, and what was neither measured nor taken."""
    steps = []
    for step in record.steps:
        known = [each for each in step.candidates if each.accepted or each.time_us is not None]
        steps.append(dataclasses.replace(step, candidates=tuple(known)))
    return dataclasses.replace(record.with_blob(None), steps=tuple(steps))


def test_seeds_are_exported_as_they_ship_and_serve(
    run: Cli, ids: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = tmp_path / "deep" / "seeds"
    code, out, _ = run("export", "--seeds", seeds)
    assert (code, out) == (0, f"7 seeds written to {seeds}\n")
    files = {path.relative_to(seeds).as_posix() for path in seeds.rglob("*") if path.is_file()}
    h200 = {f"nvidia-h200/{id}.json" for name, id in ids.items() if name != "a100"}
    assert files == {*h200, f"nvidia-a100-sxm4-80gb/{ids['a100']}.json"}
    store = PlanStore(None, seeds=seeds, strict=True)
    here = PlanStore(folder, seeds=None)
    for id in ids.values():
        seed, mine = store.get(id), here.get(id)
        assert isinstance(seed, Hit) and isinstance(mine, Hit)
        assert (seed.tier, seed.record) == ("seed", shipped(mine.record))
    monkeypatch.setattr(records, "PACKAGED_SEEDS", seeds)
    code, out, _ = run("verify", "--seeds", at=tmp_path / "none")
    assert (code, "7 entries checked, 0 replayed, 0 problems" in out) == (0, True)
    before = {path: path.read_bytes() for path in seeds.rglob("*.json")}
    assert run("export", "--seeds", seeds)[0] == 0  # again, over itself
    assert {path: path.read_bytes() for path in seeds.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("../../etc", "etc"),
        ("/", "unknown"),
        ("NVIDIA GeForce RTX™ 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_a_seed_stands_in_a_folder_below_whatever_the_gpu_is_called(gpu: str, name: str) -> None:
    assert transfer.seed_folder(gpu) == name


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "export takes a FILE or --seeds FOLDER, one of them"),
        (["file", "--seeds", "folder"], "export takes a FILE or --seeds FOLDER, one of them"),
        (["--seeds", "folder", "--with-blobs"], "seeds have no serialized plans"),
    ],
)
def test_an_export_that_makes_no_sense_writes_nothing(
    argv: list[str],
    said: str,
    run: Cli,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, out, err = run("export", *argv)
    assert (code, out, err.startswith(f"error: {said}")) == (2, "", True)
    assert list((tmp_path / "empty").iterdir()) == []


def test_steps_alone_are_exported_without_records(
    run: Cli, ids: dict[str, str], tmp_path: Path
) -> None:
    seeds = tmp_path / "seeds"
    code, out, _ = run("export", "--seeds", seeds, "--steps-only")
    assert (code, out) == (0, f"the steps of {len(ids)} records written to {seeds}\n")
    assert not [path for path in seeds.rglob("*.json") if is_id(path.stem)]
    code, out, err = run("export", tmp_path / "fleet.plans", "--steps-only")
    assert (code, out, "--steps-only needs --seeds FOLDER" in err) == (2, "", True)


def test_seeds_that_cannot_be_written_are_one_line(
    run: Cli, ids: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("export", "--seeds", tmp_path / "file")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "cannot be written" in err


# -- export, import --------------------------------------------------------------------------------


@pytest.fixture
def exported(run: Cli, ids: dict[str, str], tmp_path: Path) -> Path:
    """A file of the example with blobs."""
    file = tmp_path / "fleet.plans"
    code, out, _ = run("export", file, "--with-blobs")
    assert (code, out) == (0, f"7 records and 2 blobs written to {file}\n")
    return file


def test_records_go_through_a_pipe(ids: dict[str, str], folder: Path, tmp_path: Path) -> None:
    """A dash is standard output, which then holds nothing else, and standard input."""
    there = tmp_path / "there"
    plans = [sys.executable, "-m", "cudnngraph", "plans"]

    def call(*argv: object, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [*plans, *map(str, argv)]
        return subprocess.run(command, input=given, capture_output=True, timeout=100, cwd=ROOT)

    sent = call("export", "-", "--dir", folder)
    assert (sent.returncode, sent.stdout.splitlines()[0]) == (0, transfer.HEAD), sent.stderr
    assert b"7 records and 0 blobs written to /dev/stdout" in sent.stderr
    taken = call("import", "-", "--dir", there, given=sent.stdout)
    assert (taken.returncode, taken.stdout[:6]) == (0, b"7 new,"), taken.stderr
    assert PlanStore(there, seeds=None).get(ids["a100"])
    assert not (ROOT / "-").exists()


def test_records_travel_without_blobs(
    run: Cli, ids: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    file, there = tmp_path / "fleet.plans", tmp_path / "there"
    code, out, _ = run("export", file)
    assert (code, out) == (0, f"7 records and 0 blobs written to {file}, 2 blobs left out\n")
    assert base64.b64encode(cache_example.BLOB)[:40] not in file.read_bytes()
    assert [path.name for path in tmp_path.iterdir()].count(".tmp") == 0
    code, out, _ = run("import", file, at=there)
    assert (code, out) == (0, "7 new, 0 replaced, 0 the same, 0 kept, 0 refused\n")
    here, gone = PlanStore(folder, seeds=None), PlanStore(there, seeds=None)
    for id in ids.values():
        mine, theirs = here.get(id), gone.get(id)
        assert isinstance(mine, Hit) and isinstance(theirs, Hit)
        assert (theirs.record, theirs.blob) == (mine.record.with_blob(None), None)
    assert run("import", file, at=there)[1].startswith("0 new, 0 replaced, 7 the same")


def test_blobs_come_in_only_when_they_are_trusted(
    run: Cli, ids: dict[str, str], exported: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    code, out, _ = run("import", exported, at=there)
    assert (code, list(there.rglob("*.blob"))) == (0, [])
    assert "2 blobs dropped: they hold device code; --trust-blobs takes them" in out
    code, out, _ = run("import", exported, "--trust-blobs", at=there)
    assert (code, out) == (
        0,
        "0 new, 2 replaced, 5 the same, 0 kept, 0 refused\n2 blobs taken\n",
    )
    found = PlanStore(there, seeds=None).get(ids["tuned"])
    assert isinstance(found, Hit) and found.blob == cache_example.BLOB


def test_an_import_keeps_what_is_newer_here_and_says_so(
    run: Cli, ids: dict[str, str], exported: Path, folder: Path
) -> None:
    store = PlanStore(folder, seeds=None)
    made = cache_example.records(time.time())
    newer = dataclasses.replace(made["cut"], versions={"torch": "3.0"})
    older = dataclasses.replace(made["old"], created=5.0)
    store.put(newer)
    store.put(older)
    code, out, _ = run("import", exported)
    assert code == 0
    assert out.splitlines()[:2] == [
        f"kept, as new or newer here (--replace takes the file's): {ids['cut'][:12]}",
        "0 new, 1 replaced, 5 the same, 1 kept, 0 refused",
    ]
    found = PlanStore(folder, seeds=None).get(ids["cut"])
    assert isinstance(found, Hit) and found.record == newer
    assert "1 replaced, 6 the same, 0 kept" in run("import", exported, "--replace")[1]
    found = PlanStore(folder, seeds=None).get(ids["cut"])
    assert isinstance(found, Hit) and found.record.versions == {
        "frontend": "1.28.0",
        "torch": "2.11.0+cu130",
    }


@pytest.mark.parametrize(
    "created", [1e308, MAX_CREATED, time.time() + 1e9], ids=["1e308", "year 9999", "in 30 years"]
)
def test_a_record_of_a_time_to_come_blocks_no_import(
    created: float, run: Cli, ids: dict[str, str], exported: Path, folder: Path, tmp_path: Path
) -> None:
    id = ids["cut"]
    (file,) = folder.rglob(f"{id}.json")
    body = json.loads(file.read_bytes())
    body["created"] = created
    body["versions"] = {"torch": "0.0"}
    file.write_text(signed(body))
    head, *lines = exported.read_bytes().splitlines()
    code, out, err = run("import", exported)
    assert code == 0, err
    assert ", 6 the same, 0 kept, 0 refused" in out
    found = PlanStore(folder, seeds=None).get(id)
    assert isinstance(found, Hit) and found.record.versions == {
        "frontend": "1.28.0",
        "torch": "2.11.0+cu130",
    }
    # The other way round: it takes the place of nothing.
    exported.write_bytes(b"\n".join([head, signed(body).encode(), *lines]))
    code, out, err = run("import", exported)
    assert (code, created == 1e308) in ((0, False), (1, True)), err
    assert "0 new, 0 replaced" in out
    found = PlanStore(folder, seeds=None).get(id)
    assert isinstance(found, Hit) and found.record.versions == {
        "frontend": "1.28.0",
        "torch": "2.11.0+cu130",
    }


def _with(exported: Path, *lines: bytes) -> Path:
    """A file with a good head, then ``lines``, then a record that is right."""
    good = exported.read_bytes().splitlines()[-1]
    if good.startswith(b'{"blob"'):
        good = exported.read_bytes().splitlines()[-2]
    exported.write_bytes(b"\n".join([transfer.HEAD, *lines, good, b""]))
    return exported


def _record_line(exported: Path, **changes: object) -> bytes:
    """A record's line with some fields changed and the checksum left as it was."""
    body = json.loads(exported.read_bytes().splitlines()[1])
    return json.dumps({**body, **changes}).encode()


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (lambda file: _record_line(file, id="../../../etc/passwd"), "record.checksum: does not"),
        (lambda file: _record_line(file, summary="changed"), "record.checksum: does not match"),
        (lambda file: b'{"__class__": "os.system"}', "the field 'schema' is missing"),
        (lambda file: b"[" * 100_000, "nested more than"),
        (lambda file: b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than"),
        (lambda file: b'"' + b"x" * (5 << 20) + b'"', "bytes long"),
        (lambda file: b"\x80\x04\x95cos\nsystem\n", "not UTF-8"),
        (lambda file: b'{"schema": 1e999}', "too large"),
        (lambda file: b'{"schema": 1, "schema": 1}', "there twice"),
        (lambda file: b"null", "expected an object"),
        (lambda file: b'{"blob":"AAAA"}', "a blob without a record"),
    ],
)
def test_a_hostile_line_is_refused_and_the_rest_is_taken(
    hostile: Callable[[Path], bytes], said: str, run: Cli, exported: Path, tmp_path: Path
) -> None:
    there = tmp_path / "deep" / "there"
    before = {path for path in tmp_path.rglob("*") if "deep" not in path.parts}
    code, out, err = run("import", _with(exported, hostile(exported)), "--trust-blobs", at=there)
    assert code == 1
    assert err.startswith("refused line 2: ") and said in err
    assert len(err) < 2000
    assert out.startswith("1 new, ") and " kept, " in out
    assert len([*there.rglob("*.json")]) == 1
    assert {path for path in tmp_path.rglob("*") if "deep" not in path.parts} == before


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (base64.b64encode(b"other code"), "a blob that is not the one its record describes"),
        (b"!!!!", "a blob that is not in base64"),
        (base64.b64encode(b"x" * 5_000_000), "a blob that is not the one its record describes"),
    ],
)
def test_a_blob_that_is_not_the_records_is_refused_and_the_record_taken(
    blob: bytes, said: str, run: Cli, exported: Path, ids: dict[str, str], tmp_path: Path
) -> None:
    there = tmp_path / "there"
    lines = exported.read_bytes().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith(b'{"blob"'))
    lines[at] = b'{"blob":"' + blob + b'"}'
    exported.write_bytes(b"\n".join(lines))
    code, out, err = run("import", exported, "--trust-blobs", at=there)
    assert (code, said in err) == (1, True)
    assert out.startswith("7 new, ")
    assert len([*there.rglob("*.blob")]) == 1


def test_a_blob_cut_short_by_the_end_of_the_file_is_refused(
    run: Cli, exported: Path, tmp_path: Path
) -> None:
    lines = exported.read_bytes().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith(b'{"blob"'))
    exported.write_bytes(b"\n".join([*lines[:at], lines[at][:100]]))
    code, _, err = run("import", exported, "--trust-blobs", at=tmp_path / "there")
    assert (code, "cut short" in err) == (1, True)


def test_a_huge_line_is_skipped_without_being_held(
    run: Cli, exported: Path, tmp_path: Path
) -> None:
    import tracemalloc

    good = exported.read_bytes().splitlines()[1]
    with open(exported, "wb") as stream:
        stream.write(transfer.HEAD + b'\n{"blob":"')
        for _ in range(64):
            stream.write(b"A" * (1 << 20))
        stream.write(b'"}\n' + good + b"\n")
    tracemalloc.start()
    code, out, _ = run("import", exported, at=tmp_path / "there")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (code, out.startswith("1 new")) == (1, True)
    assert peak < 24 << 20


def test_a_file_that_is_too_long_ends_the_import(
    run: Cli, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_FILE_BYTES", 5000)
    code, _, err = run("import", exported, at=tmp_path / "there")
    assert (code, err.count("\n"), "GiB long" in err) == (1, 1, True)


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04", b"[]\n", b'{"cudnngraph_plans":2}\n'])
def test_a_file_of_something_else_is_one_line(text: bytes, run: Cli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(text)
    code, out, err = run("import", file)
    assert (code, out) == (1, "")
    assert err.startswith("error: not a file of plans") and err.count("\n") == 1


def test_files_that_cannot_be_read_or_written_are_one_line(
    run: Cli, ids: dict[str, str], tmp_path: Path
) -> None:
    for argv in (("import", tmp_path / "missing"), ("export", tmp_path / "no" / "file")):
        code, out, err = run(*argv)  # type: ignore[arg-type]
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert ("No such file" if argv[0] == "import" else "there is no folder") in err
    code, _, err = run("export", tmp_path / "file", at=tmp_path / "empty")
    assert (code, err) == (1, f"error: no plan is in {tmp_path / 'empty'}\n")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("place", [".", "/", ""])
def test_a_folder_is_no_file_to_export_to(
    place: str, ids: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plans", "export", place, "--dir", str(folder)]) == 2
    said = f"error: {place or '.'} is a folder; give the name of a file\n"
    assert capsys.readouterr() == ("", said)
