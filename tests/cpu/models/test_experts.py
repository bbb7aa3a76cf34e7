"""Mixtures of experts as models have them: products of groups of rows, loops, and what they ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.errors import CannotImport
from cudnngraph.models import check
from cudnngraph.models.convert import import_model
from tests import numerics
from tests.experts import Experts, both

Tensor = torch.Tensor


def ops(fused: cg.Fused) -> Counter[str]:
    assert fused.report is not None
    return Counter(node.op for step in fused.report.steps for node in step.spec.nodes)


def torchs(fused: cg.Fused) -> set[str]:
    assert fused.report is not None
    return {name for name, _ in fused.report.opaque}


FORMS = {
    "two of four": (32, 48, 4, 2),
    "one of three": (24, 8, 3, 1),
    "all": (16, 24, 5, 5),
    "many": (8, 16, 31, 3),
    "one expert": (16, 8, 1, 1),
}


@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_products_of_groups(form: str, how: str) -> None:
    """However the model runs them, one that is left as it was; for any choice, by one graph."""
    model = Experts(*FORMS[form], how).eval()
    fused = cg.fuse(model, torch.randn(2, 9, FORMS[form][0]))
    assert model.how == how
    assert ops(fused)["grouped_matmul"] == 2
    assert "aten._grouped_mm.default" not in torchs(fused)
    model.how = "eager"
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 9, FORMS[form][0])
        own, exact = both(model, x)
        numerics.check(fused(x), exact, torch.float32, own, terms=model.up.shape[2])
    assert len(fused) == 1


@pytest.mark.parametrize("batch", [(1, 1), (3, 40)], ids=["one token", "many tokens"])
def test_experts_in_16_bits(batch: tuple[int, int]) -> None:
    model = Experts(32, 48, 4, 2).eval().bfloat16()
    x = torch.randn(*batch, 32).bfloat16()
    fused = cg.fuse(model, x)
    own, exact = both(model, x)
    numerics.check(fused(x), exact, torch.bfloat16, own)


def test_ends_are_found_among_the_sorted_choices() -> None:
    """In one step, where a histogram and its sums are four."""
    fused = cg.fuse(Experts(16, 24, 4, 2).eval(), torch.randn(2, 5, 16))
    assert "aten.searchsorted.Tensor" in torchs(fused)
    assert not {"aten.histc.default", "aten.cumsum.default"} & torchs(fused)


class Counted(nn.Module):
    """Sums of a histogram, of what may be something else than sorted choices."""

    def __init__(self, bins: int, least: int, most: int, kind: str) -> None:
        super().__init__()
        self.counts, self.kind = (bins, least, most), kind

    def forward(self, x: Tensor) -> Tensor:
        numbers = {
            "choices": lambda: x.argmax(-1).sort().values,
            "descending": lambda: x.argmax(-1).sort(descending=True).values,
            "not sorted": lambda: x.argmax(-1),
            "any numbers": lambda: (x[:, 0] * 3).long().sort().values,
            "above zero": lambda: x.argmax(-1).clamp(1).sort().values,
        }[self.kind]()
        return torch.histc(numbers.float(), *self.counts).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("bins", "least", "most", "kind", "found"),
    [
        (6, 0, 5, "choices", True),
        (4, 0, 3, "choices", True),  # of six
        (6, 1, 6, "choices", False),
        (3, 0, 5, "choices", False),
        (1, 0, 0, "choices", False),
        (6, 0, 5, "descending", False),
        (6, 0, 5, "not sorted", False),
        (6, 0, 5, "any numbers", False),
        (6, 0, 5, "above zero", False),
    ],
)
def test_sums_of_a_histogram(bins: int, least: int, most: int, kind: str, found: bool) -> None:
    model = Counted(bins, least, most, kind).eval()
    x = torch.randn(40, 6)
    fused = cg.fuse(model, x)
    assert ("aten.searchsorted.Tensor" in torchs(fused)) == found
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(40, 6)
        assert torch.equal(fused(x), model(x))


def test_a_model_with_torchs_products_is_checked_in_float64() -> None:
    """torch has no product of groups in float64."""
    model, x = Experts(16, 24, 4, 2).eval(), torch.randn(2, 5, 16)
    _, grouped = both(model, x)
    model.how = "eager"
    _, looped = both(model, x)
    numerics.check(grouped, looped, torch.float64)
    model.how = "grouped_mm"
    report = cg.fuse(model, x).report
    assert report is not None and report.errors[0][1] is not None


class Near(nn.Module):
    """Chooses between two experts by scores that are a rounding of one weight apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.randn(64, 1).bfloat16().repeat(1, 2))
        self.values = nn.Parameter(torch.tensor([1.0, -1.0]).bfloat16())
        with torch.no_grad():
            self.router[0, 1] *= 1 + 2.0**-7

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.float() @ self.router.float()).argmax(-1)
        return self.values[chosen] * x.sum(-1)


