"""The documents say what the code does: tables, examples, messages, links, commands."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import cli, settings
from cudnngraph.errors import CudnnGraphError
from cudnngraph.models import dynamo
from cudnngraph.models.bound import MAX_SHAPES
from cudnngraph.policy import SEARCH_FIELDS
from tests import python
from tests.scripts import loaded
from tests.workers import cache_example

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
OURS = [path for path in DOCUMENTS if "results" not in path.parts]
PAGES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join([README, *PAGES])


def section(title: str) -> str:
    """The page of that title, or the README's section."""
    for page in PAGES:
        if page.startswith(f"# {title}\n"):
            return page
    _, _, rest = README.partition(f"\n## {title}\n")
    assert rest, f"there is no page or section '{title}'"
    return rest.split("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def pattern(block: str) -> re.Pattern[str]:
    """A block of output as a pattern: "…" stands for anything within a line."""
    return re.compile(".*".join(map(re.escape, block.split("…"))))


def rows(text: str) -> list[list[str]]:
    """The cells of the first Markdown table in ``text``, without its head."""
    (first, *_) = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    lines = first.splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return loaded(ROOT / "docs" / "generate.py")


# -- tables ----------------------------------------------------------------------------------------


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 220
    for path in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in README, f"{path.name} is not reached"


def test_the_page_has_the_table_of_environment_variables() -> None:
    begin, end = "<!-- begin: environment variables -->\n", "<!-- end: environment variables -->"
    assert TEXT.count(begin) == TEXT.count(end) == 1
    assert TEXT.split(begin)[1].split(end)[0] == settings.markdown_table()


def test_generated_tables_are_up_to_date(generate: ModuleType) -> None:
    def stale(path: str) -> bool:
        return (ROOT / path).read_text(encoding="utf-8") != generate.with_tables(path)

    # Names, not texts: pytest works minutes on the difference of two pages.
    paths = sorted({path for path, _ in generate.TABLES})
    assert not list(filter(stale, paths)), "run python docs/generate.py"


def test_a_model_without_every_measurement_has_a_row(tmp_path: Path, generate: ModuleType) -> None:
    times = {"eager": 9e3, "eager, CUDA graph": 3e3, "torch.compile": 2500.0, "fused": 2e3}
    alone = {"fused": 1e3}
    run = {
        "rows": [
            {"name": "all", "times_us": times, "errors": [[1e-4, 3e-4], [2e-4, 1e-4]]},
            {"name": "no float64", "times_us": alone, "errors": [[1e-3, None]], "steps": []},
            {"name": "unchecked", "times_us": alone, "errors": []},
            {"name": "nothing"},
        ],
        "device": "GPU",
        "torch": "2.11.0",
    }
    path = tmp_path / "models.json"
    path.write_text(json.dumps(run))
    assert rows(generate.whole_models(path)) == [
        ["all", "3.000", "2.500", "2.000", "1.25", "1.50", "2.0e-04", "1.0e-04"],
        ["no float64", "-", "-", "1.000", "-", "-", "1.0e-03 to torch", "-"],
        ["unchecked", "-", "-", "1.000", "-", "-", "-", "-"],
        ["nothing", *"-------"],
    ]


def test_what_is_said_of_training_steps_is_measured() -> None:
    said = re.findall(
        r"([\d.]+) times as long as torch's for a block\b.*?([\d.]+) times without",
        TEXT,
        re.DOTALL,
    )
    text = (ROOT / "docs" / "results" / "h200-host.md").read_text(encoding="utf-8")
    table = rows(text.split("\n## Training, forward and backward\n")[1])
    measured = {call: ratio.rstrip(" |") for call, _, ratio in table}
    assert said == [(measured["Conv-BN-ReLU"], measured["Conv-ReLU"])]


def test_every_extra_is_in_the_table_of_dependencies() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = text.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    named = re.findall(r"extra `(\w+)`", "\n".join(row[1] for row in rows(section("Installing"))))
    assert {*named, "dev"} == set(re.findall(r"^(\w+) = ", extras, flags=re.MULTILINE))


def test_the_functions_that_write_to_a_tensor_are_named() -> None:
    named = set(re.findall(r"`(\w+_into)`", section("Modules")))
    assert named == {name for name in cg.functional.__all__ if name.endswith("_into")}


def test_the_table_of_policy_fields_is_the_policys() -> None:
    _, _, table = section("Plan selection").partition("`cg.Policy`, or keywords of `compile`:\n")
    stated = {name.strip("`"): default.strip("`") for name, default, _ in rows(table)}
    fields = dataclasses.fields(cg.Policy)
    assert stated == {field.name: repr(field.default).replace("'", '"') for field in fields}


def test_the_table_of_errors_names_errors_of_the_package() -> None:
    named = [name for row in rows(section("Errors")) for name in re.findall(r"`(\w+)`", row[0])]
    assert len(named) >= 6
    for name in named:
        assert issubclass(getattr(cg, name), CudnnGraphError)


@pytest.mark.parametrize("module", [cg, cg.nn, cg.functional], ids=lambda module: module.__name__)
def test_every_public_name_is_on_a_page(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not re.search(rf"\b{name}\b", TEXT)] == []


def test_every_error_and_every_counter_is_explained() -> None:
    named = {name for row in rows(section("Errors")) for name in re.findall(r"`(\w+)`", row[0])}
    errors = {name for name in cg.__all__ if name.endswith("Error")}
    assert errors - {"CudnnGraphError"} <= named
    _, _, table = section("The plan cache").partition("gives a `CacheStats`:\n")
    counters = {name for row in rows(table) for name in re.findall(r"`(\w+)`", row[0])}
    assert counters == {field.name for field in dataclasses.fields(cg.CacheStats)}


def test_the_tables_of_whole_models_have_every_argument_and_option() -> None:
    takes, options = section("Whole models").split("\n## Under torch.compile\n")
    named = [name for row in rows(takes) for name in re.findall(r"`(\w+)`", row[0])]
    keywords = inspect.signature(cg.fuse).parameters
    assert named == [name for name in keywords if name != "options"]
    defaults = {re.findall(r"`(\w+)`", row[0])[0]: row[1].strip("`") for row in rows(takes)[1:]}
    assert defaults == {name: repr(keywords[name].default) for name in defaults}
    named = [re.findall(r"`(\w+)`", row[0])[0] for row in rows(options)]
    assert named == list(dynamo._OPTIONS)
    assert rows(options)[2][1] == f"`{MAX_SHAPES}`"


# -- examples and messages -------------------------------------------------------------------------


def test_the_ten_lines_are_the_example_and_print_what_the_readme_shows(tmp_path: Path) -> None:
    text = section("Ten lines")
    (code,) = blocks(text, "python")
    example = ROOT / "examples" / "ten_lines.py"
    assert code == example.read_text(encoding="utf-8")
    # Tensors go to a GPU where there is one, so the CPU is asked for.
    environ = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": ""}
    done = python.run(example, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    (shown,) = blocks(text, "text")
    assert pattern(shown).fullmatch(done.stdout), done.stdout


def test_the_wrong_graph_gives_the_message_that_the_readme_shows() -> None:
    text = section("Errors")
    (code,) = blocks(text, "python")
    (shown,) = blocks(text, "text")
    with pytest.raises(cg.GraphError) as caught:
        exec(compile(code, "README.md", "exec"), {})
    assert str(caught.value) + "\n" == shown


@pytest.mark.parametrize("title", ["Plan selection", "Graphs as functions"])
def test_the_lines_of_a_section_run_and_print_an_explanation(
    title: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (code,) = blocks(section(title), "python")
    exec(compile(code, "README.md", "exec"), {})
    assert "step 1: conv → bias → " in capsys.readouterr().out


def test_what_is_said_of_the_key_is_what_is_in_it() -> None:
    (said,) = re.findall(r"^`deterministic`,(.*?)and are not\.", TEXT, re.DOTALL | re.MULTILINE)
    inside, _, outside = ("`deterministic`" + said).partition("part\nof the key")
    assert set(re.findall(r"`(\w+)`", outside)) == SEARCH_FIELDS
    fields = {field.name for field in dataclasses.fields(cg.Policy)}
    assert set(re.findall(r"`(\w+)`", inside)) == fields - SEARCH_FIELDS


def test_every_value_of_tune_is_explained() -> None:
    named = [row[0].strip('`"') for row in rows(section("Plan selection"))]
    assert named == list(settings.TUNES)


def test_the_lines_on_the_plan_cache_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(section("The plan cache"), "python")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    names["remove"]()
    assert capsys.readouterr().out.startswith("{'")


def test_the_entry_that_the_commands_show_is_in_the_example_cache() -> None:
    named = re.findall(r"plan-dump (?:--full )?([0-9a-f]{8})\b|nearest entry is (\w{8})", TEXT)
    assert len(named) == 3
    id = cache_example.records(0.0)["tuned"].id
    assert {first or second for first, second in named} == {id[:8]}


def test_the_lines_on_modules_run_and_print_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = section("Modules")
    (code,) = blocks(text, "python")
    exec(compile(code, "README.md", "exec"), {})
    (shown,) = blocks(text, "text")
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("title", ["A whole model", "Modules that train"])
def test_the_readmes_other_lines_run_and_print_what_it_shows(
    title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = section(title)
    (code,) = blocks(text, "python")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "".join(blocks(text, "text"))


GUIDES = (
    *("Serving", "Language models", "8-bit data", "Several GPUs", "Profiling"),
    *("Troubleshooting", "Training", "Whole models", "Ops"),
)


@pytest.mark.parametrize("title", GUIDES)
def test_the_lines_of_a_guide_run_and_print_what_it_shows(
    title: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = section(title)
    for code in blocks(text, "python"):
        exec(compile(code, f"{title}.md", "exec"), {})
    shown = "".join(blocks(text, "text"))
    assert not shown or pattern(shown).fullmatch(capsys.readouterr().out)


def test_the_messages_that_are_explained_are_in_the_code() -> None:
    files = [*ROOT.glob("cudnngraph/**/*.py"), *ROOT.glob("plans_cache/**/*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a message over several lines
    _, _, text = section("Troubleshooting").partition("\n## Errors\n")
    errors, _, warnings = text.partition("\n## Warnings in the log\n")
    said = [row[0].strip("`") for part in (errors, warnings) for row in rows(part)]
    assert len(said) > 10
    assert not [message for message in said if message not in code]


def test_the_table_of_modules_names_modules() -> None:
    named = [row[0].strip("`") for row in rows(section("Modules"))]
    public = {name: getattr(cg.nn, name) for name in cg.nn.__all__}
    kinds = {name: kind for name, kind in public.items() if isinstance(kind, type)}
    modules = {name for name, kind in kinds.items() if issubclass(kind, torch.nn.Module)}
    assert set(named) == modules and len(named) == len(modules)


# -- links and commands ----------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that a Markdown file's headings make."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = document if not target else document.parent / target
        assert path.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(path), f"{link}: no such heading"


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    code = [re.findall(r"`[^`\n]+`|^    .+$", path.read_text(), re.MULTILINE) for path in OURS]
    text = "\n".join(span for spans in code for span in spans)
    named = set(re.findall(r"\bmake ([a-z]+)", text))
    assert {"demo", "test"} <= named <= targets
    variables = set(re.findall(r"\bmake [a-z]+ ([A-Z]+)=", text))
    assert variables <= set(re.findall(r"^([A-Z]+)\s*\?=", makefile, flags=re.MULTILINE))


def test_every_command_is_named_and_every_named_command_exists() -> None:
    actions = cli.build_parser()._subparsers
    assert actions is not None
    (choices,) = (
        action.choices
        for action in actions._group_actions
        if isinstance(action, argparse._SubParsersAction)
    )
    named = set(re.findall(r"(?:`|^    )cudnngraph ([a-z-]+)", TEXT, flags=re.MULTILINE))
    assert named == {choice for choice in choices if " " not in choice}
    assert all(f"cudnngraph {choice}" in TEXT for choice in choices)


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The long options of a command and its actions that ``--help`` shows."""
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*map(_options, action.choices.values()))
        elif action.help != argparse.SUPPRESS:
            found |= {each for each in action.option_strings if each.startswith("--")}
    return found - {"--help"}


def test_every_option_of_a_command_is_described() -> None:
    told = set(re.findall(r"(--[a-z][a-z0-9-]*)", section("Commands") + section("The plan cache")))
    assert sorted(_options(cli.build_parser()) - told) == []


def test_every_call_that_is_shown_is_one_that_the_commands_take() -> None:
    shown = re.findall(r"^    cudnngraph (.+)$", TEXT, flags=re.MULTILINE)
    assert len(shown) > 10
    for line in shown:
        words = shlex.split(line, comments=True)
        args = vars(cli.parse(words))
        if words[0] == "tune":  # what a script sees is no option of ours, and the other way round
            assert args["arguments"] == (["--steps", "10"] if "--steps" in words else []), line
            assert (args["jobs"] == 4) == ("--jobs" in words), line


def test_every_python_file_that_is_named_to_be_run_exists() -> None:
    for path in OURS:
        for name in re.findall(r"python ([\w/]+\.py)", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path.name} names {name}"
