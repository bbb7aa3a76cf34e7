"""Graphs of which cuDNN's plans are, or were reported to be, wrong: one for each claim.

Each entry of ``known_bad.TABLE`` that this project measured has an example here, which
``tests/cpu/backend/test_known_bad.py`` holds. :func:`plans` runs those that an entry bars too;
it is a case for :mod:`tests.apart`, of ``tests/gpu/test_reported.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import cudnngraph as cg
from cudnngraph.backend import candidates, handles, plan
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from tests import numerics

F16, BF16, F32, I8, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32
F64 = torch.float64
LAST = "channels_last"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """``build`` makes the graphs, which are launched in turn; each is one plan.

    ``fill`` replaces the values of inputs that are not random. ``finite``: results are looked
    through for NaN and infinities alone, since their numbers are what large ones cancel to.
    """

    id: str
    build: Callable[[], tuple[cg.Graph, ...]]
    source: str
    fill: Callable[[Tensors], None] | None = None
    allow_tf32: bool = False
    terms: int = 1
    finite: bool = False


def _one(build: Callable[[], cg.Graph]) -> Callable[[], tuple[cg.Graph, ...]]:
    return lambda: (build(),)


# -- what was seen here ----------------------------------------------------------------------------


def _conv_into_another_layout() -> cg.Graph:
    g = cg.Graph("conv")
    x = g.input("x", (4, 32, 14, 14), F16, layout=LAST)
    w = g.input("w", (64, 32, 3, 3), F16, layout=LAST)
    b = g.input("b", (64,), F16)
    g.output("y", g.conv_bias_act(x, w, b, padding=1, activation="silu"), layout="contiguous")
    return g


def _residual_changed_first() -> cg.Graph:
    g = cg.Graph("residual")
    x = g.input("x", (4, 64, 14, 14), F16, layout=LAST)
    w = g.input("w", (64, 64, 3, 3), F16, layout=LAST)
    z = g.input("z", (4, 64, 14, 14), F16, layout=LAST)
    g.output("y", g.conv_bias_act(x, w, residual=z, padding=1, alpha1=0.5, alpha2=-1.5))
    return g


def _attention_over_padding() -> cg.Graph:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (3, 4, 128, 64), F16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, seq_len_kv=g.input("lengths", (3,), I32)))
    return g


def _nan_behind_lengths(tensors: Tensors) -> None:
    lengths = torch.tensor([128, 65, 0], dtype=I32)
    tensors["lengths"].copy_(lengths)
    for name in "kv":
        for batch, length in enumerate(lengths.tolist()):
            tensors[name][batch, :, length:] = float("nan")


def _two_scaled() -> cg.Graph:
    g = cg.Graph("scaled")
    x = g.input("x", (4, 64, 14, 14), F16, layout=LAST)
    w = g.input("w", (64, 64, 3, 3), F16, layout=LAST)
    z = g.input("z", (4, 64, 14, 14), F16, layout=LAST)
    y = g.conv(x, w, padding=1) * 0.5 + z * 2.0
    g.output("y", g.relu(g.bias(y, g.input("b", (64,), F16))))
    return g


def _float32_product() -> cg.Graph:
    g = cg.Graph("product")
    x, w = g.input("x", (256, 128), F32), g.input("w", (128, 192), F32)
    g.output("y", g.relu(x @ w))
    return g


def _product_and_leaky_relu() -> cg.Graph:
    g = cg.Graph("leaky")
    x, w = g.input("x", (256, 128), F16), g.input("w", (128, 192), F16)
    g.output("y", g.leaky_relu(x @ w, 0.2))
    return g


def _scaled_weight_gradient() -> cg.Graph:
    g = cg.Graph("wgrad")
    dy, x = (g.input(name, (4, 32, 14, 14), F16, layout=LAST) for name in ("dy", "x"))
    dw = g.conv_wgrad(dy, x, kernel=3, padding=1)
    g.output("dw", dw * g.input("s", (1, 32, 1, 1), F16), layout=LAST)
    return g


def _int8_sums() -> cg.Graph:
    g = cg.Graph("sums")
    x = g.input("x", (4, 64, 14, 14), I8, layout=LAST)
    w = g.input("w", (64, 64, 3, 3), I8, layout=LAST)
    g.output("y", g.conv(x, w, padding=1), layout=LAST)
    return g


# -- what others reported --------------------------------------------------------------------------


def _product_with_gaps(which: str) -> cg.Graph:
    """A product with an epilogue whose rows of x, of w or of the result have others between."""
    g = cg.Graph(f"gaps_{which}")
    shapes = {"x": (2, 256, 128), "w": (2, 128, 192), "y": (2, 256, 192)}

    def stride(name: str) -> tuple[int, ...]:
        _, rows, columns = shapes[name]
        row = columns + (64 if name == which else 0)
        return (rows * row, row, 1)

    x, w = (g.input(name, shapes[name], F16, stride=stride(name)) for name in "xw")
    y = g.gelu(x @ w + g.input("b", (1, 1, 192), F16))
    g.output("y", y, stride=stride("y"))
    return g


def _depthwise(layout: str, act: bool) -> tuple[cg.Graph, ...]:
    """Depthwise convolutions of the same channels and of images of several sizes."""
    made = []
    for height, width in ((56, 56), (28, 28), (14, 20), (7, 7), (57, 31)):
        g = cg.Graph(f"depthwise_{height}x{width}")
        x = g.input("x", (4, 64, height, width), F16, layout=layout)
        y = g.conv(x, g.input("w", (64, 1, 3, 3), F16, layout=layout), padding=1, groups=64)
        g.output("y", g.relu(y) if act else y, layout=layout)
        made.append(g)
    return tuple(made)


def _attention_backward(s_q: int, s_kv: int, mask: bool) -> cg.Graph:
    g = cg.Graph("attention_backward")
    sizes = {"do": s_q, "q": s_q, "k": s_kv, "v": s_kv, "o": s_q}
    made = {name: g.input(name, (2, 4, size, 64), BF16) for name, size in sizes.items()}
    lse = g.input("lse", (2, 4, s_q), F32)
    bias = g.input("mask", (1, 1, s_q, s_kv), BF16) if mask else None
    for name, grad in zip(
        ("dq", "dk", "dv"), g.sdpa_backward(*made.values(), lse, bias), strict=True
    ):
        g.output(name, grad)
    return g


def _low_scores(tensors: Tensors) -> None:
    """Every score is near -120, so that exp(-lse) is beyond float32's largest number."""
    q, k, v = (tensors[name] for name in "qkv")
    q.mul_(0.1)
    k.mul_(0.1)
    q[..., 0], k[..., 0] = 1.0, -120.0 * q.shape[-1] ** 0.5
    mask = tensors.get("mask")
    if mask is not None:
        mask.zero_()
    g = cg.Graph("forward")
    values = [g.input(n, t.shape, F64) for n, t in (("q", q), ("k", k), ("v", v))]
    o, lse = g.sdpa(*values, return_lse=True)
    g.output("o", o)
    g.output("lse", lse)
    outputs = reference.run(g.spec(), [t.double() for t in (q, k, v)], torch.float64)
    tensors["o"].copy_(outputs[0])
    tensors["lse"].copy_(outputs[1])


