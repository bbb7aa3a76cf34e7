"""fuse() and the backend of torch.compile, on a CPU; whole models cut into steps."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import pickle
from collections import Counter, UserDict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.ir.canonical import canonical, canonical_tensor_names
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.models import bound as bindings
from cudnngraph.models import dynamo, export
from cudnngraph.models.convert import PaddedImage, convert, import_model
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.partition.memory import StepMemory
from cudnngraph.partition.regions import regions
from cudnngraph.rewrite.annotate import annotate
from cudnngraph.rewrite.passes import prepared
from cudnngraph.runtime import streams as lanes
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.decision import ALIAS
from cudnngraph.select.heuristic import heuristic
from cudnngraph.select.trial import GraphTrial
from tests import numerics
from tests.cpu.models.test_convert import NETS, Of, image
from tests.fakes import builder
from tests.models import DiffusionUNet

fusing: Any = importlib.import_module("cudnngraph.models.fused")
CPU = torch.device("cpu")
POLICY = cg.Policy(allow_tf32=False)


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def net() -> nn.Module:
    torch.manual_seed(0)
    return models.randomized(models.ResNet((1, 1), 8, 10))


# -- the module ------------------------------------------------------------------------------------


def test_a_fused_model_gives_the_models_results() -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    assert isinstance(fused, nn.Module) and not fused.training
    assert not fused(x).requires_grad


@pytest.mark.parametrize("last", [False, True])
def test_a_diffusion_model_takes_its_time_steps_and_context(last: bool) -> None:
    torch.manual_seed(0)
    model = DiffusionUNet().eval()
    if last:
        model = model.to(memory_format=torch.channels_last)
    given = (torch.randn(3, 4, 12, 12), torch.tensor([1, 40, 900]), torch.randn(3, 7, 24))
    fused = cg.fuse(model, given)
    others = (torch.randn(3, 4, 12, 12), torch.tensor([7, 3, 0]), torch.randn(3, 7, 24))
    again = cg.fuse(model, others)  # which compares with float64
    assert again.report is not None and again.report.errors
    torch.testing.assert_close(fused(*others), again(*others), rtol=1e-6, atol=1e-6)


def test_our_own_blocks_are_imported_as_torchs_modules() -> None:
    """So that their norms are folded, and they share a graph with what stands around them."""
    torch.manual_seed(0)
    made = nn.Sequential(
        cg.FusedConvBlock(3, 8, 3, padding=1),
        cg.FusedDepthwiseSeparable(8, 8),
        cg.FusedConvTransposeBlock(8, 4, 2, stride=2),
    )
    model, x = models.randomized(made), image(2, 3, 8, 8)
    fused = cg.fuse(model, x)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    assert fused.report is not None and fused.report.folded == 4 and not fused.report.opaque


class Layers(nn.Module):
    """A layer of a transformer of our own modules."""

    def __init__(self, window: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.attend = cg.FusedMultiheadAttention(16, 4, 2, causal=True, window=window)
        self.norms = nn.ModuleList([cg.FusedLayerNorm(16), cg.FusedRMSNorm(16)])
        self.mlp = cg.FusedMLP(16, 32, activation="silu", gated=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, x = self.norms[0](self.attend(x), x)
        return cast(torch.Tensor, self.mlp(y) + self.norms[1](x))


def test_our_other_modules_are_imported_as_torchs_functions() -> None:
    torch.manual_seed(0)
    model, x = Layers().eval(), image(2, 6, 16)
    fused = cg.fuse(model, x)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    assert fused.report is not None and not fused.report.opaque
    spec = fused.bound(x).imported.spec
    assert spec is not None
    assert {"sdpa", "layer_norm", "rms_norm", "silu"} <= {node.op for node in spec.nodes}


def test_what_torch_has_no_function_for_is_a_step_of_its_own() -> None:
    torch.manual_seed(0)
    model, x = Layers(window=(2, 0)).eval(), image(2, 6, 16)
    fused = cg.fuse(model, x)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    assert fused.report is not None
    assert [name for name, _ in fused.report.opaque] == ["cudnngraph.forward.default"]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_fused_model_can_be_copied(way: Any) -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    other = way(fused)
    assert other.report is None and len(other) == 0
    assert torch.equal(other(x), fused(x)) and other.report is not None
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    other.refresh()
    assert torch.equal(other(x), fused(x)), "a copy has weights of its own"


def padded(model: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    """A model as it is imported for a GPU, and bound here."""
    made = export.export(model, (x,))
    imported = convert(
        made.module, made.constants, made.placeholders, channels_last=True, on_gpu=True
    )
    assert imported.spec is not None
    return imported, bindings.Bound(imported, compile_spec(imported.spec, "cpu"), CPU)


def test_an_image_of_three_channels_gets_a_fourth_for_convolutions() -> None:
    model, x = net().half(), image(2, 3, 32, 32).half()
    imported, bound = padded(model, x)
    ((name, packed),) = imported.packed.items()
    assert packed == PaddedImage(3) and imported.spec.tensors[name].shape == (2, 4, 32, 32)
    with torch.no_grad():
        want = model.double()(x.double())
    for _ in range(2):
        (result,) = bound.run([x])
        numerics.check(result, want, torch.float16, terms=64)
    assert bound.inputs[0].shape == x.shape
    assert float(bound.tensors[name][:, 3:].abs().max()) == 0.0


@pytest.mark.parametrize(
    ("kernel", "options", "columns"),
    [
        ((4, 4), {"stride": 4}, 4),
        ((4, 3), {"stride": (2, 3), "padding": (1, 0)}, 3),  # rows overlap and have padding
        ((3, 2), {"stride": 2, "dilation": (2, 1)}, 2),
        ((4, 4), {"stride": (4, 2)}, 1),  # windows overlap
        ((2, 2), {"stride": (2, 4)}, 1),  # there are columns between them
        ((2, 2), {"stride": 2, "padding": 1}, 1),
        ((2, 2), {"stride": 2, "dilation": 2}, 1),
        ((5, 5), {"stride": 5}, 1),  # 24 columns are no whole windows
    ],
)
def test_columns_of_windows_that_stand_side_by_side_are_read_as_channels(
    kernel: tuple[int, int], options: dict[str, Any], columns: int
) -> None:
    w, b = image(8, 3, *kernel).half(), image(8).half()
    model, x = Of(lambda m, x: F.conv2d(x, m.w, m.b, **options).relu(), w=w, b=b).eval(), None
    x = image(2, 3, 20, 24).half()
    imported, bound = padded(model, x)
    ((name, packed),) = imported.packed.items()
    assert packed == PaddedImage(3, columns)
    assert imported.spec.tensors[name].shape == (2, 4 * columns, 20, 24 // columns)
    want = F.conv2d(x.double(), w.double(), b.double(), **options).relu()
    for _ in range(2):
        (result,) = bound.run([x])
        numerics.check(result, want, torch.float16, terms=3 * kernel[0] * kernel[1])
    assert bound.inputs[0].shape == x.shape
    assert torch.equal(bound.inputs[0], x)


def test_two_convolutions_with_other_windows_keep_columns_apart() -> None:
    def forward(m: Any, x: Any) -> Any:
        return F.conv2d(x, m.w, stride=4), F.conv2d(x, m.v, stride=2)

    model = Of(forward, w=image(8, 3, 4, 4).half(), v=image(8, 3, 2, 2).half()).eval()
    imported, _ = padded(model, image(2, 3, 8, 8).half())
    assert set(imported.packed.values()) == {PaddedImage(3)}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: F.conv2d(x, m.w[:, :1].expand(6, 1, 3, 3), groups=3),
        lambda m, x: F.conv2d(x, m.w) + x[:, :1, 1:-1, 1:-1],
        lambda m, x: F.conv2d(x, m.w * x.sum()),
        lambda m, x: F.conv2d(x.float(), m.w.float()),
    ],
)
def test_other_images_keep_their_channels(forward: Any) -> None:
    model = Of(forward, w=image(6, 3, 3, 3).half()).eval()
    imported, _ = padded(model, image(2, 3, 8, 8).half())
    assert not imported.packed
    wide = Of(lambda m, x: F.conv2d(x, m.w), w=image(6, 3, 3, 3)).eval()
    assert not padded(wide, image(2, 3, 8, 8))[0].packed


def test_arguments_and_results_keep_their_structure() -> None:
    def forward(m: Any, x: Any, pair: Any, *, scale: float, flag: bool = True) -> Any:
        total = x + pair["a"] * pair["b"][0] * scale
        return {"total": total, "rest": (pair["a"], [x.argmax(-1), scale, None])}

    model = Of(forward).eval()
    x, pair = image(3, 4), {"a": image(3, 4) + 1, "b": [image(4)]}
    fused = cg.fuse(model, (x, pair), kwargs={"scale": 2.0})
    ours, theirs = fused(x, pair, scale=2.0), model(x, pair, scale=2.0)
    assert set(ours) == {"total", "rest"} and ours["rest"][1][1:] == [2.0, None]
    torch.testing.assert_close(ours["total"], theirs["total"])
    assert ours["rest"][0] is pair["a"]
    assert torch.equal(ours["rest"][1][0], theirs["rest"][1][0])
    assert len(fused) == 1
    fused(x, pair, scale=3.0)
    assert len(fused) == 2, "a number is part of the form"


def test_autocast_is_part_of_the_form() -> None:
    model, x = Of(lambda m, x: F.linear(x, m.w), w=image(4, 4)).eval(), image(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = cg.fuse(model, x, check=False)
        assert fused(x).dtype == torch.bfloat16
    assert fused(x).dtype == torch.float32 and len(fused) == 2


def test_each_form_is_compiled_once_and_the_oldest_goes() -> None:
    model = net()
    fused = cg.fuse(model, image(2, 3, 32, 32), max_shapes=2, check=False)
    first = fused.bound(image(2, 3, 32, 32))
    assert fused.bound(image(2, 3, 32, 32)) is first
    for batch in (1, 3):
        x = image(batch, 3, 32, 32)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(fused) == 2
    assert fused.bound(image(2, 3, 32, 32)) is not first


def test_results_are_the_callers_unless_they_are_to_be_used_again() -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused, reusing = cg.fuse(model, x), cg.fuse(model, x, reuse_results=True)
    before = fused(x)
    kept = before.clone()
    fused(-x)
    assert torch.equal(before, kept)
    again = reusing(x)
    assert reusing(-x).data_ptr() == again.data_ptr()


def test_an_input_of_any_layout_is_taken() -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(fused(x), fused(last))
    assert len(fused) == 1


def test_a_form_that_is_met_in_inference_mode_runs_outside_of_it_too() -> None:
    model = net()
    fused = cg.fuse(model, image(2, 3, 32, 32))
    x = image(1, 3, 32, 32)
    with torch.inference_mode():
        inside = fused(x.clone())
    assert torch.equal(fused(x), inside)
    run = compiled(model)
    with torch.inference_mode():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_new_weights_are_taken_on_refresh() -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    before = fused(x)
    with torch.no_grad():
        model.stem[0].weight.mul_(-1.0)
    assert torch.equal(fused(x), before), "weights are bound once"
    fused.refresh()
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    assert not torch.equal(fused(x), before)


def test_a_dtype_converts_a_copy_and_its_inputs() -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x, dtype=torch.bfloat16)
    assert fused(x).dtype == torch.bfloat16
    assert next(model.parameters()).dtype == torch.float32
    torch.testing.assert_close(fused(x).float(), model(x), rtol=0.1, atol=0.1)


def test_layouts_are_channels_last_where_there_are_images() -> None:
    x = image(2, 3, 32, 32)
    last = cg.fuse(net(), x, check=False).bound(x).inputs[0]
    kept = cg.fuse(net(), x, channels_last=False, check=False).bound(x).inputs[0]
    assert last is not None and last.is_contiguous(memory_format=torch.channels_last)
    assert kept is not None and kept.is_contiguous()
    rows = image(3, 4)
    linear = cg.fuse(nn.Linear(4, 5).eval(), rows)
    assert linear.report is not None and not linear.report.channels_last


# -- the check and the errors ----------------------------------------------------------------------


def break_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every weight of what is fused off by a thousandth."""
    real = fusing.convert

    def wrong(*args: Any, **kwargs: Any) -> Any:
        imported = real(*args, **kwargs)
        off = {name: tensor * 1.001 for name, tensor in imported.constants.items()}
        return dataclasses.replace(imported, constants=off)

    monkeypatch.setattr(fusing, "convert", wrong)


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    break_constants(monkeypatch)
    with pytest.raises(cg.WrongResult, match=r"ResNet: result 0 is off by .*, at most .* is right"):
        cg.fuse(net(), image(2, 3, 32, 32))
    cg.fuse(net(), image(2, 3, 32, 32), check=False)


