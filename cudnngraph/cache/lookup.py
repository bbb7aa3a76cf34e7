"""Between selection and the store: look a selection up, bring it back, or have it made and keep it.

The tiers, in order: the programs in memory (``runtime/process.py``), the store (memory, the user's
directory, the seeds), a build. A record is brought back from its serialized plans, else by
replaying (engine, knobs); where neither works the record is stale and the graph is built anew. A
fault of the cache is a miss, never an exception, unless the policy says ``tune="cached"``.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from plans_cache.gate import Gate
from plans_cache.launches import Mark
from plans_cache.lock import LockTimeout
from plans_cache.record import PlanRecord, RecordError, digest, entry_id, from_json
from plans_cache.store import Hit, PlanStore

from .. import settings
from ..backend import env
from ..backend.candidates import UNCHECKED, why_rejected
from ..backend.env import EnvKey
from ..backend.plan import KERNEL, Choice, Plan, Verified
from ..device.allocation import names_shortage
from ..device.rules import Values
from ..errors import NotSupported, PlanNotCached, UnkeyableError
from ..executor.plans import load, replay
from ..ir.key import Key, graph_key, nearest, step_digest
from ..ir.spec import GraphSpec
from ..kernels import kernel
from ..policy import Policy, Verify
from ..select import guard
from ..select.decision import NO_KERNELS, Decision, Hints, Selection, StepPlan
from ..select.kernels import Kernels
from . import distributed, near
from .codec import (
    StaleRecord,
    dense_regions,
    env_components,
    imported_body,
    imported_of,
    instead_of,
    is_channels_last,
    legal_of,
    pack,
    steps_of,
    summary,
    to_record,
    unpack,
)
from .state import STATE
from .stats import MissInfo

_log = logging.getLogger(__name__)

_UNKNOWN_BYTES = 1 << 62  # of workspace, until a plan is built
DIED = "the process that launched it first did not come back from it"


def store() -> PlanStore:
    """The store of the directory that the settings name."""
    now = settings.current()
    return STATE.store_of(now.cache_dir, now.seeds)


class Rejected:
    """Plans that are not to be tried again, kept in the store's directory.

    See :class:`~cudnngraph.select.guard.Kept`.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._directory = settings.current().cache_dir

    @cached_property
    def _env(self) -> str:
        """Digest of the environment, made at the first key: torch steps need no cuDNN."""
        return digest(env_components(env.env_key(self._index)))

    @cached_property
    def gate(self) -> Path | None:
        """See :class:`~cudnngraph.select.guard.Kept`."""
        return _gate_of(self._index)

    def of(self, spec: GraphSpec, policy: Policy) -> dict[Choice, str]:
        """The choices that were rejected for a step, with the reasons."""
        _lost(self._directory)
        id = self.id(spec, policy)
        found = {} if id is None else STATE.rejections_of(self._directory).of(id)
        return {Choice(engine, knobs): why for (engine, knobs), why in found.items()}

    def add(self, spec: GraphSpec, policy: Policy, rejected: Mapping[Choice, str]) -> None:
        """Keep more of them, but for those that may pass another version's check."""
        plans = {}
        for choice, why in rejected.items():
            if why.startswith(UNCHECKED):
                _log.warning("%s of '%s' is left out: %s", choice, spec.name, why)
            else:
                plans[choice.engine, choice.knobs] = why
        id = self.id(spec, policy)
        if id is not None:
            STATE.rejections_of(self._directory).add(id, plans)

    def withdraw(self, spec: GraphSpec, policy: Policy, choice: Choice, why: str) -> None:
        """Keep a choice as rejected that had passed: records that have it are stale from now on."""
        self.add(spec, policy, {choice: why})
        id = self.id(spec, policy)
        if id is not None and not why.startswith(UNCHECKED):
            STATE.launches_of(self._directory).note(id)

    def why_withdrawn(self, steps: Iterable[StepPlan], policy: Policy) -> str | None:
        """Return what is wrong with a choice of a record that had passed when it was kept, or None.

        Where nothing was ever withdrawn that is one look for a folder.
        """
        lost = _lost(self._directory)
        for step in steps if lost else ():
            if step.choice is not None and self.id(step.spec, policy) in lost:
                why = self.of(step.spec, policy).get(step.choice)
                if why is not None:
                    return f"{step.choice}: {why}"
        return None

    def begin(self) -> Mark:
        """For this process to tell the next what it launches first; to be closed."""
        return STATE.launches_of(self._directory).begin()

    def id(self, spec: GraphSpec, policy: Policy) -> str | None:
        """The id of a step in this environment; None if it has no key."""
        try:
            # A plan does the same whatever else the policy lets steps be.
            return entry_id(graph_key(spec, replace(policy, kernels=None)).digest, self._env)
        except UnkeyableError:
            return None


