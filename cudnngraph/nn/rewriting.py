"""Give a module the forward that was found for it, and take it back.

The module keeps its children, its parameters and its names. It becomes of a class derived from its
own, as torch's parametrizations do: a forward on the instance would be that of the original in a
replica of ``nn.DataParallel``. Whatever differs from what was traced calls the forward of old.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from ..models.export import is_exporting
from ..policy import Policy
from .attention import self_attention, why_not_attention
from .chains import Analyzer, Variant
from .hooks import has_hooks
from .sites import Attend, Site
from .tracing import DEFAULT, LIST, Guard, parameters, submodule

PROGRAM = "_rewritten"

_DERIVED: dict[type, type] = {}


class Program:
    """The forward of one module; without a function if it is to be found again.

    ``taken`` are the paths of the convolutions in it, and "" if it has attention. ``kept`` are
    the objects that the code compares with.
    """

    def __init__(
        self,
        policy: Policy | None,
        forward: Any = None,
        taken: tuple[str, ...] = (),
        kept: tuple[Any, ...] = (),
    ) -> None:
        self.policy, self.forward, self.taken, self.kept = policy, forward, taken, kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return Program(self.policy, self.forward, self.taken, copy.deepcopy(self.kept, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self.policy,)


def taken_by(module: nn.Module) -> list[nn.Module]:
    """The convolutions and the attention that a module's new forward runs fused."""
    program = module.__dict__.get(PROGRAM)
    found = []
    for path in () if program is None else program.taken:
        try:
            found.append(submodule(module, path))
        except AttributeError:  # it was taken out since
            continue
    return found


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user gave a module."""
    kind = type(module)
    own: type[nn.Module] = kind.__dict__.get("_replaces", kind)
    return own


def restore(module: nn.Module) -> bool:
    """Take a module's new forward away; whether it had one."""
    if PROGRAM not in module.__dict__ or own_class(module) is type(module):
        return False
    del module.__dict__[PROGRAM]
    module.__class__ = own_class(module)
    return True


def install(module: nn.Module, program: Program) -> bool:
    """Give a module a new forward; whether its class can be derived from."""
    try:
        module.__class__ = _derived(type(module))
    except TypeError:
        return False
    module.__dict__[PROGRAM] = program
    return True


