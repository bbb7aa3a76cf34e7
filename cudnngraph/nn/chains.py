"""Find convolution → norm → residual → activation, and attention, in traced forwards."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from ..policy import Policy
from .conv import ACTIVATION_OF, CONVS, NORMS, TRANSPOSED, why_no_activation, why_not
from .hooks import has_hooks
from .nodes import (
    NEW_RESULTS,
    PLAIN_NORMS,
    SEQUENCE,
    act_of_norm,
    activation,
    addition,
    called,
    has_inplace_flag,
    is_fresh,
    is_norm,
    is_torchs,
    one_operand,
    opaque,
    result,
)
from .sites import ACT, ADD, CONV, NORM, THROUGH, THROUGHS, Attend, Site, Step, put_site
from .tracing import IN_PLACE, LIST, TENSOR, Traced, Untraceable, choices, submodule, trace

_SDPA: Any = F.scaled_dot_product_attention
_MAX_ROUNDS = 8


@dataclass
class Chain:
    """A convolution's call and those that follow it, in order; the residual's node."""

    nodes: list[fx.Node]
    steps: list[Step]
    residual: fx.Node | None = None

    def paths(self) -> list[str]:
        """The modules that are called."""
        return [str(node.target) for node in self.nodes if node.op == "call_module"]


@dataclass
class Variant:
    """One traced forward with its sites in place, and what they are."""

    traced: Traced
    inlined: frozenset[str]
    chains: list[Chain]
    attentions: int
    reasons: dict[str, str]  # a convolution that is called, but left: by its path
    plain: fx.Graph = field(repr=False)  # without sites

    @property
    def softmax(self) -> bool:
        """Whether attention is computed by a softmax between two products."""
        names = [getattr(node.target, "__name__", str(node.target)) for node in self.plain.nodes]
        products = sum(name in ("matmul", "bmm", "baddbmm", "einsum") for name in names)
        return products > 1 and any("softmax" in name.lower() for name in names)

    @property
    def changes(self) -> bool:
        """Whether there is a site."""
        return bool(self.chains or self.attentions)


@dataclass
class Analysis:
    """A module's forward in one mode: as it may be called, or why it was not traced."""

    variants: list[Variant]
    reason: str = ""


