"""Calls with hostile arguments, and how each ended."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudnngraph.errors import CudnnGraphError
from tests.hostile.values import HOSTILE


@dataclass(frozen=True)
class Target:
    """A callable under its name. ``make`` gives it anew, with good arguments, and what is to be
    done with the result, which may raise the package's errors alone."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], dict[str, Any], Callable[[Any], object]]]


@dataclass
class Outcome:
    """The end of one call. ``wrong`` says what must not be; ``refused`` names the error's class."""

    call: str
    wrong: str = ""
    refused: str = ""
    ran: bool = False


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, without ``*args`` and ``**kwargs``."""
    found = inspect.signature(function).parameters
    taken = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: each for name, each in found.items() if each.kind not in taken}


def attempt(target: Target, rng: random.Random, tell: Callable[[str], object] = len) -> Outcome:
    """One call with hostile arguments."""
    function, good, use = target.make()
    names = [*parameters(function)]
    count = min(len(names), rng.choice((1, 1, 1, 2, 3)))
    chosen = {name: rng.choice(sorted(HOSTILE)) for name in rng.sample(names, count)}
    given = {**good, **{name: HOSTILE[kind]() for name, kind in chosen.items()}}
    extra = ""
    if not rng.randrange(40):  # not in the signature, or too many
        extra = rng.choice(("unknown", "op", "self_", "x9"))
        given[extra] = HOSTILE[rng.choice(sorted(HOSTILE))]()
    shown = ", ".join(f"{name}={kind}" for name, kind in chosen.items())
    outcome = Outcome(f"{target.name}({shown}{', ' + extra + '=…' if extra else ''})")
    tell(outcome.call)
    positional = [
        name
        for name, each in parameters(function).items()
        if each.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    args = [given.pop(name) for name in positional if name in given]
    try:
        result = function(*args, **given)
        outcome.ran = bool(use(result))
    except CudnnGraphError as error:
        outcome.refused = type(error).__name__
        text = str(error)
        if not text.strip() or "hostile" in text.split("\n")[0]:
            outcome.wrong = f"{type(error).__name__} says nothing: {text!r}"
    except TypeError as error:
        try:
            inspect.signature(function).bind(*args, **given)
        except TypeError:
            outcome.refused = "TypeError"
        else:  # a function that hands its keywords on
            theirs = extra and f"unexpected keyword argument '{extra}'" in str(error)
            outcome.refused, outcome.wrong = ("TypeError", "") if theirs else ("", _told(error))
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            outcome.refused = "out of memory"
        else:
            outcome.wrong = _told(error)
    return outcome


def _told(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    last = error.__traceback__
    while last is not None:
        if "/cudnngraph/" in last.tb_frame.f_code.co_filename:
            where = f"{last.tb_frame.f_code.co_filename.rsplit('/', 1)[1]}:{last.tb_lineno}"
        last = last.tb_next
    try:
        text = str(error)
    except Exception:
        text = "?"
    return f"{type(error).__name__} at {where}: {text[:200]}"
