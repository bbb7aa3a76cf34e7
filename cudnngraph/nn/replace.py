"""Have a model's convolutions, norms, activations and attention run fused, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..arguments import checked
from ..policy import Policy
from .attention import why_not_attention
from .chains import Analyzer, Chain, Variant
from .conv import CONVS, TRANSPOSED, why_not
from .nodes import NO_FORWARD, is_ours
from .rewriting import install, own_class, program_of, restore, taken_by
from .sites import ADD
from .tracing import submodule


@dataclass(frozen=True)
class Swap:
    """One pattern: the modules' names in the model, the classes of what was found, and why it was
    left ("" if it was swapped). A function or a residual has a class and no name."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        names = (name or "the model" for name in self.names)  # which is called "" itself
        what = f"{', '.join(names)} ({' → '.join(self.classes)})"
        return f"left {what}: {self.reason}" if self.reason else f"swapped {what}"


@dataclass(frozen=True)
class Report:
    """The changes that :func:`replace` made."""

    swapped: tuple[Swap, ...]
    left: tuple[Swap, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.swapped, *self.left))) or "swapped nothing"


@checked
def replace(model: nn.Module, *, policy: Policy | None = None) -> Report:
    """Run Conv (+ batch norm) (+ residual) (+ activation) and attention of ``model`` fused.

    In place: the forward of each module that calls such modules is traced, and one call stands
    there for theirs. The modules, their names, parameters, hooks and state dict stay as they are.
    Training and evaluation may change at any time, and a forward that would now do other than it
    did when it was traced runs as it was written. What is left, the report names with the reason.
    """
    before = {id(fused) for module in model.modules() for fused in taken_by(module)}
    for module in list(model.modules()):
        restore(module)
    analyzer = Analyzer(policy)
    opened = {name: module for name, module in model.named_modules() if not _in_opaque(model, name)}
    programs = [(module, program_of(module, analyzer)) for module in opened.values()]
    made = [(module, program) for module, program in programs if program is not None]
    refused = {id(module) for module, program in made if not install(module, program)}
    found = {name: m for name, m in opened.items() if id(m) not in refused}
    return _Reporter(model, found, analyzer, before).report()