class Extractor(torch.fx.GraphModule):
    """A model with a graph for training and one for evaluation, as torchvision's extractors of
    features are: each copy of it is in training."""

    def __init__(self, root: nn.Module, training: torch.fx.Graph, evaluation: torch.fx.Graph):
        super().__init__(root, training)
        self.train_graph, self.eval_graph = training, evaluation
        self.train()

    def train(self, mode: bool = True) -> Extractor:
        if mode != self.training:
            self.graph = self.train_graph if mode else self.eval_graph
        return super().train(mode)

    def __deepcopy__(self, memo: Any) -> Extractor:
        root = nn.Module()
        root.__dict__ = copy.deepcopy(self.__dict__, memo)
        return Extractor(root, root.train_graph, root.eval_graph)  # type: ignore[arg-type]


def extractor() -> Extractor:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.layer(x), 0.5, self.training) * 2

    model, graphs = Drops(), []
    for mode in (True, False):
        graphs.append(torch.fx.Tracer().trace(model.train(mode)))
    made = Extractor(model, *graphs).eval()
    assert not made.training and copy.deepcopy(made).training
    return made


def test_the_check_holds_a_model_against_itself_in_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A yardstick in training is so far off that any result passes."""
    model, x = extractor(), image(4, 8)
    report = cg.fuse(model, x).report
    assert report is not None
    ((ours, own),) = report.errors
    assert own is not None and ours < 1e-6 and own < 1e-6
    numerics.check(model(x), cg.fuse(model, x, dtype=torch.float64)(x), torch.float32)
    break_constants(monkeypatch)
    with pytest.raises(cg.WrongResult, match=r"result 0 is off by .*, at most .* is"):
        cg.fuse(model, x)


def test_a_module_that_is_in_training_in_the_model_is_so_in_its_copies() -> None:
    model = Of(lambda m, x: m.part(x), part=Of(lambda m, x: x * (2 if m.training else 3))).eval()
    model.part.train()
    report = cg.fuse(model, image(3)).report
    own = None if report is None else report.errors[0][1]
    assert own is not None and own < 1e-6


def test_a_copy_that_is_another_model_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is then compared with the model's own."""

    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(8, 8), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.times

        def __deepcopy__(self, memo: Any) -> Forgets:
            other = Forgets()
            other.times = 3.0
            return other

    model, x = Forgets().eval(), image(4, 8)
    report = cg.fuse(model, x).report
    assert report is not None and report.errors[0][1] is None
    break_constants(monkeypatch)
    with pytest.raises(cg.WrongResult, match=r"Forgets: result 0 is off by .*, at most 2e-05 is"):
        cg.fuse(model, x)


