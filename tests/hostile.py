"""Hostile arguments for every public callable, by a seeded generator.

A call is made of good arguments, of which one to three are replaced by hostile ones: of the wrong
type, huge, not finite, empty, without an end, or objects whose own methods raise. It has to end in
an error of :mod:`cudnngraph.errors`, in Python's own TypeError where the signature does not take
it, or in a result. A graph that comes out has to freeze, and to run on the CPU where it is small.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import json
import math
import operator
import random
import resource
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import cudnngraph as cg
from cudnngraph import functional, nn
from cudnngraph.errors import CudnnGraphError
from cudnngraph.ir.spec import numel

F16, F32, F64 = torch.float16, torch.float32, torch.float64
RUN_ELEMENTS = 1 << 20  # a graph of larger tensors is not run


# -- hostile values --------------------------------------------------------------------------------


class Raises:
    """Whatever Python asks of it, it raises."""

    def _no(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("hostile")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _no  # type: ignore[assignment]
    __len__ = __iter__ = __getitem__ = __contains__ = __bool__ = _no
    __int__ = __float__ = __index__ = __repr__ = __str__ = __format__ = _no  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __call__ = _no
    __fspath__ = __enter__ = __exit__ = __array__ = _no


class RaisesOnRead(Raises):
    """Its attributes raise too."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("hostile")


class Lies:
    """Has a length that it has not, and equals everything."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __index__(self) -> int:
        return -7

    def __float__(self) -> float:
        return math.nan


class Number(int):
    """A whole number whose methods raise."""

    def __repr__(self) -> str:
        raise RuntimeError("hostile")

    __str__ = __eq__ = __hash__ = __lt__ = __index__ = __int__ = __repr__  # type: ignore[assignment]


class Text(str):
    """A text whose methods raise."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("hostile")

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise RuntimeError("hostile")

    isidentifier = __repr__ = __format__ = __str__  # type: ignore[assignment]


class Pair(tuple):  # type: ignore[type-arg]
    """A tuple whose methods raise."""

    def __len__(self) -> int:
        raise RuntimeError("hostile")

    __eq__ = __iter__ = __getitem__ = __repr__ = __len__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Choice(enum.IntEnum):
    TWO = 2


def _endless() -> Iterator[int]:
    return itertools.count()


def _raising() -> Iterator[int]:
    yield 1
    raise RuntimeError("hostile")


def _in_itself() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def _deep() -> Any:
    made: Any = 1
    for _ in range(5000):
        made = (made,)
    return made


def _of_another_graph() -> cg.Value:
    return cg.Graph("other").input("z", (2, 4, 6, 6), F32)


def _unknown() -> cg.Value:
    g = cg.Graph("wrong")
    return g.relu(g.input("z", (-1,), F32))


