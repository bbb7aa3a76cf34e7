"""A fused model in the place of its model: attributes, modes, states, copies."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.models import image


class Config:
    hidden_size = 4


class Model(nn.Module):
    """With attributes as those of a library's models."""

    kind = "a class attribute"

    def __init__(self) -> None:
        super().__init__()
        self.config, self.scale = Config(), 2.0
        self.model = nn.Linear(4, 4)  # as of a language model with a head
        self._hidden = nn.Linear(4, 4)
        self._note = "private"
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.weight.device

    def get_input_embeddings(self) -> nn.Module:
        return self.model

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.model(x)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._hidden(self.model(x)) * self.scale + self.shift
        return y * self.passing


def pair() -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Model().eval(), image(2, 4)
    return model, cg.fuse(model, x), x


def close(fused: Any, model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)


# -- reading ---------------------------------------------------------------------------------------


def test_attributes_are_the_models() -> None:
    model, fused, x = pair()
    assert isinstance(fused, nn.Module) and fused.unfused is model
    assert fused.config is model.config and fused.scale == 2.0 and fused.kind == model.kind
    assert fused.dtype == torch.float32 and fused.device == torch.device("cpu")
    assert fused.model is model.model and fused._hidden is model._hidden
    assert fused.shift is model.shift and fused.get_input_embeddings() is model.model
    assert torch.equal(fused.forward_features(x), model.forward_features(x))
    assert hasattr(fused, "get_input_embeddings") and not hasattr(fused, "get_output_embeddings")
    assert {"config", "dtype", "forward_features", "report", "shift"} <= set(dir(fused))
    assert "_note" not in dir(fused)


def test_what_is_nowhere_names_both_classes() -> None:
    _, fused, _ = pair()
    text = "'Fused' object has no attribute 'colour', nor has the Model that it stands for$"
    with pytest.raises(AttributeError, match=text):
        _ = fused.colour
    text = (
        r"has no attribute '_note', and does not pass on private ones of the Model .*\(unfused\._"
    )
    with pytest.raises(AttributeError, match=text):
        _ = fused._note
    for name in ("__wrapped__", "__array__", "_forms_of_another"):
        assert not hasattr(fused, name)


def test_parts_have_the_models_names() -> None:
    model, fused, _ = pair()
    for of in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = ([*getattr(each, of)()] for each in (fused, model))
        assert [name for name, _ in ours] == [name for name, _ in theirs] and ours == theirs
    assert [name for name, _ in fused.named_modules()] == ["", "model", "_hidden"]
    assert repr(fused).startswith("Fused(\n  Model, 1 of 8 forms\n  (model): Linear(")


def test_a_fused_model_is_true_also_without_forms() -> None:
    _, fused, _ = pair()
    fused.refresh()
    assert fused and len(fused) == 0


# -- setting ---------------------------------------------------------------------------------------


def test_what_is_set_is_set_on_the_model_and_holds_from_the_next_call_on() -> None:
    model, fused, x = pair()
    fused.scale = 3.0
    assert model.scale == 3.0
    close(fused, model, x)
    fused.model = nn.Linear(4, 4)
    assert model.model is fused.model
    close(fused, model, x)
    fused._hidden = nn.Linear(4, 4)
    assert model._hidden is fused._hidden
    close(fused, model, x)
    fused.extra = 1
    del fused.extra
    assert not hasattr(model, "extra")
    fused._own = "of this module"
    assert not hasattr(model, "_own") and fused._own == "of this module"
    del fused._own
    assert not hasattr(fused, "_own")
    with pytest.raises(AttributeError, match="'unfused' of a Fused cannot be set; fuse the other"):
        fused.unfused = Model()


def test_names_of_this_class_are_its_own() -> None:
    """A model's ``report`` is there by ``unfused``."""
    model = Model().eval()
    model.report = nn.Linear(4, 4)  # type: ignore[assignment]
    fused: Any = cg.fuse(model, image(2, 4))
    assert "Model on cpu" in str(fused.report) and isinstance(model.report, nn.Linear)
    assert fused.unfused.report is model.report


def test_forward_has_the_parameters_of_the_models() -> None:
    """Trainer, sentence-transformers and pipelines leave out arguments that are not among them."""
    model, fused, x = pair()
    assert str(inspect.signature(fused.forward)) == "(x: 'torch.Tensor') -> 'torch.Tensor'"
    assert "self" in inspect.signature(type(fused).forward).parameters
    for way in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        assert torch.equal(way(fused.forward)(x=x), fused.forward(x))
    model.forward = lambda x, mask=None: x
    assert list(inspect.signature(fused.forward).parameters) == ["x", "mask"]
    fused.forward = lambda x: x - 1
    assert torch.equal(fused(x), x - 1)


