"""Whether norms go into weights is settled before plans are built, by one run of the graph."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.models import alternatives, check, folding, form
from cudnngraph.models.check import Ahead, Wanted
from cudnngraph.models.convert import convert
from cudnngraph.models.export import export
from cudnngraph.models.form import Form
from cudnngraph.runtime import compile as compiling
from cudnngraph.runtime.compile import resolve_policy
from cudnngraph.runtime.executable import Executable
from plans_cache.store import PlanStore
from tests import numerics
from tests.models import NETS, Drifting, drifting

Tensor = torch.Tensor
CPU = torch.device("cpu")
CALLS = itertools.count(1)  # a global, which no model holds


class Counted:
    """What is compiled, and how often the graph and the model are run for the decision."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, builds: bool) -> None:
        self.compiled: list[Any] = []
        self.foreseen = self.wanted = 0
        compile, foresee, init = alternatives.compile, folding._foreseen, Wanted.__init__

        def compiled(spec: Any, *args: Any, **options: Any) -> Any:
            self.compiled.append(spec)
            return compile(spec, *args, **options)

        def foreseen(*args: Any) -> Any:
            assert not self.compiled, "plans are built when it is settled"
            self.foreseen += 1
            return foresee(*args)

        def wanted(made: Wanted, *args: Any, **options: Any) -> None:
            self.wanted += 1
            init(made, *args, **options)

        monkeypatch.setattr(alternatives, "compile", compiled)
        monkeypatch.setattr(folding, "builds", lambda *args, **options: builds)
        monkeypatch.setattr(folding, "_foreseen", foreseen)
        monkeypatch.setattr(Wanted, "__init__", wanted)


def test_norms_that_put_results_off_are_left_apart_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = drifting(24)
    results = []
    for builds, compiled in ((True, 1), (False, 2)):
        with monkeypatch.context() as patch:
            seen = Counted(patch, builds=builds)
            with caplog.at_level("INFO", logger="cudnngraph"):
                fused = cg.fuse(model, (x,))
            assert (len(seen.compiled), seen.wanted) == (compiled, 1)
            assert seen.foreseen == (1 if builds else 0)
        assert "norms are not folded into weights, since then Drifting: result 0" in caplog.text
        caplog.clear()
        assert fused.report is not None and fused.report.folded == 0 and fused.report.errors
        results.append(fused(x))
        fused(x[:1])
        assert len(fused) == 2 and all(not form.folds for form in fused._forms.values())
    assert torch.equal(*results), "the same model, whenever that is settled"


def test_norms_that_do_no_harm_are_folded_and_the_model_is_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = drifting(2)
    seen = Counted(monkeypatch, builds=True)
    fused = cg.fuse(model, (x,))
    assert fused.report is not None and fused.report.folded == 2 and fused.report.errors
    assert (len(seen.compiled), seen.foreseen, seen.wanted) == (1, 1, 1)


