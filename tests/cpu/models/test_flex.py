"""torch's flex attention becomes attention of ours, with bands where its masks are such."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cudnngraph as cg
from cudnngraph.models import cut, flex
from cudnngraph.models.convert import import_model
from tests import numerics
from tests.fused import compiled
from tests.models import Of
from tests.training import left_to_torch, trained

B, H, S, D = 2, 4, 32, 8
ROWS, KEYS = torch.arange(S)[:, None], torch.arange(S)
LENGTHS = torch.tensor([20, 32])
PARTS = torch.arange(S) // 10
SLOPES = torch.exp2(-torch.arange(1.0, H + 1))
TABLE = torch.randn(H, 2 * S, generator=torch.Generator().manual_seed(0))
OF_IMAGES = torch.randn(B, H, generator=torch.Generator().manual_seed(1))
Tensors = Sequence[torch.Tensor]
GENERATES = cg.Policy(kernels=True)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield


MASKS: dict[str, tuple[Any, torch.Tensor]] = {
    "causal": (lambda b, h, i, j: i >= j, ROWS >= KEYS),
    "window": (lambda b, h, i, j: (i >= j) & (i - j < 5), (ROWS >= KEYS) & (ROWS - KEYS < 5)),
    "prefix": (lambda b, h, i, j: (i >= j) | (j < 7), (ROWS >= KEYS) | (KEYS < 7)),
    "parts": (lambda b, h, i, j: PARTS[i] == PARTS[j], PARTS[:, None] == PARTS),
    "lengths": (lambda b, h, i, j: j < LENGTHS[b], LENGTHS[:, None, None, None] > KEYS),
    "all but some rows": (lambda b, h, i, j: i < 9, ROWS + 0 * KEYS < 9),
    "all of it": (lambda b, h, i, j: torch.ones((), dtype=torch.bool), ROWS + KEYS >= 0),
}
SCORES: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cap": (lambda s, b, h, i, j: 3 * torch.tanh(s / 3), lambda s: 3 * torch.tanh(s / 3)),
    "slopes": (
        lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
        lambda s: s + SLOPES[:, None, None] * (KEYS - ROWS),
    ),
    "table": (
        lambda s, b, h, i, j: s + TABLE[h, i - j + S],
        lambda s: s + TABLE[:, ROWS - KEYS + S],
    ),
    "one dim after another": (  # which is no index of tensors that are broadcast
        lambda s, b, h, i, j: s * OF_IMAGES[b][h],
        lambda s: s * OF_IMAGES[:, :, None, None],
    ),
    "hides": (
        lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
        lambda s: s.masked_fill(ROWS < KEYS, -float("inf")),
    ),
}


def written_out(q: Any, k: Any, v: Any, change: Any = None, keeps: Any = None) -> torch.Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    scores = scores if change is None else change(scores)
    scores = scores if keeps is None else scores.masked_fill(~keeps, -float("inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v  # of a row without keys


def block_mask(name: str) -> Any:
    return create_block_mask(MASKS[name][0], B, None, S, S, device="cpu")


def data(dtype: torch.dtype, heads: int = H) -> list[torch.Tensor]:
    return [torch.randn(B, n, S, D).to(dtype) for n in (H, heads, heads)]


def check(call: Any, inputs: Tensors, change: Any = None, keeps: Any = None) -> None:
    """Both ways to a graph, beside float64."""
    exact = written_out(*(x.double() for x in inputs), change, keeps)
    model, dtype = Of(lambda m, *x: call(*x)).eval(), inputs[0].dtype
    with torch.no_grad():
        own = model(*inputs)
        for made in (cg.fuse(model, tuple(inputs)), compiled(model)):
            ours = made(*inputs)
            assert ours.stride() == own.stride()
            numerics.check(ours, exact, dtype, own, terms=S)


def ops(call: Any, inputs: Tensors) -> list[str]:
    spec = import_model(Of(lambda m, *x: call(*x)).eval(), tuple(inputs)).spec
    assert spec is not None
    return [node.op for node in spec.nodes if node.op not in ("transpose", "reshape", "expand")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_that_of_attention(name: str, dtype: torch.dtype) -> None:
    mask, inputs = block_mask(name), data(dtype)
    check(lambda *x: flex_attention(*x, block_mask=mask), inputs, keeps=MASKS[name][1])
    assert ops(lambda *x: flex_attention(*x, block_mask=mask), inputs) == ["sdpa"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", SCORES)
def test_changed_scores_are_written_out(name: str, masked: bool, dtype: torch.dtype) -> None:
    inputs = data(dtype)
    options = {"block_mask": block_mask("causal")} if masked else {}
    change, keeps = SCORES[name][1], MASKS["causal"][1] if masked else None
    check(lambda *x: flex_attention(*x, SCORES[name][0], **options), inputs, change, keeps)


@pytest.mark.parametrize("name", [name for name in SCORES if name != "one dim after another"])
def test_scores_that_attention_can_change_are_its_own_in_16_bits(name: str) -> None:
    mask, inputs = block_mask("causal"), data(torch.float16)
    assert ops(lambda *x: flex_attention(*x, SCORES[name][0], mask), inputs) == ["sdpa"]


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_band_of_keys_takes_no_mask(name: str) -> None:
    mask, inputs = block_mask(name), tuple(data(torch.float16))
    model = Of(lambda m, *x: flex_attention(*x, block_mask=mask)).eval()
    made = import_model(model, inputs)
    assert made.spec is not None and len(made.spec.inputs) == 3 and not made.constants
    with torch.no_grad():
        compiled(model)(*inputs)
    assert "bias" not in str(cg.reports()[-1]) and left_to_torch() == []


def test_heads_share_keys() -> None:
    mask, inputs = block_mask("causal"), data(torch.float16, heads=2)
    keeps = MASKS["causal"][1]
    check(lambda *x: flex_attention(*x, block_mask=mask, enable_gqa=True), inputs, keeps=keeps)
    cap, change = SCORES["cap"]
    check(lambda *x: flex_attention(*x, cap, mask, enable_gqa=True), inputs, change, keeps)


def test_heads_side_by_side_stay_so() -> None:
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in data(torch.float32)]
    check(
        lambda *x: (
            flex_attention(*x).transpose(1, 2).reshape(B, S, -1).view(B, S, H, D).transpose(1, 2)
        ),
        inputs,
    )


def test_functions_of_users_are_not_known_by_their_names() -> None:
    def noop_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def _identity(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 3 * torch.tanh(s / 3)

    mask, inputs = create_block_mask(noop_mask, None, None, S, S, device="cpu"), data(torch.float32)
    change, keeps = SCORES["cap"][1], MASKS["causal"][1]
    check(lambda *x: flex_attention(*x, _identity, mask), inputs, change, keeps)


def test_logarithms_of_sums_are_given() -> None:
    mask = block_mask("all but some rows")
    inputs = tuple(data(torch.float32))
    model = Of(lambda m, *x: flex_attention(*x, block_mask=mask, return_lse=True)).eval()
    with torch.no_grad():
        own = model(*inputs)
        assert bool(own[1].isinf().any())
        for made in (cg.fuse(model, inputs), compiled(model)):
            for ours, theirs in zip(made(*inputs), own, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_largest_scores_are_those_of_torch() -> None:
    """Which gives them on a GPU alone."""
    q, k, v = data(torch.float64)
    none = (lambda b, h, i, j: i >= j,)
    ours = flex.attention(q, k, v, SCORES["cap"][0], none, 0.5, {})
    torch_op = torch.ops.higher_order.flex_attention
    theirs = torch_op(q, k, v, SCORES["cap"][0], none, 0.5, {})
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)


def test_the_check_has_the_model_in_float64() -> None:
    model = Of(lambda m, x: flex_attention(x, x, x)).eval()
    report = cg.fuse(model, data(torch.float32)[0]).report
    assert report is not None and report.errors[0][1] is not None


@pytest.mark.parametrize("name", ["causal", "cap", "table", "groups"])
def test_it_is_trained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torchs, "_validate_device", lambda *x: None)  # torch's own trains on GPUs
    mask, change, keeps = block_mask("causal"), None, MASKS["causal"][1]
    inputs = data(torch.float32, heads=2 if name == "groups" else H)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": name == "groups"}

    def call(q: Any, k: Any, v: Any, table: Any) -> torch.Tensor:
        if name == "table":
            options["score_mod"] = lambda s, b, h, i, j: s + table[h, i - j + S]
        return flex_attention(q, k, v, **options)

    def exactly(q: Any, k: Any, v: Any, table: Any) -> torch.Tensor:
        looked_up = (lambda s: s + table[:, ROWS - KEYS + S]) if name == "table" else change
        return written_out(q, k, v, looked_up, keeps) + 0 * table.sum()

    if name == "cap":
        options["score_mod"], change = SCORES["cap"]
    given = [*inputs, TABLE]
    if name != "table":
        call, exactly = _without(call), _without(exactly)
        given = inputs
    found = trained(compiled(call, policy=GENERATES), *given)
    for mine, exact in zip(found, trained(exactly, *(x.double() for x in given)), strict=True):
        numerics.check(mine, exact, torch.float32, terms=S)
    assert {op.split(".")[1] for op in left_to_torch()} <= {"index", "index_put"}


def _without(function: Any) -> Any:
    """Without a table."""
    return lambda q, k, v: function(q, k, v, torch.zeros(()))


# -- what torch's own kernels run where there are such ---------------------------------------------


OWN = {  # masks and changes of scores that attention has by itself
    **{(mask, ""): True for mask in ("", "causal", "window", "all of it")},
    **{(mask, "cap"): True for mask in ("", "causal")},
    **{(mask, ""): False for mask in ("prefix", "parts", "lengths")},
    **{("", score): False for score in SCORES if score != "cap"},
    ("causal", "slopes"): False,
    ("parts", "cap"): False,
}


def flex_call(mask: str, score: str) -> tuple[Any, Any, Any]:
    """A call, and what it changes and keeps."""
    options: dict[str, Any] = {"block_mask": block_mask(mask)} if mask else {}
    options |= {"score_mod": SCORES[score][0]} if score else {}
    change, keeps = SCORES[score][1] if score else None, MASKS[mask][1] if mask else None
    return lambda q, k, v: flex_attention(q, k, v, **options).relu(), change, keeps


@pytest.mark.parametrize(("mask", "score"), OWN)
def test_what_takes_a_number_for_each_query_and_key_is_torchs(
    mask: str, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, where torch has kernels. Here it calls the op's own ops for them."""
    torchs = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torchs, "_validate_device", lambda *x: None)
    monkeypatch.setattr(flex, "has_kernels", lambda device: True)
    monkeypatch.setattr(cut._ByCompiler, "_compile", lambda self, given: self._otherwise)
    call, change, keeps = flex_call(mask, score)
    inputs = data(torch.float32)
    found = trained(compiled(call, policy=GENERATES), *inputs)
    wide = [x.double() for x in inputs]
    exact = trained(lambda q, k, v: written_out(q, k, v, change, keeps).relu(), *wide)
    for mine, wanted in zip(found, exact, strict=True):
        numerics.check(mine, wanted, torch.float32, terms=S)
    left = {name for name in left_to_torch() if name.startswith("flex")}
    assert left == (set() if OWN[mask, score] else {"flex_attention", "flex_attention_backward"})