def test_a_choice_that_a_rounding_changes_is_no_wrong_result() -> None:
    torch.manual_seed(1)
    wanted = check.Wanted(Near().eval(), ((torch.randn(64, 64).bfloat16(),), {}))
    (own,) = wanted.own
    wanted.check(None, [own])
    other = own.clone()
    other[:8] *= -1
    with pytest.raises(cg.WrongResult, match="Near: result 0 is off by"):
        wanted.check(None, [other])
    ((error, model),) = wanted.check(None, [other], routes=True)
    assert error > 0.1 and model is not None and model > 0.1
    for wrong in (own * 10, own + torch.nan):
        with pytest.raises(cg.WrongResult, match="Near: result 0 is off by"):
            wanted.check(None, [wrong], routes=True)


def test_a_graph_that_chooses_is_told_from_one_that_does_not() -> None:
    x = torch.randn(2, 5, 16)
    chooses = cg.fuse(Experts(16, 24, 4, 2).eval(), x).bound(x)
    assert chooses.routes
    assert not cg.fuse(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval(), x).bound(x).routes


class Form(nn.Module):
    """One of the forms of torch's product of groups."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.function(x, *self.weights, ends)


def _mm(x: Tensor, y: Tensor, ends: Tensor | None) -> Tensor:
    return F.grouped_mm(x, y, offs=ends)


TORCHS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], str]] = {
    "rows": (_mm, (16, 8), (3, 8, 24), "grouped_matmul"),
    "columns": (_mm, (3, 8, 24), (24, 16), "grouped_matmul"),
    "terms": (_mm, (8, 16), (16, 24), "grouped_matmul_wgrad"),
    "matrices": (lambda x, y, ends: _mm(x, y, None), (3, 8, 16), (3, 16, 24), "matmul"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", TORCHS)
def test_every_form_of_torchs_product_is_an_op_of_ours(form: str, dtype: torch.dtype) -> None:
    function, shape, weight, op = TORCHS[form]
    model = Form(function, weight).eval().to(dtype)
    x, ends = torch.randn(shape).to(dtype), torch.tensor([4, 4, 16], dtype=torch.int32)
    fused = cg.fuse(model, (x, ends))
    assert ops(fused)[op] == 1 and not torchs(fused)
    (y,) = model.weights
    starts = torch.tensor([0, 4, 4])
    exact = torch.zeros(fused(x, ends).shape, dtype=torch.float64)
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        part = slice(int(start), int(end))
        a, b = x.double(), y.detach().double()
        if form == "rows":
            exact[part] = a[part] @ b[group]
        elif form == "columns":
            exact[:, part] = a[group] @ b[:, part]
        elif form == "terms":
            exact[group] = a[:, part] @ b[part]
        else:
            exact[group] = a[group] @ b[group]
    numerics.check(fused(x, ends), exact, dtype)


def test_ends_of_64_bits_are_converted() -> None:
    """transformers' own op takes them, torch's does not."""

    def product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
        return _mm(x, y, ends.int())

    model = Form(product, (3, 8, 16)).eval()
    x, ends = torch.randn(12, 8), torch.tensor([4, 4, 12])
    assert torch.equal(cg.fuse(model, (x, ends))(x, ends)[:4], (x @ model.weights[0][0])[:4])


def test_experts_are_trained_by_torch_compile() -> None:
    """In bfloat16: torch's own form of their product is of no other dtype."""
    model = Experts(32, 48, 4, 2).bfloat16()
    x = torch.randn(2, 9, 32).bfloat16()
    compiled = torch.compile(model, backend="cudnngraph")
    compiled(x).float().square().mean().backward()
    found = [report for report in cg.reports() if report.model]
    seen = Counter(node.op for r in found[-2:] for s in r.steps for node in s.spec.nodes)
    assert seen["grouped_matmul"] >= 3 and seen["grouped_matmul_wgrad"] == 2
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    eager, wide = Experts(32, 48, 4, 2).bfloat16(), Experts(32, 48, 4, 2, "eager").double()
    for other in (eager, wide):
        other.load_state_dict(model.state_dict())
        other(x.to(other.up.dtype)).to(torch.float64).square().mean().backward()
    for name, parameter in wide.named_parameters():
        own = eager.get_parameter(name).grad
        assert parameter.grad is not None and own is not None
        off, least = (numerics.relative_error(g, parameter.grad) for g in (grads[name], own))
        assert off <= numerics.TORCH_FACTOR * least + numerics.bound(torch.bfloat16), name


