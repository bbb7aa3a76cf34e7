"""Kernels that are launched before the one in front of them has ended, and wait for it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.device import rules
from cudnngraph.ir.canonical import canonical
from cudnngraph.kernels import kernel, patterns, split
from cudnngraph.kernels.source import FOLLOWS, Source, own_part
from tests import host_kernels


def sums_of_columns(*, early: bool) -> Source:
    """A kernel of several launches."""
    g = cg.Graph("g")
    g.output("y", g.reduction(g.relu(g.input("x", (4096, 64), torch.float32)), (0,)))
    with rules.changed(kernel_follows_early=early):
        return split.write(canonical(g.spec()), split.split_for(132))


def test_each_function_waits_before_it_does_anything() -> None:
    made = sums_of_columns(early=True)
    assert made.follows_early and len(made.launches) > 1
    own = own_part(made.text)
    for launch in made.launches:
        body = own[own.index(f"{launch.name}(") :].partition("{\n")[2]
        assert [line.strip() for line in body.splitlines()[: len(FOLLOWS)]] == list(FOLLOWS)
    plain = sums_of_columns(early=False)
    assert not plain.follows_early and "griddepcontrol" not in plain.text
    assert plain.launches == made.launches


def test_such_a_kernel_computes_the_same() -> None:
    x = torch.randn(4096, 64)
    for early in (False, True):
        y, made = torch.empty(1, 64), sums_of_columns(early=early)
        host_kernels.run(made, [x, y])
        assert torch.allclose(y.double(), x.double().relu().sum(0, keepdim=True), rtol=1e-5)


class Driver:
    """Takes launches as CUDA's driver does, and keeps what each was given."""

    CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    def __init__(self, error: str | int = 0) -> None:
        self.error = error
        self.early: list[tuple[Any, ...]] = []
        self.behind: list[str] = []

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    def cuLaunchKernel(self, function: str, *rest: int) -> tuple[str | int]:
        self.behind.append(function)
        return (self.error,)

    def cuLaunchKernelEx(
        self, config: Any, function: str, where: int, extra: int
    ) -> tuple[str | int]:
        (attribute,) = config.attrs[: config.numAttrs]
        assert (attribute.id, attribute.value.programmaticStreamSerializationAllowed) == (6, 1)
        assert (config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ) == (1,) * 4
        addresses = (ctypes.c_uint64 * 2).from_address(ctypes.c_uint64.from_address(where).value)
        self.early.append((function, config.gridDimX, config.blockDimX, config.hStream, *addresses))
        return (self.error,)


def loaded(monkeypatch: pytest.MonkeyPatch, driver: Driver, *, capturing: bool) -> Any:
    """A kernel of two launches on a GPU that is not there."""
    monkeypatch.setattr(kernel, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    made = kernel.Kernel.__new__(kernel.Kernel)
    made.device_index, made._early = 0, True
    made._launches = [("first", 5, 64), ("second", 2, 32)]
    made._call = made._native()
    return made


def test_it_is_launched_early_within_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    made = loaded(monkeypatch, driver, capturing=True)
    made.execute(made.pointers([10, 20]), 0, None)
    assert driver.early == [("first", 5, 64, 77, 10, 20), ("second", 2, 32, 77, 10, 20)]
    assert driver.behind == []


def test_it_is_launched_early_from_a_bound_call(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    made = loaded(monkeypatch, driver, capturing=False)
    bound = made.bound(made.pointers([10, 20]), 0, 78)
    assert driver.early == []
    bound()
    assert driver.early == [("first", 5, 64, 78, 10, 20), ("second", 2, 32, 78, 10, 20)]
    made.execute(made.pointers([10, 20]), 0, None)  # the stream is asked for: as any other
    assert driver.behind == ["first", "second"] and len(driver.early) == 2


@pytest.mark.parametrize("capturing", [True, False])
def test_nothing_follows_a_launch_that_fails(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    driver = Driver("CUDA_ERROR_NOT_SUPPORTED")
    made = loaded(monkeypatch, driver, capturing=capturing)
    call = made.bound(made.pointers([10, 20]), 0, 77)
    with pytest.raises(RuntimeError, match="was not launched: 'CUDA_ERROR_NOT_SUPPORTED'"):
        made.execute(made.pointers([10, 20]), 0, None) if capturing else call()
    assert len(driver.early) == 1 and driver.behind == []


@pytest.mark.parametrize(("capability", "early"), [(80, False), (89, False), (90, True)])
def test_a_gpu_that_cannot_wait_launches_it_as_any_other(
    monkeypatch: pytest.MonkeyPatch, capability: int, early: bool
) -> None:
    heads: list[dict[str, Any]] = []
    monkeypatch.setattr(kernel, "refuse_during_capture", lambda: None)
    monkeypatch.setattr(kernel.env, "capability", lambda index: capability)
    monkeypatch.setattr(kernel.compiler, "cubin", lambda text, capability: b"code")
    monkeypatch.setattr(kernel, "Kernel", lambda code, head, choice, index: heads.append(head))
    monkeypatch.setattr(kernel, "_codes", {})
    g = cg.Graph("g")
    g.output("y", g.relu(g.input("x", (64, 256), torch.float32)))
    spec = canonical(g.spec())
    with rules.changed(kernel_follows_early=True):
        kernel.build(spec, patterns.by_rule(spec, 132), 0)
    assert heads[0]["early"] is early
