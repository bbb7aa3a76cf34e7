"""``cudnngraph explain FILE[:NAME]``: the plans of a graph on a GPU that is not here.

FILE is Python. Of it are explained: the graphs at module level, and what functions annotated to
return a graph give; with NAME that one object or function alone. Exit codes: 0 when some step of
every graph is a plan or a generated kernel, 1 when none is of one of them or cuDNN cannot be asked,
2 when FILE cannot be run or holds no such graph, or the GPU is not described.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import runpy
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ..backend.deviceless import target_of, targets
from ..errors import CudnnGraphError, NotSupported
from ..explain.offline import Explanation, PlannedStep, describe, explain, refused, workspace
from ..graph.builder import Graph
from ..ir.spec import GraphSpec
from ..kernels.source import own_part
from .records import UsageError
from .table import print_table

JSON_SCHEMA = 1
"""Of the object that ``--json`` prints; raised when a field goes or changes its meaning."""

SHOWN = 10
_COLUMNS = ["#", "engine", "compiled", "workspace", "status", "knobs"]
_STYLES = {"taken": "green", "barred": "dim"}
_MODULE = "__cudnngraph_explain__"


class Unusable(UsageError):
    """FILE or NAME names nothing that can be explained; the message says why."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``explain`` and its arguments."""
    parser = subparsers.add_parser(
        "explain",
        help="list the plans of a graph on a GPU that is not here",
        description="List the plans that cuDNN proposes for graphs of a Python file on a described "
        "GPU. Needs the cuDNN library, no GPU. The file is run.",
        epilog="Exit code: 0 when some step of every graph is a plan or a generated kernel; 1 when "
        "none is of one of them or cannot be asked; 2 when the file cannot be run or holds no "
        "such graph, or the GPU is not described.",
    )
    parser.add_argument(
        "file",
        metavar="FILE[:NAME]",
        help="a Python file; the graphs at its top level and functions annotated '-> Graph', "
        "or NAME alone: a graph, or a function that takes nothing and returns one",
    )
    parser.add_argument("--target", default="nvidia-h200", help="the GPU (default: %(default)s)")
    parser.add_argument(
        "--tf32", action="store_true", help="let float32 graphs use TF32 (default: true float32)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--all", action="store_true", help=f"all plans, not the first {SHOWN}")


def run(args: argparse.Namespace) -> int:
    """Print the plans of every graph; see the module's description for the exit code."""
    check_target(args.target)
    found = load(args.file)
    explained = [explain(graph, args.target, allow_tf32=args.tf32) for graph in found]
    if args.json:
        body = {"schema": JSON_SCHEMA, "graphs": [each.to_dict() for each in explained]}
        print(json.dumps(body, indent=2))
    else:
        for each in explained:
            _print(each, None if args.all else SHOWN)
    planned = [
        any(step.runs_on in ("cuDNN", "kernel") for step in each.steps) for each in explained
    ]
    return 0 if all(planned) else 1


def check_target(name: str) -> None:
    """Raise :class:`UsageError` for the ``--target`` of a GPU that is not described."""
    try:
        target_of(name)
    except NotSupported:
        raise UsageError(f"--target {name}; known: {', '.join(targets())}") from None


# -- finding graphs ----------------------------------------------------------------------------


def load(place: str) -> list[Graph | GraphSpec]:
    """The graphs that ``FILE[:NAME]`` names. FILE is run, with its folder first in ``sys.path``."""
    file, name = _divide(place)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what FILE prints is no part of the answer
            names = runpy.run_path(str(file), run_name=_MODULE)
            if name and name not in names:
                raise Unusable(f"{file} defines no '{name}'")
            wanted = [(name, names[name])] if name else list(_candidates(names))
            graphs = [_graph(file, key, value) for key, value in wanted]
    except (Unusable, CudnnGraphError):
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise Unusable(f"{file} cannot be run: {type(error).__name__}: {said}") from error
    finally:
        sys.path.pop(0)
    if not graphs:
        raise Unusable(
            f"{file} has no graph at module level and no function annotated '-> Graph'; "
            f"give one as {file}:NAME"
        )
    return list({id(graph): graph for graph in graphs}.values())


def _divide(place: str) -> tuple[Path, str]:
    file, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier() or os.path.exists(place):
        file, name = place, ""
    if not file.strip() and not os.path.exists(file):
        raise Unusable(f"'{place}' names no file; expected FILE or FILE:NAME")
    path = Path(file)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise Unusable(f"there is no file {path}") from None
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(mode):
        raise Unusable(f"there is no file {path}")
    return path, name


def _candidates(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in names.items():
        own = inspect.isfunction(value) and value.__module__ == _MODULE
        if isinstance(value, (Graph, GraphSpec)) or (own and _returns_graph(value)):
            yield name, value


def _returns_graph(function: Callable[..., Any]) -> bool:
    """Whether a function that can be called with nothing is annotated to return a graph."""
    signature = inspect.signature(function)
    if any(_required(parameter) for parameter in signature.parameters.values()):
        return False
    told = signature.return_annotation
    if isinstance(told, str):
        return told.rpartition(".")[2] in ("Graph", "GraphSpec")
    return told in (Graph, GraphSpec)


def _required(parameter: inspect.Parameter) -> bool:
    open_ended = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not open_ended


def _graph(file: Path, name: str, value: Any) -> Graph | GraphSpec:
    if inspect.isfunction(value):
        value = value()
    if isinstance(value, (Graph, GraphSpec)):
        return value
    mend = ""
    if isinstance(value, nn.Module):
        mend = "; of a model, cg.fuse(model, example).report says what runs it"
    raise Unusable(f"'{name}' of {file} is a {type(value).__name__}, not a graph{mend}")


# -- printing ----------------------------------------------------------------------------------


def _print(explanation: Explanation, limit: int | None) -> None:
    print(explanation.heading())
    if explanation.note():
        print(f"note: {explanation.note()}")
    for number, step in enumerate(explanation.steps, 1):
        print(f"\nstep {number} of {len(explanation.steps)}: {describe(step)}")
        for line in refused(step):
            print(f"  {line}")
        if step.plans:
            _print_plans(step, limit)
        for line in own_part(step.source).splitlines():
            print(f"  {line}")
    print()


def _print_plans(step: PlannedStep, limit: int | None) -> None:
    """The plan that is taken and the first ``limit`` in all; those that may be used come before
    those that are barred."""
    ordered = sorted(step.plans, key=lambda plan: (plan is not step.first, not plan.allowed))
    rows = []
    for plan in ordered[:limit]:
        status = "taken" if plan is step.first else "" if plan.allowed else "barred"
        knobs = " ".join(f"{name}={value}" for name, value in plan.knobs)
        rows.append(
            [
                str(plan.rank),
                str(plan.engine),
                "at run time" if plan.runtime_compiled else "ahead",
                workspace(plan),
                status,
                knobs if plan.allowed else f"{plan.reason}; {knobs}",
            ]
        )
    print_table(_COLUMNS, rows, styles=_STYLES)
    if limit is not None and len(ordered) > limit:
        print(f"and {len(ordered) - limit} more: --all lists them")
