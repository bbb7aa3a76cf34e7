"""Gradients two ways: by :func:`cudnngraph.differentiate`, and by torch autograd.

``ours`` runs the forward and the backward graph with the reference executor. ``by_autograd`` runs
the reference's rule of every op of the forward under torch autograd; it uses none of ``grad.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.ops.table import OPS
from tests import numerics
from tests.samples import F16, F64, Case, in_float64

Tensors = dict[str, torch.Tensor]


# What no gradient reaches: by the op that takes it, its ports.
FIXED = {"sdpa": ("alibi_slopes",), "batch_norm_train": ("running_mean", "running_var")}


def floating_inputs(spec: GraphSpec) -> tuple[str, ...]:
    """Return the inputs to differentiate by: all of floating dtype but those in ``FIXED``."""
    fixed = {
        node.inputs[OPS[node.op].ports.index(port)]
        for node in spec.nodes
        for port in FIXED.get(node.op, ())
    }
    return tuple(
        name
        for name in spec.inputs
        if spec.tensors[name].dtype.is_floating_point and name not in fixed
    )


def differentiable(case: Case) -> bool:
    """Whether a sample has a gradient: not one of gradients' own ops, of torch's, of inference
    alone, nor one of whole numbers, bools or 8 bits alone. Sums, means and norms in training are
    among the ops of gradients."""
    if case.id.startswith(("gradients-sum", "gradients-mean", "gradients-norm_")):
        return "backward" not in case.id
    bools = ("pointwise-comparisons", "view-bools")
    without = ("gradients", "aten", "group_affine", "sdpa_paged", "ragged_offsets", "int8", "fp8")
    return case.family not in without and not case.id.startswith(bools)


def upstream(gradient: cg.Gradient, seed: int = 0, dtype: torch.dtype | None = None) -> Tensors:
    """A gradient for each output, by the output's name."""
    gen = torch.Generator().manual_seed(seed)
    made = {}
    for output, name in gradient.incoming.items():
        tensor = gradient.backward.tensors[name]
        values = torch.randn(tensor.shape, generator=gen, dtype=torch.float64)
        place = torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype or tensor.dtype)
        made[output] = place.copy_(values)
    return made


