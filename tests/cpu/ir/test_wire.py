"""Graphs as data for another process: what comes out is equal to what went in."""

from __future__ import annotations

import json

import pytest

import cudnngraph as cg
from cudnngraph.errors import CudnnGraphError
from cudnngraph.ir import wire
from cudnngraph.ir.spec import GraphSpec
from tests.samples import Case, enumerate_cases


def there_and_back(spec: GraphSpec) -> GraphSpec:
    return wire.to_spec(json.loads(json.dumps(wire.from_spec(spec))))


@pytest.mark.parametrize("case", enumerate_cases(), ids=str)
def test_a_graph_comes_back_equal(case: Case) -> None:
    spec = case.build().spec()
    back = there_and_back(spec)
    assert back == spec
    kinds = [[(key, type(value)) for key, value in node.attrs] for node in spec.nodes]
    assert kinds == [[(key, type(value)) for key, value in node.attrs] for node in back.nodes]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), -0.0, 1e-323, (1, (2.5, None))])
def test_numbers_that_json_does_not_have_come_back(value: object) -> None:
    """A mask that was converted has -inf."""
    back = wire._back(json.loads(json.dumps(wire._value(value))))
    assert repr(back) == repr(value)


def test_a_policy_comes_back_equal() -> None:
    policy = cg.Policy(allow_tf32=False, exclude_engines=("eng8", "eng4"), workspace_limit=7)
    assert wire.to_policy(json.loads(json.dumps(wire.from_policy(policy)))) == policy


def test_what_is_no_data_is_not_sent() -> None:
    with pytest.raises(CudnnGraphError, match="a object cannot be sent to another process"):
        wire._value(object())


def test_a_name_that_is_no_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="no dtype is called 'save'"):
        wire._dtype("save")
