"""Every plan of one example of tests/reported.py, launched and compared with float64.

    python reported_worker.py EXAMPLE SKIP

What is known to be wrong is let through. A line of JSON says which plan is next and another what
became of it, so that whoever started this knows which one ended it, and may start it again behind
that one: SKIP plans are left out. At the first CUDA error the process ends, since what follows in
it would fail too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph import reference
from cudnngraph.backend import env, plan
from cudnngraph.ir import GraphSpec
from tests import numerics
from tests.reported import BY_ID, Example

CONFIGURATIONS = 3  # of each engine
ROUNDS = 3
GPU = torch.device("cuda", 0)


def inputs_of(example: Example, spec: GraphSpec) -> dict[str, torch.Tensor]:
    """Inputs on the CPU, strides as declared; gaps between elements hold NaN."""
    made = {}
    torch.manual_seed(0)
    for name in spec.inputs:
        tensor = spec.tensors[name]
        floating = tensor.dtype.is_floating_point
        memory = torch.full((tensor.extent,), float("nan") if floating else 0, dtype=tensor.dtype)
        made[name] = memory.as_strided(tensor.shape, tensor.stride)
        made[name].copy_(torch.randn(tensor.shape) * (1 if floating else 20))
    if example.fill is not None:
        example.fill(made)
    return made


def on_gpu(value: torch.Tensor) -> torch.Tensor:
    """The same memory on the GPU, gaps included."""
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((extent,), (1,)).to(GPU).as_strided(value.shape, value.stride())


def float64(spec: GraphSpec, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    wide = [given[name] for name in spec.inputs]
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in wide]
    return reference.run(spec, wide, torch.float64)


def launched(
    plans: list[plan.Plan], specs: list[GraphSpec], given: list[dict[str, torch.Tensor]]
) -> list[list[list[torch.Tensor]]]:
    """Launch the plans in turn, :data:`ROUNDS` times over; the outputs by round and graph.

    Nothing is waited for between launches. Outputs and workspace hold NaN before.
    """
    there = [{name: on_gpu(value) for name, value in tensors.items()} for tensors in given]
    need = max(1, *(each.workspace_bytes for each in plans))
    workspace = torch.full((need,), 255, dtype=torch.uint8, device=GPU)
    rounds: list[list[list[torch.Tensor]]] = []
    for _ in range(ROUNDS):
        outputs = []
        for spec in specs:
            made = []
            for tensor in (spec.tensors[name] for name in spec.outputs):
                blank = float("nan") if tensor.dtype.is_floating_point else 77
                memory = torch.full((tensor.extent,), blank, dtype=tensor.dtype, device=GPU)
                made.append(memory.as_strided(tensor.shape, tensor.stride))
            outputs.append(made)
        rounds.append(outputs)
    torch.cuda.synchronize()
    handle = env.handle_on_current_stream(0)
    for outputs in rounds:
        for each, spec, tensors, made in zip(plans, specs, there, outputs, strict=True):
            data = [*(tensors[name] for name in spec.inputs), *made]
            pointers = each.pointers([tensor.data_ptr() for tensor in data])
            each.execute(pointers, workspace.data_ptr(), handle)
    torch.cuda.synchronize()
    return rounds


def fault_of(example: Example, specs: list[GraphSpec], rounds: Any, wanted: Any) -> str:
    """What is wrong with the outputs, empty if nothing is."""
    for outputs in rounds:
        for spec, made, references in zip(specs, outputs, wanted, strict=True):
            dtype = spec.tensors[spec.inputs[0]].dtype
            for name, output, right in zip(spec.outputs, made, references, strict=True):
                tf32 = example.allow_tf32 and dtype == torch.float32
                try:
                    numerics.check(
                        output,
                        right,
                        dtype,
                        tf32=tf32,
                        terms=example.terms,
                        what=f"{name} of {spec.name}",
                    )
                except AssertionError as error:
                    return str(error).splitlines()[0]
    return ""


def main() -> int:
    """See the module's docstring."""
    example, skip = BY_ID[sys.argv[1]], int(sys.argv[2])
    plan.why_bad = lambda *args, **options: None  # type: ignore[assignment]
    policy = cg.Policy(allow_tf32=example.allow_tf32)
    specs = [graph.spec() for graph in example.build()]
    try:
        proposals = [plan.Proposals(spec, policy, 0, more=True) for spec in specs]
    except cg.NotSupported as refusal:
        print(json.dumps({"refused": str(refusal).splitlines()[0]}), flush=True)
        return 0
    given = [inputs_of(example, spec) for spec in specs]
    wanted = [float64(spec, tensors) for spec, tensors in zip(specs, given, strict=True)]
    by_engine = [
        {
            engine: [c for c in each.candidates if c.choice.engine == engine]
            for engine in dict.fromkeys(c.choice.engine for c in each.candidates)
        }
        for each in proposals
    ]
    engines = [engine for engine in by_engine[0] if all(engine in found for found in by_engine)]
    tasks = [
        (engine, number)
        for engine in engines
        for number in range(min(CONFIGURATIONS, len(by_engine[0][engine])))
    ]
    for place, (engine, number) in enumerate(tasks):
        if place < skip:
            continue
        print(json.dumps({"next": place, "engine": engine}), flush=True)
        try:
            plans, reason = [], ""
            for each, found in zip(proposals, by_engine, strict=True):
                candidate = found[engine][min(number, len(found[engine]) - 1)]
                outcome, made = each.build(candidate)
                reason = reason or outcome.reason
                plans += [] if made is None else [made]
            torch.cuda.synchronize()  # a launch on zeros may have failed for good
            if len(plans) < len(specs):
                print(json.dumps({"became": "not built", "why": reason}), flush=True)
                continue
            fault = fault_of(example, specs, launched(plans, specs, given), wanted)
        except RuntimeError as error:
            print(json.dumps({"became": "dead", "why": str(error).splitlines()[0]}), flush=True)
            return 3
        print(json.dumps({"became": "wrong" if fault else "right", "why": fault}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
