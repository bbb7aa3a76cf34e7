"""Outputs of kernels that lie over inputs, as a program allows it for pointwise ops."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.pieces import Pieces
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tiling import Tiling
from tests import generated, host_kernels

SHAPE = (64, 96)


def crossed(turned: bool = False) -> GraphSpec:
    """The one output of the first input, the other one of both: either may lie over either."""
    g = cg.Graph("crossed")
    x = g.input("x", SHAPE, torch.float32)
    y = g.input("y", SHAPE, torch.float32)
    z = g.input("z", SHAPE, torch.float32, stride=(1, SHAPE[0]) if turned else None)
    g.output("u", g.relu(x))
    g.output("v", g.mul(g.sub(x, y), z))
    return g.spec()


def sources(turned: bool) -> list[Source]:
    spec = crossed(turned)
    choices = patterns.choices(spec, 4)
    kinds = {type(patterns.schedule_of(choice)) for choice in choices}
    assert (Tiling in kinds) == turned
    return [patterns.source(spec, choice) for choice in choices]


@pytest.mark.parametrize("turned", [False, True])
def test_an_output_over_an_input_that_another_one_is_made_of(turned: bool) -> None:
    spec, every = crossed(turned), sources(turned)
    for source in every:
        host_kernels.expect(source)
    for source in every:
        for over in (("x", "y"), ("y", "x")):
            given = {name: torch.randn(SHAPE) for name in "xy"}
            given["z"] = spec.tensors["z"].empty("cpu").normal_()
            wanted = reference.run(spec, [given[name].clone() for name in spec.inputs])
            inputs = [given[name] for name in spec.inputs]
            host_kernels.run(source, [*inputs, *(given[name] for name in over)])
            for name, want in zip(over, wanted, strict=True):
                torch.testing.assert_close(given[name], want)


def beside(shape: tuple[int, ...]) -> cg.Graph:
    """Two results that have nothing to do with each other, but for a number that both read."""
    g = cg.Graph("beside")
    x, y, s = (g.input(name, shape if name != "s" else (1,), torch.float32) for name in "xys")
    g.output("u", g.add(x, s))
    g.output("v", g.mul(y, s))
    return g


@pytest.mark.parametrize("shape", [(1,), (64, 96)])
def test_an_output_is_not_written_over_what_another_region_of_its_kernel_reads(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of several regions run in any order: the other one would read what was written."""
    kernels = generated.install(monkeypatch)
    exe = beside(shape).compile("cpu")
    assert [type(patterns.schedule_of(step.choice)) for step in kernels if step.choice] == [Pieces]
    given = {"x": torch.randn(shape), "y": torch.randn(shape), "s": torch.randn(1)}
    wanted = given["x"] + given["s"], given["y"] * given["s"]
    others = [("y", "v"), ("x", "u")] + [("s", "v")] * (shape == (1,))
    for over, beside_ in others:
        outs = {name: torch.empty(shape) for name in "uv"}
        outs["u" if beside_ == "v" else "v"] = given[over]
        with pytest.raises(cg.BindError, match=f"overlaps input '{over}'"):
            exe.run(**given, **outs)
    exe.run(**given, u=given["x"], v=given["y"])
    torch.testing.assert_close((given["x"], given["y"]), wanted)


@pytest.mark.parametrize("over", ["x", "y"])
def test_an_output_over_an_input_that_another_one_shows(over: str) -> None:
    g = cg.Graph("shown")
    x, y = (g.input(name, SHAPE, torch.float32) for name in "xy")
    g.output("u", g.add(x, y))
    g.output("v", g.identity(x))
    g.output("w", g.identity(y))
    given = {name: torch.randn(SHAPE) for name in "xy"}
    wanted = [given["x"] + given["y"], given["x"].clone(), given["y"].clone()]
    outs = {name: torch.empty(SHAPE) for name in "vw"}
    g.compile("cpu").run(**given, u=given[over], **outs)
    torch.testing.assert_close([given[over], *outs.values()], wanted)


@pytest.mark.parametrize("shape", [(4, 6, 5, 8), (64, 40, 1, 1), (2, 3, 64, 64)])
def test_running_statistics_are_overwritten(shape: tuple[int, ...]) -> None:
    """As modules have it, whichever thread runs first: each reads what it writes itself."""
    g = cg.Graph("batch_norm")
    x = g.input("x", shape, torch.float32)
    vectors = [g.input(name, (shape[1],), torch.float32) for name in ("w", "b", "mean", "var")]
    y, *_, mean, var = g.batch_norm_train(x, *vectors)
    for name, value in (("y", g.relu(y)), ("next_mean", mean), ("next_var", var)):
        g.output(name, value)
    spec = g.spec()
    every = [patterns.source(spec, choice) for choice in patterns.choices(spec, 4)]
    for source in every:
        host_kernels.expect(source)
    given = {name: torch.rand(spec.tensors[name].shape) + 0.5 for name in spec.inputs}
    wanted = reference.run(spec, [given[name] for name in spec.inputs], torch.float64)
    for source in every:
        for backwards in (False, True):
            here = {name: tensor.clone() for name, tensor in given.items()}
            outs = {"y": torch.empty(shape), "next_mean": here["mean"], "next_var": here["var"]}
            tensors = [*(here[n] for n in spec.inputs), *(outs[n] for n in spec.outputs)]
            host_kernels.run(source, tensors, backwards=backwards)
            for name, want in zip(spec.outputs, wanted, strict=True):
                torch.testing.assert_close(outs[name].double(), want, rtol=1e-5, atol=1e-5)
