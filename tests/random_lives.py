"""Random lives of the modules of :mod:`cudnngraph.nn`, each beside torch's own modules.

A life is made by its seed alone: a module of random arguments, then calls in random forms, and what
is done to modules between them: frozen, copied, pickled, loaded, moved to another dtype, its parts
changed, hooked or replaced. The same happens to a twin of torch's modules. Results, gradients and
buffers have to be the same after every call.

``RANDOM_LIVES=2000 pytest tests/cpu/nn/test_random_lives.py`` makes so many;
``RANDOM_FIRST=1234 RANDOM_LIVES=1`` that one.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.random_functions import ACTIVATIONS
from tests.random_tensors import BF16, F32, F64, Maker

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Twin(nn.Module):
    """The children of a module of ours, called one by one."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        for name, child in ours.named_children():
            made = Twin(child) if isinstance(child, cg.FusedConvBlock) else copy.deepcopy(child)
            self.add_module(name, made)
        self.training = ours.training

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        if "depthwise" in self._modules:
            return self.pointwise(self.depthwise(x), *more)
        parts = list(self.children())
        last = parts.pop() if not isinstance(parts[-1], (*NORMS, *CONVS)) else nn.Identity()
        y = parts[0](x)
        y = parts[1](y) if len(parts) > 1 else y
        return last(y + more[0] if more else y)


class Mlp(nn.Module):
    """The children of a :class:`FusedMLP`, called one by one."""

    def __init__(self, ours: Any, attrs: dict[str, Any]) -> None:
        super().__init__()
        for name, child in ours.named_children():
            self.add_module(name, copy.deepcopy(child))
        self.kind, self.attrs = ours.activation, attrs
        self.training = ours.training

    def forward(self, x: torch.Tensor) -> Any:
        act = ACTIVATIONS[self.kind or "identity"]
        gate: Any = self._modules.get("gate_proj")
        up = self.up_proj(x)
        up = act(up, **self.attrs) if gate is None else act(gate(x), **self.attrs) * up
        return self.down_proj(up)


class Norm(nn.Module):
    """torch's norm behind an addition."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        for name, parameter in ours.named_parameters():
            self.register_parameter(name, copy.deepcopy(parameter))
        self.shape, self.eps = ours.normalized_shape, ours.eps
        self.of_layer = isinstance(ours, nn.LayerNorm)

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        total = x + more[0] if more else x
        weight = self._parameters.get("weight")
        if self.of_layer:
            y = F.layer_norm(total, self.shape, weight, self._parameters.get("bias"), self.eps)
        else:
            y = F.rms_norm(total, self.shape, weight, self.eps)
        return (y, total) if more else y


class Attention(nn.Module):
    """torch's self-attention by the parameters of ours."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.in_proj_weight = copy.deepcopy(ours.in_proj_weight)
        self.in_proj_bias = copy.deepcopy(ours.in_proj_bias)
        self.out_proj = copy.deepcopy(ours.out_proj)
        self.heads, self.shared = ours.num_heads, ours.num_kv_heads
        self.causal = ours.attend.causal

    def forward(self, x: torch.Tensor) -> Any:
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        width = x.shape[2] // self.heads
        sizes = [n * width for n in (self.heads, self.shared, self.shared)]
        q, k, v = (t.unflatten(2, (-1, width)).transpose(1, 2) for t in packed.split(sizes, 2))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.out_proj(o.transpose(1, 2).flatten(2))


CONVS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def _attrs(m: Maker, kind: str | None) -> dict[str, Any]:
    if kind == "leaky_relu":
        return {"negative_slope": 0.2}
    return {"min": -0.5, "max": 0.7} if kind == "clamp" else {}


