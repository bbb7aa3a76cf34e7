"""Products and convolutions of real models with the ops behind them, and the ways to run each;
measured by ``h200_products.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

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
Given = Callable[..., Value]
Behind = Callable[[Any, Value, Given], None]


# -- rows ------------------------------------------------------------------------------------------


def _biased(g: Any, y: Value, given: Given) -> Value:
    add = g.bias if len(y.shape) == 4 else g.add
    return add(y, given("bias", 1))  # type: ignore[no-any-return]


def _activated(name: str, *, kept: bool = False, factor: float = 1.0) -> Behind:
    """An activation of the sum with the bias, which may be a result too, times a number."""

    def made(g: Any, y: Value, given: Given) -> None:
        total = _biased(g, y, given)
        if kept:
            g.output("sum", total)
        made = getattr(g, name)(total)
        g.output("y", made if factor == 1.0 else made * factor)

    return made


def _added(dtype: torch.dtype | None = None, *, relu: bool = False) -> Behind:
    """A residual behind the bias, of the anchor's dtype for None."""

    def made(g: Any, y: Value, given: Given) -> None:
        total = g.add(_biased(g, y, given), given("residual", 0, dtype))
        g.output("y", g.relu(total) if relu else total)

    return made


def _normed(dtype: torch.dtype | None = None) -> Behind:
    """A layer norm behind the sum with bias and residual, which is kept; the residual of
    ``dtype``."""

    def made(g: Any, y: Value, given: Given) -> None:
        total = g.add(_biased(g, y, given), given("residual", 0, dtype))
        g.output("sum", total)
        affine = given("norm_weight", 1, dtype), given("norm_bias", 1, dtype)
        g.output("y", g.layer_norm(total, *affine), dtype=y.spec.dtype if dtype else None)

    return made


def _rms_normed(g: Any, y: Value, given: Given) -> None:
    total = g.add(y, given("residual"))
    g.output("sum", total)
    g.output("y", g.rms_norm(total, given("norm_weight", 1)))


def _scaled(g: Any, y: Value, given: Given) -> None:
    total = g.mul(_biased(g, y, given), given("factor", 1))
    g.output("y", g.add(total, given("residual")))