def _lost(directory: Path) -> frozenset[str]:
    """The steps of which a plan was withdrawn, with those that processes have died of by now."""
    rejections = STATE.rejections_of(directory)

    def reject(id: str, plan: tuple[int, tuple[tuple[str, int], ...]]) -> None:
        if plan not in rejections.of(id):
            _log.warning("%s is not tried again: %s", Choice(*plan), DIED)
            rejections.add(id, {plan: DIED})

    return STATE.launches_of(directory).look(reject)


# -- lookup ----------------------------------------------------------------------------------------


def selection_for(
    spec: GraphSpec,
    policy: Policy,
    key: Key,
    device_index: int,
    build: Callable[[Hints], Selection],
) -> tuple[Selection, str]:
    """The selection for a canonical graph, and the tier that served it.

    Where ``torch.distributed`` runs, one rank looks it up or builds it, and the others take its
    record. Raises :class:`PlanNotCached` where nothing serves and ``policy.tune`` is "cached"; what
    ``build`` raises goes through.
    """
    environment = env.env_key(device_index)
    id = entry_id(key.digest, digest(env_components(environment)))

    def here() -> tuple[Selection, str, PlanRecord]:
        return _look_up(id, spec, policy, key, device_index, build)

    def first() -> tuple[tuple[Selection, str], bytes]:
        selection, tier, record = here()
        return (selection, tier), record.to_json().encode()

    def other(text: bytes) -> tuple[Selection, str]:
        record = from_json(text)
        if record.id != id:
            raise RecordError(f"the record of the rank that chose is {record.id[:16]}'s")
        return _restore(record, None, "another rank", spec, policy, device_index)[:2]

    if distributed.is_distributed():
        try:
            return distributed.choose_once(f"{id}/{policy.tune}", first, other)
        except (RecordError, StaleRecord) as error:
            _log.warning("this rank chooses plans of its own for %s: %s", id[:16], error)
    return here()[:2]


def is_kept(key: Key, device_index: int) -> bool:
    """Whether the store has an entry of a graph for a GPU, which may turn out to be of no use."""
    environment = digest(env_components(env.env_key(device_index)))
    return store().holds(entry_id(key.digest, environment))


def near_entries(key: Key, device_index: int) -> tuple[near.Near, ...]:
    """The entries of other graphs by which a choice for one begins, the nearest first."""
    environment = env_components(env.env_key(device_index))
    own = entry_id(key.digest, digest(environment))
    return near.near(store(), key.components, environment, leave_out=own)


@contextmanager
def gpu_lock(device_index: int) -> Iterator[None]:
    """The right to measure on a GPU, held by one process and thread at a time.

    Workers that build plans go on meanwhile; none of them runs one.
    """
    with store().building(_name_of(device_index)), Gate(_gate_of(device_index)).alone():
        yield


def _name_of(device_index: int) -> str:
    return hashlib.sha256(env.uuid(device_index).encode()).hexdigest()


def _gate_of(device_index: int) -> Path | None:
    directory = store().directory
    name = f"{_name_of(device_index)[:32]}.gate"
    return None if directory is None else directory / "gates" / name


