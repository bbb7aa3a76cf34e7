"""Attention over channels: on a GPU as its model writes it, since cuDNN has no engine for it."""

from __future__ import annotations

import copy

import pytest
import torch

from cudnngraph.ir.canonical import canonical
from cudnngraph.models.convert import Imported, convert
from cudnngraph.models.export import export
from cudnngraph.rewrite.passes import prepared
from tests import numerics
from tests.converted import run
from tests.cpu.rewrite.test_views_behind import ops, same_numbers
from tests.models import ChannelAttention

HEADS, WIDTH, TOKENS = 2, 8, 49


def imported(model: torch.nn.Module, x: torch.Tensor, *, on_gpu: bool) -> Imported:
    made = export(model, (x,), {})
    return convert(
        made.module,
        made.constants,
        made.placeholders,
        channels_last=True,
        on_gpu=on_gpu,
        kernels=True,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cosines", [False, True])
def test_attention_over_channels_is_products_for_a_gpu(
    cosines: bool, fused: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = ChannelAttention(HEADS, WIDTH, cosines=cosines, fused=fused).eval().to(dtype)
    x = torch.randn(3, TOKENS, HEADS * WIDTH).to(dtype)
    made = imported(model, x, on_gpu=True)
    assert made.spec is not None
    assert ops(made.spec).count("sdpa") == fused
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
        (ours,) = run(made, (x,))
        numerics.check(ours, want, dtype, model(x))
    spec = canonical(made.spec)
    ready = prepared(spec)
    assert [op for op in ops(ready) if op in ("matmul", "softmax", "sdpa")] == [
        *("matmul", "matmul", "softmax", "matmul", "matmul")
    ]
    same_numbers(spec, ready)


@pytest.mark.parametrize(
    ("width", "on_gpu", "fuses"),
    [(8, False, True), (64, True, False), (128, True, True), (128, False, True)],
)
def test_many_scores_and_a_cpu_have_attention(width: int, on_gpu: bool, fuses: bool) -> None:
    """Scores of 128 channels are more than half of the data of 49 pixels."""
    model = ChannelAttention(HEADS, width, cosines=True).half().eval()
    made = imported(model, torch.randn(3, TOKENS, HEADS * width).half(), on_gpu=on_gpu)
    assert made.spec is not None and ops(made.spec).count("sdpa") == fuses