BEHIND: Mapping[str, Behind] = {
    "nothing": lambda g, y, given: g.output("y", y),
    "bias": lambda g, y, given: g.output("y", _biased(g, y, given)),
    "bias, relu": _activated("relu"),
    "bias, gelu_tanh": _activated("gelu_tanh"),
    "bias, gelu": _activated("gelu"),
    "bias, gelu, 1.7": _activated("gelu", factor=1.7),
    "bias, silu": _activated("silu"),
    "bias kept, gelu_tanh": _activated("gelu_tanh", kept=True),
    "bias kept, gelu": _activated("gelu", kept=True),
    "residual": lambda g, y, given: g.output("y", g.add(y, given("residual"))),
    "bias, residual": _added(),
    "bias, residual, relu": _added(relu=True),
    "bias, float32 residual": _added(F32),
    "bias, factor, residual": _scaled,
    "bias, residual, layer_norm": _normed(),
    "bias, float32 residual, layer_norm": _normed(F32),
    "residual, rms_norm": _rms_normed,
}
# Of each model: rows, inner, columns of a product, dtype, and what stands behind it.
PRODUCTS: tuple[tuple[str, tuple[int, int, int], torch.dtype, tuple[str, ...]], ...] = (
    ("GPT", (8192, 768, 2304), BF16, ("nothing", "bias")),
    ("GPT", (8192, 768, 768), BF16, ("bias, residual", "bias, float32 residual, layer_norm")),
    (
        *("GPT", (8192, 768, 3072), BF16),
        ("bias", "bias, gelu_tanh", "bias kept, gelu_tanh", "bias, silu", "bias, gelu"),
    ),
    (
        *("GPT", (8192, 3072, 768), BF16),
        (
            *("nothing", "bias", "bias, residual", "bias, residual, layer_norm"),
            *("bias, float32 residual", "bias, float32 residual, layer_norm"),
        ),
    ),
    ("ViT-B", (25216, 768, 2304), F16, ("bias",)),
    ("ViT-B", (25216, 768, 768), F16, ("bias, residual",)),
    ("ViT-B", (25216, 768, 3072), F16, ("bias, gelu",)),
    ("ViT-B", (25216, 3072, 768), F16, ("bias, residual", "bias, residual, layer_norm")),
    ("Llama", (2048, 4096, 4096), BF16, ("nothing", "residual, rms_norm")),
    ("Llama", (2048, 4096, 14336), BF16, ("nothing", "bias, silu")),
    ("Llama", (2048, 14336, 4096), BF16, ("residual", "residual, rms_norm")),
    ("MLP", (8192, 4096, 4096), BF16, ("bias, relu", "bias, gelu")),
    ("SD UNet", (8192, 320, 320), F16, ("bias", "bias, residual", "bias, residual, layer_norm")),
    ("SD UNet", (8192, 320, 2560), F16, ("bias",)),
    ("SD UNet", (8192, 1280, 320), F16, ("bias, residual",)),
    ("SD UNet", (2048, 640, 640), F16, ("bias", "bias, residual")),
    ("SD UNet", (2048, 640, 5120), F16, ("bias",)),
    ("SD UNet", (2048, 2560, 640), F16, ("bias, residual",)),
    ("SD UNet", (512, 1280, 1280), F16, ("bias", "bias, residual", "bias, residual, layer_norm")),
    ("SD UNet", (512, 1280, 10240), F16, ("bias",)),
    ("SD UNet", (512, 5120, 1280), F16, ("bias, residual",)),
    ("SD UNet", (128, 1280, 1280), F16, ("bias", "bias, residual")),
    ("SD UNet", (2, 1280, 1280), F16, ("bias", "bias, silu")),
    ("BERT", (4096, 768, 768), F16, ("bias", "bias, residual, layer_norm")),
    ("BERT", (4096, 768, 3072), F16, ("bias, gelu",)),
    ("BERT", (4096, 3072, 768), F16, ("bias, residual, layer_norm",)),
    ("ConvNeXt", (200704, 96, 384), BF16, ("bias kept, gelu", "bias, gelu")),
    ("ConvNeXt", (200704, 384, 96), BF16, ("bias", "bias, factor, residual")),
    ("ConvNeXt", (50176, 192, 768), BF16, ("bias kept, gelu",)),
    ("ConvNeXt", (50176, 768, 192), BF16, ("bias",)),
    ("ConvNeXt", (12544, 384, 1536), BF16, ("bias kept, gelu",)),
    ("ConvNeXt", (12544, 1536, 384), BF16, ("bias",)),
    ("classes", (32, 1280, 1000), F16, ("bias",)),
    ("classes", (256, 2048, 1000), F16, ("bias",)),
)
RESIDUAL = ("bias, relu", "bias, residual, relu")
# Of each model: N C H K R of a convolution, its stride and groups, in fp16.
CONVOLUTIONS: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
    ("EfficientNetV2", (32, 24, 192, 24, 3, 1, 1), ("bias, silu",)),
    ("EfficientNetV2", (32, 24, 192, 96, 3, 2, 1), ("bias, silu",)),
    ("EfficientNetV2", (32, 48, 96, 192, 3, 1, 1), ("bias, silu",)),
    ("EfficientNetV2", (32, 192, 96, 48, 1, 1, 1), ("bias, residual",)),
    ("EfficientNetV2", (32, 64, 48, 256, 3, 1, 1), ("bias, silu",)),
    ("EfficientNetV2", (32, 128, 24, 512, 1, 1, 1), ("bias, silu",)),
    ("EfficientNetV2", (32, 256, 12, 1536, 1, 1, 1), ("bias, silu",)),
    ("EfficientNetV2", (32, 1536, 12, 256, 1, 1, 1), ("bias, residual",)),
    ("NFNet", (32, 128, 48, 128, 3, 1, 1), ("bias, gelu", "bias, gelu, 1.7")),
    ("NFNet", (32, 256, 24, 256, 3, 1, 2), ("bias, gelu, 1.7",)),
    ("NFNet", (32, 768, 12, 768, 3, 1, 6), ("bias, gelu, 1.7",)),
    ("NFNet", (32, 256, 48, 256, 1, 1, 1), ("bias, gelu, 1.7",)),
    ("NFNet", (32, 256, 24, 512, 1, 1, 1), ("bias", "bias, gelu, 1.7")),
    ("NFNet", (32, 1536, 12, 768, 1, 1, 1), ("bias, gelu, 1.7",)),
    ("ResNet", (32, 64, 56, 64, 3, 1, 1), ("bias, relu", "bias, silu")),
    ("ResNet", (32, 128, 28, 128, 3, 1, 1), ("bias, relu", "bias, gelu")),
    ("ResNet", (32, 512, 7, 512, 3, 1, 1), RESIDUAL),
    ("ResNet", (32, 64, 56, 256, 1, 1, 1), ("bias, residual, relu", "bias, silu")),
    ("ResNet", (32, 256, 14, 1024, 1, 1, 1), RESIDUAL),
    ("ResNet", (32, 1024, 14, 256, 1, 1, 1), ("bias, relu",)),
    ("VGG", (8, 64, 224, 64, 3, 1, 1), ("bias, relu",)),
    ("VGG", (32, 256, 56, 256, 3, 1, 1), ("bias, relu",)),
)


