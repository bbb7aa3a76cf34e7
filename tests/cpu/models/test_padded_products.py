"""Products by weights of an odd number of rows, which an import for a GPU pads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from cudnngraph.device.import_rules import ANY, NO
from cudnngraph.device.rules import following
from cudnngraph.models import bound as bindings
from cudnngraph.models import export
from cudnngraph.models.convert import Imported, convert
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.models import Of, image

CPU = torch.device("cpu")
BF16 = torch.bfloat16
Tensor = torch.Tensor


def imported(model: nn.Module, x: torch.Tensor, least: int = NO) -> Imported:
    made = export.export(model, (x,))
    with following((("padded_product_min", least),)):
        return convert(made.module, made.constants, made.placeholders, on_gpu=True)


def widths(found: Imported) -> list[int]:
    """The columns of what each product makes."""
    spec = found.spec
    assert spec is not None
    products = (node for node in spec.nodes if node.op == "matmul")
    return [spec.tensors[node.results[0]].shape[-1] for node in products]


MODELS: dict[str, tuple[nn.Module, list[int]]] = {
    "a vocabulary": (nn.Linear(16, 37, bias=False), [40]),
    "with a bias": (nn.Sequential(nn.Linear(16, 37), nn.GELU()), [40]),
    "two": (nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 8)), [24, 8]),
    "aligned": (nn.Linear(16, 24), [24]),
    "of odd columns": (nn.Linear(19, 37), [37]),
}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_padded_and_values_stay(name: str, rank: int) -> None:
    torch.manual_seed(0)
    model, wanted = MODELS[name]
    columns = next(each.in_features for each in model.modules() if isinstance(each, nn.Linear))
    x = image(*(2, 4, columns)[3 - rank :]).half()
    found = imported(model.half(), x)
    assert widths(found) == wanted and found.spec is not None
    with torch.no_grad():
        want = model.double()(x.double())
    (result,) = bindings.Bound(found, compile_spec(found.spec, "cpu"), CPU).run([x])
    assert result.shape == want.shape
    numerics.check(result, want, torch.float16, terms=64)


def test_small_products_float32_and_weights_that_change_stay() -> None:
    model, x = nn.Linear(16, 37), image(4, 16)
    assert widths(imported(model, x)) == [37]
    assert widths(imported(model.half(), x.half(), 4 * 16 * 37 + 1)) == [37]
    assert widths(imported(model.half(), x.half(), 4 * 16 * 37)) == [40]
    assert widths(imported(model.half(), x.half(), ANY)) == [37]
    own = Of(lambda m, x: torch.nn.functional.linear(x, x[:3]))
    assert widths(imported(own, x.half())) == [3]


# -- by weights that change ------------------------------------------------------------------------


def scores(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """What a vocabulary's scores and their gradients are."""
    dy = dy.reshape(-1, dy.shape[-1])
    return [x @ w.t(), dy @ w, dy.t() @ x]


def biased(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    return [torch.addmm(w[:, 0], x, w.t()), torch.addmm(dy[:1], x, w.t())]


def by_terms(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Of which only the terms are odd."""
    return [dy @ w, w.t() @ dy.t()]


def laid_otherwise(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Operands by which the odd dim is no row's."""
    return [dy.t().contiguous().t() @ w]


#: How many zeros are put behind something, and the sizes of the results of products.
CHANGING: dict[Callable[..., list[Tensor]], tuple[int, set[tuple[int, int]]]] = {
    scores: (2, {(8, 40), (8, 16), (40, 16)}),
    biased: (3, {(8, 40)}),
    by_terms: (2, {(8, 16), (16, 8)}),
    laid_otherwise: (0, {(8, 16)}),
}


@pytest.mark.parametrize("made", CHANGING, ids=lambda made: made.__name__)
def test_operands_that_change_get_zeros_behind_them(made: Callable[..., list[Tensor]]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(*shape).to(BF16) for shape in ((8, 16), (37, 16), (8, 37))]
    traced = make_fx(made)(*given)
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    with following((("padded_product_min", NO),)):
        found = convert(traced, {}, names, keep_strides=True, on_gpu=True, kernels=True)
    spec = found.spec
    assert spec is not None
    products = [spec.tensors[n.results[0]].shape for n in spec.nodes if n.op == "matmul"]
    zeros = sum(node.op == "concat" for node in spec.nodes)
    assert (zeros, {(*shape,) for shape in products}) == CHANGING[made]
    results = bindings.Bound(found, compile_spec(spec, "cpu"), CPU).run(given)
    for ours, want in zip(results, made(*(each.double() for each in given)), strict=True):
        numerics.check(ours, want, BF16, terms=64)


def test_what_changes_and_is_small_or_float32_or_of_open_sizes_stays() -> None:
    given = [torch.randn(*shape).to(BF16) for shape in ((8, 16), (37, 16), (8, 37))]
    for least, dtype, rows in (
        (8 * 16 * 37, BF16, 40),
        (8 * 16 * 37 + 1, BF16, 37),
        (ANY, BF16, 37),
        (NO, torch.float32, 37),
    ):
        traced = make_fx(scores)(*(each.to(dtype) for each in given))
        names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
        with following((("padded_product_min", least),)):
            found = convert(traced, {}, names, keep_strides=True, on_gpu=True, kernels=True)
        assert widths(found)[0] == rows
