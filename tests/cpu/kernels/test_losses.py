"""Cross entropy and its gradient as generated kernels, held against float64 and torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.rows import Schedule
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tape import Refused
from tests import generated, host_kernels, numerics

F16, F32 = torch.float16, torch.float32
REDUCTIONS = ("mean", "sum", "none")
IGNORED = -100
PROCESSORS = 4


@dataclass(frozen=True)
class Loss:
    """A loss of a shape, and what of it a graph has."""

    kind: str
    shape: tuple[int, ...]
    reduction: str = "mean"
    dtype: torch.dtype = F32
    ignore: int = IGNORED
    last: bool = False  # classes lie side by side in memory

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the classes."""
        return (self.shape[0], *self.shape[2:])

    def graph(self) -> cg.Graph:
        """The loss of logarithms, of scores, that with the logarithms, or a gradient."""
        g = cg.Graph("loss")
        options = (self.reduction, self.ignore)
        stride = torch.empty(self.shape).stride()
        if self.last:
            order = (0, *range(2, len(self.shape)), 1)
            back = [order.index(dim) for dim in range(len(order))]
            stride = torch.empty([self.shape[dim] for dim in order]).permute(back).stride()
        target = g.input("t", self.rows, torch.int64)
        if "backward" not in self.kind:
            x = g.input("x", self.shape, self.dtype, stride=stride)
            y = x if self.kind == "nll" else g.log_softmax(x, 1)
            g.output("z", g.nll_loss(y, target, *options))
            if self.kind == "cross entropy and logarithms":
                g.output("y", y)
            return g
        dy = g.input("dy", self.rows if self.reduction == "none" else (), self.dtype)
        dx = g.nll_loss_backward(dy, target, self.shape, *options)
        if self.kind == "cross entropy backward":
            dx = g.log_softmax_backward(dx, g.input("y", self.shape, self.dtype, stride=stride), 1)
        g.output("dx", dx)
        return g

    def inputs(self, spec: GraphSpec) -> list[torch.Tensor]:
        """Scores, classes of which every fifth is ignored, and gradients."""
        gen = torch.Generator().manual_seed(len(self.shape))
        made = []
        for tensor in (spec.tensors[name] for name in spec.inputs):
            if tensor.dtype == torch.int64:
                classes = torch.randint(0, self.shape[1], tensor.shape, generator=gen)
                classes.view(-1)[2::5] = self.ignore
                made.append(classes)
                continue
            values = 3.0 * torch.randn(tensor.shape, generator=gen)
            if tensor.name == "y" or (tensor.name == "x" and self.kind == "nll"):
                values = torch.log_softmax(values, 1)
            made.append(tensor.empty("cpu").copy_(values))
        return made


KINDS = (
    *("nll", "cross entropy", "cross entropy and logarithms"),
    *("nll backward", "cross entropy backward"),
)
SHAPES = ((24, 10), (7, 1), (1, 12), (70, 1000), (2, 5, 6, 7), (2, 16, 64), (3, 300, 4))
LOSSES = [
    *(Loss(kind, shape, how) for kind in KINDS for shape in SHAPES for how in REDUCTIONS),
    *(Loss(kind, (70, 64), how, F16) for kind in KINDS for how in REDUCTIONS),
    *(Loss(kind, (9, 8), how, ignore=3) for kind in KINDS for how in REDUCTIONS),
    *(Loss(kind, (2, 16, 4, 6), how, last=True) for kind in KINDS for how in REDUCTIONS),
    *(
        Loss(kind, (2, 21, 12, 16), how, last=last)
        for kind in KINDS
        for how in REDUCTIONS
        for last in (False, True)
    ),
    *(Loss(kind, (3, 40000), how) for kind in KINDS for how in REDUCTIONS),
    *(Loss(kind, (40000, 3), "mean") for kind in KINDS),
]


