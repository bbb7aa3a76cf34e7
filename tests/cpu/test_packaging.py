"""The wheel and the source distribution hold every module, and the data beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from tests.workers.store_worker import record

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The files of both, built from a copy of the project that ships one seed."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("packaging") / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, copy)
    for name in ("cudnngraph", "plans_cache", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    seeds = copy / "plans_cache" / "seeds" / "nvidia-test"
    seeds.mkdir()
    (seeds / f"{record(1).id}.json").write_text(record(1).to_json())
    code = "from setuptools import build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "out").glob("*.whl")
    (source,) = (copy / "out").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return {"wheel": set(zipfile.ZipFile(wheel).namelist()), "source": names}


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_seeds_ship_below_the_folder_of_their_gpu(
    distributions: dict[str, set[str]], kind: str
) -> None:
    assert f"plans_cache/seeds/nvidia-test/{record(1).id}.json" in distributions[kind]
    shipped = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "plans_cache/seeds").rglob("*.json")
    }
    assert shipped <= distributions[kind]


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_every_module_and_its_data_ship_and_no_test_in_the_wheel(
    distributions: dict[str, set[str]], kind: str
) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in ("cudnngraph", "plans_cache")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".json", ".typed")
    }
    assert wanted <= distributions[kind]
    assert not [name for name in distributions["wheel"] if name.startswith("tests")]


def test_the_source_has_the_tests_and_what_runs_them(distributions: dict[str, set[str]]) -> None:
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert (
        wanted | {"Makefile", "MANIFEST.in", "tests/golden/samples.txt"} <= distributions["source"]
    )
    assert not [name for name in distributions["source"] if name.endswith(".pyc")]


def test_the_seeds_take_at_most_5_mb_of_the_wheel() -> None:
    """A wheel compresses each file by itself."""
    seeds = (ROOT / "plans_cache/seeds").rglob("*.json")
    assert sum(len(zlib.compress(path.read_bytes(), 6)) + 300 for path in seeds) <= 5_000_000