@dataclass(frozen=True)
class Row:
    """An anchor with what stands behind it: a product, of the ``sizes`` of :data:`PRODUCTS`, or a
    convolution, of those of :data:`CONVOLUTIONS`."""

    model: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    behind: str

    @property
    def is_product(self) -> bool:
        return len(self.sizes) == 3

    @property
    def anchor(self) -> str:
        if self.is_product:
            rows, inner, columns = self.sizes
            return f"{self.model} {rows} x {inner} -> {columns} {SHORT[self.dtype]}"
        n, c, size, k, r, stride, groups = self.sizes
        parted = f", {groups} groups" if groups > 1 else ""
        how = f"{r} x {r} / {stride}{parted} {SHORT[self.dtype]}"
        return f"{self.model} {n} x {c} x {size}² -> {k}, {how}"

    @property
    def name(self) -> str:
        return f"{self.anchor}: {self.behind}"

    def spec(self) -> GraphSpec:
        """The graph: of a linear layer, whose weight lies transposed in memory, or of images that
        are channels last."""
        g = cg.Graph("anchor")
        y = self._product(g) if self.is_product else self._convolution(g)

        def given(name: str, rank: int = 0, dtype: torch.dtype | None = None) -> Value:
            channels = y.shape[-1 if self.is_product else 1]
            layout = None if self.is_product or rank else "channels_last"
            shape = (channels,) if rank else y.shape
            return g.input(name, shape, dtype or self.dtype, layout=layout)

        BEHIND[self.behind](g, y, given)
        return g.spec()

    def _product(self, g: cg.Graph) -> Value:
        rows, inner, columns = self.sizes
        of_layer = torch.empty(columns, inner, dtype=self.dtype, device="meta")
        x = g.input("x", (rows, inner), self.dtype)
        return g.matmul(x, g.input("w", like=of_layer.t()))

    def _convolution(self, g: cg.Graph) -> Value:
        n, c, size, k, r, stride, groups = self.sizes
        x = g.input("x", (n, c, size, size), self.dtype, layout="channels_last")
        w = g.input("w", (k, c // groups, r, r), self.dtype, layout="channels_last")
        return g.conv(x, w, stride=stride, padding=r // 2, groups=groups)

    def alone(self, device: torch.device) -> Callable[[], object]:
        """torch's layer, with the bias if there is one."""
        spec = self.spec()
        made = [spec.tensors[n] for n in ("x", "w", "bias") if n in spec.inputs]
        data = [0.1 * torch.randn(t.shape, device=device) for t in made]
        x, w, *bias = (
            torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=device).copy_(values)
            for t, values in zip(made, data, strict=True)
        )
        b = bias[0] if bias else None
        if self.is_product:
            weight = w.t()
            return lambda: F.linear(x, weight, b)
        stride, groups, padding = self.sizes[5], self.sizes[6], self.sizes[4] // 2
        return lambda: F.conv2d(x, w, b, stride, padding, 1, groups)


ROWS: tuple[Row, ...] = (
    *(
        Row(model, sizes, dtype, behind)
        for model, sizes, dtype, all_of in PRODUCTS
        for behind in all_of
    ),
    *(Row(model, sizes, F16, behind) for model, sizes, all_of in CONVOLUTIONS for behind in all_of),
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
    """The product or convolution, the sum with a bias if one stands behind it, and the rest."""
    nodes = compute_nodes(graph.spec.nodes)
    at = next(n for n, node in enumerate(nodes) if graph.is_anchor(node))
    (made,) = nodes[at].results
    last = at + 1
    if last < len(nodes) and nodes[last].op in ("add", "bias") and made in nodes[last].operands:
        (added,) = (name for name in nodes[last].operands if name != made)
        last += len(graph.spec.tensors[added].shape) == 1
    return nodes[: at + 1], nodes[at + 1 : last], nodes[last:]


def epilogue(nodes: Group) -> tuple[Group, Group]:
    """The pointwise ops in front, which a plan may take behind its anchor, and what follows."""
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
    anchor, bias, rest = parts(graph)
    pointwise, behind = epilogue((*bias, *rest))
    whole = (*anchor, *pointwise)

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
    first = subgraph_of(graph, anchor)
    after = (*bias, *rest)
    if after:
        yield way("anchor | kernel", lambda: step(anchor, engines.first(first)) + kernel(after))
    yield way("torch | kernel", lambda: step(anchor, None) + kernel(after))
    if bias:
        if rest:
            both = (*anchor, *bias)
            yield from _by_engines(graph, "bias by ", both, rest, engines, kernel, skipped, tell)
        longest = (*anchor, *bias, *rest[:1])
        taken = longest if runs_whole(subgraph_of(graph, longest)) else (*anchor, *bias)
        if runs_whole(subgraph_of(graph, taken)):
            left = (*bias, *rest)[len(taken) - len(anchor) :]
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
