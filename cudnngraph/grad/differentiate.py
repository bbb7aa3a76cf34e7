"""Gradients of whole graphs, as graphs of the same IR.

:func:`differentiate` turns a declared graph into two: the forward with what has to be saved as
further outputs, and the backward, a graph like every other. Rules are written with the builder. A
rule answers with one function per operand; only those are called whose gradient somebody needs, so
what ``wrt`` does not reach emits nothing.

What a rule asks of the forward is recomputed from what is there anyway, the forward's inputs and
outputs, as far as pointwise ops go. What cannot be, is saved: of all sets of tensors from which
the rest follows by pointwise ops, the one of the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..arguments import checked
from ..errors import GraphError, Problem
from ..graph.builder import Graph
from ..ir.spec import GraphSpec, Node, free
from ..ops.base import FLOATS, dtype_name
from ..ops.infer import check_node
from ..ops.table import OPS, by_port
from .backward import Backward, Gradient, torch_dtypes
from .context import NoGradient
from .min_cut import min_cut_saved
from .rules.table import RULES


@checked
def differentiate(graph: Graph | GraphSpec, wrt: Sequence[str]) -> Gradient:
    """The gradient of every floating output of ``graph`` for the inputs ``wrt``.

    Statistics (the lse of attention; the batch's mean and inv_std, and the next running statistics)
    are outputs without a gradient. Raises :class:`GraphError` when ``wrt`` names what is no
    floating input, or what no gradient reaches, and where an op on the way has no gradient.
    """
    spec = _visible_names(graph.spec() if isinstance(graph, Graph) else graph)
    wrt = tuple(dict.fromkeys(wrt))
    problems = _check_wrt(spec, wrt)
    if problems:
        raise GraphError(spec.name, problems)
    active = _active(spec, wrt)
    spec = _with_statistics(spec, active)
    asked = Backward(spec, wrt, active, None)
    asked.build()
    saved = min_cut_saved(spec, asked.requested, asked.read_by_anchors(), asked.dtypes)
    final = Backward(spec, wrt, active, saved)
    final.build()
    return final.finish()


def differentiable(spec: GraphSpec) -> tuple[str, ...]:
    """The floating inputs that lie on a way to a floating output, other than one of jumps."""
    reached = {name for name in spec.outputs if spec.tensors[name].dtype in FLOATS}
    for node in reversed(spec.nodes):
        rule = RULES[node.op]
        if node.outputs[0] in reached and not (isinstance(rule, NoGradient) and rule.flat):
            fixed = OPS[node.op].no_grad_ports
            reached.update(
                name
                for port, name in by_port(node).items()
                if name is not None and port not in fixed
            )
    return tuple(
        name for name in spec.inputs if name in reached and spec.tensors[name].dtype in FLOATS
    )


# -- before the walk -------------------------------------------------------------------------------


def _visible_names(spec: GraphSpec) -> GraphSpec:
    """Any tensor may become an output, and the name of an output starts with a letter."""
    taken, new = set(spec.tensors), {}
    for name in spec.intermediates:
        if name.startswith("_"):
            new[name] = free(f"saved{name}", taken)
    return spec.rename(new) if new else spec


def _check_wrt(spec: GraphSpec, wrt: Sequence[str]) -> list[Problem]:
    problems = []
    if not wrt:
        problems.append(Problem("wrt", "is empty", f"some of: {', '.join(spec.inputs)}"))
    for name in wrt:
        where = f"wrt '{name}'"
        if name not in spec.inputs:
            problems.append(Problem(where, "is no input", f"one of: {', '.join(spec.inputs)}"))
        elif spec.tensors[name].dtype not in FLOATS:
            kind = dtype_name(spec.tensors[name].dtype)
            problems.append(Problem(where, f"is {kind}", "a floating input of 16 bits or more"))
    return problems


def _active(spec: GraphSpec, wrt: Sequence[str]) -> frozenset[str]:
    """The floating tensors that depend on ``wrt``. Gradients flow through first results alone."""
    active = set(wrt)
    statistics: dict[str, Node] = {}
    problems = []
    for node in spec.nodes:
        result = node.outputs[0]
        rule = RULES[node.op]
        used = [name for name in node.operands if name in statistics]
        if used and isinstance(rule, NoGradient) and rule.flat:
            used = []
        problems += [
            Problem(
                f"{node.op} '{node.name}'",
                f"uses '{name}', a statistic of {statistics[name].op} '{statistics[name].name}'",
                "no further use of it",
                "no gradient flows through it",
            )
            for name in used
        ]
        if not any(name in active for name in node.operands):
            continue
        if isinstance(rule, NoGradient):
            if not rule.flat:
                problems.append(Problem(f"{node.op} '{node.name}'", rule.reason))
            continue
        if result is not None and spec.tensors[result].dtype.is_floating_point:
            active.add(result)
        statistics |= {name: node for name in node.outputs[1:] if name is not None}
    if problems:
        raise GraphError(spec.name, problems)
    return frozenset(active)


def _with_statistics(spec: GraphSpec, active: frozenset[str]) -> GraphSpec:
    """The graph in which what is differentiated gives the statistics that its gradient reads."""
    tensors, nodes, taken = dict(spec.tensors), [], set(spec.tensors)
    dtypes = torch_dtypes(spec)
    for node in spec.nodes:
        switch = OPS[node.op].stats_flag
        if switch is None or node.outputs[0] not in active or node.attr(switch):
            nodes.append(node)
            continue
        row = OPS[node.op]
        operands = {
            port: None if name is None else replace(spec.tensors[name], dtype=dtypes[name])
            for port, name in by_port(node).items()
        }
        checked = check_node(node.op, node.name, operands, {**dict(node.attrs), switch: True})
        outputs = [node.outputs[0]]
        for port, result in zip(row.outputs[1:], checked.results[1:], strict=True):
            assert result is not None
            outputs.append(free(f"{node.outputs[0]}_{port}", taken))
            tensors[outputs[-1]] = replace(result, name=outputs[-1])
        nodes.append(replace(node, outputs=tuple(outputs), attrs=checked.attrs))
    return replace(spec, tensors=tensors, nodes=tuple(nodes))


# -- the walk --------------------------------------------------------------------------------------
