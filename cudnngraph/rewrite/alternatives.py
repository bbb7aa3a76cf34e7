"""Other ways to do what a threshold decides, to be measured beside the way that it decides.

A threshold of the rewrites gives the whole graph another form (:func:`of_graph`). One that the
lowering or a torch step asks is a mark on the nodes of a step (:func:`of_step`): whoever runs the
step follows its marks, in this process or another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..device.import_rules import Stage
from ..device.rules import Values, following, noting, others, rules
from ..ir.spec import GraphSpec
from ..ops.base import LOW_PRECISION
from ..partition.analysis import compute_nodes
from ..policy import Policy
from .annotate import marked, marks
from .passes import legalize


def of_graph(spec: GraphSpec, policy: Policy, taken: Values = ()) -> Iterator[Values]:
    """The values of one more threshold with which the declared graph has another legal form."""
    with noting() as asked:
        now = legalize(spec, policy, taken)
    with following(taken):
        found = tuple(others("graph"))
    for name, value in found:
        if name in dict(taken) or name not in asked:
            continue
        if legalize(spec, policy, (*taken, (name, value))) != now:
            yield ((name, value),)


def of_step(spec: GraphSpec) -> Iterator[tuple[Stage, GraphSpec]]:
    """The marked forms of a step that may run in another way, each with who runs it so."""
    if marks(spec):
        return
    stages: tuple[Stage, ...] = ("cudnn", "torch")
    for stage in stages:
        for name, value in others(stage):
            if ASKS[name](spec, value):
                yield stage, marked(spec, ((name, value),))


# -- which steps ask which threshold ---------------------------------------------------------------


def _gelu_behind_matmul(spec: GraphSpec, _: object) -> bool:
    """A product with gelu behind it that is rounded to 16 bits or less."""
    ops = {node.op for node in spec.nodes}
    rounded = all(spec.tensors[name].dtype.itemsize < 4 for name in spec.outputs)
    return rounded and "gelu" in ops and not ops.isdisjoint(("conv", "conv_transpose", "matmul"))


def _short_norm(spec: GraphSpec, value: int) -> bool:
    """An RMS norm alone that a product may compute, whose row is on the other side of ``value``."""
    nodes = compute_nodes(spec.nodes)
    if len(nodes) != 1 or nodes[0].op != "rms_norm":
        return False
    x, weight = (spec.tensors[name] for name in nodes[0].operands[:2])
    row, now = x.shape[-1], rules()
    summed = 8 <= weight.numel <= now.rms_norm_by_matmul_max_row and len(weight.shape) == 1
    crosses = (row <= now.rms_norm_by_matmul_faster_row) != (row <= value)
    return summed and crosses and weight.numel % 8 == 0 and x.dtype in LOW_PRECISION


def _group_statistics(spec: GraphSpec, _: object) -> bool:
    return [node.op for node in compute_nodes(spec.nodes)] == ["group_affine"]


def _enlarged(spec: GraphSpec, value: int) -> bool:
    """Linear interpolation of 16-bit images alone whose size is on the other side of ``value``."""
    nodes = compute_nodes(spec.nodes)
    if len(nodes) != 1 or nodes[0].op != "interpolate":
        return False
    made = spec.tensors[nodes[0].results[0]]
    linear = nodes[0].attr("mode") in ("linear", "bilinear")
    crosses = (made.numel < rules().resize_by_matmul_min_elements) != (made.numel < value)
    return linear and crosses and made.dtype in LOW_PRECISION


#: For each threshold of a step whether a step asks it, and gives another answer with a value.
ASKS: Mapping[str, Callable[[GraphSpec, int], bool]] = {
    "gelu_by_tanh_behind_matmul": _gelu_behind_matmul,
    "rms_norm_by_matmul_faster_row": _short_norm,
    "reduction_max_parts": _group_statistics,
    "resize_by_matmul_min_elements": _enlarged,
}
