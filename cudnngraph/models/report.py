"""The report of a fused model, or of a graph of torch.compile: its steps, and what runs each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from ..backend.env import EnvKey
from ..cache.codec import to_record
from ..device import files
from ..device.rules import Values
from ..device.values import told
from ..errors import PolicyError
from ..explain.draw import svg
from ..runtime.executable import Executable
from ..select.decision import ALIAS, Selection, StepPlan
from .convert import Imported

COLUMNS = ("step", "runs on", "ops", "µs", "why")


@dataclass(frozen=True, repr=False)
class Report:
    """The report of a model, or of a graph of torch.compile, for one form of its inputs.

    ``str()`` of it is a table.

    ``steps`` run in order, ``tier`` says what served their plans. ``folded`` batch norms are in
    weights. ``opaque`` are ops that stay torch's own, by (name, line of the model). ``errors``
    holds, where results were checked, the relative error to float64 of each, and the model's own;
    or, with None in its place, that to the model's results, as of plans that were ``kept``.
    ``refused`` says why a whole graph of torch.compile is left to torch, and is "" of all others.
    ``instead`` are the values that the import followed, as measured, in place of the GPU's
    thresholds.
    """

    model: str
    device: torch.device
    channels_last: bool
    captured: bool
    tier: str
    steps: tuple[StepPlan, ...]
    folded: int
    opaque: tuple[tuple[str, str], ...]
    workspace_bytes: int
    errors: tuple[tuple[float, float | None], ...] = ()
    executable: Executable | None = None
    refused: str = ""
    instead: Values = ()

    @classmethod
    def of(
        cls,
        model: str,
        imported: Imported,
        executable: Executable | None,
        device: torch.device,
        *,
        channels_last: bool,
        captured: bool = False,
        instead: Values = (),
    ) -> Report:
        """The report of what was imported and compiled."""
        return cls(
            model,
            device,
            channels_last,
            captured,
            "" if executable is None else executable.tier,
            () if executable is None else executable.steps,
            imported.folded,
            tuple((each.overload, each.line) for each in imported.opaque),
            0 if executable is None else executable.workspace_bytes,
            executable=executable,
            instead=instead,
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of steps that are cuDNN plans, generated kernels, torch's, views, or the
        reference executor."""
        return Counter(self._kind(step) for step in self.steps)

    @property
    def kept(self) -> bool:
        """Whether the plans are from an earlier run, which has checked them."""
        return self.tier.startswith(("disk", "memory"))

    def _kind(self, step: StepPlan) -> str:
        if step.choice is not None:
            return "kernel" if step.kind == "kernel" else "cuDNN"
        if ALIAS in step.decisions:
            return "view"
        return "reference" if self.device.type == "cpu" else "torch"

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield each step: what runs it, its ops, its time in µs, why it is no cuDNN plan."""
        for step in self.steps:
            kind = self._kind(step)
            ops = [node.op for node in step.spec.nodes if node.op != "constant"]
            shown = " ".join(ops) if len(ops) < 9 else f"{' '.join(ops[:8])} … ({len(ops)} ops)"
            time = "" if step.time_us is None else f"{step.time_us:.1f}"
            reasons = [d.reason for d in step.decisions if not d.accepted]
            yield kind, shown, time, reasons[-1] if kind == "torch" and reasons else ""

    def __repr__(self) -> str:
        return f"<Report of {self._head()}; print it for the steps>"

    def _repr_html_(self) -> str:
        """The report as a notebook shows it, its steps as a table."""
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._numbered())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        above, below = ("<br>".join(map(escape, part)) for part in (self._above(), self._below()))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{above}</p>{table}" + (f"<p>{below}</p>" if below else "")

    def _head(self) -> str:
        if self.refused:
            return f"{self.model} on {self.device}: left to torch, {self.refused}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        steps = f"{len(self.steps)} steps" + (f" ({kinds})" if kinds else "")
        return f"{self.model} on {self.device}: {steps}"

    def _above(self) -> list[str]:
        """The lines before the steps."""
        if self.refused:
            return [self._head()]
        layout = "channels_last" if self.channels_last else "as given"
        head = f"{self._head()}, images {layout}, {self.folded} batch norms folded"
        lines = [head, f"plans from: {self.tier}, workspace {self.workspace_bytes} bytes"]
        if self.instead:
            lines.insert(1, f"imported by what was measured: {told(self.instead)}")
        if self.captured:
            lines[-1] += ", in a CUDA graph"
        for number, (error, own) in enumerate(self.errors):
            beside = "" if own is None else f", the model's own {own:.1e}"
            lines.append(f"result {number}: relative error {error:.1e}{beside}")
        return lines

    def _below(self) -> list[str]:
        """The lines after the steps."""
        opaque = dict.fromkeys(self.opaque)
        return [f"torch's own: {name}" + (f", {line}" if line else "") for name, line in opaque]

    def __str__(self) -> str:
        if self.refused:
            return self._head()
        rows = [COLUMNS, *self._numbered()]
        widths = [max(len(row[place]) for row in rows) for place in range(4)]
        table = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*self._above(), *table, *self._below()])

    def _numbered(self) -> Iterator[tuple[str, ...]]:
        for number, row in enumerate(self.rows(), 1):
            yield (str(number), *row)

    def svg(self) -> str:
        """The steps as a picture."""
        if self.executable is None:
            raise PolicyError("nothing of the model is left to run, so there is nothing to draw")
        exe = self.executable
        selection = Selection(self.steps, (None,) * len(self.steps))
        environment = EnvKey(0, "", str(self.device), (0, 0), 0, 0)
        return svg(to_record(exe.spec, exe.key, environment, exe.policy, selection))

    def save(self, path: str | Path) -> None:
        """Write the picture to a file, as SVG."""
        files.write(path, self.svg())


class Reporting(Protocol):
    """What has reports."""

    def reports(self) -> Iterable[Report]:
        """The reports there are so far."""


_COMPILED: WeakValueDictionary[int, Reporting] = WeakValueDictionary()
_numbers = count()


def watch(compiled: Reporting) -> None:
    """Let :func:`reports` tell of a graph as long as it lives."""
    _COMPILED[next(_numbers)] = compiled


def forget() -> None:
    """Let :func:`reports` tell of nothing that was compiled before, though some of it may live."""
    _COMPILED.clear()


def reports() -> list[Report]:
    """The reports of what ``torch.compile(model, backend="cudnngraph")`` has compiled so far.

    There is one for each graph, forward or backward, and each form of its inputs, in the order in
    which torch found the graphs; those that are left to torch say why. ``torch.compiler.reset()``
    forgets them.
    """
    return [report for _, each in sorted(_COMPILED.items()) for report in each.reports()]
