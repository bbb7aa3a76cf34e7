"""Models converted to graphs, run on the CPU, and compared with the model in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cudnngraph.ir.spec import GraphSpec
from cudnngraph.models.convert import Imported, import_model
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics

F32, F64 = torch.float32, torch.float64
X, Y, IMAGE, ROWS = (3, 5, 8), (3, 5, 8), (2, 6, 9, 8), (4, 10, 16)


def ops(spec: GraphSpec | None) -> list[str]:
    return [] if spec is None else [node.op for node in spec.nodes if node.op != "constant"]


def run(imported: Imported, args: tuple[Any, ...]) -> list[Any]:
    """The results of an imported model, on the CPU."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    made: dict[str, torch.Tensor] = {}
    if imported.spec is not None:
        declared = imported.spec.tensors
        given = dict(imported.constants)
        for name, tensor in zip(imported.inputs, tensors, strict=True):
            if name is not None:
                given[name] = torch.empty_strided(
                    tensor.shape, declared[name].stride, dtype=tensor.dtype
                ).copy_(tensor)
        results = compile_spec(imported.spec, "cpu")(**given)
        outputs = imported.spec.outputs
        made = dict(zip(outputs, [results] if len(outputs) == 1 else results, strict=True))
    return [
        made[each] if isinstance(each, str) else tensors[each[1]] if each[0] == "input" else each[1]
        for each in imported.results
    ]


def check(model: nn.Module, *args: Any, terms: int = 1, channels_last: bool = False) -> Imported:
    """Import, run, and compare every result with the model in float64 and in its own dtype."""
    model = model.eval()
    imported = import_model(model, args, channels_last=channels_last)
    ours = run(imported, args)
    with torch.no_grad():
        own = torch.utils._pytree.tree_leaves(model(*args))
        wide = [
            a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
        ]
        want = torch.utils._pytree.tree_leaves(model.double()(*wide))
        model.float()
    assert len(ours) == len(own) == len(want)
    for mine, theirs, exact in zip(ours, own, want, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs
            continue
        assert mine.dtype == theirs.dtype
        numerics.check(mine, exact, F32, theirs, terms=terms)
    return imported
