"""`cudnngraph plans diff` and `explain-miss`: differences told in words."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from cudnngraph.cli import compare, plans
from cudnngraph.ir.key import Difference
from tests.commands import Cli, rows
from tests.workers import cache_example

pytestmark = pytest.mark.usefixtures("no_gpu")


# -- diff ------------------------------------------------------------------------------------------


def test_diff_lists_what_differs_in_words(run: Cli, ids: dict[str, str]) -> None:
    code, out, _ = run("diff", ids["tuned"][:10], ids["padded"][:10])
    assert code == 0
    head, *lines = rows(out)
    assert head == ["component", ids["tuned"][:12], ids["padded"][:12]]
    f16, f32 = (f"{kind}[8, 64, {{0}}, {{0}}] channels_last" for kind in ("f16", "f32"))
    assert lines == [
        ["op 0 conv padding", "[[1, 1], [1, 1]]", "[[0, 0], [0, 0]]"],
        ["outputs %5", f16.format(56), f16.format(54)],
        ["intermediates %2", f32.format(56), f32.format(54)],
        ["intermediates %4", f32.format(56), f32.format(54)],
        ["step 1 plan", "engine 44 (IDX_MODE=0 TILE_SIZE=2)", "engine 44 (TILE_SIZE=1)"],
        ["step 1 time", "10.0 µs", "-"],
    ]


def test_diff_of_environments_names_the_gpu(run: Cli, ids: dict[str, str]) -> None:
    _, out, _ = run("diff", ids["tuned"], ids["a100"])
    assert ["env.gpu_name", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"] in rows(out)
    assert ["env.sm_count", "132", "108"] in rows(out)
    _, out, _ = run("diff", ids["tuned"], ids["old"])
    assert rows(out)[1] == ["env.cudnn_version", "91900", "91002"]


def test_diff_of_an_entry_with_itself_is_nothing(run: Cli, ids: dict[str, str]) -> None:
    short = ids["cut"][:12]
    assert run("diff", short, short) == (0, f"{short} and {short} do not differ\n", "")


def test_diff_with_an_id_that_is_not_there_is_one_line(run: Cli, ids: dict[str, str]) -> None:
    code, out, err = run("diff", ids["cut"], "0" * 20)
    assert (code, out, err) == (1, "", f"error: no entry's id begins with '{'0' * 20}'\n")


@pytest.mark.parametrize(
    ("difference", "wanted"),
    [
        (
            Difference("ops", '[["relu",["%0"],["%1"],{}]]', '[["elu",["%0"],["%1"],{}]]'),
            [("op 0", "relu(%0)", "elu(%0)")],
        ),
        (
            Difference(
                "ops",
                '[["elu",["%0"],["%1"],{"alpha":"0x1.8000000000000p+0"}]]',
                '[["elu",["%0"],["%1"],{"alpha":"0x1.0000000000000p+1"}],'
                '["relu",["%1"],["%2"],{}]]',
            ),
            [("op 0 elu alpha", "1.5", "2.0"), ("op 1", "-", "relu(%1)")],
        ),
        (
            Difference("ops", '[["add",["%0","%1"],["%2"],{}]]', '[["add",["%1","%0"],["%2"],{}]]'),
            [("op 0 add reads", '["%0", "%1"]', '["%1", "%0"]')],
        ),
        (Difference("policy.allow_tf32", "true", None), [("policy.allow_tf32", "true", "-")]),
        (
            Difference("alignment_bytes", '{"%0":16,"%1":16}', '{"%0":16,"%1":4}'),
            [("alignment_bytes %1", "16", "4")],
        ),
        (
            Difference("compute_dtype", '"torch.float32"', '"torch.float16"'),
            [("compute_dtype", "float32", "float16")],
        ),
        (Difference("ops", "[[", '[["relu"]]'), [("ops", "[[", '[["relu"]]')]),
        (Difference("x\x1b", '"\\u001b[2J"', "1"), [(r"x\x1b", r"\x1b[2J", "1")]),
    ],
)
def test_differences_are_told_in_words(difference: Difference, wanted: list[compare.Row]) -> None:
    assert compare.rows([difference]) == wanted


# -- explain-miss ----------------------------------------------------------------------------------


def test_a_graph_that_is_kept_is_a_hit_under_any_name(
    run: Cli, ids: dict[str, str], source: Path
) -> None:
    code, out, _ = run("explain-miss", f"{source}:same", "--no-tf32")
    assert code == 0
    assert re.match(r"graph 'under_another_name', key [0-9a-f]{16}: hit\n", out)
    for name in ("tuned", "a100", "old"):
        assert f"  {ids[name][:12]}: conv → bias → relu, " in out
    assert "there is no GPU here: environments were not compared" in out


def test_a_miss_shows_the_nearest_entry_and_what_differs(
    run: Cli, ids: dict[str, str], source: Path
) -> None:
    code, out, _ = run("explain-miss", f"{source}:other", "--no-tf32")
    assert code == 1
    assert ": miss\n" in out
    assert f"the nearest entry is {ids['tuned'][:12]} (conv → bias → relu, NVIDIA H200" in out
    assert "it differs in 3 components" in out
    assert ["op 0 conv padding", "[[2, 2], [2, 2]]", "[[1, 1], [1, 1]]"] in rows(out)


def test_a_policy_that_differs_is_a_miss_by_one_component(
    run: Cli, ids: dict[str, str], source: Path
) -> None:
    place = f"{source}:same"
    code, out, _ = run("explain-miss", place, "--no-tf32", "--deterministic")
    assert (code, "it differs in 1 component\n" in out) == (1, True)
    assert ["policy.deterministic", "true", "false"] in rows(out)
    code, out, _ = run("explain-miss", place, "--no-tf32", "--workspace-limit", "1024")
    assert (code, ["policy.workspace_limit", "1024", "null"] in rows(out)) == (1, True)


def test_on_a_gpu_the_environment_has_to_be_the_same(
    run: Cli, ids: dict[str, str], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cache_example.records(time.time())
    monkeypatch.setattr(plans, "here", lambda: made["a100"].env)
    code, out, _ = run("explain-miss", f"{source}:same", "--no-tf32")
    assert (code, ids["a100"][:12] in out, ids["tuned"][:12] in out) == (0, True, False)
    newer = {**dict(made["tuned"].env), "cudnn_version": "92000"}
    monkeypatch.setattr(plans, "here", lambda: tuple(newer.items()))
    code, out, _ = run("explain-miss", f"{source}:same", "--no-tf32")
    assert (code, rows(out)[-1]) == (1, ["env.cudnn_version", "92000", "91900"])


def test_every_graph_of_a_file_is_explained(run: Cli, ids: dict[str, str], source: Path) -> None:
    code, out, _ = run("explain-miss", source, "--no-tf32")
    assert (code, out.count(": hit\n"), out.count(": miss\n")) == (1, 1, 1)


def test_an_id_or_a_key_shows_the_nearest_other_entry(run: Cli, ids: dict[str, str]) -> None:
    code, out, _ = run("explain-miss", ids["tuned"][:8])
    assert code == 0
    assert out.startswith(f"{ids['tuned'][:12]} is in the cache: ")
    assert f"the nearest entry is {ids['old'][:12]}" in out
    assert "it differs in 1 component\n" in out
    key = cache_example.records(0.0 + 1e9)["cut"].key_digest
    assert run("explain-miss", key[:16])[1].startswith(f"{ids['cut'][:12]} is in the cache")


def test_a_key_that_is_not_there_asks_for_the_graph(run: Cli, ids: dict[str, str]) -> None:
    code, out, err = run("explain-miss", "0" * 16)
    assert (code, out) == (1, "")
    assert err.startswith("error: no entry's id or key begins with '0000") and "FILE.py" in err


def test_a_miss_in_an_empty_cache_says_so(run: Cli, source: Path) -> None:
    code, out, _ = run("explain-miss", f"{source}:same")
    assert (code, out.splitlines()[-1]) == (1, "there is no other entry")


@pytest.mark.parametrize("place", ["{}:nothing", "{}.missing"])
def test_a_file_without_that_graph_exits_with_2(place: str, run: Cli, source: Path) -> None:
    code, out, err = run("explain-miss", place.format(source))
    assert (code, out, err.startswith("error: ")) == (2, "", True)


def test_a_graphs_file_that_cannot_be_looked_at_is_one_line(run: Cli, ids: dict[str, str]) -> None:
    long = "x" * 5000
    said = f"error: {long} cannot be read: File name too long\n"
    assert run("explain-miss", long) == (2, "", said)
    assert run("explain-miss", f"{long}:g") == (2, "", said)
