"""Small products of one tensor are one product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.errors import CannotImport
from cudnngraph.executor import reference
from cudnngraph.models.convert import Imported, convert
from cudnngraph.models.export import export

F16 = torch.float16


class Attention(nn.Module):
    """Self attention, with a projection of a time for each of two blocks."""

    def __init__(self, bias: bool, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.first, self.second = nn.Linear(16, width), nn.Linear(16, width)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t = F.silu(t)
        x = x + self.first(t)[:, None]
        q, k, v = (
            each(x).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return o + self.second(t).unsqueeze(1)


class Gated(nn.Module):
    """Products with an activation behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def imported(model: nn.Module, *given: torch.Tensor, on_gpu: bool = True) -> Imported:
    made = export(model, given)
    return convert(made.module, made.constants, made.placeholders, on_gpu=on_gpu, kernels=True)


def products(model: nn.Module, *given: torch.Tensor, on_gpu: bool = True) -> int:
    spec = imported(model, *given, on_gpu=on_gpu).spec
    assert spec is not None
    return sum(node.op == "matmul" for node in spec.nodes)


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_values_and_times_are_projected_together(bias: bool) -> None:
    torch.manual_seed(0)
    model = Attention(bias).eval().to(F16)
    x, t = torch.randn(2, 8, 32).to(F16), torch.randn(2, 16).to(F16)
    assert products(model, x, t, on_gpu=False) == 5
    made = imported(model, x, t)
    assert products(model, x, t) == 2
    assert made.spec is not None
    user = dict(zip(made.inputs, (x, t), strict=True))
    given = [user[name] if name in user else made.constants[name] for name in made.spec.inputs]
    (y,) = reference.run(made.spec, given, torch.float64)
    wanted = model.double()(x.double(), t.double())
    assert float((y.double() - wanted).norm() / wanted.norm()) < 1e-9


def test_what_has_work_behind_it_is_large_or_odd_stays_alone() -> None:
    x = torch.randn(2, 8, 32).to(F16)
    assert products(Gated().eval().to(F16), x) == 2
    t = torch.randn(2, 16)
    assert products(Attention(True).eval(), x.float(), t) == 5, "float32"
    assert products(Attention(True, 20).eval().to(F16), x[..., :20], t.to(F16)) == 5, "odd"
    wide = Attention(True, 4096).eval().to(F16)
    assert products(wide, torch.randn(1, 8, 4096).to(F16), t[:1].to(F16)) == 4, "large weights"


class Chosen(nn.Module):
    """Products of as many rows as a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[x.sum(1) > 0]
        return self.first(rows).view(-1, 8) + self.second(rows).view(-1, 8)


def test_rows_whose_number_follows_from_data_are_refused_in_words() -> None:
    made = export(Chosen().half(), (torch.randn(4, 32).half(),))
    with pytest.raises(CannotImport, match="depends on the numbers in a tensor"):
        convert(made.module, made.constants, made.placeholders, on_gpu=True)
