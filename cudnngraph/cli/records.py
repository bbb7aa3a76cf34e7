"""Entries of the plan cache as commands see them: opened, found by prefix, read, put in words."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plans_cache import PlanRecord, PlanStore
from plans_cache.store import PACKAGED_SEEDS, Entry

from .. import settings
from ..cache.codec import FRONTEND
from ..errors import CudnnGraphError
from ..explain.text import age_text, bytes_text, clean, cudnn_text, ops_of, plan_text, time_text
from ..ir.spec import DTYPE_NAMES, TensorSpec

EXIT_CODES = (
    "Exit code: 0 when all went well; 1 when nothing matches or something wrong was found; "
    "2 for a call that makes no sense."
)
ID_SHOWN = 12

DTYPES = {str(dtype): dtype for dtype in DTYPE_NAMES}


class CacheError(CudnnGraphError):
    """The cache directory, or what was asked of it, is not there; exit code 1."""


class UsageError(Exception):
    """A call that makes no sense; exit code 2."""


# -- the store -------------------------------------------------------------------------------------


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Declare ``--dir``."""
    parser.add_argument(
        "--dir", type=_folder, metavar="PATH", help="the cache directory (default: the settings')"
    )


def add_seeds(parser: argparse.ArgumentParser, asked: str) -> None:
    """Declare ``--seeds``; ``asked`` says which arguments look among them too."""
    parser.add_argument(
        "--seeds",
        action=argparse.BooleanOptionalAction,
        help=f"with the records that ship with the package, which {asked} finds too",
    )


def _folder(text: str) -> Path:
    """A path with ``~`` expanded, as the variable's is."""
    try:
        if text.strip():
            return Path(text).expanduser().absolute()
    except RuntimeError:
        pass
    raise argparse.ArgumentTypeError(f"expected the path of a folder, got '{text}'")


def directory(args: argparse.Namespace) -> Path:
    """``--dir``, else the directory of the settings."""
    given: Path | None = args.dir
    return settings.current().cache_dir if given is None else given


def open_store(place: Path, *, seeds: bool = False) -> PlanStore:
    """The store at ``place``. :class:`CacheError` where that is there and cannot be used."""
    store = PlanStore(place, seeds=PACKAGED_SEEDS if seeds else None)
    try:
        store.check_directory()
    except OSError as error:
        raise CacheError(f"the cache directory cannot be used: {error}") from None
    return store


def scan(store: PlanStore, *, look_only: bool = False) -> tuple[list[Stored], list[Entry]]:
    """The entries of a store, and those that are damaged, which stay there with ``look_only``."""
    entries = list(store.scan(look_only=look_only))
    whole = [Stored(entry, entry.record) for entry in entries if entry.record is not None]
    return whole, [entry for entry in entries if entry.record is None]


def print_damaged(damaged: Iterable[Entry]) -> None:
    """A line on standard error for each entry that is damaged."""
    for entry in damaged:
        print(f"damaged: {clean(entry.id)}: {clean(entry.problem)}", file=sys.stderr)


def is_prefix(text: str) -> bool:
    """Whether ``text`` can be the beginning of an id."""
    return re.fullmatch("[0-9a-f]{1,64}", text) is not None