def _volume(dtype: torch.dtype) -> cg.Graph:
    g = cg.Graph("volume")
    x = g.input("x", (1, 16, 12, 40, 36), dtype)
    g.output("y", g.conv(x, g.input("w", (16, 16, 1, 3, 3), dtype)))
    return g


_OURS = "seen on an H200 with cuDNN 9.19.0"

EXAMPLES: tuple[Example, ...] = (
    Example("conv_into_another_layout", _one(_conv_into_another_layout), _OURS),
    Example("residual_changed_first", _one(_residual_changed_first), _OURS),
    Example("attention_over_padding", _one(_attention_over_padding), _OURS, _nan_behind_lengths),
    Example("two_scaled", _one(_two_scaled), _OURS),
    Example("float32_product", _one(_float32_product), _OURS),
    Example("product_and_leaky_relu", _one(_product_and_leaky_relu), _OURS),
    Example("scaled_weight_gradient", _one(_scaled_weight_gradient), _OURS),
    Example("int8_sums", _one(_int8_sums), _OURS),
    *(
        Example(
            f"gaps_in_{which}",
            _one(lambda which=which: _product_with_gaps(which)),
            "cudnn-frontend#442",
        )  # type: ignore[misc]
        for which in "xwy"
    ),
    *(
        Example(
            f"depthwise_in_sequence_{layout}_{'relu' if act else 'alone'}",
            lambda layout=layout, act=act: _depthwise(layout, act),  # type: ignore[misc]
            "cudnn-frontend#442",
        )
        for layout in (LAST, "contiguous")
        for act in (False, True)
    ),
    Example(
        "attention_backward_mask_704",
        _one(lambda: _attention_backward(704, 704, mask=True)),
        "pytorch#196678: dq is NaN where S % 128 == 64 beside a mask",
        _low_scores,
        finite=True,
    ),
    Example(
        "attention_backward_one_row",
        _one(lambda: _attention_backward(1, 128, mask=False)),
        "cudnn-frontend#1072: dk and dv are NaN where S_q is 1",
        _low_scores,
        finite=True,
    ),
    Example("volume_bf16", _one(lambda: _volume(BF16)), "pytorch#163539"),
    Example("volume_tf32", _one(lambda: _volume(F32)), "pytorch#167024", allow_tf32=True),
)

