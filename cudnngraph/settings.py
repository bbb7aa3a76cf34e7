"""Every environment variable of the project, read once into one frozen dataclass.

Settings say where things are kept, how plans are looked for and how to debug; they never change a
result, and they are no part of a cache key. What changes results is in :class:`cudnngraph.Policy`.

    >>> with override(backend="reference"):
    ...     current().backend
    'reference'
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from .errors import SettingsError

VERSION = "0.1.0.dev0"  #: of the package; pyproject.toml reads it here
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
BACKENDS = ("auto", "reference")
TUNES = ("heuristic", "autotune", "cached")
VERIFIES = ("isolated", "inprocess", "off")

_LOGGERS = (logging.getLogger("cudnngraph"), logging.getLogger("plans_cache"))


@dataclass(frozen=True)
class Settings:
    """The values of all variables; see :data:`VARIABLES` for what each one means."""

    cache_dir: Path
    log: str | None
    backend: Literal["auto", "reference"]
    tune: Literal["heuristic", "autotune", "cached"]
    verify: Literal["isolated", "inprocess", "off"]
    kernels: bool
    seeds: bool
    check: bool

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read every variable of ``environ``; one that is unset or empty takes its default.

        Raises:
            SettingsError: a variable holds a value that it cannot have.
        """
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            text = environ.get(variable.name, "").strip()
            values[variable.field] = (
                variable.parse(variable.name, text) if text else variable.default(environ)
            )
        return cls(**values)


@dataclass(frozen=True)
class Variable:
    """One environment variable: a row of docs/environment.md, and a field of :class:`Settings`.

    ``parse(name, text)`` turns a non-empty value into the field's, or raises
    :class:`SettingsError`; ``default(environ)`` is what an unset variable means.
    """

    name: str
    field: str
    type_text: str
    default_text: str
    meaning: str
    parse: Callable[[str, str], object]
    default: Callable[[Mapping[str, str]], object]


def _bad(name: str, value: str, expected: str) -> SettingsError:
    return SettingsError(f"{name}={value!r}: expected {expected}")


