"""What stands in a rewritten forward where torch's calls stood."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .. import functional
from ..models.export import is_exporting
from ..ops.pointwise import SOFTPLUS_THRESHOLD
from ..policy import Policy
from ..runtime.specialize import LastCall
from .conv import ACTIVATION_OF, CONVS, run_block
from .hooks import wants_calls

CONV, NORM, THROUGH, ADD, ACT = "conv", "norm", "through", "add", "act"

#: Modules that hand their input on: always, or unless they train.
DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
THROUGHS: tuple[type[nn.Module], ...] = (nn.Identity, *DROPOUTS)

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True)
class Step:
    """One call of the run that a site stands for.

    ``type`` is the class of the module that is called. A norm that holds its own activation has
    that one's name in ``act``. An activation that is a function has a module of its own in
    ``function``. ``in_place`` is of an addition.
    """

    kind: str
    type: type[nn.Module] | None = None
    act: str = ""
    function: nn.Module | None = None
    in_place: bool = False


class Site:
    """A convolution with what follows it: in one call as far as that goes, else by torch.

    It is called with x, the residual (None for none) and a module for each step, None for an
    addition and for a function.
    """

    def __init__(self, name: str, steps: Sequence[Step], policy: Policy | None) -> None:
        self.__name__ = self.__qualname__ = name  # what torch.fx writes into the code
        self.__module__ = "fused"
        self.steps = tuple(steps)
        self.policy = policy
        self.kinds: tuple[Container[type], ...] = tuple(
            () if step.type is None else (step.type,) for step in steps
        )
        self.recent = LastCall()

    def same(self, other: Site) -> bool:
        """Whether it does what the other does."""
        return [_facts(step) for step in self.steps] == [_facts(step) for step in other.steps]

    def __call__(self, x: Any, residual: Any, *modules: Any) -> Any:
        conv = modules[0]
        if self._by_torch(x, modules):
            y, done = conv(x), 1
        else:
            y, done = self._fused(x, residual, conv, modules)
        for i in range(done, len(self.steps)):
            step = self.steps[i]
            if step.kind == ADD:
                y = y.add_(residual) if step.in_place else y + residual
            elif step.function is not None:
                y = step.function(y)
            else:
                y = modules[i](y)
        return y

    def _by_torch(self, x: Any, modules: Sequence[Any]) -> bool:
        """Whether torch's modules are to be called, one after the other."""
        if wants_calls(modules, self.kinds) or type(x) not in _PLAIN_TENSORS:
            return True
        conv = modules[0]
        weight = conv.weight
        dims = x.dim() - weight.dim()
        autocast = torch._C._is_any_autocast_enabled()
        return bool(
            conv.padding_mode != "zeros"
            or x.device.type not in ("cpu", "cuda")
            or weight.dtype not in _FLOATS
            or (x.dtype != weight.dtype and not autocast)
            or not (dims == 0 or (dims == -1 and self.steps[-1].kind == CONV))
        )

    def _fused(
        self, x: torch.Tensor, residual: Any, conv: Any, modules: Sequence[Any]
    ) -> tuple[torch.Tensor, int]:
        """The result of the first steps, and their number."""
        bn = act = added = None
        done = 1
        for i in range(1, len(self.steps)):
            step = self.steps[i]
            if step.kind == NORM:
                bn = modules[i]
                if step.act:
                    act = getattr(bn, step.act)
                    if wants_calls((act,), (ACTIVATION_OF,)) or not _takes(act):
                        bn = act = None
                        break
            elif step.kind == THROUGH:
                if isinstance(modules[i], DROPOUTS) and modules[i].training and modules[i].p:
                    break
            elif step.kind == ADD:
                if not _adds(conv, x, residual):
                    break
                added = residual
            else:
                act = modules[i] if step.function is None else step.function
                if not _takes(act):
                    act = None
                    break
            done = i + 1
        geometry: tuple[Any, ...]
        if isinstance(conv, CONVS):
            geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
        else:
            padding = (conv.padding, conv.output_padding)
            geometry = (conv.stride, *padding, conv.groups, conv.dilation)
        y = run_block(conv, bn, act, geometry, x, added, self.policy, self.recent, conv)
        return y, done


def _facts(step: Step) -> tuple[Any, ...]:
    return (step.kind, step.type, step.act, repr(step.function), step.in_place)


def _takes(act: nn.Module) -> bool:
    return not isinstance(act, nn.Softplus) or act.threshold == SOFTPLUS_THRESHOLD


def _adds(conv: Any, x: torch.Tensor, residual: Any) -> bool:
    """Whether a residual has the convolution's shape and dtype, so that no rule of torch's for
    others applies."""
    if type(residual) not in _PLAIN_TENSORS or residual.device != x.device:
        return False
    dtype = x.dtype
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        if dtype == torch.float64:
            return False
        dtype = torch.get_autocast_dtype(x.device.type)
    if residual.dtype != dtype or residual.dim() != x.dim():
        return False
    return tuple(residual.shape) == (x.shape[0], conv.out_channels, *_out_sizes(conv, x))


def _out_sizes(conv: Any, x: torch.Tensor) -> list[Any]:
    sizes = []
    padding = conv.padding
    transposed = not isinstance(conv, CONVS)
    for i, size in enumerate(x.shape[2:]):
        kernel, stride = conv.kernel_size[i], conv.stride[i]
        reach = conv.dilation[i] * (kernel - 1)
        if padding == "same":
            sizes.append(size)
            continue
        pad = 0 if padding == "valid" else 2 * padding[i]
        if transposed:
            sizes.append((size - 1) * stride - pad + reach + conv.output_padding[i] + 1)
        else:
            sizes.append((size + pad - reach - 1) // stride + 1)
    return sizes


class Attend:
    """F.scaled_dot_product_attention by ours, where the operands are what ours takes."""

    def __init__(self, name: str, policy: Policy | None) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fused"
        self.policy = policy

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if is_exporting() or not _attends(query, key, value, attn_mask, is_causal, enable_gqa):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, policy=self.policy
        )


def _attends(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, enable_gqa: bool) -> bool:
    for each in (q, k, v):
        if type(each) not in _PLAIN_TENSORS or each.dim() != 4 or each.is_nested:
            return False
        if each.device.type not in ("cpu", "cuda") or each.dtype not in _FLOATS:
            return False
    if not q.dtype == k.dtype == v.dtype or not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
        return False
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        return False
    if mask is None:
        return True
    if is_causal or type(mask) not in _PLAIN_TENSORS or mask.dim() not in (2, 3, 4):
        return False
    return mask.dtype in (torch.bool, q.dtype) and 0 not in mask.shape


def put_site(graph: fx.Graph, nodes: Sequence[fx.Node], site: Site) -> None:
    """Have one call stand where the last of a site's steps stood."""
    last = nodes[-1]
    (x,) = nodes[0].all_input_nodes
    residual = None  # looked up now, for it may be a site's result by now
    for before, node, step in zip(nodes, nodes[1:], site.steps[1:], strict=False):
        if step.kind == ADD:
            (residual,) = [each for each in node.all_input_nodes if each is not before]
    with graph.inserting_before(last):
        modules = [
            graph.create_node("get_attr", str(node.target)) if node.op == "call_module" else None
            for node in nodes
        ]
        made = graph.call_function(site, (x, residual, *modules))
    last.replace_all_uses_with(made)
    for node in reversed(nodes):
        graph.erase_node(node)