def test_the_report_has_the_errors_of_the_check() -> None:
    report = cg.fuse(net(), image(2, 3, 32, 32)).report
    assert report is not None
    ((ours, own),) = report.errors
    assert own is not None and 0 < ours < 1e-6 and 0 < own < 1e-6


def test_a_model_that_has_no_float64_is_compared_with_itself() -> None:
    model = Of(lambda m, x: x.float().relu().matmul(m.w.float()), w=image(4, 4))
    model.function = lambda m, x: (x * torch.ones(4, dtype=torch.float32)).matmul(m.w)
    report = cg.fuse(model.eval(), image(3, 4)).report
    assert report is not None and len(report.errors) == 1


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(cg.PolicyError, match=r"training mode; call model.eval\(\)"):
        cg.fuse(net().train(), image(2, 3, 32, 32))


def test_what_is_no_model_or_no_argument_is_refused() -> None:
    model, x = nn.Linear(4, 4).eval(), image(2, 4)
    with pytest.raises(cg.PolicyError, match=r"the model is a NoneType; expected a torch\.nn\.Mod"):
        cg.fuse(None, x)  # type: ignore[arg-type]
    with pytest.raises(cg.PolicyError, match="kwargs=3; expected a mapping of arguments by name"):
        cg.fuse(model, x, kwargs=3)  # type: ignore[arg-type]
    with pytest.raises(cg.PolicyError, match="max_shapes='8'; expected a whole number >= 1"):
        cg.fuse(model, x, max_shapes="8")  # type: ignore[arg-type]
    with pytest.raises(cg.PolicyError, match="an argument is a set, which has no hash"):
        cg.fuse(model, ({1, 2},))


