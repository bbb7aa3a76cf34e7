"""Plans on trial: a step on random data, timed, and checked against the reference executor.

A check runs a plan once between guard bytes, on a stream that lags. It fails when the result is off
(also because some of the work was done on another stream), when an element was not written, or when
the plan wrote where it has no business: around its outputs and its workspace, in the gaps of a
strided output, or over its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..backend import handles
from ..backend.lowering.driver import first_line
from ..device import tf32
from ..device.allocation import for_want_of_memory
from ..executor import reference, torch_steps
from ..ir.spec import GraphSpec, Node, TensorSpec, round_up
from ..ops.table import OPS, by_port, tensor_at
from ..partition.memory import SUBALLOCATION_BYTES
from ..policy import Policy
from .dropout_probe import attention, has_seeded_dropout, recover_mask, with_mask
from .inputs import LARGE_SCORES, random_inputs
from .tolerance import (
    STRICT_TOLERANCE,
    STRICT_TOLERANCE_OF_SUMS,
    TOLERANCE,
    TORCH_FACTOR,
    distance,
    flattens,
    is_pointwise,
    is_strict,
    multiplies_fp8,
    relative_error,
    rounding_of_sums,
    tolerance,
)

GUARD_BYTES = 4096
_GUARD, _UNWRITTEN = 0xA5, 0xFF  # 0xFF… is NaN in every floating dtype
_LAG_CYCLES = 1_000_000  # about 0.5 ms, in which a plan is issued
_POWERS = (-4, -2, 0, 2, 4, 6)  # of two: the magnitudes at which functions of numbers are tried
_LARGE_POWER = 8  # and that at which functions are tried that flatten out;
_LARGE_OPERANDS = 5  # that of both operands of a product in front of them


class Runnable(Protocol):
    """A plan as a trial sees it."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of one run."""

    def pointers(self, tensors: Sequence[int]) -> object:
        """The form in which it takes the pointers of inputs and outputs."""

    def execute(self, pointers: object, workspace: int, handle: object) -> None:
        """Launch on the handle's stream."""


@contextmanager
def _delayed_stream(device: torch.device) -> Iterator[None]:
    """On a stream that lags behind every other: what a plan does elsewhere comes too early (engine
    0 of cuDNN 9.19 does, in the gradient of an instance norm)."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            cuda._sleep(_LAG_CYCLES)
            yield
    finally:  # what has been put on it writes to memory that is about to be given away
        stream.synchronize()


class _Redzone:
    """Memory with guard bytes on both sides."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        total = 2 * GUARD_BYTES + round_up(size_bytes, SUBALLOCATION_BYTES)
        self.block = torch.full((total,), _GUARD, dtype=torch.uint8, device=device)
        self.inner = self.block[GUARD_BYTES : GUARD_BYTES + size_bytes]
        self.clear()

    def clear(self) -> None:
        """Leave nothing in the memory that a plan is to write."""
        self.inner.fill_(_UNWRITTEN)

    def view(self, spec: TensorSpec) -> torch.Tensor:
        """The memory as a tensor."""
        return self.inner.view(spec.dtype).as_strided(spec.shape, spec.stride)

    def touched_outside(self, spec: TensorSpec | None) -> bool:
        """Whether bytes outside changed: the guards, and gaps between a tensor's elements."""
        wanted = torch.full_like(self.block, _GUARD)
        inner = wanted[GUARD_BYTES : GUARD_BYTES + self.inner.numel()]
        if spec is None:
            inner.copy_(self.inner)
        else:
            inner.fill_(_UNWRITTEN)
            inner.view(spec.dtype).as_strided(spec.shape, spec.stride).copy_(self.view(spec))
        return not torch.equal(wanted, self.block)


@dataclass
class _Data:
    """Inputs, and what the reference and torch make of them, once they are asked."""

    inputs: list[torch.Tensor]
    exact: list[torch.Tensor] | None = None
    in_float32: list[torch.Tensor] | None = None
    as_declared: list[torch.Tensor] | None = None


