"""Operands that are repeated along some dims beside a convolution: which of them cuDNN is asked."""

from __future__ import annotations

import itertools

import pytest

import cudnngraph as cg
from cudnngraph.backend import deviceless
from tests import broadcasts

SIZE = (2, 16, 12)
ANCHORS = ("conv 1x1", "conv 3x3", "conv 2 groups", "depthwise", "conv_transpose", "conv 3d")
CASES = [
    (anchor, "".join(whole))
    for anchor in ANCHORS
    for whole in itertools.product("w1", repeat=broadcasts.ANCHORS[anchor])
]


def taken(anchor: str, whole: str, computed: bool) -> bool:
    """Whether every engine was right for this case when each was run (H200, cuDNN 9.19)."""
    rank = len(whole)
    pixel = "w1" + "w" * (rank - 2)
    channel = "1w" + "1" * (rank - 2)
    if whole == pixel:
        return anchor != "conv_transpose" and not computed
    return whole in ("w" * rank, "1" * rank, channel)


@pytest.mark.parametrize(("anchor", "whole"), CASES)
@pytest.mark.parametrize("chain", ["x + v", "x + silu(v)", "relu(x v + c)", "silu(x + c + v)"])
def test_cudnn_is_asked_for_what_its_engines_get_right(anchor: str, whole: str, chain: str) -> None:
    spec = broadcasts.Case(anchor, whole, chain, "float16", 64, SIZE).graph().spec()
    if taken(anchor, whole, computed="silu(v)" in chain):
        deviceless.lower_for(spec, "nvidia-h200")
        return
    with pytest.raises(cg.NotSupported) as refused:
        deviceless.lower_for(spec, "nvidia-h200")
    (reason,) = refused.value.reasons
    assert "repeated over" in reason and reason.endswith(
        "beside a convolution, which cuDNN gets wrong"
    )


@pytest.mark.parametrize("anchor", ANCHORS[:2])
@pytest.mark.parametrize("channels", broadcasts.CHANNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("driver")
def test_a_number_a_pixel_is_taken_by_the_engines_that_were_run(
    anchor: str, channels: int, dtype: str
) -> None:
    """[N, 1, H, W], of which engines 2, 4, 7 and 8 are right: another one has to be tried first."""
    spec = broadcasts.Case(anchor, "w1ww", "x + v", dtype, channels, SIZE).graph().spec()
    _, candidates = deviceless.propose_for(spec, "nvidia-h200")
    assert {each.choice.engine for each in candidates} <= {2, 4, 7, 8}


@pytest.mark.usefixtures("driver")
def test_the_embedding_of_a_diffusion_models_block_is_one_plan_behind_the_convolutions() -> None:
    """Its bias stays with the convolution, whatever the order."""
    case = broadcasts.Case("conv 3x3", "ww11", "silu(x + c + v)", "float16", 320, SIZE)
    steps = cg.explain(case.graph(), "nvidia-h200").steps
    assert [(step.ops, step.runs_on) for step in steps] == [
        (("conv", "add"), "cuDNN"),
        (("add", "silu"), "cuDNN"),
    ]


@pytest.mark.parametrize("chain", ["relu(x)", "x + v", "relu(x v + c)"])
@pytest.mark.parametrize("anchor", ["conv 3x3", "conv 3x3 stride 2", "conv 2 groups"])
def test_one_pixel_beside_a_contiguous_weight_is_a_convolution_by_itself(
    anchor: str, chain: str
) -> None:
    """Its images lie both ways at once; engines 4, 7 and 52 took the weight to be channels_last."""
    one = broadcasts.Case(anchor, "wwww", chain, "float16", 64, (2, 1, 1), "contiguous")
    with pytest.raises(cg.NotSupported) as refused:
        deviceless.lower_for(one.graph().spec(), "nvidia-h200")
    (reason,) = refused.value.reasons
    assert reason.startswith("images of one pixel beside a weight that is not channels_last")
    for taken in (
        broadcasts.Case(anchor, "wwww", "x", "float16", 64, (2, 1, 1), "contiguous"),
        broadcasts.Case(anchor, "wwww", chain, "float16", 64, (2, 1, 1)),
        broadcasts.Case("conv 1x1", "wwww", chain, "float16", 64, (2, 1, 1), "contiguous"),
    ):
        deviceless.lower_for(taken.graph().spec(), "nvidia-h200")


@pytest.mark.parametrize("whole", ["".join(way) for way in itertools.product("w1", repeat=3)])
@pytest.mark.parametrize("chain", ["x + v", "x + silu(v)", "x / (|v| + 1)"])
def test_a_computed_column_of_a_batch_of_products_is_a_step_before(whole: str, chain: str) -> None:
    case = broadcasts.Case("matmul, batch", whole, chain, "float16", 64, SIZE)
    spec = case.graph().spec()
    if whole == "1w1" and chain != "x + v":
        with pytest.raises(cg.NotSupported, match="is computed and repeated over"):
            deviceless.lower_for(spec, "nvidia-h200")
        steps = cg.explain(case.graph(), "nvidia-h200").steps
        assert any(step.ops[0] == "matmul" for step in steps) and len(steps) > 1
    else:
        deviceless.lower_for(spec, "nvidia-h200")


def test_what_is_computed_of_one_number_behind_a_batch_norm_in_training_is_a_step_before() -> None:
    """Its rank is lower than the images', which ended in a bare ValueError."""
    case = broadcasts.Case("batch_norm_train", "1111", "x / (|v| + 1)", "float16", 8, (2, 4, 4))
    steps = cg.explain(case.graph(), "nvidia-h200").steps
    assert steps[0].ops == ("batch_norm_train",)
    assert sorted(op for step in steps[1:] for op in step.ops if op != "constant") == [
        *("abs", "add", "div")
    ]
