"""`cudnngraph plans prune`: what it removes, and the reasons that it gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plans_cache import Hit, PlanStore
from plans_cache.measurements import Measurements
from tests.commands import Cli
from tests.workers import cache_example

pytestmark = pytest.mark.usefixtures("no_gpu")


def left(folder: Path, ids: dict[str, str]) -> set[str]:
    """The names of the entries that are still on disk."""
    on_disk = {path.stem for path in folder.rglob("*.json")}
    return {name for name, id in ids.items() if id in on_disk}


@pytest.mark.parametrize(
    ("argv", "gone"),
    [
        (["--dead-environments", "--gpu", "nvidia h200"], {"a100"}),
        (["--dead-environments", "--cudnn", "9.19.0"], {"old"}),
        (["--dead-environments", "--cudnn", "91900", "--gpu", "NVIDIA H200"], {"a100", "old"}),
        (["--older-than", "30"], {"a100", "old"}),
        (["--older-than", "0.05"], {"padded", "cut", "a100", "old"}),
        (["--older-than", "0"], {"tuned", "padded", "cut", "torch", "sdpa", "a100", "old"}),
        (["--max-size", "0"], {"tuned", "padded", "cut", "torch", "sdpa", "a100", "old"}),
        (["--max-size", "1G"], set()),
    ],
)
def test_prune_removes_what_it_was_told_to(
    argv: list[str], gone: set[str], run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    code, out, _ = run("prune", *argv, "--dry-run")
    assert (code, left(folder, ids)) == (0, set(ids))
    assert f"would remove {len(gone)} of 7 plans" in out
    assert {name for name in ids if ids[name][:12] in out} == gone
    code, out, _ = run("prune", *argv)
    assert (code, left(folder, ids)) == (0, set(ids) - gone)
    assert f"removed {len(gone)} of 7 plans" in out


def test_prune_goes_by_the_last_use_where_it_is_asked_to(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    store = PlanStore(folder, seeds=None)
    for name in ("old", "cut"):
        assert isinstance(store.get(ids[name]), Hit)
    code, out, _ = run("prune", "--unused-for", "30", "--dry-run")
    assert (code, "would remove 1 of 7 plans" in out) == (0, True)
    assert out.startswith(f"{ids['a100'][:12]}  unused: ")
    assert run("prune", "--unused-for", "30")[0] == 0
    assert left(folder, ids) == set(ids) - {"a100"}
    assert run("prune", "--older-than", "30")[0] == 0
    assert left(folder, ids) == set(ids) - {"a100", "old"}


def test_prune_removes_folders_of_other_schemas_only_when_asked(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    for name in ("v0", "v2"):
        (folder / name / "ab").mkdir(parents=True)
        (folder / name / "ab" / "plan.json").write_bytes(b"x" * 512)
    (folder / "mine").mkdir()
    assert run("prune", "--older-than", "1000")[0] == 0
    assert (folder / "v0").is_dir()
    tail = "0 of 7 plans, 0 B, and 2 folders of another schema, 1.0 KiB\n"
    code, out, _ = run("prune", "--other-schemas", "--dry-run")
    lines = [f"v{version}  another schema: 1 file, 512 B\n" for version in (0, 2)]
    assert (code, out) == (0, "".join(lines) + "would remove " + tail)
    assert (folder / "v0").is_dir() and (folder / "v2").is_dir()
    code, out, _ = run("prune", "--other-schemas")
    assert (code, out) == (0, "".join(lines) + "removed " + tail)
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "v1"]
    assert left(folder, ids) == set(ids)
    assert "and 0 folders of another schema, 0 B" in run("prune", "--other-schemas")[1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root gives files away")
def test_a_folder_of_another_user_stays_and_the_exit_code_says_so(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    (folder / "v0").mkdir()
    (folder / "v2").mkdir()
    os.chown(folder / "v0", 12345, -1)
    code, out, err = run("prune", "--other-schemas")
    assert (code, err) == (1, "error: 1 could not be removed, v0 among them\n")
    assert f"v0  another schema: {folder / 'v0'} belongs to user 12345\n" in out
    assert (folder / "v0").is_dir() and not (folder / "v2").exists()


def test_a_dry_run_moves_nothing_and_says_what_is_damaged(run: Cli, tmp_path: Path) -> None:
    place = tmp_path / "damaged"
    ids = cache_example.make(place, damaged=True)
    before = sorted(place.rglob("*"))
    said = f"damaged: {ids['old']}: record: "
    code, out, err = run("prune", "--max-size", "1G", "--dry-run", at=place)
    assert (code, out) == (0, f"would remove 0 of {len(ids) - 1} plans, 0 B\n")
    assert err.startswith(said) and err.count("\n") == 1
    assert sorted(place.rglob("*")) == before
    assert run("prune", "--max-size", "1G", at=place)[2].startswith(said)
    assert len(list((place / "quarantine").iterdir())) == 1


def test_prune_by_size_takes_the_oldest_until_the_rest_fits(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    by_age = ["sdpa", "torch", "tuned", "padded", "cut", "a100", "old"]
    files = {
        name: [*folder.rglob(f"{id}.json"), *folder.rglob(f"{id}.*.blob")]
        for name, id in ids.items()
    }
    size = {name: sum(file.stat().st_size for file in each) for name, each in files.items()}
    keep = sum(size[name] for name in by_age[:3])
    assert run("prune", "--max-size", keep + 10)[0] == 0
    assert left(folder, ids) == set(by_age[:3])
    assert not list(folder.rglob(f"{ids['padded']}.*"))


def test_prune_says_the_reason_for_each(run: Cli, ids: dict[str, str]) -> None:
    _, out, _ = run(
        "prune", "--dead-environments", "--cudnn", "9.19.0", "--older-than", "30", "--dry-run"
    )
    assert out.splitlines()[:2] == sorted(
        [
            f"{ids['old'][:12]}  dead environment: conv → bias → relu, NVIDIA H200, "
            "cuDNN 9.10.2, disk, 90 d old, used 90 d ago",
            f"{ids['a100'][:12]}  too old: conv → bias → relu, NVIDIA A100-SXM4-80GB, "
            "cuDNN 9.19.0, disk, 40 d old, used 40 d ago",
        ]
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "say what may go: --dead-environments, --older-than, --unused-for, --max-size, "),
        (["--dead-environments"], "there is no GPU here to compare environments with"),
        (["--gpu", "x"], "--gpu says what --dead-environments compares with"),
        (
            ["--dead-environments", "--cudnn", "9.19"],
            "--cudnn: expected a whole version, like 9.19.0 or 91900, got '9.19'",
        ),
        (
            ["--dead-environments", "--gpu", "h200"],
            "--gpu 'h200' is part of a name; expected the whole: 'NVIDIA H200'",
        ),
        (["--older-than", "-1"], "--older-than: expected days, 0 or more, got '-1'"),
        (["--older-than", "nan"], "--older-than: expected days, 0 or more, got 'nan'"),
        (["--unused-for", "a day"], "--unused-for: expected days, 0 or more, got 'a day'"),
        (["--max-size", "lots"], "--max-size: expected bytes, like 512K, 64M or 1G, got 'lots'"),
        (["--max-size", "1.2.3"], "--max-size: expected bytes, like 512K, 64M or 1G, got '1.2.3'"),
        (["--max-size", "9" * 308 + "G"], "expected bytes, like 512K, 64M or 1G, got '999"),
    ],
)
def test_a_prune_that_makes_no_sense_removes_nothing(
    argv: list[str], said: str, run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    code, out, err = run("prune", *argv)
    assert (code, out, left(folder, ids)) == (2, "", set(ids))
    assert said in err


def test_measurements_go_by_age_and_take_what_plans_leave_of_a_size(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    kept = Measurements(folder)
    for number in range(2):
        kept.add(f"{number}" * 32, {"what": "a time"})
    assert "and measurements" not in run("prune", "--max-size", "1G")[1]
    code, out, _ = run("prune", "--max-size", "0", "--dry-run")
    assert (code, "would remove 7 of 7 plans" in out) == (0, True)
    assert out.endswith(", and measurements of 2 steps\n") and kept.of("0" * 32)
    os.utime(folder / "parts" / f"{'1' * 32}.jsonl", (0, 0))
    assert ", and measurements of 1 step\n" in run("prune", "--unused-for", "300")[1]
    assert kept.of("0" * 32) and not kept.of("1" * 32)
    assert left(folder, ids) == set(ids)
