"""Hostile values: of the wrong type, huge, not finite, empty, endless, or of raising methods."""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import cudnngraph as cg

F16, F32, F64 = torch.float16, torch.float32, torch.float64


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
