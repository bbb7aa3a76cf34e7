"""Convolution, batch norm, residual and activation as one module.

A block holds the very modules of torch that it stands for, as its children "0", "1" and "2": they
keep the parameters, the running statistics and the names in the state dict, and are called where
:func:`~cudnngraph.nn.hooks.wants_calls` says so alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..arguments import NotPlain, checked, explained, items
from ..errors import GraphError, Problem
from ..functional.conv import act_options, run_conv_act
from ..functional.conv_bn import fixed_momentum, norm_options, run_conv_norm_act
from ..graph.pointwise import ACTIVATIONS
from ..ops.pointwise import SOFTPLUS_THRESHOLD
from ..policy import Policy
from ..runtime.specialize import LastCall
from . import sync
from .counts import Counting, counted, held
from .hooks import has_hooks, wants_calls

CONVS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[nn.Module], ...] = (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Attrs = dict[str, Any]


def _clamp(min: float = -math.inf, max: float = math.inf) -> nn.Module:
    return nn.Hardtanh(min, max)


def _bounds(module: nn.Hardtanh) -> Attrs:
    """The bounds that are any."""
    bounds = {"min": module.min_val, "max": module.max_val}
    return {name: bound for name, bound in bounds.items() if math.isfinite(bound)}


# torch's module → the activation's name in a graph and its attributes.
ACTIVATION_OF: Mapping[type[nn.Module], Callable[[Any], tuple[str, Attrs]]] = {
    nn.ReLU: lambda m: ("relu", {}),
    nn.LeakyReLU: lambda m: ("leaky_relu", {"negative_slope": m.negative_slope}),
    nn.ELU: lambda m: ("elu", {"alpha": m.alpha}),
    nn.GELU: lambda m: ("gelu_tanh" if m.approximate == "tanh" else "gelu", {}),
    nn.SiLU: lambda m: ("silu", {}),
    nn.Sigmoid: lambda m: ("sigmoid", {}),
    nn.Tanh: lambda m: ("tanh", {}),
    nn.Softplus: lambda m: ("softplus", {"beta": m.beta}),
    nn.Mish: lambda m: ("mish", {}),
    nn.Hardtanh: lambda m: ("clamp", bounds) if (bounds := _bounds(m)) else ("identity", {}),
    nn.ReLU6: lambda m: ("relu6", {}),
    nn.Hardswish: lambda m: ("hardswish", {}),
    nn.Identity: lambda m: ("identity", {}),
}

# An activation's name in a graph → torch's module, from its attributes.
_MODULES: Mapping[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
    "clamp": _clamp,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "identity": nn.Identity,
}

_NORMS = frozenset({*NORMS, nn.SyncBatchNorm})


def activation_module(kind: str | nn.Module | None, attrs: Attrs) -> nn.Module | None:
    """torch's module for an activation given by name; None for none."""
    if kind is None or isinstance(kind, nn.Module):
        return kind
    if kind not in _MODULES:
        known = ", ".join(ACTIVATIONS)
        problem = Problem("activation", f"{kind!r} is unknown", f"one of {known}, None")
        raise GraphError("block", [problem])
    try:
        return _MODULES[kind](**attrs)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in attrs.items())
        expected = "what torch's module of it takes"
        problem = Problem("activation", f"{kind} with {given}: {error}", expected)
        raise GraphError("block", [problem]) from None


def why_not(conv: nn.Module, bn: nn.Module | None, act: nn.Module | None) -> str:
    """Why these modules cannot be one block, "" where they can."""
    kinds = (*CONVS, *TRANSPOSED)
    if type(conv) not in kinds:
        return f"{type(conv).__name__} is no convolution of torch"
    dims = (CONVS if type(conv) in CONVS else TRANSPOSED).index(type(conv)) + 1
    if conv.padding_mode != "zeros":
        return f"padding_mode='{conv.padding_mode}' is not 'zeros'"
    for module in (conv, bn):
        if module is not None and (hooked := _why_hooked(module)):
            return hooked
    if bn is not None:
        if type(bn) not in (NORMS[dims - 1], nn.SyncBatchNorm):
            return f"{type(bn).__name__} is not {NORMS[dims - 1].__name__}"
        if bn.num_features != conv.out_channels:
            return f"{type(bn).__name__} has {bn.num_features} features, not {conv.out_channels}"
    return "" if act is None else why_no_activation(act)