def test_a_mapping_that_is_not_hashable_is_given_by_name() -> None:
    """As what a tokenizer makes."""
    tokens = UserDict(x=image(2, 4), scale=torch.tensor(2.0))
    model = Of(lambda m, x, scale: m.layer(x) * scale, layer=nn.Linear(4, 4)).eval()
    for given in (tokens, (tokens,)):
        with pytest.raises(cg.PolicyError, match="an argument is a UserDict, a mapping that torch"):
            cg.fuse(model, given)
    fused = cg.fuse(model, (), kwargs=tokens)
    torch.testing.assert_close(fused(**tokens), model(**tokens))
    with pytest.raises(cg.PolicyError, match=r"fused\(\*\*inputs\)"):
        fused(tokens)


def test_no_shapes_at_all_are_refused() -> None:
    with pytest.raises(cg.PolicyError, match="max_shapes=0; expected a whole number >= 1"):
        cg.fuse(net(), image(2, 3, 32, 32), max_shapes=0)


def test_a_model_that_is_no_graph_is_refused_by_the_importers_words() -> None:
    with pytest.raises(cg.CannotImport, match=r"Of is no single graph: aten.nonzero.default"):
        cg.fuse(Of(lambda m, x: x.nonzero() + 1).eval(), image(4))


# -- the report ------------------------------------------------------------------------------------