def _one_of(choices: tuple[str, ...]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text.lower() not in choices:
            raise _bad(name, text, "one of " + ", ".join(choices))
        return text.lower()

    return parse


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise _bad(name, text, "one of 0, 1")
    return text.lower() in ("1", "true")


def _absolute_path(name: str, text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise _bad(name, text, f"a path that can be expanded ({error})") from error
    if not path.is_absolute():
        raise _bad(name, text, "an absolute path, or one that starts with ~")
    return path


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/cudnngraph``, else ``~/.cache/cudnngraph``.

    A relative ``XDG_CACHE_HOME`` is ignored, as its specification asks. Without a home directory
    it is a directory of this user's under the system's temporary one.
    """
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            user = os.getuid() if hasattr(os, "getuid") else "user"
            return Path(tempfile.gettempdir()) / f"cudnngraph-{user}"
    return base / "cudnngraph"


VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="CUDNNGRAPH_CACHE_DIR",
        field="cache_dir",
        type_text="absolute path",
        default_text="`$XDG_CACHE_HOME/cudnngraph`, else `~/.cache/cudnngraph`",
        meaning="Directory that plans are kept in between processes; it must be this user's own, "
        "and nobody else may write to it.",
        parse=_absolute_path,
        default=_default_cache_dir,
    ),
    Variable(
        name="CUDNNGRAPH_LOG",
        field="log",
        type_text=", ".join(f"`{level}`" for level in LOG_LEVELS),
        default_text="unset: logging is left as the program configured it",
        meaning="Level of the loggers `cudnngraph` and `plans_cache`, written to standard error.",
        parse=_one_of(LOG_LEVELS),
        default=lambda environ: None,
    ),
    Variable(
        name="CUDNNGRAPH_BACKEND",
        field="backend",
        type_text=", ".join(f"`{backend}`" for backend in BACKENDS),
        default_text="`auto`",
        meaning="`auto` runs CUDA tensors by cuDNN; `reference` runs them by the reference "
        "executor too, to tell a wrong plan from a wrong graph.",
        parse=_one_of(BACKENDS),
        default=lambda environ: "auto",
    ),
    Variable(
        name="CUDNNGRAPH_TUNE",
        field="tune",
        type_text=", ".join(f"`{tune}`" for tune in TUNES),
        default_text="`heuristic`",
        meaning="How plans are found for a policy that does not say: `autotune` measures what the "
        "cache does not have, `cached` never builds by search.",
        parse=_one_of(TUNES),
        default=lambda environ: "heuristic",
    ),
    Variable(
        name="CUDNNGRAPH_VERIFY",
        field="verify",
        type_text=", ".join(f"`{verify}`" for verify in VERIFIES),
        default_text="`isolated`",
        meaning="How plans are checked before they compute anything, for a policy that does not "
        "say: in processes of their own, in this one, or not at all.",
        parse=_one_of(VERIFIES),
        default=lambda environ: "isolated",
    ),
    Variable(
        name="CUDNNGRAPH_KERNELS",
        field="kernels",
        type_text="`0`, `1`",
        default_text="`1`",
        meaning="`0` generates no kernels for a policy that does not say: what cuDNN has no plan "
        "for runs as torch ops.",
        parse=_flag,
        default=lambda environ: True,
    ),
    Variable(
        name="CUDNNGRAPH_SEEDS",
        field="seeds",
        type_text="`0`, `1`",
        default_text="`1`",
        meaning="`0` takes nothing from the records that ship with the package: a search begins "
        "with nothing, as on a GPU that they say nothing of.",
        parse=_flag,
        default=lambda environ: True,
    ),
    Variable(
        name="CUDNNGRAPH_CHECK",
        field="check",
        type_text="`0`, `1`",
        default_text="`0`",
        meaning="`1` compares the first results and gradients of every graph that torch.compile or "
        "`training=True` runs with eager torch in float64, where `check` is not given.",
        parse=_flag,
        default=lambda environ: False,
    ),
)

_BY_FIELD = {variable.field: variable for variable in VARIABLES}
assert set(_BY_FIELD) == {field.name for field in fields(Settings)}

_overridden: ContextVar[Settings | None] = ContextVar("cudnngraph_settings", default=None)
_from_environ: Settings | None = None


def current() -> Settings:
    """The settings in force: those of the innermost :func:`override`, else the environment's.

    The environment is read on the first call and not again. That call also applies
    ``CUDNNGRAPH_LOG``.

    Raises:
        SettingsError: a variable holds a value that it cannot have.
    """
    global _from_environ
    overridden = _overridden.get()
    if overridden is not None:
        return overridden
    if _from_environ is None:
        _from_environ = Settings.from_environ(os.environ)
        if _from_environ.log is not None:
            _apply_log(_from_environ.log)
    return _from_environ


overridden: Callable[[], Settings | None] = _overridden.get
"""The settings of the innermost :func:`override`, None outside of any; for hot paths."""


@contextmanager
def override(**changes: object) -> Iterator[Settings]:
    """Replace fields of :class:`Settings` within a ``with`` block, in this thread or task only.

    Values are checked as the environment's are. ``None`` puts a field back to its default. The
    level of the loggers, which are the process's, is put back when the block ends.

    Raises:
        SettingsError: an unknown field, or a value that the field cannot have.
    """
    checked: dict[str, Any] = {}
    for name, value in changes.items():
        variable = _BY_FIELD.get(name)
        if variable is None:
            raise SettingsError(f"no setting {name!r}: expected one of {', '.join(_BY_FIELD)}")
        checked[name] = (
            variable.default(os.environ) if value is None else variable.parse(name, str(value))
        )
    settings = replace(current(), **checked)
    token = _overridden.set(settings)
    levels = [logger.level for logger in _LOGGERS]
    if "log" in checked:
        _apply_log(settings.log)
    try:
        yield settings
    finally:
        _overridden.reset(token)
        for logger, level in zip(_LOGGERS, levels, strict=True):
            logger.setLevel(level)


def markdown_table() -> str:
    """The table of docs/environment.md, one row for each of :data:`VARIABLES`."""
    rows = ["| Variable | Values | Default | Meaning |", "|---|---|---|---|"]
    rows += [f"| `{v.name}` | {v.type_text} | {v.default_text} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(rows) + "\n"


def _apply_log(level: str | None) -> None:
    """Set the loggers' level, and give each a handler if nothing would print its records."""
    for logger in _LOGGERS:
        logger.setLevel(logging.NOTSET if level is None else _level_number(level))
        if level is not None and not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)


def _level_number(level: str) -> int:
    number = logging.getLevelName(level.upper())
    assert isinstance(number, int)
    return number