class Life:
    """A module, its twin, and what happens to both."""

    def __init__(self, seed: int) -> None:
        self.m = m = Maker(seed)
        self.seed, self.told = seed, list[str]()
        self.dtype = m.pick(F64, F64, F64, F32)
        self.hooks: list[Any] = []
        self.counts = [0, 0]
        torch.manual_seed(seed)
        kind = m.pick("block", "block", "block", "transposed", "separable", "norm", "mlp", "heads")
        self.kind, self.form, self.residual = kind, (1,), False
        self.ours, self.theirs = getattr(self, f"_{kind}")()
        for name, parameter in self.ours.named_parameters():
            with torch.no_grad():  # norms have ones and zeros
                made = torch.randn(parameter.shape, generator=m.numbers, dtype=F64) * 0.5
                parameter.copy_(made)
                dict(self.theirs.named_parameters())[name].copy_(made)
        self.told.append(f"{self.ours}")

    def _common(self) -> dict[str, Any]:
        m = self.m
        kind = m.pick(*ACTIVATIONS, None, "relu", "relu")
        return {
            "norm": m.pick("batch", "batch", "batch", "sync", None),
            "activation": kind,
            **_attrs(m, kind),
            "eps": m.pick(1e-5, 1e-2),
            "momentum": m.pick(0.1, 0.1, 0.3, None, 0.0, 1.0),
            "affine": m.chance(0.8),
            "track_running_stats": m.chance(0.8),
            "bias": m.chance(0.5),
            "dtype": self.dtype,
        }

    def _block(self) -> tuple[nn.Module, nn.Module]:
        dims, groups = self.m.pick(1, 2, 2, 2, 3), self.m.pick(1, 1, 2)
        self.form, self.residual = (2 * groups, *(5,) * dims), True
        ours = self._made(cg.FusedConvBlock, dims, groups)
        return ours, Twin(ours)

    def _made(self, kind: Any, dims: int, groups: int) -> Any:
        m = self.m
        options = {"stride": m.pick(1, 2), "padding": m.pick(0, 1, 2), "dilation": m.pick(1, 1, 2)}
        if kind is cg.FusedConvBlock and options["stride"] == 1 and m.chance(0.3):
            options["padding"] = "same"
        if kind is cg.FusedConvTransposeBlock and options["stride"] == 2:
            options["output_padding"] = m.pick(0, 1)
            options["padding"] = 0
        options |= {"groups": groups, "dims": dims, **self._common()}
        return kind(2 * groups, groups * m.pick(1, 2), m.pick(1, 3), **options)

    def _transposed(self) -> tuple[nn.Module, nn.Module]:
        dims, groups = self.m.pick(1, 2, 2, 3), self.m.pick(1, 1, 2)
        self.form, self.residual = (2 * groups, *(5,) * dims), True
        ours = self._made(cg.FusedConvTransposeBlock, dims, groups)
        return ours, Twin(ours)

    def _separable(self) -> tuple[nn.Module, nn.Module]:
        m, dims = self.m, self.m.pick(1, 2, 2)
        self.form, self.residual = (3, *(5,) * dims), True
        options = self._common()
        for name in ("negative_slope", "min", "max"):
            options.pop(name, None)
        options["pointwise_activation"] = m.pick("relu", None, "gelu")
        ours = cg.FusedDepthwiseSeparable(3, 4, multiplier=m.pick(1, 2), dims=dims, **options)
        return ours, Twin(ours)

    def _norm(self) -> tuple[nn.Module, nn.Module]:
        m = self.m
        self.form, self.residual = (2, 3, 6), True
        shape = m.pick(6, (6,), (3, 6))
        options = {"elementwise_affine": m.chance(0.7), "dtype": self.dtype}
        ours = m.pick(cg.FusedLayerNorm, cg.FusedRMSNorm)(shape, m.pick(1e-5, 1e-2), **options)
        return ours, Norm(ours)

    def _mlp(self) -> tuple[nn.Module, nn.Module]:
        m = self.m
        self.form = m.pick((6,), (3, 6), (2, 3, 6))
        kind = m.pick(*ACTIVATIONS, None)
        attrs = _attrs(m, kind)
        options = {"gated": m.chance(0.5), "bias": m.chance(0.6), "dtype": self.dtype, **attrs}
        ours = cg.FusedMLP(6, 5, m.pick(None, 4), kind, **options)
        return ours, Mlp(ours, attrs)

    def _heads(self) -> tuple[nn.Module, nn.Module]:
        m = self.m
        self.form = (self.m.pick(1, 4), 8)
        shared = m.pick(None, 1, 2)
        options = {"bias": m.chance(0.6), "causal": m.chance(0.4), "dtype": self.dtype}
        ours = cg.FusedMultiheadAttention(8, 4, shared, **options)
        return ours, Attention(ours)

    # -- what happens ------------------------------------------------------------------------------

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        change(self.ours)
        change(self.theirs)

    def events(self) -> list[str]:
        always = ["train", "eval", "freeze", "copy", "pickle", "load", "step", "last", "thaw"]
        blocks = ["bn_eval", "momentum", "act", "hook", "unhook", "weight", "no_bias", "stats"]
        return always + (blocks if self.kind in ("block", "transposed") else [])

    def happen(self) -> None:
        """Something between two calls."""
        m, event = self.m, self.m.pick(*self.events())
        self.told.append(event)
        if event in ("train", "eval"):
            self.both(lambda x: x.train(event == "train"))
        elif event in ("freeze", "thaw"):
            for name, parameter in self.ours.named_parameters():
                wanted = event == "thaw" or m.chance(0.5)
                parameter.requires_grad_(wanted)
                dict(self.theirs.named_parameters())[name].requires_grad_(wanted)
        elif event == "copy":
            self.unhook()
            self.ours = copy.deepcopy(self.ours)
        elif event == "pickle":
            self.unhook()
            file = io.BytesIO(pickle.dumps(self.ours))
            self.ours = pickle.load(file)
        elif event == "load":
            self.ours.load_state_dict(self.theirs.state_dict())
        elif event == "step":
            if any(True for _ in self.ours.parameters()):
                self.both(lambda x: torch.optim.SGD(x.parameters(), 0.01).step())
        elif event == "last":
            self.both(lambda x: x.to(memory_format=torch.channels_last) if self._flat() else x)
        elif event == "bn_eval":
            self.both(lambda x: [c.eval() for c in x.children() if isinstance(c, NORMS)])
        elif event == "momentum":
            momentum = m.pick(0.2, None, 0.5)
            self.both(lambda x: [setattr(c, "momentum", momentum) for c in _norms(x)])
        elif event == "stats":
            self.both(lambda x: [c.reset_running_stats() for c in _norms(x)])
        elif event == "act":
            act = m.pick(nn.ReLU(), nn.SiLU(), nn.PReLU(dtype=self.dtype), nn.Softsign())
            name = str(len(list(self.ours.children())) - 1)
            if type(self.ours._modules[name]) not in (*CONVS, *NORMS):
                self.both(lambda x: x._modules.__setitem__(name, copy.deepcopy(act)))
        elif event == "hook":
            for at, x in enumerate((self.ours, self.theirs)):
                child = next(iter(x.children()))
                self.hooks.append(child.register_forward_hook(self._counting(at)))
        elif event == "unhook":
            self.unhook()
        elif event == "weight":
            made = torch.randn(_conv(self.ours).weight.shape, dtype=self.dtype)
            self.both(lambda x: setattr(_conv(x), "weight", nn.Parameter(made.clone())))
        elif event == "no_bias":
            self.both(lambda x: setattr(_conv(x), "bias", None))

    def _flat(self) -> bool:
        return len(self.form) == 3 and self.kind in ("block", "transposed", "separable")

    def _counting(self, at: int) -> Any:
        def count(*args: Any) -> None:
            self.counts[at] += 1

        return count

    def unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    # -- calls -------------------------------------------------------------------------------------

    def call(self) -> str:
        """What is wrong with a call of both, "" for nothing."""
        m = self.m
        batch = m.pick(1, 2, 3, 0) if m.chance(0.3) else 3
        sizes = [n if n < 5 or at == 0 else m.pick(5, 5, 1, 8) for at, n in enumerate(self.form)]
        sizes = sizes if self.kind in ("block", "transposed", "separable") else list(self.form)
        x = m.tensor((batch, *sizes), self.dtype)
        way = m.pick("plain", "plain", "plain", "no_grad", "autocast", "inference")
        trained, seed = m.chance(0.6), m.rng.randrange(10**6)
        self.told.append(f"call {way} {tuple(x.shape)} {x.stride()}{' grad' * trained}")
        more: list[torch.Tensor] = []
        if self.residual and m.chance(0.4):
            counts = list(self.counts)
            shape = self._shape(x)
            more = (
                [m.tensor(x.shape if self.kind == "norm" else shape, self.dtype)] if shape else []
            )
            self.told[-1] += " residual" * len(more)
            self.counts = counts
        want, refused = self.run(self.theirs, x, way, trained, seed, *more)
        found, error = self.run(self.ours, x, way, trained, seed, *more)
        wrong = ""
        if error is not None:  # torch's own where its modules are called
            own = isinstance(error, cg.CudnnGraphError) or str(error) == str(refused)
            if refused is None or not own:
                wrong = f"raises {type(error).__name__}: {error}; torch {refused!r}"
        elif refused is not None:
            wrong = f"torch raises {refused!r}" if batch else ""
        else:
            wrong = self.compared(found, want, way)
        self.meet()
        return wrong

    def meet(self) -> None:
        """Have the twin go on from the same numbers: those of a call round elsewhere, and a norm of
        torch's that refuses a batch has counted it."""
        self.theirs.load_state_dict(self.ours.state_dict())
        for mine, other in zip(self.ours.parameters(), self.theirs.parameters(), strict=True):
            other.grad = None if mine.grad is None else mine.grad.clone()

    def _shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """The shape of the result, () where torch refuses the call."""
        try:
            with torch.no_grad():
                made = copy.deepcopy(self.theirs).eval()(x)
            return tuple(made.shape)
        except Exception:
            return ()

    def run(
        self, module: nn.Module, x: torch.Tensor, way: str, trained: bool, seed: int, *more: Any
    ) -> tuple[dict[str, Any], Exception | None]:
        module.zero_grad()
        leaf = x.detach().requires_grad_(trained and way != "inference")
        try:
            if way == "no_grad":
                with torch.no_grad():
                    made = module(leaf, *more)
            elif way == "inference":
                with torch.inference_mode():
                    made = module(leaf, *more)
            elif way == "autocast":
                with torch.autocast("cpu", BF16):
                    made = module(leaf, *more)
            else:
                made = module(leaf, *more)
            results = made if isinstance(made, tuple) else (made,)
            found: dict[str, Any] = {f"result {at}": y for at, y in enumerate(results)}
            found["shape"] = tuple(results[0].shape)
            found["grads"] = [y.requires_grad for y in results]
            if any(found["grads"]):
                numbers = torch.Generator().manual_seed(seed)
                loss = sum(
                    (y * torch.randn(y.shape, generator=numbers).to(y.dtype)).sum() for y in results
                )
                loss.backward()  # type: ignore[union-attr]
            named = module.named_parameters()
            found |= {f"grad of {n}": p.grad for n, p in named if p.grad is not None}
            if leaf.grad is not None:
                found["grad of x"] = leaf.grad
            found |= {f"buffer {n}": b.clone() for n, b in module.named_buffers()}
            return found, None
        except Exception as error:
            return {}, error

    def compared(self, found: dict[str, Any], want: dict[str, Any], way: str) -> str:
        if {*found} != {*want}:
            return f"only in one: { ({*found} ^ {*want}) }"
        if list(self.ours.state_dict()) != list(self.theirs.state_dict()):
            return f"keys {list(self.ours.state_dict())}"
        if self.counts[0] != self.counts[1] and self.hooks:
            return f"hooks ran {self.counts}"
        for name, value in want.items():
            mine = found[name]
            if not isinstance(value, torch.Tensor):
                if mine != value:
                    return f"{name}: {mine}, torch's {value}"
                continue
            if mine.shape != value.shape or mine.dtype != value.dtype:
                return f"{name}: {mine.dtype} {mine.shape}, torch's {value.dtype} {value.shape}"
            if not mine.is_floating_point():
                if not torch.equal(mine, value):
                    return f"{name}: {mine}, torch's {value}"
                continue
            if way == "autocast" and name.startswith("grad of "):  # some are all rounding
                continue
            coarse = BF16 if way == "autocast" else self.dtype
            allowed = numerics.OF_LIVES[coarse]
            apart = float((mine.double() - value.double()).norm().detach())
            if not apart <= allowed * (1.0 + float(value.double().norm())) and value.numel():
                return f"{name} is off by {apart:.3g}"
        return ""


def _conv(x: nn.Module) -> Any:
    return x._modules["0"]


def _norms(x: nn.Module) -> list[Any]:
    return [c for c in x.children() if isinstance(c, NORMS)]
