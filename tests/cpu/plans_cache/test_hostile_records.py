"""Records with any field replaced by anything: no command ends, and no other record is lost.

The suite makes a few; ``HOSTILE_RECORDS=5000`` makes more. A record that made a command fail is
named by its seed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnngraph import cli
from cudnngraph.cli import records
from plans_cache import PlanRecord, PlanStore, RecordError, entry_id, from_json
from plans_cache.record import MAX_CREATED, MAX_TIME_US, digest
from tests.workers import cache_example

COUNT = int(os.environ.get("HOSTILE_RECORDS", "40"))
EACH = 8  # hostile records to a directory
NOW = 1.75e9  # a record is the same by the same seed

NUMBERS: list[Any] = [  # those that may be right are there more than once
    *(0, 0.0, 1, 2, 10.5, 1e3, 1e9, 1e307, 1e308, 1e308, 5e-324, 2**62, 2**63 - 1, 2**63 - 1),
    *(0, 1, -1, 3.5, -0.0, 5e-324, 1e308, -1e308, 1.7976931348623157e308, 1e15, 1e16),
    *(float("nan"), float("inf"), -float("inf")),
    *(2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(NOW + 3600, NOW + 1e9, 1e11, MAX_TIME_US, MAX_TIME_US, MAX_CREATED, MAX_CREATED + 1),
]
TEXTS = [
    *("", " ", "now", "1e308", "NaN", "-1", "0", "9" * 5000, "x" * 3000, "%0", "%", "torch"),
    *("\x00", "\x1b[2J", "\u202e", "\ud800", "\ufffe", "a\nb", '"', "]]>", "../../x", "‰" * 50),
    *("conv", "sdpa", "cudnn", "0x1.0p+9999", "0x1.8p+1", "[" * 30, '{"a": 1}', "torch.float16"),
]
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": []}},
    [1, "x"],
]
DIMS = [0, 1, -1, 7, 2**31, 2**62, 10**30, 1e308, float("inf"), "x", None, True, [], 1.5]


def hostile(draw: random.Random) -> Any:
    """A value that may stand anywhere."""
    kind = draw.random()
    if kind < 0.45:
        return draw.choice(NUMBERS)
    if kind < 0.75:
        return draw.choice(TEXTS)
    if kind < 0.95:
        return copy.deepcopy(draw.choice(OTHERS))  # what is damaged next may be within it
    value: Any = draw.choice(NUMBERS)
    for _ in range(draw.choice((2, 10, 30, 400))):
        value = [value] if draw.random() < 0.5 else {draw.choice(TEXTS): value}
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within ``value``."""
    if path:
        yield path
    if isinstance(value, (dict, list)) and len(path) < 30:  # deeper ones are there as a whole
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def damage(value: Any, draw: random.Random) -> None:
    """Change something somewhere in ``value``: put, take away, double, rename, or change a dim."""
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        found = [*places(value)]
        if not found:
            return
        *first, last = draw.choice(found)
        place = at(value, tuple(first))
        kind = draw.random()
        if kind < 0.7:
            place[last] = hostile(draw)
        elif kind < 0.8:
            del place[last]
        elif isinstance(place, dict):
            place[draw.choice(TEXTS)] = (
                place.pop(last) if kind < 0.9 else copy.deepcopy(place[last])
            )
        else:
            place.insert(last, copy.deepcopy(place[last] if kind < 0.9 else draw.choice(DIMS)))


def stretch(value: Any, draw: random.Random) -> None:
    """Put numbers that may be right, each too large or too small, in the place of some others.

    What is not known (a time of None) counts as a number.
    """
    found = [path for path in places(value) if type(at(value, path)) in (int, float, type(None))]
    for path in draw.sample(found, min(len(found), draw.choice((1, 2, 5, 50)))):
        kind = type(at(value, path))
        choice = [n for n in NUMBERS if kind is not int or type(n) is int]
        at(value, path[:-1])[path[-1]] = draw.choice(choice)