class Analyzer:
    """Looks at the modules of one model, each once a mode."""

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.known: dict[tuple[int, bool], Analysis] = {}
        self.norms: dict[int, tuple[bool, str]] = {}

    def analysis(self, module: nn.Module, training: bool) -> Analysis:
        """The module's forward in a mode."""
        key = (id(module), training)
        if key not in self.known:
            self.known[key] = Analysis([], "calls itself")
            self.known[key] = self._analyse(module, training)
        return self.known[key]

    def _analyse(self, module: nn.Module, training: bool) -> Analysis:
        if why := opaque(module):
            return Analysis([], why)
        reason, variants = "", []
        try:
            waiting = choices(module)
        except Untraceable as error:
            return Analysis([], str(error))
        for i, given in enumerate(waiting):
            try:
                variant = self._variant(module, given, training)
            except Untraceable as error:
                reason = reason or str(error)
                continue
            variants.append(variant)
            asked = {name: LIST for name in variant.traced.asked if given[name] == TENSOR}
            if asked and i == 0 and {**given, **asked} not in waiting:
                waiting.append({**given, **asked})
        return Analysis(variants, "" if variants else reason)

    # -- one variant -------------------------------------------------------------------------------

    def _variant(self, module: nn.Module, given: Mapping[str, str], training: bool) -> Variant:
        inlined: frozenset[str] = frozenset()
        traced = trace(module, given, training, inlined)
        for _ in range(_MAX_ROUNDS):
            more = self._to_inline(module, traced.graph, training) - inlined
            if not more:
                break
            try:
                traced = trace(module, given, training, sorted(inlined | more))
            except Untraceable:
                break
            inlined |= more
        plain = fx.Graph()
        plain.output(plain.graph_copy(traced.graph, {}))
        return self._with_sites(module, traced, inlined, training, plain)

    def _with_sites(
        self,
        module: nn.Module,
        traced: Traced,
        inlined: frozenset[str],
        training: bool,
        plain: fx.Graph,
    ) -> Variant:
        graph = traced.graph
        reasons: dict[str, str] = {}
        order = {node: i for i, node in enumerate(graph.nodes)}
        taken: set[fx.Node] = set()
        chains = []
        for node in reversed(list(graph.nodes)):
            child = called(module, node)
            if not isinstance(child, CONVS + TRANSPOSED):
                continue
            if not one_operand(node):
                reasons.setdefault(str(node.target), "it is called with more than one argument")
                continue
            chain = self._chain(module, node, taken)
            if why := _why_left(module, chain):
                reasons.setdefault(str(node.target), why)
                continue
            while not self._movable(module, chain, order, training):
                _shorten(chain)
            taken.update(chain.nodes)
            chains.append(chain)
        for chain in chains if training else ():
            _leave_shared_norm(module, chain, graph, taken)
        for i, chain in enumerate(reversed(chains)):
            put_site(graph, chain.nodes, Site(f"site_{i}", chain.steps, self.policy))
        attentions = 0
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is _SDPA:
                node.target = Attend(f"attend_{attentions}", self.policy)
                attentions += 1
        return Variant(traced, inlined, chains[::-1], attentions, reasons, plain)

    def _chain(self, root: nn.Module, conv: fx.Node, taken: set[fx.Node]) -> Chain:
        """The longest run of calls that begins with a convolution."""
        chain = Chain([conv], [Step(CONV, _type(root, conv))])
        node = conv
        while len(node.users) == 1:
            (user,) = node.users
            if user in taken or user.all_input_nodes.count(node) != 1:
                break
            stage = _stage(chain)
            step, residual = self._step(root, node, user)
            if step is None or (step.kind == NORM and stage != CONV):
                break
            if stage == ACT or (step.kind == ADD and stage == ADD):
                break
            chain.nodes.append(user)
            chain.steps.append(step)
            chain.residual = residual or chain.residual
            node = user
        while chain.steps[-1].kind == THROUGH:
            _shorten(chain)
        return chain

    def _step(
        self, root: nn.Module, node: fx.Node, user: fx.Node
    ) -> tuple[Step | None, fx.Node | None]:
        """What a call does with a node, as a step of a chain; the residual."""
        child = called(root, user)
        if child is not None:
            if not one_operand(user) or (has_hooks(child) and not is_norm(child)):
                return None, None
            kind = type(child)
            if kind in THROUGHS:
                return Step(THROUGH, kind), None
            if is_norm(child):
                known, act = self.norm(child)
                return (Step(NORM, kind, act) if known else None), None
            if kind in ACTIVATION_OF and not why_no_activation(child):
                return Step(ACT, kind), None
            return None, None
        if (added := addition(node, user)) is not None:
            return Step(ADD, in_place=added[1]), added[0]
        made = activation(node, user)
        return (None if made is None else Step(ACT, function=made)), None

    # -- norms with an activation of their own -----------------------------------------------------

    def norm(self, module: nn.Module) -> tuple[bool, str]:
        """Whether a norm computes what torch's does, and the name of the activation behind it."""
        if type(module) in PLAIN_NORMS:
            return True, ""
        if id(module) not in self.norms:
            self.norms[id(module)] = self._norm(module)
        return self.norms[id(module)]

    def _norm(self, module: Any) -> tuple[bool, str]:
        names = set()
        for training in (True, False):
            try:
                (given, *_) = choices(module)
                graph = trace(module, given, training, ()).graph
            except Untraceable:
                return False, ""
            names.add(act_of_norm(module, graph, training))
        name = names.pop()
        return (name is not None and not names), name or ""

    # -- what is traced into -----------------------------------------------------------------------

    def _to_inline(self, root: nn.Module, graph: fx.Graph, training: bool) -> frozenset[str]:
        """The children whose last or first calls belong to a chain that crosses their border."""
        found: set[str] = set()
        for node in graph.nodes:
            child = called(root, node)
            if child is None or not _may_inline(child) or not one_operand(node):
                continue
            path = str(node.target)
            stage, nested = self._tail(child, training)
            if stage and len(node.users) == 1 and self._goes_on(root, stage, node, training):
                found |= {path, *(f"{path}.{inner}" for inner in nested)}
            (operand,) = node.all_input_nodes
            before = self._stage_of(root, operand, training)
            if before and len(operand.users) == 1:
                kind, nested = self._head(child, training)
                if kind == THROUGH or _extends(before, kind):
                    found |= {path, *(f"{path}.{inner}" for inner in nested)}
        return frozenset(found)

    def _goes_on(self, root: nn.Module, stage: str, node: fx.Node, training: bool) -> bool:
        (user,) = node.users
        step, _ = self._step(root, node, user)
        if step is not None:
            if step.kind == THROUGH and len(user.users) == 1:
                return self._goes_on(root, stage, user, training)
            return _extends(stage, step.kind)
        child = called(root, user)
        if child is None or not _may_inline(child):
            return False
        kind = self._head(child, training)[0]
        if kind == THROUGH and len(user.users) == 1:
            return self._goes_on(root, stage, user, training)
        return _extends(stage, kind)

    def _stage_of(self, root: nn.Module, node: fx.Node, training: bool) -> str:
        """How far the chain is that ends with a node, "" if none does."""
        while type(called(root, node)) in THROUGHS and one_operand(node):
            (node,) = node.all_input_nodes
        for conv in node.graph.nodes:
            if isinstance(called(root, conv), CONVS + TRANSPOSED) and one_operand(conv):
                chain = self._chain(root, conv, set())
                if chain.nodes[-1] is node:
                    return _stage(chain)
        child = called(root, node)
        if child is not None and _may_inline(child) and one_operand(node):
            return self._tail(child, training)[0]
        return ""

    def _first(self, module: nn.Module, training: bool) -> Variant | None:
        analysis = self.analysis(module, training)
        return analysis.variants[0] if analysis.variants else None

    def _tail(self, module: nn.Module, training: bool) -> tuple[str, frozenset[str]]:
        """How far the chain is that gives a module's result, and what it needs traced into."""
        variant = self._first(module, training)
        if variant is None:
            return "", frozenset()
        out = result(variant.plain)
        while out is not None and len(out.users) == 1 and type(called(module, out)) in THROUGHS:
            (out,) = out.all_input_nodes
        if out is None or len(out.users) != 1:
            return "", frozenset()
        for chain in variant.chains:
            kind = _stage(chain)
            if chain.nodes[-1].name == out.name and kind != ACT:
                return kind, variant.inlined
        child = called(module, out)
        if child is None or not _may_inline(child):
            return "", frozenset()
        kind, nested = self._tail(child, training)
        path = str(out.target)
        return kind, variant.inlined | {path} | {f"{path}.{inner}" for inner in nested}

    def _head(self, module: nn.Module, training: bool) -> tuple[str, frozenset[str]]:
        """The step that a module's first call would be, and what it needs traced into."""
        variant = self._first(module, training)
        nothing: tuple[str, frozenset[str]] = ("", frozenset())
        if variant is None:
            return nothing
        given = [node for node in variant.plain.nodes if node.op == "placeholder"]
        if len(given) != 1 or len(given[0].users) != 1:
            return nothing
        (user,) = given[0].users
        if user.op == "output":
            whole = user.args[0] is given[0]
            return (THROUGH, variant.inlined) if whole else nothing
        step, _ = self._step(module, given[0], user)
        if step is not None:
            return step.kind, variant.inlined
        child = called(module, user)
        if child is None or not _may_inline(child) or not one_operand(user):
            return nothing
        kind, nested = self._head(child, training)
        path = str(user.target)
        return kind, variant.inlined | {path} | {f"{path}.{inner}" for inner in nested}

    # -- what may be moved -------------------------------------------------------------------------

    def _movable(
        self, root: nn.Module, chain: Chain, order: Mapping[fx.Node, int], training: bool
    ) -> bool:
        """Whether nothing changes what a chain reads, between its first call and its last."""
        graph, own = chain.nodes[0].graph, set(chain.nodes)
        first, last = order[chain.nodes[0]], order[chain.nodes[-1]]
        changed = [
            operand
            for node in graph.nodes
            if first < order[node] < last and node not in own
            for operand in self._changed(root, node, training)
        ]
        if not changed:
            return True
        aliases = self._aliases(root, graph, training)
        reads = aliases[chain.nodes[0].all_input_nodes[0]]
        if chain.residual is not None:
            reads = reads | aliases[chain.residual]
        return not any(aliases[operand] & reads for operand in changed)

    def _changed(self, root: nn.Module, node: fx.Node, training: bool) -> list[fx.Node]:
        """The operands that a call may change in place."""
        inputs = node.all_input_nodes
        if node.op == "call_method":
            name = str(node.target)
            out = name.endswith("_") and not name.endswith("__")
            return inputs[:1] if out or name == "append" else []
        if node.op == "call_function":
            target: Any = node.target
            name = getattr(target, "__name__", "")
            if target is operator.setitem or (
                name in IN_PLACE and getattr(target, "__module__", "") == "_operator"
            ):
                return inputs[:1]
            if isinstance(target, (Site, Attend)):
                return []
            known = is_torchs(target) and "out" not in node.kwargs
            if known and not name.endswith("_") and not has_inplace_flag(node):
                return []
            return inputs
        if node.op == "call_module":
            child = called(root, node)
            return inputs if child is None or self.summary(child, training)[0] else []
        return []

    def _aliases(
        self, root: nn.Module, graph: fx.Graph, training: bool
    ) -> dict[fx.Node, frozenset[Any]]:
        """The memory that a node's value may be of: names of results that are new, or "given"."""
        found: dict[fx.Node, frozenset[Any]] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                found[node] = frozenset(("given",))
                continue
            through = frozenset().union(*(found[each] for each in node.all_input_nodes))
            if node.op == "call_module":
                child = called(root, node)
                fresh = child is not None and self.summary(child, training)[1]
            else:
                fresh = node.op == "call_function" and is_fresh(node)
            found[node] = frozenset((node.name,)) if fresh else through | {node.name}
        return found

    def summary(self, module: nn.Module, training: bool) -> tuple[bool, bool]:
        """Whether a module may change its operands, and whether its result is new memory."""
        kind = type(module)
        if has_hooks(module):
            return True, False
        if kind in THROUGHS:
            return bool(getattr(module, "inplace", False)), False
        if kind.__module__.startswith("torch.nn.modules") and kind.forward is not SEQUENCE:
            inplace = bool(getattr(module, "inplace", False))
            return inplace, not inplace and kind in NEW_RESULTS
        analysis = self.analysis(module, training)
        if not analysis.variants:
            return True, False
        changes, new = False, True
        for variant in analysis.variants:
            aliases = self._aliases(module, variant.plain, training)
            for node in variant.plain.nodes:
                changed = self._changed(module, node, training)
                changes = changes or any("given" in aliases[each] for each in changed)
            out = result(variant.plain)
            new = new and out is not None and "given" not in aliases[out]
        return changes, new


