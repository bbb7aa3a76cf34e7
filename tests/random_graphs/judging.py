"""Cases compiled, run twice, and compared with torch in float64, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.grad.differentiate import differentiable
from tests import numerics
from tests.random_graphs.cases import Case, widened
from tests.random_graphs.eager import Eager, Module, Tf32
from tests.random_graphs.ops import F32, F64, Tensor

NO_DIGITS = 0.1  # torch off by more than this: nothing is left to compare
MORE_WAYS = 40  # of rounding, where a result is off by more than torch in a few ways
MIXED_WAYS = 16  # of reading operands in TF32, some of them rounded and some cut off
NO_DIGITS_FACTOR = 8.0  # then how much farther off than torch at most


class Wrong(AssertionError):
    """A result that is not what it should be."""


@dataclass
class Verdict:
    """The outcome of a case: "right", "refused: ...", or "wrong: ...".

    ``without_digits`` counts results that have no digits even by torch.
    """

    outcome: str
    without_digits: int = 0


def judge(of: Case, device: torch.device | str = "cpu", policy: cg.Policy | None = None) -> Verdict:
    """Compile the case, run it twice, compare all results, and gradients if it is trained.

    A CUDA error that does not end with the call goes through.
    """
    place = torch.device(device)
    of = of if place.type == "cuda" else replace(of, tf32=False)
    policy = policy or cg.Policy(verify="off", tune="heuristic")
    policy = replace(policy, allow_tf32=of.tf32)
    try:
        return Verdict("right", _judged(of, place, policy))
    except (cg.NotSupported, cg.GraphError, cg.FeatureMissing, cg.CannotImport) as refusal:
        return Verdict(f"refused: {type(refusal).__name__}: {refusal}")
    except Wrong as wrong:
        return Verdict(f"wrong: {wrong}")
    except Exception as error:
        if place.type == "cuda":
            torch.cuda.synchronize()  # raises again if the device is lost
        return Verdict(f"wrong: raises {type(error).__name__}: {error}")


def _there(value: Tensor, place: torch.device) -> Tensor:
    """The same elements in the same strides on a device, at an odd place if it lies at one."""
    if place.type == "cpu":
        return value
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    offset = value.storage_offset()
    whole = value.as_strided((offset + extent,), (1,), 0).to(place)
    return whole.as_strided(value.shape, value.stride(), offset)


def _judged(of: Case, place: torch.device, policy: cg.Policy) -> int:
    given = of.tensors()
    there = {name: _there(value, place) for name, value in given.items()}
    if of.trained:
        return _trained(of, given, there, place, policy)
    wide = {name: widened(value) for name, value in given.items()}
    exact = Eager(of)(wide)
    yardstick = Yardstick(of, lambda eager: eager(wide))
    if of.fused:
        data = tuple(there[g.name] for g in of.inputs.values() if g.kind != "weight")
        run: Callable[[], Any] = _fused(of, there, data, policy)
    else:
        exe = of.graph(given).compile(place, policy=policy)
        run = lambda: exe(**there)  # noqa: E731
    none = 0
    before: list[Tensor] = []
    for turn in ("", " of the second run"):
        made = _several(run())
        assert len(made) == len(exact)
        if before and all(torch.equal(a, b) for a, b in zip(made, before, strict=True)):
            break
        none = 0
        for place_, out in enumerate(made):
            _declared_as(of, place_, out)
            none += check_result(of, out, exact[place_], yardstick, place_, f"y{place_}{turn}")
        before = [out.clone() for out in made]
    return none


@dataclass
class Yardstick:
    """Results of torch for a case, rounded in several ways; ``run`` computes those of one way.

    A few ways are enough where ours is close. Where it is not, and the numbers are few, those may
    all be close by luck, so there are more to ask for.
    """

    of: Case
    run: Callable[[Eager], list[Tensor]]
    made: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ways: list[str | int | Tf32] = ["nearest", 1, 2, 3, 4]
        if self.of.dtype == F32:
            ways.append("torch")
        if self.of.tf32:
            ways += [Tf32(), Tf32(cut=False)]
        self.made += [self.run(Eager(self.of, way)) for way in ways]

    def more(self) -> None:
        """More ways, once."""
        if len(self.made) < MORE_WAYS:
            ways: list[int | Tf32] = list(range(5, MORE_WAYS))
            if self.of.tf32:
                ways += [Tf32(mixed=way) for way in range(MIXED_WAYS)]
            self.made += [self.run(Eager(self.of, way)) for way in ways]

    def off(self, at: int, exact: Tensor) -> float:
        """The largest distance from ``exact``, relative to its size."""
        return max(numerics.relative_error(each[at], exact) for each in self.made)

    def distance(self, at: int, exact: Tensor) -> float:
        """The largest distance."""
        return max(float((each[at].double() - exact).norm()) for each in self.made)


def _several(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def _fused(
    of: Case, there: Mapping[str, Tensor], data: tuple[Tensor, ...], policy: cg.Policy
) -> Callable[[], Any]:
    fused = cg.fuse(Module(of, there).eval(), data, policy=policy, check=False)

    def run() -> Any:
        with torch.no_grad():
            return fused(*data)

    return run


def _declared_as(of: Case, at: int, out: Tensor) -> None:
    """Shape, dtype and strides of an output are those asked for."""
    result = of.results[at]
    shape = of.values[result.value].shape
    if tuple(out.shape) != shape:
        raise Wrong(f"y{at} has shape {tuple(out.shape)}, not {shape}")
    dtype = result.dtype or of.dtype
    mixed = any(given.dtype == F32 for given in of.inputs.values())
    if out.dtype != dtype and not mixed:
        raise Wrong(f"y{at} is {out.dtype}, not {dtype}")
    if result.layout:
        form = torch.channels_last if result.layout == "channels_last" else torch.contiguous_format
        if not out.is_contiguous(memory_format=form):
            raise Wrong(f"y{at} has strides {out.stride()}, not {result.layout}")


def _limit(of: Case, result: torch.dtype, theirs: float) -> float:
    """The largest relative error allowed where torch is off by ``theirs``."""
    bound = numerics.bound(of.dtype, result, tf32=of.tf32, terms=of.terms)
    return max(bound, numerics.TORCH_FACTOR * theirs)


def check_result(
    of: Case, out: Tensor, exact: Tensor, yardstick: Yardstick, at: int, what: str
) -> bool:
    """Whether torch has no digits of it either; raises :class:`Wrong` where ours is too far off."""
    error = numerics.relative_error(out, exact)
    if not error <= _limit(of, out.dtype, yardstick.off(at, exact)):
        yardstick.more()
    theirs = yardstick.off(at, exact)
    if theirs > NO_DIGITS:
        off, most = float((widened(out.cpu()) - exact).norm()), yardstick.distance(at, exact)
        if not off <= NO_DIGITS_FACTOR * most:
            raise Wrong(f"{what} is all rounding and off by {off:.3g}, torch by {most:.3g}")
        return True
    limit = _limit(of, out.dtype, theirs)
    if not error <= limit:
        raise Wrong(f"{what} is off by {error:.3g}, torch by {theirs:.3g}, allowed {limit:.3g}")
    return False


def _trained(
    of: Case,
    given: Mapping[str, Tensor],
    there: Mapping[str, Tensor],
    place: torch.device,
    policy: cg.Policy,
) -> int:
    """Results and the gradients of all floating inputs."""
    names = [name for name, value in given.items() if value.is_floating_point()]
    fixed = {  # statistics, which no gradient reaches
        of.values[step.operands[at]].name  # type: ignore[union-attr]
        for step in of.steps.values()
        for at in (1, 2)
        if step.op == "batch_norm"
    }
    names = [name for name in names if name not in fixed]
    gen = torch.Generator().manual_seed(of.seed + 1)
    upstream: list[Tensor] = []

    def differentiated(run: Callable[..., Any], of_: Mapping[str, Tensor]) -> list[Tensor]:
        leaves = {n: v.detach().requires_grad_(n in names) for n, v in of_.items()}
        made = _several(run(leaves))
        if not upstream:
            upstream.extend(
                torch.randn(y.shape, generator=gen, dtype=F64).to(of.dtype) for y in made
            )
        dys = [dy.to(y.device, y.dtype) for dy, y in zip(upstream, made, strict=True)]
        grads = torch.autograd.grad(made, [leaves[n] for n in names], dys, allow_unused=True)
        zeros = [
            torch.zeros_like(leaves[n]) if g is None else g
            for n, g in zip(names, grads, strict=True)
        ]
        return [*(y.detach() for y in made), *zeros]

    wide = {name: widened(value) for name, value in given.items()}
    eager = Eager(of)
    exact = differentiated(eager, wide)
    yardstick = Yardstick(of, lambda each: differentiated(each, wide))
    trainable = of.graph(given).compile(place, policy=policy, training=True)
    made = differentiated(lambda leaves: trainable(**leaves), there)
    count, none = len(of.results), 0
    for at, (out, want) in enumerate(zip(made, exact, strict=True)):
        if at < count:
            _declared_as(of, at, out)
            none += check_result(of, out, want, yardstick, at, f"y{at}")
            continue
        name = names[at - count]
        if out.dtype != given[name].dtype or out.shape != given[name].shape:
            raise Wrong(f"gradient of {name} is {out.dtype} {tuple(out.shape)}")
        narrow = out.to(of.dtype)  # of float32 weights too: what comes back has 16 bits
        try:
            none += check_result(of, narrow, want, yardstick, at, f"gradient of {name}")
        except Wrong:
            if not eager.doubtful:
                raise
            limit = _limit(of, of.dtype, yardstick.off(at, want))
            _check_from_saved(trainable, names, there, upstream, name, narrow, limit)
    return none


def _check_from_saved(
    trainable: cg.Trainable,
    names: Sequence[str],
    there: Mapping[str, Tensor],
    upstream: Sequence[Tensor],
    name: str,
    out: Tensor,
    limit: float,
) -> None:
    """The gradient where rounding may have switched a relu: from what the forward has saved, the
    backward graph in float64 makes the same."""
    able = differentiable(trainable.spec)
    pair = trainable.pair(tuple(n for n in able if n in names))
    gradient, forward = pair.gradient, pair.gradient.forward
    results = pair.forward.outputs_for([there[each] for each in forward.inputs])
    known = {n: widened(v.detach().cpu()) for n, v in there.items()}
    known |= {n: widened(v.cpu()) for n, v in zip(forward.outputs, results, strict=True)}
    known |= {
        gradient.incoming[f"y{at}"]: dy.double()
        for at, dy in enumerate(upstream)
        if f"y{at}" in gradient.incoming
    }
    backward = gradient.backward
    made = reference.run(backward, [known[each] for each in backward.inputs], F64)
    right = dict(zip(backward.outputs, made, strict=True))[gradient.outgoing[name]]
    error = numerics.relative_error(out, right)
    if not error <= limit:
        raise Wrong(
            f"gradient of {name} is off by {error:.3g} of what the saved tensors make, "
            f"allowed {limit:.3g}"
        )
