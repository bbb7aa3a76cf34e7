"""Thresholds that were measured: each says where it comes from, and which GPU follows which."""

from __future__ import annotations

import re
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.device import rules
from cudnngraph.device.import_rules import BY_HAND
from cudnngraph.device.rules import DeviceRules, changed, planning_for
from cudnngraph.select.rules import why_split

RESULTS = Path(__file__).parents[3] / "docs" / "results"


@pytest.mark.parametrize("each", fields(DeviceRules), ids=lambda each: each.name)
def test_a_threshold_says_its_unit_what_it_decides_and_where_it_was_measured(each: Any) -> None:
    told = each.metadata
    assert told["unit"] and told["decides"] and told["alternative"]
    page = told["page"]
    assert page == BY_HAND or (RESULTS / page).is_file()


def test_a_threshold_is_read_somewhere() -> None:
    package = Path(cg.__file__).parent
    code = (
        "".join(path.read_text() for path in package.rglob("*.py") if path.name != "rules.py")
        + (package / "select" / "rules.py").read_text()
    )
    unread = [each.name for each in fields(DeviceRules) if not re.search(rf"\.{each.name}\b", code)]
    assert unread == []


def test_every_set_names_its_gpu() -> None:
    assert rules.TABLE.keys() == rules.MEASURED_ON.keys()
    assert rules.DEFAULT_CAPABILITY in rules.TABLE


def test_a_gpu_without_a_set_of_its_own_follows_that_of_the_h200(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = replace(rules.TABLE[90], pointwise_max_row=512)
    monkeypatch.setitem(rules.TABLE, 100, own)
    with planning_for(80):
        assert rules.rules() is rules.TABLE[90]
    with planning_for(100):
        assert rules.rules() is own
        with planning_for(90):
            assert rules.rules() is rules.TABLE[90]
        assert rules.rules() is own
    assert rules.rules() is rules.TABLE[90]


def test_the_current_gpu_is_asked_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(rules.TABLE[90], pointwise_max_row=512)
    monkeypatch.setitem(rules.TABLE, 100, own)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(rules, "_properties", lambda index: (100, 148))
    assert rules.rules() is own and rules.sm_count() == 148
    with planning_for(90):
        assert rules.rules() is rules.TABLE[90] and rules.sm_count() == rules.SM_COUNT


def adamw_like(elements: int) -> Any:
    """Three ops on scalars, then one on a tensor."""
    g = cg.Graph("g")
    x, s = g.input("x", (elements,), torch.float32), g.input("s", (1,), torch.float32)
    g.output("y", x * g.exp(g.neg(g.abs(s))))
    return g.spec()


def test_another_threshold_changes_the_choice_for_a_while_in_every_thread() -> None:
    small, large = adamw_like(1 << 10), adamw_like(1 << 25)
    assert why_split(small) is None
    assert why_split(large) == "3 ops on numbers would run for each of 33554432 elements"
    found: list[str | None] = []
    with changed(scalar_elements_apart=1 << 10):
        thread = threading.Thread(target=lambda: found.append(why_split(small)))
        thread.start()
        thread.join()
    assert found == ["3 ops on numbers would run for each of 1024 elements"]
    assert why_split(small) is None


def test_the_described_gpu_is_the_one_that_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnngraph.explain import offline

    seen: list[DeviceRules] = []
    own = replace(rules.TABLE[90], pointwise_max_row=512)
    monkeypatch.setitem(rules.TABLE, 100, own)

    class Stop(Exception):
        pass

    def heuristic(*given: Any) -> Any:
        seen.append(rules.rules())
        raise Stop

    monkeypatch.setattr(offline.heuristic, "heuristic", heuristic)
    monkeypatch.setattr(offline, "target_capability", lambda target: 100)
    monkeypatch.setattr(offline.env, "cudnn_version", lambda: 91900)
    with pytest.raises(Stop):
        cg.explain(adamw_like(8))
    assert seen == [own]


def test_what_is_asked_is_noted_in_this_thread_alone() -> None:
    with rules.noting() as asked:
        assert rules.rules().pads_three_channels
        with rules.following((("pads_three_channels", False),)):
            assert not rules.rules().pads_three_channels
        thread = threading.Thread(target=lambda: rules.rules().packed_by_flash)
        thread.start()
        thread.join()
    assert asked == {"pads_three_channels"}
    assert rules.rules() is rules.TABLE[90]
