"""One process of the zoo: ``python -m cudnngraph.bench.zoo.one JOB.json``.

It imports the model's library, waits for a line of input, and then does its job: ``cold`` compiles
a model one way with empty caches; ``timed`` runs it all ways, compares their results with those in
float64, and after one more line of input times them in turn. What it finds is written to a file
after every stage, so that the stage in which it ended is known.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...device import files
from ...errors import CannotImport
from ...models.check import in_wide, results_of
from ...models.fused import Fused
from ...runtime import comparison
from ...runtime.process import cache_clear
from ...runtime.state import agree
from ...select.heuristic import GENERATED
from ...select.tolerance import relative_error
from ...settings import override
from ..measure import Call, kernels_of, times_us
from .entries import CHANNELS_LAST, Entry, said
from .registry import entries
from .ways import WAYS, Way, call_of
from .weights import check_telling, prepared

CALLS = 3  # of a model while its memory is looked at
ERROR_LENGTH = 600
KERNELS = 12  # of a call that are told
READY = "ready"  # the stage of a process that waits to time its ways

Tensors = Sequence[torch.Tensor]
Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a process is to do, as its file says it. ``plans`` are the cache directories of our
    ways; those of ``alone`` start when no other process works, as they are timed. Without
    ``times`` the ways are compared, and not timed."""

    kind: Literal["cold", "timed"]
    registry: str
    entry: str
    ways: tuple[str, ...]
    device: str
    tiny: bool
    result: str
    plans: Mapping[str, str] = field(default_factory=dict)
    times: bool = False
    alone: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write it to a file."""
        files.write(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read it from a file."""
        data = json.loads(path.read_text())
        return cls(**{**data, "ways": tuple(data["ways"]), "alone": tuple(data["alone"])})


