"""The tier that needs a GPU: skipped where there is none. Prints what it ran on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings

# Every plan is checked, without some processes for each of pytest's; test_guard.py tests those.
os.environ.setdefault("CUDNNGRAPH_VERIFY", "inprocess")
# Plans are built, not taken from the package, which has some for this GPU.
os.environ.setdefault("CUDNNGRAPH_SEEDS", "0")

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--broadcasts", type=int, help="cases of test_broadcasts.py")
    parser.addoption("--random-graphs", type=int, help="cases of test_random_graphs.py")
    parser.addoption("--broadcasts-log", help="a file for what each engine made of them")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "alone: compares times or free memory, so it needs the GPU for itself"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


def pytest_report_header() -> str:
    if not torch.cuda.is_available():
        return "gpu tier: no CUDA device"
    from cudnngraph.backend import env

    return (
        f"gpu tier: {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"cuDNN {env.cudnn_version()}, frontend {env.frontend_version()}"
    )


@pytest.fixture(autouse=True)
def _no_tf32() -> None:
    """float32 means float32, for torch's own results too."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty cache directory, and nothing in memory."""
    with settings.override(cache_dir=tmp_path / "cache"):
        cg.cache_clear()
        yield tmp_path / "cache"
        cg.cache_clear()
