"""Kernels that cannot be had: torch runs these steps, the reason is told, and nothing bad is kept.

The GPU is stood in for: what compiles and what loads is set by each test.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as driver_module

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.cache import lookup
from cudnngraph.errors import NotSupported
from cudnngraph.executor import plans
from cudnngraph.ir import versions
from cudnngraph.kernels import compile as compiler
from cudnngraph.kernels import kernel, patterns
from cudnngraph.kernels.source import Source
from cudnngraph.runtime.executable import Executable
from cudnngraph.runtime.process import PROCESS
from plans_cache.record import from_json
from tests.fakes import World

CODE = b"device code"
TOO_OLD = 209  # CUDA_ERROR_NO_BINARY_FOR_GPU, as a driver says of a cubin that it does not know


class Gpu(World):
    """A GPU that is not there, for which kernels may be generated; cuDNN has no plans."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.refuse = lambda spec: True
        self.kernels = True
        self.why_none: str | None = None
        self.compiles: str | None = None  # why not
        self.loads = 0  # the driver's error
        self.most_threads = 1024  # that a kernel's registers are enough for
        self.modules: list[bytes] = []

    def cubin(self, text: str, capability: int) -> bytes:
        if self.compiles is not None:
            raise NotSupported("a generated kernel", [self.compiles])
        return CODE

    def module(self, code: bytes) -> tuple[int, object]:
        self.modules.append(code)
        return self.loads, object()

    def kept(self) -> list[bytes]:
        """The device code on disk."""
        return [CODE for file in self.files("blob") if CODE in file.read_bytes()]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        monkeypatch.setattr(kernel, "why_none", lambda: self.why_none)
        monkeypatch.setattr(kernel, "refuse_during_capture", lambda: None)
        monkeypatch.setattr(compiler, "cubin", self.cubin)
        driver = SimpleNamespace(
            cuModuleLoadData=self.module,
            cuModuleGetFunction=lambda module, name: (0, object()),
            cuFuncGetAttribute=lambda attribute, function: (0, self.most_threads),
            CUfunction_attribute=driver_module.CUfunction_attribute,
            cuLaunchKernel=lambda *given: (0,),
        )
        forget(monkeypatch)
        monkeypatch.setattr(kernel, "_driver", lambda: driver)
        monkeypatch.setattr(env, "capability", lambda index: 90)
        monkeypatch.setattr(lookup, "load", plans.load)
        monkeypatch.setattr(lookup, "replay", plans.replay)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process know no kernel any more."""
    for known in ("_modules", "_codes"):
        monkeypatch.setattr(kernel, known, {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    made = Gpu(tmp_path / "cache")
    made.install(monkeypatch)
    return made


def compiled() -> Executable:
    """relu(x) + y, and its softmax, for the GPU that is not there."""
    g = cg.Graph("gate")
    x, y = (g.input(name, (64, 128), torch.float16) for name in "xy")
    g.output("z", g.softmax(g.add(g.relu(x), y), 1))
    return g.compile("cuda:0")


def again(monkeypatch: pytest.MonkeyPatch) -> Executable:
    """The same in another process."""
    monkeypatch.setattr(PROCESS, "programs", type(PROCESS.programs)())
    forget(monkeypatch)
    return compiled()


def kinds(exe: Executable) -> list[str]:
    return [step.kind for step in exe._program.steps]


def test_a_region_that_compiles_and_loads_is_one_kernel(gpu: Gpu) -> None:
    exe = compiled()
    assert kinds(exe) == ["kernel"]
    assert "kernel (lanes=" in str(exe.explain())
    record = from_json(gpu.file().read_text())
    assert [(step.kind, step.engine) for step in record.steps] == [("kernel", KERNEL)]
    assert gpu.modules == gpu.kept() == [CODE]


def test_a_kept_kernel_is_loaded_and_not_compiled(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    gpu.compiles = "compiled twice"
    assert kinds(again(monkeypatch)) == ["kernel"]
    assert gpu.modules == [CODE, CODE]


def test_a_kernel_of_too_many_registers_for_its_threads_is_not_launched(gpu: Gpu) -> None:
    gpu.most_threads = 32
    exe = compiled()
    assert set(kinds(exe)) == {"torch"}
    assert "of which the GPU takes 32" in str(exe.explain())
    assert gpu.kept() == []


@pytest.mark.parametrize("kept", [False, True])
def test_a_kernel_is_compiled_and_loaded_once_for_all_threads(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    exe = compiled()
    if kept:
        gpu.modules.clear()
        exe = again(monkeypatch)
    gpu.compiles = "compiled twice"
    found: list[Any] = []
    program = exe._program
    threads = [Thread(target=lambda: found.append(program.plans())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(plans) for plans in found}) == 3 and gpu.modules == [CODE]


@pytest.mark.parametrize("changed", ["text", "nothing"])
def test_a_kept_kernel_of_another_generator_is_made_anew(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """If its text is another one; else it is kept."""
    compiled()
    assert len(kernel.generator()) == 64
    monkeypatch.setattr(kernel, "generator", lambda: "another")
    source = patterns.source

    def other(*given: Any) -> Source:
        made = source(*given)
        if changed == "text":
            return replace(made, text=made.text + "// another")
        return made

    monkeypatch.setattr(patterns, "source", other)
    assert kinds(again(monkeypatch)) == ["kernel"]
    misses = cg.cache_stats().misses
    assert misses == ({"absent": 1} if changed == "nothing" else {"absent": 1, "stale": 1})


def test_a_kernel_that_needs_more_workspace_than_its_step_has_is_stale(gpu: Gpu) -> None:
    exe = compiled()
    (step,), (plan,) = exe._program.steps, exe._program.plans()
    assert step.choice is not None and isinstance(plan, kernel.Kernel)
    assert kernel.why_stale(plan, step.spec, plan.workspace_bytes) is None
    plan.workspace_bytes += 256
    assert "workspace" in str(kernel.why_stale(plan, step.spec, plan.workspace_bytes - 256))


def test_without_nvrtc_torch_runs_the_steps_and_explain_says_why(gpu: Gpu) -> None:
    gpu.why_none = "NVRTC is missing: no libnvrtc.so.13"
    exe = compiled()
    assert set(kinds(exe)) == {"torch"}
    assert str(exe.explain()).count("NVRTC is missing: no libnvrtc.so.13") == len(kinds(exe))
    assert gpu.kept() == gpu.modules == []


def test_kernels_replace_torch_steps_once_they_can_be_generated(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.why_none = "NVRTC is missing"
    assert set(kinds(compiled())) == set(kinds(again(monkeypatch))) == {"torch"}
    assert cg.cache_stats().misses == {"absent": 1}
    gpu.why_none = None
    assert kinds(again(monkeypatch)) == kinds(again(monkeypatch)) == ["kernel"]
    assert cg.cache_stats().misses == {"absent": 1, "without kernels": 1}


def test_a_region_that_does_not_compile_is_run_by_torch(gpu: Gpu) -> None:
    gpu.compiles = "kernel.cu(7): error: identifier is undefined"
    exe = compiled()
    assert set(kinds(exe)) == {"torch"}
    assert gpu.compiles in str(exe.explain())
    assert gpu.kept() == gpu.modules == []


def test_a_kernel_that_the_driver_does_not_load_is_not_kept(gpu: Gpu) -> None:
    gpu.loads = TOO_OLD
    exe = compiled()
    assert set(kinds(exe)) == {"torch"}
    assert f"the driver does not load it: {TOO_OLD}" in str(exe.explain())
    assert (gpu.modules, gpu.kept()) == ([CODE], [])
    record = from_json(gpu.file().read_text())
    assert {step.kind for step in record.steps} == {"torch"}


def test_a_kernel_that_lacked_memory_is_tried_again_by_the_next_process(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.loads = "<CUresult.CUDA_ERROR_OUT_OF_MEMORY: 2>"
    assert set(kinds(compiled())) == {"torch"}
    gpu.loads = 0
    assert kinds(again(monkeypatch)) == kinds(again(monkeypatch)) == ["kernel"]
    assert cg.cache_stats().misses == {"absent": 1, "without memory": 1}


def test_a_kept_kernel_that_the_driver_no_longer_loads_is_left_out(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    gpu.loads = TOO_OLD
    exe = again(monkeypatch)
    assert set(kinds(exe)) == {"torch"}
    assert f"the driver does not load it: {TOO_OLD}" in str(exe.explain())


@pytest.mark.parametrize("field", ["kernel", "choice", "capability"])
def test_another_kernels_code_is_not_loaded(gpu: Gpu, field: str) -> None:
    choice = Choice(KERNEL, (("lanes", 1), ("team", 32), ("rows", 1), ("chunks", 1)))
    head: dict[str, Any] = {
        **{"kernel": versions.LOWERING, "choice": str(choice), "capability": 90},
        **{"launches": [["cudnngraph_kernel", 1, 32]], "workspace": 0, "text": ""},
    }
    good = kernel.Kernel(CODE, head, choice, 0).serialize()
    assert kernel.load(good, choice, 0).serialize() == good
    bad = kernel.Kernel(CODE, {**head, field: "other"}, choice, 0).serialize()
    for blob in (bad, b"", b"{}\n", good.split(b"\n")[0], good[1:]):
        with pytest.raises(NotSupported):
            kernel.load(blob, choice, 0)


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cuda.bindings.nvrtc", "cuda.bindings.driver"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.setattr("cuda.bindings." + module.rpartition(".")[2], None, raising=False)
            for cached in (compiler.nvrtc, kernel._driver, kernel.why_none):
                cached.cache_clear()
            why = kernel.why_none()
            assert why is not None and "is missing" in why
    for cached in (compiler.nvrtc, kernel._driver, kernel.why_none):
        cached.cache_clear()