def find(entries: Sequence[Stored], prefix: str) -> Stored:
    """The one entry whose id begins with ``prefix``; :class:`CacheError` for none or several."""
    found = [entry for entry in entries if entry.id.startswith(prefix)]
    if not prefix or not found:
        raise CacheError(f"no entry's id begins with '{clean(prefix)}'")
    if len(found) > 1:
        ids = ", ".join(entry.short_id for entry in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise CacheError(f"{len(found)} ids begin with '{prefix}': {ids}{more}; give more of it")
    return found[0]


# -- words -----------------------------------------------------------------------------------------


def tensor(name: str, described: Any) -> TensorSpec | None:
    """A tensor out of a key, None where that is no description of one."""
    try:
        shape, stride, dtype = described
        sizes, steps = tuple(map(int, shape)), tuple(map(int, stride))
        return TensorSpec(name, sizes, steps, DTYPES[dtype]) if len(sizes) == len(steps) else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def parsed(components: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Components of a key with their values out of JSON; texts that are none stay texts."""
    found = {}
    for name, text in components:
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            found[name] = text
    return found


def json_text(value: Any) -> str:
    """``value`` in JSON; "…" for what is nested too deep to be written, though it could be read."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "…"


# -- entries ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """An entry of the store with its record, and what tables and filters ask of it."""

    entry: Entry
    record: PlanRecord

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def short_id(self) -> str:
        """As much of the id as tables show."""
        return self.entry.id[:ID_SHOWN]

    @cached_property
    def env(self) -> dict[str, str]:
        """The environment's components as text."""
        found = parsed(self.record.env)
        return {
            name: clean(value if isinstance(value, str) else json_text(value))
            for name, value in found.items()
        }

    @property
    def gpu(self) -> str:
        return self.env.get("gpu_name", "?")

    @property
    def cudnn(self) -> str:
        return cudnn_text(self.env.get("cudnn_version", "?"))

    @property
    def frontend(self) -> str:
        """The frontend that made the record, and with which its plans were checked first."""
        return clean(self.record.versions.get(FRONTEND, "?"))

    @cached_property
    def tensors(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs of the graph, as its key has them."""
        key = parsed(self.record.key)
        ins = key.get("inputs")
        outs = key.get("outputs")
        pairs = sorted(ins.items(), key=_place) if isinstance(ins, Mapping) else []
        inputs = [tensor(name, described) for name, described in pairs]
        rows = outs if isinstance(outs, list) else []
        outputs = [tensor(str(row[0]), row[1:]) for row in rows if isinstance(row, list) and row]
        return (
            tuple(each for each in inputs if each is not None),
            tuple(each for each in outputs if each is not None),
        )

    @property
    def graph(self) -> str:
        """The ops in one line, steps divided by a bar."""
        return " | ".join(" → ".join(ops_of(step)) for step in self.record.steps)

    @property
    def shapes(self) -> str:
        inputs, outputs = (
            ", ".join("x".join(map(str, each.shape)) or "scalar" for each in side) or "?"
            for side in self.tensors
        )
        return f"{inputs} → {outputs}"

    @property
    def dtypes(self) -> tuple[str, ...]:
        both = (*self.tensors[0], *self.tensors[1])
        return tuple(dict.fromkeys(DTYPE_NAMES[each.dtype] for each in both))

    @property
    def layout(self) -> str:
        """The layouts of tensors with three dims or more; all tensors where none has."""
        both = (*self.tensors[0], *self.tensors[1])
        wide = [each for each in both if len(each.shape) >= 3] or both
        names = (each.layout() for each in wide)
        return ", ".join(
            dict.fromkeys("strided" if name.startswith("stride=") else name for name in names)
        )

    @property
    def plan(self) -> str:
        """The engines, or torch, that run each step."""
        return " | ".join(map(plan_text, self.record.steps))

    def to_dict(self) -> dict[str, Any]:
        """The entry as an object of ``--json``."""
        record, entry = self.record, self.entry
        inputs, outputs = ([str(each) for each in side] for side in self.tensors)
        return {
            "id": self.id,
            "summary": record.summary,
            "graph": self.graph,
            "inputs": inputs,
            "outputs": outputs,
            "dtypes": list(self.dtypes),
            "layout": self.layout,
            "gpu": self.gpu,
            "cudnn": self.cudnn,
            "frontend": self.frontend,
            "steps": [
                {
                    "kind": step.kind,
                    "ops": list(step.ops),
                    "engine": step.engine,
                    "knobs": dict(step.knobs),
                    "workspace_bytes": step.workspace_bytes,
                    "time_us": step.time_us,
                    "candidates": len(step.candidates),
                }
                for step in record.steps
            ],
            "policy": dict(record.policy),
            "workspace_bytes": record.workspace_bytes,
            "time_us": record.time_us,
            "tier": entry.tier,
            "created": record.created,
            "age_s": entry.age_s,
            "unused_s": entry.unused_s,
            "record_bytes": entry.record_bytes,
            "blob_bytes": entry.blob_bytes,
            "path": entry.path,
        }


def _place(item: tuple[str, Any]) -> tuple[int, str]:
    """A key that sorts tensors by their numbers; a number may be too long for ``int``."""
    number = item[0].removeprefix("%")
    return _number_order(number) if number.isdecimal() else (0, item[0])


def _number_order(digits: str) -> tuple[int, str]:
    significant = digits.lstrip("0")
    return len(significant), significant


@dataclass(frozen=True)
class Field:
    """A field to filter and sort by: ``text`` in the table, ``order`` for sorting.

    With ``words`` a filter has to equal one of them, else to be part of the text.
    """

    text: Callable[[Stored], str]
    order: Callable[[Stored], Any]
    words: Callable[[Stored], Iterable[str]] | None = None


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


FIELDS: Mapping[str, Field] = {
    "id": Field(lambda e: e.short_id, lambda e: e.id),
    "graph": Field(lambda e: e.graph, lambda e: e.graph),
    "shapes": Field(lambda e: e.shapes, lambda e: e.shapes),
    "dtype": Field(lambda e: ", ".join(e.dtypes), lambda e: e.dtypes, lambda e: e.dtypes),
    "layout": Field(lambda e: e.layout, lambda e: e.layout),
    "gpu": Field(lambda e: e.gpu, lambda e: e.gpu),
    "cudnn": Field(
        lambda e: e.cudnn, lambda e: [_number_order(n) for n in re.findall("[0-9]+", e.cudnn)]
    ),
    "workspace": Field(
        lambda e: bytes_text(e.record.workspace_bytes), lambda e: e.record.workspace_bytes
    ),
    "time": Field(lambda e: time_text(e.record.time_us), lambda e: _number(e.record.time_us)),
    "tier": Field(lambda e: e.entry.tier, lambda e: e.entry.tier, lambda e: [e.entry.tier]),
    "age": Field(lambda e: age_text(e.entry.age_s), lambda e: e.entry.age_s),
    "plan": Field(lambda e: e.plan, lambda e: e.plan),
    # Not in the table.
    "unused": Field(lambda e: age_text(e.entry.unused_s), lambda e: e.entry.unused_s),
    "op": Field(
        lambda e: e.graph,
        lambda e: e.graph,
        lambda e: [op for step in e.record.steps for op in ops_of(step)],
    ),
    "engine": Field(
        lambda e: e.plan,
        lambda e: [-1 if step.engine is None else step.engine for step in e.record.steps],
        lambda e: [str(s.engine) for s in e.record.steps if s.engine is not None],
    ),
    "frontend": Field(lambda e: e.frontend, lambda e: e.frontend),
    "blob": Field(
        lambda e: "yes" if e.entry.blob_bytes else "no",
        lambda e: e.entry.blob_bytes,
        lambda e: ["yes" if e.entry.blob_bytes else "no"],
    ),
    "size": Field(lambda e: bytes_text(e.entry.size_bytes), lambda e: e.entry.size_bytes),
}
COLUMNS = tuple(FIELDS)[: tuple(FIELDS).index("plan") + 1]


def parse_filter(text: str) -> Callable[[Stored], bool]:
    """``FIELD=value``, ``KNOB=value`` or text that stands anywhere, as a condition.

    Raises :class:`UsageError` for a field that there is not.
    """
    name, equals, value = text.partition("=")
    wanted = value.lower()
    if not equals:
        return lambda entry: any(text.lower() in part.lower() for part in _texts(entry))
    if name in FIELDS:
        field = FIELDS[name]
        if field.words is not None:
            words = field.words
            return lambda entry: any(wanted == word.lower() for word in words(entry))
        if name == "id":
            return lambda entry: entry.id.startswith(wanted)
        return lambda entry: wanted in field.text(entry).lower()
    if name.isupper():
        return lambda entry: any(
            knob == name and str(setting) == value
            for step in entry.record.steps
            for knob, setting in step.knobs
        )
    raise UsageError(
        f"no field '{clean(name)}' to filter by; there are {', '.join(FIELDS)}, and knobs by their "
        "names in capitals"
    )


def _texts(entry: Stored) -> Iterator[str]:
    yield entry.id
    yield clean(entry.record.summary)
    yield from (field.text(entry) for field in FIELDS.values())
