"""Models as graphs: constants and results, whole models, what stays torch's own or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.errors import CannotImport
from cudnngraph.ir.spec import is_channels_last
from cudnngraph.models.convert import import_model
from cudnngraph.models.dynamo import backend
from tests import numerics
from tests.converted import X, check, ops, run
from tests.models import NETS, Of, image

# -- constants, inputs, results --------------------------------------------------------------------


def test_a_value_comes_back_in_every_layout_that_is_asked_for() -> None:
    def layouts(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned, order = (x * 2).transpose(0, 1), x.argmax(-1).t()
        return turned, turned.contiguous(), turned, turned.contiguous(), order, order.contiguous()

    x = image(3, 4, 5)
    want = layouts(None, x)
    made = torch.compile(Of(layouts).eval(), backend=backend)(x)
    assert [each.stride() for each in made[:4]] == [each.stride() for each in want[:4]]
    assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))
    imported = import_model(Of(layouts).eval(), (x,))
    assert len(set(imported.results[:4])) == 2


def test_every_copy_of_an_input_is_memory_of_its_own() -> None:
    imported = import_model(Of(lambda m, x: (x.clone(), x.clone())), (image(2, 3),))
    assert imported.results == ("out0", "out1")


def test_what_depends_on_constants_alone_is_computed_at_once() -> None:
    model = Of(
        lambda m, x: x + torch.arange(8.0).view(2, 4).sum(1).repeat(4) * m.scale,
        scale=torch.tensor([0.5] * 8),
    )
    imported = check(model, image(*X))
    assert ops(imported.spec) == ["add"]
    assert len(imported.constants) == 1


def test_results_of_every_kind_come_back() -> None:
    table = torch.tensor([1.0, 2.0])
    model = Of(lambda m, x, y: {"a": x + 1, "same": y, "b": [m.table, 3, None]}, table=table)
    imported = check(model, image(2, 3), image(2))
    assert imported.inputs[1] is None
    assert imported.results[1] == ("input", 1)
    doubled = import_model(Of(lambda m, x: (y := x + 1, y)), (image(2, 3),))
    assert doubled.results == ("out0", "out0")
    nothing = import_model(Of(lambda m, x: x), (image(2, 3),))
    assert nothing.spec is None and nothing.results == (("input", 0),)


def test_numbers_and_flags_among_the_arguments_are_part_of_the_graph() -> None:
    model = Of(lambda m, x, k, flag: x * k if flag else x)
    imported = import_model(model, (image(2, 3), 2.5, True))
    x = image(2, 3)
    (result,) = run(imported, (x,))
    assert torch.equal(result, x * 2.5)


def test_images_and_weights_lie_channels_last_throughout() -> None:
    model = models.randomized(models.DeepLab(models.ResNet((1, 1, 1), 8, dilated=True), 16, 5))
    imported = check(model, image(1, 3, 64, 64), terms=1 << 20, channels_last=True)
    assert imported.spec is not None
    for name, tensor in imported.spec.tensors.items():
        if len(tensor.shape) == 4:
            assert is_channels_last(tensor.shape, tensor.stride), name
    assert "permute" not in ops(imported.spec)


def test_neither_indices_nor_constants_say_that_an_image_is_none() -> None:
    index = torch.randint(6, (2, 8, 6, 6))
    for function in (
        lambda m, x: torch.gather(m.conv(x), 2, m.index),
        lambda m, x: torch.hypot(m.conv(x), m.ends),
    ):
        model = Of(function, conv=nn.Conv2d(3, 8, 3), index=index, ends=image(2, 8, 6, 6))
        spec = check(model, image(2, 3, 8, 8), channels_last=True).spec
        assert spec is not None and spec.nodes[-1].op == "aten"
        made = spec.tensors[spec.nodes[-1].results[0]]
        assert is_channels_last(made.shape, made.stride)


# -- whole models ----------------------------------------------------------------------------------


def test_what_a_model_turned_to_have_its_channels_last_is_no_image() -> None:
    """Nor what torch makes of it, which lies as it does; of an image it is one."""
    conv = nn.Conv2d(3, 8, 3)

    def turned(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(m.conv(x).permute(0, 2, 3, 1), (1, 2), (1, 2))

    for function in (turned, lambda m, x: torch.roll(m.conv(x), (1, 2), (2, 3))):
        spec = check(Of(function, conv=conv), image(2, 3, 8, 8), channels_last=True).spec
        assert spec is not None and spec.nodes[-1].op == "aten"
        given, rolled = (
            spec.tensors[name] for node in spec.nodes[-1:] for name in (*node.inputs, *node.results)
        )
        assert rolled.stride == given.stride
        assert is_channels_last(rolled.shape, rolled.stride) is (function is not turned)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_models_are_as_near_to_float64_as_torch(name: str, channels_last: bool) -> None:
    torch.manual_seed(1)
    model, x = NETS[name]()
    model = models.randomized(model)
    imported = import_model(model, (x,), channels_last=channels_last)
    (ours,) = run(imported, (x,))
    last = torch.channels_last if channels_last and x.dim() == 4 else torch.preserve_format
    with torch.no_grad():
        # torch's own convolutions of channels_last images are less exact than those of others.
        own = model.to(memory_format=last)(x.contiguous(memory_format=last))
        want = model.double()(x.double() if x.is_floating_point() else x)

    def error(y: torch.Tensor) -> float:
        return float((y.double() - want).norm() / want.norm())

    assert error(ours) <= max(numerics.TORCH_FACTOR * error(own), 1e-6)
    assert {each.overload for each in imported.opaque} <= {"aten.embedding.default"}


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "convnext_tiny", "vit_b_16"])
def test_models_of_torchvision_are_imported(name: str) -> None:
    try:
        from torchvision import models as vision
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision: {error}")
    side = 224 if name.startswith("vit") else 64
    model = getattr(vision, name)(weights=None).eval()
    x = image(1, 3, side, side)
    imported = import_model(model, (x,), channels_last=True)
    (ours,) = run(imported, (x,))
    with torch.no_grad():
        torch.testing.assert_close(ours, model(x), rtol=1e-4, atol=1e-4)


# -- torch's own -----------------------------------------------------------------------------------


def test_what_there_is_no_op_for_stays_torchs_own_and_is_named_with_its_line() -> None:
    def forward(m: Any, x: torch.Tensor, at: torch.Tensor) -> Any:
        y = F.pad(F.embedding(at, m.table) * x, (1, 0, 1, 0))
        values, places = torch.sort(y.softmax(-1), stable=True)
        return values.cumsum(-1).relu(), places

    imported = check(Of(forward, table=image(9, 8)), image(3, 8), torch.tensor([0, 8, 3]), terms=64)
    names = [each.overload for each in imported.opaque]
    assert names[0] == "aten.embedding.default" and "pad" in names[1]
    assert all(
        "test_convert.py" in each.line and "in forward" in each.line for each in imported.opaque
    )
    assert "relu" in ops(imported.spec)


def test_whole_numbers_are_torchs_own() -> None:
    imported = check(Of(lambda m, x: (x + 1) * 2), torch.arange(6))
    assert ops(imported.spec) == ["aten", "aten"]


@pytest.mark.parametrize(
    ("model", "op"),
    [
        (nn.LSTM(8, 16, 2, batch_first=True, dropout=0.5), "aten.lstm.input"),
        (nn.GRU(8, 16, bidirectional=True), "aten.gru.input"),
        (nn.RNN(8, 16), "aten.rnn_tanh.input"),
    ],
    ids=["lstm", "gru", "rnn"],
)
def test_recurrent_layers_are_torchs_own_and_draw_nothing(model: nn.Module, op: str) -> None:
    imported = check(Of(lambda m, x: m.layer(x)[0].relu(), layer=model).eval(), image(5, 2, 8))
    assert [each.overload for each in imported.opaque] == [op]
    assert ops(imported.spec) == ["aten", "relu"]


def test_a_recurrent_layer_that_drops_is_refused() -> None:
    layer = nn.LSTM(8, 16, 2, dropout=0.5)
    with pytest.raises(CannotImport, match=r"aten.lstm.input .*: it draws random numbers"):
        import_model(layer.train(), (image(5, 2, 8),))


def test_casts_keep_their_dtype() -> None:
    imported = check(Of(lambda m, x: x.double().relu()), image(3, 4))
    assert ops(imported.spec) == ["aten", "relu"]


# -- what is refused -------------------------------------------------------------------------------


LINE_OF_FORWARD = r"\(models\.py:\d+ in forward: return self\.function"


def refusal(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CannotImport) as caught:
        import_model(Of(function, state=torch.zeros(3)).eval(), args)
    return str(caught.value)


def test_a_shape_that_depends_on_numbers_is_refused_with_its_line() -> None:
    text = refusal(lambda m, x: x[x > 0] * 2, image(4))
    assert re.search(rf"Of is no single graph: aten\.index\.Tensor {LINE_OF_FORWARD}", text)
    assert "the shape of its result depends on the numbers in a tensor" in text


def test_a_branch_on_numbers_is_refused_with_its_line() -> None:
    text = refusal(lambda m, x: x if x.sum() > 0 else -x, image(4))
    assert text.startswith("Of asks for the numbers in a tensor, which a graph does not (")
    assert "(test_convert.py:" in text


def test_control_flow_is_refused() -> None:
    text = refusal(
        lambda m, x: torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)), image(4)
    )
    assert "control flow, or a call that is no op of torch" in text and "cond" in text


def test_random_numbers_are_refused() -> None:
    text = refusal(lambda m, x: x + torch.rand_like(x), image(4))
    assert re.search(rf"aten\.rand_like\.default {LINE_OF_FORWARD}", text)
    assert "it draws random numbers (call model.eval()?)" in text


@pytest.mark.parametrize("held", [False, True])
def test_random_numbers_of_a_generator_are_refused(held: bool) -> None:
    generator = torch.Generator()

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        own = generator if held else torch.Generator().manual_seed(0)
        return x + torch.randn(4, generator=own)

    assert "Of draws random numbers from a generator" in refusal(forward, image(4))


@pytest.mark.parametrize("write", ["index", "fill", "zero"])
def test_writes_over_an_expanded_tensor_are_refused(write: str) -> None:
    """torch.export's graph of them writes elsewhere."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        many = (x * 2).unsqueeze(1).expand(4, 3, 5)
        if write == "index":
            many[many > 0.3] = -0.5
        elif write == "fill":
            many[:, 1:].fill_(1.0)
        else:
            many[2].zero_()
        return many + 1

    text = refusal(forward, image(4, 5))
    assert "writes over elements that are one in memory, as those of an expanded tensor" in text
    assert text.endswith("; write over a clone() of it")
    copied = Of(lambda m, x: (x * 2).unsqueeze(1).expand(4, 3, 5).clone().zero_() + x[:, None])
    check(copied, image(4, 5))


