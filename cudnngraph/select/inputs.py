"""Random inputs for a graph: of the declared strides, and such that its ops are defined on them.

What an op takes the logarithm of is positive, what it is told of lengths fits, and a gradient is
given results that belong to its operands.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache

import torch

from ..executor import reference
from ..ir.spec import GraphSpec, Node, TensorSpec
from ..ops import aten
from ..ops.attention.dense import FP8_SCALES
from ..ops.attention.packed import ragged_into
from ..ops.table import OPS, by_port, tensor_at
from ..rewrite.packed import SEQUENCE_PORTS, token_strides
from .tolerance import terms_of

_SMALLEST_WEIGHTS = 2.0**-6
LARGE_SCORES = 1 << 27  # elements of an attention matrix that the reference may hold


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
    divides by is over 0.5; int32 sums of int8 products are within 100. What torch's ops read at an
    index is there. Groups of rows are of any number, none among them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    ops = {node.op for node in spec.nodes}
    positive = _positive(spec)
    weights = _weights(spec, positive)
    sums = {node.inputs[0] for node in spec.nodes if node.op == "dequantize"}
    counts = _counts(spec)
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
        elif declared.name in counts:
            values = (values * counts[declared.name]).floor().clamp_max(counts[declared.name] - 1)
        else:
            values = torch.ones(declared.shape, device=device)
        made.append(strided(declared, values, device))
    given = dict(zip(spec.inputs, made, strict=True))
    for node in spec.nodes:
        classes = given.get(by_port(node).get("target") or "")
        if classes is not None:
            shapes = [spec.tensors[name].shape for name in (*node.operands, *node.results)]
            count = next(each for each in shapes if len(each) == classes.dim() + 1)[:2][-1]
            drawn = torch.randint(count, classes.shape, generator=generator, device=device)
            classes.copy_(drawn)
        scale = node.inputs[1] if node.op == "quantize" else None
        if scale is not None and scale in given:
            given[scale].abs_().add_(0.5)
        if OPS[node.op].has("attention"):
            _set_lengths(spec, node, given)
            _set_scales(node, given)
        if OPS[node.op].has("grouped") and node.operands[2] in given:
            rows, ends = spec.tensors[node.operands[0]].shape[0], given[node.operands[2]]
            drawn = torch.randint(rows + 1, ends.shape, generator=generator, device=device)
            ends.copy_(drawn.sort().values)
            ends[-1:] = rows
        if OPS[node.op].has("packed"):
            _set_sequences(spec, node, given)
        if OPS[node.op].has("attention_gradient"):
            _set_results(node, given)
    return made


def _counts(spec: GraphSpec) -> dict[str, int]:
    """The inputs that are indices of torch's ops, each with the elements that it is one of."""
    found: dict[str, int] = {}
    for node in spec.nodes:
        for name, count in aten.indexed(node, spec.tensors).items() if node.op == "aten" else ():
            if spec.tensors[name].dtype in (torch.int32, torch.int64):
                found[name] = min(count, found.get(name, count))
    return found


def _positive(spec: GraphSpec) -> set[str]:
    """The inputs that have to be positive for the ops that want that of what they read."""
    makers = {name: node for node in spec.nodes for name in node.results}
    whole_numbers = {
        each.results[0]
        for each in spec.nodes
        if each.op == "constant" and float(each.attr("value")).is_integer()
    }
    found: set[str] = set()

    @cache  # a tensor may be read in many places, and those in many more
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
        if OPS[node.op].has("makes_positive"):
            return True
        summed |= node.op == "reduction"
        parts = operands[1:] if node.op == "where" else operands
        keeps = OPS[node.op].has("keeps_positive")
        return keeps and all([is_to_be(each, summed) for each in parts])

    for node in spec.nodes:
        port = OPS[node.op].positive_port
        if port is None:
            continue
        if node.op == "pow" and node.operands[1] in whole_numbers:
            continue
        if not is_to_be(str(tensor_at(node, port))):
            return set(spec.inputs)
    return found


def _weights(spec: GraphSpec, positive: Collection[str]) -> dict[str, float]:
    """Factors of inputs that keep sums of many products as large as the inputs.

    Each is a power of two, which rounds nothing.
    """
    found: dict[str, float] = {}
    for node in spec.nodes:
        given = [name for name in node.operands[1::-1] if name in spec.inputs]
        row = OPS[node.op]
        if not row.has("multiplies") or row.has("attention") or not given:
            continue
        if spec.tensors[given[0]].dtype.itemsize < 2:
            continue
        terms = terms_of(spec, node)
        size = terms if set(node.operands) <= set(positive) else math.sqrt(terms / 3)
        scale = max(_SMALLEST_WEIGHTS, min(1.0, 2.0 ** -round(math.log2(size))))
        found[given[0]] = min(scale, found.get(given[0], 1.0))
    return found


