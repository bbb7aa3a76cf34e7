"""Files that a user names: regular ones are replaced as a whole, all else is written into.

No test names a device node: written by a fault they would be gone from the machine.
"""

from __future__ import annotations

import ast
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cudnngraph import cli
from cudnngraph.bench.measure import Ceilings, Row
from cudnngraph.bench.report import Report
from cudnngraph.cli import bench
from cudnngraph.device import files
from plans_cache import PlanStore
from tests.workers import cache_example

ROOT = Path(__file__).parents[3]
posix = pytest.mark.skipif(os.name != "posix", reason="FIFOs and links as POSIX has them")
Write = Callable[[Path], tuple[int, str]]  # exit code and errors of a command that writes a file


@contextmanager
def reading(fifo: Path) -> Iterator[bytearray]:
    """Read what arrives in a FIFO, without waiting for a writer: so a fault ends in a failure."""
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    got, done = bytearray(), threading.Event()

    def read() -> None:
        while True:
            finished = done.is_set()
            try:
                part = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                part = b""
            got.extend(part)
            if not part and finished:
                return
            if not part:
                time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield got
    finally:
        done.set()
        thread.join()
        os.close(descriptor)


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- the function ----------------------------------------------------------------------------------


def test_a_file_is_the_old_one_until_all_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o640)
    with files.writing(file) as stream:
        stream.write(b"new")
        stream.flush()
        assert file.read_bytes() == b"old"
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640 or os.name != "posix"
    assert listed(tmp_path) == ["file"]


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    files.write(tmp_path / ("x" * 250), "ä")
    assert (tmp_path / ("x" * 250)).read_bytes() == "ä".encode()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_what_ends_the_writing_leaves_the_old_file_and_nothing_beside_it(
    error: type[BaseException], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(error), files.writing(file) as stream:
        stream.write(b"new")
        raise error
    assert (file.read_bytes(), listed(tmp_path)) == (b"old", ["file"])


@posix
def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, link, first = (tmp_path / name for name in ("folder/file", "folder/link", "first"))
    file.write_bytes(b"old")
    link.symlink_to("file")
    first.symlink_to("folder/../folder/link")
    for content in (b"new", b"newer"):
        files.write(first, content)
        assert first.is_symlink() and link.is_symlink() and not file.is_symlink()
        assert file.read_bytes() == content
        file.unlink()  # the second time the link dangles
    assert listed(tmp_path / "folder") == ["link"]


@posix
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
def test_a_fifo_is_written_into(linked: bool, tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to("fifo")
    before = fifo.stat()
    content = bytes(300_000)  # more than a pipe holds
    with reading(fifo) as got:
        files.write(link if linked else fifo, content)
    assert got == content
    assert os.path.samestat(before, fifo.stat()) and stat.S_ISFIFO(fifo.stat().st_mode)
    assert listed(tmp_path) == ["fifo", "link"]


@posix
def test_a_socket_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may be no longer than 107 characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(OSError, match="No such device or address"):
            files.write(tmp_path / "socket", "")
        assert stat.S_ISSOCK((tmp_path / "socket").stat().st_mode)
    assert listed(tmp_path) == ["socket"]


def refusals(folder: Path) -> dict[str, tuple[type[OSError], str]]:
    """Names in ``folder`` that nothing can be written to, with the error of each."""
    (folder / "folder").mkdir()
    (folder / "file").touch()
    found: dict[str, tuple[type[OSError], str]] = {
        "folder": (IsADirectoryError, "is a folder; give the name of a file"),
        "no/file": (FileNotFoundError, f"there is no folder {folder / 'no'}"),
        "file/file": (NotADirectoryError, "Not a directory"),
    }
    if os.name == "posix":
        for name, target in (("link", "folder"), ("dangling", "no/file"), ("round", "round")):
            (folder / name).symlink_to(target)
        found["link"] = found["folder"]
        found["dangling"] = found["no/file"]
        found["round"] = (OSError, "Too many levels of symbolic links")
    return found


def test_where_no_file_can_be_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    wanted = refusals(tmp_path)
    before = listed(tmp_path)
    for name, (kind, said) in wanted.items():
        for call in (files.check, lambda path: files.write(path, "")):
            with pytest.raises(kind) as caught:
                call(tmp_path / name)
            assert caught.value.strerror == said, name
    assert listed(tmp_path) == before
    files.check(tmp_path / "file")
    files.check(tmp_path / "another")
    assert listed(tmp_path) == before


def test_a_file_that_may_not_be_written_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user who is not root, who may also replace what he may not write."""
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    (tmp_path / "file").touch()
    for name in ("file", "new"):
        with pytest.raises(PermissionError, match="Permission denied"):
            files.write(tmp_path / name, "new")
    assert listed(tmp_path) == ["file"] and not (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM])
def test_a_file_that_cannot_be_replaced_is_overwritten(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is mounted into a container; another user's in a folder like /tmp."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    file = tmp_path / "file"
    file.write_bytes(b"an old text")
    before = file.stat()
    monkeypatch.setattr(files.os, "replace", refuse)
    files.write(file, b"new")
    assert (file.read_bytes(), listed(tmp_path)) == (b"new", ["file"])
    assert os.path.samestat(before, file.stat())
    with pytest.raises(OSError, match=os.strerror(number)):
        files.write(tmp_path / "made", b"new")
    assert listed(tmp_path) == ["file"]


def test_a_file_in_a_folder_of_another_user_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_user(path: Any, mode: str) -> Any:
        if mode == "xb":
            raise PermissionError(errno.EACCES, "Permission denied")
        return open(path, mode)

    file = tmp_path / "file"
    file.write_bytes(b"an old text")
    monkeypatch.setattr(files, "open", of_another_user, raising=False)
    files.write(file, b"new")
    assert (file.read_bytes(), listed(tmp_path)) == (b"new", ["file"])


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux has it")


@needs_proc
def test_a_file_that_is_open_already_is_written_where_it_stands(tmp_path: Path) -> None:
    """/dev/stdout is a link to such a name; a copy of the file in its place would be lost."""
    file, link = tmp_path / "file", tmp_path / "link"
    with open(file, "wb", buffering=0) as stream:
        link.symlink_to(f"/proc/self/fd/{stream.fileno()}")
        stream.write(b"before, ")
        files.write(link, b"in between, ")
        files.write(f"/proc/thread-self/fd/{stream.fileno()}", b"twice, ")
        stream.write(b"after")
    assert file.read_bytes() == b"before, in between, twice, after"
    assert link.is_symlink()


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache directory, and the id of an entry in it."""
    folder = tmp_path_factory.mktemp("cache") / "plans"
    return folder, cache_example.make(folder)["cut"]


def report() -> Report:
    row = Row("conv", "row", "ours", "gpu", {"ours": 1.0, "eager": 2.0}, 4_000_000, 20_000)
    return Report("a GPU", {"torch": "2"}, False, False, Ceilings(1e3, {"float32": 2.0}), [row])


COMMANDS = {
    "export": ["plans", "export", "{file}", "--dir", "{dir}"],
    "svg": ["plan-dump", "{id}", "--graph", "{file}", "--no-seeds", "--dir", "{dir}"],
    "dot": ["plan-dump", "{id}", "--graph", "{file}", "--no-seeds", "--dir", "{dir}"],
    "json": ["bench", "--json", "{file}", "--device", "cpu"],
    "html": ["bench", "--html", "{file}", "--device", "cpu"],
    "picture.svg": ["bench", "--picture", "{file}", "--device", "cpu"],
    "picture.png": ["bench", "--picture", "{file}", "--device", "cpu"],
}


@pytest.fixture(params=COMMANDS)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a file, as the command wants it to be called."""
    return str(request.param) if "." in request.param else f"file.{request.param}"


@pytest.fixture
def command(
    request: pytest.FixtureRequest,
    name: str,
    plans: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Write:
    """A command that writes the file it is given; what ``bench`` would measure is known."""
    template = COMMANDS[name if name in COMMANDS else name.removeprefix("file.")]
    monkeypatch.setattr(bench, "_measure", lambda args, device: (report(), []))

    def call(file: Path) -> tuple[int, str]:
        argv = [part.format(file=file, dir=plans[0], id=plans[1]) for part in template]
        code = cli.main(argv)
        err = capfd.readouterr().err
        assert "Traceback" not in err
        return code, err

    return call


BEGINNINGS = (
    b'{"cudnngraph_plans":1}',
    b"<svg",
    b"digraph",
    b"{\n",
    b"<!doctype",
    b"<?xml",
    b"\x89P",
)


def is_whole(content: bytes) -> bool:
    """Whether it is what a command writes, to its end."""
    return content.startswith(BEGINNINGS) and content.endswith((b"\n", b"\xaeB`\x82"))


def test_a_command_replaces_a_file(command: Write, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"old")
    assert command(file) == (0, "")
    assert is_whole(file.read_bytes()) and listed(tmp_path) == [name]


@posix
@pytest.mark.parametrize("dangling", [False, True], ids=["a file", "nothing"])
def test_a_command_follows_a_link(
    dangling: bool, command: Write, name: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    if not dangling:
        target.write_bytes(b"old")
    (tmp_path / name).symlink_to("target")
    assert command(tmp_path / name) == (0, "")
    assert (tmp_path / name).is_symlink() and not target.is_symlink()
    assert is_whole(target.read_bytes()) and listed(tmp_path) == sorted([name, "target"])


@posix
def test_a_command_writes_into_a_fifo(command: Write, name: str, tmp_path: Path) -> None:
    fifo = tmp_path / name
    os.mkfifo(fifo)
    with reading(fifo) as got:
        assert command(fifo) == (0, "")
    assert is_whole(bytes(got))
    assert stat.S_ISFIFO(fifo.lstat().st_mode) and listed(tmp_path) == [name]


@posix
def test_a_command_tells_of_a_reader_that_is_gone(
    command: Write, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it tells of a full disk: one line, and no file in the place of the FIFO."""
    fifo = tmp_path / name
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    opened = files._opened

    def then_leave(*args: Any) -> Any:
        stream = opened(*args)
        os.close(reader)
        return stream

    monkeypatch.setattr(files, "_opened", then_leave)
    code, err = command(fifo)
    assert (code, err.count("\n")) == (1, 1)
    assert err.endswith(f"{fifo} cannot be written: Broken pipe\n")
    assert stat.S_ISFIFO(fifo.lstat().st_mode) and listed(tmp_path) == [name]


@posix
@pytest.mark.parametrize("kind", ["folder", "link to a folder", "no folder", "link to no folder"])
def test_a_command_says_where_no_file_can_be(
    kind: str, command: Write, name: str, tmp_path: Path
) -> None:
    place, said = tmp_path / name, "is a folder; give the name of a file\n"
    if kind == "folder":
        place.mkdir()
    elif kind == "link to a folder":
        (tmp_path / "folder").mkdir()
        place.symlink_to("folder")
    else:
        said = f"there is no folder {tmp_path / 'no'}\n"
        if kind == "no folder":
            place = tmp_path / "no" / name
        else:
            place.symlink_to(f"no/{name}")
    before = listed(tmp_path)
    code, err = command(place)
    assert code in (1, 2)
    assert str(place) in err and err.endswith(said) and err.count("\n") == 1
    assert listed(tmp_path) == before and not place.is_file()


@posix
def test_seeds_go_where_links_lead(plans: tuple[Path, str], tmp_path: Path) -> None:
    folder, id = plans
    gpu, outside = tmp_path / "seeds" / "nvidia-h200", tmp_path / "outside"
    gpu.mkdir(parents=True)
    (gpu / f"{id}.json").symlink_to(outside)
    assert cli.main(["plans", "export", "--seeds", str(gpu.parent), "--dir", str(folder)]) == 0
    assert (gpu / f"{id}.json").is_symlink() and outside.is_file()
    served = {entry.id for entry in PlanStore(None, seeds=gpu.parent).scan() if not entry.problem}
    assert id in served


@needs_proc
@pytest.mark.parametrize(
    ("which", "by"), [("export", "pipe"), ("export", "appended"), ("svg", "file")]
)
def test_what_goes_to_standard_output_is_the_file_alone(
    which: str, by: str, plans: tuple[Path, str], tmp_path: Path
) -> None:
    link = tmp_path / f"link.{which}"
    link.symlink_to("/proc/self/fd/1")
    argv = [part.format(file=link, dir=plans[0], id=plans[1]) for part in COMMANDS[which]]
    command = [sys.executable, "-m", "cudnngraph", *argv]
    given: dict[str, Any] = {"cwd": ROOT, "stderr": subprocess.PIPE, "timeout": 120}
    before = b""
    if by == "pipe":
        done = subprocess.run(command, stdout=subprocess.PIPE, **given)
        out = done.stdout
    else:
        file = tmp_path / "redirected"
        before = b"a line\n" if by == "appended" else b""
        file.write_bytes(before)
        with open(file, "ab" if by == "appended" else "wb") as stream:
            done = subprocess.run(command, stdout=stream, **given)
        out = file.read_bytes()
    assert (done.returncode, link.is_symlink()) == (0, True)
    assert out.startswith(before) and is_whole(out.removeprefix(before))
    assert str(link).encode() in done.stderr  # what was written, said beside it


# -- everything that writes ------------------------------------------------------------------------


def _writes(call: ast.Call) -> bool:
    """Whether a call writes a file by itself."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("write_text", "write_bytes"):
        return True
    if name == "open":
        texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        return any(isinstance(text, str) and set(text) & set("wxa+") for text in texts)
    owner = getattr(getattr(call.func, "value", None), "id", "")
    return owner in ("os", "shutil") and name in ("replace", "rename", "move", "copyfile")


def test_nothing_else_in_the_package_writes_a_file_that_a_user_names() -> None:
    """``devnull`` is for the output of a process that has none."""
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in (ROOT / "cudnngraph").rglob("*.py")
        if path != ROOT / "cudnngraph" / "device" / "files.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _writes(node)
    }
    assert found == {"cudnngraph/cli/__init__.py: open(os.devnull, 'w', encoding='utf-8')"}
