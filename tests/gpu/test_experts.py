"""Mixtures of experts on a GPU: captured, whatever the choice of experts, and right."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.experts import Experts, both


def drawn(model: Experts, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens (1, tokens, 64) whose experts no rounding decides: else results are far off, ours or
    the model's own."""
    x = torch.randn(4 * tokens + 40, 64, device="cuda", dtype=dtype)
    scores = (x.double() @ model.router.weight.double().t()).sort(-1, descending=True).values
    last, next_one = scores[:, model.top - 1], scores[:, model.top]
    clear = last - next_one > 0.05 * scores.abs().amax(-1)
    found = x[clear][None, :tokens]
    assert found.shape[1] == tokens
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("inner", [64, 36], ids=["aligned", "not aligned"])
def test_one_captured_graph_runs_every_choice(
    inner: int, tokens: int, dtype: torch.dtype, record_property: pytest.RecordProperty
) -> None:
    """A capture fails if the host waits for the GPU. Torch's own product takes 36 in no dtype."""
    model = Experts(64, inner, 7, 2, "eager").cuda().to(dtype).eval()
    torch.manual_seed(0)
    choices = [drawn(model, tokens, dtype) for _ in range(4)]
    choices.append(choices[0][:, :1].repeat(1, tokens, 1))  # all rows to two experts
    fused = cg.fuse(model, choices[0], capture=True)
    assert fused.report is not None and fused.report.captured
    record_property("summary", str(fused.report))
    for x in choices:
        own, exact = both(model, x)
        numerics.check(fused(x), exact, dtype, own, terms=64)
    assert len(fused) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_groups(dtype: torch.dtype) -> None:
    g = cg.Graph("groups")
    x, y = g.input("x", (300, 40), dtype), g.input("y", (5, 40, 24), dtype, stride=(960, 1, 40))
    g.output("z", g.grouped_matmul(x, y, g.input("ends", (5,), torch.int32)))
    train = cg.differentiate(g.spec(), wrt=("x", "y"))
    torch.manual_seed(0)
    given = {
        "x": torch.randn(300, 40, device="cuda", dtype=dtype),
        "y": torch.randn(5, 24, 40, device="cuda", dtype=dtype).transpose(1, 2),
        "ends": torch.tensor([0, 17, 17, 190, 300], dtype=torch.int32, device="cuda"),
    }
    dz = torch.randn(300, 24, device="cuda", dtype=dtype)
    (incoming,) = train.incoming.values()
    given[incoming] = dz
    exe = compile_spec(train.backward, "cuda", allow_tf32=False)
    made = exe(**{name: given[name] for name in train.backward.inputs})
    found = dict(zip(train.backward.outputs, made, strict=True))
    wide = {name: each.double() for name, each in given.items() if each.is_floating_point()}
    starts = [0, 0, 17, 17, 190]
    for group, (start, end) in enumerate(zip(starts, given["ends"].tolist(), strict=True)):
        rows = slice(start, end)
        dx = wide[incoming][rows] @ wide["y"][group].t()
        dy = wide["x"][rows].t() @ wide[incoming][rows]
        numerics.check(found[train.outgoing["x"]][rows], dx, dtype, terms=24)
        numerics.check(found[train.outgoing["y"]][group], dy, dtype, terms=300)