# -- nodes -----------------------------------------------------------------------------------------


def _type(root: nn.Module, node: fx.Node) -> type[nn.Module]:
    return type(submodule(root, str(node.target)))


def _may_inline(module: nn.Module) -> bool:
    return not opaque(module) and not has_hooks(module)


def _stage(chain: Chain) -> str:
    """The kind of the last step that counts: conv, norm, add or act."""
    for step in reversed(chain.steps):
        if step.kind != THROUGH:
            return ACT if step.act else step.kind
    return CONV


def _extends(stage: str, kind: str) -> bool:
    if kind == ACT:
        return stage != ACT
    if kind == ADD:
        return stage in (CONV, NORM)
    return kind == NORM and stage == CONV


def _leave_shared_norm(root: nn.Module, chain: Chain, graph: fx.Graph, taken: set[fx.Node]) -> None:
    """End a chain before a norm that torch calls too: what a site writes to its statistics, the
    gradient of torch's call takes for a change of its operands."""
    at = next((i for i, step in enumerate(chain.steps) if step.kind == NORM), None)
    if at is None:
        return
    norm = called(root, chain.nodes[at])
    if any(called(root, node) is norm for node in graph.nodes if node not in taken):
        while len(chain.steps) > at:
            taken.discard(chain.nodes[-1])
            _shorten(chain)


def _shorten(chain: Chain) -> None:
    """Without the last step that counts, and identities before it."""
    while len(chain.steps) > 1:
        step = chain.steps.pop()
        chain.nodes.pop()
        if step.kind == ADD:
            chain.residual = None
        if chain.steps[-1].kind != THROUGH:
            return


def _why_left(root: nn.Module, chain: Chain) -> str:
    """Why a chain's convolution and norm are no block; one with hooks is none."""
    modules = [called(root, node) for node in chain.nodes]
    conv: Any = modules[0]
    norm: Any = next((m for m in modules if is_norm(m)), None)
    if norm is None or type(norm) in PLAIN_NORMS:
        return why_not(conv, norm, None)
    if has_hooks(norm):
        return f"{type(norm).__name__} has hooks, which a block would not call"
    wanted = len(conv.kernel_size)
    if not isinstance(norm, (NORMS[wanted - 1], nn.SyncBatchNorm)):
        return f"{type(norm).__name__} is not {NORMS[wanted - 1].__name__}"
    return why_not(conv, None, None)
