"""The user's options for plan selection."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

from .arguments import NotPlain, expected, is_a, plain
from .errors import PolicyError

Tune = Literal["heuristic", "autotune", "cached"]
Fallback = Literal["partition", "error"]
Verify = Literal["isolated", "inprocess", "off"]

_ENGINE = re.compile(r"(^|_)eng\d+(_|$)")  # in what cuDNN calls its plans


@dataclass(frozen=True)
class Policy:
    """Options for choosing plans, and limits on a chosen plan.

    - ``tune``: "heuristic" takes the first plan of cuDNN's own ranking that builds, or before it
      what was measured fastest for an equal step. "autotune" measures plans, and ways to cut the
      graph, on the GPU, once: the choice is kept in the cache.
      "cached" takes what an earlier run left in the cache and raises ``PlanNotCached`` if there
      is nothing: the mode for serving. A tuned entry serves all three. None follows the setting
      ``CUDNNGRAPH_TUNE``, which is "heuristic" unless it is set.
    - ``allow_tf32``: whether float32 graphs may use TF32. None follows torch's own switches as they
      stand at ``compile``: ``torch.backends.cudnn.allow_tf32`` for convolutions (torch's default:
      on), ``torch.backends.cuda.matmul.allow_tf32`` for attention (off).
    - ``deterministic``: leave out plans that cuDNN marks as not deterministic.
    - ``workspace_limit``: most bytes of scratch memory a plan may need; None for no limit.
    - ``fallback``: "partition" cuts a graph that cuDNN refuses as one plan into smaller steps, down
      to torch ops; "error" raises ``NotSupported`` instead.
    - ``kernels``: whether kernels are generated for ops between the plans. None follows the setting
      ``CUDNNGRAPH_KERNELS``, on unless it is set.
    - ``exclude_engines``: engines not to use, as "eng8" or by cuDNN's own tag ("ConvFwd_eng8").
    - ``verify``: "isolated" runs every plan once on random data, between guard bytes, against the
      reference, in a process of its own, before it computes anything for you: one that is wrong,
      faults or hangs harms nothing, and is not tried again. "inprocess" does it in this process,
      and is taken where a second one cannot have the GPU. "off" looks at what "autotune" takes
      alone. None follows the setting ``CUDNNGRAPH_VERIFY``, "isolated" unless it is set.
    - ``max_candidates``: how many plans of a step autotuning builds at most.
    - ``budget_s``: seconds that autotuning may take for each convolution, matmul, norm or attention
      of the graph; every step's first plan is tried however long that takes.
    - ``total_s``: seconds that autotuning may take for a whole graph, or in ``fuse`` for a model.
      After that only what has no plan yet is searched, and the fastest that was found is taken.
    """

    tune: Tune | None = None
    allow_tf32: bool | None = None
    deterministic: bool = False
    workspace_limit: int | None = None
    fallback: Fallback = "partition"
    kernels: bool | None = None
    exclude_engines: tuple[str, ...] = ()
    verify: Verify | None = None
    max_candidates: int = 12
    budget_s: float = 8.0
    total_s: float = 45.0

    def __post_init__(self) -> None:
        for field in fields(self):
            try:
                object.__setattr__(self, field.name, plain(getattr(self, field.name)))
            except NotPlain as reason:
                said = expected(str(field.type))
                raise PolicyError(f"{field.name} {reason}; expected {said}") from None
        if self.tune not in (None, "heuristic", "autotune", "cached"):
            raise PolicyError(
                f"tune={self.tune!r} is unknown; expected 'heuristic', 'autotune' or 'cached'"
            )
        for name in ("allow_tf32", "kernels"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, bool)):
                raise PolicyError(f"{name}={value!r}; expected True, False or None")
        if not isinstance(self.deterministic, bool):
            raise PolicyError(f"deterministic={self.deterministic!r}; expected True or False")
        limit = self.workspace_limit
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise PolicyError(
                f"workspace_limit={limit!r}; expected a number of bytes >= 0, or None"
            )
        if self.fallback not in ("partition", "error"):
            raise PolicyError(
                f"fallback={self.fallback!r} is unknown; expected 'partition' or 'error'"
            )
        if self.verify not in (None, "isolated", "inprocess", "off"):
            raise PolicyError(
                f"verify={self.verify!r} is unknown; expected 'isolated', 'inprocess' or 'off'"
            )
        names = self.exclude_engines
        if not isinstance(names, (tuple, list)) or not all(
            isinstance(name, str) and _ENGINE.search(name) for name in names
        ):
            raise PolicyError(f"exclude_engines={names!r}; expected names like ('eng8',)")
        object.__setattr__(self, "exclude_engines", tuple(sorted(set(names))))
        most = self.max_candidates
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise PolicyError(f"max_candidates={most!r}; expected a whole number >= 1")
        for name in ("budget_s", "total_s"):
            budget = getattr(self, name)
            if (
                isinstance(budget, bool)
                or not isinstance(budget, (int, float))
                or not 0 <= budget < 1e9
            ):
                raise PolicyError(f"{name}={budget!r}; expected seconds >= 0")


def check_options(names: Iterable[str]) -> None:
    """Raise :class:`PolicyError` for names that are no fields of a policy."""
    known = [field.name for field in fields(Policy)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PolicyError(f"unknown option {', '.join(unknown)}; a policy has {', '.join(known)}")


def with_options(policy: Policy | None, options: Mapping[str, Any]) -> Policy:
    """Return ``policy``, by default one of defaults, with fields that are given as keywords.

    Raises :class:`PolicyError` for what is no policy, no field or no value of a field.
    """
    if not (policy is None or isinstance(policy, Policy)):
        raise PolicyError(f"policy {is_a(policy)}; expected a cudnngraph.Policy or None")
    check_options(options)
    return replace(policy or Policy(), **options)


class PolicyOptions(TypedDict, total=False):
    """The fields of :class:`Policy` as keywords, for type checkers; each is described there."""

    tune: Tune | None
    allow_tf32: bool | None
    deterministic: bool
    workspace_limit: int | None
    fallback: Fallback
    kernels: bool | None
    exclude_engines: Sequence[str]
    verify: Verify | None
    max_candidates: int
    budget_s: float
    total_s: float


# What says how plans are looked for, and changes nothing about those that may be found.
SEARCH_FIELDS = frozenset({"tune", "verify", "max_candidates", "budget_s", "total_s"})
