"""The public names as a type checker sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = """
import torch
import cudnngraph as cg
from typing_extensions import assert_type

g = cg.Graph("a")
x = g.input("x", (2, 2), torch.float16)
assert_type(x @ x, cg.Value)
assert_type(1 + x, cg.Value)
g.output("y", x @ x)
given = torch.ones(2, 2)

exe = g.compile("cpu", tune="autotune", exclude_engines=["eng8"])
kept: cg.Executable = exe
one: cg.Executable[torch.Tensor] = exe
assert_type(one(given), torch.Tensor)
trained: cg.Trainable[tuple[torch.Tensor, ...]] = g.compile("cpu", training=True, check=False)
assert_type(trained(given), tuple[torch.Tensor, ...])
assert_type(exe.bind(x=given, y=given), cg.BoundCall)
g.compile("cpu", tune="fast")  # type: ignore[call-overload]
g.compile("cpu", tuned="autotune")  # type: ignore[call-overload]

@cg.specialize
def block(g: cg.Graph, x: cg.Value) -> cg.Value:
    return g.relu(x)

@cg.specialize(tune="autotune", training=True)
def pair(g: cg.Graph, x: cg.Value) -> tuple[cg.Value, cg.Value]:
    return g.relu(x), x

@cg.specialize
def declared(g: cg.Graph, x: cg.Value) -> None:
    g.output("y", g.relu(x))

assert_type(block(given), torch.Tensor)
assert_type(pair(given), tuple[torch.Tensor, ...])
same: cg.Specialized = declared
cg.specialize(tune="fast")  # type: ignore[call-overload]
"""


def test_results_have_types_and_options_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "newcomer.py"
    file.write_text(TEXT)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    out, err, status = api.run(["--strict", str(file)])
    assert status == 0, out + err
