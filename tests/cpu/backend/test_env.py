"""The backend's environment: lazy imports, what is said when cuDNN is absent, handles and streams.

cuDNN and CUDA are stood in for, so that every fault can be shown on any machine.
"""

from __future__ import annotations

import builtins
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import env, handles, libraries
from cudnngraph.backend.deviceless import propose_for
from cudnngraph.errors import BackendUnavailable, CaptureError
from cudnngraph.ir import versions
from tests import python


class FakeHandle:
    """Counts up, so that two handles can be told apart."""


class FakeCudnn(ModuleType):
    """The few calls of the frontend that ``env`` makes, and a list of those that were made."""

    def __init__(self, version: str = "1.28.0", library: int | None = 91900) -> None:
        super().__init__("cudnn")
        self.__version__ = version
        self.library = library
        self.streams: list[tuple[FakeHandle, int]] = []
        self.created_on: list[int | None] = []
        self.device: int | None = None

    def backend_version(self) -> int:
        if self.library is None:
            raise RuntimeError("Unable to find symbol cudnnGetVersion")
        return self.library

    def create_handle(self) -> FakeHandle:
        self.created_on.append(self.device)
        return FakeHandle()

    def set_stream(self, handle: FakeHandle, stream: int) -> None:
        self.streams.append((handle, stream))


@pytest.fixture(autouse=True)
def _forget_between_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with nothing imported, cached or created."""
    caches = (env.frontend, env.device_identity, env.env_key)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(handles, "_handles", handles._ThreadHandles())
    monkeypatch.setattr(env, "_preload_cudnn", lambda: None)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    """A frontend with its library, two devices and a current stream for each."""
    fake = FakeCudnn()

    class Device(nullcontext[None]):
        def __init__(self, index: int) -> None:
            super().__init__()
            fake.device = index

        def __exit__(self, *unused: object) -> None:
            fake.device = None

    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The current raw stream of each device; change an entry to switch streams."""
    streams = {0: 0, 1: 0}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    return streams


def _refuse_import(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real: Callable[..., Any] = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cudnn":
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "cudnn", raising=False)
    monkeypatch.setattr(builtins, "__import__", fake)


# -- the frontend ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["cudnngraph", "cudnngraph.backend.env", "cudnngraph.cli"])
def test_importing_loads_neither_cudnn_nor_cuda_nor_a_driver(module: str) -> None:
    code = (
        "import sys, torch\n"  # torch imports cuda.bindings where it is installed
        "before = set(sys.modules)\n"
        f"import {module}\n"
        "new = [m for m in set(sys.modules) - before if m.split('.')[0] in ('cudnn', 'cuda')]\n"
        "assert not new, new\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    python.run("-c", code, check=True)


def test_the_frontend_is_imported_once_and_tells_its_versions(cudnn: FakeCudnn) -> None:
    assert env.frontend() is cudnn
    assert env.frontend_version() == "1.28.0"
    assert env.cudnn_version() == 91900
    sys.modules["cudnn"] = FakeCudnn("1.29.0")
    assert env.frontend() is cudnn


def test_a_missing_frontend_comes_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env, "has_wheels", lambda: True)
    _refuse_import(monkeypatch, ModuleNotFoundError("No module named 'cudnn'", name="cudnn"))
    with pytest.raises(BackendUnavailable) as caught:
        env.frontend()
    want = "is not installed; pip install 'nvidia-cudnn-frontend>=1.28,<1.33'"
    assert want in str(caught.value)