class StepTrial:
    """Random data for one step on one GPU, to run plans on. Use it with that device current."""

    def __init__(self, spec: GraphSpec, policy: Policy, device: torch.device) -> None:
        self.spec = spec
        self._policy = policy
        self._device = device
        self._strict = is_strict(spec, policy)
        # Functions of single numbers are off in some ranges and not in others.
        self._wide = self._strict and is_pointwise(spec)
        self._data = _Data(random_inputs(spec, device))
        self._outputs = [spec.tensors[name].empty(device) for name in spec.outputs]
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._keep: torch.Tensor | None = None  # what the plan at hand does not drop
        self.error = 0.0  # the largest relative error of the results of the last check

    @property
    def _inputs(self) -> list[torch.Tensor]:
        return self._data.inputs

    def launch(self, plan: Runnable | None) -> Callable[[], None]:
        """A call that runs ``plan`` once on the current stream; for None the torch step."""
        if plan is None:
            return torch_steps.launcher(
                self.spec, self._inputs, self._outputs, allow_tf32=bool(self._policy.allow_tf32)
            )
        if self._workspace.numel() < plan.workspace_bytes:
            self._workspace = self._workspace.new_empty(plan.workspace_bytes)
        return launcher(plan, (*self._inputs, *self._outputs), self._workspace, self._device)

    def why_wrong(self, plan: Runnable) -> str | None:
        """The reason why ``plan`` is wrong; None if it is right."""
        self.error = 0.0
        if has_seeded_dropout(self.spec):
            why = self._learn_what_is_dropped(plan)
            if why is not None:
                return why
        first = self._checked_run(plan)
        if isinstance(first, str):
            return first
        if self._wide:
            why = self._why_wrong_at_all_magnitudes(plan)
            if why is not None:
                return why
        elif flattens(self.spec):
            why = self._why_not_finite(plan)
            if why is not None:
                return why
        if self._policy.deterministic:
            second = self._checked_run(plan)
            if isinstance(second, str):
                return second
            if not all(map(_same_bits, first, second)):
                return "gives other bits when it runs again"
        return None

    def _why_wrong_at_all_magnitudes(self, plan: Runnable) -> str | None:
        usual = self._data
        try:
            for seed, power in enumerate(_POWERS, start=1):  # not kept: data may be large
                self._data = _Data(random_inputs(self.spec, self._device, seed, power=power))
                made = self._checked_run(plan)
                if isinstance(made, str):
                    return f"{made}, of numbers of about {2.0**power:g}"
        finally:
            self._data = usual
        return None

    def _why_not_finite(self, plan: Runnable) -> str | None:
        """Whether large numbers give what is not finite where torch's results are.

        cuDNN makes tanh and softplus of exponentials, which overflow.
        """
        power = _LARGE_POWER if is_pointwise(self.spec) else _LARGE_OPERANDS
        inputs = random_inputs(self.spec, self._device, 1, power=power)
        wanted = reference.run(self.spec, inputs)
        try:
            made = self._run(plan, inputs)
        except RuntimeError as error:
            return _why_not_run(error, self._device)
        for out, want in zip(made, wanted, strict=True):
            if out.dtype.is_floating_point and out.dtype.itemsize > 1:
                there = want.to(out.device).abs() < torch.finfo(out.dtype).max / 2
                if not bool(out[there].isfinite().all()):
                    return f"not finite where torch is, of numbers of about {2.0**power:g}"
        return None

    def _learn_what_is_dropped(self, plan: Runnable) -> str | None:
        """Find the mask that ``plan`` draws, for the comparison; what is wrong with it, or None."""
        if attention(self.spec) is None:
            return "drops by a seed in several places, which cannot be checked"
        try:
            keep = recover_mask(self.spec, self._inputs, partial(self._run, plan))
        except RuntimeError as error:
            return _why_not_run(error, self._device)
        self._keep, self._data = keep, _Data(self._data.inputs)
        return None

    def _run(self, plan: Runnable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # As they lie: torch.empty_like leaves no gaps.
        outputs = [self.spec.tensors[name].empty(self._device) for name in self.spec.outputs]
        scratch = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=self._device)
        launcher(plan, (*inputs, *outputs), scratch, self._device)()
        torch.cuda.synchronize(self._device)
        return outputs

    def _checked_run(self, plan: Runnable) -> list[torch.Tensor] | str:
        declared = [self.spec.tensors[name] for name in self.spec.outputs]
        outputs = [_Redzone(t.extent * t.dtype.itemsize, self._device) for t in declared]
        scratch = _Redzone(plan.workspace_bytes, self._device)
        before = [tensor.clone() for tensor in self._inputs]
        places = [tensor.data_ptr() for tensor in self._inputs]
        pointers = plan.pointers([*places, *(each.inner.data_ptr() for each in outputs)])
        try:
            with _delayed_stream(self._device):
                for each in (*outputs, scratch):
                    each.clear()
                handle = handles.handle_on_current_stream(self._device.index)
                plan.execute(pointers, scratch.inner.data_ptr(), handle)
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            return _why_not_run(error, self._device)
        for spec, guarded in zip(declared, outputs, strict=True):
            if guarded.touched_outside(spec):
                return f"writes outside of its output '{spec.name}'"
        if scratch.touched_outside(None):
            return f"writes outside of its workspace of {plan.workspace_bytes} bytes"
        if not all(map(_same_bits, before, self._inputs)):
            return "writes over its inputs"
        made = [guarded.view(spec) for spec, guarded in zip(declared, outputs, strict=True)]
        return self._why_off(made) or made

    def _why_off(self, made: Sequence[torch.Tensor]) -> str | None:
        allowed, fp8 = bool(self._policy.allow_tf32), multiplies_fp8(self.spec)
        for number, (spec, out, want) in enumerate(self._compared(made)):
            in_float32 = out.dtype == torch.float32
            bound = tolerance(out.dtype, tf32=allowed, fp8=fp8)
            if in_float32 and self._strict:
                bound = STRICT_TOLERANCE
            some = in_float32 and self._wide  # of the elements alone: they may be too large
            error = math.inf if some else relative_error(out, want)
            held = self._held(number, out) if error == math.inf else None
            if held is not None:
                out, want = out[held], want.to(out.device)[held]
                error = relative_error(out, want)
            self.error = max(self.error, error)
            if in_float32 and not error <= bound:
                bound = max(bound, self._bound_by_torch(number, out, want, held))
            if not error <= bound:
                return f"wrong: '{spec.name}' is off by {error:.2g}, at most {bound:.2g} is right"
        return None

    def _held(self, number: int, out: torch.Tensor) -> torch.Tensor | None:
        """Which elements of a result torch makes in float32, with nothing on the way that float32
        cannot hold, and the result's dtype holds; None where that is not compared."""
        if not out.dtype.is_floating_point or _corner_heads(self.spec) is not None:
            return None
        return self._in_float32()[number].abs() <= torch.finfo(out.dtype).max

    def _bound_by_torch(
        self, number: int, out: torch.Tensor, want: torch.Tensor, held: torch.Tensor | None
    ) -> float:
        """The largest error of a float32 result by what torch's own has, of the elements ``held``.

        Functions of large sums, as exp, make much of the rounding of these; and statistics of what
        has 16 bits are off by the rounding of that.
        """
        if _corner_heads(self.spec) is not None:
            return TOLERANCE[torch.float32] if self._strict else 0.0
        theirs = self._as_declared()[number]
        off, size = distance(theirs if held is None else theirs[held], want)
        if not size:  # there is nothing that an error may be a part of
            return math.inf if distance(out, want)[0] <= TORCH_FACTOR * off < math.inf else 0.0
        bound = TORCH_FACTOR * off / size if off < math.inf else 0.0
        if is_pointwise(self.spec) or not self._strict:
            return bound
        return max(bound, STRICT_TOLERANCE_OF_SUMS, rounding_of_sums(self.spec))

    def _in_float32(self) -> list[torch.Tensor]:
        """Results of torch on the same data in float32."""
        if self._data.in_float32 is None:
            self._data.in_float32 = self._by_torch(torch.float32)
        return self._data.in_float32

    def _as_declared(self) -> list[torch.Tensor]:
        """Results of torch with all between the ops in the dtypes that it is declared in."""
        kinds = {t.dtype for t in self.spec.tensors.values() if t.dtype.is_floating_point}
        if kinds == {torch.float32}:
            return self._in_float32()
        if self._data.as_declared is None:
            self._data.as_declared = self._by_torch(None)
        return self._data.as_declared

    def _by_torch(self, dtype: torch.dtype | None) -> list[torch.Tensor]:
        with tf32.scope(False):
            return [each.to(self._device) for each in reference.run(*self._whole(), dtype)]

    def _whole(self) -> tuple[GraphSpec, Sequence[torch.Tensor]]:
        """The graph that the reference runs, and its inputs."""
        large = _corner_heads(self.spec) is not None
        if self._keep is not None or (large and attention(self.spec) is not None):
            return with_mask(self.spec, self._inputs, self._keep)
        return self.spec, self._inputs

    def _compared(
        self, made: Sequence[torch.Tensor]
    ) -> list[tuple[TensorSpec, torch.Tensor, torch.Tensor]]:
        """Results beside what the reference says in float64: all of it, or where attention is too
        large for that, what its first and last heads give."""
        declared = [self.spec.tensors[name] for name in self.spec.outputs]
        corners = _corner_heads(self.spec)
        whole, given = self._whole()
        if corners is None:
            if self._data.exact is None:
                self._data.exact = reference.run(whole, given, torch.float64)
            return list(zip(declared, made, self._data.exact, strict=True))
        compared = []
        for batch, head in corners:
            inputs = [
                _corner(whole, name, tensor, batch, head)
                for name, tensor in zip(whole.inputs, given, strict=True)
            ]
            wanted = reference.run(whole, inputs, torch.float64)
            for spec, out, want in zip(declared, made, wanted, strict=True):
                if spec.shape == ():  # the largest of all, not of a corner
                    continue
                compared.append((spec, _corner(self.spec, spec.name, out, batch, head), want))
        return compared