@pytest.mark.parametrize("case", ["none folded", "kept", "unchecked"])
def test_nothing_is_run_ahead_where_nothing_is_to_be_settled(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = drifting(2)
    if case == "none folded":
        model = nn.Conv2d(8, 8, 1).half().eval()
    seen = Counted(monkeypatch, builds=case != "kept")
    fused = cg.fuse(model, (x,), check=case != "unchecked")
    assert seen.foreseen == 0 and seen.wanted == (case != "unchecked")
    assert fused.report is not None and len(seen.compiled) == 1


def test_a_model_that_is_another_in_a_second_call_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(Drifting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(next(CALLS))

    seen = Counted(monkeypatch, builds=True)
    torch.manual_seed(0)
    with pytest.raises(cg.CannotImport, match="another in a second call"):
        cg.fuse(Counting(2).half().eval(), (torch.rand(2, 8, 6, 6).half(),))
    assert not seen.compiled


def no_memory(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


def test_without_memory_for_a_decision_it_is_made_by_the_check_of_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = drifting(24)
    seen = Counted(monkeypatch, builds=True)
    in_wide, tried = check.in_wide, []

    def short(*args: Any, **options: Any) -> Any:
        tried.append(options["whole"])
        return no_memory() if options["whole"] else in_wide(*args, **options)

    monkeypatch.setattr(check, "in_wide", short)
    fused = cg.fuse(model, (x,))
    assert tried == [True, False] and seen.foreseen == 0 and len(seen.compiled) == 2
    assert fused.report is not None and fused.report.folded == 0
    assert fused.report.errors[0][1] is not None, "it is compared with float64 in the end"


def test_a_graph_that_cannot_be_run_ahead_is_decided_by_the_check_of_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = drifting(24)
    seen = Counted(monkeypatch, builds=True)
    monkeypatch.setattr(folding, "_foreseen", no_memory)
    fused = cg.fuse(model, (x,))
    assert len(seen.compiled) == 2 and seen.wanted == 1
    assert fused.report is not None and fused.report.folded == 0


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_a_graph_is_run_ahead_as_near_to_float64_as_the_check_asks(name: str, on_gpu: bool) -> None:
    """As it is imported for a GPU too, with images that lie in wider tensors."""
    model, x = NETS[name]()
    model, x = model.half().eval(), x.half() if x.is_floating_point() else x
    made = export(model, (x,))
    imported = convert(
        made.module,
        made.constants,
        made.placeholders,
        channels_last=True,
        on_gpu=on_gpu,
        kernels=True,
    )
    assert imported.spec is not None
    policy = resolve_policy(None, {}, imported.spec)
    results = folding._foreseen(imported, imported.spec, [x], CPU, policy)
    floor = check.comparison.coarsest([imported.spec], tf32=False)
    Wanted(model, ((x,), {})).compare(results, floor=floor)


# -- the model beside the builds -------------------------------------------------------------------


def test_the_model_runs_in_the_modes_of_its_caller() -> None:
    modes: list[bool] = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            ahead = Ahead(
                nn.Identity(), lambda **how: modes.append(torch.is_inference_mode_enabled())
            )  # type: ignore[arg-type,return-value]
        with torch.inference_mode(not mode):
            ahead.early()
    assert modes == [True, False]


class OnGpu:
    """A parameter on a GPU that is not there."""

    is_cuda, device = True, torch.device("cuda", 0)

    def numel(self) -> int:
        return 1000

    def is_floating_point(self) -> bool:
        return True


@pytest.mark.parametrize(("free", "room"), [(31_999, False), (32_000, True)])
def test_the_model_runs_beside_the_builds_if_that_leaves_them_memory(
    free: int, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = nn.Identity()
    model.parameters = lambda: iter([OnGpu()])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 1 << 30))
    runs: list[Any] = []
    ahead = Ahead(model, lambda **how: runs.append(how) or object())  # type: ignore[arg-type,return-value]
    assert ahead.has_room is room
    ahead.early()
    assert runs == [{"whole": True}]
    ahead.now()
    ahead.now(late=True)
    assert len(runs) == 1


class Noted:
    """In which order plans are begun, the model is run, and plans are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, room: bool) -> None:
        self.order: list[str] = []
        noted, early = self.order, Ahead.early

        class Begun:
            def cancel(self) -> None:
                noted.append("cancel")

        def begin(*args: Any, **options: Any) -> Begun:
            noted.append("begin")
            return Begun()

        def compile(spec: Any, device: Any, *, begun: Any, **options: Any) -> Any:
            noted.append("compile")
            assert begun is None or isinstance(begun, Begun)
            return compiling.compile(spec, device, **options)

        def ran(self: Ahead) -> Wanted | None:
            noted.append("model")
            return early(self)

        monkeypatch.setattr(alternatives, "begin", begin)
        monkeypatch.setattr(alternatives, "compile", compile)
        monkeypatch.setattr(folding, "builds", lambda *args, **options: True)
        monkeypatch.setattr(Ahead, "early", ran)
        monkeypatch.setattr(Ahead, "has_room", room)


def test_the_model_runs_when_workers_have_begun_and_before_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = Noted(monkeypatch, room=True).order
    x = torch.randn(2, 4)
    cg.fuse(nn.Linear(4, 4).eval(), (x,))
    assert order == ["begin", "model", "compile", "cancel"]
    order.clear()
    monkeypatch.setattr(Wanted, "__init__", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cg.fuse(nn.Linear(4, 4).eval(), (x,))
    assert order == ["begin", "model", "cancel"], "what a model raises ends the builds"


@pytest.mark.parametrize(
    ("depth", "room", "order"),
    [
        (2, True, ["begin", "model", "model", "compile", "cancel"]),
        (24, True, ["begin", "model", "cancel", "compile"]),
        (2, False, ["model", "compile"]),
        (24, False, ["model", "compile"]),
    ],
)
def test_folded_norms_are_settled_while_their_plans_are_built_if_there_is_memory(
    depth: int, room: bool, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = drifting(depth)
    noted = Noted(monkeypatch, room=room)
    fused = cg.fuse(model, (x,))
    assert noted.order == order
    assert fused.report is not None and fused.report.folded == (depth if depth == 2 else 0)


# -- plans that are kept ---------------------------------------------------------------------------


class Kept:
    """A store that has the graphs with so many norms apart: all 24, or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *norms: int, empty: bool = False) -> None:
        self.order = Noted(monkeypatch, room=True).order
        self.asked: list[int] = []

        def is_kept(spec: Any, device: Any, *, policy: Any) -> bool:
            apart = sum(node.op == "scale" for node in spec.nodes)
            self.asked.append(apart)
            return apart in norms

        monkeypatch.setattr(form, "is_kept", is_kept)
        monkeypatch.setattr(PlanStore, "is_empty", lambda store: empty)
        monkeypatch.setattr(Executable, "tier", "disk, serialized" if norms else "built")


def test_norms_that_were_left_apart_are_so_in_the_next_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = drifting(24)
    kept = Kept(monkeypatch, 24)
    with caplog.at_level("INFO", logger="cudnngraph"):
        fused = cg.fuse(model, (x,))
    assert kept.asked == [0, 24] and kept.order == ["compile"], "nothing is begun or run ahead"
    assert "norms are not folded into weights, as plans that are kept say" in caplog.text
    assert fused.report is not None and fused.report.folded == 0 and fused.report.errors
    assert not next(iter(fused._forms.values())).folds


@pytest.mark.parametrize(
    ("norms", "empty", "asked"),
    [((0,), False, [0]), ((0, 24), False, [0]), ((), False, [0, 24]), ((), True, [])],
)
def test_norms_are_folded_unless_only_plans_without_them_are_kept(
    norms: tuple[int, ...], empty: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = drifting(24)
    kept = Kept(monkeypatch, *norms, empty=empty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "builds", lambda *args, **options: False)
        patch.setattr(Wanted, "check", lambda *args, **options: ((0.0, None),))
        fused = cg.fuse(model, (x,))
    assert kept.asked == asked and kept.order[0] == "begin"
    assert fused.report is not None and fused.report.folded == 24


class Runs:
    """What is run for the check of a model whose plans are from ``tier``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tier: str, error: float = 0.0) -> None:
        self.wide: list[torch.dtype] = []
        in_wide, run = check.in_wide, Form.run

        def counted(model: Any, args: Any, kwargs: Any, own: Any, *rest: Any, **how: Any) -> Any:
            self.wide.append(torch.float64)
            return in_wide(model, args, kwargs, own, *rest, **how)

        def off(form: Form, *args: Any, **options: Any) -> Any:
            results: Any = run(form, *args, **options)
            return results * (1.0 + error)

        monkeypatch.setattr(check, "in_wide", counted)
        monkeypatch.setattr(Form, "run", off)
        monkeypatch.setattr(Executable, "tier", tier)


@pytest.mark.parametrize("tier", ["disk, serialized", "memory, replayed"])
def test_plans_that_are_kept_are_compared_with_the_model_itself(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = drifting(2)
    ran = Runs(monkeypatch, tier)
    fused = cg.fuse(model, (x,))
    assert not ran.wide and fused.report is not None and fused.report.kept
    ((error, own),) = fused.report.errors
    assert own is None and error <= numerics.bound(torch.float16)
    assert "the model's own" not in str(fused.report)


def test_plans_that_are_kept_are_held_to_float64_if_they_are_not_near_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = drifting(2)
    ran = Runs(monkeypatch, "disk, serialized", error=1e-2)
    with pytest.raises(cg.WrongResult, match="the model itself is off by"):
        cg.fuse(model, (x,))
    assert len(ran.wide) == 1


@pytest.mark.parametrize("tier", ["built", "seed, replayed", "reference"])
def test_plans_that_are_new_are_held_to_float64(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = drifting(2)
    ran = Runs(monkeypatch, tier)
    fused = cg.fuse(model, (x,))
    assert len(ran.wide) == 1 and fused.report is not None and not fused.report.kept
    assert fused.report.errors[0][1] is not None
