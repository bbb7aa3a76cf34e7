"""A plan that writes through raw pointers as the reference computes, or as told, and its trial."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, TensorSpec
from cudnngraph.select.trial import StepTrial

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def at(address: int, spec: TensorSpec, elements: int | None = None) -> torch.Tensor:
    """The memory at an address as a tensor."""
    count = spec.extent if elements is None else elements
    raw = (ctypes.c_byte * (count * spec.dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(raw, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride) if elements is None else flat


class Plan:
    """Does what the reference does, through pointers; ``then`` does something more."""

    def __init__(
        self,
        spec: GraphSpec,
        then: Callable[[Plan, Sequence[int], int], None] | None = None,
        workspace_bytes: int = 300,
    ) -> None:
        self.spec = spec
        self.then = then
        self.workspace_bytes = workspace_bytes
        self.runs = 0

    def pointers(self, tensors: Sequence[int]) -> list[int]:
        return list(tensors)

    def result(self, pointers: Any, place: int = 0) -> torch.Tensor:
        return at(
            pointers[len(self.spec.inputs) + place], self.spec.tensors[self.spec.outputs[place]]
        )

    def execute(self, pointers: Any, workspace: int, handle: object) -> None:
        self.runs += 1
        spec = self.spec
        inputs = [
            at(pointer, spec.tensors[name])
            for name, pointer in zip(spec.inputs, pointers, strict=False)
        ]
        for place, made in enumerate(reference.run(spec, inputs)):
            self.result(pointers, place).copy_(made)
        ctypes.memset(workspace, 7, self.workspace_bytes)
        if self.then is not None:
            self.then(self, pointers, workspace)


def product(**options: Any) -> GraphSpec:
    g = cg.Graph("product")
    x, w = g.input("x", (2, 4, 5, 5), F16), g.input("w", (4, 4, 3, 3), F16)
    g.output("y", g.conv(x, w), **options)
    return g.spec()


POLICY = cg.Policy(allow_tf32=False)


def why(plan: Plan, policy: cg.Policy = POLICY) -> str | None:
    return StepTrial(plan.spec, policy, CPU).why_wrong(plan)


def scales(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    plan.result(pointers).mul_(1.01)


def attention(
    heads: tuple[int, int] = (4, 2),
    mask: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype = F16,
    lengths: bool = False,
    lse: bool = False,
) -> GraphSpec:
    """3 sequences of 8, heads of q and of k and v as given."""
    g = cg.Graph("attention")
    q = g.input("q", (3, heads[0], 8, 16), F16)
    k, v = (g.input(name, (3, heads[1], 8, 16), F16) for name in "kv")
    options: dict[str, Any] = {}
    if mask is not None:
        options["attn_mask"] = g.input("mask", mask, mask_dtype)
    if lengths:
        for name in ("seq_len_q", "seq_len_kv"):
            options[name] = g.input(name, (3,), torch.int32)
    made = g.sdpa(q, k, v, **options, **({"return_lse": True} if lse else {}))
    for name, value in zip(("o", "lse"), made if lse else (made,), strict=False):
        g.output(name, value)
    return g.spec()
