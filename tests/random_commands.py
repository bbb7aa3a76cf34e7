"""Random calls of the console script: any flags, damaged caches, and outputs that refuse.

A call is made by its seed alone. It runs in this process. It has to end with an exit code of the
documented ones, without a traceback, and what ``--json`` prints is JSON.

``RANDOM_COMMANDS=3000 pytest tests/cpu/cli/test_random_commands.py`` makes so many;
``RANDOM_FIRST=1234 RANDOM_COMMANDS=1`` that one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudnngraph import cli

CODES = {0, 1, 2, 130, 141}
TEXTS = (
    *("", " ", "-", "--", "-1", "0", "1", "0.5", "nan", "inf", "-inf", "1e400", "1e-400"),
    *("9" * 30, "9" * 5000, "1K", "64M", "1G", "-1G", "1e9G", "infG", "1_000", "٣", "½", "0x10"),
    *(
        "relu",
        "conv",
        "gpu=H200",
        "op=sdpa",
        "time=nan",
        "engine=44",
        "=",
        "a=b=c",
        "==",
        "%s",
        "{}",
    ),
    *("id", "gpu", "time", "created", "9.19.0", "91900", "9.x", "NVIDIA H200", "nvidia-h200"),
    *("\udcff", "\n", "\x1b[31m", "é→", "\u202e", "x" * 5000, "cpu", "cuda", "cuda:99"),
    *("meta", "mps", "[a-", "*", "(", "\\", "6f", "6f44dc88", "Z" * 64, "autotune", "default"),
)
#: Records of JSON get these in the place of something.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 10**400, 0.5, -1e308, 1e400, "", "x", "\ud800"),
    *([], {}, [[]], {"": None}, [None] * 3, "relu", "def f(", "f16[8, 64]", "a" * 10_000, "NaN"),
)
# A command's options; None for one without a value, else what kind of value.
_SEEDS: Mapping[str, str | None] = {"--seeds": None, "--no-seeds": None}
_DIR = {"--dir": "dir"}
OPTIONS: Mapping[str, Mapping[str, str | None]] = {
    "plan-dump": {
        **{"--full": "id", "--graph": "out", "--filter": "filter", "--sort": "field"},
        **{"--reverse": None, "--json": None, **_SEEDS, **_DIR, "": "id"},
    },
    "plans path": _DIR,
    "plans diff": {"": "id", " ": "id", **_DIR},
    "plans explain-miss": {
        **{"": "graph", "--tf32": None, "--no-tf32": None, "--deterministic": None, **_DIR},
        **{"--workspace-limit": "text", "--fallback": "text", "--kernels": None},
    },
    "plans verify": {"": "id", **_SEEDS, **_DIR},
    "plans prune": {
        **{"--dead-environments": None, "--cudnn": "text", "--gpu": "text", "--older-than": "text"},
        **{"--unused-for": "text", "--max-size": "text", "--other-schemas": None},
        **{"--dry-run": None, **_DIR},
    },
    "plans export": {"": "out", "--seeds": "folder", "--with-blobs": None, **_DIR},
    "plans import": {"": "in", "--trust-blobs": None, "--replace": None, **_DIR},
    "doctor": {"--json": None},
    "check": {
        **{"--quick": None, "--full": None, "--only": "text", "--limit": "text", "--again": None},
        "--json": None,
    },
    "explain": {"": "bad graph", "--target": "text", "--tf32": None, "--json": None, "--all": None},
    "tune": {
        **{"": "in", "--graphs": "bad graph", "--jobs": "text", "--budget": "text"},
        **{"--target": "text", "--json": None, "-m": "text", "--share": "text"},
    },
    "bench": {
        **{"": "suite", "--only": "nothing", "--quick": None, "--device": "text", "--tune": "text"},
        **{"--compile": "text", "--json": "out", "--html": "out", "--picture": "out"},
        "--limit": "text",
    },
    "bench zoo": {
        **{"--models": "nothing", "--ways": "text", "--tiny": None, "--device": "text"},
        **{"--limit": "text", "--budget": "text", "--jobs": "text", "--json": "out"},
        **{"--resume": "in", "--again": None, "--retry": None, "--out": "out", "--page-only": None},
        **{"--caches": "folder", "--registry": "text"},
    },
    "": {"": "text", "--version": None, "--help": None, "-h": None},
}
#: What would run for minutes with what it is given by luck has what bounds it.
BOUNDS = {"bench": ["--only", "no such row"], "bench zoo": ["--models", "no-such-model"]}
QUICK = ("plan-dump", "plans path", "plans diff", "plans verify", "plans prune", "plans export")


class Full(io.RawIOBase):
    """A disk without space."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Call:
    """A call in a folder of its own, from a copy of the example of a cache."""

    def __init__(self, seed: int, example: Path, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.folder, self.cache = folder, folder / "cache"
        shutil.copytree(example, self.cache)
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, 5))):
            self.damage()
        self.make_files()
        rng = self.rng
        self.command = rng.choice((*OPTIONS, *QUICK, *QUICK))
        options = list(OPTIONS[self.command])
        chosen = rng.sample(options, rng.randint(0, min(4, len(options))))
        if "--dir" in options and rng.random() < 0.85:
            chosen = [*(name for name in chosen if name != "--dir"), "--dir"]
        self.words = self.command.split()
        for name in chosen:
            kind = OPTIONS[self.command][name]
            self.words += [name] * bool(name.strip()) + ([self.value(kind)] if kind else [])
        self.words += BOUNDS.get(self.command, [])
        self.width = rng.choice(("80", "0", "1", "20", "-5", "x", "100000"))
        self.output = rng.choice(("plain", "plain", "ascii", "latin-1", "utf-16", "pipe", "full"))
        self.output = self.output if rng.random() < 0.6 else "plain"
        self.errors = rng.choice(("strict", "surrogateescape", "surrogatepass"))
        self.nothing = rng.random() < 0.03  # no output at all, as of a daemon

    def __str__(self) -> str:
        return f"{self.words} to {self.output}, COLUMNS={self.width}"

    def make_files(self) -> None:
        (self.folder / "garbage").write_bytes(self.rng.randbytes(300))
        (self.folder / "list.json").write_text(json.dumps([1, {"graphs": 3}]))
        many = {"graphs": self.rng.choice([[], [{}], [{"file": "x.py:g"}], [3], "x", {"a": 1}])}
        (self.folder / "manifest.json").write_text(json.dumps(many))
        (self.folder / "broken.py").write_text("def f(:\n")
        (self.folder / "raises.py").write_text("raise RuntimeError('é')\n")
        (self.folder / "none.py").write_text("x = 3\n")
        records = [file.read_text(errors="replace") for file in self.records()]
        lines = [" ".join(each.split()) for each in records]
        self.rng.shuffle(lines)
        (self.folder / "records").write_text("\n".join([*lines, "{", "3", ""]), errors="replace")
        os.symlink(self.folder / "loop", self.folder / "loop")

    def records(self) -> list[Path]:
        return sorted(file for file in self.cache.rglob("*.json") if file.is_file())

    def value(self, kind: str) -> str:
        rng, folder = self.rng, self.folder
        if rng.random() < 0.15:
            return rng.choice(TEXTS)
        ids = [file.stem for file in self.records()] or ["6f"]
        odd = ("garbage", "list.json", "manifest.json", "broken.py", "raises.py", "none.py")
        files = [str(folder / name) for name in (*odd, "records", "loop", "missing", "")]
        inputs = [*files, str(self.cache), "/dev/null", f"{folder}/none.py/x"]
        choices: dict[str, Sequence[str]] = {
            "id": [rng.choice(ids)[: rng.choice((1, 2, 8, 64))], "zz", "6F"],
            "dir": [str(self.cache)] * 12 + inputs,
            "in": inputs,
            "folder": [str(folder / "made"), str(folder / "made" / "deep"), *inputs],
            "out": [f"{folder}/out.{s}" for s in ("svg", "dot", "md", "html", "png", "json", "x")]
            + ["/dev/full", "-", str(folder), f"{folder}/no/such/out.svg"],
            "graph": [f"{name}{of}" for name in files for of in ("", ":g", ":", ":a.b")] + ids,
            "bad graph": [f"{name}{of}" for name in files for of in ("", ":g", ":")],
            "filter": ["gpu=H200", "op=sdpa", "engine=44", "TILE_SIZE=2", "conv", "time=1", "=x"],
            "field": ["id", "gpu", "time", "created", "op", "x"],
            "suite": ["conv", "host", "norm", "x"],
            "nothing": ["no-such-thing"],
        }
        return rng.choice(choices.get(kind, TEXTS))

    # -- damage ------------------------------------------------------------------------------------

    def damage(self) -> None:
        """Spoil a file of the cache."""
        rng = self.rng
        files = sorted(file for file in self.cache.rglob("*") if file.is_file())
        if not files:
            return
        file = rng.choice(files)
        way = rng.choice(
            ("bytes", "cut", "json", "json", "json", "folder", "loop", "empty", "stray")
        )
        if way == "bytes" and file.stat().st_size:
            content = bytearray(file.read_bytes())
            for _ in range(3):
                content[rng.randrange(len(content))] = rng.randrange(256)
            file.write_bytes(content)
        elif way == "cut":
            file.write_bytes(file.read_bytes()[: rng.randrange(200)])
        elif way == "empty":
            file.write_bytes(b"")
        elif way == "json" and file.suffix == ".json":
            self._edit(file)
        elif way in ("folder", "loop"):
            file.unlink()
            if way == "folder":
                file.mkdir()
            else:
                os.symlink(file, file)
        elif way == "stray":
            names = (b"\xff.json", b"x.json", b"a" * 200, b".hidden", b"6f44.blob", b"v2")
            os.makedirs(os.path.join(os.fsencode(file.parent), rng.choice(names)), exist_ok=True)

    def _edit(self, file: Path) -> None:
        """Another value in a random place of a record."""
        try:
            record = json.loads(file.read_text())
        except ValueError:
            return
        places: list[tuple[Any, Any]] = []
        pending = [record]
        while pending:
            node = pending.pop()
            keys: Any = node if isinstance(node, dict) else range(len(node))
            for key in keys:
                places.append((node, key))
                if isinstance(node[key], (dict, list)):
                    pending.append(node[key])
        node, key = self.rng.choice(places)
        if isinstance(node, dict) and self.rng.random() < 0.2:
            del node[key]
        else:
            node[key] = self.rng.choice(VALUES)
        text = json.dumps(record).replace('"NaN"', self.rng.choice(("NaN", "Infinity", "1e999")))
        file.write_text(text, errors="surrogatepass")

    # -- the call ----------------------------------------------------------------------------------

    def run(self) -> str:
        """What is wrong with the call, "" for nothing."""
        errors = io.StringIO()
        held = io.BytesIO()
        with self._output(held) as output, contextlib.redirect_stderr(errors):
            before, sys.stdout = sys.stdout, output
            try:
                code: Any = cli.main(self.words)
            except BaseException:
                return traceback.format_exc()
            finally:
                sys.stdout = before
        said = errors.getvalue()
        if code not in CODES:
            return f"exit code {code!r}: {said}"
        if "Traceback" in said:
            return f"a traceback: {said}"
        silent = not said and not held.getvalue()
        if code and silent and self.output == "plain" and not self.nothing:
            return f"exit code {code} without a word"
        if code == 0 and "--json" in self.words and self.output == "plain" and not self.nothing:
            return self._no_json(held.getvalue())
        return ""

    def _no_json(self, printed: bytes) -> str:
        takes_a_file = OPTIONS[self.command].get("--json") == "out"
        if takes_a_file or not printed or "-h" in self.words:
            return ""
        try:
            json.loads(printed, parse_constant=_refuse)
        except ValueError as error:
            return f"no JSON: {error}: {printed[:200]!r}"
        return ""

    @contextlib.contextmanager
    def _output(self, held: io.BytesIO) -> Iterator[Any]:
        if self.nothing:
            yield None
        elif self.output == "pipe":
            reading, writing = os.pipe()
            os.close(reading)
            with contextlib.suppress(OSError), open(writing, "w", encoding="utf-8") as pipe:
                yield pipe
        elif self.output == "full":
            with contextlib.suppress(OSError), open("/dev/full", "w", encoding="utf-8") as full:
                yield full
        else:
            encoding = "utf-8" if self.output == "plain" else self.output
            text = io.TextIOWrapper(held, encoding, errors=self.errors, write_through=True)
            yield text
            text.detach()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


Run = Callable[[int], str]
