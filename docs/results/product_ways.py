"""Products of real models with the ops behind them, and the ways to run each; measured by
``h200_products.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import cudnngraph as cg
from cudnngraph.backend.plan import KERNEL, Plan
from cudnngraph.errors import NotSupported
from cudnngraph.executor.linear import runs_whole
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.ops.table import OPS
from cudnngraph.partition.analysis import CutGraph, Group, compute_nodes
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.select.decision import StepPlan

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHORT = {F16: "fp16", BF16: "bf16"}
Value = cg.Value
Behind = Callable[[Any, Value, Callable[..., Value]], None]


# -- rows ------------------------------------------------------------------------------------------


def _sum(g: Any, y: Value, given: Callable[..., Value]) -> Value:
    return g.add(g.add(y, given("bias", 1)), given("residual", 2))  # type: ignore[no-any-return]


def _activated(name: str, *, kept: bool = False) -> Behind:
    """An activation of the sum with the bias, which may be a result too."""

    def made(g: Any, y: Value, given: Callable[..., Value]) -> None:
        total = g.add(y, given("bias", 1))
        if kept:
            g.output("sum", total)
        g.output("y", getattr(g, name)(total))

    return made


def _normed(dtype: torch.dtype | None) -> Behind:
    """A layer norm behind the sum with bias and residual, which is kept; ``dtype`` the residual's,
    None for that of the product."""

    def made(g: Any, y: Value, given: Callable[..., Value]) -> None:
        total = g.add(g.add(y, given("bias", 1)), given("residual", 2, dtype))
        g.output("sum", total)
        affine = given("norm_weight", 1, dtype), given("norm_bias", 1, dtype)
        g.output("y", g.layer_norm(total, *affine), dtype=y.spec.dtype if dtype else None)

    return made


def _rms_normed(g: Any, y: Value, given: Callable[..., Value]) -> None:
    total = g.add(y, given("residual", 2))
    g.output("sum", total)
    g.output("y", g.rms_norm(total, given("norm_weight", 1)))


def _scaled(g: Any, y: Value, given: Callable[..., Value]) -> None:
    total = g.add(y, given("bias", 1))
    g.output("y", g.add(g.mul(total, given("factor", 1)), given("residual", 2)))


BEHIND: Mapping[str, Behind] = {
    "nothing": lambda g, y, given: g.output("y", y),
    "bias": lambda g, y, given: g.output("y", g.add(y, given("bias", 1))),
    "bias, relu": _activated("relu"),
    "bias, gelu_tanh": _activated("gelu_tanh"),
    "bias, gelu": _activated("gelu"),
    "bias, silu": _activated("silu"),
    "bias kept, gelu_tanh": _activated("gelu_tanh", kept=True),
    "bias kept, gelu": _activated("gelu", kept=True),
    "residual": lambda g, y, given: g.output("y", g.add(y, given("residual", 2))),
    "bias, residual": lambda g, y, given: g.output("y", _sum(g, y, given)),
    "bias, float32 residual": lambda g, y, given: g.output(
        "y", g.add(g.add(y, given("bias", 1)), given("residual", 2, F32))
    ),
    "bias, factor, residual": _scaled,
    "bias, residual, layer_norm": _normed(None),
    "bias, float32 residual, layer_norm": _normed(F32),
    "residual, rms_norm": _rms_normed,
}
# Of each model: rows, inner, columns of a product, dtype, and what stands behind it.
PRODUCTS: tuple[tuple[str, int, int, int, torch.dtype, tuple[str, ...]], ...] = (
    ("GPT", 8192, 768, 2304, BF16, ("nothing", "bias")),
    (
        *("GPT", 8192, 768, 768, BF16),
        ("bias, residual", "bias, float32 residual", "bias, float32 residual, layer_norm"),
    ),
    (
        *("GPT", 8192, 768, 3072, BF16),
        ("bias", "bias, gelu_tanh", "bias kept, gelu_tanh", "bias, silu", "bias, gelu"),
    ),
    (
        *("GPT", 8192, 3072, 768, BF16),
        (
            *("nothing", "bias", "bias, residual", "bias, residual, layer_norm"),
            *("bias, float32 residual", "bias, float32 residual, layer_norm"),
        ),
    ),
    ("ViT-B", 25216, 768, 2304, F16, ("bias",)),
    ("ViT-B", 25216, 768, 768, F16, ("bias, residual",)),
    ("ViT-B", 25216, 768, 3072, F16, ("bias, gelu",)),
    ("ViT-B", 25216, 3072, 768, F16, ("bias, residual", "bias, residual, layer_norm")),
    ("Llama", 2048, 4096, 4096, BF16, ("nothing", "residual, rms_norm")),
    ("Llama", 2048, 4096, 14336, BF16, ("nothing", "bias, silu")),
    ("Llama", 2048, 14336, 4096, BF16, ("residual", "residual, rms_norm")),
    ("MLP", 8192, 4096, 4096, BF16, ("bias, relu", "bias, gelu")),
    ("SD UNet", 8192, 320, 320, F16, ("bias", "bias, residual", "bias, residual, layer_norm")),
    ("SD UNet", 8192, 320, 2560, F16, ("bias",)),
    ("SD UNet", 8192, 1280, 320, F16, ("bias, residual",)),
    ("SD UNet", 2048, 640, 640, F16, ("bias", "bias, residual")),
    ("SD UNet", 2048, 640, 5120, F16, ("bias",)),
    ("SD UNet", 2048, 2560, 640, F16, ("bias, residual",)),
    ("SD UNet", 512, 1280, 1280, F16, ("bias", "bias, residual", "bias, residual, layer_norm")),
    ("SD UNet", 512, 1280, 10240, F16, ("bias",)),
    ("SD UNet", 512, 5120, 1280, F16, ("bias, residual",)),
    ("SD UNet", 128, 1280, 1280, F16, ("bias", "bias, residual")),
    ("SD UNet", 2, 1280, 1280, F16, ("bias", "bias, silu")),
    ("BERT", 4096, 768, 768, F16, ("bias", "bias, residual, layer_norm")),
    ("BERT", 4096, 768, 3072, F16, ("bias, gelu",)),
    ("BERT", 4096, 3072, 768, F16, ("bias, residual, layer_norm",)),
    ("ConvNeXt", 200704, 96, 384, BF16, ("bias kept, gelu", "bias, gelu")),
    ("ConvNeXt", 200704, 384, 96, BF16, ("bias", "bias, factor, residual")),
    ("ConvNeXt", 50176, 192, 768, BF16, ("bias kept, gelu",)),
    ("ConvNeXt", 50176, 768, 192, BF16, ("bias",)),
    ("ConvNeXt", 12544, 384, 1536, BF16, ("bias kept, gelu",)),
    ("ConvNeXt", 12544, 1536, 384, BF16, ("bias",)),
    ("classes", 32, 1280, 1000, F16, ("bias",)),
    ("classes", 256, 2048, 1000, F16, ("bias",)),
)


@dataclass(frozen=True)
class Row:
    """A product with what stands behind it."""

    model: str
    rows: int
    inner: int
    columns: int
    dtype: torch.dtype
    behind: str

    @property
    def product(self) -> str:
        return f"{self.model} {self.rows} x {self.inner} -> {self.columns} {SHORT[self.dtype]}"

    @property
    def name(self) -> str:
        return f"{self.product}: {self.behind}"

    def spec(self) -> GraphSpec:
        """The graph, its weight as a linear layer's lies in memory, seen transposed."""
        g = cg.Graph("product")
        x = g.input("x", (self.rows, self.inner), self.dtype)
        of_layer = torch.empty(self.columns, self.inner, dtype=self.dtype, device="meta")
        w = g.input("w", like=of_layer.t())

        def given(name: str, rank: int, dtype: torch.dtype | None = None) -> Value:
            return g.input(name, (self.rows, self.columns)[2 - rank :], dtype or self.dtype)

        BEHIND[self.behind](g, g.matmul(x, w), given)
        return g.spec()


