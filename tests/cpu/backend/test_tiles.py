"""The model of what tiles take: which steps it knows, what it predicts, and what it is made of."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import candidates, env, tiles
from cudnngraph.backend.candidates import Candidate, Outcome, fastest_tile_first
from cudnngraph.backend.plan import Choice
from cudnngraph.backend.tiles import Model, Tile, Work, model_for, terms, work_of
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import worker
from cudnngraph.select.heuristic import Builds, choose
from tests.fakes import FakePlan

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TIMES = Path(__file__).parents[3] / "docs/results/h200-tiles.json"
PLAIN_TIMES = TIMES.with_name("h200-plain-tiles.json")
V919, H200, SMS = 91900, 90, 132


def product(*behind: str, dtype: Any = F16, matrices: int = 1, first: str = "") -> cg.GraphSpec:
    """A product of 4 x 50 rows by 64 x 96, and what is behind and in front of it."""
    g = cg.Graph("product")
    x: Any = g.input("x", (4, 50, 64), dtype)
    w = g.input("w", (64, 96) if matrices == 1 else (matrices, 64, 96), dtype)
    y: Any = g.matmul(getattr(g, first)(x) if first else x, w)
    for number, op in enumerate(behind):
        if op in ("row", "whole"):
            shape = (96,) if op == "row" else (4, 50, 96)
            y = g.add(y, g.input(f"r{number}", shape, dtype))
        else:
            y = getattr(g, op)(y)
    g.output("y", y)
    return legalize(g.spec(), cg.Policy())


def convolved(kernel: int = 3, stride: int = 1, groups: int = 1, dtype: Any = F16) -> cg.GraphSpec:
    g = cg.Graph("convolved")
    x = g.input("x", (2, 32, 8, 8), dtype, layout="channels_last")
    w = g.input("w", (48, 32 // groups, kernel, kernel), dtype, layout="channels_last")
    y = g.conv(x, w, padding=kernel // 2, stride=stride, groups=groups)
    g.output("y", g.silu(g.bias(y, g.input("b", (48,), dtype))))
    return legalize(g.spec(), cg.Policy())


def test_a_product_s_rows_are_those_of_all_its_matrices() -> None:
    work = work_of(product("row", "gelu", "whole"))
    moved = 2 * (200 * 64 + 64 * 96 + 96 + 2 * 200 * 96)
    assert work == Work(200, 96, 64, 1, 1, 0, 1, moved / 1e6)


def test_a_convolution_is_a_product_of_its_pixels() -> None:
    work = work_of(convolved(stride=2))
    moved = 2 * (2 * 32 * 64 + 48 * 32 * 9 + 48 + 2 * 48 * 16)
    assert work == Work(32, 48, 32, 9, 0, 1, 0, moved / 1e6)
    pointwise = work_of(convolved(kernel=1))
    assert pointwise is not None and (pointwise.rows, pointwise.window) == (128, 1)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: product("row", dtype=F32), "float32 has other engines"),
        (lambda: product(matrices=4), "a matrix for each of the first dim"),
        (lambda: product(first="relu"), "computed in front of it"),
        (lambda: convolved(groups=2), "groups"),
        (lambda: attention(), "no product"),
    ],
)
def test_what_was_not_measured_is_not_predicted(made: Callable[[], Any], why: str) -> None:
    assert work_of(made()) is None, why


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (5, 0), (0, 0)])
def test_a_product_of_nothing_is_ranked(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = cg.Graph("nothing")
    g.output("y", g.matmul(g.input("x", (rows, 64), F16), g.input("w", (64, columns), F16)))
    work = work_of(g.spec())
    assert work is not None and (work.rows, work.columns) == (rows, columns)
    monkeypatch.setattr(env, "cudnn_version", lambda: V919)
    before = ranked(choice(23), choice(2), choice(10))
    after = fastest_tile_first(before, g.spec(), H200, SMS)
    assert sorted(each.index for each in after) == [0, 1, 2]


def attention() -> cg.GraphSpec:
    g = cg.Graph("attention")
    q = g.input("q", (2, 4, 64, 64), F16)
    g.output("o", g.sdpa(q, q, q))
    return g.spec()


def test_two_products_are_no_work() -> None:
    g = cg.Graph("two")
    x, a, b = (g.input(name, (64, 64), F16) for name in "xab")
    g.output("y", g.add(g.matmul(x, a), g.matmul(x, b)))
    assert work_of(g.spec()) is None


def test_terms_grow_by_waves_of_whole_clusters() -> None:
    work = Work(1000, 200, 100, 9, 1, 2, 3, 0.5)
    # 8 x 2 tiles of 128 x 128, 8 x 4 in clusters of four columns; 9 windows of two steps each.
    assert terms(work, (128, 128, 64), (1, 1), 4) == [1, 72, 72, 4, 4, 8, 12, 0.5, 72, 4]
    assert terms(work, (128, 128, 64), (1, 4), 4) == [1, 144, 144, 8, 8, 16, 24, 0.5, 144, 8]
    few = terms(work, (128, 128, 64), (1, 1), 132)
    assert few == [1, 18, 18, 1, 1, 2, 3, 0.5, 18, 1]


FEW = Choice(49, (("NOT_SET", 3), ("STAGES", 5), ("TILE_SIZE", 7)))


def choice(number: int, engine: int = 4) -> Choice:
    return Choice(engine, (("KERNEL_CFG", number),))


def tile(us: float, error: float = 0.05) -> Tile:
    return Tile((128, 128, 64), (1, 1), (us, *(0.0,) * 9), error)


def model(**changed: Any) -> Model:
    known = {choice(1): tile(10.0), choice(2): tile(8.0), choice(3): tile(5.0, error=0.2)}
    known[choice(4)] = tile(9.7)
    given: dict[str, Any] = {"cudnn": V919, "capability": H200, "tiles": known}
    given |= {"largest_error": 0.1, "gain": 0.95}
    given |= {"weight_gradients": 65, "few": 16, "of_few": FEW}
    return Model(**{**given, **changed})


WORK = Work(1000, 200, 100, 1, 0, 0, 0, 0.5)


def best(known: Model, ranked: list[Choice]) -> tuple[int, float] | None:
    return known.best(ranked, [known.us(WORK, each, SMS) for each in ranked])


def test_the_fastest_known_tile_is_taken() -> None:
    ranked = [choice(1), Choice(0, ()), choice(4), choice(2), choice(3)]
    assert best(model(), ranked) == (3, 0.8)  # 3 is faster, and too uncertain
    assert best(model(largest_error=1.0), ranked) == (4, 0.5)


@pytest.mark.parametrize(
    "ranked",
    [
        [choice(1), choice(4)],  # faster by less than it must be
        [choice(2), choice(1)],
        [Choice(0, ()), choice(2)],  # nothing is known of the first
        [choice(2, engine=7), choice(2)],
        [choice(1)],
        [],
    ],
)
def test_cudnn_s_first_is_kept(ranked: list[Choice]) -> None:
    assert best(model(), ranked) is None


def test_a_model_is_of_one_version_and_capability() -> None:
    assert model_for(91900, 90) is model_for(91902, 90) is not None
    assert model_for(92400, 90) is None and model_for(91900, 100) is None


def ranked(*choices: Choice) -> list[Candidate]:
    return [Candidate(number, each, f"eng{each.engine}") for number, each in enumerate(choices)]


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "cudnn_version", lambda: V919)
    monkeypatch.setattr(tiles, "_model", model)


def test_the_plan_of_the_fastest_tile_moves_to_the_front(modelled: None) -> None:
    before = ranked(choice(1), choice(4), choice(2), Choice(0, ()))
    after = fastest_tile_first(before, product("row"), H200, SMS)
    assert [each.index for each in after] == [2, 0, 1, 3]
    assert after[0].why == candidates.PREDICTED.format(0.8) and not any(e.why for e in after[1:])
    assert worker.to_candidate(worker.from_candidate(after[0])) == after[0]
    assert [each.slower for each in after] == [1.0, 1.25, 1.212, 0.0]


def test_a_ranking_stays_where_nothing_is_known(
    modelled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ranked(choice(1), choice(2))
    assert fastest_tile_first(before, product("row", dtype=F32), H200, SMS) == before
    assert fastest_tile_first(before, product("row"), 80, SMS) == before
    monkeypatch.setattr(env, "cudnn_version", lambda: 92400)
    assert fastest_tile_first(before, product("row"), H200, SMS) == before


def gradient(
    kernel: int = 3,
    dtype: torch.dtype = F16,
    channels: tuple[int, int] = (16, 32),
    layout: str = "channels_last",
    **attrs: Any,
) -> cg.GraphSpec:
    g = cg.Graph("gradient")
    side = 8 // attrs.get("stride", 1)
    dy = g.input("dy", (2, channels[0], side, side), dtype, layout=layout)
    x = g.input("x", (2, channels[1], 8, 8), dtype, layout=layout)
    g.output("dw", g.conv_wgrad(dy, x, kernel=kernel, padding=kernel // 2, **attrs))
    return g.spec()


OLD, NEW = Choice(39, (("STAGES", 0),)), Choice(65, (("TILE_SIZE", 1),))
OTHER = Choice(65, (("TILE_SIZE", 5),))


def test_gradients_of_weights_take_the_newest_engine_first(modelled: None) -> None:
    before = ranked(OLD, NEW, OTHER)
    after = fastest_tile_first(before, gradient(), H200, SMS)
    assert [each.index for each in after] == [1, 0, 2]
    assert [each.why for each in after] == [candidates.FASTER, "", ""]
    for known in (ranked(NEW, OLD), ranked(OLD)):
        assert fastest_tile_first(known, gradient(), H200, SMS) == known


@pytest.mark.parametrize(
    "other",
    [
        *({"kernel": 1}, {"dtype": F32}, {"stride": 2}, {"groups": 2}, {"layout": "contiguous"}),
        *({"channels": (18, 32)}, {"channels": (16, 36)}),
    ],
    ids=str,
)
def test_gradients_that_were_not_measured_stay(modelled: None, other: dict[str, Any]) -> None:
    before = ranked(OLD, NEW)
    assert fastest_tile_first(before, gradient(**other), H200, SMS) == before
    assert fastest_tile_first(before, gradient(), 100, SMS) == before


@pytest.mark.parametrize("how", [{"kernel": 7, "stride": 2}, {"channels": (24, 3)}, {}], ids=str)
def test_gradients_of_few_channels_take_the_plan_that_was_fastest(
    modelled: None, how: dict[str, Any]
) -> None:
    spec = gradient(**{"channels": (16, 4), **how})
    after = fastest_tile_first(ranked(OLD, NEW, FEW), spec, H200, SMS)
    assert [each.index for each in after] == [2, 0, 1]
    assert [each.why for each in after] == [candidates.FASTER, "", ""]
    for known in (ranked(NEW, FEW), ranked(OLD, NEW)):
        assert fastest_tile_first(known, spec, H200, SMS) == known


def test_engines_of_older_gpus_took_twice_as_long_for_gradients_of_weights() -> None:
    """What the rule follows from: the first plan of engine 65 beside what cuDNN has first."""
    shares = []
    for row in json.loads(PLAIN_TIMES.read_text())["rows"]:
        if row["case"]["op"] != "weight" or row["case"]["kind"] != "3x3":
            continue
        plans = [plan for *plan, _ in row["times"]]
        newest = [plan[0] for plan in plans].index(model().weight_gradients)
        if row["first"][0] != model().weight_gradients:
            times = [us for *_, us in row["times"]]
            shares.append(times[newest] / times[plans.index(row["first"])])
    assert len(shares) == 3 and max(shares) < 0.48


def test_an_explanation_says_what_was_predicted() -> None:
    spec = product("row")
    why = candidates.PREDICTED.format(0.8)
    taken = Outcome(Candidate(2, choice(2), "eng4", why=why), True, "", 0)

    def plan(_: cg.GraphSpec) -> Any:
        return FakePlan(choice(2)), (taken,)

    (step,) = choose(spec, cg.Policy(), Builds(plan)).steps
    assert why in [decision.reason for decision in step.decisions]


# -- the data --------------------------------------------------------------------------------------


def stored() -> Any:
    return json.loads((resources.files("cudnngraph.backend") / "tiles.json").read_text())


def test_the_stored_model_is_what_was_fitted_to_the_published_times() -> None:
    """The error of each tile, over the times on the results page, is the one that is stored."""
    times = json.loads(TIMES.read_text())
    found = tiles.model_of(stored())
    off: dict[Choice, list[float]] = defaultdict(list)
    for row in times["rows"]:
        work = Work(**row["work"])
        for engine, knobs, us in row["times"]:
            one = Choice(engine, tuple((name, value) for name, value in knobs))
            predicted = found.us(work, one, times["sms"])
            if predicted is not None:
                off[one].append(predicted / us - 1)
    assert off.keys() == found.tiles.keys() and len(off) > 30
    for one, errors in off.items():
        assert len(errors) >= 8
        error = math.sqrt(sum(each * each for each in errors) / len(errors))
        assert math.isclose(error, found.tiles[one].error, abs_tol=2e-3), one
    assert times["cudnn"] == found.cudnn and times["capability"] == found.capability


def test_stored_times_are_positive() -> None:
    for known in tiles.model_of(stored()).tiles.values():
        assert len(known.us) == 10 and all(us >= 0 for us in known.us) and sum(known.us[1:4]) > 0