def test_a_sparse_tensor_is_refused() -> None:
    model = Of(lambda m, x: torch.sparse.mm(m.sparse, x), sparse=torch.eye(3).to_sparse())
    with pytest.raises(CannotImport) as caught:
        import_model(model.eval(), (image(3, 4),))
    text = str(caught.value)
    assert text.endswith(": it reads or makes a sparse tensor")


def test_state_that_changes_is_refused() -> None:
    def count(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.state.add_(1)
        return x + m.state

    text = refusal(count, image(3))
    assert "changes 'state' in place" in text and "call model.eval()" in text


def test_a_parameter_that_changes_is_refused() -> None:
    model = nn.Embedding(5, 4, max_norm=0.5).eval()
    with pytest.raises(CannotImport, match=r"changes 'weight' in place"):
        import_model(model, (torch.tensor([1, 2]),))


def test_an_input_that_is_written_is_refused() -> None:
    assert "changes 'args_0' in place" in refusal(lambda m, x: x.add_(1), image(3))


def test_a_batch_norm_in_training_mode_is_refused() -> None:
    with pytest.raises(CannotImport, match=r"in place, .*call model.eval\(\)"):
        import_model(nn.BatchNorm2d(3).train(), (image(2, 3, 4, 4),))


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros(x.shape[-2:])
        mask[1:, :2] = 3
        mask = mask + torch.ones_like(mask) + x.new_full((1, 4), 0.5) + torch.full_like(mask, 2)
        mask = mask * x.new_ones(4) + torch.zeros_like(mask)
        return F.pad(x, (0, 0, 0, 0)) * mask + self.weight


def test_tensors_of_one_number_are_constants() -> None:
    x = torch.randn(2, 3, 4)
    imported = import_model(Fills(), (x,))
    assert imported.opaque == () and imported.spec is not None
    assert [node.op for node in imported.spec.nodes] == ["mul", "add"]
    check(Fills(), x)


def test_large_ones_are_left_to_torch() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros_like(x) + self.weight

    imported = import_model(Large(), (torch.randn(1025, 1024),))
    assert [each.overload for each in imported.opaque] == ["aten.zeros_like.default"]


class Laid(nn.Module):
    """A model in which ones_like has its operand's strides, and views of it rely on them."""

    def __init__(self, turn: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.turn = nn.Conv2d(4, 4, 3, padding=1), turn

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones_like(x.permute(0, 2, 3, 1)) if self.turn else torch.ones_like(x)
        flat = ones.permute(0, 3, 1, 2).view(-1) if self.turn else ones.view(-1)
        return self.conv(x) + (flat * torch.arange(len(flat))).view(x.shape), ones


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_constants_of_one_number_lie_as_torchs(turn: bool, last: bool) -> None:
    model, x = Laid(turn).eval(), torch.randn(2, 4, 6, 4)
    compiled: Any = torch.compile(model, backend=backend, options={"channels_last": last})
    wanted = model(x)
    for made in (cg.fuse(model, x, channels_last=last)(x), compiled(x)):
        torch.testing.assert_close(made[0], wanted[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(made[1], wanted[1]) and made[1].stride() == wanted[1].stride()
