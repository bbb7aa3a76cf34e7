"""Plans that are none, for tests of what is done with plans, where there is no GPU."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.backend import env
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache import lookup
from cudnngraph.cache.codec import env_components
from cudnngraph.cache.state import STATE
from cudnngraph.cache.stats import Counters
from cudnngraph.errors import NotSupported
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime import compile as compiling
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select import guard, heuristic
from cudnngraph.select.cost import Rates
from plans_cache.record import PlanRecord, from_json

H200 = EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1)


def choice_for(spec: GraphSpec) -> Choice:
    """The plan that a fake builder finds: the same for the same graph."""
    number = zlib.crc32(str(spec).encode())
    return Choice(number % 60, (("STAGES", number % 5), ("TILE_SIZE", number % 17)))


class FakePlan:
    """A plan that computes nothing: its choice, its workspace, and a serialized form."""

    def __init__(self, choice: Choice, workspace_bytes: int = 0) -> None:
        self.choice = choice
        self.workspace_bytes = workspace_bytes
        self.device_index = 0
        self.verified: Verified | None = None

    def serialize(self) -> bytes:
        return f"plan of {self.choice}".encode()


def builder(refuse: Callable[[GraphSpec], bool] = lambda spec: False) -> Callable[..., Any]:
    """A ``build`` for :func:`cudnngraph.select.heuristic.heuristic`, refusing the graphs that are
    said."""

    def build(spec: GraphSpec) -> Any:
        if refuse(spec):
            raise NotSupported("this graph", [f"no engine for {node.op}" for node in spec.nodes])
        choice = choice_for(spec)
        need = 512 * (choice.engine % 3)
        outcomes = (
            Outcome(Candidate(0, Choice(61, ()), "eng61"), False, "does not launch"),
            Outcome(
                Candidate(1, Choice(choice.engine, (("STAGES", 9),)), "eng"),
                False,
                "needs 4096 bytes of workspace, over 2048",
                4096,
            ),
            Outcome(Candidate(2, choice, "eng"), True, "", need),
        )
        return FakePlan(choice, need), outcomes

    return build


class World:
    """A fake library: what it does is set by a test, what it was asked for is kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = H200
        self.refuse: Callable[[GraphSpec], bool] = lambda spec: False
        self.loadable = True
        self.gone: set[int] = set()
        self.bad: str | None = None
        self.build_s = 0.0
        self.built: list[str] = []
        self.ahead: list[Choice | None] = []  # what each build was to begin with
        self.loaded: list[bytes] = []
        self.replayed: list[Choice] = []
        self.measured: list[str] = []
        self.hints: list[Any] = []  # of each search
        self.kernels = False  # no GPU would load one

    def build_first(
        self, spec: GraphSpec, policy: cg.Policy, index: int, ahead: Choice | None = None
    ) -> Any:
        self.built.append(spec.name)
        self.ahead.append(ahead)
        time.sleep(self.build_s)
        plan, outcomes = builder(self.refuse)(spec)
        if ahead is None:
            return plan, outcomes
        begins = Candidate(7, ahead, str(ahead))
        if ahead.engine in self.gone:
            return plan, (Outcome(begins, False, "does not launch"), *outcomes)
        return FakePlan(ahead), (Outcome(begins, True, "", 0),)

    def autotune(
        self,
        spec: GraphSpec,
        policy: cg.Policy,
        bench: Any,
        tell: Any,
        kernels: Any,
        hints: Any,
        floor: Any,
        *,
        brief: bool = False,
        left_s: float = math.inf,
    ) -> Any:
        self.measured.append(spec.name)
        self.hints.append(hints)
        tell(1, 1)
        return heuristic.heuristic(spec, policy, builder(self.refuse))

    def load(self, blob: bytes, choice: Choice, index: int) -> FakePlan:
        self.loaded.append(blob)
        if not self.loadable or blob != FakePlan(choice).serialize():
            raise NotSupported("a serialized plan", ["it is of another version"])
        return FakePlan(choice)

    def replay(self, spec: GraphSpec, choice: Choice, index: int) -> FakePlan:
        self.replayed.append(choice)
        if choice.engine in self.gone:
            raise NotSupported("a choice", [f"engine {choice.engine} has no such knobs"])
        return FakePlan(choice)

    def files(self, suffix: str) -> list[Path]:
        root = self.directory / "v1"
        return sorted(root.rglob(f"*.{suffix}"))

    def file(self, suffix: str = "json") -> Path:
        (path,) = self.files(suffix)
        return path

    def rewrite(self, **change: Any) -> None:
        """Change fields of the only record's first step, as a program that means it would."""
        record = from_json(self.file().read_text())
        steps = (replace(record.steps[0], **change), *record.steps[1:])
        self.file("blob").unlink()
        self.file().write_text(replace(record, steps=steps, blob=None).to_json())

    def move(self, environment: EnvKey) -> PlanRecord:
        """Make the only entry one of another environment."""
        record = from_json(self.file().read_text())
        foreign = replace(record, env=env_components(environment), blob=None)
        lookup.store().remove(record.id)
        lookup.store().put(foreign)
        return foreign

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A GPU that is not there, an empty directory, nothing in memory, counters at zero."""
        monkeypatch.setenv("CUDNNGRAPH_CACHE_DIR", str(self.directory))
        monkeypatch.setenv("CUDNNGRAPH_VERIFY", "off")  # its plans compute nothing
        monkeypatch.setenv("CUDNNGRAPH_KERNELS", str(int(self.kernels)))
        monkeypatch.setenv("CUDNNGRAPH_SEEDS", "0")
        monkeypatch.setattr(settings, "_from_environ", None)
        monkeypatch.setattr(STATE, "counters", Counters())
        monkeypatch.setattr(STATE, "stores", {})
        monkeypatch.setattr(STATE, "hooks", [])
        monkeypatch.setattr(lookup, "load", self.load)
        monkeypatch.setattr(lookup, "replay", self.replay)
        monkeypatch.setattr(lookup, "why_rejected", lambda *args, **options: self.bad)
        monkeypatch.setattr(env, "env_key", lambda index: self.environment)
        monkeypatch.setattr(env, "uuid", lambda index: f"GPU {index}")
        monkeypatch.setattr(env, "cudnn_version", lambda: self.environment.cudnn_version)
        monkeypatch.setattr(guard, "build_first", self.build_first)
        monkeypatch.setattr(compiling, "by_measurement", self.autotune)
        nothing = SimpleNamespace(rest=lambda: None)
        monkeypatch.setattr(compiling, "GuardedBench", lambda *args: nothing)
        rates = Rates(0.0, math.inf, {})
        monkeypatch.setattr(compiling.cost, "measured", lambda bench, spec: rates)
        monkeypatch.setattr(compiling, "refuse_during_capture", lambda: None)
        monkeypatch.setattr(PROCESS, "programs", type(PROCESS.programs)())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
