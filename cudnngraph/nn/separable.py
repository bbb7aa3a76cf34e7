"""Depthwise-separable convolution as one module and one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..arguments import checked, explained
from ..errors import GraphError, Problem
from ..functional.conv_bn import Update, run_separable, stages_options
from ..policy import Policy
from ..runtime.specialize import intern_static
from . import sync
from .conv import FusedConvBlock, _named
from .counts import Counting, counted, held
from .hooks import wants_calls

_KINDS = ((FusedConvBlock,),) * 2


class FusedDepthwiseSeparable(nn.Module):
    """A convolution of each channel, norm, activation, then the same with one of 1 x 1: one graph.

    The children ``depthwise`` and ``pointwise`` are :class:`FusedConvBlock`; they hold the
    parameters and the running statistics, and are called where one has hooks or was replaced. The
    keys of the state dict are ``depthwise.0.weight``, ``depthwise.1.weight`` (of the norm) and so
    on. ``multiplier`` is how many channels the depthwise convolution makes of each. ``norm``,
    ``activation`` and what follows are those of a block, for both parts; ``pointwise_activation``
    may be another, or None.
    """

    @checked
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...] = 3,
        stride: int | tuple[int, ...] = 1,
        padding: int | str | tuple[int, ...] = 1,
        dilation: int | tuple[int, ...] = 1,
        multiplier: int = 1,
        bias: bool = False,
        norm: str | None = "batch",
        activation: str | nn.Module | None = "relu",
        pointwise_activation: str | nn.Module | None = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dims: int = 2,
        device: Any = None,
        dtype: torch.dtype | None = None,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {
            "bias": bias,
            "norm": norm,
            "eps": eps,
            "momentum": momentum,
            "affine": affine,
            "track_running_stats": track_running_stats,
            "dims": dims,
            "device": device,
            "dtype": dtype,
            "policy": policy,
        }
        wide = in_channels * multiplier
        self.depthwise = FusedConvBlock(
            in_channels,
            wide,
            kernel_size,
            stride,
            padding,
            dilation,
            groups=in_channels,
            activation=activation,
            **shared,
        )
        self.pointwise = FusedConvBlock(
            wide, out_channels, 1, activation=pointwise_activation, **shared
        )
        self.policy = policy

    @classmethod
    def from_blocks(
        cls, depthwise: FusedConvBlock, pointwise: FusedConvBlock, *, policy: Policy | None = None
    ) -> FusedDepthwiseSeparable:
        """The module over two blocks, as of ``FusedConvBlock.from_torch(conv, bn, act)``.

        Parameters are shared. Raises :class:`GraphError` where the first is not depthwise or the
        second not of 1 x 1 over its channels.
        """
        first, second = depthwise.conv, pointwise.conv
        problems = []
        if first.groups != first.in_channels:
            what = f"has groups={first.groups}"
            problems.append(Problem("depthwise", what, f"{first.in_channels}, its channels"))
        plain = set(second.kernel_size) | set(second.stride) == {1} and second.groups == 1
        if not plain or second.padding in ("same", "valid") or any(second.padding):
            what = f"has {second.extra_repr()}"
            problems.append(Problem("pointwise", what, "a kernel of 1 x 1, stride 1, no padding"))
        if second.in_channels != first.out_channels:
            what = f"takes {second.in_channels} channels"
            problems.append(Problem("pointwise", what, f"{first.out_channels}, those of depthwise"))
        if problems:
            raise GraphError(cls.__name__, problems)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.depthwise, made.pointwise, made.policy = depthwise, pointwise, policy
        made.training = depthwise.training
        return made

    def to_torch(self) -> nn.Sequential:
        """torch's own modules in a Sequential; parameters are shared. It takes no residual."""
        made = nn.Sequential(*self.depthwise.children(), *self.pointwise.children())
        made.training = self.training
        return made

    def _calls_blocks(self) -> bool:
        """Whether the two run one behind the other."""
        blocks: Any = (self.depthwise, self.pointwise)
        if wants_calls(blocks, _KINDS):
            return True
        return any(block._calls_children() or _is_synchronised(block.norm) for block in blocks)

    @explained
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x (N, C, spatial...) → (N, K, out...); ``residual`` is added before the last activation.

        By the batch's statistics or the running ones, as torch's batch norm decides. With
        ``norm="sync"`` and several ranks, or hooks, the two blocks run one behind the other.
        """
        y: torch.Tensor
        if self._calls_blocks():
            y = self.depthwise(x)
            y = self.pointwise(y) if residual is None else self.pointwise(y, residual)
            return y
        stages = [_stage(self.depthwise), _stage(self.pointwise)]
        with Counting(count for _, _, _, count in stages):
            return run_separable(
                intern_static(stages_options, *(options for options, _, _, _ in stages)),
                x,
                residual,
                [tensors for _, tensors, _, _ in stages],
                [update for _, _, update, _ in stages if update is not None],
                self.policy,
            )


def _is_synchronised(bn: Any) -> bool:
    """Whether the ranks of a group share a norm's statistics."""
    if type(bn) is not nn.SyncBatchNorm or not bn.training:
        return False
    return sync.several_ranks(bn.process_group)


def _stage(
    block: FusedConvBlock,
) -> tuple[tuple[Any, ...], tuple[Any, ...], Update | None, torch.Tensor | None]:
    """A block's options, as of :func:`norm_options`, its tensors, the running statistics to update
    with their momentum, and the count of batches."""
    conv, bn, act = block.conv, block.norm, block.activation
    kind, attrs = (None, ()) if act is None else _named(act)
    geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
    weights = (held(conv, "weight"), held(conv, "bias"))
    if bn is None:
        options = (geometry, kind, attrs, False, 0.0)
        return options, (*weights, None, None, None, None), None, None
    mean, var = held(bn, "running_mean"), held(bn, "running_var")
    momentum, count = counted(bn, block)
    by_batch = bn.training or (mean is None and var is None)
    if bn.training and not bn.track_running_stats:
        mean = var = None
    tensors = (*weights, mean, var, held(bn, "weight"), held(bn, "bias"))
    update = (mean, var, momentum) if by_batch and mean is not None else None
    return (geometry, kind, attrs, by_batch, bn.eps), tensors, update, count
