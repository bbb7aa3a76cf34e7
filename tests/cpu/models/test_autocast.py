"""Models called under autocast: what torch casts for each op stands in their graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cudnngraph as cg
from cudnngraph.models import casts, trace
from tests import numerics
from tests.models import Of, image

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
X = (2, 5, 6)
PARTS: dict[str, Callable[[], nn.Module]] = {
    "l": lambda: nn.Linear(6, 6),
    "c": lambda: nn.Conv1d(5, 4, 3),
    "g": lambda: nn.GroupNorm(2, 4),
    "n": lambda: nn.LayerNorm(6),
    "lstm": lambda: nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(6, 4, batch_first=True),
    "mha": lambda: nn.MultiheadAttention(6, 3),
}
#: Functions of the parts m and x (2, 5, 6).
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "linear, norm": lambda m, x: m.n(m.l(x)),
    "conv, norm": lambda m, x: m.g(m.c(x)),
    "einsum": lambda m, x: torch.einsum("bij,kj->bik", m.l(x)[..., :4], m.l.weight[:, :4]),
    "einsum of three": lambda m, x: torch.einsum("bi,bij,bj->b", x[:, :, 0], x @ x.mT, x[:, :, 1]),
    "lstm": lambda m, x: m.lstm(x),
    "gru": lambda m, x: m.gru(x),
    "attention of what is cast": lambda m, x: F.scaled_dot_product_attention(*[m.l(x)] * 3),
    "attention of both": lambda m, x: F.scaled_dot_product_attention(m.l(x), x, x),
    "heads": lambda m, x: m.mha(m.l(x), x, x),
    "softmax": lambda m, x: m.l(x).softmax(-1) @ x[:, 0].t(),
    "covariance": lambda m, x: torch.cov(m.n(x)[0]),
    "mapped": lambda m, x: torch.vmap(lambda row: F.linear(row, m.l.weight).tanh() @ row.mT)(x),
    "apart": lambda m, x: _apart(m, x),
}


def _apart(m: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m.l(x)
    with torch.autocast("cpu", enabled=False):
        return m.l(y.to(m.l.weight.dtype))


def parts() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: make() for name, make in PARTS.items()}


def flat(results: Any) -> list[torch.Tensor]:
    made: list[torch.Tensor] = torch.utils._pytree.tree_leaves(results)
    return made


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
def test_results_are_torchs(name: str, within: bool) -> None:
    function = FUNCTIONS[name]

    def cast(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return function(m, x)

    model = Of(cast if within else function, **parts()).eval()
    exact = Of(function, **copy.deepcopy(parts())).to(F64).eval()
    with torch.autocast("cpu", BF16, enabled=not within):
        traced = trace.trace(copy.deepcopy(model), (image(*X),), {})
        assert traced is not None  # else torch.export takes seconds
        fused = cg.fuse(model, image(*X))
        for x in (image(*X), image(*X).flip(0) * 0.5):
            with torch.no_grad():
                own, ours = flat(model(x)), flat(fused(x))
                with torch.autocast("cpu", enabled=False):
                    right = flat(exact(x.double()))
            assert [each.dtype for each in ours] == [each.dtype for each in own]
            for y, theirs, z in zip(ours, own, right, strict=True):
                # What is computed in 16 bits on the way to float32 is no nearer.
                numerics.check(y.to(BF16), z, BF16, theirs.to(BF16), terms=6)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_operands_are_cast_as_each_device_casts_them(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """layer_norm is computed in float32 on a GPU, and as its input is on a CPU."""
    aten: Any = torch.ops.aten
    device = torch.device(kind)

    def shape(dtype: torch.dtype, *sizes: int) -> trace.MetaTensor:
        with torch._C._DisableTorchDispatch():
            return trace.MetaTensor(torch.empty(sizes, dtype=dtype, device="meta"), device)

    def dtypes(op: Any, *args: Any) -> list[torch.dtype]:
        class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, f: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
                assert f is aten._to_copy.default
                return shape(kwargs["dtype"], *args[0].shape)

        def in_float32(x: torch.Tensor) -> torch.Tensor:
            return shape(F32, *x.shape)

        with Recorded():
            made, _ = casts.applied(op, args, {}, in_float32)
        return [each.dtype for each in made if isinstance(each, torch.Tensor)]

    def switched(on: bool, dtype: torch.dtype) -> None:  # torch.autocast asks for the GPU
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)

    request.addfinalizer(partial(switched, False, torch.get_autocast_dtype(kind)))
    switched(True, BF16)

    x, low = shape(F32, 4, 6), shape(BF16, 4, 6)
    assert dtypes(aten.linear.default, x, shape(F32, 6, 6)) == [BF16, BF16]
    assert dtypes(aten.linear.default, low, shape(F32, 6, 6)) == [BF16, BF16]
    assert dtypes(aten.linear.default, shape(F64, 4, 6), shape(F64, 6, 6)) == [F64, F64]
    assert dtypes(aten.scaled_dot_product_attention.default, low, low, x) == [BF16] * 3
    assert dtypes(aten.layer_norm.default, low, [6]) == [F32 if kind == "cuda" else BF16]
    assert dtypes(aten.flatten.using_ints, low, 0, 1) == [BF16]


def test_a_trace_leaves_nothing_in_the_cache_of_autocast() -> None:
    model = Of(lambda m, x: m.l(x), **parts()).eval()
    x = image(*X)
    with torch.autocast("cpu", BF16):
        before = model(x)
        fused = cg.fuse(model, x)
        assert torch.is_autocast_cache_enabled()
        assert torch.equal(model(x), before) and fused(x).dtype == BF16