def test_the_report_is_a_table_of_steps_and_names_what_is_torchs() -> None:
    model = models.randomized(models.GPT(31, 64, 1, 16))
    report = cg.fuse(model, torch.arange(8).view(1, 8)).report
    assert report is not None
    text = str(report)
    assert text.startswith("GPT on cpu: 1 steps (1 reference), images as given, 0 batch norms")
    assert "plans from: reference" in text
    assert "torch's own: aten.embedding.default, models.py:" in text
    assert report.counts == {"reference": 1}
    assert report.opaque[0][0] == "aten.embedding.default"


def test_the_report_can_be_drawn(tmp_path: Path) -> None:
    report = cg.fuse(net(), image(2, 3, 32, 32)).report
    assert report is not None
    report.save(tmp_path / "net.svg")
    text = (tmp_path / "net.svg").read_text(encoding="utf-8")
    assert text.startswith("<svg") and "step 1" in text and "conv" in text
    nothing = cg.fuse(nn.Identity().eval(), image(2, 3)).report
    assert nothing is not None
    with pytest.raises(cg.PolicyError, match="nothing to draw"):
        nothing.svg()


# -- whole models in steps -------------------------------------------------------------------------


def imported(name: str) -> tuple[GraphSpec, dict[str, torch.Tensor], torch.Tensor]:
    """A model's graph with its tensors by name, and its result in float64."""
    torch.manual_seed(1)
    model, x = NETS[name]()
    model = models.randomized(model)
    made = import_model(model, (x,), channels_last=True)
    assert made.spec is not None
    tensors = dict(made.constants)
    (given,) = made.inputs
    assert given is not None
    declared = made.spec.tensors[given]
    tensors[given] = torch.empty_strided(x.shape, declared.stride, dtype=x.dtype).copy_(x)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    with torch.no_grad():
        want = model.double()(x.double() if x.is_floating_point() else x)
    return made.spec, tensors, want


@pytest.mark.parametrize("name", NETS)
def test_a_whole_model_in_torch_steps_computes_what_it_should(name: str) -> None:
    """Cut as for a GPU, in one block of memory, by the torch steps that a GPU runs."""
    spec, tensors, want = imported(name)
    names = canonical_tensor_names(spec)
    spec = canonical(spec)
    steps = heuristic(spec, POLICY, builder(lambda part: True)).steps
    chain = GraphTrial(spec, POLICY, CPU)
    for key, tensor in tensors.items():
        chain._inputs[names[key]] = tensor
    launch = chain.launch([(step.spec, None) for step in steps])
    for _ in range(2):
        launch()
    (out,) = chain._outputs.values()
    error = float((out.double() - want).norm() / want.norm())
    assert error < 2e-6
    assert sum(ALIAS in step.decisions for step in steps) < len(steps)


