"""The feed-forward part of a transformer as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import functional
from ..arguments import checked, explained
from ..errors import GraphError, Problem
from ..policy import Policy
from .conv import ACTIVATION_OF, activation_module, why_no_activation
from .hooks import wants_calls

_KINDS = ((nn.Linear,),) * 3


class FusedMLP(nn.Module):
    """down_proj(act(up_proj(x))), or gated: down_proj(act(gate_proj(x)) * up_proj(x)).

    The children ``up_proj``, ``down_proj`` and, where ``gated``, ``gate_proj`` are ``nn.Linear``
    and hold the parameters, so the keys of the state dict are ``up_proj.weight``, ``up_proj.bias``
    and so on; they are called where one of them has hooks, or was replaced. ``activation`` is a
    name of :data:`~cudnngraph.graph.pointwise.ACTIVATIONS` or None, its attributes go as further
    keywords: ``activation="silu", gated=True`` is SwiGLU, ``"gelu"`` GeGLU.
    """

    @checked
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str | None = "gelu",
        gated: bool = False,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        policy: Policy | None = None,
        **activation_attrs: Any,
    ) -> None:
        super().__init__()
        activation_module(activation, activation_attrs)  # raises where there is none of that name
        place = {"device": device, "dtype": dtype}
        out = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, **place) if gated else None
        self.up_proj = nn.Linear(in_features, hidden_features, bias, **place)
        self.down_proj = nn.Linear(hidden_features, out, bias, **place)
        self.activation = activation
        self.activation_attrs = activation_attrs
        self.policy = policy

    @explained
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in_features) → (..., out_features)."""
        up, down, gate = self.up_proj, self.down_proj, self.gate_proj
        if wants_calls((up, down, gate), _KINDS):
            act: Any = activation_module(self.activation, self.activation_attrs) or nn.Identity()
            made: torch.Tensor = down(act(up(x)) if gate is None else act(gate(x)) * up(x))
            return made
        return functional.mlp(
            x,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            gate=None if gate is None else gate.weight,
            gate_bias=None if gate is None else gate.bias,
            activation=self.activation,
            policy=self.policy,
            **self.activation_attrs,
        )

    @classmethod
    def from_linears(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        gate: nn.Linear | None = None,
        activation: str | None = "gelu",
        *,
        policy: Policy | None = None,
        **activation_attrs: Any,
    ) -> FusedMLP:
        """The module over these layers, which it takes over: parameters are shared.

        Raises :class:`GraphError` where they do not fit together.
        """
        problems = [
            Problem(name, f"is a {type(layer).__name__}", "nn.Linear")
            for name, layer in (("up", up), ("down", down), ("gate", gate))
            if type(layer) is not nn.Linear and not (name == "gate" and layer is None)
        ]
        if not problems and up.out_features != down.in_features:
            what = f"has {down.in_features} inputs"
            problems = [Problem("down", what, f"{up.out_features}, the outputs of up")]
        if not problems and gate is not None and gate.weight.shape != up.weight.shape:
            what = f"has a weight {tuple(gate.weight.shape)}"
            problems = [Problem("gate", what, f"{tuple(up.weight.shape)}, that of up")]
        if problems:
            raise GraphError(cls.__name__, problems)
        made = cls(1, 1, activation=activation, device="meta", policy=policy, **activation_attrs)
        made.gate_proj, made.up_proj, made.down_proj = gate, up, down
        made.training = up.training
        return made

    @classmethod
    @checked
    def from_torch(cls, module: nn.Sequential, *, policy: Policy | None = None) -> FusedMLP:
        """The module for ``nn.Sequential(Linear, activation, Linear)``; parameters are shared.

        Dropout layers may stand in it where they do nothing: in eval mode, or of p=0. Raises
        :class:`GraphError` for another sequence.
        """
        layers: list[Any] = [
            layer
            for layer in module
            if not (isinstance(layer, nn.Dropout) and (layer.p == 0 or not layer.training))
        ]
        kinds = [type(layer) for layer in layers]
        if len(kinds) != 3 or kinds[::2] != [nn.Linear] * 2 or kinds[1] not in ACTIVATION_OF:
            listed = ", ".join(kind.__name__ for kind in kinds)
            expected = "Linear, an activation of a graph, Linear"
            raise GraphError(cls.__name__, [Problem("module", f"holds {listed}", expected)])
        up, act, down = layers
        if why := why_no_activation(act):
            raise GraphError(cls.__name__, [Problem("module", why)])
        kind, attrs = ACTIVATION_OF[type(act)](act)
        return cls.from_linears(up, down, None, kind, policy=policy, **attrs)

    def extra_repr(self) -> str:
        """The activation."""
        words = [f"activation={self.activation!r}"]
        return ", ".join(
            words + [f"{key}={value!r}" for key, value in self.activation_attrs.items()]
        )
