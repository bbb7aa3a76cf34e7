"""A compiled graph: check tensors against it, run it, explain it."""

# mypy: disable-error-code="no-any-return"
# What a graph returns is known when it runs.
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch.autograd import forward_ad

from ..cache import lookup
from ..device.allocation import strided_copy
from ..device.rules import Values
from ..errors import BindError, Problem
from ..ir.canonical import canonical_tensor_names
from ..ir.key import Key
from ..ir.spec import ALIGNMENT_BYTES, GraphSpec, once, print_spec
from ..ops.table import is_default
from ..policy import Policy
from ..select.decision import Decision, StepPlan
from . import fast_call
from .bound import BoundCall, CapturedCall
from .checks import fit, neighbours, overlap, tensor_problems
from .copies import Compiled
from .process import PROCESS
from .program import Program
from .results import result_class

Over = tuple[tuple[int, int], ...]


def transforming() -> bool:
    """Whether a function transform of torch is at work, or forward-mode differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Calls(threading.local):
    """The short ways to call an executable, of this thread; None where there is none."""

    def __init__(self) -> None:
        self.made: dict[tuple[bool, Over], fast_call.Call | None] = {}


# What a call returns: one tensor, or a named tuple of them. Who declared the graph knows which, and
# may say so: ``exe: Executable[torch.Tensor] = graph.compile()``.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R = TypeVar("R", covariant=True, default=Any)
else:
    from typing import TypeVar

    R = TypeVar("R", covariant=True)


class Executable(Compiled, Generic[R]):
    """A compiled graph: call it with tensors, let it write into yours, or bind them once.

    ``spec`` is the graph, ``device`` where it runs, ``key`` what its plans are cached by,
    ``policy`` what they were chosen by. May be used from several threads and on any stream.
    """

    def __init__(
        self, spec: GraphSpec, device: torch.device, policy: Policy, key: Key, program: Program
    ) -> None:
        self.spec = spec
        self.device = device
        self.policy = policy
        self.key = key
        self._program = program
        self._names = canonical_tensor_names(spec)
        self._result: Any = None
        if len(spec.outputs) > 1:  # making a class takes 0.3 ms
            self._result = once(spec, "result", result_class, f"{spec.name}_result", spec.outputs)
        forms = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
        self._forms = tuple((form.shape, form.stride, form.dtype) for form in forms)
        self._bytes = tuple(form.extent * form.dtype.itemsize for form in forms)
        self._input_forms = self._forms[: len(spec.inputs)]
        self._output_forms = self._forms[len(spec.inputs) :]
        mine = {self._names[name]: at for at, name in enumerate((*spec.inputs, *spec.outputs))}
        order = [mine[name] for name in (*program.spec.inputs, *program.spec.outputs)]
        self._order = None if order == sorted(order) else tuple(order)
        self._in_place = program.may_write_over()
        self._calls = _Calls()

    # -- running -------------------------------------------------------------------------------

    def __call__(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> R:
        """Run on inputs given by name, or in the order of declaration; allocate the outputs.

        Returns the output, or a named tuple of them when there are several. Raises
        :class:`BindError` with every mistake.
        """
        if transforming():
            return self._transformed(args, tensors)
        if not tensors:
            result = self.again(args)
            if result is not None:
                return result
        ordered = self._ordered(args, tensors, self.spec.inputs)
        if ordered is None:
            return self.call(self._checked(args, tensors))
        return self.call(ordered, checked=False)

    def _transformed(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
        from .transforms import Transformed

        made = Transformed(self.spec, self.device, self.policy, trains=False)
        results = made(self.fitting(args, tensors))
        return results[0] if len(results) == 1 else self._result(*results)

    def fitting(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> list[torch.Tensor]:
        """The inputs in order, of any strides. Raises :class:`BindError` with every mistake."""
        problems: list[Problem] = []
        given = self._by_name(args, tensors, self.spec.inputs, problems)
        for name in self.spec.inputs:
            form, tensor = self.spec.tensors[name], given.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                form = replace(form, stride=tensor.stride())
            if name in given:
                problems += tensor_problems(form, tensor, self.device, aligned=False)
        if problems:
            raise BindError(self.spec.name, problems)
        return [given[name] for name in self.spec.inputs]

    def call(
        self, tensors: Sequence[torch.Tensor], *, checked: bool = True, over: Over = ()
    ) -> Any:
        """Like a call, on inputs in order, that are known to fit where ``checked`` says so.

        With ``over``, of :meth:`outputs_for`, the first output alone is returned.
        """
        results = self.outputs_for(tensors, checked=checked, over=over)
        return results[0] if over or len(results) == 1 else self._result(*results)

    def _checked(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> list[torch.Tensor]:
        problems: list[Problem] = []
        given = self._by_name(args, tensors, self.spec.inputs, problems)
        self._check(given, self.spec.inputs, problems, aligned=False)
        if problems:
            raise BindError(self.spec.name, problems)
        return [given[name] for name in self.spec.inputs]

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors, in the order of the inputs, are exactly as declared: the quick check.

        One that is not may still be accepted, or is told what is wrong with it, by a call.
        """
        return fit(tensors, self._input_forms, self.device)

    def outputs_for(
        self, tensors: Sequence[torch.Tensor], *, checked: bool = True, over: Over = ()
    ) -> list[torch.Tensor]:
        """The outputs in order, newly allocated, for inputs in order; see :meth:`call`.

        ``over`` has pairs of an output and an input of the same form: running statistics, which
        the output overwrites in place.
        """
        results = self._directly(tensors, checked, over)
        if results is not None:
            return results
        if not checked and not self.fits(tensors):
            tensors = self._checked(tensors, {})
        device, program = self.device, self._program
        values, starts = list(tensors), []
        if program.uses_cudnn:
            starts = [tensor.data_ptr() for tensor in values]
            for at, start in enumerate(starts):
                if start % ALIGNMENT_BYTES or values[at].is_neg():  # a plan reads memory
                    values[at] = strided_copy(values[at])
                    starts[at] = values[at].data_ptr()
        if over:
            places = dict(over)
            outputs = [
                values[places[at]]
                if at in places
                else torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for at, (shape, stride, dtype) in enumerate(self._output_forms)
            ]
        else:
            outputs = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype in self._output_forms
            ]
        values += outputs
        if starts:
            starts += [tensor.data_ptr() for tensor in outputs]
        self._run_program(values, starts)
        for output, at in over:
            if outputs[output] is not tensors[at]:  # that was a copy at an aligned address
                tensors[at].copy_(outputs[output])
        return outputs

    def stepwise(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs in order for inputs in order, which are known to fit. ``tensors`` is emptied,
        and each is let go behind the step that reads it last: :class:`~.stepwise.Stepwise`."""
        return self._program.stepwise.run(tensors, self._order)

    def outputs_if_fit(self, tensors: Sequence[Any], over: Over = ()) -> list[torch.Tensor] | None:
        """:meth:`outputs_for` inputs in order; None if one is not exactly as declared."""
        results = self._directly(tensors, False, over)
        if results is None and self.fits(tensors):
            return self.outputs_for(tensors, over=over)
        return results

    def again(self, tensors: Sequence[Any], over: Over = ()) -> Any:
        """:meth:`call` for inputs in order; None if one is not exactly as declared."""
        results = self.outputs_if_fit(tensors, over)
        if results is None:
            return None
        return results[0] if over or len(results) == 1 else self._result(*results)

    def _directly(
        self, tensors: Sequence[Any], checked: bool, over: Over
    ) -> list[torch.Tensor] | None:
        """The outputs by the short way; None where the long one has to be taken."""
        made, key = self._calls.made, (checked, over)
        if key in made:
            call = made[key]
            return None if call is None else call(tensors)
        program = self._program
        if (
            program.uses_cudnn
            and program.runs_here
            and not torch.cuda.is_current_stream_capturing()
        ):
            steps = program.direct_steps(self._order)
            made[key] = None
            if steps is not None:
                forms, slots = (self._input_forms, self._output_forms), PROCESS.workspace.slots
                made[key] = fast_call.build_call(
                    steps, *forms, over, self.device, slots, checked=checked
                )
        elif not program.uses_cudnn:
            made[key] = None
        return None

    def run(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> None:
        """Run on inputs and into outputs, all given (by name, or inputs then outputs in order).

        Allocates no device memory once the workspace has grown to what the plans need; a torch step
        does allocate. Raises :class:`BindError` with every mistake.
        """
        names = (*self.spec.inputs, *self.spec.outputs)
        values = self._ordered(args, tensors, names)
        if values is None or not fit(values, self._forms, self.device) or self._touch(values):
            given = self._all(args, tensors)
            values = [given[name] for name in names]
        uses_cudnn = self._program.uses_cudnn
        self._run_program(values, [tensor.data_ptr() for tensor in values] if uses_cudnn else [])

    def _run_program(self, values: Sequence[torch.Tensor], starts: list[int]) -> None:
        """Run on the tensors of the graph, in order, and their addresses."""
        order = self._order
        if order is not None:
            values = [values[at] for at in order]
            starts = [starts[at] for at in order] if starts else starts
        self._program.run(values, starts)

    def bind(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> BoundCall:
        """Check inputs and outputs once; the result is called with nothing, as often as wanted.

        The tensors' memory must stay where it is; the result keeps the tensors alive.
        """
        given = self._all(args, tensors)
        return BoundCall(
            self._program, {self._names[name]: tensor for name, tensor in given.items()}
        )

    def capture(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> CapturedCall:
        """:meth:`bind`, and the call recorded in a CUDA graph: the result replays it.

        It runs once for that, so the outputs are written. The graph has workspace of its own, and
        lets go of that and of its plans when the result is gone. On a CPU a replay is a call.

        Raises :class:`CaptureError` while another graph is being captured: what ``bind`` gives may
        be a part of that one.
        """
        return CapturedCall(self.bind(*args, **tensors), self.device)

    # -- checks --------------------------------------------------------------------------------

    def _ordered(
        self, args: tuple[Any, ...], tensors: Mapping[str, Any], names: tuple[str, ...]
    ) -> Sequence[Any] | None:
        """As many tensors as ``names``, in their order; None where that takes a closer look."""
        if not tensors:
            return args if len(args) == len(names) else None
        if args or len(tensors) != len(names):
            return None
        try:
            return [tensors[name] for name in names]
        except KeyError:
            return None

    def _touch(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether an output may overlap anything, requires grad, a pointer is not aligned, or
        memory holds the negatives of a tensor's numbers."""
        starts = [tensor.data_ptr() for tensor in values]
        if self._program.uses_cudnn and (
            any(start % ALIGNMENT_BYTES for start in starts) or any(t.is_neg() for t in values)
        ):
            return True
        many = len(self.spec.inputs)
        spans = list(zip(starts, self._bytes, strict=True))
        for at, (start, size) in enumerate(spans[many:], many):
            if values[at].requires_grad:
                return True
            for other, more in spans[:at]:
                if start < other + more and other < start + size:
                    return True
        return False

    def _by_name(
        self,
        args: Sequence[Any],
        tensors: Mapping[str, Any],
        names: Sequence[str],
        problems: list[Problem],
    ) -> dict[str, Any]:
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names):
            problems.append(
                Problem(
                    "call",
                    f"{len(args)} tensors by position",
                    f"at most {len(names)}: {', '.join(names)}",
                )
            )
        for name, tensor in tensors.items():
            if name not in names:
                problems.append(
                    Problem(
                        f"tensor '{name}'", "is not of this graph", f"one of {', '.join(names)}"
                    )
                )
            elif name in given:
                problems.append(
                    Problem(f"tensor '{name}'", "is given twice", "by position or by name")
                )
            else:
                given[name] = tensor
        for name in names:
            if name not in given:
                kind = "output" if name in self.spec.outputs else "input"
                problems.append(
                    Problem(f"{kind} '{name}'", "is missing", str(self.spec.tensors[name]))
                )
        return given

    def _check(
        self,
        given: Mapping[str, Any],
        names: Sequence[str],
        problems: list[Problem],
        *,
        aligned: bool,
    ) -> None:
        for name in names:
            if name in given:
                problems += tensor_problems(
                    self.spec.tensors[name], given[name], self.device, aligned
                )

    def _all(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        problems: list[Problem] = []
        names = (*self.spec.inputs, *self.spec.outputs)
        given = self._by_name(args, tensors, names, problems)
        self._check(given, names, problems, aligned=self._program.uses_cudnn)
        if not problems:
            problems += self._unsafe_outputs(given)
        if problems:
            raise BindError(self.spec.name, problems)
        return given

    def _unsafe_outputs(self, given: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
        near = neighbours(given)
        for position, name in enumerate(self.spec.outputs):
            output = given[name]
            if output.requires_grad:
                yield Problem(
                    f"output '{name}'", "requires grad", "a tensor that does not", "detach() it"
                )
            for other in self.spec.outputs[:position]:
                if other in near[name] and overlap(output, given[other]):
                    yield Problem(
                        f"output '{name}'", f"overlaps output '{other}'", "memory of its own"
                    )
            for source in self.spec.inputs:
                tensor = given[source]
                if source not in near[name] or not overlap(output, tensor):
                    continue
                same = (output.data_ptr(), output.shape, output.stride(), output.dtype)
                pair = (self._names[name], self._names[source])
                if pair in self._in_place and same == (
                    tensor.data_ptr(),
                    tensor.shape,
                    tensor.stride(),
                    tensor.dtype,
                ):
                    continue
                steps = len(self._program.steps)
                later = f"; of this one's {steps} steps a later one reads it" if steps > 1 else ""
                yield Problem(
                    f"output '{name}'",
                    f"overlaps input '{source}'",
                    "memory of its own",
                    "only a graph of pointwise ops may write over an input, of the same stride, "
                    f"when it is read no more{later}",
                )

    # -- inspection ----------------------------------------------------------------------------

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a run borrows: intermediates between steps and the plans' scratch."""
        return self._program.scratch_bytes

    @property
    def tier(self) -> str:
        """Source of the plans: "built", "disk, serialized", "memory, replayed", "reference" …"""
        return self._program.tier

    @property
    def in_tf32(self) -> bool:
        """Whether products of float32 may run in TF32: allowed, and on a GPU."""
        return bool(self.policy.allow_tf32) and self.device.type == "cuda"

    @property
    def steps(self) -> tuple[StepPlan, ...]:
        """The steps in order, under this graph's own names."""
        back = {canonical: name for name, canonical in self._names.items()}
        return tuple(replace(step, spec=step.spec.rename(back)) for step in self._program.steps)

    def explain(self) -> str:
        """The graph, its steps with the plan of each, and why other candidates lost."""
        lines = [print_spec(self.spec, is_default), "", f"device {self.device}, key {self.key}"]
        if self.device.type == "cuda":
            lines[-1] += f", plans from: {self.tier}"
        for number, step in enumerate(self.steps, 1):
            plan = "torch" if step.choice is None else f"cuDNN {step.choice}"
            if self.device.type == "cpu":
                plan = "reference"
            lines.append(f"step {number}: {' → '.join(node.op for node in step.spec.nodes)}")
            lines.append(f"  plan: {plan}, workspace {step.workspace_bytes} bytes")
            if step.choice is not None:
                lines.append(f"  {_checked(step)}")
            lines += [f"  {line}" for line in _decided(step.decisions)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Executable {self.spec.name} on {self.device}, {len(self._program.steps)} step(s)>"

    def _repr_html_(self) -> str:
        """The steps as a notebook shows them."""
        return f"<pre>{escape(self.explain())}</pre>"


def _checked(step: StepPlan) -> str:
    """Whether a plan was run on random data before its first use, in a line."""
    if step.verified is None:
        return "not checked: verify='off'"
    by = f"{step.verified.gpu}, cuDNN {step.verified.cudnn}"
    if step.verified.error is None:
        return f"ran on random data on {by}; there was no memory to compare its results"
    return f"checked on {by}: off by {step.verified.error:.1e} from float64 on random data"


def _decided(decisions: Sequence[Decision]) -> Iterator[str]:
    """A line for each thing decided; what was left alone for one reason shares a line."""
    alone = Counter(d.reason for d in decisions if d.choice and d.reason.startswith("not tried"))
    for decision in decisions:
        if decision.choice is not None and decision.reason in alone:
            continue
        mark = "taken" if decision.accepted else "rejected"
        took = "" if decision.time_us is None else f" {decision.time_us:.1f} µs,"
        yield f"{mark}: {decision.subject}:{took} {decision.reason}"
    for reason, count in alone.items():
        yield f"{count} more plans {reason}"


def import_of(executable: Executable[Any]) -> Values | None:
    """The thresholds that the import of a graph's model is to follow; None if nobody measured."""
    return executable._program.imported


def note_import(executable: Executable[Any], values: Values) -> None:
    """Keep which thresholds the import of a graph's model is to follow."""
    lookup.note_import(executable.key, executable.device.index, values)
    executable._program.imported = values
