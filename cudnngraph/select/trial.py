"""Plans on trial: a step on random data, timed, and checked against the reference executor.

A check runs a plan once between guard bytes, on a stream that lags. It fails when the result is off
(also because some of the work was done on another stream), when an element was not written, or when
the plan wrote where it has no business: around its outputs and its workspace, in the gaps of a
strided output, or over its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..backend import env
from ..backend.lowering.driver import first_line
from ..executor import reference, torch_steps
from ..executor.memory import Laid, Layout
from ..ir.spec import GraphSpec, Node, TensorSpec
from ..ops.base import ATTENTION, FP8, FP8_SCALES, OPS
from ..policy import Policy
from ..rewrite.passes import PACKING, token_widths
from .dropout_probe import attention, draws, explicit, recovered

# Largest relative error ||out - ref|| / ||ref||: a wrong plan is off by far more.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 2.0**-3,
    torch.float8_e5m2: 2.0**-2,
}
TF32_TOLERANCE = 2e-3
# Of float32 data without TF32: three roundings, or seven where there are sums. cuDNN's exp and tanh
# are off by 1e-6 to 6e-6, torch's by 1e-7.
STRICT_TOLERANCE = 3 * 2.0**-24
STRICT_TOLERANCE_OF_SUMS = 7 * 2.0**-24
TORCH_FACTOR = 1.5  # how much farther off than torch's own float32 such a result may be
FP8_TOLERANCE = 2.0**-10  # of float32 results: tensor cores add FP8 products at about 13 bits
STRAYS = 1e-3  # part of the int8 elements that may be one step off: they were next to a tie
GUARD_BYTES = 4096
_GUARD, _UNWRITTEN = 0xA5, 0xFF  # 0xFF… is NaN in every floating dtype
_LAG_CYCLES = 1_000_000  # about 0.5 ms, in which a plan is issued
# op → the port whose numbers it wants positive.
_WANTS_POSITIVE = {
    "batch_norm": "running_var",
    "div": "y",
    **dict.fromkeys(("log", "pow", "reciprocal", "rsqrt", "sqrt"), "x"),
}
_MAKES_POSITIVE = {"exp", "sigmoid", "softmax", "softplus", "sqrt", "rsqrt", "reciprocal", "pow"}
_KEEPS_POSITIVE = {  # of operands that are all positive
    *("add", "mul", "div", "maximum", "minimum", "where", "bias", "scale", "relu", "clamp"),
    *("identity", "expand", "to_float", "concat", "reshape", "transpose", "permute", "slice"),
    *("reduction", "avg_pool", "max_pool", "adaptive_avg_pool"),
}
_SMALLEST_WEIGHTS = 2.0**-6
_POWERS = (-4, -2, 0, 2, 4, 6)  # of two: the magnitudes at which functions of numbers are tried
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


def tolerance(dtype: torch.dtype, *, tf32: bool, fp8: bool = False) -> float:
    """The largest relative error that a result of ``dtype`` may have; 0 for whole numbers.

    ``fp8``: products of FP8 data are behind it (:func:`multiplies_fp8`).
    """
    if not dtype.is_floating_point:
        return 0.0
    if dtype == torch.float32 and tf32:
        return TF32_TOLERANCE
    if dtype == torch.float32 and fp8:
        return FP8_TOLERANCE
    return TOLERANCE[dtype]


def is_strict(spec: GraphSpec, policy: Policy) -> bool:
    """Whether float32 results are held to about what torch's own float32 gives."""
    kinds = {spec.tensors[name].dtype for name in spec.inputs}
    return not policy.allow_tf32 and {k for k in kinds if k.is_floating_point} == {torch.float32}


def is_pointwise(spec: GraphSpec) -> bool:
    """Whether no element of a result depends on several of one operand."""
    return all(OPS[node.op].pointwise or OPS[node.op].view for node in spec.nodes)


def rounding_of_sums(spec: GraphSpec) -> float:
    """What the longest sum of a graph may be off by in float32, term added to term: u sqrt(n / 6),
    where step k adds an error of variance k u² / 3 to a sum of variance n."""
    terms = (_terms(spec, node) for node in spec.nodes)
    return 2.0**-24 * math.sqrt(max(terms, default=1.0) / 6)


def _terms(spec: GraphSpec, node: Node) -> float:
    """About how many terms the sums of an op have."""
    if OPS[node.op].pointwise or OPS[node.op].view or not node.operands:
        return 1.0
    read = sorted((spec.tensors[name].numel for name in node.operands), reverse=True)
    made = min(max(1, spec.tensors[name].numel) for name in node.results)
    # A product of M x K and K x N numbers makes M x N; else each number is read once.
    return max(1.0, math.sqrt(read[0] * read[1] / made) if len(read) > 1 else read[0] / made)