def _look_up(
    id: str,
    spec: GraphSpec,
    policy: Policy,
    key: Key,
    device_index: int,
    build: Callable[[Hints], Selection],
) -> tuple[Selection, str, PlanRecord]:
    """The selection by this process's own means, the tier and the record."""
    environment = env.env_key(device_index)
    plans = store()
    found = plans.get(id)
    useless: PlanRecord | None = None
    if isinstance(found, Hit) and not _measured(found.record, policy):
        reason = "untuned: what is kept was chosen without measuring"
    elif isinstance(found, Hit) and not _satisfies(found.record, policy):
        lacked = "memory" if _lacked_memory(found.record) else "kernels"
        reason = f"without {lacked}: what is kept was chosen where {_WANTED[lacked]}"
    elif isinstance(found, Hit):
        try:
            selection, tier, checked = _restore(*_parts(found), spec, policy, device_index)
            kept = found.record
            if checked:
                kept = to_record(spec, key, environment, policy, selection)
                kept = replace(
                    kept,
                    policy=found.record.policy,
                    created=found.record.created,
                    extra=found.record.extra,
                )
            refresh = found.blob is not None or found.blob_problem or found.tier == "seed"
            if checked or ("replayed" in tier and refresh):
                plans.put(kept, _serialized(selection, id))
            return selection, tier, kept
        except StaleRecord as stale:
            reason, useless = f"stale: {stale}", found.record
    else:
        reason = found.reason
    STATE.counters.missed(reason.split(":")[0])
    _log.info("cache_miss %s (%s): %s", id[:16], reason, summary(spec))
    for hook in tuple(STATE.hooks):
        try:
            hook(MissInfo(summary(spec), key, reason))
        except Exception:
            _log.exception("a miss hook failed")
    if policy.tune == "cached":
        raise _not_cached(plans, spec, key, environment, reason)

    def accepts(record: PlanRecord) -> bool:
        return record != useless and _satisfies(record, policy)

    made: list[tuple[Selection, PlanRecord]] = []
    failures: list[Exception] = []

    def make() -> tuple[Selection, PlanRecord]:
        start = time.perf_counter()
        try:
            selection = _begun_near(spec, policy, key, device_index, build)
        except Exception as error:
            failures.append(error)
            raise
        STATE.counters.served("built", build_ms=(time.perf_counter() - start) * 1e3)
        made.append((selection, to_record(spec, key, environment, policy, selection)))
        return made[-1]

    def record() -> tuple[PlanRecord, bytes | None]:
        selection, text = make()
        return text, _serialized(selection, id)

    try:
        hit = plans.get_or_build(id, record, accepts=accepts)
        if not made:  # another thread or process built it meanwhile
            return (*_restore(*_parts(hit), spec, policy, device_index)[:2], hit.record)
    except StaleRecord as stale:
        _log.info("%s was made by another and is stale: %s", id[:16], stale)
        plans.put(*record())
    except (LockTimeout, RecordError, OSError) as error:
        if error in failures:
            raise  # the build's own, not the cache's
        _log.warning("the plan cache is left out for %s: %s", id[:16], error)
    selection, kept = made[-1] if made else make()
    return selection, "built", kept


# -- near entries ----------------------------------------------------------------------------------


def _begun_near(
    spec: GraphSpec,
    policy: Policy,
    key: Key,
    device_index: int,
    build: Callable[[Hints], Selection],
) -> Selection:
    """The selection that ``build`` makes, which begins with the choices of near entries; under
    "heuristic" the choice of the nearest entry that passes its check."""
    hints: dict[str, dict[Choice, str]] = {}
    for entry in near_entries(key, device_index):
        try:
            legal = legal_of(entry.record, spec, policy)
            steps = _fitting(steps_of(entry.record, legal, resized=True), policy, device_index)
            if policy.tune != "autotune":
                return _taken(entry, steps, policy, device_index)
        except StaleRecord as why:
            _log.info("%s does not serve %s: %s", entry, summary(spec), why)
            continue
        for step in steps:
            if step.choice is not None:
                choices = hints.setdefault(step_digest(step.spec), {})
                choices.setdefault(step.choice, str(entry))
    return build(hints)


def _fitting(steps: Sequence[StepPlan], policy: Policy, device_index: int) -> tuple[StepPlan, ...]:
    """The steps of a near entry by choice alone, with kernels whose schedules fit these sizes.

    Raises :class:`StaleRecord` for a step that has no kernel in these sizes.
    """
    kernels: Kernels | None = None
    found = []
    for step in steps:
        choice = step.choice
        if choice is not None and choice.engine == KERNEL:
            kernels = kernels or Kernels.on(device_index)
            fit = kernels.choices(step.spec) if policy.kernels else []
            if not fit:
                raise StaleRecord(f"no kernel is generated for '{step.spec.name}'")
            choice = choice if choice in fit else fit[0]
        found.append(StepPlan(step.spec, choice, _UNKNOWN_BYTES, ()))
    return tuple(found)