@pytest.mark.parametrize("name", NETS)
def test_regions_hold_every_op_once_in_an_order_that_can_be_run(name: str) -> None:
    spec, _, _ = imported(name)
    graph = CutGraph(prepared(annotate(spec, deterministic=False)))
    groups = regions(graph)
    assert len(groups) > 6
    assert Counter(n.name for group in groups for n in group) == Counter(
        n.name for n in compute_nodes(graph.spec.nodes)
    )
    there = set(graph.spec.inputs) | graph._numbers
    for group in groups:
        made = {name for node in group for name in node.results}
        assert {name for node in group for name in node.operands} <= there | made
        there |= made
        assert sum(map(graph.is_anchor, group)) <= 1


def test_the_regions_of_a_resnet_are_convolutions_with_all_that_follows() -> None:
    spec, _, _ = imported("resnet")
    groups = [
        " ".join(n.op for n in group)
        for group in regions(CutGraph(prepared(annotate(spec, deterministic=False))))
    ]
    assert Counter(groups) == {
        "conv bias relu": 7,
        "conv add bias relu": 3,
        "conv": 2,
        "max_pool": 1,
        "reduction": 1,
        "reshape": 1,
        "matmul add": 1,
    }


def test_the_shorter_branch_of_a_block_runs_beside_the_longer_one_and_is_added_there() -> None:
    spec, _, _ = imported("resnet")
    graph = CutGraph(prepared(annotate(spec, deterministic=False)))
    groups = regions(graph)
    steps = [StepMemory(subgraph_of(graph, group), True, 0) for group in groups]
    branches = [place for place, group in enumerate(groups) if [n.op for n in group] == ["conv"]]
    beside = lanes.overlappable(steps)
    assert len(branches) == 2 and set(branches) <= set(beside)
    for place in branches:
        reader = beside[place] + 1
        assert [n.op for n in groups[reader]] == ["conv", "add", "bias", "relu"]
        assert steps[place].spec.outputs[0] in steps[reader].spec.inputs


@pytest.mark.parametrize(("name", "joined"), [("deeplab", 5), ("unet", 6)])
def test_what_a_model_concatenates_is_written_in_its_place(name: str, joined: int) -> None:
    spec, _, _ = imported(name)
    graph = CutGraph(prepared(annotate(spec, deterministic=False)))
    joins = [node for node in graph.spec.nodes if node.op == "concat"]
    results = {node.results[0] for node in joins}
    assert sum(each.root in results for each in graph.aliases.order) == joined
    assert joins and all(map(graph.is_free, joins))


# -- torch.compile ---------------------------------------------------------------------------------


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=dynamo.backend, options=options or None)


@pytest.mark.parametrize("name", ["resnet", "gpt", "unet"])
def test_torch_compile_runs_models_by_this_backend(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    model, x = NETS[name]()
    model = models.randomized(model)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "cudnngraph"):
        out, want = compiled(model)(x), model(x)
    assert out.stride() == want.stride()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert caplog.messages == []


def test_batch_norms_are_folded_and_weights_bound_until_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    real = dynamo.convert

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(dynamo, "convert", noted)
    model, x = net(), image(2, 3, 32, 32)
    run = compiled(model, channels_last=True)
    with torch.no_grad():
        for _ in range(3):
            run(x)
        assert [each.folded for each in made] == [9]
        for turn in range(dynamo.MAX_WEIGHT_CHANGES + 2):
            model.stem[0].weight.mul_(1.5)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
            assert made[-1].folded == (9 if turn < dynamo.MAX_WEIGHT_CHANGES else 0)
    assert len(made) == dynamo.MAX_WEIGHT_CHANGES + 2, "weights that change often are inputs"


def test_further_shapes_are_compiled_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    run = compiled(model, max_shapes=2)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "cudnngraph"):
        for batch in (2, 3, 4, 5, 6):
            x = image(batch, 3, 32, 32)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert any("over 2 shapes: this one runs by torch" in text for text in caplog.messages)


