"""Settings: what each variable means, what it refuses, and how far an override reaches."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.cli import doctor
from cudnngraph.errors import SettingsError
from cudnngraph.settings import Settings
from tests import python

LOGGERS = ("cudnngraph", "plans_cache")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours, nothing remembered, and the loggers as they were found."""
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(settings, "_from_environ", None)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    found = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, found, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_defaults_follow_the_xdg_cache_home() -> None:
    got = Settings.from_environ({"XDG_CACHE_HOME": "/var/x"})
    assert got == Settings(
        cache_dir=Path("/var/x/cudnngraph"),
        log=None,
        backend="auto",
        tune="heuristic",
        verify="isolated",
        kernels=True,
        seeds=True,
        check=False,
    )


@pytest.mark.parametrize("xdg", ["", "relative/path"])
def test_unset_or_relative_xdg_cache_home_means_the_home_directory(
    xdg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    got = Settings.from_environ({"XDG_CACHE_HOME": xdg})
    assert got.cache_dir == Path("/home/someone/.cache/cudnngraph")


def test_without_a_home_directory_the_cache_is_under_the_temporary_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    got = Settings.from_environ({}).cache_dir
    assert got.parent == tmp_path
    assert got.name.startswith("cudnngraph-")


def test_every_variable_is_read() -> None:
    environ = {
        "CUDNNGRAPH_CACHE_DIR": "/data/plans",
        "CUDNNGRAPH_LOG": " DEBUG ",
        "CUDNNGRAPH_BACKEND": "Reference",
        "CUDNNGRAPH_TUNE": "Autotune",
        "CUDNNGRAPH_VERIFY": "InProcess",
        "CUDNNGRAPH_KERNELS": "0",
        "CUDNNGRAPH_SEEDS": "0",
        "CUDNNGRAPH_CHECK": "1",
    }
    want = Settings(
        cache_dir=Path("/data/plans"),
        log="debug",
        backend="reference",
        tune="autotune",
        verify="inprocess",
        kernels=False,
        seeds=False,
        check=True,
    )
    assert Settings.from_environ(environ) == want


def test_a_tilde_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    got = Settings.from_environ({"CUDNNGRAPH_CACHE_DIR": "~/plans"})
    assert got.cache_dir == Path("/home/someone/plans")


@pytest.mark.parametrize("variable", settings.VARIABLES, ids=lambda v: v.name)
def test_an_empty_value_means_unset(variable: settings.Variable) -> None:
    assert Settings.from_environ({variable.name: "  "}) == Settings.from_environ({})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CUDNNGRAPH_LOG", "loud", "one of debug, info, warning, error, critical"),
        ("CUDNNGRAPH_LOG", "10", "one of debug, info"),
        ("CUDNNGRAPH_BACKEND", "cuda", "one of auto, reference"),
        ("CUDNNGRAPH_BACKEND", "1", "one of auto, reference"),
        ("CUDNNGRAPH_TUNE", "fast", "one of heuristic, autotune, cached"),
        ("CUDNNGRAPH_TUNE", "none", "one of heuristic, autotune, cached"),
        ("CUDNNGRAPH_VERIFY", "always", "one of isolated, inprocess, off"),
        ("CUDNNGRAPH_CHECK", "yes", "one of 0, 1"),
        ("CUDNNGRAPH_CHECK", "2", "one of 0, 1"),
        ("CUDNNGRAPH_CACHE_DIR", "plans", "an absolute path"),
        ("CUDNNGRAPH_CACHE_DIR", "./plans", "an absolute path"),
        ("CUDNNGRAPH_CACHE_DIR", "~nobody_of_this_name/x", "a path that can be expanded"),
    ],
)
def test_a_bad_value_names_variable_value_and_expected(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({name: value})
    assert str(caught.value).startswith(f"{name}='{value}': expected {expected}")


def test_the_environment_is_read_once_and_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNNGRAPH_BACKEND", "reference")
    first = settings.current()
    monkeypatch.setenv("CUDNNGRAPH_BACKEND", "nonsense")
    assert settings.current() is first
    assert first.backend == "reference"


def test_a_bad_environment_raises_on_every_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNNGRAPH_BACKEND", "nonsense")
    for _ in range(2):
        with pytest.raises(SettingsError, match="CUDNNGRAPH_BACKEND='nonsense'"):
            settings.current()


def test_overrides_nest_and_end_with_their_block(tmp_path: Path) -> None:
    before = settings.current()
    with settings.override(backend="reference") as outer:
        assert settings.current() is outer
        with settings.override(cache_dir=tmp_path) as inner:
            assert (inner.backend, inner.cache_dir) == ("reference", tmp_path)
        assert settings.current() is outer
    assert settings.current() is before
    assert before.backend == "auto"


def test_an_override_ends_when_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), settings.override(backend="reference"):
        _ = 1 // 0
    assert settings.current().backend == "auto"


