"""Methods of the builder with good arguments; graphs that come out are frozen and run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.ir.spec import numel
from tests.hostile.calls import Target, parameters
from tests.hostile.values import F16, F32, F64

RUN_ELEMENTS = 1 << 20  # a graph of larger tensors is not run
IMAGE, ROWS, HEADS = (2, 4, 6, 6), (2, 3, 8), (1, 2, 5, 8)


@dataclass
class Good:
    """Good arguments of a method: shapes (with a dtype if not float32) of operands, attributes."""

    operands: dict[str, Any] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)


BOOL, I32, I64 = torch.bool, torch.int32, torch.int64
_FP8 = torch.float8_e4m3fn
_STATS = {"mean": (4,), "inv_std": (4,)}
_POOLED = {"kernel_size": 2}
_ATTENTION: dict[str, Any] = {"q": HEADS, "k": HEADS, "v": HEADS}
_PACKED: dict[str, Any] = {
    **{name: (7, 2, 8) for name in "qkv"},
    "cu_seqlens_q": ((3,), I32),
    "cu_seqlens_kv": ((3,), I32),
}
_LONGEST = {"max_seqlen_q": 4, "max_seqlen_kv": 4}
_CONV = {"x": IMAGE, "weight": (4, 4, 3, 3)}
#: Good arguments where those by name below do not do.
METHODS: Mapping[str, Good] = {
    "conv": Good(_CONV),
    "conv_transpose": Good(_CONV),
    "conv_bias_act": Good({**_CONV, "bias": (4,)}),
    "conv_transpose_bias_act": Good({**_CONV, "bias": (4,)}),
    "conv_bn_act": Good({**_CONV, "running_mean": (4,), "running_var": (4,)}),
    "conv_wgrad": Good({"dy": (2, 4, 4, 4), "x": IMAGE}, {"kernel": 3}),
    "depthwise_separable": Good({"x": IMAGE, "depthwise": (4, 1, 3, 3), "pointwise": (5, 4, 1, 1)}),
    "quantized_conv_bias_act": Good(
        {"x": (IMAGE, torch.int8), "weight": ((4, 4, 3, 3), torch.int8), "scale": (), "bias": (4,)}
    ),
    "batch_norm_backward": Good({"weight": (4,), **_STATS}),
    "batch_norm_apply": Good({"weight": (4,), "bias": (4,), **_STATS}),
    "instance_norm_backward": Good({"mean": (2, 4, 1, 1), "inv_std": (2, 4, 1, 1)}),
    "group_norm": Good(attrs={"num_groups": 2}),
    "group_affine": Good(attrs={"num_groups": 2}),
    "layer_norm": Good({"x": ROWS, "weight": (8,)}),
    "rms_norm": Good({"x": ROWS, "weight": (8,)}),
    "layer_norm_backward": Good(
        {"dy": ROWS, "x": ROWS, "weight": (8,), "mean": (2, 3, 1), "inv_std": (2, 3, 1)}
    ),
    "rms_norm_backward": Good({"dy": ROWS, "x": ROWS, "weight": (8,), "inv_std": (2, 3, 1)}),
    "matmul": Good({"x": ROWS, "y": (8, 5)}),
    "grouped_matmul": Good({"x": (7, 8), "y": (3, 8, 5), "ends": ((3,), I32)}),
    "grouped_matmul_wgrad": Good({"x": (7, 8), "dy": (7, 5), "ends": ((3,), I32)}),
    "linear": Good({"x": ROWS, "weight": (5, 8)}),
    "swiglu": Good({"x": ROWS, "w_gate": (8, 5), "w_up": (8, 5)}),
    "geglu": Good({"x": ROWS, "w_gate": (8, 5), "w_up": (8, 5)}),
    "mlp": Good({"x": ROWS, "up": (6, 8), "up_bias": (6,), "down": (5, 6)}),
    "rope": Good({"x": HEADS, "cos": (5, 4), "sin": (5, 4)}),
    "block_mask": Good({"blocks": ((2, 2), BOOL)}, {"rows": 6, "keys": 5, "block": 3}),
    "dropout": Good({"x": ROWS, "keep": (ROWS, BOOL)}, {"p": 0.5}),
    "normalize_images": Good({"x": ((2, 5, 6, 3), torch.uint8), "scale": (6, 3), "shift": (6, 3)}),
    "adamw": Good(
        {name: (1,) for name in ("lr", "bias_correction1", "bias_correction2")}
        | {name: (6,) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    ),
    "dequantize": Good({"x": (IMAGE, torch.int8), "scale": (4,)}),
    "quantize": Good({"scale": (4,)}, {"dtype": torch.int8}),
    "cast": Good(attrs={"dtype": torch.float16}),
    "to_float": Good({"x": (IMAGE, torch.uint8)}),
    "logical_and": Good({"x": (IMAGE, BOOL), "y": (IMAGE, BOOL)}),
    "logical_or": Good({"x": (IMAGE, BOOL), "y": (IMAGE, BOOL)}),
    "logical_not": Good({"x": (IMAGE, BOOL)}),
    "where": Good({"condition": (IMAGE, BOOL)}),
    "clamp": Good(attrs={"min": -1.0}),
    "expand": Good({"x": (4,)}, {"shape": (2, 4), "dims": (1,)}),
    "reshape": Good(attrs={"shape": (2, -1)}),
    "transpose": Good(attrs={"dim0": 0, "dim1": 1}),
    "permute": Good(attrs={"dims": (0, 2, 3, 1)}),
    "slice": Good(attrs={"dim": 1, "start": 1}),
    **{
        name: Good(attrs={"dim": 1})
        for name in ("softmax", "softmax_backward", "log_softmax", "log_softmax_backward")
    },
    "nll_loss": Good({"x": (4, 5), "target": ((4,), I64)}),
    "cross_entropy": Good({"x": (4, 5), "target": ((4,), I64)}),
    "nll_loss_backward": Good({"dy": (), "target": ((4,), I64)}, {"shape": (4, 5)}),
    "max_pool": Good(attrs=_POOLED),
    "avg_pool": Good(attrs=_POOLED),
    "max_pool_backward": Good({"dy": (2, 4, 3, 3)}, _POOLED),
    "avg_pool_backward": Good({"dy": (2, 4, 3, 3)}, {**_POOLED, "input_size": 6}),
    "adaptive_avg_pool": Good(attrs={"output_size": 4}),
    "adaptive_max_pool": Good(attrs={"output_size": 4}),
    "adaptive_avg_pool_backward": Good({"dy": (2, 4, 4, 4)}, {"output_size": 4, "input_size": 6}),
    "adaptive_max_pool_backward": Good({"dy": (2, 4, 4, 4)}, {"output_size": 4}),
    "interpolate": Good(attrs={"size": 5}),
    "interpolate_backward": Good({"dy": (2, 4, 5, 5)}, {"size": 5, "input_size": 6}),
    "pixel_shuffle": Good(attrs={"upscale_factor": 2}),
    "pixel_unshuffle": Good(attrs={"downscale_factor": 2}),
    "sdpa": Good(_ATTENTION),
    "sdpa_backward": Good({**_ATTENTION, "do": HEADS, "o": HEADS, "lse": (1, 2, 5)}),
    "sdpa_fp8": Good(
        {name: (HEADS, _FP8) for name in "qkv"}
        | {f"descale_{name}": () for name in "qkvs"}
        | {"scale_s": (), "scale_o": ()}
    ),
    "sdpa_paged": Good(
        {
            "q": (2, 2, 1, 8),
            "k_cache": (6, 2, 4, 8),
            "v_cache": (6, 2, 4, 8),
            "page_table": ((2, 3), I32),
            "seq_len_kv": ((2,), I32),
        }
    ),
    "sdpa_varlen": Good(_PACKED, _LONGEST),
    "sdpa_varlen_backward": Good(
        {**_PACKED, "do": (7, 2, 8), "o": (7, 2, 8), "lse": (7, 2)}, _LONGEST
    ),
    "ragged_offsets": Good(
        {"cu_seqlens_q": ((3,), I32), "cu_seqlens_kv": ((3,), I32)},
        {"widths_q": (8, 16), "widths_kv": (8,)},
    ),
    "activation": Good(attrs={"kind": "relu"}),
    "concat": Good({"x": [IMAGE, IMAGE]}),
    "aten": Good({"x": [IMAGE]}, {"overload": "aten.cumsum.default", "args": (("tensor", 0), 1)}),
}
#: Operands by name, for the other methods.
_BY_NAME: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("x", "y", "dy"), IMAGE),
    **dict.fromkeys(("weight", "bias", "scale", "running_mean", "running_var"), (4,)),
}
#: Methods of the builder that are no ops, with targets of their own or without arguments.
NO_OPS = frozenset({"input", "output", "compile", "spec", "mark", "undo", "drop_unused_inputs"})


def _declared(g: cg.Graph, name: str, form: Any) -> Any:
    if isinstance(form, list):
        return [_declared(g, f"{name}{at}", each) for at, each in enumerate(form)]
    shape, dtype = form if form and isinstance(form[-1], torch.dtype) else (form, F32)
    return g.input(name, shape, dtype)


def builder_methods() -> list[str]:
    """The ops of the builder and its compositions."""
    return sorted(
        name
        for name, method in inspect.getmembers(cg.Graph, inspect.isfunction)
        if not name.startswith("_") and name not in NO_OPS
    )


def method(name: str) -> Target:
    """A method of the builder, called on a graph of its own."""

    def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
        g = cg.Graph("fuzzed")
        function = getattr(g, name)
        known = METHODS.get(name, Good())
        good: dict[str, Any] = dict(known.attrs)
        for parameter, each in parameters(function).items():
            needed = each.default is inspect.Parameter.empty or parameter in known.operands
            if parameter not in good and needed:
                form = known.operands.get(parameter, _BY_NAME.get(parameter))
                assert form is not None, f"no good argument for {name}({parameter})"
                good[parameter] = _declared(g, parameter, form)
        return function, good, lambda result: freeze(g, result)

    return Target(f"Graph.{name}", make)


def freeze(g: cg.Graph, result: Any) -> bool:
    """Freeze the graph with the results of an op as its outputs, and run it; True if it ran."""
    results = result if isinstance(result, tuple) else (result,)
    for place, value in enumerate(results):
        if not isinstance(value, cg.Value):
            raise AssertionError(f"the result is a {type(value).__name__}")
        repr(value)
        if value.name not in g._inputs:
            g.output(f"out{place}", value)
    g.drop_unused_inputs()
    return run(g.spec())


def run(spec: cg.GraphSpec) -> bool:
    """Run a small graph on the CPU."""
    repr(spec)
    if any(numel(tensor.shape) > RUN_ELEMENTS for tensor in spec.tensors.values()):
        return False
    if any(node.op == "aten" for node in spec.nodes):  # torch's own, which checks indices itself
        return False
    from cudnngraph.runtime.compile import compile as compile_spec

    executable = compile_spec(spec, "cpu")
    made = executable(*[content(spec.tensors[name]) for name in spec.inputs])
    for name, tensor in zip(
        spec.outputs, made if isinstance(made, tuple) else (made,), strict=True
    ):
        declared = spec.tensors[name]
        assert tuple(tensor.shape) == declared.shape, (name, tensor.shape, declared)
        assert tensor.dtype == declared.dtype, (name, tensor.dtype, declared)
    return True


def content(tensor: cg.TensorSpec) -> torch.Tensor:
    """Numbers that any op takes: offsets, classes and pages of int32 and int64 stay small."""
    made = torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype)
    if tensor.dtype in (F16, F32, F64, torch.bfloat16):
        return made.copy_(torch.rand(tensor.shape) + 0.5)
    return made.zero_()
