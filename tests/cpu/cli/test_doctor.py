"""``cudnngraph doctor``: each fault is found, told apart from absence, and comes with its mend.

The machine is stood in for: a healthy one by the fixture, and one fault at a time on top of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph
from cudnngraph import cli, settings
from cudnngraph.backend import env, found_bad, libraries, tested
from cudnngraph.backend.libraries import CUDNN, CUDNN_PARTS, Library
from cudnngraph.cli import doctor
from cudnngraph.cli.table import plain_table
from cudnngraph.errors import BackendUnavailable
from cudnngraph.ir import versions
from cudnngraph.kernels import compile as compiler
from cudnngraph.kernels import kernel
from plans_cache import Miss, PlanStore
from tests import python

WHEEL = Path("/site/nvidia/cudnn/lib")


class Machine:
    """The machine that the doctor is shown. Change a field, then examine."""

    def __init__(self) -> None:
        self.frontend: str | BackendUnavailable = "1.28.0"
        self.distributions = {
            "nvidia-cudnn-frontend": "1.28.0",
            "cuda-python": "13.0.1",
        }
        self.cudnn = Library(CUDNN, str(WHEEL / CUDNN))
        self.copies = {CUDNN: (str(WHEEL / CUDNN),)}
        self.parts = [Library(name, str(WHEEL / name)) for name in CUDNN_PARTS]
        self.driver = Library("libcuda.so.1", "/usr/lib/libcuda.so.1", None, "13.0")
        self.nvrtc = Library("libnvrtc.so.13", "/site/nvidia/cu13/lib/libnvrtc.so.13", None, "13.0")
        self.kernels: str | tuple[int, int] = (13, 0)  # why there are none, or NVRTC's version
        self.wheels = [WHEEL]
        self.search: list[Path] = []
        self.gpus = 1
        self.release = 91900
        self.capability = (9, 0)

    def module(self) -> SimpleNamespace:
        if isinstance(self.frontend, BackendUnavailable):
            raise self.frontend
        return SimpleNamespace(__version__=self.frontend, __file__="/site/cudnn/__init__.py")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put this machine in the place of the real one."""
        patch.setattr(env, "frontend", self.module)
        patch.setattr(env, "frontend_version", lambda: self.module().__version__)
        patch.setattr(env, "has_wheels", lambda: True)
        patch.setattr(env, "distribution_version", self.distributions.get)
        patch.setattr(env, "loaded_libraries", lambda: {n: c[0] for n, c in self.copies.items()})
        patch.setattr(libraries, "loaded_copies", lambda: self.copies)
        found = None if self.cudnn.path is None else Path(self.cudnn.path)
        patch.setattr(libraries, "find_cudnn", lambda: found)
        patch.setattr(libraries, "load", lambda name, candidates=(): self.cudnn)
        patch.setattr(libraries, "load_cudnn_parts", lambda: self.parts)
        patch.setattr(libraries, "load_driver", lambda: self.driver)
        patch.setattr(libraries, "load_nvrtc", lambda major: self.nvrtc)
        why = self.kernels if isinstance(self.kernels, str) else None
        patch.setattr(kernel, "why_none", lambda: why)
        patch.setattr(compiler, "version", lambda: self.kernels)
        patch.setattr(libraries, "cudnn_cuda_version", lambda: (13, 0) if found else None)
        patch.setattr(libraries, "cudnn_library_version", lambda: self.release if found else None)
        patch.setattr(libraries, "wheel_folders", lambda: self.wheels)
        patch.setattr(libraries, "library_path_folders", lambda: self.search)
        patch.setattr(torch.cuda, "is_available", lambda: self.gpus > 0)
        patch.setattr(torch.cuda, "device_count", lambda: self.gpus)
        properties = SimpleNamespace(total_memory=139 * 2**30)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        h200 = env.DeviceIdentity("NVIDIA H200", self.capability, 132, 0)
        patch.setattr(env, "device_identity", lambda index: replace(h200, index=index))
        key = env.EnvKey(self.release, "1.28.0", h200.name, self.capability, 132, 1)
        patch.setattr(env, "env_key", lambda index: key)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """A healthy GPU machine with an empty environment and a cache directory of its own."""
    for name in ("CUDNNGRAPH_LOG", "CUDNNGRAPH_BACKEND", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("CUDNNGRAPH_CACHE_DIR", str(folder))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    yield Machine()


def examine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, doctor.Check]:
    """The checks by name, after rules that hold for every report."""
    machine.install(monkeypatch)
    report = doctor.examine()
    checks = {check.name: check for check in report.checks}
    assert len(checks) == len(report.checks), "names are unique"
    for check in report.checks:
        assert check.detail
        assert "\n" not in check.mend, "a mend is one line"
        assert bool(check.mend) == (check.status != "pass"), check
    assert report.ok == all(check.status != "fail" for check in report.checks)
    return checks