def test_training_runs_through_it_with_torchs_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = net().train(), net().train()
    x = image(4, 3, 32, 32)
    run = compiled(ours)
    for model, call in ((ours, run), (theirs, theirs)):
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(call(x), torch.tensor([0, 1, 2, 3])).backward()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("cudnngraph")]
    assert said == [], "both graphs are imported"
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_imported_runs_by_torch_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Of(lambda m, x: F.dropout(x, 0.5, training=True) * 2)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "cudnngraph"):
        out = compiled(model)(torch.ones(1000))
    assert set(out.tolist()) == {0.0, 4.0}
    assert any(
        text.startswith("a graph of torch.compile runs by torch: ") for text in caplog.messages
    )


def test_a_graph_break_leaves_two_graphs() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(x) + 1
        torch._dynamo.graph_break()
        return y * y.sum()

    x = image(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(Of(forward))(x), Of(forward)(x))


def test_unknown_options_are_refused() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="option colour is unknown"):
        compiled(nn.ReLU(), colour=1)(image(3))
    with pytest.raises(cg.PolicyError, match="mode='max-autotune' is unknown"):
        dynamo.backend(torch.fx.GraphModule({}, torch.fx.Graph()), [], mode="max-autotune")


def test_the_backend_is_an_entry_point_of_the_package() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    _, _, section = text.partition('[project.entry-points."torch_dynamo_backends"]\n')
    name, _, target = section.splitlines()[0].partition(" = ")
    module, _, function = target.strip('"').partition(":")
    assert name == "cudnngraph"
    assert getattr(importlib.import_module(module), function) is dynamo.backend


TRAINED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(8), (2, 8)),
    "layer norm without parameters": (lambda: nn.LayerNorm(8, elementwise_affine=False), (2, 8)),
    "linear, layer norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (2, 8)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        (2, 5, 16),
    ),
    "frozen batch norm": (lambda: nn.BatchNorm1d(4).eval(), (2, 4, 3)),
    "conv, frozen batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(),
        (2, 3, 6, 6),
    ),
}


ROUNDED_LSE = pytest.mark.xfail(
    torch.__version__ < (2, 12),
    reason="torch 2.11 declares attention's float64 lse to be float32, and so it is kept",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=ROUNDED_LSE) if name == "encoder" else name for name in TRAINED],
)
def test_a_model_that_torch_compile_trains_by_this_backend_has_torchs_gradients(name: str) -> None:
    make, shape = TRAINED[name]
    torch.manual_seed(0)
    plain = make().double()
    other = copy.deepcopy(plain)
    found = []
    for model in (torch.compile(other, backend="cudnngraph"), plain):
        x = image(*shape).double().requires_grad_()
        y = model(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
    for made, want in zip(*found, strict=True):
        torch.testing.assert_close(made, want, rtol=1e-10, atol=1e-12)


class Stream:
    """A CUDA stream, as far as turns are concerned."""

    def __init__(self, number: int, waited: list[tuple[int, int]]) -> None:
        self.cuda_stream, self.waited = number, waited

    def wait_stream(self, other: Stream) -> None:
        self.waited.append((self.cuda_stream, other.cuda_stream))


def test_runs_on_several_streams_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share inputs and results. The first on a stream tells the allocator of it."""
    waited: list[tuple[int, int]] = []
    recorded: list[tuple[str, int]] = []
    now, capturing = [Stream(0, waited)], [False]

    class Tensor(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

        def record_stream(self, stream: Any) -> None:
            recorded.append((self.label, stream.cuda_stream))  # type: ignore[attr-defined]

    def named(name: str) -> torch.Tensor:
        made = torch.zeros(1).as_subclass(Tensor)
        made.label = name  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(bindings.handles, "raw_stream", lambda index: now[0].cuda_stream)
    turns = bindings._StreamOrder(torch.device("cuda", 0))
    tensors = [named("weight"), named("result"), 2.5]
    streams = {number: Stream(number, waited) for number in range(4)}

    def on(number: int) -> None:
        now[0] = streams[number]
        turns.follow(tensors)

    on(0)
    assert not waited and not recorded, "made here, and nothing else has run"
    on(1)
    on(1)
    on(2)
    on(1)
    assert waited == [(1, 0), (2, 1), (1, 2)]
    assert recorded == [("weight", 1), ("result", 1), ("weight", 2), ("result", 2)]
    capturing[0] = True  # the graph has begun behind all that ran before
    on(3)
    capturing[0] = False
    on(1)
    assert len(waited) == 3
