"""Searches in which plans are wrong or do not run, and those with `fallback="error"`."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cudnngraph as cg
from tests.searches import (
    CONV,
    EPILOGUE,
    F16,
    POLICY,
    WHOLE,
    Offer,
    block,
    of,
    reasons,
    run,
    table,
    taken,
)

# -- what is wrong, or does not run ----------------------------------------------------------------


def test_a_wrong_plan_is_thrown_out_and_the_next_best_taken() -> None:
    offers = [Offer(10.0), Offer(5.0, wrong="writes over its inputs"), Offer(7.0)]
    bench = table({WHOLE: offers})
    selection = run(block(), bench)
    assert taken(selection) == [(WHOLE, 2)]
    lost = of(selection, 1)
    assert (lost.accepted, lost.reason, lost.time_us) == (False, "writes over its inputs", 5.0)
    assert bench.checked == [(WHOLE, 1), (WHOLE, 2)], "what is not taken needs no check"


def test_a_wrong_plan_of_a_way_that_is_left_is_still_told() -> None:
    bench = table(
        {
            WHOLE: [Offer(5.0, wrong="wrong: 'y' is off by 0.3, at most 0.002 is right")],
            CONV: [Offer(8.0)],
            EPILOGUE: [Offer(4.0)],
        }
    )
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    assert "wrong: 'y' is off by 0.3, at most 0.002 is right" in reasons(selection)


def test_what_cudnn_refused_is_told_where_a_cut_is_taken() -> None:
    selection = run(block(), table({CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]}))
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    refused = [d for d in selection.steps[0].decisions if d.subject == "'block' as one plan"]
    assert [(d.accepted, d.reason) for d in refused] == [(False, f"no engine for {WHOLE}")]


def test_where_every_plan_is_wrong_torch_runs_the_ops() -> None:
    wrong = [Offer(1.0, wrong="does not run: CUDNN_STATUS_EXECUTION_FAILED")] * 2
    bench = table(dict.fromkeys([WHOLE, CONV, EPILOGUE, "bias last", "relu last"], wrong))
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, None), ("bias last", None), ("relu last", None)]
    assert selection.built == (None, None, None)
    assert bench.replayed == []
    said = {d.subject for d in selection.steps[0].decisions if d.reason == wrong[0].wrong}
    assert said == {
        "engine 0 (TILE=0)",
        "engine 0 (TILE=0) for 'block'",
        "engine 1 (TILE=1) for 'block'",
        "engine 1 (TILE=1)",
        "engine 0 (TILE=0) for 'bias_relu'",
        "engine 1 (TILE=1) for 'bias_relu'",
    }


def test_a_plan_that_cannot_be_timed_loses_with_the_reason() -> None:
    selection = run(block(), table({WHOLE: [Offer("out of memory", 99), Offer(5.0)]}))
    assert taken(selection) == [(WHOLE, 1)]
    lost = of(selection, 0)
    assert (lost.reason, lost.time_us, lost.workspace_bytes) == ("out of memory", None, 99)


def test_an_op_for_which_nothing_can_be_timed_is_left_to_torch() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), F16).relu())
    selection = run(g.spec(), table({}, relu="out of memory"))
    assert taken(selection) == [("relu", None)]
    assert selection.steps[0].time_us is None


def test_a_mistake_of_ours_goes_through() -> None:
    bench = table({WHOLE: [Offer(5.0)]})

    def broken() -> None:
        raise ZeroDivisionError("a mistake of ours")

    bench.on_build = broken
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        run(block(), bench)


# -- fallback="error" ------------------------------------------------------------------------------


STRICT = replace(POLICY, fallback="error")


def test_fallback_error_takes_the_best_single_plan_and_looks_at_nothing_else() -> None:
    bench = table({WHOLE: [Offer(50.0), Offer(40.0)], CONV: [Offer(1.0)]}, conv=1.0)
    assert taken(run(block(), bench, STRICT)) == [(WHOLE, 1)]
    assert bench.asked == [WHOLE]


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ((), (f"no engine for {WHOLE}",)),
        ((Offer(1.0, refused="is too large"),), ("is too large",)),
        ((Offer(1.0, wrong="writes over its inputs"),) * 2, ("writes over its inputs",)),
        (
            (Offer("out of memory"), Offer(1.0, refused="does not launch")),
            ("out of memory", "does not launch"),
        ),
    ],
    ids=["refused", "not_built", "wrong", "not_run"],
)
def test_fallback_error_raises_with_the_reasons(
    offers: tuple[Offer, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(cg.NotSupported) as caught:
        run(block(), table({WHOLE: offers}), STRICT)
    assert caught.value.reasons == said
    assert "cuDNN has no plan for graph 'block'" in str(caught.value)


def test_fallback_error_never_gives_a_torch_step() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), F16).relu())
    with pytest.raises(cg.NotSupported, match="no engine for relu"):
        run(g.spec(), table({}, relu=1.0), STRICT)


def test_fallback_error_asks_for_what_a_rule_advises_against() -> None:
    """Slow is not refused: who wants one plan or none gets it."""
    selection = run(block(groups=8), table({WHOLE: [Offer(178.0)]}), STRICT)
    assert taken(selection) == [(WHOLE, 0)]