def statuses(checks: dict[str, doctor.Check], status: str) -> list[str]:
    return [name for name, check in checks.items() if check.status == status]


def test_a_healthy_machine_passes_every_check(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "pass") == list(checks)
    assert checks["torch"].detail.startswith("2.11.0+cu130 (CUDA 13.0), ")
    assert checks["cudnn"].detail == f"9.19.0, {WHEEL / CUDNN}"
    assert checks["libcudnn_heuristic"].detail == str(WHEEL / "libcudnn_heuristic.so.9")
    assert checks["driver"].detail == "CUDA 13.0, /usr/lib/libcuda.so.1"
    assert checks["gpu 0"].detail == "NVIDIA H200, sm_90, 132 SMs, 139 GiB"


def test_every_gpu_has_its_line(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus = 3
    assert {"gpu 0", "gpu 1", "gpu 2"} <= set(examine(machine, monkeypatch))


def test_a_cpu_machine_without_cudnn_warns_and_does_not_fail(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    machine.frontend = BackendUnavailable("the cuDNN frontend is not installed; …")
    machine.distributions.clear()
    machine.cudnn, machine.copies, machine.parts = Library(CUDNN), {}, []
    machine.driver = Library("libcuda.so.1")
    machine.gpus = 0
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == []
    assert statuses(checks, "warn") == ["cudnn-frontend", "cudnn", "driver", "gpu"]
    assert checks["cuda-python"].detail == "not installed"
    assert "pip install 'nvidia-cudnn-frontend>=1.28,<1.33'" in checks["cudnn-frontend"].mend
    assert checks["cudnn"].mend == "pip install nvidia-cudnn-cu13==9.19.0.56"
    assert checks["gpu"].detail == "torch sees none: the reference executor runs graphs"
    assert checks["tested"].detail == (
        "torch 2.13.0+cpu by itself: the tests of the reference ran with it"
    )


ON_A_GPU = "torch 2.11, cuDNN 9.19.0, frontend 1.28; torch 2.11, cuDNN 9.19.0, frontend 1.32"


def test_releases_that_no_test_ran_with_are_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.release = 92700
    check = examine(machine, monkeypatch)["tested"]
    assert (check.status, check.detail, check.mend) == (
        "warn",
        "no test ever ran with torch 2.11.0+cu130, cuDNN 9.27.0, frontend 1.28.0",
        f"a GPU ran the tests with {ON_A_GPU}",
    )


@pytest.mark.parametrize(("gpus", "status"), [(0, "pass"), (1, "warn")])
def test_releases_that_ran_without_a_gpu_alone_warn_where_there_is_one(
    gpus: int, status: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    machine.gpus = gpus
    check = examine(machine, monkeypatch)["tested"]
    assert (check.status, check.mend) == (
        status,
        f"a GPU ran the tests with {ON_A_GPU}" if gpus else "",
    )
    assert check.detail == (
        "torch 2.13, cuDNN 9.19.0, frontend 1.28: tested without a GPU, never run on one"
    )


def test_a_gpu_of_an_architecture_that_no_test_ran_on_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.capability = (12, 0)
    check = examine(machine, monkeypatch)["tested"]
    assert (check.status, check.mend) == ("warn", "compare results with those of device='cpu'")
    assert check.detail.endswith("tested on NVIDIA H200, NVIDIA H100, never on a GPU of sm_120")


def test_a_torch_that_no_test_ran_with_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    machine.frontend = BackendUnavailable("the cuDNN frontend is not installed; …")
    machine.gpus = 0
    check = examine(machine, monkeypatch)["tested"]
    assert (check.status, check.detail) == ("warn", "torch 2.9.1 by itself: no test ran with it")
    assert check.mend == f"tested: {ON_A_GPU}"


def test_what_is_installed_is_what_the_table_is_asked_for() -> None:
    """Three releases, patch releases of torch and the frontend aside."""
    for row in tested.TESTED:
        assert tested.standing(f"{row.torch}.3+cpu", row.cudnn, f"{row.frontend}.1") is row
    assert tested.standing("2.11.0", 91901, "1.28.0") is None
    assert tested.standing("2.1", 91900, "1.28.0") is None
    assert len({str(row) for row in tested.TESTED}) == len(tested.TESTED)


def test_an_old_torch_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == ["torch"]
    assert checks["torch"].mend == "pip install 'torch>=2.9'"


@pytest.mark.parametrize(("version", "status"), [("1.27.0", "fail"), ("1.33.0", "warn")])
def test_a_frontend_outside_the_range_is_reported(
    version: str, status: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.frontend = machine.distributions["nvidia-cudnn-frontend"] = version
    check = examine(machine, monkeypatch)["cudnn-frontend"]
    assert check.status == status
    assert ">=1.28,<1.33" in check.mend


def test_a_second_frontend_on_the_path_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.frontend = "1.32.0"
    check = examine(machine, monkeypatch)["cudnn-frontend"]
    assert check.status == "fail"
    assert check.detail.endswith("the installed distribution is 1.28.0")


def test_a_frontend_that_cannot_be_imported_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.frontend = BackendUnavailable("the frontend is installed and cannot be imported (x)")
    check = examine(machine, monkeypatch)["cudnn-frontend"]
    assert (check.status, check.mend) == ("fail", str(machine.frontend))


def test_a_library_that_cannot_be_loaded_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.frontend = BackendUnavailable("libcudnn cannot be loaded (file too short); …")
    machine.cudnn = replace(machine.cudnn, error="file too short")
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == ["cudnn"]
    assert checks["cudnn"].detail == f"{WHEEL / CUDNN}: file too short"
    assert checks["cudnn-frontend"].mend == "see the check cudnn"
    assert "libcudnn_ops" not in checks


def test_a_broken_library_on_the_loader_path_is_to_be_taken_off_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.cudnn = Library(CUDNN, f"/shadow/{CUDNN}", "file too short")
    machine.search = [Path("/shadow")]
    check = examine(machine, monkeypatch)["cudnn"]
    assert (check.status, check.mend) == ("fail", "take /shadow out of LD_LIBRARY_PATH")


def test_two_loaded_copies_fail(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.copies = {CUDNN: (str(WHEEL / CUDNN), "/opt/cudnn/libcudnn.so.9")}
    check = examine(machine, monkeypatch)["cudnn"]
    assert check.status == "fail"
    assert check.detail == f"two copies are loaded: {WHEEL / CUDNN}, /opt/cudnn/libcudnn.so.9"


def test_one_shadowed_part_fails_and_names_both_folders(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.search = [Path("/shadow")]
    machine.parts[1] = replace(machine.parts[1], path="/shadow/libcudnn_ops.so.9")
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == ["libcudnn_ops"]
    found = checks["libcudnn_ops"]
    assert found.detail == f"/shadow/libcudnn_ops.so.9, the rest is in {WHEEL}"
    assert "LD_LIBRARY_PATH" in found.mend


def test_a_whole_cudnn_in_place_of_the_wheel_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = Path("/shadow")
    machine.search = [shadow]
    machine.cudnn = Library(CUDNN, str(shadow / CUDNN))
    machine.copies = {CUDNN: (str(shadow / CUDNN),)}
    machine.parts = [replace(part, path=str(shadow / part.name)) for part in machine.parts]
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == []
    assert checks["cudnn"].status == "warn"
    assert f"in place of the wheel at {WHEEL}" in checks["cudnn"].detail


def test_a_part_that_fails_its_version_check_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"
    machine.parts[3] = replace(machine.parts[3], error=message)
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == ["libcudnn_adv"]
    assert message in checks["libcudnn_adv"].detail


def test_a_part_that_only_wants_the_driver_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From cuDNN 9.28 on, whose runtime-compiled engines are linked to it."""
    message = "libcuda.so.1: cannot open shared object file: No such file or directory"
    machine.parts[5] = replace(machine.parts[5], error=message)
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == []
    found = checks["libcudnn_engines_runtime_compiled"]
    assert (found.status, found.mend) == ("warn", "install NVIDIA's driver to use a GPU")
    assert message in found.detail


def test_parts_of_two_releases_in_one_folder_fail(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.parts = [replace(part, version="9.19.0") for part in machine.parts]
    machine.parts[2] = replace(machine.parts[2], version="9.10.2")
    found = examine(machine, monkeypatch)["libcudnn_cnn"]
    assert found.status == "fail"
    assert "9.10.2" in found.detail
    assert "beside parts of 9.19.0" in found.detail


def test_a_missing_part_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.parts[5] = Library(machine.parts[5].name)
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == ["libcudnn_engines_runtime_compiled"]


def test_a_driver_too_old_for_torch_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.driver = replace(machine.driver, version="12.4")
    machine.gpus = 0
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == ["driver"]
    assert "torch is built for CUDA 13.0" in checks["driver"].detail
    assert "update NVIDIA's driver" in checks["driver"].mend


def test_a_stub_driver_warns(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.driver = replace(machine.driver, version=None)
    check = examine(machine, monkeypatch)["driver"]
    assert (check.status, "stub" in check.detail) == ("warn", True)


def test_a_missing_nvrtc_says_what_does_not_work_without_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.nvrtc = Library("libnvrtc.so.13")
    check = examine(machine, monkeypatch)["nvrtc"]
    assert check.status == "warn"
    assert "runtime-fused engines" in check.detail
    assert check.mend == "pip install 'nvidia-cuda-nvrtc==13.*'"


def test_an_nvrtc_that_cannot_be_loaded_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.nvrtc = replace(machine.nvrtc, error="undefined symbol: x", version=None)
    check = examine(machine, monkeypatch)["nvrtc"]
    assert check.status == "fail"
    assert "undefined symbol: x" in check.detail


def test_a_bad_variable_fails_with_its_own_message(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDNNGRAPH_BACKEND", "tpu")
    checks = examine(machine, monkeypatch)
    assert statuses(checks, "fail") == ["settings"]
    assert checks["settings"].detail == "CUDNNGRAPH_BACKEND='tpu': expected one of auto, reference"


def test_a_check_that_crashes_is_a_failure_and_stops_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install(monkeypatch)

    def crash() -> Library:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(libraries, "load_driver", crash)
    report = doctor.examine()
    failed = [check for check in report.checks if check.status == "fail"]
    assert [check.name for check in failed] == ["driver", "kernels"]  # which ask for it
    assert failed[0].detail == "the check crashed: ZeroDivisionError: division by zero"
    assert report.checks[-1].name == "cache"
    assert report.versions["driver"] is None


# -- the cache directory -----------------------------------------------------------------------


def cache_check(machine: Machine, monkeypatch: pytest.MonkeyPatch, folder: Path) -> doctor.Check:
    monkeypatch.setenv("CUDNNGRAPH_CACHE_DIR", str(folder))
    return examine(machine, monkeypatch)["cache"]


def test_a_cache_directory_that_can_be_made_passes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = cache_check(machine, monkeypatch, tmp_path / "new" / "deep")
    assert (check.status, check.detail) == ("pass", f"{tmp_path}/new/deep, made on first use")
    assert not (tmp_path / "new").exists(), "the doctor makes nothing"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_cache_directory_tells_mode_and_owner(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = cache_check(machine, monkeypatch, tmp_path / "cache")
    assert check.status == "pass"
    assert check.detail == f"{tmp_path}/cache, mode 0700, owner {(tmp_path / 'cache').owner()}"


MEND = "mend that, or set CUDNNGRAPH_CACHE_DIR to a directory of yours"


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o720])
def test_a_cache_directory_warns_where_the_store_refuses_it(
    mode: int, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    found = PlanStore(folder, seeds=None).get("0" * 64)
    check = cache_check(machine, monkeypatch, folder)
    if mode == 0o755:
        assert isinstance(found, Miss) and found.reason == "absent"
        assert (check.status, check.mend) == ("pass", "")
        return
    assert isinstance(found, Miss) and found.reason == "refused"
    assert (check.status, check.mend) == ("warn", MEND)
    assert check.detail == (
        f"{folder} has mode {mode:04o}: others may write to it; chmod go-w it: "
        "plans are kept in memory only"
    )


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_in_place_of_the_folder_of_entries_warns(
    kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "cache" / "v1"
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path)
    check = cache_check(machine, monkeypatch, tmp_path / "cache")
    assert (check.status, check.mend) == ("warn", MEND)
    assert check.detail == f"{place} is not a directory: plans are kept in memory only"


def test_a_cache_directory_that_cannot_be_looked_at_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = cache_check(machine, monkeypatch, tmp_path / ("x" * 5000))
    assert (check.status, check.mend) == ("warn", MEND)
    assert "File name too long" in check.detail
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    check = cache_check(machine, monkeypatch, tmp_path / "dangling")
    assert check.status == "warn" and f"cannot be made in {tmp_path}" in check.detail


def refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without the right to write; the super-user has it whatever the mode is."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)


def test_an_unwritable_cache_directory_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse_writing(monkeypatch)
    check = cache_check(machine, monkeypatch, tmp_path / "cache")
    assert check.status == "warn"
    assert "not writable: plans are kept in memory only" in check.detail
    assert "CUDNNGRAPH_CACHE_DIR" in check.mend


def test_a_cache_directory_that_cannot_be_made_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse_writing(monkeypatch)
    check = cache_check(machine, monkeypatch, tmp_path / "new")
    assert check.status == "warn"
    assert f"cannot be made in {tmp_path}" in check.detail


def test_a_file_in_the_place_of_the_cache_directory_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    check = cache_check(machine, monkeypatch, tmp_path / "file")
    assert (check.status, "is not a directory" in check.detail) == ("warn", True)
    below = cache_check(machine, monkeypatch, tmp_path / "file" / "below")
    assert (below.status, "Not a directory" in below.detail) == ("warn", True)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners are POSIX's")
def test_a_cache_directory_of_someone_else_warns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    someone_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: someone_else)
    check = cache_check(machine, monkeypatch, tmp_path / "cache")
    assert (check.status, f"this is user {someone_else}" in check.detail) == ("warn", True)


# -- generated kernels -------------------------------------------------------------------------


def test_kernels_are_generated_where_nvrtc_is(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = examine(machine, monkeypatch)["kernels"]
    assert (check.status, check.detail) == ("pass", "generated by NVRTC 13.0")


def test_why_no_kernels_are_generated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.kernels = "NVRTC is missing: no libnvrtc.so.13\nsearched in: /site"
    check = examine(machine, monkeypatch)["kernels"]
    assert check.status == "warn"
    assert check.detail.endswith("torch runs these steps: NVRTC is missing: no libnvrtc.so.13")
    assert check.mend == "pip install cuda-bindings nvidia-cuda-nvrtc"


def test_a_driver_that_is_too_old_for_kernels(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.kernels, machine.driver = (14, 1), replace(machine.driver, version="13.2")
    check = examine(machine, monkeypatch)["kernels"]
    assert check.status == "warn"
    assert check.detail == (
        "generated by NVRTC 14.1, which the driver does not load: it is of CUDA 13.2"
    )
    assert "cuda-bindings==13.*" in check.mend


# -- the command -------------------------------------------------------------------------------


def test_json_is_one_object_of_a_fixed_shape(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install(monkeypatch)
    assert cli.main(["doctor", "--json"]) == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert list(body) == ["schema", "ok", "checks", "versions", "libraries"]
    assert (body["schema"], body["ok"]) == (1, True)
    assert all(set(check) == {"name", "status", "detail", "mend"} for check in body["checks"])
    assert body["libraries"] == {CUDNN: str(WHEEL / CUDNN)}
    assert body["versions"] == {
        "python": sys.version.split()[0],
        "cudnngraph": cudnngraph.__version__,
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "cudnn": "9.19.0",
        "cudnn_frontend": "1.28.0",
        "cuda_python": "13.0.1",
        "driver": "13.0",
        "nvrtc": "13.0",
    }


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_a_failure_ends_with_exit_code_1(
    flags: list[str],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine.nvrtc = replace(machine.nvrtc, error="broken")
    machine.install(monkeypatch)
    assert cli.main(["doctor", *flags]) == 1
    assert "broken" in capsys.readouterr().out


def test_piped_output_is_plain_text_with_the_mends_below(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.driver = Library("libcuda.so.1")
    machine.install(monkeypatch)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split() == ["status", "check", "found"]
    assert "warn driver: install NVIDIA's driver to use a GPU" in lines
    assert lines[-1].endswith("1 warned, 0 failed")
    assert "\x1b" not in text
    assert not set("┃│┏") & set(text)


def test_a_terminal_gets_a_drawn_table(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install(monkeypatch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor"]) == 0
    assert "NVIDIA H200, sm_90, 132 SMs, 139 GiB" in capsys.readouterr().out


def test_plain_tables_are_aligned_and_not_padded() -> None:
    got = plain_table(["a", "long name"], [["wide cell", "x"], ["y", ""]], title="T")
    assert got == "T\na          long name\nwide cell  x\ny\n"


@pytest.mark.parametrize("argv", [["conjure"], [], ["doctor", "--loud"]])
def test_a_wrong_call_prints_the_help_and_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: cudnngraph" in captured.err
    assert "error:" in captured.err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


def test_an_error_of_the_package_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise BackendUnavailable("no cuDNN here; pip install it")

    monkeypatch.setattr(doctor, "run", run)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: no cuDNN here; pip install it\n"


def test_the_real_machine_gets_a_report(tmp_path: Path) -> None:
    environ = dict(os.environ, CUDNNGRAPH_CACHE_DIR=str(tmp_path / "cache"))
    done = python.run("-m", "cudnngraph", "doctor", "--json", env=environ)
    assert done.stderr == ""
    body = json.loads(done.stdout)
    crashed = [check for check in body["checks"] if "the check crashed" in check["detail"]]
    assert crashed == []
    assert done.returncode == (0 if body["ok"] else 1)
    assert body["versions"]["torch"] == torch.__version__


def test_it_says_when_a_gpu_was_checked_and_what_was_wrong(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(settings, "_from_environ", None)
    assert examine(machine, monkeypatch)["gpu 0 checked"].detail == (
        "never with these versions; `cudnngraph check --quick` does it in minutes"
    )
    known = {
        "schema": versions.FINDINGS,
        "checked": "2026-11-22T20:00:00Z",
        "mode": "quick",
        "complete": True,
        "counts": {"right": 7000, "wrong": 3, "fault": 1, "refused": 900},
        "steps": [],
        "patterns": [],
    }
    store = found_bad.findings(0)
    assert store.path.is_relative_to(tmp_path)
    store.write_known_bad(known)
    assert examine(machine, monkeypatch)["gpu 0 checked"].detail == (
        "on 2026-11-22 (quick): 4 of 7004 plans are wrong, and passed over"
    )
    store.write_known_bad(known | {"complete": False, "only": "conv", "counts": {"right": 5}})
    assert examine(machine, monkeypatch)["gpu 0 checked"].detail == (
        "on 2026-11-22 (quick, only 'conv', not to its end): 0 of 5 plans are wrong"
    )
    machine.release = 92600
    detail = examine(machine, monkeypatch)["gpu 0 checked"].detail
    assert detail.startswith("never with these versions"), "another cuDNN is another machine"
