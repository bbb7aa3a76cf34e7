"""Calls of ATen overloads with arguments that torch's own tests have: what a model may be made of.

torch's table of operators (:mod:`torch.testing._internal`) has sample inputs for each. They are run
forward and backward; what torch dispatches then, and the overloads that it is asked for before it
takes them apart, are calls that the importer may meet.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 1 << 14  # elements of an operand


@dataclass(frozen=True)
class Call:
    """An overload and its arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As "aten.relu.default"."""
        return str(self.op)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The operands, in order."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
        """The results, of operands that are changed so."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, dict(self.kwargs)))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.op(*args, **kwargs)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype
    return repr(leaf)


class Calls:
    """Calls that are met, each overload at most ``most`` times, with other forms of arguments."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._met: dict[str, dict[Any, Call]] = {}

    def __iter__(self) -> Iterator[Call]:
        for name in sorted(self._met):
            yield from self._met[name].values()

    def __len__(self) -> int:
        return sum(map(len, self._met.values()))

    def add(self, op: Any, args: Any, kwargs: Any) -> None:
        """Keep a call, as it is made, of an overload of torch's that makes tensors of tensors."""
        if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
            return
        if op._schema.is_mutable:
            return
        known = self._met.setdefault(str(op), {})
        if len(known) >= self._most:
            return
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or any(
            type(each) is not torch.Tensor
            or each.layout != torch.strided
            or each.is_complex()
            or each.is_conj()
            or each.is_neg()
            or each.numel() > LARGEST
            for each in tensors
        ):
            return
        copies: dict[int, torch.Tensor] = {}

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = _copied(tensor.detach())
            return copies[id(tensor)]

        args, kwargs = pytree.tree_map_only(torch.Tensor, kept, (tuple(args), dict(kwargs)))
        known.setdefault(tuple(map(_form, leaves)), Call(op, args, kwargs))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, in its strides."""
    if any(stride == 0 for stride in tensor.stride()):
        return tensor.clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(tensor)


class _Dispatched(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls.add(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Interpreted(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, calls: Calls) -> None:
        super().__init__(module)
        self._calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self._calls.add(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def recorded(calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Run a function forward and backward, and as it is before torch takes it apart."""
    leaves = pytree.tree_leaves((args, kwargs))
    leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(leaf.numel() > LARGEST for leaf in leaves):
        return
    try:
        with warnings.catch_warnings(), _Dispatched(calls):
            warnings.simplefilter("ignore")
            made = pytree.tree_leaves(function(*args, **kwargs))
            wanted = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]
            ends = [x for x in made if isinstance(x, torch.Tensor) and x.requires_grad]
            if wanted and ends:
                seeds = [torch.randn_like(end) for end in ends]
                torch.autograd.grad(ends, wanted, seeds, allow_unused=True)
    except Exception:  # what torch itself does not take here
        pass
    free = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def of(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        put = pytree.tree_map_only(torch.Tensor, lambda _: next(given), (args, kwargs))
        return function(*put[0], **put[1])

    plain = [leaf.detach() for leaf in free]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = make_fx(of, pre_dispatch=True)(*plain)
            _Interpreted(whole, calls).run(*plain)
    except Exception:  # what torch's tracer does not take
        pass


def of_torchs_table(samples: int, most: int, seed: int = 0) -> Calls:
    """The calls that torch's table of operators leads to."""
    import pytest

    pytest.importorskip("expecttest", reason="torch's table of operators needs it")
    from torch.testing._internal.common_methods_invocations import op_db

    # Its import forbids to set flags outside of a context, which is other tests' own matter. What
    # is called torch.backends is no module, so that the name has to be set where its functions are.
    inside = torch.backends.disable_global_flags.__globals__
    inside["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
    random.seed(seed)
    torch.manual_seed(seed)
    calls = Calls(most)
    for info in op_db:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        try:
            given = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
            picked = []
            for number, sample in enumerate(given):
                if number >= samples:
                    break
                picked.append(sample)
        except Exception:  # a sample that needs what is not installed
            continue
        for sample in picked:
            recorded(calls, info.op, (sample.input, *sample.args), dict(sample.kwargs))
    return calls