def _derived(base: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of ``base`` with a new forward. It has its name."""
    if base in _DERIVED:
        return _DERIVED[base]
    original: Any = base.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        program = self.__dict__.get(PROGRAM)
        if program is None or program.forward is None:
            return original(self, *args, **kwargs)
        return program.forward(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = base.__reduce_ex__(self, protocol)
        if type(reduced) is tuple and reduced[0] is getattr(copyreg, "__newobj__", None):
            (_, (_, *rest), *state) = reduced
            return (_new, (base, *rest), *state)
        return reduced

    def __setstate__(self: Any, state: Any) -> None:
        own: Any = base
        own.__setstate__(self, state)
        program = self.__dict__.get(PROGRAM)
        if program is not None and program.forward is None:
            restore(self)
            rewrite(self, Analyzer(program.policy))

    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_replaces": base,
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__setstate__": __setstate__,
    }
    made = types.new_class(base.__name__, (base,), {}, lambda space: space.update(names))
    _DERIVED[base] = made
    return made


def _new(base: type[nn.Module], *args: Any) -> nn.Module:
    made = base.__new__(base, *args)
    made.__class__ = _derived(base)
    return made


# -- find and give ---------------------------------------------------------------------------------


def rewrite(module: nn.Module, analyzer: Analyzer) -> None:
    """Give a module a new forward, if one was found for it."""
    program = program_of(module, analyzer)
    if program is not None:
        install(module, program)


def program_of(module: nn.Module, analyzer: Analyzer) -> Program | None:
    """The new forward of a module, None if there is nothing to do in it."""
    if type(module) is nn.MultiheadAttention:
        why = why_not_attention(module)
        return None if why else Program(analyzer.policy, _attention_forward, ("",))
    modes = [
        [v for v in analyzer.analysis(module, mode).variants if v.changes] for mode in (True, False)
    ]
    return _Writer(module, modes).program(analyzer.policy) if any(modes) else None


def _attention_forward(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """nn.MultiheadAttention's forward: self-attention without a padding mask by ours."""
    if _by_original() or not (
        (query is key and key is value)
        and not need_weights
        and key_padding_mask is None
        and type(query) is torch.Tensor
        and why_not_attention(self) == ""
        and _fits(self, query, attn_mask, is_causal)
    ):
        return nn.MultiheadAttention.forward(
            self, query, key, value, key_padding_mask, need_weights, attn_mask,
            average_attn_weights, is_causal,
        )  # fmt: skip
    mask = attn_mask
    if mask is not None and not is_causal:
        mask = mask.logical_not() if mask.dtype == torch.bool else mask
        mask = mask if mask.dim() == 2 else mask.view(-1, self.num_heads, *mask.shape[1:])
    out = self_attention(
        query,
        (self.in_proj_weight, self.in_proj_bias),
        (self.out_proj.weight, self.out_proj.bias),
        self.num_heads,
        None if is_causal else mask,  # whose place the flag takes in torch's
        is_causal,
        self.dropout if self.training else 0.0,
        self.__dict__[PROGRAM].policy,
    )
    return out, None


def _fits(self: Any, x: torch.Tensor, mask: Any, is_causal: bool) -> bool:
    """Whether the operands are what ours takes."""
    weight = self.in_proj_weight
    if x.dim() != 3 or x.is_nested or x.device.type not in ("cpu", "cuda"):
        return False
    if x.shape[2] != self.embed_dim or 0 in x.shape:
        return False
    if x.dtype != weight.dtype or torch._C._is_any_autocast_enabled():
        return False
    if mask is None:
        return not is_causal
    batch, length, _ = x.shape
    shapes = ((length, length), (batch * self.num_heads, length, length))
    return tuple(mask.shape) in shapes and mask.dtype in (torch.bool, x.dtype)


# -- the code --------------------------------------------------------------------------------------


def _by_original() -> bool:
    """Whether torch's own ops are wanted: for ``fuse``, or by torch.jit.trace."""
    jit: Any = torch.jit
    return is_exporting() or bool(jit.is_tracing())


def _inner(value: Any, names: str) -> Any:
    for name in names.split("."):
        value = getattr(value, name, None)
    return value


class _Writer:
    """Writes the forward of one module: the traced ones, each under its guards."""

    def __init__(self, module: nn.Module, modes: list[list[Variant]]) -> None:
        self.module, self.modes = module, modes
        self.kept: list[Any] = []
        # Without a __name__, by which torch.compile would import a module.
        self.space: dict[str, Any] = {
            "_original": type(module).forward,
            "_by_original": _by_original,
            "_has_hooks": has_hooks,
            "_own_class": own_class,
            "_inner": _inner,
            "_Tensor": torch.Tensor,
        }

    def program(self, policy: Policy | None) -> Program:
        """The forward as a function."""
        training, evaluation = self.modes
        body = []
        if _alike(training, evaluation):
            body += self._calls(training, "both", "        ")
        else:
            for mode, variants in ((True, training), (False, evaluation)):
                if variants:
                    body.append(f"        if self.training is {mode}:")
                    body += self._calls(variants, "train" if mode else "eval", " " * 12)
        head, again, variadic = self._signature()
        lines = [f"def forward({head}):"]
        lines.append(f"    if not {' and not '.join(['_by_original()', *variadic])}:")
        lines += body
        lines.append(f"    return _original({again})")
        self._run("\n".join(lines) + "\n")
        forward = self.space["forward"]
        forward.__qualname__ = f"{type(self.module).__qualname__}.forward"
        variants = [*training, *evaluation]
        taken = [chain.paths()[0] for variant in variants for chain in variant.chains]
        taken += [""] * any(variant.attentions for variant in variants)
        return Program(policy, forward, tuple(dict.fromkeys(taken)), tuple(self.kept))

    def _run(self, source: str) -> None:
        name = f"<forward of {type(self.module).__name__}, replaced by cudnngraph>"
        exec(compile(source, name, "exec"), self.space)

    def _signature(self) -> tuple[str, str, list[str]]:
        """The parameters as they are declared, as they are handed on, and those that are any."""
        head, again, variadic = ["self"], ["self"], []
        starred = False
        found = parameters(self.module)
        last = [each.name for each in found if each.kind is each.POSITIONAL_ONLY][-1:]
        for each in found:
            name = each.name
            if each.kind is each.VAR_POSITIONAL:
                starred = True
            elif each.kind is each.KEYWORD_ONLY and not starred:
                head.append("*")
                starred = True
            stars = "*" * (each.kind is each.VAR_POSITIONAL)
            stars += "**" * (each.kind is each.VAR_KEYWORD)
            text = f"{stars}{name}"
            if stars:
                variadic.append(name)
                again.append(text)
            else:
                again.append(f"{name}={name}" if each.kind is each.KEYWORD_ONLY else name)
            if each.default is not each.empty:
                self.space[f"_default_{name}"] = each.default
                text += f"=_default_{name}"
            head.append(text)
            if [name] == last:
                head.append("/")
        return ", ".join(head), ", ".join(again), variadic

    def _calls(self, variants: list[Variant], mode: str, indent: str) -> list[str]:
        lines = []
        for i, variant in enumerate(variants):
            name = f"_{mode}_{i}"
            given = variant.traced.given
            names = [key for key, kind in given.items() if kind != DEFAULT]
            self._define(variant.traced.graph, name, names)
            tests = [self._given(key, kind) for key, kind in given.items()]
            tests += [self._guard(guard, mode) for guard in variant.traced.guards]
            lines.append(f"{indent}if {' and '.join(t for t in tests if t) or 'True'}:")
            lines.append(f"{indent}    return {name}({', '.join(['self', *names])})")
        return lines

    def _define(self, graph: fx.Graph, name: str, names: list[str]) -> None:
        """A traced forward as a function of its operands."""
        code = graph.python_code("self")
        source = code.src.replace("def forward(", f"def {name}(", 1)
        space = dict(code.globals)
        exec(compile(source, f"<traced forward of {type(self.module).__name__}>", "exec"), space)
        self.space[name] = space[name]

    def _given(self, name: str, kind: str) -> str:
        if kind == LIST:
            return f"isinstance({name}, (list, tuple))"
        if kind != DEFAULT:
            return f"isinstance({name}, _Tensor)"
        default = next(each.default for each in parameters(self.module) if each.name == name)
        if default is None or isinstance(default, bool):
            return f"{name} is {default}"
        if type(default) in (int, float, str):
            return f"type({name}) is {type(default).__name__} and {name} == {default!r}"
        return f"{name} is _default_{name}"

    def _guard(self, guard: Guard, mode: str) -> str:
        """A guard as an expression."""
        module = "self"
        for part in guard.path.split(".") if guard.path else ():
            module += f"._modules[{part!r}]"
        value = guard.value
        if guard.kind == "length":
            return f"len({module}._modules) == {value}"
        if guard.kind == "hooks":
            return f"not _has_hooks({module})"
        if guard.kind == "training":
            return f"{module}.training is self.training"
        if guard.kind == "class":
            return f"_own_class({module}) is {self._keep(value)}"
        if guard.kind == "there":
            return f"getattr({module}, {guard.name!r}, None) is {'not ' if value else ''}None"
        read = f"getattr({module}, {guard.name!r}, None)"
        if "." in guard.name:
            read = f"_inner({module}, {guard.name!r})"
        if guard.kind == "same":
            return f"{read} is {self._keep(value.value)}"
        if value is None or isinstance(value, bool):
            return f"{read} is {value}"
        if isinstance(value, tuple):
            return f"tuple({read} or ()) == {self._constant(value)}"
        return f"{read} == {self._constant(value)}"

    def _constant(self, value: Any) -> str:
        name = f"_constant_{sum(key.startswith('_constant_') for key in self.space)}"
        self.space[name] = value
        return name

    def _keep(self, value: Any) -> str:
        self.kept.append(value)
        return f"self.__dict__[{PROGRAM!r}].kept[{len(self.kept) - 1}]"


def _alike(some: list[Variant], others: list[Variant]) -> bool:
    """Whether the forwards of both modes are the same."""
    return len(some) == len(others) and all(
        a.traced.given == b.traced.given
        and a.traced.guards == b.traced.guards
        and _same_graph(a.traced.graph, b.traced.graph)
        for a, b in zip(some, others, strict=True)
    )


def _same_graph(one: fx.Graph, other: fx.Graph) -> bool:
    if len(one.nodes) != len(other.nodes):
        return False
    pairs: dict[fx.Node, fx.Node] = {}

    def mapped(value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: pairs[node])

    for a, b in zip(one.nodes, other.nodes, strict=True):
        if a.op != b.op or not _same_target(a.target, b.target):
            return False
        args: Mapping[str, Any] = mapped(a.kwargs)
        if repr((mapped(a.args), args)) != repr((b.args, b.kwargs)):
            return False
        pairs[a] = b
    return True


def _same_target(one: Any, other: Any) -> bool:
    if isinstance(one, Site):
        return isinstance(other, Site) and one.same(other)
    if isinstance(one, Attend):
        return isinstance(other, Attend)
    return bool(one is other or one == other)