def ours(
    gradient: cg.Gradient,
    inputs: Mapping[str, torch.Tensor],
    grads: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> Tensors:
    """By input name. ``dtype`` as for ``reference.run``: float64 rounds nothing anywhere."""
    forward, backward = gradient.forward, gradient.backward
    outputs = reference.run(forward, [inputs[name] for name in forward.inputs], dtype)
    known = {**inputs, **dict(zip(forward.outputs, outputs, strict=True))}
    known |= {gradient.incoming[name]: grad for name, grad in grads.items()}
    results = reference.run(backward, [known[name] for name in backward.inputs], dtype)
    by_name = dict(zip(backward.outputs, results, strict=True))
    return {name: by_name[grad] for name, grad in gradient.outgoing.items()}


def by_autograd(
    spec: GraphSpec,
    inputs: Mapping[str, torch.Tensor],
    grads: Mapping[str, torch.Tensor],
    wrt: tuple[str, ...],
) -> Tensors:
    """In float64; a gradient that torch does not find is zero."""
    leaves = {
        name: value.double() if value.dtype.is_floating_point else value
        for name, value in inputs.items()
    }
    leaves |= {name: leaves[name].detach().clone().requires_grad_() for name in wrt}
    results = reference.run(spec, [leaves[name] for name in spec.inputs], torch.float64)
    outputs = dict(zip(spec.outputs, results, strict=True))
    found = torch.autograd.grad(
        [outputs[name] for name in grads],
        [leaves[name] for name in wrt],
        [grad.double() for grad in grads.values()],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(leaves[name]) if grad is None else grad
        for name, grad in zip(wrt, found, strict=True)
    }


def by_torch(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    grads: Mapping[str, torch.Tensor],
    wrt: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Autograd through what a user of torch would write, in the dtype of the inputs."""
    leaves = {
        name: value.detach().clone().requires_grad_(name in wrt) for name, value in inputs.items()
    }
    outputs = case.eager(leaves)
    found = torch.autograd.grad(
        [outputs[name] for name in grads],
        [leaves[name] for name in wrt],
        [grad.to(outputs[name].dtype) for name, grad in grads.items()],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(leaves[name]) if grad is None else grad
        for name, grad in zip(wrt, found, strict=True)
    }


def _by_saved(
    case: Case,
    gradient: cg.Gradient,
    inputs: Tensors,
    grads: Tensors,
    name: str,
    exact: torch.Tensor,
) -> float:
    """Return the gradient's error if only the saved tensors are off, by the bound of their dtype.

    It is measured by rounding the saved tensors, and scaled in proportion.
    """
    forward, backward = gradient.forward, gradient.backward
    wide = in_float64(inputs)
    made = reference.run(forward, [wide[each] for each in forward.inputs], F64)
    saved = dict(zip(forward.outputs, made, strict=True))
    rounded = {each: value.to(forward.tensors[each].dtype) for each, value in saved.items()}
    off = max(numerics.relative_error(rounded[each], saved[each]) for each in saved)
    incoming = {gradient.incoming[each]: value for each, value in grads.items()}
    given = in_float64({**inputs, **rounded, **incoming})
    results = reference.run(backward, [given[each] for each in backward.inputs], F64)
    found = dict(zip(backward.outputs, results, strict=True))[gradient.outgoing[name]]
    return numerics.relative_error(found, exact) * numerics.bound(case.dtype) / (off or 1.0)


def check_at_dtype(
    case: Case,
    gradient: cg.Gradient,
    inputs: Tensors,
    saved: Tensors,
    grads: Tensors,
    results: Tensors,
    what: str = "",
) -> None:
    """Assert that gradients at the dtype of ``case`` are within the policy.

    Two bars. Given the very tensors that the forward has saved, the backward is within the bound of
    its dtype of the same graph in float64. And it is no farther from the gradient in float64 than
    torch at that dtype; there a relu that rounding has switched weighs alike in both. A sink's
    gradient sums over all queries what attention's result and its gradient make, of either sign;
    torch, which keeps all the weights, does not read that result, which is rounded. There the
    second bar is where the graph in float64 gets from a forward in float64 whose result is rounded.
    """
    spec, backward = case.build().spec(), gradient.backward
    wrt = tuple(results)
    clean = inputs
    if "dirty" in case.id:  # torch's own gradient is NaN there
        clean = {name: value.nan_to_num(0.0) for name, value in inputs.items()}
    exact = by_torch(case, in_float64(clean), in_float64(grads), wrt)
    try:
        eager = by_torch(case, clean, grads, wrt)
    except (NotImplementedError, RuntimeError):  # torch has no kernel for it on a GPU
        eager = {}
    given = {**inputs, **saved, **{gradient.incoming[name]: g for name, g in grads.items()}}
    wide = in_float64({name: given[name] for name in backward.inputs})
    same = dict(
        zip(backward.outputs, reference.run(backward, list(wide.values()), F64), strict=True)
    )
    terms = max(case.terms, *(spec.tensors[name].numel for name in spec.outputs))
    for name, result in results.items():
        assert result.dtype == spec.tensors[name].dtype
        if float(exact[name].norm()) < 1e-6:  # a softmax over one key has no gradient
            assert float(result.double().norm()) < 1e-3
            continue
        # A float32 gradient beside 16-bit data comes of what anchors wrote in 16 bits.
        narrow, label = result.to(case.dtype), f"grad of {name} {what}"
        numerics.check(narrow, same[gradient.outgoing[name]], case.dtype, terms=terms, what=label)
        if name in eager:
            theirs = numerics.relative_error(eager[name].to(case.dtype), exact[name])
            if name == "sink":
                theirs = max(theirs, _by_saved(case, gradient, inputs, grads, name, exact[name]))
            limit = max(numerics.TORCH_FACTOR * theirs, numerics.bound(case.dtype, terms=terms))
            error = numerics.relative_error(narrow, exact[name])
            assert error <= limit, f"{label}: {error:.3g} from float64, torch {theirs:.3g}"


Build = Callable[[cg.Graph], Mapping[str, cg.Value]]


def check_float64(
    spec: GraphSpec,
    inputs: Mapping[str, torch.Tensor],
    wrt: tuple[str, ...] | None = None,
    seed: int = 0,
) -> cg.Gradient:
    """Both ways in float64 agree to 1e-9 of the gradient's size (of 1, where that is tiny)."""
    wrt = floating_inputs(spec) if wrt is None else wrt
    gradient = cg.differentiate(spec, wrt)
    grads = upstream(gradient, seed, F64)
    inputs = in_float64(inputs)
    mine = ours(gradient, inputs, grads, F64)
    theirs = by_autograd(spec, inputs, grads, wrt)
    assert set(mine) == set(wrt)
    for name in wrt:
        assert mine[name].shape == inputs[name].shape
        distance = float((mine[name] - theirs[name]).norm())
        size = max(float(theirs[name].norm()), 1e-3)
        assert distance <= 1e-9 * size, f"{name}: off by {distance:.3g} of {size:.3g}\n{spec}"
    return gradient


def declared(build: Build, inputs: Mapping[str, tuple[int, ...]], dtype: torch.dtype = F64):  # type: ignore
    g = cg.Graph("g")
    values = {name: g.input(name, shape, dtype) for name, shape in inputs.items()}
    for name, value in build(g, **values).items():  # type: ignore[call-arg]
        g.output(name, value)
    return g.spec()


def ops(spec: GraphSpec) -> Counter[str]:
    return Counter(node.op for node in spec.nodes if node.op != "constant")


def random_inputs(spec: GraphSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.tensors[name].shape, generator=gen, dtype=F64)
        for name in spec.inputs
    }


def block(act: str | None = "relu", dtype: torch.dtype = F16, residual: bool = False) -> GraphSpec:
    g = cg.Graph("block")
    x = g.input("x", (2, 8, 6, 6), dtype, layout="channels_last")
    w = g.input("w", (16, 8, 3, 3), dtype, layout="channels_last")
    b = g.input("b", (16,), dtype)
    z = g.input("z", (2, 16, 6, 6), dtype, layout="channels_last") if residual else None
    g.output("y", g.conv_bias_act(x, w, b, activation=act, residual=z, padding=1))
    return g.spec()


def extra(gradient: cg.Gradient, spec: GraphSpec) -> tuple[str, ...]:
    return gradient.forward.outputs[len(spec.outputs) :]