def _set_lengths(spec: GraphSpec, node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make the lengths of attention three quarters of what they may be at most."""
    ports = by_port(node)
    paged = OPS[node.op].has("paged")
    for port, whole in (("seq_len_q", "q"), ("seq_len_kv", "k_cache" if paged else "k")):
        length = given.get(ports.get(port) or "")
        if length is None:
            continue
        longest = spec.tensors[str(ports[whole])].shape[2]
        if paged and port == "seq_len_kv":
            longest *= spec.tensors[str(ports["page_table"])].shape[1]
        length.fill_(-(-3 * longest // 4))
    for port in ("page_table", "page_table_v"):
        table = given.get(ports.get(port) or "")
        if table is not None:
            pages = spec.tensors[str(ports["k_cache"])].shape[0]
            order = torch.arange(table.numel(), device=table.device).flip(0) % max(pages, 1)
            table.copy_(order.view(table.shape))


def _set_sequences(spec: GraphSpec, node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make packed sequences of about equal lengths out of all tokens, or of as many as fit: what
    lies behind the last sequence is nobody's."""
    ends: list[torch.Tensor] = []
    for side, port in enumerate(SEQUENCE_PORTS[:2]):
        whole, attr = (("q", "max_seqlen_q"), ("k", "max_seqlen_kv"))[side]
        tokens = spec.tensors[str(tensor_at(node, whole))].shape[0]
        tensor = spec.tensors[str(tensor_at(node, port) or tensor_at(node, "ragged"))]
        count = tensor.shape[-1] - 1
        used = min(tokens, count * node.attr(attr))
        made = (torch.arange(count + 1) * used // count).to(torch.int32)
        ends.append(made)
        if str(tensor_at(node, port)) in given:
            given[str(tensor_at(node, port))].copy_(made)
    ragged = given.get(str(tensor_at(node, "ragged")))
    if ragged is not None:
        widths = dict(
            zip(("widths_q", "widths_kv"), token_strides(node, spec.tensors), strict=True)
        )
        made = torch.zeros(ragged.shape, dtype=torch.int32)
        ragged.copy_(ragged_into(ends, widths, made))


def _set_scales(node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make the scales of FP8 attention use the range of the 8 bits, as a user's would."""
    usual = {"scale_s": 256.0, "descale_s": 1.0 / 256.0, "scale_o": 64.0}
    for port in FP8_SCALES:
        scale = given.get(by_port(node).get(port) or "")
        if scale is not None:
            scale.fill_(usual.get(port, 1.0))


def _set_results(node: Node, given: Mapping[str, torch.Tensor]) -> None:
    """Make o and lse what attention gives for the operands of its gradient, if all are inputs."""
    forward = OPS[node.op.removesuffix("_backward")]
    mine = by_port(node)
    ports = [mine.get(port) for port in forward.ports]
    if not all(name is None or name in given for name in ports):
        return
    names = (str(tensor_at(node, "o")), str(tensor_at(node, "lse")))
    q, k = given[str(ports[0])], given[str(ports[1])]
    keys = node.attr("max_seqlen_kv") if forward.has("packed") else k.shape[2]
    if math.prod(q.shape[:-1]) * keys > LARGE_SCORES:  # too much work for data of a trial
        if names[1] in given:
            given[names[1]].fill_(math.log(keys) + 1.0)
        return
    operands = [None if name is None else given[name] for name in ports]
    attrs = {name: value for name, value in node.attrs if name != "mask_grad"}
    attrs["return_lse"] = True
    whole = Node(forward.name, node.name, tuple(ports), names, tuple(sorted(attrs.items())))
    for name, made in zip(names, reference.apply(whole, operands, torch.float64), strict=True):
        if name in given and made is not None:
            # cuDNN wants a large number for a row without a key, as its gradient gives it.
            given[name].copy_(torch.where(made == -math.inf, 1e30, made))


def strided(declared: TensorSpec, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` in memory as ``declared`` lays it out; what it repeats is stored once.

    Between its elements is NaN: there is anything, which plans must not multiply by 0 either.
    """
    out = declared.empty(device)
    floats = declared.dtype.is_floating_point and declared.dtype.itemsize > 1
    if floats and declared.extent > declared.numel:
        out.as_strided((declared.extent,), (1,)).fill_(math.nan)
    core = out
    for dim, stride in enumerate(declared.stride):
        if stride == 0 and declared.shape[dim] > 1:
            core, values = core.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    core.copy_(values)
    return out
