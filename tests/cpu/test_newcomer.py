"""First contact: short printed forms, and mistakes that are reported with their mend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import cudnngraph as cg

F16 = torch.float16


def graph() -> cg.Graph:
    g = cg.Graph("block")
    x, w = g.input("x", (2, 3), F16), g.input("w", (3, 3), F16)
    g.output("y", ((x @ w).relu() @ w).relu())
    return g


def test_a_graph_is_printed_in_one_line() -> None:
    said = "ops: 2 matmul, 2 relu; inputs: <x: f16[2, 3]>, <w: f16[3, 3]>; outputs: y"
    assert repr(graph()) == f"<Graph block; {said}>"
    assert repr(cg.Graph("empty")) == "<Graph empty; ops: none; inputs: none; outputs: none>"


def test_a_graph_with_a_mistake_is_printed_too() -> None:
    g = cg.Graph("<b>")
    g.input("x", (2,), "float16")  # type: ignore[arg-type]
    assert repr(g).endswith("inputs: <x: unknown>; outputs: none; 2 problem(s)>")
    html = g._repr_html_()
    assert "&lt;b&gt;" in html and "write torch.float16" in html and "<b>" not in html


def test_many_ops_are_cut_short() -> None:
    g = cg.Graph("long")
    y = g.input("x", (2,), F16)
    for op in ("relu", "exp", "abs", "neg", "tanh", "sigmoid", "sqrt", "sqrt"):
        y = getattr(g, op)(y)
    assert "ops: 2 sqrt, relu, exp, abs, neg, tanh, 1 more;" in repr(g)


class Hostile(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def test_a_report_is_short_until_it_is_printed() -> None:
    Hostile.__name__ = "<b>"
    report = cg.fuse(Hostile().eval(), torch.ones(2, 3)).report
    assert repr(report) == "<Report of <b> on cpu: 1 steps (1 reference); print it for the steps>"
    assert "runs on" in str(report)
    html = report._repr_html_()
    assert "<b>" not in html and "&lt;b&gt; on cpu" in html and "<td>relu</td>" in html


def test_html_of_an_executable_has_its_steps() -> None:
    html = graph().compile("cpu")._repr_html_()
    assert html.startswith("<pre>") and "matmul" in html and "<x:" not in html


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((2, 3), "float16"), "dtype='float16' is a str; expected a torch.dtype (write torch.flo"),
        (((2, 3), "torch.int8"), "dtype='torch.int8' is a str; expected a torch.dtype (write torc"),
        (((2, 3), "half"), "dtype='half' is a str; expected a torch.dtype"),
        (("2,3", F16), "shape='2,3' is a str; expected whole numbers >= 0"),
    ],
)  # fmt: skip
def test_strings_for_dtypes_and_shapes(arguments: tuple[Any, ...], text: str) -> None:
    g = cg.Graph("a")
    g.output("y", g.input("x", *arguments).relu())
    with pytest.raises(cg.GraphError, match=re.escape(f"input 'x': {text}")):
        g.spec()


def test_an_int_for_the_shape_of_another_tensor() -> None:
    g = cg.Graph("a")
    g.output("y", g.input("x", 6, like=torch.ones(2, 3)).relu())  # type: ignore[arg-type]
    assert g.spec().tensors["x"].shape == (6,)


def test_one_value_is_no_list_of_values() -> None:
    g = cg.Graph("a")
    g.output("y", g.concat(g.input("x", (2, 3), F16)))  # type: ignore[arg-type]
    with pytest.raises(cg.GraphError, match="x is a Value; expected a list of values"):
        g.spec()


def test_a_function_is_sent_to_torch_compile() -> None:
    wanted = (
        r"is a function; expected a torch.nn.Module \(for a function: torch.compile\(function, b"
    )
    with pytest.raises(cg.PolicyError, match=wanted):
        cg.fuse(lambda x: x, torch.ones(2))  # type: ignore[arg-type]


def test_policies_name_what_they_take() -> None:
    with pytest.raises(cg.PolicyError, match="tune is a dict; expected 'heuristic', 'autotune' or"):
        cg.Policy(tune={})  # type: ignore[arg-type]
