"""Facts that stay the same while files move: samples' keys, steps, gradients; public names.

    python -m tests.golden            write samples.txt and api.txt anew
    python -m tests.golden ID         print what the line of a sample is made of

A line of ``samples.txt`` has a digest each of: the key; the graph as it is cut, and its steps where
cuDNN takes every step, where it takes none, and where it takes single ops alone; the same of the
gradient, "-" where there is none.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cudnngraph as cg
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select.heuristic import heuristic
from tests import fakes, gradients
from tests.samples import Case, enumerate_cases

HERE = Path(__file__).parent
SAMPLES, API = HERE / "samples.txt", HERE / "api.txt"
MODULES = ("cudnngraph", "cudnngraph.functional", "cudnngraph.nn", "cudnngraph.bench.models")
POLICY = cg.Policy(allow_tf32=False, tune="heuristic", verify="off")
REFUSALS: dict[str, Callable[[GraphSpec], bool]] = {
    "taken": lambda spec: False,
    "refused": lambda spec: True,
    "one by one": lambda spec: sum(node.op != "constant" for node in spec.nodes) > 1,
}


def steps(spec: GraphSpec) -> str:
    """The steps of a graph, by what cuDNN takes."""
    lines = []
    for name, refuse in REFUSALS.items():
        lines.append(f"# {name}")
        for step in heuristic(spec, POLICY, fakes.builder(refuse)).steps:
            lines += [f"{step.choice}", str(step.spec)]
    return "\n".join(lines)


def parts(case: Case) -> Iterator[str]:
    """Yield the texts whose digests are a sample's line."""
    spec = case.build().spec()
    yield f"{graph_key(spec, POLICY).digest}\n{spec}"
    yield steps(spec)
    if gradients.differentiable(case):
        gradient = cg.differentiate(spec, gradients.floating_inputs(spec))
        yield f"{gradient.saved}\n{steps(gradient.forward)}\n{steps(gradient.backward)}"
    else:
        yield ""


def line(case: Case) -> str:
    """The line of a sample."""
    digests = [hashlib.sha256(p.encode()).hexdigest()[:16] if p else "-" for p in parts(case)]
    return " ".join([case.id, *digests])


def api() -> Iterator[str]:
    """Public names, with signatures and public members."""
    for module in map(importlib.import_module, MODULES):
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if name[0] != "_" and _is_ours(value)
        ]
        for name in sorted(names):
            value = getattr(module, name)
            place = f"{module.__name__}.{name}"
            if inspect.ismodule(value):
                yield place
                continue
            yield place + _signature(value)
            if inspect.isclass(value):
                ours = {name for each in value.__mro__ if _is_ours(each) for name in vars(each)}
                for member in sorted(name for name in ours if name[0] != "_"):
                    yield f"{place}.{member}{_signature(inspect.getattr_static(value, member))}"


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("cudnngraph")


def _signature(value: Any) -> str:
    value = getattr(value, "__func__", value)
    if not callable(value):
        return ""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"cudnngraph\.[a-z_.]*\b([A-Z]\w*)|0x[0-9a-f]+", r"\1", text)


def main(ids: list[str]) -> None:
    cases = enumerate_cases()
    if ids:
        for case in cases:
            if case.id in ids:
                print("\n".join(parts(case)))
        return
    SAMPLES.write_text("".join(f"{line(case)}\n" for case in cases))
    API.write_text("".join(f"{each}\n" for each in api()))
