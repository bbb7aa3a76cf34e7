"""Several ranks of torch.distributed on the CPU: one chooses, the others take its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnngraph.cache import distributed
from tests.workers import rank_worker

Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By rank what it found in each scenario: all are run by one set of processes."""
    size: int = request.param
    folder = tmp_path_factory.mktemp("ranks")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(rank_worker.work, (size, store.port, folder), nprocs=size)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(size)]


def of(results: Found, scenario: str) -> Found:
    return [found[scenario] for found in results]


def chooser(found: Found) -> int:
    """The rank whose plan was built; it must be one."""
    (number,) = [number for number, each in enumerate(found) if each["tier"] == "built"]
    return number


def test_one_rank_builds_and_all_run_its_plan(results: Found) -> None:
    found = of(results, "together")
    first = chooser([each["first"] for each in found])
    for number, each in enumerate(found):
        tier = "built" if number == first else "another rank, replayed"
        assert each["first"] == {"tier": tier, "of": first}
        assert each["built"] == (number == first)
        assert each["warnings"] == []


def test_the_choice_holds_for_as_long_as_the_processes(results: Found) -> None:
    """Also for the rank that made it, when its memory was cleared."""
    found = of(results, "together")
    first = chooser([each["first"] for each in found])
    for each in found:
        assert each["second"] == {"tier": "another rank, replayed", "of": first}


def test_the_record_is_kept_by_the_rank_that_made_it_alone(results: Found) -> None:
    """The others hold the choice in memory: with a directory that all share it is there once."""
    found = of(results, "together")
    first = chooser([each["first"] for each in found])
    assert [each["files"] for each in found] == [number == first for number in range(len(found))]


def test_an_untuned_choice_does_not_stand_in_for_a_tuned_one(results: Found) -> None:
    found = of(results, "tuned")
    first = chooser(found)
    assert [each["measured"] for each in found] == [n == first for n in range(len(found))]
    assert {each["of"] for each in found} == {first}


def test_where_the_choice_fails_every_rank_makes_its_own(results: Found) -> None:
    first, *others = of(results, "fails")
    assert first["error"] == "ZeroDivisionError: a mistake while choosing"
    for number, each in enumerate(others, 1):
        assert each == {"tier": "built", "of": number, "built": 1, "warnings": []}


def test_a_rank_that_never_asks_is_not_waited_for(results: Found) -> None:
    *asking, last = of(results, "absent")
    assert last["built"] == 0
    assert [each["built"] for each in asking].count(1) == 1
    assert len({each["of"] for each in asking}) == 1


def test_who_waited_in_vain_says_so_and_chooses_alone(results: Found) -> None:
    first, *others = of(results, "late")
    assert first == {"tier": "built", "of": 0, "warnings": []}
    for number, each in enumerate(others, 1):
        assert (each["tier"], each["of"]) == ("built", number)
        (warning,) = each["warnings"]
        assert warning.startswith("no plan came from the rank that chooses it, ")
        assert "/heuristic: " in warning


def test_a_record_of_the_first_rank_serves_all_where_nobody_may_build(results: Found) -> None:
    first, *others = of(results, "served")
    assert first == {"tier": "disk, serialized", "of": 0, "built": 0, "warnings": []}
    for each in others:
        assert each == {"tier": "another rank, replayed", "of": 0, "built": 0, "warnings": []}


def test_where_nobody_has_a_record_and_nobody_may_build_all_raise(results: Found) -> None:
    for each in of(results, "nobody"):
        assert each["error"].startswith("PlanNotCached: no plan for 'conv: f16[8, 48, 3, 3], ")


def test_a_rank_that_cannot_have_the_choice_says_so_and_makes_its_own(results: Found) -> None:
    first, *others = of(results, "stale")
    assert first["of"] == 0
    for number, each in enumerate(others, 1):
        assert (each["tier"], each["of"]) == ("built", number)
        (warning,) = each["warnings"]
        assert warning.startswith("this rank chooses plans of its own for ")
        assert warning.endswith(
            "engine 0 (TILE_SIZE=2) is not to be had: engine 0 has no such knobs"
        )


def test_what_is_no_record_is_left_alone(results: Found) -> None:
    first, *others = of(results, "forged")
    assert first["of"] == 0
    for number, each in enumerate(others, 1):
        assert (each["tier"], each["of"]) == ("built", number)
        (warning,) = each["warnings"]
        assert warning.startswith("this rank chooses plans of its own for ")


def test_one_rank_has_the_plan_checked_for_all(results: Found) -> None:
    found = of(results, "verified")
    first = chooser(found)
    assert [each["asked"] for each in found] == [number == first for number in range(len(found))]
    assert {each["by"] for each in found} == {f"the GPU of rank {first}"}
    assert {each["of"] for each in found} == {first}
    assert not any(each["warnings"] for each in found)


def test_a_process_alone_asks_nobody(tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    assert not distributed.is_distributed()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        assert not distributed.is_distributed()
    finally:
        torch.distributed.destroy_process_group()