ROWS: tuple[Row, ...] = tuple(
    Row(model, rows, inner, columns, dtype, behind)
    for model, rows, inner, columns, dtype, all_of in PRODUCTS
    for behind in all_of
)


# -- ways to run a row -----------------------------------------------------------------------------

Chain = list[tuple[GraphSpec, Plan | None]]
Tell = Callable[[str], None]


@dataclass
class Way:
    """A way to run a row: its steps, or why there is none, and the steps in words."""

    chain: Chain = field(default_factory=list)
    steps: str = ""
    why: str = ""


class Engines(Protocol):
    """What builds plans of a step and checks them."""

    def first(self, spec: GraphSpec) -> Plan:
        """cuDNN's first choice. Raises :class:`NotSupported`."""

    def each(self, spec: GraphSpec, prefix: str) -> Iterator[tuple[str, Plan | str]]:
        """By each engine its first plan that is right, or why there is none; ``*`` behind the
        number marks a plan that is not compiled at run time. ``prefix`` is that of the way."""

    def kernel(self, spec: GraphSpec) -> Plan:
        """The generated kernel by rule. Raises :class:`NotSupported`."""

    def heuristic(self, spec: GraphSpec) -> tuple[tuple[StepPlan, ...], tuple[Plan | None, ...]]:
        """What ``heuristic`` takes for a legalized graph: its steps and their plans."""


