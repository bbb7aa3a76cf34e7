"""Set-up of the deviceless tier: the real cuDNN library, no GPU.

The tier skips, and says why, without the library or its frontend. Runtime-compiled engines also
look for a CUDA driver library. Where none can be loaded, a stub is compiled with the system's C
compiler: every function of it answers CUDA_ERROR_NO_DEVICE, which is enough to list plans. It has
to be in the process before cuDNN is.

`--write-coverage` writes what the sample cases run as into docs/coverage.json instead of comparing
it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cudnngraph import settings
from cudnngraph.backend import env
from cudnngraph.errors import BackendUnavailable
from tests import coverage

DRIVER = "libcuda.so.1"

# What the runtime-compiled engines of cuDNN 9.19 to 9.28 look up in the driver.
STUB_FUNCTIONS = (
    "cuGetErrorName cuGetErrorString cuInit cuDriverGetVersion cuGetProcAddress "
    "cuGetProcAddress_v2 cuDeviceGet cuDeviceGetCount cuCtxGetCurrent cuCtxGetLimit "
    "cuCtxPopCurrent cuCtxPushCurrent cuStreamGetCtx cuLinkCreate cuLinkAddData cuLinkComplete "
    "cuLinkDestroy cuLibraryLoadData cuLibraryLoadFromFile cuLibraryGetKernel cuLibraryUnload "
    "cuKernelGetAttribute cuKernelSetAttribute cuOccupancyMaxPotentialClusterSize "
    "cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel cuKernelGetFunction "
    "cuModuleGetFunction cuModuleLoadData cuModuleUnload cuTensorMapEncodeIm2col "
    "cuTensorMapEncodeTiled"
)
STUB_SOURCE = "".join(f"int {name}(void) {{ return 100; }}\n" for name in STUB_FUNCTIONS.split())

_without_driver = ""  # why runtime-compiled engines cannot be asked; empty when they can


def _load_driver(folder: Path) -> str:
    """Load the machine's driver library, else a stub made in ``folder``; the reason if neither."""
    try:
        ctypes.CDLL(DRIVER)
        return ""
    except OSError:
        pass
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return f"no {DRIVER} to load, and no gcc to compile a stub of it"
    source, library = folder / "stub.c", folder / "libcuda_stub.so"
    source.write_text(STUB_SOURCE)
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{DRIVER}"]
    made = subprocess.run(
        [compiler, *flags, str(source), "-o", str(library)], capture_output=True, text=True
    )
    if made.returncode:
        return f"no {DRIVER} to load, and {compiler} cannot compile a stub: {made.stderr.strip()}"
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return ""


@pytest.fixture(scope="session", autouse=True)
def _library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The driver library first, then cuDNN; the whole tier skips without the latter."""
    global _without_driver
    _without_driver = _load_driver(tmp_path_factory.mktemp("driver"))
    try:
        env.frontend()
    except BackendUnavailable as error:
        pytest.skip(f"the deviceless tier needs cuDNN: {error}")
    yield


@pytest.fixture(autouse=True)
def _plans_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """What cuDNN makes of graphs is asked without the kernels that would take its place, but by
    tests with the mark ``generated``."""
    generated = request.node.get_closest_marker("generated") is not None
    with settings.override(kernels=generated, seeds=False):
        yield


@pytest.fixture
def driver() -> None:
    """For tests that need runtime-compiled engines to be listed."""
    if _without_driver:
        pytest.skip(f"runtime-compiled engines cannot be listed: {_without_driver}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-coverage", action="store_true", help="write docs/coverage.json")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print how many sample cases run as one plan, several or by torch, and the refusals met."""
    outcomes: Counter[str] = Counter()
    met: Counter[str] = Counter()
    planned: list[tuple[str, str, str]] = []
    left: list[tuple[str, str, dict[str, str]]] = []
    for report in terminalreporter.getreports("passed"):
        properties = dict(report.user_properties) if report.when == "call" else {}
        met.update(properties.get("known refusals", []))
        planned += [tuple(properties["planned"])] if "planned" in properties else []
        left += [tuple(properties["left"])] if "left" in properties else []
    outcomes.update(outcome for *_, outcome in planned)
    if not outcomes:
        return
    if config.getoption("--write-coverage"):
        coverage.write(planned, left, env.cudnn_version())
    listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    terminalreporter.write_line(f"sample cases on cuDNN: {listed}")
    for reason, count in met.most_common():
        terminalreporter.write_line(f"  {count:4d}  {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is of this tier."""
    here = Path(__file__).parent
    for item in items:
        if here in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.deviceless)
