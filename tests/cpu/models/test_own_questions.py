"""Functions of torch that ask for numbers themselves, and what a forward does to its arguments: run
where that can be, refused with the name and the mend where not."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import cudnngraph as cg
from tests import numerics
from tests.fused import compiled

F32 = torch.float32


class Of(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


@pytest.mark.parametrize("shape", [(3, 7), (1, 6), (6,), (5, 2)])
@pytest.mark.parametrize(
    "function",
    [
        torch.cov,
        torch.corrcoef,
        lambda x: x.cov(correction=0),
        lambda x: torch.cov(input=x).exp(),
        lambda x: x.corrcoef() * 2.0,
    ],
    ids=["cov", "corrcoef", "biased", "named", "scaled"],
)
def test_covariances_are_those_of_torch(
    function: Callable[..., torch.Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    fused = cg.fuse(Of(function).eval(), x)
    made, want = fused(x), function(x)
    assert (made.shape, made.stride(), made.dtype) == (want.shape, want.stride(), want.dtype)
    numerics.check(made, function(x.double()), F32, want, terms=x.numel())


@pytest.mark.parametrize("weigh", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_recurrent_layer_whose_weights_are_made_in_every_call_runs(
    weigh: Callable[..., nn.Module],
) -> None:
    torch.manual_seed(0)
    layer = weigh(nn.LSTM(4, 8), "weight_hh_l0").eval()
    model, x = Of(lambda x: layer(x)[0]).eval(), torch.randn(3, 2, 4)
    model.layer = layer
    want = model(x).detach()
    made = cg.fuse(model, x)(x)
    wide = model.double()(x.double()).detach()
    numerics.check(made, wide, F32, want, terms=36)


LSTM_SIZES = (4, 8)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(*LSTM_SIZES, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y: torch.Tensor = pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        return y


def _unsqueezes(x: torch.Tensor) -> torch.Tensor:
    x.unsqueeze_(0)
    return x * 2


@pytest.mark.parametrize(
    ("model", "shapes", "says"),
    [
        (Of(_unsqueezes), ((3, 4),), "changes the shape of an argument in place (unsqueeze_,"),
        (Of(lambda x: x.t_() * 2), ((3, 4),), "which a graph does not; write x = x.unsqueeze(0)"),
        (
            Of(lambda a, b: torch.linalg.lstsq(a, b).solution),
            ((6, 4), (6, 2)),
            "calls linalg.lstsq, whose result depends on numbers as no graph's does",
        ),
    ],
    ids=["unsqueeze_", "t_", "lstsq"],
)
def test_what_no_graph_does_is_named_with_the_mend(
    model: nn.Module, shapes: tuple[tuple[int, ...], ...], says: str
) -> None:
    with pytest.raises(cg.CannotImport, match=re.escape(says)):
        cg.fuse(model.eval(), tuple(map(torch.zeros, shapes)))


OF_NUMBERS = {
    "counts": (lambda x: torch.bincount(x.long()[0]), "one_hot(x, num_classes).sum(0)"),
    "repeats": (lambda x: torch.repeat_interleave(x[0], x[0].long()), "as output_size="),
    "item": (lambda x: x * x.sum().item(), "compute with the tensor, in place of the number"),
    "unique": (lambda x: x.unique(), "choose with torch.where among results of one shape"),
    "mask": (lambda x: x[x > 0.5], "choose with torch.where among results of one shape"),
    "one_hot": (lambda x: F.one_hot(x.long()[0]) * 2.0, "as num_classes="),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_what_depends_on_numbers_is_named_with_the_mend(name: str) -> None:
    function, mend = OF_NUMBERS[name]
    x = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 1.0]])
    with pytest.raises(cg.CannotImport, match=re.escape(mend)) as raised:
        cg.fuse(Of(function).eval(), x)
    assert str(raised.value).endswith(
        '; else torch.compile(model, backend="cudnngraph") runs it between two graphs, or in a '
        "loop the function around it by torch"
    )


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_what_depends_on_numbers_runs_between_two_graphs(name: str) -> None:
    function, _ = OF_NUMBERS[name]
    x = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 1.0]])
    torch._dynamo.reset()

    def around(x: torch.Tensor) -> torch.Tensor:
        return function(x * 1.0).float().exp()

    run = torch.compile(around, backend="cudnngraph")
    torch.testing.assert_close(run(x), around(x))


def test_packed_sequences_are_named_with_the_mend() -> None:
    given = torch.zeros(3, 5, 4), torch.tensor([5, 3, 2])
    with pytest.raises(cg.CannotImport, match=r"packs sequences \(pack_padded_sequence\)"):
        cg.fuse(Packs().eval(), given)


def of_numbers(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x + 1
    return x * 2


def test_the_graph_that_torch_prints_as_it_gives_up_is_left_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(cg.CannotImport, match="asks for the numbers"):
        cg.fuse(Of(of_numbers).eval(), torch.randn(2, 3))
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RuntimeError, match="data-dependent"):
        torch.export.export(Of(of_numbers).eval(), (torch.randn(2, 3),), strict=False)
    assert "torch.ops.aten.sum" in capfd.readouterr().err  # as ever


def test_what_torch_logs_as_it_gives_up_is_in_the_error_alone() -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    model, x = Of(lambda x: x @ x).eval(), torch.randn(2, 3)
    try:
        with pytest.raises(cg.CannotImport, match="must have same reduction dim"):
            cg.fuse(model, x)
        assert said == []
        with pytest.raises(RuntimeError, match="must have same reduction dim"):
            torch.export.export(model, (x,), strict=False)
        assert said
    finally:
        logger.removeHandler(handler)


F16, F64, I64 = torch.float16, torch.float64, torch.int64
MIXED: list[tuple[Callable[..., torch.Tensor], torch.dtype, tuple[int, ...], tuple[int, ...]]] = [
    (nn.functional.linear, F64, (2, 4), (5, 4)),
    (nn.functional.linear, I64, (2, 4), (5, 4)),
    (torch.mm, F64, (2, 4), (4, 5)),
    (torch.matmul, F16, (2, 3, 4), (4, 5)),
    (torch.bmm, F64, (2, 3, 4), (2, 4, 5)),
    (lambda x, y: torch.einsum("ij,jk->ik", x, y), F64, (2, 4), (4, 5)),
    (lambda x, y: torch.addmm(x, y, y), F64, (4,), (4, 4)),
    (nn.functional.conv1d, F64, (1, 3, 4), (3, 3, 3)),
    (nn.functional.conv2d, F16, (1, 3, 4, 4), (3, 3, 3, 3)),
    (nn.functional.conv_transpose2d, F64, (1, 3, 4, 4), (3, 3, 3, 3)),
    (lambda x, y: nn.functional.conv2d(y, y, x), F64, (3,), (3, 3, 3, 3)),
]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("function", "dtype", "shape", "other"), MIXED)
def test_products_of_two_dtypes_are_refused_as_in_torch(
    function: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    other: tuple[int, ...],
    check: bool,
) -> None:
    x, y = torch.ones(shape, dtype=dtype), torch.ones(other)
    with pytest.raises(RuntimeError):
        function(x, y)
    name = str(dtype).removeprefix("torch.")
    said = rf"computes aten.*{name}.*, which torch does not \(.*\); cast to one dtype"
    with pytest.raises(cg.CannotImport, match=said):
        cg.fuse(Of(function).eval(), (x, y), check=check)


def test_a_later_call_in_another_dtype_is_refused_as_in_torch() -> None:
    """Nothing compares its results with the model's."""
    fused = cg.fuse(nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4))
    with pytest.raises(cg.CannotImport, match=r"computes aten\.linear of float64 and float32"):
        fused(torch.randn(2, 4, dtype=F64))
    fused(torch.randn(3, 4))