def _taken(
    entry: near.Near, steps: Sequence[StepPlan], policy: Policy, device_index: int
) -> Selection:
    """The choice of a near entry for a graph of other sizes: each plan is checked, whatever the
    policy says of checks. Raises :class:`StaleRecord` if one does not pass."""
    checked, _ = _verified(tuple(steps), replace(policy, verify=_strictly(policy)), device_index)
    plans, _ = _plans(entry.record, checked, None, device_index)
    made: list[StepPlan] = []
    for step, plan in zip(checked, plans, strict=True):
        need = 0 if plan is None else plan.workspace_bytes
        if policy.workspace_limit is not None and need > policy.workspace_limit:
            raise StaleRecord(f"{step.choice} needs {need} bytes of workspace here")
        subject = "torch" if step.choice is None else str(step.choice)
        taken = Decision(subject, True, f"taken from {entry}", step.choice, need)
        made.append(replace(step, workspace_bytes=need, decisions=(taken,)))
    return _selection(entry.record, made, plans)


def _selection(
    record: PlanRecord, steps: Sequence[StepPlan], plans: Sequence[Plan | None]
) -> Selection:
    """Steps and their plans as a choice for the form of the graph that a record has."""
    return Selection(
        tuple(steps),
        tuple(plans),
        is_channels_last(record),
        dense_regions(record),
        instead_of(record),
        imported_of(record),
    )


def note_import(key: Key, device_index: int, values: Values) -> None:
    """Have the record of a graph say which thresholds the import of its model is to follow."""
    plans = store()
    found = plans.get(entry_id(key.digest, digest(env_components(env.env_key(device_index)))))
    if isinstance(found, Hit):
        extra = {**found.record.extra, **imported_body(values)}
        plans.put(replace(found.record, extra=extra), found.blob)


def _strictly(policy: Policy) -> Verify | None:
    """How plans that were chosen for other sizes are checked: in this process if plans are not."""
    return "inprocess" if guard.how(policy) == "off" else policy.verify


def _serialized(selection: Selection, id: str) -> bytes | None:
    """Its plans, to be kept beside the record; None where the frontend does not give them."""
    try:
        return pack(selection.built)
    except Exception as error:  # the frontend's own errors have no common base
        _log.info("plans of %s are not serialized: %s", id[:16], error)
        return None


_WANTED = {"memory": "there was none left to build with", "kernels": "none could be generated"}


def _satisfies(record: PlanRecord, policy: Policy) -> bool:
    return _measured(record, policy) and (
        policy.tune == "cached"
        or not (_lacked_memory(record) or (_lacks_kernels(record) and kernel.why_none() is None))
    )


def _lacked_memory(record: PlanRecord) -> bool:
    """Whether a candidate was passed over by heuristics because the GPU had no memory to build it.
    A search passes over what it has no memory to time, and is too long to be done again for it."""
    if record.policy.get("tune") == "autotune":
        return False
    reasons = (each.reason for step in record.steps for each in step.candidates)
    return any(map(names_shortage, reasons))


def _lacks_kernels(record: PlanRecord) -> bool:
    """Whether torch runs what kernels would, had they been there to choose from."""
    return any(each.subject == NO_KERNELS for step in record.steps for each in step.candidates)


def _measured(record: PlanRecord, policy: Policy) -> bool:
    return policy.tune != "autotune" or record.policy.get("tune") == "autotune"


def _parts(hit: Hit) -> tuple[PlanRecord, bytes | None, str]:
    return hit.record, hit.blob, hit.tier


def _restore(
    record: PlanRecord,
    blob: bytes | None,
    tier: str,
    spec: GraphSpec,
    policy: Policy,
    device_index: int,
) -> tuple[Selection, str, bool]:
    """A selection from a record, the tier, and whether plans of it were checked that had not been.

    Raises :class:`StaleRecord` when it cannot be had from it.
    """
    start = time.perf_counter()
    steps = steps_of(record, legal_of(record, spec, policy))
    steps, checked = _verified(steps, policy, device_index)
    try:
        parts = None if blob is None else unpack(blob, len(steps))
    except ValueError as error:
        _log.info("serialized plans of %s are left out: %s", record.id[:16], error)
        parts = None
    plans, how = _plans(record, steps, parts, device_index)
    STATE.counters.served(tier, load_ms=(time.perf_counter() - start) * 1e3)
    word = "cache_hit" if tier == "memory" else "persistent_cache_hit"
    detail = " and ".join(sorted(how)) or "torch"
    _log.info("%s %s (%s, %s)", word, record.id[:16], tier, detail)
    return _selection(record, steps, plans), f"{tier}, {detail}", checked


