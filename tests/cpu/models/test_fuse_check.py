"""The check of a fused model against itself in float64, and the errors of fuse()."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.fused import net
from tests.models import Of, image

forming: Any = importlib.import_module("cudnngraph.models.form")


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def break_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every weight of what is fused off by a thousandth."""
    real = forming.convert

    def wrong(*args: Any, **kwargs: Any) -> Any:
        imported = real(*args, **kwargs)
        off = {name: tensor * 1.001 for name, tensor in imported.constants.items()}
        return dataclasses.replace(imported, constants=off)

    monkeypatch.setattr(forming, "convert", wrong)


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


NARROW = {
    "cast": lambda m, x: x.half().float() + 1,
    "ops between": lambda m, x: (x.half() * 2 + 1).float().softmax(-1),
    "written to": lambda m, x: torch.zeros(4, 16, dtype=torch.float16).copy_(x).float() * 2,
    "product": lambda m, x: (x.bfloat16() @ m.w.bfloat16()).float(),
    "widened by an op": lambda m, x: torch.softmax(x.bfloat16() * 3, -1, dtype=torch.float32),
    "norm": lambda m, x: F.layer_norm(x.bfloat16().float(), (16,)).bfloat16() + x.bfloat16(),
}


@pytest.mark.parametrize("name", NARROW)
def test_what_a_model_rounds_on_its_way_is_an_error_of_its_own(name: str) -> None:
    """Within a graph nothing is rounded so: its result may be nearer to float64."""
    model, x = Of(NARROW[name], w=image(16, 16)).eval(), torch.randn(4, 16)
    report = cg.fuse(model, x).report
    assert report is not None
    ((ours, own),) = report.errors
    assert own is not None and 1e-5 < own < 1e-2 and ours <= 1.5 * own


def test_bits_of_what_a_model_has_rounded_are_refused() -> None:
    model = Of(lambda m, x: (x.half().view(torch.int16) + 1).view(torch.float16)).eval()
    x = torch.randn(4, 16)
    with pytest.raises(cg.CannotImport, match="it reads bits of what no graph rounds"):
        cg.fuse(model, x)
    model = Of(lambda m, x: ((x * 2).view(torch.int32) + 1).view(torch.float32)).eval()
    assert torch.equal(cg.fuse(model, x)(x), model(x))
    model = Of(lambda m, x: (x.view(torch.int16) + 1).view(torch.float16)).eval()
    assert torch.equal(cg.fuse(model, x.half())(x.half()), model(x.half()))


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


def test_arguments_that_forward_does_not_take_are_told_by_its_parameters() -> None:
    fused = cg.fuse(nn.Linear(4, 4).eval(), image(2, 4))
    said = "Linear.forward does not take these arguments: "
    with pytest.raises(cg.CannotImport, match=f"{said}missing a required argument: 'input'; exp"):
        fused()
    with pytest.raises(cg.CannotImport, match=rf"{said}too many .*; expected \(input: "):
        fused(image(2, 4), image(2, 4))
    with pytest.raises(cg.CannotImport, match=rf"{said}got an unexpected .* 'x'; expected \(inp"):
        fused(image(2, 4), x=1)


def test_fields_of_a_policy_may_be_keywords_of_fuse() -> None:
    model, x = nn.Linear(4, 4).eval(), image(2, 4)
    fused = cg.fuse(model, x, policy=cg.Policy(deterministic=True), tune="autotune")
    policy = fused.bound(x).executable.policy
    assert policy.deterministic and policy.tune == "autotune"
    with pytest.raises(cg.PolicyError, match="tune='fast' is unknown; expected 'heuristic'"):
        cg.fuse(model, x, tune="fast")  # type: ignore[arg-type]
    said = "option max_shape is unknown to fuse; options are kwargs, .*max_shapes, .* tune, allow"
    with pytest.raises(cg.PolicyError, match=said):
        cg.fuse(model, x, max_shape=2)  # type: ignore[call-arg]


def test_no_shapes_at_all_are_refused() -> None:
    with pytest.raises(cg.PolicyError, match="max_shapes=0; expected a whole number >= 1"):
        cg.fuse(net(), image(2, 3, 32, 32), max_shapes=0)


def test_a_model_that_is_no_graph_is_refused_by_the_importers_words() -> None:
    with pytest.raises(cg.CannotImport, match=r"Of is no single graph: aten.nonzero.default"):
        cg.fuse(Of(lambda m, x: x.nonzero() + 1).eval(), image(4))
