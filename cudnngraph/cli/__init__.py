"""The console script ``cudnngraph``: one module for each command.

A command is a module with ``add_parser(subparsers)``, which declares its arguments, and
``run(args)``, which answers with the exit code. It joins by its place in :data:`COMMANDS`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from ..errors import CudnnGraphError
from ..settings import VERSION
from . import bench, check, doctor, explain, plan_dump, plans, tune, zoo
from .records import UsageError


class Command(Protocol):
    """The interface of a module that defines a command."""

    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Declare the command and its arguments; its name is the parser's."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the command's job and answer with the exit code."""


COMMANDS: tuple[Command, ...] = (doctor, check, explain, tune, plan_dump, plans, bench, zoo)


_SURROGATES = ("surrogateescape", "surrogatepass")  # ways of encoding that fail for the rest


class _Parser(argparse.ArgumentParser):
    """Shows the whole help when a call is wrong, not only the usage line."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\nerror: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the console script, with every command of :data:`COMMANDS`."""
    parser: argparse.ArgumentParser = _Parser(
        prog="cudnngraph", description="Declare a graph, compile it, run it: fusion on cuDNN."
    )
    parser.add_argument("--version", action="version", version=f"cudnngraph {VERSION}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        before = set(subparsers.choices)
        command.add_parser(subparsers)
        for name in set(subparsers.choices) - before:
            subparsers.choices[name].set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names, by default the program's arguments.

    Returns the exit code: 0 for success, 1 for a failure that the command reports, 2 for a call
    that makes no sense.
    """
    _ready_output()
    try:
        code = _call(argv)
        sys.stdout.flush()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CudnnGraphError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as of a program that the signal ends
    except BrokenPipeError:  # `| head` has read enough
        _drop_output()
        return 141  # 128 + SIGPIPE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        _drop_output()
        return 1
    return code


def _call(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args = parse(words)
    except SystemExit as stop:  # argparse ends --help and wrong calls so
        return stop.code if isinstance(stop.code, int) else 0
    code: int = args.run(args)
    return code


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a call. SystemExit, with the help printed, for one that makes no sense."""
    parser = build_parser()
    arguments: Sequence[str] = ()
    if words and words[0] == "tune":
        own, arguments = tune.divide(words[1:])
        words = ["tune", *own]
    if list(words[:2]) == zoo.NAME.split():
        words = [zoo.NAME, *words[2:]]
    args, left = parser.parse_known_args(words)
    if "suites" in args and not any(word.startswith("-") for word in left):
        args.suites += left  # argparse takes only those that stand together
    elif left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if arguments:
        args.arguments = arguments
    return args


def _ready_output() -> None:
    """Let every text be written: what is closed swallows it, an encoding replaces what it lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # "surrogateescape" is of the C locale.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", *_SURROGATES):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Write out what is still buffered, or drop it: the flush at exit must not fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