class Told:
    """What has been found so far, in a file: ``stage`` is what is being done, "" at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: Found = {"stage": "import", "ways": {}}
        self.save()

    def save(self) -> None:
        """Write it."""
        files.write(self._path, json.dumps(self.found))

    def way(self, name: str) -> Found:
        """The part of a way."""
        part: Found = self.found["ways"].setdefault(name, {})
        return part

    @contextmanager
    def stage(self, name: str, way: str = "") -> Iterator[None]:
        """Do something; an error of it is an error of the way, or of the whole model."""
        self.found |= {"stage": name, "of": way}
        self.save()
        try:
            yield
        except Exception as error:  # whatever a library raises is a row with the reason
            (self.way(way) if way else self.found)["error"] = _shortened(said(error))
            if not way:
                raise
        finally:
            self.save()


def _shortened(text: str) -> str:
    return text if len(text) <= ERROR_LENGTH else f"{text[:ERROR_LENGTH]} …"


def done(job: Job, told: Told, wait: Callable[[], object]) -> None:
    """Do a job."""
    entry = {each.name: each for each in entries(job.registry)}[job.entry]
    with told.stage("import"):
        entry.load()
    if not wait():  # who would have let it begin has ended
        return
    device = torch.device(job.device)
    torch.backends.cudnn.benchmark = True
    with told.stage("build"):
        model, inputs, others = _made(entry, job.tiny, device)
    told.found["parameters"] = sum(each.numel() for each in model.parameters())
    if job.kind == "cold":
        _cold(job, told, model, inputs)
    else:
        _timed(job, told, model, inputs, others, wait)
    told.found["stage"] = ""
    told.save()


def _made(entry: Entry, tiny: bool, device: torch.device) -> tuple[nn.Module, Tensors, Tensors]:
    """A model, its inputs, and others of the same shapes."""
    size, dtype = entry.size(tiny=tiny), entry.dtype
    if device.type == "cpu":
        dtype = torch.float32
    torch.manual_seed(0)
    try:
        with device:  # billions of weights take long to draw on a CPU
            model = size.build()
    except RuntimeError:  # it builds some tensor on a device of its own choice
        model = size.build()
    model = model.to(device).float().eval()
    wide, *draws = (
        [each.make(device, kind, seed) for each in size.inputs]
        for kind, seed in ((torch.float32, 0), (dtype, 0), (dtype, 1))
    )
    made: Any = prepared(model, wide).to(dtype)
    for dims, layout in CHANNELS_LAST.items():
        if any(each.dim() == dims for each in wide):
            made = made.to(memory_format=layout)
    return made.requires_grad_(False), draws[0], draws[1]


# -- jobs ------------------------------------------------------------------------------------------


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(call: Call, device: torch.device) -> Found:
    """Bytes of the GPU while a model runs: in tensors, and held by torch's allocator."""
    if device.type != "cuda":
        return {}
    _sync(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(CALLS):
        call()
    _sync(device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _first(way: Way, job: Job, model: nn.Module, inputs: Tensors) -> tuple[float, Any, Any, Any]:
    """Seconds until the first result; the call, the results, and our model if it is ours."""
    plans = job.plans.get(way.name)
    cache_clear()  # or plans of the way before would serve this one
    start = time.perf_counter()
    # The model's own convolutions run once if ours is compared with it.
    own = torch.backends.cudnn.flags(enabled=True, benchmark=not way.ours)
    with own, nullcontext() if plans is None else override(cache_dir=plans):
        call, fused = call_of(way, model, inputs)
        results = call()
    _sync(inputs[0].device)
    return time.perf_counter() - start, call, results, fused


def _cold(job: Job, told: Told, model: nn.Module, inputs: Tensors) -> None:
    (name,) = job.ways
    device = inputs[0].device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with told.stage("cold start", name):
        cold_s, call, _, _ = _first(WAYS[name], job, model, inputs)
        found: Found = {"cold_s": cold_s}
        if device.type == "cuda":
            found["building_bytes"] = torch.cuda.max_memory_allocated(device)
        told.way(name).update(found)
        for _ in range(CALLS):  # torch.compile captures its graphs in these
            call()
        told.way(name).update(_memory(call, device))


def _timed(
    job: Job,
    told: Told,
    model: nn.Module,
    inputs: Tensors,
    others: Tensors,
    wait: Callable[[], object],
) -> None:
    device = inputs[0].device
    with told.stage("results of eager torch"):
        yardstick = Expected(model, inputs, others)
        told.found["wide"] = yardstick.wide
    calls: dict[str, Call] = {}
    families: set[str] = set()

    def start(name: str) -> None:
        way, part = WAYS[name], told.way(name)
        part["loads"] = way.compiles and way.family not in families
        families.add(way.family)
        with told.stage("first result", name):
            part["first_s"], call, results, fused = _first(way, job, model, inputs)
            if fused is not None:
                part |= _steps(fused)
            told.found["stage"] = "parity"
            part["errors"] = yardstick.errors(results, fused)
            if not way.compiles:
                part |= _memory(call, device)
            calls[name] = call

    for name in job.ways:
        if name not in job.alone:
            start(name)
    ours = any(WAYS[name].ours for name in (*calls, *job.alone))
    if job.times and ours:
        _sync(device)
        with told.stage(READY):
            if not wait():
                return
    for name in job.alone:
        start(name)
    if not job.times or not any(WAYS[name].ours for name in calls):
        return
    calls = {name: calls[name] for name in job.ways if name in calls}
    with told.stage("timing"):
        found = times_us(list(calls.values()), "wall", device)
    for name, us in zip(calls, found, strict=True):
        told.way(name)["us"] = us
    if device.type == "cuda":
        for name in (name for name in calls if WAYS[name].compiles):
            with told.stage("kernels", name):
                told.way(name)["kernels"] = kernels_of(calls[name], KERNELS)


def _steps(fused: Fused) -> Found:
    """What runs our steps, where their plans are from, the ops that stay torch's own, and why the
    check of kernels refused some, whose ops run by plans or one by one."""
    report = fused.report
    assert report is not None
    names = Counter(name for name, _ in report.opaque)
    refused = Counter(
        made.reason
        for step in report.steps
        for made in step.decisions
        if made.subject == GENERATED and made.choice is not None
    )
    found: Found = {"steps": dict(report.counts), "tier": report.tier, "opaque": dict(names)}
    return {**found, "refused": dict(refused)} if refused else found


# -- parity ----------------------------------------------------------------------------------------


class Expected:
    """The results of a model in its own dtype and in a wide one, ``wide``: float64, float32 if
    there is no memory or kernel for that, or "" if neither runs."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, inputs: Tensors, others: Tensors) -> None:
        model(*inputs)  # cudnn.benchmark chooses now
        self.own = results_of(model, inputs, {})
        check_telling(self.own, results_of(model, others, {}))
        for number, again in enumerate(results_of(model, inputs, {})):
            if not agree(again, self.own[number]):
                raise CannotImport(f"result {number} is another in a second call")
        self.exact: Sequence[Any] = [None] * len(self.own)
        self.wide = ""
        for dtype in (torch.float64, torch.float32):
            with torch.backends.cudnn.flags(enabled=True, benchmark=False):  # it runs once
                exact = in_wide(model, tuple(inputs), {}, self.own, dtype)
            if exact is not None:
                self.exact = [each.cpu() if _is_tensor(each) else each for each in exact]
                self.wide = str(dtype).removeprefix("torch.")
                break
        if inputs[0].is_cuda:
            torch.cuda.empty_cache()

    def errors(self, results: Any, fused: Fused | None) -> list[list[float | None]]:
        """Relative errors of results, each beside eager's. Raises :class:`WrongResult` if they are
        ours and too far off."""
        floor = 0.0
        if fused is not None and fused.report is not None:
            executable = fused.report.executable
            tf32 = executable is not None and executable.in_tf32
            floor = comparison.coarsest((step.spec for step in fused.report.steps), tf32=tf32)
        mine = pytree.tree_leaves(results)
        found: list[list[float | None]] = []
        for number, (one, own, exact) in enumerate(zip(mine, self.own, self.exact, strict=True)):
            if fused is not None:
                yardstick = comparison.Yardstick(own, exact, floor=floor)
                pair = yardstick.check(f"result {number}", one)
                if pair is not None:
                    found.append(list(pair))
            elif comparison.compared(one):
                beside = None if exact is None else relative_error(own, exact)
                found.append([relative_error(one, own if exact is None else exact), beside])
        return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def main(words: Sequence[str]) -> int:
    """Do the job of a file; the exit code is 0 if its stages ran, whatever they found."""
    job = Job.read(Path(words[0]))
    told = Told(Path(job.result))
    try:
        done(job, told, sys.stdin.readline)
    except Exception as error:
        told.found.setdefault("error", _shortened(said(error)))
        told.save()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