def why_no_activation(act: nn.Module) -> str:
    """Why a module is no activation of a graph, "" where it is one."""
    if type(act) not in ACTIVATION_OF:
        return f"{type(act).__name__} is no activation of a graph"
    if isinstance(act, nn.Softplus) and act.threshold != SOFTPLUS_THRESHOLD:
        return f"Softplus has threshold={act.threshold}, not {SOFTPLUS_THRESHOLD}"
    return _why_hooked(act)


def _why_hooked(module: nn.Module) -> str:
    name = type(module).__name__
    return f"{name} has hooks, which a block would not call" if has_hooks(module) else ""


def _places_of(
    convs: tuple[type[nn.Module], ...],
) -> Mapping[bool, tuple[Container[type[nn.Module]], ...]]:
    """The kinds of a block's children, in order, with a norm and without."""
    return {True: (convs, _NORMS, ACTIVATION_OF), False: (convs, ACTIVATION_OF)}


class _Block(nn.Module):
    """Shared by both blocks: the children, and the way to torch and back."""

    _kinds: tuple[type[nn.Module], ...]
    _places: Mapping[bool, tuple[Container[type[nn.Module]], ...]]  # by whether there is a norm
    policy: Policy | None

    def _hold(
        self,
        conv: nn.Module,
        bn: nn.Module | None,
        act: nn.Module | None,
        policy: Policy | None,
    ) -> None:
        reason = why_not(conv, bn, act)
        if not reason and type(conv) not in self._kinds:
            reason = (
                f"{type(conv).__name__} is none of {', '.join(k.__name__ for k in self._kinds)}"
            )
        if reason:
            raise GraphError(type(self).__name__, [Problem("block", reason)])
        self.policy = policy
        self._recent = LastCall()
        self._with_norm = bn is not None
        for place, child in enumerate(m for m in (conv, bn, act) if m is not None):
            self.add_module(str(place), child)

    @classmethod
    @checked
    def from_torch(
        cls,
        conv: nn.Module,
        bn: nn.Module | None = None,
        act: nn.Module | None = None,
        *,
        policy: Policy | None = None,
    ) -> Any:
        """The block that stands for torch's modules, which it takes over: parameters are shared.

        Raises :class:`GraphError` where there is no such block, with the reason.
        """
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block._hold(conv, bn, act, policy)
        block.training = conv.training
        return block

    def to_torch(self) -> nn.Sequential:
        """torch's own modules in a Sequential; parameters are shared. It takes no residual."""
        made = nn.Sequential(*self.children())
        made.training = self.training
        return made

    @property
    def conv(self) -> Any:
        """torch's convolution, which holds weight and bias."""
        return self._modules["0"]

    @property
    def norm(self) -> Any:
        """torch's batch norm, which holds its parameters and running statistics, or None."""
        return self._modules["1"] if self._with_norm else None

    @property
    def activation(self) -> nn.Module | None:
        """torch's activation, or None."""
        return self._modules.get("2" if self._with_norm else "1")

    def _calls_children(self) -> bool:
        """Whether to run torch's modules: where one was replaced by, or changed to, what a graph
        has not, too."""
        modules: Any = self._modules
        if wants_calls(modules.values(), self._places[self._with_norm]):
            return True
        if modules["0"].padding_mode != "zeros":
            return True
        act = modules.get("2" if self._with_norm else "1")
        return type(act) is nn.Softplus and act.threshold != SOFTPLUS_THRESHOLD

    def _by_children(
        self, x: torch.Tensor, residual: torch.Tensor | None, *sizes: Any
    ) -> torch.Tensor:
        """By torch's modules."""
        y: torch.Tensor = self.conv(x, *sizes)
        y = y if self.norm is None else self.norm(y)
        y = y if residual is None else y + residual
        act: Any = self.activation
        return y if act is None else cast(torch.Tensor, act(y))

    def _run(
        self, geometry: tuple[Any, ...], x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """The block on x. ``geometry`` as of :func:`act_options`."""
        modules: Any = self._modules
        bn = modules["1"] if self._with_norm else None
        act = modules.get("2" if self._with_norm else "1")
        return run_block(
            modules["0"], bn, act, geometry, x, residual, self.policy, self._recent, self
        )


def run_block(
    conv: Any,
    bn: Any,
    act: Any,
    geometry: tuple[Any, ...],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    policy: Policy | None,
    recent: LastCall,
    owner: object,
) -> torch.Tensor:
    """act(bn(conv(x)) + residual) of torch's modules; with a norm by the batch's statistics or the
    running ones, as torch's batch norm decides. ``geometry`` as of :func:`act_options`."""
    kind, attrs = (None, ()) if act is None else _named(act)
    weight, bias = held(conv, "weight"), held(conv, "bias")
    if bn is None:
        static = recent.static_of(act_options, geometry, kind, attrs)
        return run_conv_act(static, x, weight, bias, residual, policy, recent=recent)
    mean, var = held(bn, "running_mean"), held(bn, "running_var")
    tracks = bn.training and bn.track_running_stats
    momentum, count = counted(bn, owner)
    by_batch = bn.training or (mean is None and var is None)
    kept = tracks or not bn.training
    running = (mean, var) if kept else (None, None)
    affine = (held(bn, "weight"), held(bn, "bias"))
    tensors = (x, weight, bias, *running, *affine, residual)
    with Counting((count,)):
        if (
            bn.training
            and isinstance(bn, nn.SyncBatchNorm)
            and sync.several_ranks(bn.process_group)
        ):
            return sync.run_synchronised(
                geometry, kind, attrs, tensors, momentum, bn.eps, bn.process_group, policy
            )
        fixed = fixed_momentum(momentum, mean) if tracks else None
        static = recent.static_of(norm_options, geometry, kind, attrs, by_batch, bn.eps, fixed)
        return run_conv_norm_act(static, tensors, momentum, policy, recent=recent)


def _named(act: nn.Module) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """An activation's name in a graph and its attributes, sorted."""
    kind, attrs = ACTIVATION_OF[type(act)](act)
    return kind, tuple([(name, attrs[name]) for name in sorted(attrs)])


def _built(
    kinds: Sequence[Any],
    dims: int,
    channels: tuple[int, int],
    geometry: Attrs,
    norm: str | None,
    norm_options: Attrs,
    process_group: Any,
    activation: str | nn.Module | None,
    attrs: Attrs,
    place: Attrs,
) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """The modules that a block is made of."""
    if dims not in (1, 2, 3):
        raise GraphError("block", [Problem("block", f"dims={dims!r}", "1, 2 or 3")])
    if norm not in ("batch", "sync", None):
        raise GraphError("block", [Problem("block", f"norm={norm!r}", "'batch', 'sync' or None")])
    if process_group is not None and norm != "sync":
        raise GraphError("block", [Problem("block", "process_group is given", "norm='sync' too")])
    conv = kinds[dims - 1](*channels, **geometry, **place)
    bn: Any = None
    if norm == "sync":
        bn = nn.SyncBatchNorm(channels[1], **norm_options, process_group=process_group, **place)
    elif norm is not None:
        made: Any = NORMS[dims - 1]
        bn = made(channels[1], **norm_options, **place)
    return conv, bn, activation_module(activation, attrs)


class FusedConvBlock(_Block):
    """act(batch_norm(conv(x)) + residual), in 1, 2 or 3 spatial dims (``dims``).

    The arguments are those of torch's convolution and batch norm; ``norm=None`` leaves the norm
    out, ``activation`` is a name of :data:`~cudnngraph.graph.pointwise.ACTIVATIONS` with its
    attributes as further keywords, a module of torch, or None. Training and evaluation, running
    statistics and the state dict are as of ``nn.Sequential(conv, bn, act)``, which :meth:`to_torch`
    gives.

    ``norm="batch"`` takes the batch's statistics of one process, ``norm="sync"`` those of all ranks
    of ``process_group`` (None for all there are), as torch's SyncBatchNorm; on CPUs too.

    x (N, C, spatial...) → (N, K, out...) in x's layout: channels_last gives channels_last.
    """

    _kinds, _places = CONVS, _places_of(CONVS)

    @checked
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | str | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        norm: str | None = "batch",
        activation: str | nn.Module | None = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        dims: int = 2,
        device: Any = None,
        dtype: torch.dtype | None = None,
        policy: Policy | None = None,
        **activation_attrs: Any,
    ) -> None:
        super().__init__()
        modules = _built(
            self._kinds,
            dims,
            (in_channels, out_channels),
            {
                "kernel_size": kernel_size,
                "stride": stride,
                "padding": padding,
                "dilation": dilation,
                "groups": groups,
                "bias": bias,
            },
            norm,
            {
                "eps": eps,
                "momentum": momentum,
                "affine": affine,
                "track_running_stats": track_running_stats,
            },
            process_group,
            activation,
            activation_attrs,
            {"device": device, "dtype": dtype},
        )
        self._hold(*modules, policy)

    @explained
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x (N, C, spatial...), without a norm also (C, spatial...); ``residual`` has the result's
        shape."""
        if self._calls_children():
            return self._by_children(x, residual)
        conv: Any = self._modules["0"]
        return self._run((conv.stride, conv.padding, conv.dilation, conv.groups), x, residual)


class FusedConvTransposeBlock(_Block):
    """act(batch_norm(conv_transpose(x)) + residual); see :class:`FusedConvBlock`.

    The arguments stand in the order of torch's ConvTranspose2d, then those of the norm.
    """

    _kinds, _places = TRANSPOSED, _places_of(TRANSPOSED)

    @checked
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        norm: str | None = "batch",
        activation: str | nn.Module | None = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        dims: int = 2,
        device: Any = None,
        dtype: torch.dtype | None = None,
        policy: Policy | None = None,
        **activation_attrs: Any,
    ) -> None:
        super().__init__()
        modules = _built(
            self._kinds,
            dims,
            (in_channels, out_channels),
            {
                "kernel_size": kernel_size,
                "stride": stride,
                "padding": padding,
                "output_padding": output_padding,
                "groups": groups,
                "bias": bias,
                "dilation": dilation,
            },
            norm,
            {
                "eps": eps,
                "momentum": momentum,
                "affine": affine,
                "track_running_stats": track_running_stats,
            },
            process_group,
            activation,
            activation_attrs,
            {"device": device, "dtype": dtype},
        )
        self._hold(*modules, policy)

    @explained
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        output_size: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """x (N, C, spatial...), without a norm also (C, spatial...); ``output_size`` stands for an
        output_padding, as in torch."""
        if self._calls_children():
            return self._by_children(x, residual, output_size)
        conv = self.conv
        extra = conv.output_padding
        if output_size is not None:
            dims = len(conv.kernel_size)
            geometry = (conv.stride, conv.padding, conv.kernel_size, dims, conv.dilation)
            try:
                extra = conv._output_padding(x, items(output_size), *geometry)
            except (NotPlain, ValueError) as error:  # torch's own words
                problem = Problem("output_size", str(error))
                raise GraphError(type(self).__name__, [problem]) from None
        geometry = (conv.stride, conv.padding, tuple(extra), conv.groups, conv.dilation)
        return self._run(geometry, x, residual)
