"""Torch steps run on the CPU, and compared with the reference in float64."""

from __future__ import annotations

from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.executor import reference, torch_steps
from cudnngraph.ir.spec import GraphSpec, TensorSpec, overlaps_itself
from cudnngraph.ops.table import OPS
from tests import numerics
from tests.samples import enumerate_cases

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
CASES = [case for case in enumerate_cases() if case.on_gpu]


def outputs_of(spec: GraphSpec) -> list[torch.Tensor]:
    """Memory for the outputs as they are declared, full of what must be overwritten."""
    made = []
    for declared in (spec.tensors[name] for name in spec.outputs):
        out = torch.empty_strided(declared.shape, declared.stride, dtype=declared.dtype)
        made.append(out.fill_(1 if declared.dtype == torch.bool else 77))
    return made


def inputs_of(spec: GraphSpec, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [laid_out(spec.tensors[name], values[name]) for name in spec.inputs]


def laid_out(declared: TensorSpec, value: torch.Tensor) -> torch.Tensor:
    if value.stride() == declared.stride:
        return value
    out = torch.empty_strided(declared.shape, declared.stride, dtype=declared.dtype)
    assert not overlaps_itself(declared.shape, declared.stride)
    return out.copy_(value)


def check(spec: GraphSpec, inputs: list[torch.Tensor], out: torch.Tensor, terms: int) -> None:
    """Against the reference in float64: one rounding of the dtype, or its bound for long sums."""
    (declared,) = (spec.tensors[name] for name in spec.outputs[:1])
    want = reference.run(spec, inputs, torch.float64)[0]
    if not out.dtype.is_floating_point:
        exact = reference.run(spec, inputs)[0]
        assert torch.equal(out, exact)
        return
    error = numerics.relative_error(out, want.to(torch.float64))
    data = spec.tensors[spec.inputs[0]].dtype if spec.inputs else declared.dtype
    anchor = any(not OPS[node.op].pointwise for node in spec.nodes)
    allowed = numerics.ROUNDOFF[declared.dtype] * (1.01 if declared.dtype != F32 else 2.0)
    if anchor:
        allowed = max(allowed, numerics.bound(data, declared.dtype, terms=terms))
    assert error <= allowed, f"{[node.op for node in spec.nodes]}: {error:.3g}, {allowed:.3g}"


def single(op: str, *given: Any, dtype: torch.dtype | None = None, **options: Any) -> GraphSpec:
    """A graph of one op on inputs of the given (shape, dtype), or on plain numbers."""
    g = cg.Graph("g")
    operands = [
        g.input(f"in{place}", *each) if isinstance(each, tuple) else each
        for place, each in enumerate(given)
    ]
    made = getattr(g, op)(*operands)
    g.output("out", made, **({"dtype": dtype} if dtype else {}), **options)
    return g.spec()


def run(spec: GraphSpec, *inputs: torch.Tensor) -> torch.Tensor:
    (out,) = outputs_of(spec)
    torch_steps.launcher(spec, inputs, [out], allow_tf32=False)()
    return out
