"""Products by weights of an odd number of rows, which an import for a GPU pads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cudnngraph.device.rules import ANY, NO, following
from cudnngraph.models import bound as bindings
from cudnngraph.models import export
from cudnngraph.models.convert import Imported, convert
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.models import Of, image

CPU = torch.device("cpu")


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