def multiplies_fp8(spec: GraphSpec) -> bool:
    """Whether an op that is not element by element reads FP8."""
    return any(
        spec.tensors[name].dtype in FP8
        for node in spec.nodes
        if not OPS[node.op].pointwise
        for name in node.operands
    )


def relative_error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||``; infinite where one is infinite or NaN and the other is not.

    Of int8 a few elements one step off are no error: what is rounded may lie next to a tie.
    """
    off, size = distance(out, ref64)
    if off == 0.0:
        return 0.0
    return off / size if size and off == off else float("inf")


def distance(out: torch.Tensor, ref64: torch.Tensor) -> tuple[float, float]:
    """``||out - ref||`` and ``||ref||``, as :func:`relative_error` takes them."""
    wide = out.to(torch.float64)
    ref = ref64.to(wide)  # what the reference makes of constants alone lies on the CPU
    finite = ref.isfinite()
    size = float(ref[finite].norm())
    if out.dtype == torch.int8:
        steps = (out.int() - ref.int()).abs()
        if int((steps > 0).sum()) <= max(1, int(STRAYS * steps.numel())) and bool(
            (steps < 2).all()
        ):
            return 0.0, size
    mine, theirs = wide[~finite], ref[~finite]
    if not bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all()):
        return float("inf"), size
    return float((wide - ref)[finite].norm()), size


def random_inputs(
    spec: GraphSpec, device: torch.device, seed: int = 0, *, power: int | None = None
) -> list[torch.Tensor]:
    """Inputs of the declared strides: floats within (-1, 1), int8 -2 to 2, integers 1, both bools.

    Floats are within (0.5, 1.5) where an op wants them positive or divides by them; all of them,
    where it wants that of what others make. What a product is made with is smaller by the number of
    terms, so that its result hides nothing that is added to it. ``power``: floats of magnitudes
    from 2^(power - 2) to 2^power, but for single numbers, which might hide others. A boolean mask
    of attention hides nothing, a quarter of its rows and of its keys is padding where it takes
    lengths, and its gradient is given the o and lse that belong to the q, k and v. What quantize
    divides by is over 0.5; int32 sums of int8 products are within 100.
    """
    generator = torch.Generator(device).manual_seed(seed)
    ops = {node.op for node in spec.nodes}
    positive = _positive(spec)
    weights = _weights(spec, positive)
    sums = {node.inputs[0] for node in spec.nodes if node.op == "dequantize"}
    made = []
    for declared in (spec.tensors[name] for name in spec.inputs):
        values = torch.rand(declared.shape, generator=generator, device=device)
        if declared.dtype.is_floating_point:
            values = 0.5 + values if declared.name in positive else 2.0 * values - 1.0
            values *= weights.get(declared.name, 1.0)
            if power is not None and declared.numel > 1:
                signs = torch.where(values < 0, -1.0, 1.0)
                values = signs * (0.25 + 0.75 * (values.abs() % 1.0)) * 2.0**power
        elif declared.dtype == torch.bool and "sdpa" not in ops:
            values = values < 0.5
            values.view(-1)[:1], values.view(-1)[1:][-1:] = True, False
        elif declared.dtype == torch.int8 or declared.name in sums:
            most = 2 if declared.dtype == torch.int8 else 100
            values = (values * (2 * most + 1)).floor() - most
        else:
            values = torch.ones(declared.shape, device=device)
        made.append(strided(declared, values, device))
    given = dict(zip(spec.inputs, made, strict=True))
    for node in spec.nodes:
        if node.op in ("nll_loss", "nll_loss_backward") and str(_port(node, "target")) in given:
            given[str(_port(node, "target"))].zero_()  # there is a class 0 in any case
        scale = node.inputs[1] if node.op == "quantize" else None
        if scale is not None and scale in given:
            given[scale].abs_().add_(0.5)
        if node.op in ATTENTION:
            _set_lengths(spec, node, given)
        if node.op == "sdpa_fp8":
            _set_scales(node, given)
        if node.op in ("sdpa_varlen", "sdpa_varlen_backward"):
            _set_sequences(spec, node, given)
        if node.op in ("sdpa_backward", "sdpa_varlen_backward"):
            _set_results(node, given)
    return made


def _positive(spec: GraphSpec) -> set[str]:
    """The inputs that have to be positive for the ops that want that of what they read."""
    makers = {name: node for node in spec.nodes for name in node.results}
    whole_numbers = {
        each.results[0]
        for each in spec.nodes
        if each.op == "constant" and float(each.attr("value")).is_integer()
    }
    found: set[str] = set()

    def is_to_be(name: str, summed: bool = False) -> bool:
        """Whether a tensor is positive if the inputs found are."""
        node = makers.get(name)
        if node is None:
            found.add(name)
            return True
        if node.op == "constant":
            return bool(node.attr("value") > 0)
        operands = node.operands
        if node.op == "abs" or (node.op == "mul" and len(set(operands)) == 1):
            return summed or operands[0] in spec.inputs
        if node.op in _MAKES_POSITIVE:
            return True
        summed |= node.op == "reduction"
        parts = operands[1:] if node.op == "where" else operands
        return node.op in _KEEPS_POSITIVE and all([is_to_be(each, summed) for each in parts])

    for node in spec.nodes:
        if node.op not in _WANTS_POSITIVE:
            continue
        if node.op == "pow" and node.operands[1] in whole_numbers:
            continue
        if not is_to_be(str(_port(node, _WANTS_POSITIVE[node.op]))):
            return set(spec.inputs)
    return found


def _weights(spec: GraphSpec, positive: Collection[str]) -> dict[str, float]:
    """What inputs are multiplied by so that products of many terms are about as large as these: a
    power of two, which rounds nothing."""
    found: dict[str, float] = {}
    for node in spec.nodes:
        given = [name for name in node.operands[1::-1] if name in spec.inputs]
        if node.op not in ("conv", "conv_transpose", "conv_wgrad", "matmul") or not given:
            continue
        if spec.tensors[given[0]].dtype.itemsize < 2:
            continue
        terms = _terms(spec, node)
        size = terms if set(node.operands) <= set(positive) else math.sqrt(terms / 3)
        scale = max(_SMALLEST_WEIGHTS, min(1.0, 2.0 ** -round(math.log2(size))))
        found[given[0]] = min(scale, found.get(given[0], 1.0))
    return found


def _port(node: Node, port: str) -> str | None:
    """The name of the tensor at a port of a node."""
    return node.inputs[OPS[node.op].ports.index(port)]


def _set_lengths(spec: GraphSpec, node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make the lengths of attention three quarters of what they may be at most."""
    paged = node.op == "sdpa_paged"
    for port, whole in (("seq_len_q", "q"), ("seq_len_kv", "k_cache" if paged else "k")):
        if port not in OPS[node.op].ports or str(_port(node, port)) not in given:
            continue
        longest = spec.tensors[str(_port(node, whole))].shape[2]
        if paged and port == "seq_len_kv":
            longest *= spec.tensors[str(_port(node, "page_table"))].shape[1]
        given[str(_port(node, port))].fill_(-(-3 * longest // 4))
    for port in ("page_table", "page_table_v") if paged else ():
        table = given.get(str(_port(node, port)))
        if table is not None:
            pages = spec.tensors[str(_port(node, "k_cache"))].shape[0]
            order = torch.arange(table.numel(), device=table.device).flip(0) % max(pages, 1)
            table.copy_(order.view(table.shape))


def _set_sequences(spec: GraphSpec, node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make packed sequences of about equal lengths out of all tokens, or of as many as fit: what
    lies behind the last sequence is nobody's."""
    ends: list[torch.Tensor] = []
    for side, port in enumerate(PACKING[:2]):
        whole, attr = (("q", "max_seqlen_q"), ("k", "max_seqlen_kv"))[side]
        tokens = spec.tensors[str(_port(node, whole))].shape[0]
        tensor = spec.tensors[str(_port(node, port) or _port(node, "ragged"))]
        count = tensor.shape[-1] - 1
        used = min(tokens, count * node.attr(attr))
        made = (torch.arange(count + 1) * used // count).to(torch.int32)
        ends.append(made)
        if str(_port(node, port)) in given:
            given[str(_port(node, port))].copy_(made)
    ragged = given.get(str(_port(node, "ragged")))
    if ragged is not None:
        widths = dict(zip(("widths_q", "widths_kv"), token_widths(node, spec.tensors), strict=True))
        made = torch.zeros(ragged.shape, dtype=torch.int32)
        ragged.copy_(reference.ragged_into(ends, widths, made))


def _set_scales(node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make the scales of FP8 attention use the range of the 8 bits, as a user's would."""
    usual = {"scale_s": 256.0, "descale_s": 1.0 / 256.0, "scale_o": 64.0}
    for port in FP8_SCALES:
        name = str(_port(node, port))
        if name in given:
            given[name].fill_(usual.get(port, 1.0))


def _set_results(node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make o and lse what attention gives for the operands of its gradient, if all are inputs."""
    forward = OPS[node.op.removesuffix("_backward")]
    mine = OPS[node.op].ports
    ports = [_port(node, port) if port in mine else None for port in forward.ports]
    if not all(name is None or name in given for name in ports):
        return
    names = (str(_port(node, "o")), str(_port(node, "lse")))
    q, k = given[str(ports[0])], given[str(ports[1])]
    keys = k.shape[2] if forward.name == "sdpa" else dict(node.attrs)["max_seqlen_kv"]
    if math.prod(q.shape[:-1]) * keys > _LARGE_SCORES:  # too much work for data of a trial
        if names[1] in given:
            given[names[1]].fill_(math.log(keys) + 1.0)
        return
    operands = [None if name is None else given[name] for name in ports]
    attrs = {name: value for name, value in node.attrs if name != "mask_grad"}
    attrs["return_lse"] = True
    whole = Node(forward.name, node.name, tuple(ports), names, tuple(sorted(attrs.items())))
    for name, made in zip(names, reference.apply(whole, operands, torch.float64), strict=True):
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


@contextmanager
def _behind(device: torch.device) -> Iterator[None]:
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


class _Guarded:
    """Memory with guard bytes on both sides."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        total = 2 * GUARD_BYTES + -(-size_bytes // 256) * 256
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
    """Inputs, and what the reference and torch's float32 make of them, once they are asked."""

    inputs: list[torch.Tensor]
    exact: list[torch.Tensor] | None = None
    in_float32: list[torch.Tensor] | None = None


class Trial:
    """Random data for one step on one GPU, to run plans on. Use it with that device current."""

    def __init__(self, spec: GraphSpec, policy: Policy, device: torch.device) -> None:
        self.spec = spec
        self._policy = policy
        self._device = device
        self._strict = is_strict(spec, policy)
        # Functions of single numbers are off in some ranges and not in others.
        self._wide = self._strict and is_pointwise(spec)
        self._data = _Data(random_inputs(spec, device))
        self._wider: list[_Data] = []
        self._outputs = [
            torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=device)
            for t in (spec.tensors[name] for name in spec.outputs)
        ]
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._keep: torch.Tensor | None = None  # what the plan at hand does not drop
        self.error = 0.0  # the largest relative error of the results of the last check

    @property
    def _inputs(self) -> list[torch.Tensor]:
        return self._data.inputs

    def launch(self, plan: Runnable | None) -> Callable[[], None]:
        """What runs ``plan``, or for None the torch step, once on the current stream."""
        if plan is None:
            return torch_steps.launcher(
                self.spec, self._inputs, self._outputs, allow_tf32=bool(self._policy.allow_tf32)
            )
        if self._workspace.numel() < plan.workspace_bytes:
            self._workspace = self._workspace.new_empty(plan.workspace_bytes)
        return launcher(plan, (*self._inputs, *self._outputs), self._workspace, self._device)

    def why_wrong(self, plan: Runnable) -> str | None:
        """What is wrong with what ``plan`` does, or None."""
        self.error = 0.0
        if draws(self.spec):
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
            for number, power in enumerate(_POWERS):
                if number == len(self._wider):
                    values = random_inputs(self.spec, self._device, number + 1, power=power)
                    self._wider.append(_Data(values))
                self._data = self._wider[number]
                made = self._checked_run(plan)
                if isinstance(made, str):
                    return f"{made}, of numbers of about {2.0**power:g}"
        finally:
            self._data = usual
        return None

    def _learn_what_is_dropped(self, plan: Runnable) -> str | None:
        """Find the mask that ``plan`` draws, for the comparison; what is wrong with it, or None."""
        if attention(self.spec) is None:
            return "drops by a seed in several places, which cannot be checked"
        try:
            keep = recovered(self.spec, self._inputs, partial(self._run, plan))
        except RuntimeError as error:
            return f"does not run: {first_line(str(error))}"
        self._keep, self._data = keep, _Data(self._data.inputs)
        return None

    def _run(self, plan: Runnable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = [torch.empty_like(tensor) for tensor in self._outputs]
        scratch = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=self._device)
        launcher(plan, (*inputs, *outputs), scratch, self._device)()
        torch.cuda.synchronize(self._device)
        return outputs

    def _checked_run(self, plan: Runnable) -> list[torch.Tensor] | str:
        declared = [self.spec.tensors[name] for name in self.spec.outputs]
        outputs = [_Guarded(t.extent * t.dtype.itemsize, self._device) for t in declared]
        scratch = _Guarded(plan.workspace_bytes, self._device)
        before = [tensor.clone() for tensor in self._inputs]
        places = [tensor.data_ptr() for tensor in self._inputs]
        pointers = plan.pointers([*places, *(each.inner.data_ptr() for each in outputs)])
        try:
            with _behind(self._device):
                for each in (*outputs, scratch):
                    each.clear()
                handle = env.handle_on_current_stream(self._device.index)
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
        tf32, fp8 = bool(self._policy.allow_tf32), multiplies_fp8(self.spec)
        for number, (spec, out, want) in enumerate(self._compared(made)):
            bound = tolerance(out.dtype, tf32=tf32, fp8=fp8)
            if self._wide and out.dtype == torch.float32:
                # What float32 cannot hold, between the ops either, is nothing to compare.
                held = self._in_float32()[number].isfinite()
                out, want = out[held], want.to(out.device)[held]
            error = relative_error(out, want)
            self.error = max(self.error, error)
            if self._strict and out.dtype == torch.float32:
                bound = STRICT_TOLERANCE
                if not error <= bound:
                    bound = self._strict_bound(number, want)
            if not error <= bound:
                return f"wrong: '{spec.name}' is off by {error:.2g}, at most {bound:.2g} is right"
        return None

    def _strict_bound(self, number: int, want: torch.Tensor) -> float:
        """The largest error of a float32 result whose data are float32."""
        if _corners(self.spec) is not None:
            return TOLERANCE[torch.float32]
        theirs = self._in_float32()[number]
        theirs = theirs[theirs.isfinite()] if self._wide else theirs
        bound = max(STRICT_TOLERANCE, TORCH_FACTOR * relative_error(theirs, want))
        if is_pointwise(self.spec):
            return bound
        return max(bound, STRICT_TOLERANCE_OF_SUMS, rounding_of_sums(self.spec))

    def _in_float32(self) -> list[torch.Tensor]:
        """What torch makes of the data in float32."""
        if self._data.in_float32 is None:
            with torch_steps.tf32(False):
                made = reference.run(*self._whole(), torch.float32)
            self._data.in_float32 = [each.to(self._device) for each in made]
        return self._data.in_float32

    def _whole(self) -> tuple[GraphSpec, Sequence[torch.Tensor]]:
        """What the reference runs, and on what."""
        large = _corners(self.spec) is not None
        if self._keep is not None or (large and attention(self.spec) is not None):
            return explicit(self.spec, self._inputs, self._keep)
        return self.spec, self._inputs

    def _compared(
        self, made: Sequence[torch.Tensor]
    ) -> list[tuple[TensorSpec, torch.Tensor, torch.Tensor]]:
        """Results beside what the reference says in float64: all of it, or where attention is too
        large for that, what its first and last heads give."""
        declared = [self.spec.tensors[name] for name in self.spec.outputs]
        corners = _corners(self.spec)
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


def _corners(spec: GraphSpec) -> list[tuple[int, int]] | None:
    """For an attention whose scores are too many: (batch, head of k) at both ends; else None."""
    nodes = [node for node in spec.nodes if node.op != "constant"]
    if len(nodes) != 1 or nodes[0].op not in ("sdpa", "sdpa_fp8"):
        return None
    q, k = (spec.tensors[name] for name in nodes[0].operands[:2])
    if math.prod(q.shape[:3]) * k.shape[2] <= _LARGE_SCORES:
        return None
    return list(dict.fromkeys([(0, 0), (q.shape[0] - 1, k.shape[1] - 1)]))


def _corner(
    spec: GraphSpec, name: str, tensor: torch.Tensor, batch: int, head: int
) -> torch.Tensor:
    """The part of an operand or result of attention that belongs to one batch and head of k."""
    (node,) = (node for node in spec.nodes if node.op in ("sdpa", "sdpa_fp8"))
    if tensor.numel() == 1:
        return tensor
    k = spec.tensors[node.operands[1]]
    repeat = spec.tensors[node.operands[0]].shape[1] // k.shape[1]
    if node.op == "sdpa" and name == node.inputs[3]:
        tensor = tensor.view(*(1,) * (4 - tensor.dim()), *tensor.shape)
    if node.op == "sdpa" and name in (_port(node, "alibi_slopes"), _port(node, "sink")):
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
            return torch_steps.launcher(spec, inputs, outputs, allow_tf32=tf32)
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