def signed(body: dict[str, Any]) -> bytes:
    """``body`` in JSON, its digests and checksum right where there are some to make right."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        body["key_digest"], body["env_digest"] = digest(body["key"]), digest(body["env"])
        body["id"] = entry_id(body["key_digest"], body["env_digest"])
    rest = {name: value for name, value in body.items() if name != "checksum"}
    text = json.dumps(rest, separators=(",", ":"), ensure_ascii=False)
    rest["checksum"] = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return json.dumps(rest).encode()


@functools.cache
def examples() -> list[str]:
    return [record.to_json() for record in cache_example.records(NOW).values()]


def made(seed: int) -> bytes:
    """A record of the example with something changed, as anyone may write it."""
    draw = random.Random(seed)
    body = json.loads(draw.choice(examples()))
    body["env"].append(["seed", str(seed)])  # an entry of its own, beside the one it is made of
    kind = draw.random()
    if kind < 0.3:  # within what a component says, which is JSON in a text
        component = draw.choice(body[draw.choice(("key", "env"))])
        inner = [json.loads(component[1])]
        draw.choice((damage, stretch))(inner, draw)
        with contextlib.suppress(ValueError):  # Python prints no integer of 5,000 digits
            component[1] = json.dumps(inner[0] if inner else None)
    elif kind < 0.4:
        body["created"] = draw.choice(NUMBERS)
    elif kind < 0.7:
        stretch(body["steps"], draw)
    else:
        damage(draw.choice((body, body["steps"])), draw)
    try:
        text = signed(body) if draw.random() < 0.9 else json.dumps(body).encode()
    except ValueError:
        return made(seed + 1_000_000)
    if draw.random() < 0.05:
        at = draw.randrange(len(text))
        text = text[:at] + bytes([draw.randrange(256)]) + text[at + draw.randrange(3) :]
    return text


def decoded(text: bytes) -> PlanRecord | None:
    """The record of a text; None where it is none. Anything but a RecordError goes through."""
    try:
        return from_json(text)
    except RecordError:
        return None


def place_of(folder: Path, text: bytes) -> Path:
    """Return the path at which a hostile writer would put a record, so that it is found."""
    record = decoded(text)
    id = hashlib.sha256(text).hexdigest() if record is None else record.id
    place = folder / "v1" / id[:2] / f"{id}.json"
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*argv: object) -> tuple[int, str]:
    """A command's exit code and output. What is no error of ours goes through."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(word) for word in argv])
    assert code in (0, 1), (argv, err.getvalue())
    for text in (out.getvalue(), err.getvalue()):
        assert not set("\x00\x1b\u202e\ufffe") & set(text), argv
        assert max(map(len, text.splitlines()), default=0) < 100_000, argv
    return code, out.getvalue()


def test_what_is_read_can_be_written_and_anything_else_is_refused_by_name() -> None:
    taken = 0
    for seed in range(25 * COUNT):
        record = decoded(made(seed))
        if record is not None:
            taken += 1
            assert from_json(record.to_json()) == record, seed
    assert taken > 5 * COUNT, "most of what is made has to be looked at as a record"


@pytest.mark.parametrize("seed", range(0, COUNT, EACH))
def test_no_command_ends_and_no_other_record_is_lost(seed: int, tmp_path: Path) -> None:
    folder, other, file = tmp_path / "plans", tmp_path / "other", tmp_path / "file"
    good = set(cache_example.make(folder, NOW).values())
    source = tmp_path / "graphs.py"
    source.write_text(
        "from tests.workers.cache_example import conv_bias_relu\ng = conv_bias_relu()\n"
    )
    texts = [made(each) for each in range(seed, seed + EACH)]
    for text in texts:
        if (place := place_of(folder, text)).stem not in good:
            place.write_bytes(text)
    at = ("--dir", folder)

    _, out = run("plan-dump", *at, "--no-seeds", "--json")
    listed = json.loads(out, parse_constant=no_constant)
    ids = {entry["id"] for entry in listed["entries"]}
    assert good <= ids
    for field in records.FIELDS:
        assert run("plan-dump", *at, "--sort", field, "--filter", f"{field}=1")[0] in (0, 1)
    code, out = run("plan-dump", *at, "--no-seeds")
    assert all(id[:12] in out for id in good), code
    for id in ids - good:
        assert run("plan-dump", *at, "--full", id)[0] == 0
        json.loads(run("plan-dump", *at, "--full", id, "--json")[1], parse_constant=no_constant)
        for suffix in (".svg", ".dot"):
            assert run("plan-dump", *at, id, "--graph", tmp_path / f"plan{suffix}")[0] == 0
        ElementTree.parse(tmp_path / "plan.svg")
        assert run("plans", "diff", *at, id, min(good))[0] == 0
        assert run("plans", "explain-miss", *at, id)[0] == 0
    assert run("plans", "explain-miss", *at, f"{source}:g")[0] in (0, 1)
    run("plans", "verify", *at)
    run("plans", "prune", *at, "--dry-run", "--older-than", "1", "--unused-for", "1")
    run(
        "plans",
        "prune",
        *at,
        "--dry-run",
        "--dead-environments",
        "--gpu",
        "none",
        "--cudnn",
        "9.1.0",
    )
    run("plans", "export", *at, file)
    run("plans", "export", *at, "--seeds", tmp_path / "seeds")
    assert run("plans", "import", file, "--dir", other)[0] == 0
    assert {entry.id for entry in PlanStore(other, seeds=None).scan()} == ids

    lines = file.read_bytes().splitlines()
    file.write_bytes(
        b"\n".join([lines[0], *(text.replace(b"\n", b"") for text in texts), *lines[1:]])
    )
    third = tmp_path / "third"
    run("plans", "import", file, "--dir", third, "--trust-blobs")
    assert good <= {entry.id for entry in PlanStore(third, seeds=None).scan()}
    assert run("plans", "prune", *at, "--max-size", "0")[0] == 0
    assert not [*PlanStore(folder, seeds=None).scan()]