def test_there_is_no_training_mode() -> None:
    model, fused, x = pair()
    assert fused.eval() is fused and fused.train(False) is fused and not fused.training
    text = "a Fused of a Model is for inference: it has no training mode; train the Model itself"
    with pytest.raises(cg.PolicyError, match=text):
        fused.train()
    with pytest.raises(cg.PolicyError, match=text):
        fused.training = True
    with pytest.raises(cg.PolicyError, match="mode=1; expected True or False"):
        fused.train(1)
    assert not model.training and not model.model.training
    model.train()
    close(fused, model, x)  # a form that is there stays
    with pytest.raises(cg.PolicyError, match=r"in training mode; call model\.eval\(\)"):
        fused(image(3, 4))
    fused.eval()
    assert not model.training and not model.model.training
    close(fused, model, image(3, 4))


# -- states ----------------------------------------------------------------------------------------


def test_the_state_is_the_models_under_its_own_keys() -> None:
    model, fused, x = pair()
    assert list(fused.state_dict()) == list(model.state_dict()) and len(model.state_dict()) == 5
    other = Model().eval()
    found = fused.load_state_dict(other.state_dict())
    assert not found.missing_keys and not found.unexpected_keys
    close(fused, other, x)
    other.load_state_dict(fused.state_dict())
    older = {f"model.{key}": 2 * each for key, each in other.state_dict().items()}
    fused.load_state_dict(older)
    assert torch.equal(fused.shift, 2 * other.shift)
    close(fused, model, x)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"shift".*Unexpected key.*"shifted"'):
        fused.load_state_dict({"shifted": torch.ones(4)})


def test_a_state_within_another_modules_has_the_models_keys() -> None:
    model, fused, x = pair()
    whole, plain = nn.ModuleDict({"unet": fused}), nn.ModuleDict({"unet": Model()})
    assert list(whole.state_dict()) == list(plain.state_dict())
    whole.load_state_dict(plain.state_dict())
    assert torch.equal(model.model.weight, plain["unet"].model.weight)  # type: ignore[union-attr, arg-type]
    close(fused, model, x)


def test_hooks_of_the_models_state_are_called() -> None:
    model = Model().eval()
    seen = []
    model.register_state_dict_post_hook(lambda *args: seen.append("saved"))
    model.register_load_state_dict_post_hook(lambda *args: seen.append("loaded"))
    fused = cg.fuse(model, image(2, 4))
    fused.load_state_dict(fused.state_dict())
    nn.ModuleList([fused]).load_state_dict({f"0.{k}": v for k, v in model.state_dict().items()})
    assert seen == ["saved", "loaded", "saved", "loaded"]


def test_conversions_are_of_the_model() -> None:
    model, fused, x = pair()
    assert fused.double() is fused and model.dtype == torch.float64 == fused.dtype
    close(fused, model, x.double())
    converted: Any = cg.fuse(Model().eval(), x, dtype=torch.bfloat16)
    assert converted.dtype == torch.bfloat16 and converted(x).dtype == torch.bfloat16
    assert converted.float()(x).dtype == torch.float32


# -- copies, and other modules ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_a_copy_stands_for_its_model(way: Callable[[Any], Any]) -> None:
    model, fused, x = pair()
    other = way(fused)
    assert other.config is not None and len(other) == 0 and other.model is other.unfused.model
    close(other, model, x)
    other.scale = 3.0
    close(other, other.unfused, x)
    assert model.scale == (3.0 if other.unfused is model else 2.0)


def test_an_object_without_state_has_no_attributes() -> None:
    """As copies are while they are made."""
    empty = cg.Fused.__new__(cg.Fused)
    with pytest.raises(AttributeError, match="'Fused' object has no attribute 'config'"):
        _ = empty.config


def test_a_fused_model_within_another_is_fused_with_it() -> None:
    model, fused, x = pair()
    whole = nn.Sequential(fused, nn.ReLU()).eval()
    close(cg.fuse(whole, x), nn.Sequential(model, nn.ReLU()), x)
    with pytest.raises(cg.PolicyError, match="the model is fused; expected the model itself"):
        cg.fuse(fused, x)


def test_hooks_of_the_model_run_and_those_of_the_fused_one_too() -> None:
    model, fused, x = pair()
    model.register_forward_hook(lambda module, args, result: result * 2)
    fused.refresh()
    handle = fused.register_forward_hook(lambda module, args, result: result + 1)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x) + 1, rtol=1e-5, atol=1e-6)
    handle.remove()
    close(fused, model, x)
    assert len(model._forward_hooks) == 1 and not model._forward_pre_hooks


def test_parts_by_index_are_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    fused = cg.fuse(model, image(2, 3))
    assert fused[0] is model[0] and fused[-1] is model[1]
    assert [*fused] == [*model]
    with pytest.raises(TypeError, match="'Linear' object is not subscriptable"):
        cg.fuse(model[0], image(2, 3))[0]


def test_a_model_with_a_fused_one_within_that_keeps_something_is_fused() -> None:
    class Keeps(nn.Module):
        size: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.size = tuple(x.shape)
            return x.sin()

    inner, x = cg.fuse(Keeps().eval(), image(2, 4)), image(3, 4)
    fused = cg.fuse(nn.Sequential(inner, nn.Tanh()).eval(), x)
    numerics.check(fused(x), x.double().sin().tanh(), torch.float32)