def parts(graph: CutGraph) -> tuple[Group, Group, Group]:
    """The product, the sum with a bias if one stands behind it, and the rest."""
    nodes = compute_nodes(graph.spec.nodes)
    at = next(n for n, node in enumerate(nodes) if node.op == "matmul")
    (made,) = nodes[at].results
    last = at + 1
    if last < len(nodes) and nodes[last].op == "add" and made in nodes[last].operands:
        (added,) = (name for name in nodes[last].operands if name != made)
        last += len(graph.spec.tensors[added].shape) == 1
    return nodes[: at + 1], nodes[at + 1 : last], nodes[last:]


def epilogue(nodes: Group) -> tuple[Group, Group]:
    """The pointwise ops in front, which a plan may take behind its product, and what follows."""
    count = next((n for n, node in enumerate(nodes) if not OPS[node.op].pointwise), len(nodes))
    return nodes[:count], nodes[count:]


def named(spec: GraphSpec, label: str) -> str:
    """A step in words."""
    return f"{' '.join(node.op for node in compute_nodes(spec.nodes))} ({label})"


def label_of(plan: Plan | None) -> str:
    """What runs a step, in words."""
    if plan is None:
        return "torch"
    return "kernel" if plan.choice.engine == KERNEL else f"eng{plan.choice.engine}"


def ways(
    spec: GraphSpec, engines: Engines, skipped: Mapping[str, str], tell: Tell
) -> Iterator[tuple[str, Way]]:
    """Every way to run a legalized graph, by name; ``skipped`` are not tried, with the reason.

    ``tell`` is told before each, so that a process that dies has said what it was at.
    """
    graph = CutGraph(spec)
    product, bias, rest = parts(graph)
    pointwise, behind = epilogue((*bias, *rest))
    whole = (*product, *pointwise)

    def step(nodes: Group, plan: Plan | None) -> Chain:
        return [(subgraph_of(graph, nodes), plan)]

    def kernel(nodes: Group) -> Chain:
        return step(nodes, engines.kernel(subgraph_of(graph, nodes))) if nodes else []

    def way(name: str, made: Callable[[], Chain]) -> tuple[str, Way]:
        if name in skipped:
            return name, Way(why=skipped[name])
        tell(name)
        try:
            chain = made()
        except NotSupported as refusal:
            return name, Way(why=refusal.reasons[0] if refusal.reasons else str(refusal))
        except Exception as error:
            return name, Way(why=f"{type(error).__name__}: {str(error)[:200]}")
        said = " | ".join(named(each, label_of(plan)) for each, plan in chain)
        return name, Way(chain, said)

    def chosen() -> Chain:
        steps, plans = engines.heuristic(spec)
        return [(each.spec, plan) for each, plan in zip(steps, plans, strict=True)]

    yield way("heuristic", chosen)
    yield from _by_engines(graph, "", whole, behind, engines, kernel, skipped, tell)
    first = subgraph_of(graph, product)
    after = (*bias, *rest)
    if after:
        yield way("product | kernel", lambda: step(product, engines.first(first)) + kernel(after))
    yield way("torch.mm | kernel", lambda: step(product, None) + kernel(after))
    if bias:
        if rest:
            both = (*product, *bias)
            yield from _by_engines(graph, "bias by ", both, rest, engines, kernel, skipped, tell)
        longest = (*product, *bias, *rest[:1])
        taken = longest if runs_whole(subgraph_of(graph, longest)) else (*product, *bias)
        if runs_whole(subgraph_of(graph, taken)):
            left = (*bias, *rest)[len(taken) - len(product) :]
            yield way("addmm | kernel", lambda: step(taken, None) + kernel(left))


def _by_engines(
    graph: CutGraph,
    prefix: str,
    nodes: Group,
    behind: Group,
    engines: Engines,
    kernel: Callable[[Group], Chain],
    skipped: Mapping[str, str],
    tell: Tell,
) -> Iterator[tuple[str, Way]]:
    """The nodes by each engine, with a kernel for what stands behind."""
    spec = subgraph_of(graph, nodes)
    name = f"{prefix}engines"
    if name in skipped:
        yield name, Way(why=skipped[name])
        return
    tell(name)
    try:
        after = kernel(behind)
        for label, plan in engines.each(spec, prefix):
            if isinstance(plan, str):
                yield f"{prefix}{label}", Way(why=plan)
                continue
            chain: Chain = [(spec, plan), *after]
            said = " | ".join(named(each, label_of(made)) for each, made in chain)
            yield f"{prefix}{label}", Way(chain, said)
    except NotSupported as refusal:
        yield name, Way(why=refusal.reasons[0] if refusal.reasons else str(refusal))
    except Exception as error:
        yield name, Way(why=f"{type(error).__name__}: {str(error)[:200]}")


def moved_bytes(graph: CutGraph, nodes: Group) -> int:
    """What a kernel of these nodes reads and writes, each tensor once."""
    if not nodes:
        return 0
    spec = subgraph_of(graph, nodes)
    tensors = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
    return sum(each.numel * each.dtype.itemsize for each in tensors)
