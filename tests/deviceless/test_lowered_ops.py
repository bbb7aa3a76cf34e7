"""Norms, clamps, leaky relus and matmuls as the frontend is told of them, and their plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.deviceless import propose_for
from cudnngraph.backend.lowering.context import Constant

TARGET = "nvidia-h200"


@pytest.mark.usefixtures("driver")
def test_the_epsilon_of_a_norm_lies_on_the_host_and_a_missing_bias_is_zeros() -> None:
    g = cg.Graph("norm")
    x, w = g.input("x", (4, 24, 64), torch.float16), g.input("w", (64,), torch.float16)
    g.output("y", g.layer_norm(x, w, eps=0.25))
    lowered, candidates = propose_for(g.spec(), TARGET)
    zeros, eps = lowered.extras
    assert zeros == Constant(4, 64, 0.0, torch.float16)
    assert eps == Constant(5, 1, 0.25, torch.float32, on_host=True)
    assert lowered.graph.find_tensor(eps.uid).is_pass_by_value
    assert not lowered.graph.find_tensor(zeros.uid).is_pass_by_value
    assert candidates


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("taken", [(), ("mean",), ("inv_std",), ("mean", "inv_std")], ids=str)
def test_a_plan_of_a_norm_hands_out_all_of_its_statistics_or_none(taken: tuple[str, ...]) -> None:
    g = cg.Graph("norm")
    x, w = g.input("x", (4, 24, 64), torch.float16), g.input("w", (64,), torch.float16)
    y, mean, inv_std = g.layer_norm(x, w, return_stats=True)
    g.output("y", y)
    for name in taken:
        g.output(name, {"mean": mean, "inv_std": inv_std}[name])
    (step,) = cg.explain(g, TARGET).steps
    assert step.runs_on == ("torch" if len(taken) == 1 else "cuDNN")
    assert len(taken) != 1 or step.refusals[0].reason.startswith("layer_norm hands out all")


def test_two_products_share_no_plan() -> None:
    g = cg.Graph("two")
    x, w = g.input("x", (64, 64), torch.float16), g.input("w", (64, 64), torch.float16)
    g.output("y", (x @ w) @ w)
    with pytest.raises(cg.NotSupported) as caught:
        propose_for(g.spec(), TARGET)
    assert caught.value.reasons == ("matmul shares a plan with pointwise ops alone",)


@pytest.mark.usefixtures("driver")
def test_a_clamp_is_a_clipped_relu_which_keeps_nan() -> None:
    def told(low: float | None, high: float | None) -> list[str]:
        g = cg.Graph("clamp")
        g.output("y", g.clamp(g.input("x", (64, 64), torch.float16), low, high))
        lowered, _ = propose_for(g.spec(), TARGET)
        return [node.params["mode"] for node in lowered.graph.nodes]

    assert told(0.0, None) == told(0.0, 6.0) == told(0.5, None) == ["relu"]
    assert told(None, 0.5) == ["min"]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("slope", "modes"), [(0.2, ["leaky_relu"]), (2.0, ["mul", "min"])])
def test_a_leaky_relu_steeper_than_1_is_the_smaller_of_x_and_its_multiple(
    slope: float, modes: list[str]
) -> None:
    """cuDNN's engines take the larger of the two, whatever the slope (9.19)."""
    g = cg.Graph("leaky")
    g.output("y", g.leaky_relu(g.input("x", (64, 64), torch.float16), slope))
    lowered, _ = propose_for(g.spec(), TARGET)
    assert [node.params["mode"] for node in lowered.graph.nodes] == modes


BEHIND_ROWS: dict[str, tuple[Callable[..., cg.Value], str]] = {
    "squared": (lambda g, y, z: y * y + z, "mul of a tensor and itself"),
    "doubled": (lambda g, y, z: y + y - z, "add of a tensor and itself"),
    "z - y": (lambda g, y, z: z - y, "sub with the norm's result second"),
    "relu'": (lambda g, y, z: g.relu_backward(y, z), "relu_backward beside a norm"),
    "2 y + z": (lambda g, y, z: y * 2.0 + z, ""),
    "z * y": (lambda g, y, z: z * y, ""),
    "y - z": (lambda g, y, z: y - z, ""),
}


def behind_rows(norm: str, name: str, width: int, dtype: torch.dtype) -> cg.GraphSpec:
    g = cg.Graph("norm")
    x, z = g.input("x", (96, width), dtype), g.input("z", (96, width), dtype)
    w = g.input("w", (width,), dtype)
    y = g.rms_norm(x, w) if norm == "rms_norm" else g.layer_norm(x, w, w)
    g.output("y", BEHIND_ROWS[name][0](g, y, z))
    return g.spec()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("name", BEHIND_ROWS)
def test_ops_in_which_cudnn_crashes_share_no_plan_with_a_norm_of_rows(norm: str, name: str) -> None:
    """Engine 5 leaves its memory in the first three; in float32 its build crashes in the fourth."""
    why = BEHIND_ROWS[name][1]
    spec = behind_rows(norm, name, 256, torch.float32 if name == "relu'" else torch.float16)
    if not why:
        assert propose_for(spec, TARGET)[1]
        return
    with pytest.raises(cg.NotSupported) as caught:
        propose_for(spec, TARGET)
    assert caught.value.reasons[0].startswith(why)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", ["squared", "z - y", "z * y"])
def test_a_norm_by_a_product_takes_its_result_second_and_twice(name: str) -> None:
    """Its engine gets it right, as behind `normalize`."""
    _, candidates = propose_for(behind_rows("rms_norm", name, 64, torch.float16), TARGET)
    assert {candidate.choice.engine for candidate in candidates} == {7}


@pytest.mark.usefixtures("driver")
def test_what_broadcasts_or_lies_otherwise_shares_no_plan_with_a_batch_norm() -> None:
    def behind(shape: tuple[int, ...], layout: str = "channels_last") -> cg.GraphSpec:
        g = cg.Graph("norm")
        x = g.input("x", (4, 64, 8, 8), torch.float16, layout="channels_last")
        v = g.input("v", shape, torch.float16, layout=layout)
        w, b = (g.input(name, (64,), torch.float32) for name in "wb")
        g.output("y", g.relu(g.batch_norm_train(x, w, b)[0] + v))
        return g.spec()

    assert propose_for(behind((4, 64, 8, 8)), TARGET)[1]
    with pytest.raises(cg.NotSupported, match="what broadcasts behind a batch norm"):
        propose_for(behind((1, 64, 1, 1)), TARGET)
    with pytest.raises(cg.NotSupported, match="what lies otherwise than the images"):
        propose_for(behind((4, 64, 8, 8), "contiguous"), TARGET)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("op", ["add", "mul", "minimum", "maximum"])
def test_what_is_computed_is_the_first_operand_where_they_may_be_exchanged(op: str) -> None:
    """In both orders the frontend is told the same."""

    def seen(second: bool) -> list[str]:
        g = cg.Graph("order")
        x, w = g.input("x", (96, 64), torch.float16), g.input("w", (64, 128), torch.float16)
        z = g.input("z", (96, 128), torch.float16)
        y = g.matmul(x, w)
        g.output("y", getattr(g, op)(*((z, y) if second else (y, z))))
        lowered, _ = propose_for(g.spec(), TARGET)
        last = lowered.graph.nodes[-1]
        return [tensor.name for tensor in last.inputs.values()]

    first, *others = seen(False)
    assert first != "z" and others == ["z"]
    assert seen(True)[1:] == ["z"]