def test_an_override_stays_in_its_thread() -> None:
    seen: list[str] = []
    with settings.override(backend="reference"):
        thread = threading.Thread(target=lambda: seen.append(settings.current().backend))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_none_puts_a_field_back_to_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNNGRAPH_BACKEND", "reference")
    with settings.override(backend=None) as inner:
        assert inner.backend == "auto"


def test_an_override_is_checked_like_the_environment() -> None:
    with pytest.raises(SettingsError, match=r"backend='tpu': expected one of auto"):
        settings.override(backend="tpu").__enter__()
    with pytest.raises(SettingsError, match=r"no setting 'bakend': expected one of cache_dir, log"):
        settings.override(bakend="auto").__enter__()


@pytest.mark.parametrize("name", LOGGERS)
def test_the_log_variable_sets_the_level_and_prints_to_standard_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in LOGGERS:  # as in a program that configured nothing
        monkeypatch.setattr(logging.getLogger(each), "propagate", False)
    monkeypatch.setenv("CUDNNGRAPH_LOG", "info")
    settings.current()
    logging.getLogger(f"{name}.test").info("cache_hit")
    logging.getLogger(f"{name}.test").debug("not this")
    assert capsys.readouterr().err == f"INFO {name}.test: cache_hit\n"


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("debug", "DEBUG plans_cache: cache_miss 0000000000000000 absent: no entry 0000"),
        ("info", ""),
        ("", ""),
    ],
)
def test_the_store_logs_its_lookups_when_the_variable_asks_for_it(
    level: str, said: str, tmp_path: Path
) -> None:
    code = "from cudnngraph.cache import lookup; lookup.store().get('0' * 16)"
    directory = {"CUDNNGRAPH_CACHE_DIR": str(tmp_path / "cache"), "CUDNNGRAPH_LOG": level}
    done = python.run("-c", code, env={**os.environ, **directory}, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", bool(said))
    assert done.stderr.startswith(said)


@pytest.mark.parametrize("name", LOGGERS)
def test_without_the_log_variable_logging_is_left_alone(name: str) -> None:
    logger = logging.getLogger(name)
    logger.setLevel(logging.ERROR)
    handlers = list(logger.handlers)
    settings.current()
    assert logger.level == logging.ERROR
    assert logger.handlers == handlers


@pytest.mark.parametrize("name", LOGGERS)
def test_a_log_override_is_undone(name: str) -> None:
    logger = logging.getLogger(name)
    before = logger.level
    with settings.override(log="critical"):
        assert logger.level == logging.CRITICAL
    assert logger.level == before


def test_table_and_dataclass_agree() -> None:
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert [variable.field for variable in settings.VARIABLES] == fields
    assert all(v.name == f"CUDNNGRAPH_{v.field.upper()}" for v in settings.VARIABLES)


def test_markdown_has_a_row_for_each_variable_and_no_broken_cell() -> None:
    head, rule, *rows = settings.markdown_table().splitlines()
    assert rule == "|---|---|---|---|"
    assert head.count("|") == 5
    assert [row.split("`")[1] for row in rows] == [v.name for v in settings.VARIABLES]
    assert all(row.count("|") == 5 for row in rows)


def test_the_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.current().backend = "reference"  # type: ignore[misc]


@pytest.mark.parametrize("tune", ["heuristic", "autotune", "cached"])
def test_a_policy_that_does_not_say_follows_the_setting(tune: str) -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (3,), torch.float32).relu())
    with settings.override(tune=tune):
        assert g.compile("cpu").policy.tune == tune
        assert g.compile("cpu", policy=cg.Policy(deterministic=True)).policy.tune == tune
        assert g.compile("cpu", tune="cached").policy.tune == "cached"
        assert g.compile("cpu", policy=cg.Policy(tune="heuristic")).policy.tune == "heuristic"
    assert g.compile("cpu").policy.tune == "heuristic"


def test_the_setting_of_tune_is_no_part_of_the_key() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (3,), torch.float32).relu())
    with settings.override(tune="autotune"):
        tuned = g.compile("cpu").key
    assert tuned == g.compile("cpu").key


def test_doctor_tells_a_variable_that_nobody_reads_with_what_is_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.delenv("CUDNNGRAPH_TEST_CASE", raising=False)
    (check,) = doctor._settings()
    assert (check.status, check.detail) == ("pass", "no variable is set")
    monkeypatch.setenv("CUDNNGRAPH_CACHEDIR", "/somewhere")
    (check,) = doctor._settings()
    assert check.status == "warn"
    assert check.detail == "no variable is set; not known: CUDNNGRAPH_CACHEDIR"
    assert check.mend.startswith("unset it, or set one of CUDNNGRAPH_CACHE_DIR")
