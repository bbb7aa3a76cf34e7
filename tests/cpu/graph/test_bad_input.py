"""Every mistake is reported before anything runs, in the words that mend it.

The table, :mod:`tests.mistakes`, holds mistakes in a graph.
Mistakes in policies have a shorter table below; those in bound tensors: runtime/test_bound.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cudnngraph as cg
from tests.mistakes import ROWS
from tests.mistakes.declare import F16, Bad, image, output_of, weight


def test_the_table_has_at_least_60_rows() -> None:
    assert len(ROWS) >= 60
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_one_mistake_is_one_problem_in_the_right_words(row: Bad) -> None:
    g = cg.Graph("g")
    row.declare(g)
    with pytest.raises(cg.GraphError) as caught:
        g.compile("cpu")
    problems = [str(problem) for problem in caught.value.problems]
    assert len(problems) == 1, problems
    for part in row.says:
        assert part in problems[0]
    assert str(caught.value) == f"graph 'g' has 1 problem:\n  - {problems[0]}"


# -- several at once -------------------------------------------------------------------------------


def test_all_problems_of_a_graph_come_in_one_raise_in_order() -> None:
    g = cg.Graph("several")
    x = image(g)
    w = weight(g, 32, 8, 3, 3)
    first = g.conv(x, w, stride=0, name="c1")
    second = g.leaky_relu(first, math.nan, name="never_seen")
    g.input("spare", (4,), F16)
    g.output("y", second)
    g.output("z", g.add(x, g.input("r", (7,), F16), name="s"))
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    where = [problem.where for problem in caught.value.problems]
    assert where == ["conv 'c1'", "conv 'c1'", "add 's'", "input 'spare'"]
    message = str(caught.value)
    assert message.startswith("graph 'several' has 4 problems:\n  - conv 'c1': weight has 8")
    assert "stride=0 is not positive" in message


def test_an_unknown_result_causes_no_further_problems() -> None:
    g = cg.Graph("chain")
    y = g.conv(image(g), weight(g), padding=-1)
    for _ in range(5):
        y = g.relu(y + 1.0) * y
    y = g.where(y > 0.0, y, g.bias(y, g.input("b", (99,), F16)))
    g.output("y", y)
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    assert len(caught.value.problems) == 1
    assert "padding=-1" in str(caught.value)


def test_asking_an_unknown_value_for_its_shape_raises_the_cause() -> None:
    g = cg.Graph("early")
    y = g.conv(image(g), weight(g), dilation=0)
    with pytest.raises(cg.GraphError, match="dilation=0"):
        _ = y.shape


@pytest.mark.parametrize("name", ["two words", "", "9", "for"])
def test_a_graph_is_named_by_an_identifier(name: str) -> None:
    g = cg.Graph(name)
    output_of(g)
    with pytest.raises(cg.GraphError, match="is not a Python identifier"):
        g.compile("cpu")


@pytest.mark.parametrize("option", ["compute_dtype", "intermediate_dtype"])
def test_arithmetic_is_in_a_floating_dtype(option: str) -> None:
    g = cg.Graph("g", **{option: torch.int32})
    output_of(g)
    with pytest.raises(cg.GraphError, match=f"{option}=torch.int32; expected a floating-point"):
        g.compile("cpu")


def test_an_unknown_op_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute or op 'swish'"):
        image(cg.Graph("g")).swish()


# -- policy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tune": "fastest"}, "tune='fastest' is unknown"),
        ({"allow_tf32": "yes"}, "allow_tf32='yes'"),
        ({"allow_tf32": 1}, "allow_tf32=1; expected True, False or None"),
        ({"deterministic": None}, "deterministic=None"),
        ({"workspace_limit": -1}, "workspace_limit=-1"),
        ({"workspace_limit": 1.5}, "workspace_limit=1.5"),
        ({"workspace_limit": True}, "workspace_limit=True"),
        ({"fallback": "eager"}, "fallback='eager' is unknown"),
        ({"determinstic": True}, "unknown option determinstic; a policy has tune, allow_tf32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_policy_takes_no_value_without_a_meaning(options: dict[str, Any], says: str) -> None:
    g = cg.Graph("g")
    output_of(g)
    with pytest.raises(cg.PolicyError) as caught:
        g.compile("cpu", **options)
    assert says in str(caught.value)


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused() -> None:
    g = cg.Graph("g")
    output_of(g)
    with pytest.raises(cg.PolicyError, match="device='meta'; expected a CPU or a CUDA device"):
        g.compile("meta")