def _in_opaque(model: nn.Module, name: str) -> bool:
    """Whether a module is part of one that is TorchScript or ours, whose calls are not its."""
    parts = name.split(".") if name else []
    holders = [submodule(model, ".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    return any(isinstance(m, torch.jit.ScriptModule) or is_ours(m) for m in holders)


_CONVS = (*CONVS, *TRANSPOSED)


class _Reporter:
    """Tells what became of each convolution and attention of a model."""

    def __init__(
        self,
        model: nn.Module,
        opened: Mapping[str, nn.Module],
        analyzer: Analyzer,
        before: set[int],
    ) -> None:
        self.model, self.opened, self.analyzer, self.before = model, opened, analyzer, before
        self.names = {id(module): name for name, module in model.named_modules()}
        self.chains: dict[int, tuple[nn.Module, Chain]] = {}
        self.reasons: dict[int, str] = {}
        for module in opened.values():
            for variant in self._variants(module):
                self._note(module, variant)

    def report(self) -> Report:
        """What was swapped and what was left, in the order of the modules."""
        swaps = [
            swap for name, module in self.model.named_modules() for swap in self._of(name, module)
        ]
        return Report(
            tuple(swap for swap in swaps if not swap.reason),
            tuple(swap for swap in swaps if swap.reason),
        )

    def _variants(self, module: nn.Module) -> list[Variant]:
        """The traced forwards, those of the module's mode first."""
        modes = (module.training, not module.training)
        return [v for mode in modes for v in self.analyzer.analysis(module, mode).variants]

    def _note(self, module: nn.Module, variant: Variant) -> None:
        for chain in variant.chains:
            conv = submodule(module, chain.paths()[0])
            known = self.chains.get(id(conv))
            # A forward that traces into another has more of the chain than that one.
            if known is None or (module is not known[0] and len(chain.steps) > len(known[1].steps)):
                self.chains[id(conv)] = (module, chain)
        for path, reason in variant.reasons.items():
            self.reasons.setdefault(id(submodule(module, path)), reason)

    def _of(self, name: str, module: nn.Module) -> Iterator[Swap]:
        if _is_conv(module):
            yield self._of_conv(name, module)
        elif isinstance(module, nn.MultiheadAttention):
            yield self._swap(module, (name,), (_class(module),), self._why_no_mha(name, module))
        elif any(variant.attentions for variant in self._taken(module)):
            yield self._swap(module, (name,), (_class(module),), "")
        elif _named_attention(module) and (reason := self._why_no_attention(name, module)):
            yield Swap((name,), (_class(module),), reason)

    def _taken(self, module: nn.Module) -> list[Variant]:
        opened = self.opened.get(self.names[id(module)])
        return self._variants(module) if opened is module else []

    def _swap(
        self, module: nn.Module, names: tuple[str, ...], classes: tuple[str, ...], reason: str
    ) -> Swap:
        if not reason and id(module) in self.before:
            reason = "it was replaced before"
        return Swap(names, classes, reason)

    # -- convolutions ------------------------------------------------------------------------------

    def _of_conv(self, name: str, conv: nn.Module) -> Swap:
        if id(conv) in self.chains:
            owner, chain = self.chains[id(conv)]
            modules = [submodule(owner, path) for path in chain.paths()]
            names = tuple(self.names[id(module)] for module in modules)
            return self._swap(conv, names, tuple(_classes(owner, chain)), "")
        reason = why_not(conv, None, None) if isinstance(conv, _CONVS) else ""
        reason = reason or self.reasons.get(id(conv)) or self._why_unseen(name)
        return Swap((name,), (_class(conv),), reason)

    def _why_unseen(self, name: str) -> str:
        """Why no forward that was traced calls a module."""
        for holder in _holders(self.model, name):
            where = _class(holder)
            if is_ours(holder):
                return f"it stands in {where}, which is fused already"
            reason = self.analyzer.analysis(holder, holder.training).reason
            if reason and reason != NO_FORWARD:
                return f"{where}'s forward {reason}"
        return "no forward calls it as a module"

    # -- attention ---------------------------------------------------------------------------------

    def _why_no_mha(self, name: str, module: nn.MultiheadAttention) -> str:
        if name not in self.opened:
            return self._why_unseen(name)
        if own_class(module) is not nn.MultiheadAttention:
            return f"{_class(module)} is not nn.MultiheadAttention itself"
        missing = why_not_attention(module)
        return f"it has {missing}" if missing else ""

    def _why_no_attention(self, name: str, module: nn.Module) -> str:
        if any(_named_attention(inner) for inner in module.modules() if inner is not module):
            return ""  # it only holds one
        if is_ours(module):
            return "it is fused already"
        analysis = self.analyzer.analysis(module, module.training)
        if analysis.reason:
            return f"its forward {analysis.reason}"
        if any(variant.softmax for variant in analysis.variants):
            return "it computes a softmax where F.scaled_dot_product_attention would be taken"
        return ""


def _holders(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that a module is part of, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield submodule(model, name)


def _class(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))


def _is_conv(module: nn.Module) -> bool:
    """Whether a module is a convolution, if not one of torch.nn's: scripted or quantized."""
    if isinstance(module, _CONVS):
        return True
    elsewhere = isinstance(module, torch.jit.ScriptModule) or (
        type(module).__module__.startswith("torch.ao.")
    )
    return elsewhere and any(_class(module).startswith(kind.__name__) for kind in _CONVS)


def _named_attention(module: nn.Module) -> bool:
    """Whether a module says that it computes attention: by its class, or what its forward calls."""
    if "Attention" in _class(module) or _class(module).endswith("Attn"):
        return True
    forward = getattr(own_class(module), "forward", None)  # TorchScript has no such
    code = getattr(forward, "__code__", None)
    return "scaled_dot_product_attention" in getattr(code, "co_names", ())


def _classes(owner: nn.Module, chain: Chain) -> Iterator[str]:
    for node, step in zip(chain.nodes, chain.steps, strict=True):
        if step.kind == ADD:
            yield "residual"
        elif step.function is not None:
            yield type(step.function).__name__
        else:
            yield _class(submodule(owner, str(node.target)))
