"""`warm_up` compiles every graph of a list, and draws a bar on a terminal."""

from __future__ import annotations

from typing import Any

import pytest

import cudnngraph as cg
from tests.fakes import World
from tests.lookups import compiled, graph


def test_warm_up_compiles_every_graph(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    graphs: list[Any] = [graph("relu"), graph("tanh").spec(), graph("relu", name="renamed")]
    stats = cg.warm_up(iter(graphs), "cuda:0", progress=False)
    assert stats.lookups == {"built": 2, "memory": 1}
    assert compiled("tanh")._program.tier == "built"
    assert len(world.built) == 2
    assert capfd.readouterr() == ("", "")


def test_warm_up_takes_the_policys_fields(world: World) -> None:
    cg.warm_up([graph()], "cuda:0", deterministic=True)
    assert compiled(deterministic=True)._program is not compiled()._program
    assert cg.cache_stats().lookups == {"built": 2, "memory": 1}
    with pytest.raises(cg.PlanNotCached):
        cg.warm_up([graph("tanh")], "cuda:0", policy=cg.Policy(tune="cached"))


def test_the_bar_is_drawn_on_standard_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    cg.warm_up([graph("relu"), graph("tanh")], "cpu", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "compiling" in err


def test_no_bar_where_standard_error_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    stats = cg.warm_up([graph("relu")], "cpu")
    assert stats.lookups["reference"] + stats.lookups.get("memory", 0) > 0
    assert capfd.readouterr() == ("", "")
