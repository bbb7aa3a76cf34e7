"""Guard bytes around results and workspaces: writes outside and unwritten elements are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnngraph.ir.spec import TensorSpec
from cudnngraph.select import trial
from cudnngraph.select.trial import GUARD_BYTES
from tests.trials import BF16, CPU, F16, F32

DENSE = TensorSpec("y", (3, 5), (5, 1), F16)
GAPS = TensorSpec("y", (3, 5), (8, 1), F16)
EVERY_OTHER = TensorSpec("y", (4, 3), (6, 2), F32)
BOOLS = TensorSpec("y", (7,), (1,), torch.bool)


def guarded(spec: TensorSpec) -> Any:
    return trial._Redzone(spec.extent * spec.dtype.itemsize, CPU)


@pytest.mark.parametrize("spec", [DENSE, GAPS, EVERY_OTHER, BOOLS], ids=str)
def test_a_whole_result_touches_nothing_outside(spec: TensorSpec) -> None:
    memory = guarded(spec)
    memory.view(spec).fill_(1)
    assert not memory.touched_outside(spec)
    assert bool((memory.view(spec) == 1).all())


@pytest.mark.parametrize("spec", [DENSE, GAPS, EVERY_OTHER, BOOLS], ids=str)
@pytest.mark.parametrize("place", ["before", "behind", "far_before", "far_behind"])
def test_one_byte_outside_is_seen(spec: TensorSpec, place: str) -> None:
    memory = guarded(spec)
    memory.view(spec).fill_(1)
    size = spec.extent * spec.dtype.itemsize
    at = {
        "before": GUARD_BYTES - 1,
        "behind": GUARD_BYTES + size,
        "far_before": 0,
        "far_behind": memory.block.numel() - 1,
    }[place]
    memory.block[at] ^= 1
    assert memory.touched_outside(spec)


@pytest.mark.parametrize("spec", [GAPS, EVERY_OTHER], ids=str)
def test_every_byte_of_every_gap_is_seen(spec: TensorSpec) -> None:
    mine = torch.zeros(spec.extent, dtype=torch.bool)
    mine.as_strided(spec.shape, spec.stride).fill_(True)
    gaps = [at for at in range(spec.extent) if not mine[at]]
    assert gaps
    for element in gaps:
        for byte in range(spec.dtype.itemsize):
            memory = guarded(spec)
            memory.view(spec).fill_(1)
            memory.inner[element * spec.dtype.itemsize + byte] ^= 1
            assert memory.touched_outside(spec)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_what_is_not_written_is_not_a_number(dtype: torch.dtype) -> None:
    spec = TensorSpec("y", (4,), (1,), dtype)
    assert bool(guarded(spec).view(spec).isnan().all())


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257])
def test_a_workspace_may_be_written_all_over_and_no_further(size: int) -> None:
    memory = trial._Redzone(size, CPU)
    memory.inner.fill_(3)
    assert memory.inner.numel() == size and not memory.touched_outside(None)
    for at in (GUARD_BYTES - 1, GUARD_BYTES + size):
        memory.block[at] ^= 1
        assert memory.touched_outside(None)
        memory.block[at] ^= 1
