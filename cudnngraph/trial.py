"""Plans on trial: a step on random data, timed, and checked against the reference executor.

A check runs a plan once between guard bytes. It fails when the result is off, when an element was
not written, or when the plan wrote where it has no business: around its outputs and its workspace,
in the gaps of a strided output, or over its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from . import eager, reference
from .backend import env
from .backend.lower import first_line
from .ir import GraphSpec, Node, TensorSpec
from .layout import Laid, Layout
from .ops import OPS
from .policy import Policy

# Largest relative error ||out - ref|| / ||ref||: a wrong plan is off by far more.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
TF32_TOLERANCE = 2e-3
GUARD_BYTES = 4096
_GUARD, _UNWRITTEN = 0xA5, 0xFF  # 0xFF… is NaN in every floating dtype
_POSITIVE = {"batch_norm", "div", "log", "pow", "reciprocal", "rsqrt", "sqrt"}
_LARGE_SCORES = 1 << 27  # elements of an attention matrix that the reference may hold


class Runnable(Protocol):
    """What a trial sees of a plan."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of one run."""

    def pointers(self, tensors: Sequence[int]) -> object:
        """The form in which it takes the pointers of inputs and outputs."""

    def execute(self, pointers: object, workspace: int, handle: object) -> None:
        """Launch on the handle's stream."""


def tolerance(dtype: torch.dtype, *, tf32: bool) -> float:
    """The largest relative error that a result of ``dtype`` may have; 0 for whole numbers."""
    if not dtype.is_floating_point:
        return 0.0
    if dtype == torch.float32 and tf32:
        return TF32_TOLERANCE
    return TOLERANCE[dtype]


