"""Plans that ``cudnngraph check`` found to be wrong on this GPU, with these versions.

What it found is in the cache (:mod:`plans_cache.findings`), one file for each environment: the
GPU's name and compute capability, cuDNN, the frontend and the driver. It bars

- exactly what was wrong: (engine, knobs) for that very step;
- an engine for a whole pattern, where it was right for no size of it, and at least
  :data:`LEAST_SIZES` were tried. A pattern is the ops of a step and how they are connected,
  strides, dilations and kernels of convolutions, dtypes, the order in which tensors lie, and the
  dims along which an operand is repeated: neither sizes nor other numbers.

Unlike :mod:`~cudnngraph.backend.known_bad`, which holds for every machine, nothing here is a guess.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plans_cache.findings import Findings

from .. import settings
from ..ir import versions
from ..ir.key import step_digest
from ..ir.spec import GraphSpec, TensorSpec, is_channels_last, once
from ..ops.table import OPS, tensor_at
from . import env, libraries
from .tested import dotted

if TYPE_CHECKING:
    from .plan import Choice

LEAST_SIZES = 3
WHERE = "known bad on this GPU"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")

Engine = tuple[int, tuple[tuple[str, int], ...]]

_sweeping = False


def let_through() -> None:
    """Bar nothing in this process from now on: it is of a sweep, which asks anew."""
    global _sweeping
    _sweeping = True


# -- the environment -------------------------------------------------------------------------------


def environment(device_index: int) -> dict[str, str]:
    """Return the environment of a finding: the GPU, cuDNN, the frontend and the driver."""
    key = env.env_key(device_index)
    major, minor = key.compute_capability
    return {
        "gpu": key.gpu_name,
        "compute_capability": f"{major}.{minor}",
        "cudnn": dotted(key.cudnn_version),
        "frontend": key.frontend_version,
        "driver": _driver(),
    }


@functools.cache
def _driver() -> str:
    """The version of NVIDIA's kernel module, or the CUDA version that the driver supports."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _KERNEL_MODULE.read_text())
    except OSError:
        found = None
    return found[1] if found else libraries.load_driver().version or "unknown"


def environment_id(described: Mapping[str, str]) -> str:
    """The id of its files: 32 hexadecimal digits, others where the version was raised."""
    text = json.dumps([versions.FINDINGS, dict(sorted(described.items()))])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def findings(device_index: int) -> Findings:
    """The files of a GPU in the cache directory of the settings."""
    id = environment_id(environment(device_index))
    return Findings(settings.current().cache_dir, id)


# -- patterns --------------------------------------------------------------------------------------


def pattern(spec: GraphSpec) -> str:
    """The digest of what a step has in common with others of other sizes."""
    names = spec.canonical_names()
    whole = {spec.tensors[name].shape for name in spec.outputs}
    anchors = [node for node in spec.nodes if not OPS[node.op].pointwise]
    data = {name for node in anchors for name in node.operands}
    weights = {tensor_at(each, "weight") for each in anchors if OPS[each.op].has("convolution")}

    def described(name: str) -> list[Any]:
        tensor = spec.tensors[name]
        operand = name not in data and tensor.shape not in whole
        return [
            names[name],
            str(tensor.dtype),
            len(tensor.shape),
            [n == 1 for n in tensor.shape] if operand else "whole",
            tensor.shape[2:] if name in weights else None,
            _lies(tensor),
        ]

    nodes = [
        [
            node.op,
            [None if name is None else names[name] for name in node.inputs],
            [None if name is None else names[name] for name in node.outputs],
            [[name, _kind(name, value)] for name, value in sorted(node.attrs)],
        ]
        for node in spec.nodes
    ]
    said = [nodes, *(sorted(map(described, each)) for each in (spec.inputs, spec.outputs))]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _lies(tensor: TensorSpec) -> str:
    if is_channels_last(tensor.shape, tensor.stride):
        return "channels_last"
    steps = [step for n, step in zip(tensor.shape, tensor.stride, strict=True) if n > 1]
    return "contiguous" if steps == sorted(steps, reverse=True) else "otherwise"


def _kind(name: str, value: Any) -> Any:
    """An attribute as a pattern has it: strides as they are, other numbers as what they are."""
    if name in ("stride", "dilation", "kernel"):
        return value
    if name == "groups":
        return "one" if value == 1 else "several"
    if isinstance(value, (list, tuple)):
        return [_kind("", item) for item in value]
    if isinstance(value, (bool, str)) or value is None:
        return value
    return "a number" if isinstance(value, (int, float)) else str(value)


# -- what is barred --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Barred:
    """Engines that one file bars, each with its reason.

    ``steps`` has (step, TF32 allowed, engine and knobs), ``patterns`` (pattern, TF32, engine).

    ``described`` is all that the file says: when the machine was checked, how, with what counts.
    """

    steps: Mapping[tuple[str, bool, Engine], str]
    patterns: Mapping[tuple[str, bool, int], str]
    described: Mapping[str, Any]


def read(data: Any) -> Barred | None:
    """Parse the content of a file; None for no such content. Malformed rows are left out."""
    if not isinstance(data, dict) or data.get("schema") != versions.FINDINGS:
        return None
    steps: dict[tuple[str, bool, Engine], str] = {}
    patterns: dict[tuple[str, bool, int], str] = {}
    for row in _rows(data, "steps"):
        try:
            knobs = tuple((str(name), int(value)) for name, value in row["knobs"])
            for tf32 in _modes(row):
                steps[str(row["step"]), tf32, (int(row["engine"]), knobs)] = str(row["reason"])
        except (KeyError, TypeError, ValueError):
            continue
    for row in _rows(data, "patterns"):
        try:
            for tf32 in _modes(row):
                patterns[str(row["pattern"]), tf32, int(row["engine"])] = str(row["reason"])
        except (KeyError, TypeError, ValueError):
            continue
    return Barred(steps, patterns, data)


def _rows(data: Mapping[str, Any], name: str) -> Iterable[Mapping[str, Any]]:
    rows = data.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _modes(row: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether TF32 is allowed where a row holds; None for both."""
    return (False, True) if row.get("tf32") is None else (bool(row["tf32"]),)


_last: tuple[Any, Barred | None] = (None, None)


def barred(device_index: int) -> Barred | None:
    """Return what is barred on a GPU, or None if it was never checked."""
    global _last
    data = findings(device_index).known_bad()
    if data is None:
        return None
    if _last[0] is not data:
        _last = (data, read(data))
    return _last[1]


def _ids(spec: GraphSpec) -> tuple[str, str]:
    return step_digest(spec), pattern(spec)


def why_found_bad(
    spec: GraphSpec, choice: Choice, device_index: int, *, allow_tf32: bool
) -> str | None:
    """The reason why this GPU's sweep bars a choice for a step, or None."""
    known = None if _sweeping else barred(device_index)
    if known is None or not (known.steps or known.patterns):
        return None
    step, like = once(spec, "found bad", _ids, spec)  # asked for each candidate of a step
    why = known.steps.get((step, allow_tf32, (choice.engine, choice.knobs)))
    if why is None:
        why = known.patterns.get((like, allow_tf32, choice.engine))
    return None if why is None else f"{WHERE}: {why}"