BY_ID: Mapping[str, Example] = {example.id: example for example in EXAMPLES}


# -- their plans, on a GPU -------------------------------------------------------------------------

CONFIGURATIONS = 3  # of each engine
ROUNDS = 3


def plans(id: str, skip: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(plan, what became of it) of an example: "right", "wrong: …" or "not built: …".

    What is known to be wrong, anywhere or on this GPU, is let through. Where an example has several
    graphs, their plans by one engine are launched in turn.
    """
    example = BY_ID[id]
    candidates.why_bad = lambda *args, **options: None  # type: ignore[assignment]
    candidates.why_found_bad = lambda *args, **options: None  # type: ignore[assignment]
    policy = cg.Policy(allow_tf32=example.allow_tf32)
    specs = [graph.spec() for graph in example.build()]
    try:
        proposals = [candidates.Proposals(spec, policy, 0, more=True) for spec in specs]
    except cg.NotSupported:
        return
    given = [inputs_of(example, spec) for spec in specs]
    wanted = [float64(spec, tensors) for spec, tensors in zip(specs, given, strict=True)]
    offered = [
        [[c for c in each.candidates if c.choice.engine == engine] for each in proposals]
        for engine in dict.fromkeys(c.choice.engine for c in proposals[0].candidates)
    ]
    for lists in (lists for lists in offered if all(lists)):
        engine = lists[0][0].choice.engine
        for number in range(min(CONFIGURATIONS, len(lists[0]))):
            mark = f"engine {engine}, configuration {number}"
            if mark in skip:
                continue
            yield mark, None
            built = [
                each.build(found[min(number, len(found) - 1)])
                for each, found in zip(proposals, lists, strict=True)
            ]
            torch.cuda.synchronize()  # a launch on zeros may have failed for good
            made = [one for _, one in built if one is not None]
            if len(made) < len(specs):
                reasons = [outcome.reason for outcome, one in built if one is None]
                yield mark, f"not built: {reasons[0]}"
                continue
            fault = fault_of(example, specs, launched(made, specs, given), wanted)
            yield mark, f"wrong: {fault}" if fault else "right"


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
    return value.as_strided((extent,), (1,)).to("cuda").as_strided(value.shape, value.stride())


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
    workspace = torch.full((need,), 255, dtype=torch.uint8, device="cuda")
    rounds: list[list[list[torch.Tensor]]] = []
    for _ in range(ROUNDS):
        outputs = []
        for spec in specs:
            made = []
            for tensor in (spec.tensors[name] for name in spec.outputs):
                blank = float("nan") if tensor.dtype.is_floating_point else 77
                memory = torch.full((tensor.extent,), blank, dtype=tensor.dtype, device="cuda")
                made.append(memory.as_strided(tensor.shape, tensor.stride))
            outputs.append(made)
        rounds.append(outputs)
    torch.cuda.synchronize()
    handle = handles.handle_on_current_stream(0)
    for outputs in rounds:
        for each, spec, tensors, made in zip(plans, specs, there, outputs, strict=True):
            data = [*(tensors[name] for name in spec.inputs), *made]
            pointers = each.pointers([tensor.data_ptr() for tensor in data])
            each.execute(pointers, workspace.data_ptr(), handle)
    torch.cuda.synchronize()
    return rounds


def fault_of(
    example: Example,
    specs: list[GraphSpec],
    rounds: list[list[list[torch.Tensor]]],
    wanted: list[list[torch.Tensor]],
) -> str:
    """Return what is wrong with the outputs; empty if nothing is."""
    for outputs in rounds:
        for spec, made, references in zip(specs, outputs, wanted, strict=True):
            dtype = spec.tensors[spec.inputs[0]].dtype
            for name, output, right in zip(spec.outputs, made, references, strict=True):
                tf32 = example.allow_tf32 and dtype == torch.float32
                if example.finite:
                    if not bool(output.isfinite().all()):
                        return f"{name} of {spec.name} is not finite"
                    continue
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