def relative_error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||``; infinite where one is infinite or NaN and the other is not."""
    wide, ref = out.to(torch.float64), ref64.to(torch.float64)
    finite = ref.isfinite()
    mine, theirs = wide[~finite], ref[~finite]
    if not bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all()):
        return float("inf")
    distance, size = float((wide - ref)[finite].norm()), float(ref[finite].norm())
    if distance == 0.0:
        return 0.0
    return distance / size if size and distance == distance else float("inf")


def random_inputs(spec: GraphSpec, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    """Inputs of the declared strides: floats within (-1, 1), integers 1.

    Floats are within (0.5, 1.5) where an op wants them positive or divides. A boolean mask of
    attention hides nothing, a quarter of its rows and of its keys is padding where it takes
    lengths, and its gradient is given the o and lse that belong to the q, k and v.
    """
    generator = torch.Generator(device).manual_seed(seed)
    ops = {node.op for node in spec.nodes}
    shift = (0.5, 1.0) if ops & _POSITIVE else (-1.0, 2.0)
    made = []
    for declared in (spec.tensors[name] for name in spec.inputs):
        values = torch.rand(declared.shape, generator=generator, device=device)
        if declared.dtype.is_floating_point:
            values = shift[0] + shift[1] * values
        elif declared.dtype == torch.bool and "sdpa" not in ops:
            values = values < 0.5
        else:
            values = torch.ones(declared.shape, device=device)
        made.append(strided(declared, values, device))
    given = dict(zip(spec.inputs, made, strict=True))
    for node in spec.nodes:
        if node.op in ("sdpa", "sdpa_backward"):
            _set_lengths(spec, node, given)
        if node.op == "sdpa_backward":
            _set_results(node, given)
    return made


def _port(node: Node, port: str) -> str | None:
    """The name of the tensor at a port of a node."""
    return node.inputs[OPS[node.op].ports.index(port)]


def _set_lengths(spec: GraphSpec, node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make the lengths of attention three quarters of what they may be at most."""
    for port, whole in (("seq_len_q", "q"), ("seq_len_kv", "k")):
        name, data = str(_port(node, port)), spec.tensors[str(_port(node, whole))]
        if name in given:
            given[name].fill_(-(-3 * data.shape[2] // 4))


def _set_results(node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make o and lse what attention gives for the operands of its gradient, if all are inputs."""
    forward = OPS["sdpa"]
    ports = [_port(node, port) for port in forward.ports]
    if not all(name is None or name in given for name in ports):
        return
    names = (str(_port(node, "o")), str(_port(node, "lse")))
    q, k = given[str(ports[0])], given[str(ports[1])]
    if math.prod(q.shape[:3]) * k.shape[2] > _LARGE_SCORES:  # too much work for data of a trial
        if names[1] in given:
            given[names[1]].fill_(math.log(k.shape[2]) + 1.0)
        return
    operands = [None if name is None else given[name] for name in ports]
    attrs = {name: value for name, value in node.attrs if name != "mask_grad"}
    attrs["return_lse"] = True
    attention = Node("sdpa", node.name, tuple(ports), names, tuple(sorted(attrs.items())))
    for name, made in zip(names, reference.apply(attention, operands, torch.float64), strict=True):
        if name in given and made is not None:
            # cuDNN wants a large number for a row without a key, as grad.py gives it.
            given[name].copy_(torch.where(made == -math.inf, 1e30, made))


def strided(declared: TensorSpec, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` in memory as ``declared`` lays it out; what it repeats is stored once."""
    out = torch.empty_strided(declared.shape, declared.stride, dtype=declared.dtype, device=device)
    core = out
    for dim, stride in enumerate(declared.stride):
        if stride == 0 and declared.shape[dim] > 1:
            core, values = core.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    core.copy_(values)
    return out


class _Guarded:
    """Memory with guard bytes on both sides."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        total = 2 * GUARD_BYTES + -(-size_bytes // 256) * 256
        self.block = torch.full((total,), _GUARD, dtype=torch.uint8, device=device)
        self.inner = self.block[GUARD_BYTES : GUARD_BYTES + size_bytes]
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


class Trial:
    """Random data for one step on one GPU, to run plans on. Use it with that device current."""

    def __init__(self, spec: GraphSpec, policy: Policy, device: torch.device) -> None:
        self.spec = spec
        self._policy = policy
        self._device = device
        self._inputs = random_inputs(spec, device)
        self._outputs = [
            torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=device)
            for t in (spec.tensors[name] for name in spec.outputs)
        ]
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._wanted: list[torch.Tensor] | None = None

    def launch(self, plan: Runnable | None) -> Callable[[], None]:
        """What runs ``plan``, or for None the torch step, once on the current stream."""
        if plan is None:
            return eager.launcher(
                self.spec, self._inputs, self._outputs, allow_tf32=bool(self._policy.allow_tf32)
            )
        if self._workspace.numel() < plan.workspace_bytes:
            self._workspace = self._workspace.new_empty(plan.workspace_bytes)
        return launcher(plan, (*self._inputs, *self._outputs), self._workspace, self._device)

    def why_wrong(self, plan: Runnable) -> str | None:
        """What is wrong with what ``plan`` does, or None."""
        first = self._checked_run(plan)
        if isinstance(first, str):
            return first
        if self._policy.deterministic:
            second = self._checked_run(plan)
            if isinstance(second, str):
                return second
            if not all(map(_same_bits, first, second)):
                return "gives other bits when it runs again"
        return None

    def _checked_run(self, plan: Runnable) -> list[torch.Tensor] | str:
        declared = [self.spec.tensors[name] for name in self.spec.outputs]
        outputs = [_Guarded(t.extent * t.dtype.itemsize, self._device) for t in declared]
        scratch = _Guarded(plan.workspace_bytes, self._device)
        before = [tensor.clone() for tensor in self._inputs]
        places = [tensor.data_ptr() for tensor in self._inputs]
        pointers = plan.pointers([*places, *(each.inner.data_ptr() for each in outputs)])
        handle = env.handle_on_current_stream(self._device.index)
        try:
            plan.execute(pointers, scratch.inner.data_ptr(), handle)
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            return f"does not run: {first_line(str(error))}"
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
        tf32 = bool(self._policy.allow_tf32)
        for spec, out, want in self._compared(made):
            bound = tolerance(out.dtype, tf32=tf32)
            error = relative_error(out, want)
            if not error <= bound:
                return f"wrong: '{spec.name}' is off by {error:.2g}, at most {bound:.2g} is right"
        return None

    def _compared(
        self, made: Sequence[torch.Tensor]
    ) -> list[tuple[TensorSpec, torch.Tensor, torch.Tensor]]:
        """Results beside what the reference says in float64: all of it, or where attention is too
        large for that, what its first and last heads give."""
        declared = [self.spec.tensors[name] for name in self.spec.outputs]
        corners = _corners(self.spec)
        if corners is None:
            if self._wanted is None:
                self._wanted = reference.run(self.spec, self._inputs, torch.float64)
            return list(zip(declared, made, self._wanted, strict=True))
        compared = []
        for batch, head in corners:
            inputs = [
                _corner(self.spec, name, tensor, batch, head)
                for name, tensor in zip(self.spec.inputs, self._inputs, strict=True)
            ]
            wanted = reference.run(self.spec, inputs, torch.float64)
            for spec, out, want in zip(declared, made, wanted, strict=True):
                compared.append((spec, _corner(self.spec, spec.name, out, batch, head), want))
        return compared


def _corners(spec: GraphSpec) -> list[tuple[int, int]] | None:
    """For an attention whose scores are too many: (batch, head of k) at both ends; else None."""
    nodes = [node for node in spec.nodes if node.op != "constant"]
    if len(nodes) != 1 or nodes[0].op != "sdpa":
        return None
    q, k = (spec.tensors[name] for name in nodes[0].operands[:2])
    if math.prod(q.shape[:3]) * k.shape[2] <= _LARGE_SCORES:
        return None
    return list(dict.fromkeys([(0, 0), (q.shape[0] - 1, k.shape[1] - 1)]))


def _corner(
    spec: GraphSpec, name: str, tensor: torch.Tensor, batch: int, head: int
) -> torch.Tensor:
    """The part of an operand or result of attention that belongs to one batch and head of k."""
    (node,) = (node for node in spec.nodes if node.op == "sdpa")
    k = spec.tensors[node.operands[1]]
    repeat = spec.tensors[node.operands[0]].shape[1] // k.shape[1]
    if name == node.inputs[3]:
        tensor = tensor.view(*(1,) * (4 - tensor.dim()), *tensor.shape)
    if tensor.shape[0] > 1:
        tensor = tensor.narrow(0, batch, 1)
    if tensor.dim() < 3 or tensor.shape[1] == 1:
        return tensor
    many = 1 if tensor.shape[1] == k.shape[1] and repeat > 1 else repeat
    return tensor.narrow(1, head * many, many)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))


class Chain:
    """The steps of a whole graph on random data, each writing what the later ones read."""

    def __init__(self, spec: GraphSpec, policy: Policy, device: torch.device) -> None:
        self._policy = policy
        self._device = device
        values = random_inputs(spec, device)
        self._inputs = dict(zip(spec.inputs, values, strict=True))
        self._outputs = {
            name: torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=device)
            for name, t in ((name, spec.tensors[name]) for name in spec.outputs)
        }

    def launch(self, steps: Sequence[tuple[GraphSpec, Runnable | None]]) -> Callable[[], None]:
        """What runs ``steps`` once, in order, on the current stream."""
        laid = [
            Laid(spec, plan is not None, 0 if plan is None else plan.workspace_bytes)
            for spec, plan in steps
        ]
        layout = Layout(laid, {*self._inputs, *self._outputs})
        block = torch.empty(layout.size_bytes, dtype=torch.uint8, device=self._device)
        values = layout.tensors(block, {**self._inputs, **self._outputs})
        launches: list[Callable[[], None]] = []
        for number, (spec, plan) in enumerate(steps):
            if number in layout.free:
                continue
            inputs = [values[name] for name in spec.inputs]
            outputs = [values[name] for name in spec.outputs]
            need = 0 if plan is None else plan.workspace_bytes
            workspace = block[layout.scratch[number] : layout.scratch[number] + need]
            launches.append(self._step(spec, plan, inputs, outputs, workspace))

        def run() -> None:
            for launch in launches:
                launch()

        return run

    def _step(
        self,
        spec: GraphSpec,
        plan: Runnable | None,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        workspace: torch.Tensor,
    ) -> Callable[[], None]:
        if plan is None:
            tf32 = bool(self._policy.allow_tf32)
            return eager.launcher(spec, inputs, outputs, allow_tf32=tf32)
        return launcher(plan, (*inputs, *outputs), workspace, self._device)


def launcher(
    plan: Runnable, tensors: Sequence[torch.Tensor], workspace: torch.Tensor, device: torch.device
) -> Callable[[], None]:
    """What runs ``plan`` once on the current stream; keeps the tensors alive."""
    kept = tuple(tensors)
    pointers = plan.pointers([tensor.data_ptr() for tensor in kept])

    def run(tensors: Sequence[torch.Tensor] = kept) -> None:
        plan.execute(pointers, workspace.data_ptr(), env.handle_on_current_stream(device.index))

    return run
