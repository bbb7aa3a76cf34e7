"""Products of groups of rows as a GPU runs them, beside the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.executor import grouped, reference, torch_steps
from cudnngraph.ir.spec import GraphSpec
from tests import numerics

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = st.sampled_from((1, 2, 7, 8, 13, 24, 40))


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """How many rows there are, and where groups of them end: some are empty, rows may be left."""
    rows = draw(st.one_of(st.integers(1, 40), st.integers(256, 700)))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=1, max_size=9)))
    if draw(st.booleans()):
        ends[-1] = rows
    return rows, tuple(ends)


def operands(
    rows: int, ends: tuple[int, ...], k: int, n: int, dtype: torch.dtype, turned: bool
) -> dict[str, torch.Tensor]:
    """Small whole numbers: float32 holds their sums, also where most of a sum cancels."""
    gen = torch.Generator().manual_seed(rows * 100 + k * 10 + n)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=gen).to(dtype)

    matrices = whole(len(ends), n, k).transpose(1, 2) if turned else whole(len(ends), k, n)
    made = {"x": whole(rows, k), "y": matrices, "dy": whole(rows, n)}
    return {**made, "ends": torch.tensor(ends, dtype=torch.int32)}


def declared(op: str, made: dict[str, torch.Tensor]) -> GraphSpec:
    g = cg.Graph(op)
    ports = ("x", "y", "ends") if op == "grouped_matmul" else ("x", "dy", "ends")
    g.output("z", getattr(g, op)(*(g.input(name, like=made[name]) for name in ports)))
    return g.spec()


@pytest.mark.parametrize("gradient", [False, True], ids=["product", "gradient"])
@pytest.mark.parametrize("way", [0, 1], ids=["torchs kernel", "other products"])
@given(groups(), SIZES, SIZES, st.sampled_from(DTYPES), st.booleans())
def test_every_way_gives_what_the_reference_gives(
    way: int,
    gradient: bool,
    cut: tuple[int, tuple[int, ...]],
    k: int,
    n: int,
    dtype: torch.dtype,
    turned: bool,
) -> None:
    """torch's kernel is on a CPU a product for each group, with the same checks of its operands."""
    rows, ends = cut
    made = operands(rows, ends, k, n, dtype, turned)
    spec = declared("grouped_matmul_wgrad" if gradient else "grouped_matmul", made)
    inputs = [made[name] for name in spec.inputs]
    (exact,) = reference.run(spec, inputs, torch.float64)
    out = torch.full(exact.shape, torch.nan, dtype=dtype)
    grouped.WAYS[gradient][way](*inputs, out)
    numerics.check(out, exact, dtype, terms=rows if gradient else k)
    if not gradient:
        assert not out[ends[-1] :].any()


def test_no_numbers_are_read_by_the_host() -> None:
    """What a call does is the same for all groups, so that a CUDA graph of it may be replayed."""

    def ops(ends: tuple[int, ...], gradient: bool, way: int) -> list[str]:
        made = operands(40, ends, 8, 16, torch.float32, False)
        other = made["dy"] if gradient else made["y"]
        out = torch.empty(3, 8, 16) if gradient else torch.empty(40, 16)
        with _Noted() as noted:
            grouped.WAYS[gradient][way](made["x"], other, made["ends"], out)
        return noted.ops

    for gradient in (False, True):
        for way in (0, 1):
            found = ops((5, 20, 40), gradient, way)
            assert found == ops((0, 0, 3), gradient, way)
            assert "aten._local_scalar_dense.default" not in found


class _Noted(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ends", [(-3, 2, 9), (4, 9, 300)])
@pytest.mark.parametrize("way", [0, 1])
def test_ends_outside_of_the_rows_read_no_other_memory(way: int, ends: tuple[int, ...]) -> None:
    made = operands(7, ends, 8, 16, torch.float32, False)
    inside = made["ends"].clamp(0, 7)
    out, wanted = torch.empty(7, 16), torch.empty(7, 16)
    grouped.WAYS[False][way](made["x"], made["y"], made["ends"], out)
    grouped.WAYS[False][way](made["x"], made["y"], inside, wanted)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("k", [8, 12])
@pytest.mark.parametrize("n", [16, 20])
def test_the_kernel_gets_what_it_is_aligned_for(
    monkeypatch: pytest.MonkeyPatch, k: int, n: int
) -> None:
    """Its operands begin at, and step by, 16 bytes; rows are not copied if they do already."""
    seen: list[torch.Tensor] = []
    plain = torch._grouped_mm

    def noted(x: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.extend((x, y))
        return plain(x, y, **kwargs)

    monkeypatch.setattr(torch, "_grouped_mm", noted)
    made = operands(9, (4, 9), k, n, torch.bfloat16, True)
    wide = torch.zeros(9, 64, dtype=torch.bfloat16)
    wide[:, 1 : k + 1] = made["x"]
    for x in (made["x"], wide[:, 1 : k + 1], wide[:, :k], made["x"].t().contiguous().t()):
        seen.clear()
        grouped.by_kernel(x, made["y"], made["ends"], torch.empty(9, n, dtype=torch.bfloat16))
        for each in seen:
            assert each.data_ptr() % 16 == 0
            assert all(step % 8 == 0 for step in each.stride() if step != 1)
        assert seen[0].stride(1) == 1
    seen.clear()
    grouped.by_kernel(wide[:, :k], made["y"], made["ends"], torch.empty(9, n).bfloat16())
    assert (seen[0].data_ptr() == wide.data_ptr()) == (k % 8 == 0)
    assert (seen[1].data_ptr() == made["y"].data_ptr()) == (k % 8 == 0 and n % 8 == 0)


@pytest.mark.parametrize(
    ("dtype", "capability", "kernel"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 0), True),
        (torch.bfloat16, (8, 0), False),
        (torch.float16, (9, 0), False),
        (torch.float32, (9, 0), False),
    ],
)
def test_torchs_kernel_is_taken_where_it_is_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], kernel: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    called: list[str] = []
    ways = ("kernel", "products")
    rules = tuple(lambda *made, name=name: called.append(name) for name in ways)
    monkeypatch.setattr(grouped, "WAYS", (rules, rules))
    made = operands(9, (4, 9), 8, 16, dtype, False)
    spec = declared("grouped_matmul", made)
    run = grouped.run_grouped(spec, spec.nodes[0], torch.device("cuda", 0))
    assert run is not None
    run([made[name] for name in spec.inputs], [torch.empty(9, 16, dtype=dtype)])
    assert called == [ways[not kernel]]


@pytest.mark.parametrize("sizes", [(0, 8, 16), (9, 0, 16), (9, 8, 0)], ids=str)
def test_a_product_of_nothing_is_zeros(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    rows, k, n = sizes
    made = operands(rows, (0, rows), k, n, torch.bfloat16, False)
    spec = declared("grouped_matmul", made)
    run = grouped.run_grouped(spec, spec.nodes[0], torch.device("cuda", 0))
    assert run is not None
    out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16)
    run([made[name] for name in spec.inputs], [out])
    assert not out.any()


def test_on_a_cpu_the_reference_runs() -> None:
    made = operands(9, (4, 9), 8, 16, torch.float32, False)
    spec = declared("grouped_matmul", made)
    assert torch_steps._single(spec, torch.device("cpu")) is None
