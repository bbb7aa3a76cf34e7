"""Every error of the package: one base class, one class per kind of mistake.

Errors about a graph or about bound tensors carry a tuple of :class:`Problem`, each of which names
the op, the tensor, what was expected, what came and the mend. All problems of one graph, or of one
call, are reported in a single raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One mistake, in the words that the reader needs to mend it.

    ``where`` names the op or the call ("conv 'c1'"), ``what`` says what is wrong with which
    tensor or attribute, ``expected`` and ``mend`` finish the sentence when they are known.
    """

    where: str
    what: str
    expected: str = ""
    mend: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.mend:
            text += f" ({self.mend})"
        return text


class CudnnGraphError(Exception):
    """Base of every error that this package raises on purpose.

    Can be copied and pickled with all its fields, whatever a class takes to make one: errors cross
    the borders of processes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), *self.args), self.__dict__


def _remade(kind: type[CudnnGraphError], *args: Any) -> CudnnGraphError:
    """An error as its ``args`` say, which holds what else it had when its state is set."""
    return kind.__new__(kind, *args)


class _ProblemsError(CudnnGraphError, ValueError):
    """Carries every :class:`Problem` found, in order."""

    heading = "{count} problem{s}:"

    def __init__(self, subject: str, problems: Iterable[Problem]) -> None:
        self.subject = subject
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = len(self.problems)
        head = self.heading.format(subject=subject, count=count, s="" if count == 1 else "s")
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class GraphError(_ProblemsError):
    """The declared graph is wrong. Raised at ``compile`` or before, with all problems at once."""

    heading = "graph '{subject}' has {count} problem{s}:"


class BindError(_ProblemsError):
    """The tensors given to an executable do not fit the graph it was compiled from."""

    heading = "cannot bind tensors to graph '{subject}', {count} problem{s}:"


class PolicyError(CudnnGraphError, ValueError):
    """A field of :class:`cudnngraph.Policy` has a value that it cannot have."""


class SettingsError(CudnnGraphError, ValueError):
    """An environment variable holds a value that cannot be used."""


class UnkeyableError(CudnnGraphError, TypeError):
    """A value reached the cache key that has no canonical form; such a graph is never cached."""


class BackendUnavailable(CudnnGraphError, RuntimeError):
    """cuDNN, its frontend or the driver cannot be used here; the message says what to install."""


class CaptureError(CudnnGraphError, RuntimeError):
    """Work that may not happen during CUDA stream capture was about to (a build, a growth)."""


class PlanNotCached(CudnnGraphError, LookupError):
    """``tune="cached"`` and no plan in the cache.

    ``differences`` names each component of the graph's key and of the environment in which the
    nearest entry differs, as (component, wanted, stored); it is empty when there is no entry at
    all, or when the entry itself is stale.
    """

    def __init__(
        self,
        subject: str,
        reason: str,
        nearest: str = "",
        differences: Sequence[tuple[str, str | None, str | None]] = (),
    ) -> None:
        self.subject = subject
        self.nearest = nearest
        self.differences = tuple(differences)
        lines = [f"no plan for {subject} in the cache: {reason}"]
        if self.differences:
            lines.append(f"the nearest entry is {nearest[:16]}; it differs in:")
            lines += [
                f"  - {name}: wanted {wanted}, stored {stored}"
                for name, wanted, stored in self.differences
            ]
        super().__init__("\n".join(lines))


class FeatureMissing(CudnnGraphError, NotImplementedError):
    """A request that has no implementation, such as a second derivative."""


class CannotImport(CudnnGraphError, RuntimeError):
    """A model is no single graph; the message names the op and the line of the model."""


class WrongResult(CudnnGraphError, ArithmeticError):
    """A fused model's result is not the model's."""


class PlanFault(CudnnGraphError, RuntimeError):
    """A plan faulted on the GPU in this process, which has lost its CUDA context by that.

    ``subject`` is the step, ``plan`` says which plan of cuDNN's or which generated kernel it was,
    ``engine`` its engine.
    """

    def __init__(self, subject: str, plan: str, engine: int, reason: str) -> None:
        self.subject = subject
        self.plan = plan
        self.engine = engine
        generated = plan.startswith("kernel")
        left_out = "kernels=False" if generated else f'exclude_engines=("eng{engine}",)'
        super().__init__(
            f"{subject} faults on the GPU by its plan, {'a generated' if generated else 'cuDNN'} "
            f"{plan}: {reason}\n"
            "This process has lost its CUDA context: nothing runs on the GPU in it any more. Start "
            "it again. The cache keeps that the plan is not to be taken again; where no cache can "
            f"be written, compile with Policy({left_out})."
        )


class NotSupported(CudnnGraphError, RuntimeError):
    """cuDNN refuses the graph, or the GPU to plan for is none of those that are known.

    ``reasons`` holds one line per distinct reason, ``detail`` the library's own last message.
    ``heading`` is the first line of the message, by default that cuDNN has no plan.
    """

    def __init__(
        self, subject: str, reasons: Sequence[str], detail: str = "", heading: str = ""
    ) -> None:
        self.subject = subject
        self.reasons: tuple[str, ...] = tuple(reasons)
        self.detail = detail
        self.heading = heading or f"cuDNN has no plan for {subject}"
        lines = [self.heading]
        lines += [f"  - {reason}" for reason in self.reasons]
        super().__init__("\n".join(lines))
