"""Products parted from what stands behind them: their numbers, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.settings import override
from tests import blocks, numerics

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _chosen_here(tmp_path: Path) -> Iterator[None]:
    """Nothing that was kept before."""
    cg.cache_clear()
    with override(cache_dir=tmp_path):
        yield


def random(spec: GraphSpec) -> dict[str, torch.Tensor]:
    """Inputs: weights such that what products make is of about the size of what they read."""
    torch.manual_seed(0)
    made = {}
    for name in spec.inputs:
        tensor = spec.tensors[name]
        values = torch.randn(tensor.shape, device="cuda")
        if len(tensor.shape) == 2 and name.endswith("w"):
            values /= max(tensor.shape) ** 0.5
        made[name] = torch.empty_strided(
            tensor.shape, tensor.stride, dtype=tensor.dtype, device="cuda"
        ).copy_(values)
    return made


def steps(exe: cg.Executable) -> list[str]:
    """What runs, views left out."""
    return [
        f"{step.kind}: {' '.join(node.op for node in step.spec.nodes if node.op != 'constant')}"
        for step in exe.steps
        if "memory" not in step.decisions[-1].reason
    ]


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("norm", [False, True])
def test_a_residual_behind_a_long_product(dtype: torch.dtype, norm: bool) -> None:
    rows, inner, columns = 4096, 2048, 512
    g = cg.Graph("residual")
    x, w = g.input("x", (rows, inner), dtype), g.input("w", (inner, columns), dtype)
    y = g.add(g.matmul(x, w), g.input("b", (columns,), dtype))
    y = g.add(y, g.input("r", (rows, columns), dtype))
    g.output("sum", y)
    if norm:
        g.output("y", g.layer_norm(y, *(g.input(n, (columns,), dtype) for n in ("s", "t"))))
    exe = g.compile("cuda", kernels=True, tune="heuristic")
    behind = "kernel: add add layer_norm" if norm else "kernel: add add"
    assert steps(exe) == ["cudnn: matmul", behind]
    t = random(exe.spec)

    def eager(t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        total = F.linear(t["x"], t["w"].t(), t["b"]) + t["r"]
        return [total, F.layer_norm(total, (columns,), t["s"], t["t"])] if norm else [total]

    made, theirs = exe(**t), eager(t)
    exact = eager({name: each.double() for name, each in t.items()})
    several = list(made) if norm else [made]
    for out, wanted, other in zip(several, exact, theirs, strict=True):
        numerics.check(out, wanted, dtype, other, terms=inner)


@pytest.mark.parametrize("act", ["relu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_large_layer_by_one_call_of_torch(act: str, dtype: torch.dtype) -> None:
    g = cg.Graph("layer")
    x, w = (g.input(*each, dtype) for each in (("x", (8192, 4096)), ("w", (4096, 4096))))
    y = g.add(g.matmul(x, w), g.input("b", (4096,), dtype))
    g.output("y", getattr(g, act)(y))
    exe = g.compile("cuda", kernels=True, tune="heuristic")
    assert steps(exe) == [f"torch: matmul add {act}"]
    t = random(exe.spec)

    def eager(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w.t(), b)
        return y.relu() if act == "relu" else F.gelu(y, approximate="tanh")

    exact = eager(*(each.double() for each in t.values()))
    numerics.check(exe(**t), exact, dtype, eager(*t.values()), terms=4096)
    call = exe.bind(**t, y=(out := torch.empty_like(exact, dtype=dtype)))
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.zero_()
    graph.replay()
    numerics.check(out, exact, dtype, terms=4096)


@pytest.mark.parametrize("block", [blocks.gpt_block, blocks.unet_block, blocks.convnext_block])
def test_a_block_of_its_real_size(block: Callable[..., cg.Graph]) -> None:
    """In bfloat16: behind products that are rounded, as autocast rounds them."""
    spec = (block(dtype=BF16) if block is blocks.unet_block else block()).spec()
    t = random(spec)
    exe = compile_spec(spec, "cuda", policy=cg.Policy(kernels=True, tune="heuristic"))
    if block is not blocks.convnext_block:
        assert any(each.startswith("kernel:") and "add add" in each for each in steps(exe))
    made = exe(**t)
    several = made._asdict() if isinstance(made, tuple) else {spec.outputs[0]: made}
    exact = reference.run(spec, [t[name] for name in spec.inputs], torch.float64)
    for name, wanted in zip(spec.outputs, exact, strict=True):
        numerics.check(several[name].to(BF16), wanted, BF16, terms=3072, what=name)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("gelu", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("viewed", [False, True])
def test_a_plan_makes_what_gelu_reads_too(dtype: torch.dtype, gelu: str, viewed: bool) -> None:
    """As a training step keeps it for the gradient, at once or behind a reshape."""
    rows, inner, columns = 520, 768, 328
    g = cg.Graph("kept")
    x, w = g.input("x", (rows, inner), dtype), g.input("w", (inner, columns), dtype)
    u = g.add(g.matmul(x, w), g.input("b", (columns,), dtype))
    g.output("u", u)
    g.output("y", getattr(g, gelu)(g.reshape(u, (8, 65, columns)) if viewed else u))
    exe = g.compile("cuda", kernels=True, tune="heuristic")
    assert steps(exe) == [f"cudnn: matmul add {gelu}"]
    t = random(exe.spec)
    t["x"] *= 3  # some numbers beyond which GELU is flat

    def eager(t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        u = F.linear(t["x"], t["w"].t(), t["b"])
        y = F.gelu(u, approximate="tanh" if gelu == "gelu_tanh" else "none")
        return [u, y.view(8, 65, columns) if viewed else y]

    exact = eager({name: each.double() for name, each in t.items()})
    for out, wanted, other in zip(exe(**t), exact, eager(t), strict=True):
        numerics.check(out, wanted, dtype, other, terms=inner)
