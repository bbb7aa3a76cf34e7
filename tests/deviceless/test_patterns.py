"""The graphs that `cudnngraph check` sweeps, shown to the real library: each is lowered, or refused
with a reason, and every engine that the library lists for it is a candidate."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import pytest

import cudnngraph as cg
from cudnngraph.backend import candidates, deviceless, env
from cudnngraph.sweep import run

TARGET = "nvidia-h200"
PARTS = 8


@lru_cache
def tasks(full: bool) -> list[run.Task]:
    return list(run.tasks(full=full))


def taken(task: run.Task, *, propose: bool) -> int | None:
    """Return the number of candidates; None for a graph that is refused, for a reason."""
    if task.why_none:
        return None
    try:
        lowered = deviceless.lower_for(task.spec, TARGET)
        if not propose:
            return 0
        listed = candidates.propose(lowered, env.frontend(), more=True, every=True)
    except cg.NotSupported as refused:
        assert refused.reasons and all(refused.reasons), task.graph
        return None
    assert len({each.choice for each in listed}) == len(listed), task.graph
    return len(listed)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("driver")
def test_every_quick_graph_has_candidates_or_is_refused_with_a_reason(part: int) -> None:
    counts: Counter[str] = Counter()
    for task in tasks(full=False)[part::PARTS]:
        found = taken(task, propose=True)
        counts["refused" if found is None else "offered"] += 1
    assert counts["offered"] > counts["refused"], counts


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("driver")
def test_graphs_of_the_full_spread_are_lowered_or_refused_with_a_reason(part: int) -> None:
    some = tasks(full=True)[part::PARTS]
    lowered = [taken(task, propose=False) is not None for task in some]
    assert len(some) > 1500 and sum(lowered) > len(some) / 2


@pytest.mark.parametrize("family", ["conv 3x3", "conv_wgrad", "matmul", "layer_norm", "sdpa"])
@pytest.mark.usefixtures("driver")
def test_each_family_that_cudnn_has_is_offered_plans(family: str) -> None:
    # Up to the first: the test of every quick graph asks all of them.
    assert any(taken(task, propose=True) for task in run.tasks(full=False, only=family))


@pytest.mark.usefixtures("driver")
def test_engines_that_the_ranking_leaves_out_follow_it() -> None:
    (task, *_) = run.tasks(full=False, only="conv 3x3, x, float32, contiguous")
    frontend = env.frontend()
    ranked = candidates.propose(deviceless.lower_for(task.spec, TARGET), frontend, more=True)
    every = candidates.propose(
        deviceless.lower_for(task.spec, TARGET), frontend, more=True, every=True
    )
    assert every[: len(ranked)] == ranked
    others = every[len(ranked) :]
    assert others and all(each.choice.knobs == () for each in others)
    engines = [each.choice.engine for each in others]
    assert engines == sorted(set(engines)), "each once"
    assert not set(engines) & {each.choice.engine for each in ranked}
    assert [each.index for each in others] == sorted({each.index for each in others})


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.usefixtures("driver")
def test_engines_that_are_less_exact_are_barred_behind_the_ranking_too(tf32: bool) -> None:
    """They would be found wrong in float32 otherwise, for what the policy rules out anyway."""
    (task, *_) = run.tasks(full=False, only="conv 3x3, x, float32, contiguous")
    frontend = env.frontend()
    ranked = candidates.propose(deviceless.lower_for(task.spec, TARGET), frontend, more=True)
    lowered = deviceless.lower_for(task.spec, TARGET)
    others = candidates.propose(lowered, frontend, more=True, every=True)[len(ranked) :]
    candidates.restrict(lowered, task.spec, cg.Policy(allow_tf32=tf32), frontend)
    lowered.graph.deselect_workspace_greater_than(-1)  # so that nothing is built
    said = []
    errors = (frontend.cudnnGraphNotSupportedError, RuntimeError)
    for each in others:
        with pytest.raises(errors) as refused:
            lowered.graph.build_plan_at_index(each.index)
        said.append("Deselecting" in str(refused.value))
    assert any(said) != tf32
