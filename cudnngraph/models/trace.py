"""The ATen ops of a model, had by running it once on tensors without memory.

torch.export says the same of more models, in ten times the time: it has to be ready for sizes that
change, for state, for control flow. Here every op that torch dispatches becomes a node of an FX
graph, in the order of the run; a few that torch would take apart (:data:`ATOMIC`) stay whole, as
torch.export leaves them. What is written over tensors becomes new ones (:mod:`.aliases`). Random
numbers that nothing reads are left out. What has others in its results, asks for the numbers in a
tensor, changes the model, or is unusual in any other way is given up: then torch.export is to say
what there is to say.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import operator
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.spec import overlaps_itself
from ..ops import meta as forms
from ..ops.forms import empty_like_meta
from . import casts, finite, flex
from .aliases import Aliases
from .compiler import COMPILER, aside, is_there, saying
from .covariances import COVARIANCES
from .ctc import CTC
from .dtypes import Mixed, dtypes_of_product
from .known_forms import KnownForms, mapped
from .picked import SIZES, Picks, Unpicked
from .python_calls import as_declared, interpolation, product
from .spectra import SPECTRA

_aten: Any = torch.ops.aten
_log = logging.getLogger(__name__)
_TORCH, _HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)

#: Ops that are one node each, though torch makes them of others.
ATOMIC = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"),
        *("linear", "matmul", "flatten", "reshape", "softmax", "log_softmax", "chunk"),
        *("scaled_dot_product_attention", "max_pool1d", "max_pool2d", "max_pool3d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "interpolate"),
    }
)
#: The functions that are such an op, and those that tell where memory is.
_FUNCTIONS: Mapping[Any, str] = {
    **{
        getattr(place, name): name
        for name in ATOMIC
        for place in (torch, torch.Tensor, torch._C._nn, F)
        if hasattr(place, name)
    },
    torch.Tensor.__matmul__: "matmul",
}
_OF_MEMORY: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name)
    for name in ("data_ptr", "storage", "_typed_storage", "untyped_storage")
)
#: Those that are made of products, which autocast casts for.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_WRITTEN_OUT = {**SPECTRA, **COVARIANCES, **CTC}
#: What assigns to ``tensor.data``, which no op says.
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: What makes Python's or numpy's numbers of a tensor.
_TO_NUMBERS: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__")
)
#: The overload that an op is which has another name in place.
_OVERLOADS: Mapping[Any, str] = {_aten.transpose_.default: "int"}
#: Reshapes that strides may forbid.
_OF_STRIDES: frozenset[Any] = frozenset((_aten.view.default, _aten._unsafe_view.default))
#: What an argument and a result may be made of.
_LEAVES = (
    *(torch.Tensor, type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Untraceable(Exception):
    """Why a model is not for this."""


class Writes(Untraceable):
    """It writes over ``tensor``, which it holds."""

    def __init__(self, op: Any, tensor: torch.Tensor) -> None:
        super().__init__(f"{op} writes over what the model holds")
        self.tensor = tensor


class Overlaps(Untraceable):
    """It writes over elements that are one in memory: no other way to import it is right."""


class Assigns(Untraceable):
    """It assigns to ``data`` of a tensor that it does not hold: torch.export loses that."""

    def __init__(self, line: str) -> None:
        super().__init__("it assigns to the data of a tensor")
        self.line = line


class Swaps(Untraceable):
    """It has two tensors change their places: torch.export gives results as if it had not."""


class ForwardMode(Untraceable):
    """It takes forward-mode gradients: torch.export gives up too, after seconds."""


class Foreign(Untraceable):
    """It takes or ``gives`` an object that is no tensor, plain value or container of those."""

    def __init__(self, leaf: Any, *, gives: bool) -> None:
        super().__init__(f"{'a result' if gives else 'an argument'} is a {type(leaf).__name__}")
        self.kind, self.gives = type(leaf).__name__, gives


class Asks(Untraceable):
    """It asks for the numbers in a tensor, at a ``line`` of a traceback."""

    def __init__(self, op: Any, line: str) -> None:
        super().__init__(f"{op} depends on the numbers in a tensor")
        self.line = line


class MetaTensor(torch.Tensor):
    """A tensor of some device without memory: ``meta`` has the same form on torch's meta device.

    (torch's own FakeTensor imports its compiler: a second.)
    """

    meta: torch.Tensor
    own_id: int  # another's behind torch.utils.swap_tensors, which exchanges attributes too
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, device: torch.device, real: torch.Tensor | None = None
    ) -> MetaTensor:
        made: MetaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=real is not None and real.requires_grad,
        )
        made.meta, made.own_id = meta, id(made)
        if isinstance(real, nn.Parameter):
            made._is_param = True
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Untraceable(f"{func} outside of the run")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Shape({list(self.shape)}, {self.dtype}, {self.device})"


class Traced:
    """The graph of a run, its constants by placeholder, the placeholders of its arguments. What
    the run has changed of the model is for the caller to put back."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.graph = torch.fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.placeholders: list[str] = []
        self._aliases = Aliases(self._new)
        self._shapes: dict[int, MetaTensor] = {}  # of what has memory, by its id
        self._real: dict[int, tuple[str, torch.Tensor]] = {}  # what stands for a constant
        self._known = KnownForms()
        self._picks = Picks(self._new, self._operand, self._empty, _line)
        self._alive: list[torch.Tensor] = []  # so that no other gets the id of one
        self._failed = False
        self._draws: list[torch.fx.Node] = []  # random numbers
        self.exchanged: list[str] = []  # parameters and buffers with other tensors in their place
        self.doubts: list[str] = []  # the lines where it has asked whether numbers are finite
        self._run(model, args, dict(kwargs))

    # -- the run -----------------------------------------------------------------------------------

    def _run(self, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        state: dict[str, torch.Tensor] = {}
        for tensors in (model.named_parameters, model.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                state[name] = self._held(name, tensor)
        leaves, form = pytree.tree_flatten((tuple(args), kwargs))
        _check_leaves(leaves, gives=False)
        names = _names(model, form, leaves)
        leaves = [
            self._given(leaf, name) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, name in zip(leaves, names, strict=True)
        ]
        shaped_args, shaped_kwargs = pytree.tree_unflatten(leaves, form)
        given = dict(state)
        with torch.no_grad(), _Dispatched(self), _Called(self):
            result = torch.func.functional_call(model, state, shaped_args, shaped_kwargs)
        if self._failed:
            raise Untraceable("it catches what an op has raised")
        self.exchanged = [name for name, tensor in given.items() if state[name] is not tensor]
        for tensor in state.values():  # as they are left, where nothing has read them since
            self._without_memory(tensor)
        now, now_form = pytree.tree_flatten((shaped_args, shaped_kwargs))
        if now_form != form or any(a is not b for a, b in zip(now, leaves, strict=True)):
            raise Untraceable("it changes its arguments")
        made, self.out_spec = pytree.tree_flatten(result)
        _check_leaves(made, gives=True)
        self.graph.output(
            tuple(self._operand(x) if isinstance(x, torch.Tensor) else x for x in made)
        )
        self._check_draws()
        self.constants = {name: tensor.detach() for name, tensor in self.constants.items()}

    def _check_draws(self) -> None:
        """Raise :class:`Untraceable` where a result is made of random numbers."""
        reached = {self.graph.output_node()}
        for node in reversed(list(self.graph.nodes) if self._draws else []):
            if node in reached:
                reached.update(node.all_input_nodes)
        for node in self._draws:
            if node in reached:
                raise Untraceable(f"{node.target} draws random numbers")

    def _shape(self, tensor: torch.Tensor) -> MetaTensor:
        """A tensor without memory in place of one that has it."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            raise Untraceable(f"an operand is a {type(tensor).__name__}, {tensor.layout}")
        form: Any = (tensor.shape, tensor.stride())
        with _no_modes():
            meta = torch.empty_strided(*form, dtype=tensor.dtype, device="meta")
            made = MetaTensor(meta, tensor.device, tensor)
        self._alive += [tensor, made]
        self._shapes[id(tensor)] = made
        return made

    def _held(self, name: str, tensor: torch.Tensor) -> MetaTensor:
        """A constant, which becomes a placeholder where something reads it."""
        found = self._shapes.get(id(tensor))
        if found is None:
            found = self._shape(tensor)
            self._real[id(found)] = (name, tensor)
        elif id(found) not in self._real:
            raise Untraceable("an argument is held by the model too")
        return found

    def _without_memory(self, tensor: torch.Tensor) -> MetaTensor:
        if not isinstance(tensor, MetaTensor):
            return self._held("constant", tensor)
        if tensor.own_id != id(tensor):
            raise Swaps("it swaps tensors")
        return tensor

    def _empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> MetaTensor:
        """A tensor without memory that no node is."""
        with _no_modes():
            meta = torch.empty(shape, dtype=like.dtype, device="meta")
            self._alive.append(made := MetaTensor(meta, like.device))
        return made

    def _given(self, tensor: torch.Tensor, name: str) -> MetaTensor:
        found = self._shapes.get(id(tensor))
        if id(found) in self._real:
            raise Untraceable("an argument is held by the model too")
        node = self.graph.placeholder(name)
        self.placeholders.append(node.name)
        if found is not None:  # the model is given one tensor twice, and nothing reads this node
            node.meta["val"] = found
            return found
        return self._see(self._shape(tensor), node)

    def _see(self, tensor: MetaTensor, node: torch.fx.Node) -> MetaTensor:
        node.meta["val"] = tensor
        self._alive.append(tensor)
        self._aliases.add(tensor, node)
        return tensor

    def _operand(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node of a tensor."""
        tensor = self._without_memory(tensor)
        if tensor in self._aliases:
            return self._aliases.node(tensor)
        if tensor in self._picks:
            raise self._picks.refused("what a mask picks is wanted as it is")
        if id(tensor) not in self._real:
            raise Untraceable("a tensor comes from nowhere")
        name, real = self._real[id(tensor)]
        with self.graph.inserting_before(None):  # before all ops: a rule may look ahead
            node = self.graph.placeholder(name)
        self.constants[node.name] = real
        self._see(tensor, node)
        return node

    # -- ops ---------------------------------------------------------------------------------------

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Remember what is raised, though the model may catch it and go another way."""
        try:
            yield
        except BaseException as error:
            self._failed = True
            if forward_ad._current_level >= 0 and type(error) in (Untraceable, RuntimeError):
                raise ForwardMode(str(error)) from error
            raise

    def dispatched(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Record an op that torch dispatches."""
        if op is torch.ops.prim.device.default:
            return args[0].device
        if not isinstance(op, torch._ops.OpOverload):
            raise Untraceable(f"{op} is none of torch's ops")
        if op is _aten._local_scalar_dense.default and isinstance(args[0], MetaTensor):
            answer = finite.answer(self._operand(args[0]))
            if answer is not None:
                self.doubts.append(_line())
                return answer
        if not op._schema.is_mutable:
            return self._new(op, args, kwargs)
        if op.namespace != "aten":
            raise Untraceable(f"{op} writes over its operands")
        return self._in_place(op, args, kwargs)

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record a call from Python: an op of :data:`ATOMIC`, or more calls."""
        if function in SIZES and args and args[0] in self._picks:
            raise self._picks.refused(f"{function.__name__} of what a mask picks")
        if function in _OF_MEMORY:
            raise Untraceable(f"it asks for {function.__name__}")
        if function in _TO_NUMBERS and isinstance(args[0], MetaTensor):
            raise Asks(function.__name__, _line())
        if function == _SET_DATA and isinstance(args[0], MetaTensor):
            if id(args[0]) in self._real:
                raise Writes(function, self._real[id(args[0])][1])
            raise Assigns(_line())
        name = _FUNCTIONS.get(function)
        # Under gradients and vmap they are what torch makes of them.
        plain = not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        if (
            function is torch.einsum
            and plain
            and not casts.enabled()
            and (pair := product(*args, **kwargs)) is not None
        ):
            function, name, args, kwargs = torch.matmul, "matmul", pair, {}
        if function in _WRITTEN_OUT and plain:
            with suppress(TypeError):
                return _WRITTEN_OUT[function](*args, **kwargs)
        if name is None:
            return function(*args, **kwargs)
        if not plain or (name in _RECURRENT and casts.enabled()):
            return function(*args, **kwargs)
        try:
            if function is F.interpolate:
                return self._whole(*interpolation(*args, **kwargs))
            packet = getattr(_aten, name)
            placed, named = as_declared(packet, function, args, kwargs)
            which = torch._C._jit_resolve_packet(f"aten::{name}", *placed, **named)
            if getattr(packet, which or "default")._schema.is_mutable:
                raise TypeError
        except (KeyError, TypeError, RuntimeError):  # arguments that only Python takes
            return function(*args, **kwargs)
        made = self._whole(getattr(packet, which or "default"), placed, named)
        return tuple(made) if isinstance(made, list) else made

    def _whole(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The results of an op of :data:`ATOMIC`, whose operands autocast may cast."""
        if casts.enabled():
            args, kwargs = casts.applied(op, args, kwargs, self._in_float32)
        return self._new(op, args, kwargs)

    def _in_float32(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same form that no node is."""
        shape = self._without_memory(tensor)
        with _no_modes():
            return MetaTensor(shape.meta.float(), shape.device)

    def _new(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The results of an op that makes tensors."""
        if op._schema.name in ("aten::batch_norm", "aten::instance_norm"):
            given = forms.bind_arguments(op, args, kwargs)
            if (
                given.get("training", given.get("use_input_stats"))
                and given["running_mean"] is not None
            ):
                raise Untraceable(f"{op} changes its statistics")

        def operand(leaf: Any) -> Any:
            return self._without_memory(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = mapped(operand, (args, kwargs))
        picked = self._picks.op(op, args, kwargs)
        if picked is not None:
            return picked
        result, device = self._computed(op, args, kwargs)
        many = isinstance(result, (tuple, list))
        metas = list(result) if many else [result]
        if any(
            not isinstance(each, torch.Tensor) for each in metas if each is not None or not many
        ):
            raise Untraceable(f"{op} gives no tensor")
        node = self._node(op, args, kwargs)
        if forms.is_random(op, args, kwargs):
            self._draws.append(node)
        with _no_modes():
            made = [None if each is None else MetaTensor(each, device) for each in metas]
        self._alive += [each for each in made if each is not None]
        node.meta["val"] = tuple(made) if many else made[0]
        for place, each in enumerate(made):
            if each is None:  # a gradient that nothing asks for
                continue
            own = self.graph.call_function(operator.getitem, (node, place)) if many else node
            own.meta["val"] = each
            self._aliases.made(each, own, op, args, kwargs, place if many else None)
        return type(result)(made) if many else made[0]

    def _in_place(self, op: Any, args: Any, kwargs: Any) -> Any:
        """One that writes over its first operand, as the op that makes a new tensor."""
        schema, name = op._schema, op._schema.name.removeprefix("aten::")
        packet = getattr(_aten, name.removesuffix("_"), None)
        pure = getattr(packet, _OVERLOADS.get(op, op._overloadname), None)
        written = [place for place, each in enumerate(schema.arguments) if each.is_write]
        if pure is None or not name.endswith("_") or written != [0] or pure._schema.is_mutable:
            raise Untraceable(f"{op} writes over its operands")
        if [a.name for a in schema.arguments] != [a.name for a in pure._schema.arguments]:
            raise Untraceable(f"{op} is no other form of {pure}")
        target = args[0]
        if not isinstance(target, MetaTensor) or id(target) in self._real:
            raise Writes(op, self._real[id(target)][1] if id(target) in self._real else target)
        if torch.Tag.inplace_view in op.tags:
            return self._reshaped(op, pure, args, kwargs)
        if target in self._picks:
            return self._picks.write(target, self._new(pure, args, kwargs))
        first = self._aliases.first(target)
        if id(first.tensor) in self._real:
            raise Writes(op, self._real[id(first.tensor)][1])
        if overlaps_itself(tuple(target.shape), target.stride()):
            raise Overlaps(f"{op} writes over elements that are one in memory")
        made = self._new(pure, args, kwargs)
        if made.shape != target.shape:
            raise Untraceable(f"{op} changes a shape")
        if made.dtype != target.dtype:
            made = self._new(_aten._to_copy.default, (made,), {"dtype": target.dtype})
        self._aliases.write(target, made)
        return target

    def _reshaped(self, op: Any, pure: Any, args: Any, kwargs: Any) -> Any:
        """One that changes how its first operand lies over its memory, as the op that makes a view:
        the operand is that view from then on."""
        target = args[0]
        if not self._aliases.may_become_view(target, pure):
            raise Untraceable(f"{op} changes a shape")
        with _no_modes():
            before = MetaTensor(target.meta, target.device)
        made = self._new(pure, args, kwargs)
        with _no_modes():
            op(*args, **kwargs)
        target.meta = made.meta
        self._alive.append(before)
        self._aliases.become(target, made, before)
        return target

    def _computed(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, torch.device]:
        """Return an op's result on the meta device, and the device that it is for."""
        devices: list[torch.device] = []
        told: list[torch.device] = []

        def form(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                told.append(leaf)
                return torch.device("meta")
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = leaf if isinstance(leaf, MetaTensor) else self._held("constant", leaf)
            devices.append(shape.device)
            metas.append(shape.meta)
            return shape.meta

        metas: list[torch.Tensor] = []
        placed, named = mapped(form, (args, kwargs))
        if not metas:
            return self._from_numbers(op, args, kwargs)
        several = dtypes_of_product(op, metas)
        if several:
            raise Mixed(op, several, _line())
        device = (told or sorted(devices, key=lambda each: each.type == "cpu"))[0]
        try:
            with _no_modes():
                return self._known.infer(op, placed, named, metas), device
        except (RuntimeError, NotImplementedError) as error:
            if _OF_NUMBERS & {*op.tags}:
                raise Asks(op, _line()) from error
            raise

    def _from_numbers(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, torch.device]:
        """The form and the device of the result of an op without tensors; the op is run, but for
        one that draws random numbers."""
        device = kwargs.get("device") or torch.get_default_device()
        with _no_modes():
            where = "meta" if forms.is_random(op, args, kwargs) else "cpu"
            made = op(*args, **{**kwargs, "device": torch.device(where)})
            return empty_like_meta(made), torch.device(device)

    def _node(self, op: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        def operand(leaf: Any) -> Any:
            return self._operand(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = mapped(operand, (args, kwargs))
        if op in _OF_STRIDES:  # what is written anew may have others
            op = _aten.reshape.default
        node = self.graph.call_function(op, args, kwargs)
        node.meta["stack_trace"] = _line()
        return node


#: Of ops whose result, or its shape, depends on numbers.
_OF_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


# -- helpers -------------------------------------------------------------------------------------


def _check_leaves(leaves: Sequence[Any], *, gives: bool) -> None:
    for leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            raise Foreign(leaf, gives=gives)


def _no_modes() -> Any:
    """Without the modes of the run, for what is no part of it."""
    return torch._C._DisableTorchDispatch()


def _line() -> str:
    """The line that is being run outside of torch and of this folder, as a traceback says it."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, _HERE, "<")):
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            place = f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
            return f"  {place}\n    {text}\n"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _names(model: nn.Module, form: Any, leaves: Sequence[Any]) -> Iterator[str]:
    """Return the names of the arguments: the parameters of ``forward`` if each is one leaf."""
    args, kwargs = pytree.tree_unflatten(list(range(len(leaves))), form)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    named = {value: name for name, value in bound.items() if isinstance(value, int)}
    return (named.get(place, f"args_{place}") for place in range(len(leaves)))


_CASTS = tuple(getattr(_aten.to, name) for name in _aten.to.overloads())


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be hidden from dynamo imports it

    def __init__(self, run: Traced) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if flex.higher_name(func) == "flex_attention":
            with self:
                return flex.attention(*args, **(kwargs or {}))
        if func in _CASTS:  # which a function of flex attention's makes below autograd
            with self:
                return func.decompose(*args, **(kwargs or {}))
        with self._run.noticing(), torch._C.DisableTorchFunction():  # on, if no function was called
            return self._run.dispatched(func, args, kwargs or {})


class _Called(TorchFunctionMode):
    def __init__(self, run: Traced) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._run.noticing():
            return self._run.called(func, args, kwargs or {})


class _NoCompiler:
    """Keeps this thread from importing torch's compiler."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.asked = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """As the import system asks."""
        if name == COMPILER and threading.get_ident() == self._thread:
            self.asked = True
            raise Untraceable(f"it needs {name}")


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    way: Sequence[str] = (),
    asked: list[str] | None = None,
) -> Traced | None:
    """``model`` called so, in one of the ``WAYS``; None where it is not for this. Raises
    :class:`Writes` where that is because it writes over what it holds, :class:`Foreign`, and
    :class:`~.dtypes.Mixed`. Where it asks for the numbers in a tensor is put into ``asked``.

    The compiler is kept out while it is not there yet, for what a model compiles within itself,
    control flow among it, and stands aside where it is.
    """
    try:
        with saying(way), casts.none_kept(), _unfused_scripts():
            return _traced(model, args, kwargs)
    except (Writes, Overlaps, Assigns, Swaps, ForwardMode, Foreign, Mixed):
        raise
    except Exception as error:  # whatever it is, torch.export is to say so
        if isinstance(error, (Asks, Unpicked)) and asked is not None:
            asked.append(error.line)
        _log.debug("%s is not traced: %s: %s", type(model).__name__, type(error).__name__, error)
        return None


def _unfused_scripts() -> AbstractContextManager[None]:
    """Have parts that torch.jit has scripted run op by op: what it has fused runs below modes."""
    jit: Any = torch.jit
    made: AbstractContextManager[None] = jit.optimized_execution(False)
    return made


def _traced(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    if not is_there():
        guard: Any = _NoCompiler()
        sys.meta_path.insert(0, guard)
        try:
            traced = Traced(model, args, kwargs)
            if not guard.asked:  # else the model may have caught that there is none
                return traced
        except (Writes, Overlaps, Assigns, Swaps, Foreign, Mixed):
            raise
        except Exception:
            if not guard.asked:
                raise
        finally:
            sys.meta_path.remove(guard)
    with aside():
        return Traced(model, args, kwargs)