class Listed(nn.Module):
    """A loop over experts that are modules of their own, as no implementation can be set for."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = F.one_hot(self.router(x).argmax(-1), 4)
        for at, expert in enumerate(self.experts):
            (token,) = torch.where(mask[:, at])
            x = x.index_add(0, token, expert(x[token]))
        return x


class Sizes(Listed):
    """A loop over parts whose sizes are numbers of Python."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.bincount(self.router(x).argmax(-1), minlength=4).tolist()
        parts = zip(x.split(sizes), self.experts, strict=True)
        return torch.cat([expert(part) for part, expert in parts])


@pytest.mark.parametrize("kind", [Listed, Sizes])
def test_a_loop_over_experts_is_refused_with_a_mend_that_can_be_done(kind: type[nn.Module]) -> None:
    text = (
        r"test_experts.py:\d+ in forward: .*the numbers in a tensor.*|.*the numbers in a tensor.*"
        r"test_experts.py:\d+ in forward"
    )
    with pytest.raises(CannotImport, match=text) as caught:
        cg.fuse(kind().eval(), torch.randn(12, 16))
    mend = "sort rows by expert and multiply them by torch.nn.functional.grouped_mm"
    assert mend in str(caught.value)


def test_what_cannot_be_set_stays_as_it_is() -> None:
    """A model may say how its experts run, and refuse another way."""

    class Fixed(Experts):
        def set_experts_implementation(self, how: Any) -> None:
            raise ValueError("does not support setting experts implementation")

    with pytest.raises(CannotImport, match="asks for the numbers in a tensor"):
        cg.fuse(Fixed(16, 8, 4, 2, "eager").eval(), torch.randn(1, 5, 16))
    model = Fixed(16, 8, 4, 2).eval()
    spec = import_model(model, (torch.randn(1, 5, 16),)).spec
    assert spec is not None and "grouped_matmul" in {node.op for node in spec.nodes}


# -- models of transformers, where it is installed ------------------------------------------------

SMALL: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 24, "vocab_size": 97},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "num_experts_per_tok": 2,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
ROUTED = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"num_experts": 6},
    "GptOss": {"num_local_experts": 5, "sliding_window": 4},
    "DeepseekV3": {**LATENT, **ROUTED, "v_head_dim": 8, "num_key_value_heads": 4},
    "Phimoe": {"num_local_experts": 4},
    "Glm4Moe": {**ROUTED, "num_experts_per_tok": 1, "n_shared_experts": 2},
    "GraniteMoe": {"num_local_experts": 4},
}


def published(name: str, dtype: torch.dtype) -> nn.Module:
    """A language model of transformers with random weights, narrow."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **ARCHITECTURES[name]})
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1 or not parameter.isfinite().all():
            nn.init.normal_(parameter, std=0.15)
    return model


@pytest.mark.parametrize("call", ["batch", "one token", "padded"])
@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_models_are_products_of_groups(name: str, how: str, call: str) -> None:
    model: Any = published(name, torch.float32)
    model.set_experts_implementation(how)
    size = (1, 1) if call == "one token" else (2, 9)
    tokens = [torch.randint(3, 97, size) for _ in range(2)]
    more: dict[str, Any] = {"use_cache": False}
    if call == "padded":
        more["attention_mask"] = torch.ones(size, dtype=torch.long)
        more["attention_mask"][0, :4] = 0
    fused = cg.fuse(model, (), kwargs={"input_ids": tokens[0], **more})
    assert model.get_experts_implementation()[""] == how
    assert ops(fused)["grouped_matmul"] >= 2
    assert not {each for each in torchs(fused) if "mm" in each or "scatter_add" in each}
    model.set_experts_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=tokens[1], **more).logits
        exact = model.double()(input_ids=tokens[1], **more).logits
    off = numerics.relative_error(fused(input_ids=tokens[1], **more).logits, exact)
    least = numerics.relative_error(own, exact)
    assert off <= numerics.TORCH_FACTOR * least + numerics.bound(torch.float32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_models_in_16_bits_are_not_called_wrong(name: str) -> None:
    """Roundings change which experts are chosen, of the model as of ours."""
    model = published(name, torch.bfloat16)
    for seed in range(4):
        torch.manual_seed(seed)
        tokens = torch.randint(3, 97, (2, 9))
        fused = cg.fuse(model, (), kwargs={"input_ids": tokens, "use_cache": False})
        assert fused.report is not None and fused.report.errors
