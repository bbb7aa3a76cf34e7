"""`cudnngraph plans …`: path, exit codes, the directory, and imports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudnngraph import cli
from cudnngraph.cli import plans, records
from tests import python
from tests.commands import Cli

pytestmark = pytest.mark.usefixtures("no_gpu")


ROOT = Path(__file__).parents[3]


# -- path ------------------------------------------------------------------------------------------


def test_path_prints_the_directory_and_makes_nothing(
    run: Cli, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("path") == (0, f"{folder}\n", "")
    assert not folder.exists()
    with records.settings.override(cache_dir=tmp_path / "of the settings"):
        assert cli.main(["plans", "path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'of the settings'}\n"


# -- a stray thing among the folders ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("last", [False, True])
def test_a_stray_thing_among_the_folders_hides_no_entry(
    last: bool, kind: str, run: Cli, folder: Path, ids: dict[str, str], tmp_path: Path
) -> None:
    unused = [
        name for name in map("{:02x}".format, range(256)) if not (folder / "v1" / name).exists()
    ]
    name = unused[-1 if last else 0]
    stray = folder / "v1" / name
    if kind == "link":
        stray.symlink_to(tmp_path)
    else:
        stray.touch()
    said = f"damaged: {name}: {stray} is not a directory"
    code, out, _ = run("verify")
    assert code == 1
    assert f"failed {name}: record: {stray} is not a directory\n" in out
    assert f"{len(ids) + 1} entries checked, 0 replayed, 1 problem\n" in out
    code, out, err = run("export", tmp_path / "file")
    assert (code, err.splitlines()[-1]) == (1, said)
    assert out.startswith(f"{len(ids)} records and 0 blobs written")
    assert run("diff", ids["tuned"], ids["old"])[0] == 0
    code, out, err = run("prune", "--max-size", "1")
    assert code == 0 and out.splitlines()[-1].startswith(f"removed {len(ids)} of {len(ids)} plans")
    assert err.splitlines()[-1] == said


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("action", plans.ACTIONS)
def test_every_action_documents_its_exit_codes(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plans", action, "--help"]) == 0
    assert "Exit code: 0" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["conjure"], ["diff", "a"], ["import"]])
def test_a_wrong_call_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plans", *argv]) == 2
    assert "usage: cudnngraph plans" in capsys.readouterr().err


def test_the_directory_is_expanded_and_not_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["plans", "path", "--dir=~/x"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x'}\n"
    for bad in ("", " ", "~nosuchuser/x"):
        assert cli.main(["plans", "path", "--dir", bad]) == 2
        said = f"argument --dir: expected the path of a folder, got '{bad}'\n"
        assert capsys.readouterr().err.endswith(said)


def test_a_directory_that_cannot_be_used_is_one_line(run: Cli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for argv in (["diff", "a", "b"], ["verify"], ["prune", "--older-than", "1"]):
        code, out, err = run(*argv, at=file)
        assert (code, out) == (1, "")
        assert err == f"error: the cache directory cannot be used: {file} is not a directory\n"


def test_no_action_imports_cudnn_on_a_machine_without_a_gpu(
    folder: Path, ids: dict[str, str], source: Path, tmp_path: Path
) -> None:
    code = f"""
import sys, torch
theirs = set(sys.modules)  # torch imports cuda from 2.15 on
from cudnngraph.cli import main
for argv in (["path"], ["diff", {ids["cut"]!r}, {ids["old"]!r}], ["verify"],
             ["explain-miss", {f"{source}:same"!r}, "--no-tf32"],
             ["export", {str(tmp_path / "x")!r}], ["import", {str(tmp_path / "x")!r}],
             ["prune", "--older-than", "30"]):
    assert main(["plans", *argv, "--dir", {str(folder)!r}]) == 0, argv
    print("==")
assert not {{"cudnn", "cuda"}} & (set(sys.modules) - theirs)
"""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    done = python.run("-c", code, cwd=ROOT, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("==\n") == 7
