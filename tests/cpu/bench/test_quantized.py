"""The cases of int8 and FP8 that are measured: what the graph gives is what torch's code gives."""

from __future__ import annotations

import pytest
import torch

from cudnngraph.bench import quantized
from cudnngraph.bench.cases import Case

I8, E4 = torch.int8, torch.float8_e4m3fn
CPU = torch.device("cpu")
SMALL = [
    *(
        quantized.conv(dtype, 2, 16, 8, 24, 3, 1, 1, bias=bias)
        for dtype in (I8, E4)
        for bias in (False, True)
    ),
    quantized.matmul(32, 48, 40),
    quantized.sdpa(1, 2, 32, 16, causal=True),
    quantized.sdpa(1, 2, 32, 16),
]


def steps(out: torch.Tensor) -> torch.Tensor:
    return out.to(torch.float64)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_graph_and_torch_agree_to_the_precision_of_16_bits(case: Case) -> None:
    tensors = case.tensors(CPU)
    exe = case.graph.compile("cpu")
    exe.run(**tensors)
    (name,) = exe.spec.outputs
    out, want = steps(tensors[name]), steps(case.eager(tensors))
    size = float(want.norm())
    assert size > 0
    # A rounding to 8 bits each, of numbers that 16 bits have moved; attention rounds its weights.
    assert float((out - want).norm()) / size < (0.012 if tensors[name].dtype != E4 else 0.06)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_data_use_the_range_of_the_8_bits(case: Case) -> None:
    tensors = case.tensors(CPU)
    spec = case.graph.spec()
    for name in spec.inputs:
        tensor = tensors[name]
        if tensor.dtype == I8:
            assert int(tensor.min()) < -120 and int(tensor.max()) > 120
        elif tensor.dtype == E4:
            assert 0 < float(tensor.double().std()) < 2
    case.graph.compile("cpu").run(**tensors)
    (name,) = spec.outputs
    if tensors[name].dtype in (I8, E4):
        most = 127 if tensors[name].dtype == I8 else 448
        assert most / 8 < float(steps(tensors[name]).abs().max())
        assert float((steps(tensors[name]).abs() == most).double().mean()) < 0.05


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_same_in_16_bits_runs_on_tensors_of_its_own(case: Case) -> None:
    tensors = case.tensors(CPU)
    (other,) = (run for name, run in case.others.items() if name in ("fp16", "bf16"))
    first = other(tensors)
    assert first.dtype in (torch.float16, torch.bfloat16)
    assert first.shape == tensors[case.graph.spec().outputs[0]].shape
    kept = first.clone()
    assert other(tensors) is first
    assert torch.equal(first, kept)


def test_the_suite_has_the_rows_that_are_asked_for() -> None:
    names = [case.name for case in quantized.lowprecision_suite()]
    assert len(set(names)) == len(names)
    for row in (
        "conv 32 128 28 128 3 1 1 int8 scale relu",
        "conv 32 128 28 128 3 1 1 e4m3fn scale relu",
        "conv 32 256 56 256 3 1 1 int8 scale bias relu",
        "conv 32 256 56 256 3 1 1 e4m3fn scale relu",
        "matmul 8192 4096 4096 e4m3",
        "sdpa B2 H16 S2048 D128 causal e4m3",
    ):
        assert row in names