def sources(spec: GraphSpec) -> list[Source]:
    """By rule for a small GPU and a large one."""
    found = [patterns.by_rule(spec, processors) for processors in (PROCESSORS, 132)]
    return [patterns.source(spec, choice) for choice in dict.fromkeys(found)]


def run(made: Source, spec: GraphSpec, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [spec.tensors[name].empty("cpu").fill_(math.inf) for name in spec.outputs]
    host_kernels.run(made, [*inputs, *outputs])
    again = [torch.empty_like(out).fill_(math.inf) for out in outputs]
    host_kernels.run(made, [*inputs, *again], backwards=True)
    for one, other in zip(outputs, again, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return outputs


def judge(loss: Loss, spec: GraphSpec, outputs: Sequence[torch.Tensor]) -> None:
    inputs = loss.inputs(spec)
    exact, theirs = reference.run(spec, inputs, torch.float64), reference.run(spec, inputs)
    for out, want, other in zip(outputs, exact, theirs, strict=True):
        assert not bool(out.isnan().any())
        numerics.check(out, want, loss.dtype, other, terms=math.prod(loss.shape))


@pytest.fixture(autouse=True, scope="module")
def _together() -> None:
    """All kernels are compiled at once, with the first that is run."""
    for loss in LOSSES:
        spec = loss.graph().spec()
        for made in sources(spec):
            host_kernels.expect(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_loss_is_as_in_float64(kind: str, reduction: str) -> None:
    some = [loss for loss in LOSSES if (loss.kind, loss.reduction) == (kind, reduction)]
    assert len(some) > 8
    for loss in some:
        spec = loss.graph().spec()
        for made in sources(spec):
            judge(loss, spec, run(made, spec, loss.inputs(spec)))


def test_threads_that_share_a_short_row() -> None:
    """A thread has a pixel of its own where pixels lie side by side, and few share one where its
    classes do."""
    for last, team in ((False, 1), (True, 8)):
        g = cg.Graph("scores")
        stride = (8064, 1, 336, 21) if last else (8064, 384, 24, 1)
        x = g.input("x", (2, 21, 16, 24), F32, stride=stride)
        g.output("y", g.log_softmax(x, 1))
        spec = g.spec()
        schedule = patterns.schedule_of(patterns.by_rule(spec, 132))
        assert isinstance(schedule, Schedule)
        assert schedule.team == team
        assert schedule.threads == 128
        others = [patterns.schedule_of(each) for each in patterns.choices(spec, 132)]
        assert len({each.team for each in others if isinstance(each, Schedule)}) > 1
        x64 = torch.randn(spec.tensors["x"].shape, generator=torch.Generator().manual_seed(1))
        given = [spec.tensors["x"].empty("cpu").copy_(x64)]
        (exact,), (theirs,) = reference.run(spec, given, torch.float64), reference.run(spec, given)
        for each in patterns.choices(spec, 132):
            (out,) = run(patterns.source(spec, each), spec, given)
            numerics.check(out, exact, F32, theirs)


# -- classes that do not count, or that there are not ----------------------------------------------

OUTSIDE = (5, -1, 2**31, 2**32 + 1, -(2**63), 2**63 - 1)


def made_of(loss: Loss, classes: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first output for given classes, by the first kernel; and the inputs."""
    spec = loss.graph().spec()
    inputs = loss.inputs(spec)
    inputs[spec.inputs.index("t")].copy_(classes)
    return run(sources(spec)[0], spec, inputs)[0], inputs


def test_the_loss_of_a_class_that_there_is_not_is_nan() -> None:
    """torch ends the process there; what is read is inside of the rows in any case."""
    classes = torch.tensor([1, *OUTSIDE, IGNORED])
    for kind in KINDS:
        out, _ = made_of(Loss(kind, (8, 5), "none"), classes)
        rows = out.reshape(8, -1).isnan()
        assert torch.equal(rows.any(1), torch.tensor([False] + [True] * len(OUTSIDE) + [False]))
        total, _ = made_of(Loss("cross entropy", (8, 5), "mean"), classes)
        assert bool(total.isnan())


def test_classes_that_are_all_ignored() -> None:
    """0 over 0 is NaN, as torch has it; gradients are 0."""
    for reduction in REDUCTIONS:
        loss = Loss("cross entropy", (6, 5), reduction)
        out, (classes, x) = made_of(loss, torch.full((6,), IGNORED))
        want = F.cross_entropy(x, classes, reduction=reduction)
        assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))
        for kind in ("nll backward", "cross entropy backward"):
            out, _ = made_of(Loss(kind, (6, 5), reduction), torch.full((6,), IGNORED))
            assert torch.equal(out, torch.zeros(6, 5))


def test_nan_and_infinity_of_other_classes_do_not_matter() -> None:
    """By every schedule that is measured."""
    classes = torch.tensor([1, 2, IGNORED])
    x, dy = torch.full((3, 4), math.nan), torch.tensor([math.nan, 1.0, 2.0])
    x[0, 1], x[1, 2], x[2, 0] = -1.0, -math.inf, 5.0
    wanted = torch.tensor([1.0, math.inf, 0.0]), torch.zeros(3, 4)
    wanted[1][0, 1], wanted[1][1, 2] = math.nan, -1.0
    for kind, first, want in zip(("nll", "nll backward"), (x, dy), wanted, strict=True):
        spec = Loss(kind, (3, 4), "none").graph().spec()
        inputs = [classes if name == "t" else first for name in spec.inputs]
        every = [patterns.source(spec, choice) for choice in patterns.choices(spec, PROCESSORS)]
        for made in every:
            host_kernels.expect(made)
        for made in every:
            (out,) = run(made, spec, inputs)
            assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))


def test_no_rows_are_no_kernel() -> None:
    for kind in KINDS:
        with pytest.raises(Refused, match="empty"):
            patterns.by_rule(Loss(kind, (0, 5)).graph().spec(), PROCESSORS)


# -- how much is one kernel ------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_reads_its_scores_once(reduction: str) -> None:
    """In one launch, with one more for the sum over rows; its gradient too."""
    for kind in KINDS[1:3]:
        spec = Loss(kind, (4096, 1000), reduction, F16).graph().spec()
        launches = patterns.source(spec, patterns.by_rule(spec, 132)).launches
        assert len(launches) == 1 + (reduction != "none")
    spec = Loss("cross entropy backward", (4096, 1000), reduction, F16).graph().spec()
    assert len(patterns.source(spec, patterns.by_rule(spec, 132)).launches) == 1 + (
        reduction == "mean"
    )


def test_a_step_of_training_is_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are added to, their loss, and the gradient of both."""
    made = generated.install(monkeypatch)
    g = cg.Graph("step")
    x, b = g.input("x", (24, 40), F32), g.input("b", (40,), F32)
    t = g.input("t", (24,), torch.int64)
    y = g.log_softmax(g.add(x, b), 1)
    g.output("z", g.nll_loss(y, t))
    dy = g.input("dy", (), F32)
    dx = g.log_softmax_backward(g.nll_loss_backward(dy, t, (24, 40)), y, 1)
    g.output("dx", dx)
    exe = g.compile("cpu")
    assert [step.kind for step in exe._program.steps] == ["kernel"] * len(made)
    given = torch.randn(24, 40), torch.randn(40), torch.randint(0, 40, (24,))
    leaf = given[0].clone().requires_grad_()
    want = F.cross_entropy(leaf + given[1], given[2])
    want.backward()
    z, dx = exe(x=given[0], b=given[1], t=given[2], dy=torch.tensor(1.0))
    assert leaf.grad is not None
    torch.testing.assert_close(z, want.detach())
    torch.testing.assert_close(dx, leaf.grad)
    assert len(made) <= 2