def _plans(
    record: PlanRecord,
    steps: Sequence[StepPlan],
    parts: Sequence[bytes] | None,
    device_index: int,
) -> tuple[list[Plan | None], set[str]]:
    """The plans of the steps of a record, from ``parts`` or replayed, and how they were had.

    Raises :class:`StaleRecord` for one that cannot be had.
    """
    tf32 = dict(record.key).get("policy.allow_tf32") == "true"
    how: set[str] = set()
    plans: list[Plan | None] = []
    made: dict[tuple[str, Choice], Plan] = {}  # steps that are equal share a plan
    for number, step in enumerate(steps):
        if step.choice is None:
            plans.append(None)
            continue
        like = (step_digest(step.spec), step.choice)
        if like in made:
            plans.append(made[like])
            continue
        bad = why_rejected(
            step.spec,
            step.choice,
            env.capability(device_index),
            allow_tf32=tf32,
            device_index=device_index,
        )
        if bad is not None:
            raise StaleRecord(bad)
        try:
            if parts is not None:
                made[like] = load(parts[number], step.choice, device_index)
                _check_generated(made[like], step)
                plans.append(made[like])
                how.add("serialized")
                continue
        except NotSupported as error:
            _log.info("step %d of %s is replayed: %s", number, record.id[:16], error)
        try:
            made[like] = replay(step.spec, step.choice, device_index)
            _check_generated(made[like], step)
            plans.append(made[like])
            how.add("replayed")
        except NotSupported as error:
            raise StaleRecord(f"{step.choice} is not to be had: {error.reasons[0]}") from None
    return plans, how


def _check_generated(plan: Plan, step: StepPlan) -> None:
    """Raise :class:`StaleRecord` for a kernel that is generated otherwise by now: what was checked
    and measured is another one."""
    if isinstance(plan, kernel.Kernel):
        why = kernel.why_stale(plan, step.spec, step.workspace_bytes)
        if why is not None:
            raise StaleRecord(why)


def _verified(
    steps: tuple[StepPlan, ...], policy: Policy, device_index: int
) -> tuple[tuple[StepPlan, ...], bool]:
    """The steps of a record, those checked that this frontend's plans were not, and whether there
    were any.

    Raises :class:`StaleRecord` where one does not pass, or was withdrawn after it had.
    """
    if guard.how(policy) == "off" or all(step.choice is None for step in steps):
        return steps, False
    kept = Rejected(device_index)
    withdrawn = kept.why_withdrawn(steps, policy)
    if withdrawn is not None:
        raise StaleRecord(withdrawn)
    frontend = env.env_key(device_index).frontend_version
    if all(_is_checked(step, frontend) for step in steps):
        return steps, False
    done: dict[tuple[str, Choice], Verified] = {}
    found: list[StepPlan] = []
    for step in steps:
        if step.choice is None or _is_checked(step, frontend):
            found.append(step)
            continue
        like = (step_digest(step.spec), step.choice)
        if like not in done:
            try:
                why, passed = guard.check(step.spec, policy, step.choice, device_index, kept)
            except NotSupported as error:
                why, passed = f"it is not to be had: {error.reasons[0]}", None
            if passed is None:
                raise StaleRecord(f"{step.choice}: {why}")
            done[like] = passed.after(step.verified)
        found.append(replace(step, verified=done[like]))
    return tuple(found), True


def _is_checked(step: StepPlan, frontend: str) -> bool:
    """Whether no check of a step is due: torch runs it, or its plan passed with this frontend."""
    return step.choice is None or (
        step.verified is not None and step.verified.holds_for(step.choice, frontend)
    )


def _not_cached(
    plans: PlanStore, spec: GraphSpec, key: Key, environment: EnvKey, reason: str
) -> PlanNotCached:
    """The error that names the entry of the most similar graph, in the most similar environment."""
    stored = [(Key(r.key), Key(r.env)) for r in (entry.record for entry in plans.scan()) if r]
    close = nearest(key, (graph for graph, _ in stored))
    if close is None:
        return PlanNotCached(f"'{summary(spec)}'", f"{reason}, and the cache is empty")
    other, differences = close
    here = Key(env_components(environment))
    there = nearest(here, (place for graph, place in stored if graph == other))
    assert there is not None
    where, elsewhere = there
    if elsewhere and not differences:
        reason = f"{reason} in this environment; the same graph is there for another"
    return PlanNotCached(
        f"'{summary(spec)}'",
        reason,
        entry_id(other.digest, where.digest),
        [(d.component, d.a, d.b) for d in (*differences, *elsewhere)],
    )
