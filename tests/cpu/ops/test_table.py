"""The tables of ops agree: a row each in infer, reference, lower and grad, a method, samples."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest

import cudnngraph as cg
from cudnngraph.backend.lowering import base, driver, placement, refusals
from cudnngraph.executor import reference
from cudnngraph.grad.rules.table import RULES
from cudnngraph.graph.pointwise import ACTIVATIONS
from cudnngraph.graph.value import METHODS
from cudnngraph.ir.spec import GraphSpec, Node
from cudnngraph.ops import pooling
from cudnngraph.ops.base import ROWS, Role, Trait, register
from cudnngraph.ops.table import OPS
from cudnngraph.rewrite.packed import SEQUENCE_PORTS
from tests import python, samples

NAMES = sorted(OPS)
LOSSES = {
    f"{name}{suffix}"
    for name in ("softmax", "log_softmax", "nll_loss")
    for suffix in ("", "_backward")
}


def test_the_tables_have_the_same_keys() -> None:
    assert set(reference.RULES) == set(OPS)
    assert set(driver.RULES) == set(OPS)
    assert set(RULES) == set(OPS)


def test_a_name_has_one_row() -> None:
    with pytest.raises(ValueError, match="op 'matmul' is registered twice"):
        register("matmul", "x y", OPS["matmul"].infer, OPS["matmul"].reference)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"traits": "fp16_safe bent"}, "bent"),
        ({"inputs": "x y:chanels"}, "chanels"),
        ({"outputs": "y z:chanels"}, "chanels"),
        ({"no_grad_ports": "z"}, "z"),
        ({"positive_port": "z"}, "z"),
        ({"stats_flag": "return_lse"}, "return_lse"),
    ],
)
def test_a_row_may_not_name_what_there_is_not(given: dict[str, Any], what: str) -> None:
    row = OPS["matmul"]
    with pytest.raises(ValueError, match=f"op 'new' names what there is not: {what}"):
        register("new", given.pop("inputs", "x y"), row.infer, row.reference, **given)
    assert "new" not in ROWS


def test_every_trait_and_role_is_some_ops() -> None:
    assert {trait for op in OPS.values() for trait in op.traits} == set(get_args(Trait))
    roles = [role for op in OPS.values() for role in (op.roles | op.result_roles).values()]
    assert set(roles) == set(get_args(Role))
    assert set(placement.PLACEMENT) == set(get_args(Role))


def test_the_tables_can_be_read_without_cudnn() -> None:
    code = (
        "import sys, torch; theirs = set(sys.modules)\n"  # torch imports cuda from 2.15 on
        "import cudnngraph.backend.lowering.driver\n"
        "print({'cudnn', 'cuda'} & (set(sys.modules) - theirs))"
    )
    done = python.run("-c", code, check=True)
    assert done.stdout == "set()\n"


def test_every_op_occurs_in_the_samples() -> None:
    used = {node.op for case in samples.enumerate_cases() for node in case.build().spec().nodes}
    assert used == set(OPS)


def _one_of_each() -> list[tuple[samples.Case, GraphSpec]]:
    """Sample graphs that have every op between them."""
    chosen, seen = [], set()
    for case in samples.enumerate_cases():
        spec = case.build().spec()
        ops = {node.op for node in spec.nodes}
        if ops - seen:
            chosen.append((case, spec))
            seen |= ops
    return chosen


def test_no_reference_goes_through_the_backend() -> None:
    """The rules call only the parts of the package that compute, none that compiles or selects."""
    package, entered = Path(cg.__file__).parent, set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    for case, spec in _one_of_each():
        given = samples.make_inputs(case)
        sys.setprofile(profile)
        try:
            reference.run(spec, [given[name] for name in spec.inputs])
        finally:
            sys.setprofile(None)
    files = {Path(name) for name in entered}
    ours = {file.relative_to(package).as_posix() for file in files if package in file.parents}
    assert "executor/reference.py" in ours
    assert {file.split("/")[0] for file in ours} == {"executor", "ir", "ops"}
    assert not [file for file in files if {"cudnn", "cuda"} & set(file.parts)]


@pytest.mark.parametrize("name", sorted(set(OPS) - {"constant"}))
def test_the_method_of_an_op_has_its_ports_and_its_defaults(name: str) -> None:
    """A default stands in the table and in the signature of the builder; they are the same."""
    row = OPS[name]
    parameters = dict(inspect.signature(getattr(cg.Graph, name)).parameters)
    for word in ("self", "name", "approximate" if name == "gelu" else ""):
        parameters.pop(word, None)
    assert set(parameters) == (set(row.ports) | set(row.attrs)) - {"ragged"}
    made = set(SEQUENCE_PORTS) if "ragged" in row.ports else set()
    for port in set(row.ports) - made:  # of these, cutting puts the last for the others
        required = parameters[port].default is inspect.Parameter.empty
        assert required == row.required(port), port
    for attr, default in row.attrs.items():  # REQUIRED is what inspect says of no default
        assert parameters[attr].default == default, attr


def test_every_op_is_a_method_of_a_value() -> None:
    assert set(OPS) - {"constant", "concat", "aten"} <= METHODS


@pytest.mark.parametrize("name", NAMES)
def test_a_row_names_its_ports_and_outputs_once(name: str) -> None:
    row = OPS[name]
    words = (*row.ports, *row.outputs, *row.attrs)
    assert row.name == name
    assert len(set(row.ports)) == len(row.ports)
    assert all(word.isidentifier() for word in words)
    assert len(row.outputs) >= 1


def test_ops_that_move_elements_are_refused_by_name_and_no_others() -> None:
    refused = {name for name, rule in driver.RULES.items() if rule is refusals.torch_only}
    views = {name for name in OPS if OPS[name].view}
    assert refused == {"reshape", "transpose", "permute", "slice", "concat", "ragged_offsets"}
    assert views == refused - {"concat", "ragged_offsets"}


def test_what_a_row_calls_torchs_alone_is_refused_with_a_reason() -> None:
    torch_only = {name for name in OPS if OPS[name].torch_only}
    grouped = {name for name in OPS if OPS[name].has("grouped")}
    others = {"concat", "aten", "group_affine", *grouped}
    assert torch_only == {*others, *LOSSES, *pooling.RULES}
    for name in torch_only:
        (refuse,) = (rule for rule in refusals.REFUSALS if rule is driver.RULES[name])
        with pytest.raises(base.Refused, match=f"^{name}.*a torch step"):
            refuse(None, Node(name, name, (), (), (("overload", "aten.relu.default"),)))


def test_softmax_alone_is_said_to_be_in_attention() -> None:
    refused = {name for name, rule in driver.RULES.items() if rule is refusals.no_softmax}
    assert refused == {name for name in OPS if "softmax" in name}


def test_a_list_of_operands_has_a_port_each() -> None:
    assert OPS["concat"].ports == ("x",)
    assert OPS["concat"].ports_of(3) == ("x0", "x1", "x2")
    assert OPS["conv"].ports_of(2) == OPS["conv"].ports


def test_the_anchors_are_the_ops_that_sum_over_elements_or_move_them() -> None:
    assert {name for name in OPS if not OPS[name].pointwise} == {
        "aten",
        "concat",
        "permute",
        "reshape",
        "slice",
        "transpose",
        *pooling.RULES,
        *LOSSES,
        "conv",
        "conv_transpose",
        "conv_wgrad",
        "matmul",
        "grouped_matmul",
        "grouped_matmul_wgrad",
        "reduction",
        "batch_norm_train",
        "batch_norm_backward",
        "instance_norm",
        "instance_norm_backward",
        "group_affine",
        "layer_norm",
        "layer_norm_backward",
        "rms_norm",
        "rms_norm_backward",
        "normalize",
        "sdpa",
        "sdpa_fp8",
        "sdpa_backward",
        "sdpa_paged",
        "sdpa_varlen",
        "sdpa_varlen_backward",
        "ragged_offsets",
    }


def test_the_samples_use_every_activation_of_the_compositions() -> None:
    assert set(samples.ACTIVATIONS) == set(ACTIVATIONS)
    ids = " ".join(case.id for case in samples.enumerate_cases())
    for name in set(ACTIVATIONS) - {"identity"}:
        assert f"-act_{name}-" in ids, name