#: What makes a hostile value, under the name that a report shows.
HOSTILE: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "True": lambda: True,
    "False": lambda: False,
    **{
        name: (lambda value=value: value)
        for name, value in {
            "0": 0,
            "1": 1,
            "2": 2,
            "-1": -1,
            "-7": -7,
            "2**31": 2**31,
            "2**32 + 1": 2**32 + 1,
            "2**62": 2**62,
            "2**63": 2**63,
            "-2**63": -(2**63),
            "2**64": 2**64,
            "10**400": 10**400,
            "10**5000": 10**5000,
            "nan": math.nan,
            "inf": math.inf,
            "-inf": -math.inf,
            "0.0": 0.0,
            "-0.0": -0.0,
            "0.5": 0.5,
            "-1.5": -1.5,
            "1e308": 1e308,
            "5e-324": 5e-324,
            "1j": 1j,
            "Fraction": Fraction(1, 3),
            "wide Fraction": Fraction(10**400, 3),
            "Decimal": Decimal("0.5"),
            "IntEnum": Choice.TWO,
            "empty text": "",
            "text": "text",
            "two words": "two words",
            "relu": "relu",
            "same": "same",
            "mean": "mean",
            "keyword": "class",
            "_x": "_x",
            "x": "x",
            "NUL": "a\0b",
            "braces": "{subject} {0} %s",
            "surrogate": "\ud800",
            "long text": "x" * 10**5,
            "bytes": b"x",
            "()": (),
            "[]": [],
            "{}": {},
            "set()": set(),
            "(1,)": (1,),
            "[2]": [2],
            "(1, 2)": (1, 2),
            "(0, 0)": (0, 0),
            "(-1, -1)": (-1, -1),
            "(1, 2, 3)": (1, 2, 3),
            "(2, 4, 6, 6)": (2, 4, 6, 6),
            "(1,) * 9": (1,) * 9,
            "(1,) * 70": (1,) * 70,
            "(1, None)": (1, None),
            "(None, None)": (None, None),
            "('a', 'b')": ("a", "b"),
            "((1, 0), (0, 1))": ((1, 0), (0, 1)),
            "((),)": ((),),
            "((1,),)": ((1,),),
            "((1, 2, 3), (1, 2))": ((1, 2, 3), (1, 2)),
            "(True, False)": (True, False),
            "(0.5, 0.5)": (0.5, 0.5),
            "(2**62, 2**62)": (2**62, 2**62),
            "(2**40,) * 4": (2**40,) * 4,
            "(10**5000,)": (10**5000,),
            "(nan, inf)": (math.nan, math.inf),
            "{1, 2}": {1, 2},
            "{'a': 1}": {"a": 1},
            "OrderedDict": OrderedDict(a=1),
            "deque": deque([1, 2]),
            "range(2)": range(2),
            "range(10**9)": range(10**9),
            "np.int64(2)": np.int64(2),
            "np.int8(-1)": np.int8(-1),
            "np.uint64": np.uint64(2**64 - 1),
            "np.float16": np.float16(0.5),
            "np.float32": np.float32(0.5),
            "np.float64(nan)": np.float64(math.nan),
            "np.longdouble": np.longdouble(0.5),
            "np.bool_": np.bool_(True),
            "np.str_": np.str_("relu"),
            "np.array(2)": np.array(2),
            "np.array([1, 1])": np.array([1, 1]),
            "np.array(objects)": np.array([None, "a"], dtype=object),
            "datetime64": np.datetime64("2020-01-01"),
            "torch.float16": F16,
            "torch.float64": F64,
            "torch.int8": torch.int8,
            "torch.int32": torch.int32,
            "torch.bool": torch.bool,
            "torch.complex64": torch.complex64,
            "torch.qint8": torch.qint8,
            "torch.Size": torch.Size([1, 1]),
            "torch.device": torch.device("cpu"),
            "torch.strided": torch.strided,
            "torch.channels_last": torch.channels_last,
            "a type": int,
            "a module": math,
            "a function": len,
            "a slice": slice(1, 2),
        }.items()
    },
    "an object": object,
    "in itself": _in_itself,
    "deep": _deep,
    "a generator": lambda: (n for n in (1, 2)),
    "an endless generator": _endless,
    "a raising generator": _raising,
    "Raises": Raises,
    "RaisesOnRead": RaisesOnRead,
    "(Raises,)": lambda: (Raises(), 1),
    "Lies": Lies,
    "(Lies, Lies)": lambda: (Lies(), Lies()),
    "Number": lambda: Number(2),
    "Text": lambda: Text("relu"),
    "Pair": lambda: Pair((1, 1)),
    "a tensor": lambda: torch.ones(2, 4, 6, 6),
    "an int tensor": lambda: torch.tensor(2),
    "a tensor of none": lambda: torch.ones(0),
    "a tensor on meta": lambda: torch.ones(2, 4, 6, 6, device="meta"),
    "a wide tensor": lambda: torch.ones(2, 4, 6, 6, dtype=F64),
    "a complex tensor": lambda: torch.ones(2, 4, 6, 6, dtype=torch.complex64),
    "a sparse tensor": lambda: torch.ones(4, 4).to_sparse(),
    "a CSR tensor": lambda: torch.eye(4).to_sparse_csr(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "an expanded tensor": lambda: torch.ones(1).expand(2, 4, 6, 6),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "a lazy parameter": torch.nn.UninitializedParameter,
    "a module of torch": lambda: torch.nn.Linear(2, 2),
    "a list of tensors": lambda: [torch.ones(2), torch.ones(2)],
    "a graph": cg.Graph,
    "a policy": lambda: cg.Policy(deterministic=True),
    "another graph's value": _of_another_graph,
    "a value of a wrong op": _unknown,
    "a list of values": lambda: [_of_another_graph()],
}


# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A callable under its name. ``make`` gives it anew, with good arguments, and what is to be
    done with the result, which may raise the package's errors alone."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]]


@dataclass
class Outcome:
    """How one call ended. ``wrong`` says what must not be; ``refused`` names the error's class."""

    call: str
    wrong: str = ""
    refused: str = ""
    ran: bool = False


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What may be given by name or in order; the other keywords are not its own."""
    found = inspect.signature(function).parameters
    taken = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: each for name, each in found.items() if each.kind not in taken}


def attempt(target: Target, rng: random.Random, tell: Callable[[str], object] = len) -> Outcome:
    """One call with hostile arguments."""
    function, good, use = target.make()
    names = [*parameters(function)]
    count = min(len(names), rng.choice((1, 1, 1, 2, 3)))
    chosen = {name: rng.choice(sorted(HOSTILE)) for name in rng.sample(names, count)}
    given = {**good, **{name: HOSTILE[kind]() for name, kind in chosen.items()}}
    extra = ""
    if not rng.randrange(40):  # not in the signature, or too many
        extra = rng.choice(("unknown", "op", "self_", "x9"))
        given[extra] = HOSTILE[rng.choice(sorted(HOSTILE))]()
    shown = ", ".join(f"{name}={kind}" for name, kind in chosen.items())
    outcome = Outcome(f"{target.name}({shown}{', ' + extra + '=…' if extra else ''})")
    tell(outcome.call)
    positional = [
        name
        for name, each in parameters(function).items()
        if each.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    args = [given.pop(name) for name in positional if name in given]
    try:
        result = function(*args, **given)
        outcome.ran = bool(use(result))
    except CudnnGraphError as error:
        outcome.refused = type(error).__name__
        text = str(error)
        if not text.strip() or "hostile" in text.split("\n")[0]:
            outcome.wrong = f"{type(error).__name__} says nothing: {text!r}"
    except TypeError as error:
        try:
            inspect.signature(function).bind(*args, **given)
        except TypeError:
            outcome.refused = "TypeError"
        else:  # a function that hands its keywords on
            theirs = extra and f"unexpected keyword argument '{extra}'" in str(error)
            outcome.refused, outcome.wrong = ("TypeError", "") if theirs else ("", _told(error))
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            outcome.refused = "out of memory"
        else:
            outcome.wrong = _told(error)
    return outcome


def _told(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    last = error.__traceback__
    while last is not None:
        if "/cudnngraph/" in last.tb_frame.f_code.co_filename:
            where = f"{last.tb_frame.f_code.co_filename.rsplit('/', 1)[1]}:{last.tb_lineno}"
        last = last.tb_next
    try:
        text = str(error)
    except Exception:
        text = "?"
    return f"{type(error).__name__} at {where}: {text[:200]}"


# -- the builder -----------------------------------------------------------------------------------

_IMAGE, _ROWS, _HEADS = (2, 4, 6, 6), (2, 3, 8), (1, 2, 5, 8)


@dataclass
class Good:
    """Good arguments of a method: shapes (with a dtype if not float32) of operands, attributes."""

    operands: dict[str, Any] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)


_BOOL, _I32, _I64 = torch.bool, torch.int32, torch.int64
_FP8 = torch.float8_e4m3fn
_STATS = {"mean": (4,), "inv_std": (4,)}
_POOLED = {"kernel_size": 2}
_ATTENTION: dict[str, Any] = {"q": _HEADS, "k": _HEADS, "v": _HEADS}
_PACKED: dict[str, Any] = {
    **{name: (7, 2, 8) for name in "qkv"},
    "cu_seqlens_q": ((3,), _I32),
    "cu_seqlens_kv": ((3,), _I32),
}
_LONGEST = {"max_seqlen_q": 4, "max_seqlen_kv": 4}
_CONV = {"x": _IMAGE, "weight": (4, 4, 3, 3)}

#: Good arguments where those by name below do not do.
METHODS: Mapping[str, Good] = {
    "conv": Good(_CONV),
    "conv_transpose": Good(_CONV),
    "conv_bias_act": Good({**_CONV, "bias": (4,)}),
    "conv_transpose_bias_act": Good({**_CONV, "bias": (4,)}),
    "conv_bn_act": Good({**_CONV, "running_mean": (4,), "running_var": (4,)}),
    "conv_wgrad": Good({"dy": (2, 4, 4, 4), "x": _IMAGE}, {"kernel": 3}),
    "depthwise_separable": Good(
        {"x": _IMAGE, "depthwise": (4, 1, 3, 3), "pointwise": (5, 4, 1, 1)}
    ),
    "quantized_conv_bias_act": Good(
        {"x": (_IMAGE, torch.int8), "weight": ((4, 4, 3, 3), torch.int8), "scale": (), "bias": (4,)}
    ),
    "batch_norm_backward": Good({"weight": (4,), **_STATS}),
    "batch_norm_apply": Good({"weight": (4,), "bias": (4,), **_STATS}),
    "instance_norm_backward": Good({"mean": (2, 4, 1, 1), "inv_std": (2, 4, 1, 1)}),
    "group_norm": Good(attrs={"num_groups": 2}),
    "group_affine": Good(attrs={"num_groups": 2}),
    "layer_norm": Good({"x": _ROWS, "weight": (8,)}),
    "rms_norm": Good({"x": _ROWS, "weight": (8,)}),
    "layer_norm_backward": Good(
        {"dy": _ROWS, "x": _ROWS, "weight": (8,), "mean": (2, 3, 1), "inv_std": (2, 3, 1)}
    ),
    "rms_norm_backward": Good({"dy": _ROWS, "x": _ROWS, "weight": (8,), "inv_std": (2, 3, 1)}),
    "matmul": Good({"x": _ROWS, "y": (8, 5)}),
    "linear": Good({"x": _ROWS, "weight": (5, 8)}),
    "swiglu": Good({"x": _ROWS, "w_gate": (8, 5), "w_up": (8, 5)}),
    "geglu": Good({"x": _ROWS, "w_gate": (8, 5), "w_up": (8, 5)}),
    "mlp": Good({"x": _ROWS, "up": (6, 8), "up_bias": (6,), "down": (5, 6)}),
    "rope": Good({"x": _HEADS, "cos": (5, 4), "sin": (5, 4)}),
    "block_mask": Good({"blocks": ((2, 2), _BOOL)}, {"rows": 6, "keys": 5, "block": 3}),
    "dropout": Good({"x": _ROWS, "keep": (_ROWS, _BOOL)}, {"p": 0.5}),
    "normalize_images": Good({"x": ((2, 5, 6, 3), torch.uint8), "scale": (6, 3), "shift": (6, 3)}),
    "adamw": Good(
        {name: (1,) for name in ("lr", "bias_correction1", "bias_correction2")}
        | {name: (6,) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    ),
    "dequantize": Good({"x": (_IMAGE, torch.int8), "scale": (4,)}),
    "quantize": Good({"scale": (4,)}, {"dtype": torch.int8}),
    "to_float": Good({"x": (_IMAGE, torch.uint8)}),
    "logical_and": Good({"x": (_IMAGE, _BOOL), "y": (_IMAGE, _BOOL)}),
    "logical_or": Good({"x": (_IMAGE, _BOOL), "y": (_IMAGE, _BOOL)}),
    "logical_not": Good({"x": (_IMAGE, _BOOL)}),
    "where": Good({"condition": (_IMAGE, _BOOL)}),
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
    "nll_loss": Good({"x": (4, 5), "target": ((4,), _I64)}),
    "cross_entropy": Good({"x": (4, 5), "target": ((4,), _I64)}),
    "nll_loss_backward": Good({"dy": (), "target": ((4,), _I64)}, {"shape": (4, 5)}),
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
    "sdpa_backward": Good({**_ATTENTION, "do": _HEADS, "o": _HEADS, "lse": (1, 2, 5)}),
    "sdpa_fp8": Good(
        {name: (_HEADS, _FP8) for name in "qkv"}
        | {f"descale_{name}": () for name in "qkvs"}
        | {"scale_s": (), "scale_o": ()}
    ),
    "sdpa_paged": Good(
        {
            "q": (2, 2, 1, 8),
            "k_cache": (6, 2, 4, 8),
            "v_cache": (6, 2, 4, 8),
            "page_table": ((2, 3), _I32),
            "seq_len_kv": ((2,), _I32),
        }
    ),
    "sdpa_varlen": Good(_PACKED, _LONGEST),
    "sdpa_varlen_backward": Good(
        {**_PACKED, "do": (7, 2, 8), "o": (7, 2, 8), "lse": (7, 2)}, _LONGEST
    ),
    "ragged_offsets": Good(
        {"cu_seqlens_q": ((3,), _I32), "cu_seqlens_kv": ((3,), _I32)},
        {"widths_q": (8, 16), "widths_kv": (8,)},
    ),
    "activation": Good(attrs={"kind": "relu"}),
    "concat": Good({"x": [_IMAGE, _IMAGE]}),
    "aten": Good({"x": [_IMAGE]}, {"overload": "aten.cumsum.default", "args": (("tensor", 0), 1)}),
}
#: Operands by name, for the other methods.
_BY_NAME: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("x", "y", "dy"), _IMAGE),
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
        f"conv{kind}_bias_act": {"input": _IMAGE, "weight": _FILTERS, "bias": (4,)}
        for kind in ("", "_transpose")
    },
    **{
        f"conv{kind}_bn_act": {
            "input": _IMAGE,
            "weight": _FILTERS,
            "running_mean": (4,),
            "running_var": (4,),
        }
        for kind in ("", "_transpose")
    },
    "conv_bias_act_into": {"out": (2, 4, 4, 4), "input": _IMAGE, "weight": _FILTERS},
    "conv_transpose_bias_act_into": {"out": (2, 4, 8, 8), "input": _IMAGE, "weight": _FILTERS},
    "conv_bn_act_into": {
        "out": (2, 4, 4, 4),
        "input": _IMAGE,
        "weight": _FILTERS,
        "running_mean": (4,),
        "running_var": (4,),
    },
    "layer_norm": {"input": _ROWS, "weight": (8,)},
    "rms_norm": {"input": _ROWS, "weight": (8,)},
    "group_norm": {"input": _IMAGE, "weight": (4,), "bias": (4,)},
    "instance_norm": {"input": _IMAGE, "weight": (4,), "bias": (4,)},
    "linear": {"input": _ROWS, "weight": (5, 8), "bias": (5,)},
    "mlp": {"input": _ROWS, "up": (6, 8), "up_bias": (6,), "down": (5, 6)},
    "scaled_dot_product_attention": {"query": _HEADS, "key": _HEADS, "value": _HEADS},
    "scaled_dot_product_attention_into": {
        **dict.fromkeys(("out", "query", "key", "value"), _HEADS)
    },
    "varlen_attention": {
        **dict.fromkeys(("query", "key", "value"), (7, 2, 8)),
        "cu_seqlens_q": ((3,), _I32),
        "cu_seqlens_kv": ((3,), _I32),
    },
    "paged_attention": {
        "query": (2, 2, 1, 8),
        "k_cache": (6, 2, 4, 8),
        "v_cache": (6, 2, 4, 8),
        "page_table": ((2, 3), _I32),
        "seq_len_kv": ((2,), _I32),
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
        {"x": _IMAGE},
    ),
    "FusedConvTransposeBlock": (
        {"in_channels": 4, "out_channels": 4, "kernel_size": 3},
        {"x": _IMAGE},
    ),
    "FusedDepthwiseSeparable": (
        {"in_channels": 4, "out_channels": 4, "kernel_size": 3},
        {"x": _IMAGE},
    ),
    "FusedLayerNorm": ({"normalized_shape": 8}, {"x": _ROWS}),
    "FusedRMSNorm": ({"normalized_shape": 8}, {"x": _ROWS}),
    "FusedMLP": ({"in_features": 8, "hidden_features": 6}, {"x": _ROWS}),
    "FusedMultiheadAttention": ({"embed_dim": 8, "num_heads": 2}, {"x": _ROWS}),
    "FusedSDPA": ({}, {"q": _HEADS, "k": _HEADS, "v": _HEADS}),
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
    g.output("y", g.relu(g.input("x", _ROWS, F32)))
    return g


def _other_targets() -> Iterator[Target]:
    def target(
        name: str,
        function: Callable[[], Callable[..., Any]],
        good: Callable[[], dict[str, Any]],
        use: Callable[[Any], object] = _nothing,
    ) -> Target:
        return Target(name, lambda: (function(), good(), use))

    x = lambda: torch.rand(_ROWS)  # noqa: E731

    def declared(**options: Any) -> bool:
        g = cg.Graph(**options)
        return freeze(g, g.relu(g.input("x", _ROWS, F32)))

    def inputs() -> Target:
        def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
            g = cg.Graph("fuzzed")
            good = {"name": "x", "shape": _ROWS, "dtype": F32}
            return g.input, good, lambda value: freeze(g, g.identity(value))

        return Target("Graph.input", make)

    def outputs() -> Target:
        def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
            g = cg.Graph("fuzzed")
            value = g.relu(g.input("x", _ROWS, F32))
            return g.output, {"name": "y", "value": value}, lambda _: run(g.spec())

        return Target("Graph.output", make)

    def between(name: str) -> Target:
        def make() -> tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]:
            g = cg.Graph("fuzzed")
            value = g.input("x", _IMAGE, F32)

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
    yield target("on_miss", lambda: cg.on_miss, lambda: {"hook": print}, lambda off: off() is None)
    yield target("nn.replace", lambda: nn.replace, lambda: {"model": torch.nn.Linear(2, 2)})
    yield target("explain", lambda: cg.explain, lambda: {"graph": _graph(), "target": "none"})
    yield target(
        "fuse",
        lambda: cg.fuse,
        lambda: {"model": torch.nn.ReLU().eval(), "example_inputs": (x(),)},
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


MEMORY_BYTES = 6 << 30  # of address space: what is huge is to fail, and not to be had


def main(count: int, seed: int) -> None:
    """Make calls, and report them."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    rng, known = random.Random(seed), targets()
    outcomes = [
        attempt(known[at % len(known)], rng, lambda call: print(call[:300], flush=True))
        for at in range(count)
    ]
    print(
        json.dumps(
            {
                "targets": len(known),
                "ran": sum(each.ran for each in outcomes),
                "refused": sum(bool(each.refused) for each in outcomes),
                "wrong": [f"{each.call}: {each.wrong}" for each in outcomes if each.wrong],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