def test_where_there_are_no_wheels_no_command_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "has_wheels", lambda: False)
    _refuse_import(monkeypatch, ModuleNotFoundError("No module named 'cudnn'", name="cudnn"))
    with pytest.raises(BackendUnavailable, match="NVIDIA ships no wheels for") as caught:
        env.frontend()
    assert "pip install" not in str(caught.value)
    assert "reference executor" in str(caught.value)


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("linux", "x86_64", True),
        ("linux", "aarch64", True),
        ("linux", "ppc64le", False),
        ("win32", "AMD64", True),
        ("win32", "ARM64", False),
        ("darwin", "arm64", False),
        ("darwin", "x86_64", False),
    ],
)
def test_wheels_exist_for_linux_and_windows(
    system: str, machine: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert env.has_wheels() is expected


@pytest.mark.parametrize(
    "error",
    [
        OSError("libstdc++.so.6: version `GLIBCXX_3.4.30' not found"),
        ModuleNotFoundError("No module named 'cudnn._compiled_module'", name="cudnn._compiled"),
        AssertionError("Found 2 libcudnn.so.x in nvidia-cudnn-cuXX."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_frontend_is_told_apart_from_a_missing_one(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_import(monkeypatch, error)
    with pytest.raises(BackendUnavailable, match="installed and cannot be imported") as caught:
        env.frontend()
    assert str(error) in str(caught.value)
    assert "--force-reinstall" in str(caught.value)


def test_a_missing_library_comes_with_the_command_that_installs_it(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    cudnn.library = None
    monkeypatch.setattr(env, "has_wheels", lambda: True)
    monkeypatch.setattr(env, "find_cudnn", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(BackendUnavailable) as caught:
        env.frontend()
    assert str(caught.value).startswith("libcudnn cannot be loaded (libcudnn.so.9: cannot open")
    assert str(caught.value).endswith("pip install nvidia-cudnn-cu13==9.19.0.56")


def test_a_cuda_build_of_torch_is_not_told_to_take_another_cudnn(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "has_wheels", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-cudnn-cu" not in env.how_to_get_cudnn()


@pytest.mark.parametrize(
    ("version", "supported"),
    [("1.27.9", False), ("1.28.0", True), ("1.32.1", True), ("1.33.0", False), ("2.0", False)],
)
def test_a_frontend_outside_the_range_is_warned_of_once(
    version: str, supported: bool, cudnn: FakeCudnn, caplog: pytest.LogCaptureFixture
) -> None:
    cudnn.__version__ = version
    with caplog.at_level(logging.WARNING, "cudnngraph"):
        env.frontend()
        env.frontend()
    assert len(caplog.records) == (0 if supported else 1)
    if not supported:
        text = caplog.records[0].getMessage()
        assert f"{version} is outside the supported range >=1.28,<1.33" in text


# -- devices -----------------------------------------------------------------------------------


def test_the_key_of_the_environment_holds_versions_and_the_kind_of_gpu(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        reads.append(index)
        return SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    want = env.EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, versions.ENVIRONMENT)
    assert env.env_key(0) == env.env_key(1) == want
    assert env.device_identity(1) == env.DeviceIdentity("NVIDIA H200", (9, 0), 132, 1)
    assert reads == [0, 1]


# -- handles and streams -----------------------------------------------------------------------


def test_a_handle_is_made_once_for_a_thread_and_device_on_that_device(cudnn: FakeCudnn) -> None:
    first, second = handles.handle(1), handles.handle(0)
    assert first is not second
    assert handles.handle(1) is first
    assert cudnn.created_on == [1, 0]


def test_threads_do_not_share_handles(cudnn: FakeCudnn) -> None:
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(handles.handle(0))) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    seen.append(handles.handle(0))
    assert len({id(handle) for handle in seen}) == 4


def test_the_stream_is_set_only_when_it_changed(cudnn: FakeCudnn, stream: dict[int, int]) -> None:
    handle = handles.handle_on_current_stream(0)
    handles.handle_on_current_stream(0)
    assert cudnn.streams == [(handle, 0)]
    stream[0] = 0x7F00
    assert handles.raw_stream(0) == 0x7F00
    for _ in range(3):
        assert handles.handle_on_current_stream(0) is handle
    stream[0] = 0
    handles.handle_on_current_stream(0)
    assert [pointer for _, pointer in cudnn.streams] == [0, 0x7F00, 0]


def test_each_device_has_its_own_stream(cudnn: FakeCudnn, stream: dict[int, int]) -> None:
    stream.update({0: 10, 1: 11})
    first, second = (handles.handle_on_current_stream(index) for index in (0, 1))
    assert cudnn.streams == [(first, 10), (second, 11)]


def test_no_handle_is_made_during_capture(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = handles.handle(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="cuda:1 was asked for during CUDA stream capture"):
        handles.handle(1)
    assert handles.handle(0) is made


def test_a_refused_handle_names_device_reason_and_mend(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(cudnn, "create_handle", refuse)
    with pytest.raises(BackendUnavailable) as caught:
        handles.handle(1)
    for part in ("cuda:1", "CUDNN_STATUS_NOT_INITIALIZED", "cudnngraph doctor"):
        assert part in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_handles_and_destroys_none(cudnn: FakeCudnn) -> None:
    made = handles.handle(0)
    child = os.fork()
    if child == 0:  # the child answers by its exit code, and never returns into pytest
        kept = any(entry.handle is made for held in handles._abandoned for entry in _entries(held))
        os._exit(0 if handles.handle(0) is not made and kept else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert handles.handle(0) is made


def _entries(kept: handles._ThreadHandles) -> list[handles._HandleOnStream]:
    return list(kept.by_device.values())


# -- libraries ---------------------------------------------------------------------------------

MAPS = """\
7f00-7f01 r--p 00000000 fe:00 11 /opt/a/nvidia/cudnn/lib/libcudnn.so.9
7f01-7f02 r-xp 00001000 fe:00 11 /opt/a/nvidia/cudnn/lib/libcudnn.so.9
7f02-7f03 r--p 00000000 fe:00 12 /opt/with space/libcudnn_ops.so.9.19.0
7f03-7f04 r--p 00000000 fe:00 13 /usr/lib/libcuda.so.580.1 (deleted)
7f04-7f05 r--p 00000000 fe:00 14 /opt/b/libcudnn.so.9
7f05-7f06 r--p 00000000 fe:00 15 /opt/a/libcublasLt.so.13
7f06-7f07 r--p 00000000 fe:00 16 /opt/a/libnvrtc-builtins.so.13.0
7f07-7f08 r--p 00000000 fe:00 17 /opt/a/cudnn/_compiled_module.cpython-311-x86_64-linux-gnu.so
7f08-7f09 r--p 00000000 fe:00 18 /usr/lib/libcudacxx_unrelated.so
7f09-7f0a rw-p 00000000 00:00 0
7f0a-7f0b rw-p 00000000 00:00 0 [heap]
"""


def test_loaded_copies_are_read_from_the_maps_of_the_process() -> None:
    assert libraries.loaded_copies(MAPS) == {
        "libcublasLt.so.13": ("/opt/a/libcublasLt.so.13",),
        "libcuda.so.580.1": ("/usr/lib/libcuda.so.580.1",),
        "libcudnn.so.9": ("/opt/a/nvidia/cudnn/lib/libcudnn.so.9", "/opt/b/libcudnn.so.9"),
        "libcudnn_ops.so.9.19.0": ("/opt/with space/libcudnn_ops.so.9.19.0",),
        "libnvrtc-builtins.so.13.0": ("/opt/a/libnvrtc-builtins.so.13.0",),
    }


def test_loaded_libraries_are_empty_where_the_system_has_no_maps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(libraries, "_MAPS", tmp_path / "absent")
    assert env.loaded_libraries() == {}


def test_the_loader_path_comes_before_a_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel, shadow = tmp_path / "site" / "nvidia" / "cudnn" / "lib", tmp_path / "shadow"
    for folder in (wheel, shadow):
        folder.mkdir(parents=True)
        (folder / libraries.CUDNN).touch()
    monkeypatch.setattr(libraries, "_MAPS", tmp_path / "absent")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert libraries.find_cudnn() == wheel / libraries.CUDNN
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{shadow}")
    assert libraries.find_cudnn() == shadow / libraries.CUDNN


@pytest.mark.skipif(sys.platform != "linux", reason="the messages are those of Linux's loader")
def test_a_folder_that_cannot_be_looked_into_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / libraries.CUDNN).touch()
    long = "/" + "x" * 5000
    monkeypatch.setattr(libraries, "_MAPS", tmp_path / "absent")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{long}:{tmp_path}")
    monkeypatch.syspath_prepend(long)
    assert Path(long) / "nvidia" / "cudnn" / "lib" not in libraries.wheel_folders()
    assert libraries.find_cudnn() == tmp_path / libraries.CUDNN
    name = "libnowhere.so.1"
    assert libraries.load(name, [Path(long) / name]) == libraries.Library(name)


def test_an_absent_library_is_told_apart_from_one_that_cannot_be_loaded(tmp_path: Path) -> None:
    name = "libcudnn_of_no_such_name.so.9"
    assert libraries.load(name, [tmp_path / name]) == libraries.Library(name)
    (tmp_path / name).write_text("not a library")
    broken = libraries.load(name, [tmp_path / name])
    assert broken.path == str(tmp_path / name)
    assert broken.error is not None
    assert "too short" in broken.error
    assert not broken.usable


def test_a_description_that_cudnn_does_not_take_is_an_error_that_says_why(
    cudnn: FakeCudnn,
) -> None:
    """cuDNN 9.28 makes none where no driver's library can be loaded."""

    def refuse(text: str) -> None:
        raise RuntimeError("finalize failed, and code: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED\nat")

    cudnn.library = 92801
    cudnn.create_device_properties = refuse
    cudnn.cudnnGraphNotSupportedError = RuntimeError
    g = cg.Graph("g")
    g.output("y", g.relu(g.input("x", (4,), torch.float16)))
    with pytest.raises(BackendUnavailable) as caught:
        propose_for(g.spec(), "nvidia-h200")
    assert str(caught.value) == (
        "cuDNN 9.28.1 does not take the description of 'nvidia-h200' (finalize failed, and code: "
        "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED); from 9.28 on it needs a CUDA driver library "
        "(libcuda.so.1) for it, also without a GPU: install NVIDIA's driver, or an older cuDNN"
    )
