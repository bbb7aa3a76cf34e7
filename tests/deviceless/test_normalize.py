"""Rows by their norms, as cuDNN lists its plans: a product sums the squares of short rows."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HEADS = (16 * 288, 32, 288, 1)  # a third of what a projection makes


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_heads_and_a_scale_of_each_are_normalized_by_one_plan(dtype: torch.dtype) -> None:
    g = cg.Graph("heads")
    x = g.input("x", (8, 3, 16, 32), dtype, stride=HEADS)
    g.output("y", g.mul(g.normalize(x), g.input("f", (1, 3, 1, 32), dtype)))
    (step,) = cg.explain(g, "nvidia-h200").steps
    assert step.ops == ("normalize", "mul") and step.runs_on == "cuDNN"


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("params", [F16, F32])
@pytest.mark.parametrize(
    ("width", "stride"), [(32, None), (32, HEADS), (48, None), (128, (16 * 1152, 128, 1152, 1))]
)
def test_short_rows_and_heads_are_normed_by_a_product(
    params: torch.dtype, width: int, stride: tuple[int, ...] | None
) -> None:
    g = cg.Graph("short")
    x = g.input("x", (8, 3, 16, width), F16, stride=stride)
    w, b = (g.input(name, (width,), params) for name in "wb")
    g.output("y", g.silu(g.rms_norm(x, w, b)))
    (step,) = cg.explain(g, "nvidia-h200").steps
    assert step.runs_on == "cuDNN"
    assert {plan.engine for plan in step.plans} == {7}  # of products


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("rows", ["longer", "odd", "statistics", "float32"])
def test_other_rows_are_normed_by_cudnns_norm(rows: str) -> None:
    width = {"longer": 64, "odd": 29}.get(rows, 32)
    g = cg.Graph(rows)
    x = g.input("x", (48, width), F32 if rows == "float32" else F16)
    made = g.rms_norm(x, g.input("w", (width,), x.dtype), return_stats=rows == "statistics")
    for name, value in zip("yi", made if rows == "statistics" else (made,), strict=False):
        g.output(name, value)
    (step,) = cg.explain(g, "nvidia-h200").steps
    assert step.runs_on == "cuDNN"
    assert 7 not in {plan.engine for plan in step.plans}


def refusal(shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype) -> str:
    g = cg.Graph("refused")
    g.output("y", g.normalize(g.input("x", shape, dtype, stride=stride)))
    (step,) = cg.explain(g, "nvidia-h200").steps
    assert step.runs_on == "torch"
    return str(step)


@pytest.mark.usefixtures("driver")
def test_what_no_product_sums_up_is_a_torch_step_and_says_why() -> None:
    why = refusal((4, 3, 5, 32), (4096, 1024, 128, 1), F16)
    assert "the rows of 'x' lie in memory as no matrix, nor as several" in why
    why = "products sum up rows of at most 128 numbers of 16 bits"
    assert why in refusal((48, 32), None, F32)
    assert why in refusal((48, 512), None, F16)


@pytest.mark.usefixtures("driver")
def test_a_sum_in_front_of_an_rms_norm_is_part_of_its_plan() -> None:
    g = cg.Graph("residual")
    x, r = (g.input(name, (48, 64), F16) for name in "xr")
    total = g.add(x, r)
    g.output("s", total)
    g.output("y", g.rms_norm(total, g.input("w", (64,), F16)))
    (step,) = cg.explain(g, "nvidia-h200").steps
    assert step.ops == ("add", "rms_norm") and step.runs_on == "cuDNN"
