"""Marks of first launches: of dead processes and of living ones, damaged, and not to be had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from plans_cache import launches as module
from plans_cache.launches import MAX_BYTES, Launches
from plans_cache.rejections import Plan
from tests.workers.launch_worker import STEP

PLAN = (4, (("TILE", 3),))
ROOT = Path(__file__).parents[3]


class Heard(list[tuple[str, Plan]]):
    """The plans that are rejected, in order."""

    def __call__(self, id: str, plan: Plan) -> None:
        self.append((id, plan))


def started(command: str, directory: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "tests.workers.launch_worker", command, str(directory)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def mark_in(directory: Path) -> Path:
    (path,) = (directory / "launching").glob("*.mark")
    return path


def left_by_the_dead(directory: Path, text: str | bytes) -> Path:
    """A mark that nobody holds."""
    Launches(directory).begin().close()
    path = directory / "launching" / "1234-dead.mark"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_mark_says_what_is_launched_and_goes(tmp_path: Path) -> None:
    mark = Launches(tmp_path).begin()
    path = mark_in(tmp_path)
    assert path.name.startswith(f"{os.getpid()}-") and path.read_bytes() == b""
    mark.set(STEP, PLAN)
    line = path.read_text().splitlines()[0]
    assert json.loads(line) == {"step": STEP, "engine": 4, "knobs": [["TILE", 3]]}
    mark.set(STEP, (7, ()))
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": STEP,
        "engine": 7,
        "knobs": [],
    }
    mark.clear()
    assert path.read_text().splitlines()[0] == ""
    mark.close()
    mark.close()
    assert list((tmp_path / "launching").iterdir()) == []


def test_what_a_process_did_not_come_back_from_is_rejected_once(tmp_path: Path) -> None:
    with started("hold", tmp_path) as process:
        assert said(process) == {"ready": True}
        heard = Heard()
        assert Launches(tmp_path).look(heard) == frozenset() and not heard, "its owner lives"
        mark_in(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = Launches(tmp_path)
    assert kept.look(heard) == {STEP} and heard == [(STEP, PLAN)]
    assert [path.name for path in (tmp_path / "launching").iterdir()] == [f"{STEP}.lost"]
    assert Launches(tmp_path).look(heard) == {STEP} and len(heard) == 1


def test_a_mark_of_this_process_is_that_of_a_living_one(tmp_path: Path) -> None:
    kept, heard = Launches(tmp_path), Heard()
    mark = kept.begin()
    mark.set(STEP, PLAN)
    assert kept.look(heard) == frozenset() and not heard
    mark.close()


def test_a_process_that_died_between_two_launches_says_nothing(tmp_path: Path) -> None:
    first = json.dumps({"step": STEP, "engine": 4, "knobs": []})
    path = left_by_the_dead(tmp_path, "\n" + first[1:] + "\n")
    heard = Heard()
    assert Launches(tmp_path).look(heard) == frozenset() and not heard
    assert not path.exists()


def test_a_shorter_plan_stands_before_the_rest_of_a_longer_one(tmp_path: Path) -> None:
    kept, heard = Launches(tmp_path), Heard()
    mark = kept.begin()
    mark.set(STEP, (44, tuple((f"KNOB_{n}", n) for n in range(20))))
    mark.set(STEP, (7, ()))
    left_by_the_dead(tmp_path, mark_in(tmp_path).read_bytes())
    assert kept.look(heard) == {STEP} and heard == [(STEP, (7, ()))]
    mark.close()


def test_an_exit_in_order_takes_the_marks_along(tmp_path: Path) -> None:
    mark = Launches(tmp_path).begin()
    mark.set(STEP, PLAN)
    module._close_all()
    assert list((tmp_path / "launching").iterdir()) == []
    mark.set(STEP, PLAN)  # by a thread that goes on
    mark.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_leaves_its_parents_mark_and_does_not_keep_it_alive(tmp_path: Path) -> None:
    with started("fork", tmp_path) as process:
        assert said(process) == {"child": 0, "engine": 4}
        sleeper = said(process)["sleeper"]
        assert process.wait() == -signal.SIGABRT
        try:
            os.kill(sleeper, 0)
            heard = Heard()
            assert Launches(tmp_path).look(heard) == {STEP} and heard == [(STEP, (4, ()))]
        finally:
            os.kill(sleeper, signal.SIGKILL)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "{}\n",
        "7\n",
        "null\n",
        "{\n",
        f'{{"step": "{STEP}", "engine": 4, "knobs": []}}',  # cut short before its end
        f'{{"step": "{STEP}", "engine": "4", "knobs": []}}\n',
        f'{{"step": "{STEP}", "engine": 4, "knobs": [["a"]]}}\n',
        f'{{"step": "{STEP}", "engine": 4}}\n',
        '{"step": "../../etc/passwd", "engine": 4, "knobs": []}\n',
        f'{{"step": "{STEP}\\n", "engine": 4, "knobs": []}}\n',
        '{"step": 7, "engine": 4, "knobs": []}\n',
        b"\xff\xfe\x00\n",
        "[" * 60_000 + "\n",
        " " * MAX_BYTES + "{}\n",
    ],
)
def test_a_mark_that_names_no_plan_rejects_nothing_and_is_removed(
    tmp_path: Path, text: str | bytes
) -> None:
    path, heard = left_by_the_dead(tmp_path, text), Heard()
    assert Launches(tmp_path).look(heard) == frozenset() and not heard
    assert not path.exists()


def _link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    target.write_text(json.dumps({"step": STEP, "engine": 4, "knobs": []}) + "\n")
    path.symlink_to(target)


def _folder(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_link, _folder, _fifo])
def test_what_is_no_file_is_left_out(tmp_path: Path, make: Any) -> None:
    path = left_by_the_dead(tmp_path, "")
    path.unlink()
    make(path)
    heard = Heard()
    assert Launches(tmp_path).look(heard) == frozenset() and not heard


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    left_by_the_dead(tmp_path, "")
    names = ["readme", ".mark2", "nothex.lost", "ab.lost", f"{STEP}.json"]
    for name in names:
        (tmp_path / "launching" / name).write_text("x")
    assert Launches(tmp_path).look(Heard()) == frozenset()
    assert sorted(os.listdir(tmp_path / "launching")) == sorted(names)


def _open_to_all(directory: Path) -> None:
    os.chmod(directory, 0o777)


def _a_file(directory: Path) -> None:
    (directory / "launching").write_text("x")


def _a_link(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir()
    (directory / "launching").symlink_to(directory.parent / "elsewhere")


@pytest.mark.parametrize("fault", [_open_to_all, _a_file, _a_link])
def test_where_nothing_can_be_written_nothing_is_marked_and_nothing_raises(
    tmp_path: Path, fault: Any
) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    fault(directory)
    kept, heard = Launches(directory), Heard()
    mark = kept.begin()
    mark.set(STEP, PLAN)
    mark.clear()
    mark.close()
    assert kept.look(heard) == frozenset() and not heard
    kept.note(STEP)
    assert kept.look(heard) == {STEP}, "in memory"
    assert not (tmp_path / "elsewhere").exists() or not os.listdir(tmp_path / "elsewhere")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_read_only_directory_marks_nothing(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o500)
    try:
        mark = Launches(tmp_path).begin()
        mark.set(STEP, PLAN)
        mark.close()
        assert Launches(tmp_path).look(Heard()) == frozenset()
    finally:
        os.chmod(tmp_path, 0o700)


def test_without_locks_nothing_is_marked_and_no_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(file: int) -> bool:
        raise OSError(37, "No locks available")

    path = left_by_the_dead(tmp_path, json.dumps({"step": STEP, "engine": 4, "knobs": []}) + "\n")
    monkeypatch.setattr("plans_cache.lock._try_lock", none)
    mark = Launches(tmp_path).begin()
    mark.set(STEP, PLAN)
    mark.close()
    heard = Heard()
    assert Launches(tmp_path).look(heard) == frozenset() and not heard, "who can tell?"
    assert os.listdir(tmp_path / "launching") == [path.name]


def test_a_full_disk_marks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = Launches(tmp_path).begin()

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    mark.set(STEP, PLAN)
    mark.close()
    monkeypatch.undo()
    assert os.listdir(tmp_path / "launching") == []


def test_without_a_directory_what_is_lost_stays_in_memory() -> None:
    kept = Launches(None)
    mark = kept.begin()
    mark.set(STEP, PLAN)
    mark.close()
    kept.note(STEP)
    assert kept.look(Heard()) == {STEP}


def test_threads_mark_and_look_at_once(tmp_path: Path) -> None:
    kept, heard, failed = Launches(tmp_path), Heard(), []

    def work() -> None:
        try:
            for _ in range(50):
                mark = kept.begin()
                mark.set(STEP, PLAN)
                kept.look(heard)
                mark.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not heard and not any(thread.is_alive() for thread in threads)
    kept.look(heard)
    assert os.listdir(tmp_path / "launching") == []
