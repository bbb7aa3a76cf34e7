"""Whether norms go into weights, settled before plans are built.

Weights of 16 bits that take a norm in are rounded once more. Whether that puts results off shows in
one run of the graph by torch: by the reference executor, with tensors rounded between the parts
that it is to be cut into. The results are held by the check that those of the plans are held by
later. Without this run the plans would be built in vain, and others then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..device import tf32
from ..errors import CudnnGraphError, WrongResult
from ..executor import reference
from ..ir.canonical import canonical, canonical_tensor_names
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph
from ..partition.regions import rounded_between
from ..policy import Policy
from ..rewrite.passes import legalize
from ..runtime import comparison
from ..runtime.compile import builds, resolve_policy
from .bound import assembled, fill, input_tensors, routes
from .check import Ahead
from .convert import Imported

_log = logging.getLogger(__name__)
#: What torch and we raise for what has no kernel, or no memory.
_REFUSED = (RuntimeError, TypeError, ValueError, NotImplementedError, CudnnGraphError)


def why_not_folded(
    name: str,
    imported: Imported,
    tensors: Sequence[Any],
    ahead: Ahead,
    device: torch.device,
    policy: Policy | None,
) -> str | None:
    """Why results for ``tensors`` are too far off with the norms that an import has folded.

    None if they are not. Also if there is nothing to be settled before plans are built: nothing was
    folded, or the plans are kept, or the graph or the model cannot be run.
    """
    spec = imported.spec
    if spec is None or not imported.folded or not builds(spec, device, policy=policy):
        return None
    wanted = ahead.early()
    if wanted is None:
        return None
    resolved = resolve_policy(policy, {}, spec)
    try:
        results = _foreseen(imported, spec, tensors, device, resolved)
    except _REFUSED as error:
        _log.info("%s: what folded norms do is not known before plans are built: %s", name, error)
        return None
    floor = comparison.coarsest([spec], tf32=bool(resolved.allow_tf32))
    try:
        wanted.compare(results, floor=floor, routes=routes(spec))
    except WrongResult as error:
        return str(error)
    return None


def _foreseen(
    imported: Imported,
    spec: GraphSpec,
    tensors: Sequence[Any],
    device: torch.device,
    policy: Policy,
) -> list[Any]:
    """The model's results by the reference executor, rounded where the graph is to be cut.

    It computes in float64: torch's convolutions in float32 are built at run time, each by itself.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        run = rounded_between(CutGraph(legalize(canonical(spec), policy)))
    run = replace(run, compute_dtype=torch.float64)
    made, places = input_tensors(imported, device)
    fill(places, tensors)
    outputs = {name: spec.tensors[name].empty(device) for name in spec.outputs}
    names = canonical_tensor_names(spec)
    bound = {names[n]: each for n, each in {**imported.constants, **made, **outputs}.items()}
    with torch.autocast(device.type, enabled=False), tf32.scope(False):
        given = [bound[name] for name in run.inputs]
        reference.run_into(run, given, [bound[name] for name in run.outputs])
    return assembled(imported, tensors, outputs.__getitem__, outputs)