def test_torch_compiles_it_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "has_kernels", lambda device: True)
    compiles = cut._ByCompiler._compile
    forms: list[torch.Size] = []

    def noted(self: Any, given: Sequence[Any]) -> Any:
        forms.append(given[0].shape)
        made = compiles(self, given)
        assert made is not self._otherwise
        return made

    monkeypatch.setattr(cut._ByCompiler, "_compile", noted)
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no processes left behind
    call, change, keeps = flex_call("parts", "slopes")
    inputs = data(torch.float32)
    with torch.no_grad():
        ours = compiled(call)
        for _ in range(2):
            numerics.check(
                ours(*inputs),
                written_out(*(x.double() for x in inputs), change, keeps).relu(),
                torch.float32,
                terms=S,
            )
    assert forms == [inputs[0].shape] and left_to_torch() == ["flex_attention"]


def test_what_torch_does_not_compile_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(module: Any, given: Any) -> Any:
        raise RuntimeError("no such tile\nand more")

    monkeypatch.setattr(flex, "has_kernels", lambda device: True)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", broken)
    call, change, keeps = flex_call("prefix", "")
    inputs = data(torch.float32)
    with torch.no_grad():
        ours = compiled(call)(*inputs)
    exact = written_out(*(x.double() for x in inputs), change, keeps).relu()
    numerics.check(ours, exact, torch.float32, terms=S)
    assert [each.getMessage() for each in caplog.records if each.name == cut.__name__] == [
        "not compiled, flex_attention: RuntimeError: no such tile"
    ]


def test_a_function_that_is_no_cap_is_known_by_its_values() -> None:
    def graph(function: Any) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(lambda s, b, h, i, j: function(s, i))

    assert flex._is_cap(graph(lambda s, i: 3 * torch.tanh(s / 3)))
    assert flex._is_cap(graph(lambda s, i: torch.tanh(s * 0.02) * 50.0))
    for other in (
        lambda s, i: s * 0.5,
        lambda s, i: torch.tanh(s / 3),
        lambda s, i: torch.sigmoid(s),
        lambda s, i: 3 * torch.tanh(s / 3) + i,
        lambda s, i: -3 * torch.tanh(s / 3),
    ):
        assert not flex._is_cap(graph(other))