def _distributions(x: torch.Tensor) -> torch.Tensor:
    mean, width = x.chunk(2, 1)
    normal = torch.distributions.Normal(mean, F.softplus(width) + 0.1)
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    apart = torch.distributions.kl_divergence(normal, prior)
    choice = torch.distributions.Categorical(logits=mean)
    told = choice.log_prob(mean.argmax(-1)) + choice.entropy()
    return normal.log_prob(mean + 1) + apart + choice.probs * told[:, None]


def test_distributions_do_not_ask_whether_their_arguments_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    x, other = torch.randn(3, 8), torch.randn(3, 8)
    fused = cg.fuse(Of(_distributions).eval(), x)
    for y in (x, other):
        numerics.check(fused(y), _distributions(y.double()), F32, _distributions(y), terms=4)
    with pytest.raises(ValueError, match="to satisfy the constraint"):  # torch asks as before
        torch.distributions.Normal(x, -torch.ones_like(x))


def test_distributions_that_are_told_to_ask_are_refused_with_the_mend() -> None:
    def told(x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, x.exp(), validate_args=True).mean

    with pytest.raises(cg.CannotImport, match="; leave validate_args out"):
        cg.fuse(Of(told).eval(), torch.randn(3, 4))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_of_a_ctc_loss_are_numbers(reduction: str) -> None:
    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        lengths = (9, 8), (3, 2)
        return F.ctc_loss(x.log_softmax(-1), labels, *lengths, reduction=reduction)

    def of_tensors(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels, torch.tensor([9, 8]), torch.tensor([3, 2]))

    x, labels = torch.randn(9, 2, 5), torch.randint(1, 5, (2, 3))
    with pytest.raises(cg.CannotImport, match="give the lengths as tuples of numbers"):
        cg.fuse(Of(of_tensors).eval(), (x, labels))
    made = cg.fuse(Of(loss).eval(), (x, labels))(x, labels)
    numerics.check(made, loss(x.double(), labels), F32, loss(x, labels), terms=9)


class Remembers(nn.Module):
    """A running mean that each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.25)
        return x - self.mean


def test_a_buffer_that_each_call_writes_is_refused_with_a_mend_that_writes_it() -> None:
    model, exact = Remembers().eval(), Remembers().eval().double()
    own = copy.deepcopy(model)
    x, other = torch.randn(5, 3), torch.randn(5, 3)
    with pytest.raises(cg.CannotImport, match=re.escape('backend="cudnngraph") writes it')):
        cg.fuse(model, x)
    fast = compiled(model)
    with torch.no_grad():
        for y in (x, other):
            numerics.check(fast(y), exact(y.double()), F32, own(y), terms=5)
        numerics.check(model.mean, exact.mean, F32, own.mean, terms=5)