def _corner_heads(spec: GraphSpec) -> list[tuple[int, int]] | None:
    """For an attention whose scores are too many: (batch, head of k) at both ends; else None."""
    nodes = [node for node in spec.nodes if node.op != "constant"]
    if len(nodes) != 1 or not _is_dense_attention(nodes[0]):
        return None
    q, k = (spec.tensors[str(tensor_at(nodes[0], port))] for port in "qk")
    if math.prod(q.shape[:3]) * k.shape[2] <= LARGE_SCORES:
        return None
    return list(dict.fromkeys([(0, 0), (q.shape[0] - 1, k.shape[1] - 1)]))


def _is_dense_attention(node: Node) -> bool:
    row = OPS[node.op]
    elsewhere = row.has("attention_gradient") or row.has("packed") or row.has("paged")
    return row.has("attention") and not elsewhere


def _corner(
    spec: GraphSpec, name: str, tensor: torch.Tensor, batch: int, head: int
) -> torch.Tensor:
    """The part of an operand or result of attention that belongs to one batch and head of k."""
    (node,) = (node for node in spec.nodes if _is_dense_attention(node))
    if tensor.numel() == 1:
        return tensor
    ports, roles = by_port(node), OPS[node.op].roles
    k = spec.tensors[str(ports["k"])]
    repeat = spec.tensors[str(ports["q"])].shape[1] // k.shape[1]
    if name == ports.get("attn_mask"):
        tensor = tensor.view(*(1,) * (4 - tensor.dim()), *tensor.shape)
    if name in {ports[port] for port, role in roles.items() if role == "heads"}:
        return tensor.narrow(0, head * repeat, repeat)
    if tensor.shape[0] > 1:
        tensor = tensor.narrow(0, batch, 1)
    if tensor.dim() < 3 or tensor.shape[1] == 1:
        return tensor
    many = 1 if tensor.shape[1] == k.shape[1] and repeat > 1 else repeat
    return tensor.narrow(1, head * many, many)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))


def _why_not_run(error: RuntimeError, device: torch.device) -> str:
    """What a plan is rejected for that raised. Raises torch.OutOfMemoryError where the GPU had no
    memory left, which is no fault of the plan."""
    if for_want_of_memory(error, device):
        raise torch.OutOfMemoryError(str(error)) from error
    return f"does not run: {first_line(str(error))}"


def launcher(
    plan: Runnable, tensors: Sequence[torch.Tensor], workspace: torch.Tensor, device: torch.device
) -> Callable[[], None]:
    """Return a function that runs ``plan`` on the current stream; it keeps the tensors alive."""
    kept = tuple(tensors)
    pointers = plan.pointers([tensor.data_ptr() for tensor in kept])

    def run(tensors: Sequence[torch.Tensor] = kept) -> None:
        plan.execute(pointers, workspace.data_ptr(), handles.handle_on_current_stream(device.index))

    return run
