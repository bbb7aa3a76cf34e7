"""All public callables with good arguments: functions on tensors, modules, and the rest."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph import functional, nn
from tests.hostile.builder import (
    HEADS,
    I32,
    IMAGE,
    ROWS,
    RUN_ELEMENTS,
    builder_methods,
    freeze,
    method,
    run,
)
from tests.hostile.calls import Target
from tests.hostile.values import F32

# -- functions on tensors, and modules -------------------------------------------------------------


_FILTERS = (4, 4, 3, 3)
_TENSORS: Mapping[str, Mapping[str, Any]] = {
    **{
        f"conv{kind}{rank}d": {
            "input": (2, 4, *(6,) * rank),
            "weight": (4, 4, *(3,) * rank),
            "bias": (4,),
        }
        for kind in ("", "_transpose")
        for rank in (1, 2, 3)
    },
    **{
        f"conv{kind}_bias_act": {"input": IMAGE, "weight": _FILTERS, "bias": (4,)}
        for kind in ("", "_transpose")
    },
    **{
        f"conv{kind}_bn_act": {
            "input": IMAGE,
            "weight": _FILTERS,
            "running_mean": (4,),
            "running_var": (4,),
        }
        for kind in ("", "_transpose")
    },
    "conv_bias_act_into": {"out": (2, 4, 4, 4), "input": IMAGE, "weight": _FILTERS},
    "conv_transpose_bias_act_into": {"out": (2, 4, 8, 8), "input": IMAGE, "weight": _FILTERS},
    "conv_bn_act_into": {
        "out": (2, 4, 4, 4),
        "input": IMAGE,
        "weight": _FILTERS,
        "running_mean": (4,),
        "running_var": (4,),
    },
    "layer_norm": {"input": ROWS, "weight": (8,)},
    "rms_norm": {"input": ROWS, "weight": (8,)},
    "group_norm": {"input": IMAGE, "weight": (4,), "bias": (4,)},
    "instance_norm": {"input": IMAGE, "weight": (4,), "bias": (4,)},
    "linear": {"input": ROWS, "weight": (5, 8), "bias": (5,)},
    "mlp": {"input": ROWS, "up": (6, 8), "up_bias": (6,), "down": (5, 6)},
    "scaled_dot_product_attention": {"query": HEADS, "key": HEADS, "value": HEADS},
    "scaled_dot_product_attention_into": {**dict.fromkeys(("out", "query", "key", "value"), HEADS)},
    "varlen_attention": {
        **dict.fromkeys(("query", "key", "value"), (7, 2, 8)),
        "cu_seqlens_q": ((3,), I32),
        "cu_seqlens_kv": ((3,), I32),
    },
    "paged_attention": {
        "query": (2, 2, 1, 8),
        "k_cache": (6, 2, 4, 8),
        "v_cache": (6, 2, 4, 8),
        "page_table": ((2, 3), I32),
        "seq_len_kv": ((2,), I32),
    },
}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "layer_norm": {"normalized_shape": (8,)},
    "rms_norm": {"normalized_shape": (8,)},
    "group_norm": {"num_groups": 2},
    "varlen_attention": {"max_seqlen_q": 4, "max_seqlen_kv": 4},
}


def _filled(form: Any) -> torch.Tensor:
    shape, dtype = form if form and isinstance(form[-1], torch.dtype) else (form, F32)
    made = torch.rand(shape) + 0.5
    return made.to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _tensors_come(result: Any) -> bool:
    for each in result if isinstance(result, tuple) else (result,):
        assert isinstance(each, torch.Tensor), type(each).__name__
        each.shape  # noqa: B018  it is one that can be asked
    return True


def on_tensors(name: str) -> Target:
    """A function of :mod:`cudnngraph.functional`."""

    def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
        good = {key: _filled(form) for key, form in _TENSORS[name].items()}
        return getattr(functional, name), {**good, **_OPTIONS.get(name, {})}, _tensors_come

    return Target(f"functional.{name}", make)


_MODULES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FusedConvBlock": (
        {"in_channels": 4, "out_channels": 4, "kernel_size": 3},
        {"x": IMAGE},
    ),
    "FusedConvTransposeBlock": (
        {"in_channels": 4, "out_channels": 4, "kernel_size": 3},
        {"x": IMAGE},
    ),
    "FusedDepthwiseSeparable": (
        {"in_channels": 4, "out_channels": 4, "kernel_size": 3},
        {"x": IMAGE},
    ),
    "FusedLayerNorm": ({"normalized_shape": 8}, {"x": ROWS}),
    "FusedRMSNorm": ({"normalized_shape": 8}, {"x": ROWS}),
    "FusedMLP": ({"in_features": 8, "hidden_features": 6}, {"x": ROWS}),
    "FusedMultiheadAttention": ({"embed_dim": 8, "num_heads": 2}, {"x": ROWS}),
    "FusedSDPA": ({}, {"q": HEADS, "k": HEADS, "v": HEADS}),
}


def constructor(name: str) -> Target:
    """A module of :mod:`cudnngraph.nn`, made and run."""

    def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
        options, forms = _MODULES[name]

        def use(module: Any) -> bool:
            repr(module)
            given = {key: _filled(form) for key, form in forms.items()}
            place = next((p for p in module.parameters()), None)
            if place is not None and (place.device.type == "meta" or place.numel() > RUN_ELEMENTS):
                return False
            return _tensors_come(module(**given))

        return getattr(nn, name), dict(options), use

    return Target(f"nn.{name}", make)


def forward(name: str) -> Target:
    """A module of :mod:`cudnngraph.nn`, called."""

    def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
        options, forms = _MODULES[name]
        module = getattr(nn, name)(**options).eval()
        return module.forward, {key: _filled(form) for key, form in forms.items()}, _tensors_come

    return Target(f"nn.{name}.forward", make)


# -- the rest --------------------------------------------------------------------------------------


def _nothing(result: Any) -> bool:
    repr(result)
    return True


def _graph() -> cg.Graph:
    g = cg.Graph("fuzzed")
    g.output("y", g.relu(g.input("x", ROWS, F32)))
    return g


class _Takes(torch.nn.Module):
    """A model of a tensor and of anything else."""

    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        """As torch.neg."""
        return torch.neg(x)


def _other_targets() -> Iterator[Target]:
    def target(
        name: str,
        function: Callable[[], Callable[..., Any]],
        good: Callable[[], dict[str, Any]],
        use: Callable[[Any], object] = _nothing,
    ) -> Target:
        return Target(name, lambda: (function(), good(), use))

    x = lambda: torch.rand(ROWS)  # noqa: E731

    def declared(**options: Any) -> bool:
        g = cg.Graph(**options)
        return freeze(g, g.relu(g.input("x", ROWS, F32)))

    def inputs() -> Target:
        def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
            g = cg.Graph("fuzzed")
            good = {"name": "x", "shape": ROWS, "dtype": F32}
            return g.input, good, lambda value: freeze(g, g.identity(value))

        return Target("Graph.input", make)

    def outputs() -> Target:
        def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
            g = cg.Graph("fuzzed")
            value = g.relu(g.input("x", ROWS, F32))
            return g.output, {"name": "y", "value": value}, lambda _: run(g.spec())

        return Target("Graph.output", make)

    def between(name: str) -> Target:
        def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
            g = cg.Graph("fuzzed")
            value = g.input("x", IMAGE, F32)

            def apply(other: Any) -> Any:
                return getattr(operator, name)(value, other)

            return apply, {"other": 2.0}, lambda result: freeze(g, result)

        return Target(f"Value.{name}", make)

    block = cg.specialize(lambda g, x, w=None, *, slope=0.1: g.leaky_relu(x, slope))
    trained = cg.specialize(training=True)(lambda g, x: g.exp(x))
    exe = _graph().compile("cpu")
    trainable = _graph().compile("cpu", training=True)
    yield target("Graph", lambda: cg.Graph, lambda: {"name": "fuzzed"})
    yield inputs()
    yield outputs()
    yield from map(between, ("add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge"))
    yield target("Graph.compile", lambda: _graph().compile, lambda: {"device": "cpu"})
    yield target("Policy", lambda: cg.Policy, dict)
    yield target("specialize", lambda: cg.specialize, lambda: {"build": lambda g, x: g.relu(x)})
    for name, function in (("specialized", block), ("specialized, training", trained)):
        yield target(name, lambda f=function: lambda x: f(x), lambda: {"x": x()}, _tensors_come)  # type: ignore[misc]
    yield target(
        "specialized, options",
        lambda: lambda x, w, slope: block(x, w, slope=slope),
        lambda: {"x": x(), "w": None, "slope": 0.2},
        _tensors_come,
    )
    for name, made in (("Executable", exe), ("Trainable", trainable)):
        yield target(name, lambda f=made: lambda x: f(x), lambda: {"x": x()}, _tensors_come)  # type: ignore[misc]
        yield target(
            f"{name}.run",
            lambda f=made: lambda x, y: f.run(x=x, y=y),
            lambda: {"x": x(), "y": x()},  # type: ignore[misc]
        )
    yield target(
        "Executable.bind",
        lambda: lambda x, y: exe.bind(x=x, y=y),
        lambda: {"x": x(), "y": x()},
        lambda call: call() is None,
    )
    yield target("Trainable.pair", lambda: trainable.pair, lambda: {"wrt": ("x",)})
    yield target(
        "differentiate", lambda: cg.differentiate, lambda: {"graph": _graph(), "wrt": ["x"]}
    )
    yield target(
        "warm_up",
        lambda: cg.warm_up,
        lambda: {"graphs": [_graph()], "device": "cpu", "progress": False},
    )
    yield target("capture_step", lambda: cg.capture_step, lambda: {"step": lambda: None})
    yield target("on_miss", lambda: cg.on_miss, lambda: {"hook": print}, lambda off: off() is None)
    yield target("nn.replace", lambda: nn.replace, lambda: {"model": torch.nn.Linear(2, 2)})
    yield target("explain", lambda: cg.explain, lambda: {"graph": _graph(), "target": "none"})
    yield target(
        "fuse",
        lambda: cg.fuse,
        lambda: {"model": torch.nn.ReLU().eval(), "example_inputs": (x(),)},
    )
    for name, sizes in (("fused", None), ("fused, dynamic", {"x": {1: (4, 8)}})):
        fused = cg.fuse(_Takes().eval(), (x(), 1.0), dynamic=sizes)
        yield target(
            name,
            lambda f=fused: lambda x, other: f(x, other),  # type: ignore[misc]
            lambda: {"x": x(), "other": 2.0},
            _tensors_come,
        )
    yield target(
        "fuse, dynamic",
        lambda: (
            lambda sizes, pad: cg.fuse(_Takes().eval(), x(), dynamic={"x": {1: sizes, "pad": pad}})
        ),
        lambda: {"sizes": (4, 8), "pad": 0},
    )


def targets() -> list[Target]:
    """Every public callable."""
    return [
        *map(method, builder_methods()),
        *map(on_tensors, functional.__all__),
        *map(constructor, _MODULES),
        *map(forward, _MODULES),
        *_other_targets(),
    ]
