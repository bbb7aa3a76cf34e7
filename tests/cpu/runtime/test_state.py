"""State that a model keeps between its calls: refused by name if it changes, taken if made once.

The model is left as it was.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.models.export import by_torch, export
from cudnngraph.runtime.state import Held


class Slotted:
    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count = 0


class Counted:
    total = 0


class Keeps(nn.Module):
    """A function as a model with places of every kind to keep something in."""

    of_the_class = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("hidden", torch.zeros(2, 3))
        self.layer = nn.Linear(3, 3)
        self.layer.kept = None
        self.held = torch.zeros(2, 3)
        self.pair = (torch.zeros(2, 3), [])
        self.count, self.words, self.named = 0, [], {}
        self.ordered, self.queue = collections.OrderedDict(), collections.deque(maxlen=2)
        self.set, self.array, self.user = {1}, np.zeros(3), collections.UserDict()
        self.box, self.slots, self.counted = SimpleNamespace(n=0), Slotted(), Counted()
        self.hidden_list = [nn.Linear(3, 3)]
        self.made = counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.function(self, x)
        return made


def counter() -> Callable[[], int]:
    count = 0

    def counts() -> int:
        nonlocal count
        count += 1
        return count

    return counts


def averages(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.held = m.held * 0.5 + x
    return m.held


def exchanges(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.hidden = m.hidden * 0.5 + x
    return m.hidden


def counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return x * m.count


def counts_to_itself(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return x * 2


def appends(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.words.append(1)
    return x * len(m.words)


def remembers_once(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.layer.kept is None:
        m.layer.kept = x * 1
    return m.layer(x) + m.layer.kept


def begins(m: Any, x: torch.Tensor) -> torch.Tensor:
    first, m.named["begun"] = "begun" not in m.named, True
    return x * (2 if first else 3)


def exchanges_a_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.layer.weight = nn.Parameter(m.layer.weight * 0.9)
    return m.layer(x)


def sets_an_item(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.array[0] += 1
    return x * float(m.array[0])


def appends_within(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.pair[1].append(x)
    return x + len(m.pair[1])


def in_a_slot(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.slots.count += 1
    return x * m.slots.count


def in_the_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    Keeps.of_the_class += 1
    return x * Keeps.of_the_class


def in_anothers_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    type(m.counted).total += 1
    return x * Counted.total


def in_a_box(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.box.n += 1
    return x * m.box.n


def in_a_hidden_module(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.hidden_list[0].count = getattr(m.hidden_list[0], "count", 0) + 1
    return x * m.hidden_list[0].count


def by_entry(where: str) -> Callable[..., Any]:
    def sets(m: Any, x: torch.Tensor) -> torch.Tensor:
        held = getattr(m, where)
        held["n"] = held.get("n", 0) + 1
        return x * held["n"]

    return sets


CHANGES: dict[str, tuple[Callable[..., Any], str]] = {
    "an average": (averages, "changes 'held' in every call"),
    "another buffer": (exchanges, "changes 'hidden' in every call"),
    "a counter": (counts, "changes 'count' in every call"),
    "a counter that nothing reads": (counts_to_itself, "changes 'count' in every call"),
    "a list": (appends, "changes 'words' in every call"),
    "a list in a tuple": (appends_within, r"changes 'pair\[1\]' in every call"),
    "a dict": (by_entry("named"), r"changes 'named\['n'\]' in every call"),
    "an ordered dict": (by_entry("ordered"), r"changes 'ordered\['n'\]' in every call"),
    "a user's dict": (by_entry("user"), r"changes 'user.data\['n'\]' in every call"),
    "a queue": (lambda m, x: (m.queue.append(x), x * len(m.queue))[1], "changes 'queue' in every"),
    "a set": (lambda m, x: (m.set.add(len(m.set) + 1), x * len(m.set))[1], "changes 'set' in ev"),
    "an array": (sets_an_item, "changes 'array' in every call"),
    "an object": (in_a_box, "changes 'box.n' in every call"),
    "a slot": (in_a_slot, "changes 'slots.count' in every call"),
    "a class": (in_the_class, "changes 'Keeps.of_the_class' in every call"),
    "a class of an object": (in_anothers_class, "changes 'Counted.total' in every call"),
    "a variable of a closure": (lambda m, x: x * m.made(), "changes 'made.count' in every call"),
    "a module in a list": (in_a_hidden_module, r"changes 'hidden_list\[0\].count' in every call"),
    "a parameter": (exchanges_a_weight, "changes 'layer.weight' in every call"),
    "what is not read": (lambda m, x: setattr(m, "last", x * 1) or x * 2, "changes 'last' in"),
    "the first input": (remembers_once, "keeps 'layer.kept' from one call to the next, and its r"),
    "a first call": (begins, r"keeps 'named\['begun'\]' from one call to the next"),
    "in place": (lambda m, x: m.hidden.add_(x) * 1, "changes 'hidden' in place"),
    "in place, a part": (lambda m, x: m.hidden[0].add_(x[0]) * 1, "changes 'hidden' in place"),
    "in place, no buffer": (lambda m, x: m.held.add_(x) * 1, "changes 'held' in place"),
    "in place, in a tuple": (lambda m, x: m.pair[0].add_(x) * 1, r"changes 'pair\[0\]' in place"),
    "in place, a weight": (lambda m, x: m.layer.weight.mul_(2)[:2] + x, "'layer.weight' in place"),
}


def everything(model: Keeps) -> Any:
    held = {k: v for k, v in vars(model).items() if k not in ("function", "made", "slots")}
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    return copy.deepcopy(held), tensors, model.slots.count, Keeps.of_the_class, Counted.total


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, nn.Module | SimpleNamespace | Counted | collections.UserDict):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("by", ["a run", "torch.export"])
@pytest.mark.parametrize("name", CHANGES)
def test_state_that_changes_is_refused_by_name_and_put_back(
    name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, text = CHANGES[name]
    if by == "torch.export":
        if name.startswith("in place"):
            text = "changes|mutated"  # torch's own words, and names
        elif name == "another buffer":
            text = "changes 'hidden'"
        monkeypatch.setattr("cudnngraph.models.trace.trace", lambda *_: None)
    model, x = Keeps(function).eval(), torch.ones(2, 3)
    before, objects = everything(model), {k: id(v) for k, v in vars(model).items()}
    with pytest.raises(cg.CannotImport, match=text):
        cg.fuse(model, x)
    assert same(everything(model), before)
    assert {k: id(v) for k, v in vars(model).items()} == objects


# -- what is taken ---------------------------------------------------------------------------------


def keeps_a_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.layer.kept is None or m.layer.kept.shape[0] < x.shape[1]:
        m.layer.kept = torch.arange(x.shape[1], dtype=x.dtype).exp()
    return m.layer(x) * m.layer.kept[: x.shape[1]]


def keeps_by_shape(m: Any, x: torch.Tensor) -> torch.Tensor:
    if tuple(x.shape) not in m.named:
        m.named[tuple(x.shape)] = m.layer.weight.flip(0).sum(0)
    return x + m.named[tuple(x.shape)]


def makes_the_same_again(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mask, m.shape = torch.ones(3, 3).tril()[1], tuple(x.shape)
    m.words = [m.layer.weight * 2]
    return x * m.mask + m.words[0][:2]


TAKEN: dict[str, Callable[..., Any]] = {
    "a table": keeps_a_table,
    "a table by shape": keeps_by_shape,
    "made again": makes_the_same_again,
}


@pytest.mark.parametrize("by", ["a run", "torch.export"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_made_once_or_made_again_alike_is_taken(
    name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "torch.export":
        monkeypatch.setattr("cudnngraph.models.trace.trace", lambda *_: None)
    model, x = Keeps(TAKEN[name]).eval(), torch.randn(2, 3)
    before = everything(model)
    fused = cg.fuse(model, x)
    assert same(everything(model), before), "nothing is left of the trace"
    for _ in range(2):
        torch.testing.assert_close(fused(x), model(x))
    torch.testing.assert_close(fused(2 * x), model(2 * x))


def test_a_buffer_that_is_made_again_alike_is_taken() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.hidden = torch.zeros(2, 3) * 2
        made: torch.Tensor = x + m.hidden
        return made

    model, x = Keeps(forward).eval(), torch.randn(2, 3)
    torch.testing.assert_close(cg.fuse(model, x)(x), x)


def test_weights_that_a_hook_computes_are_taken() -> None:
    """The hook puts the weights into an attribute in every call."""
    model = nn.utils.weight_norm(nn.Linear(3, 3)).eval()
    x = torch.randn(2, 3)
    torch.testing.assert_close(cg.fuse(model, x)(x), model(x))


def test_a_recurrent_layer_is_taken() -> None:
    model, x = nn.LSTM(3, 4, batch_first=True).eval(), torch.randn(2, 5, 3)
    torch.testing.assert_close(cg.fuse(model, x)(x)[0], model(x)[0])


# -- what is not in the model ----------------------------------------------------------------------

_calls = [0]


def test_a_result_that_depends_on_what_is_outside_of_the_model_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        _calls[0] += 1
        return x * _calls[0]

    with pytest.raises(cg.CannotImport, match="result 0 is another in a second call with the same"):
        cg.fuse(Keeps(forward).eval(), torch.ones(2, 3))


@pytest.mark.parametrize("by", [export, by_torch])
def test_arguments_that_change_are_refused(by: Callable[..., Any]) -> None:
    class Writes(nn.Module):
        def forward(self, parts: dict[str, Any], more: list[Any]) -> torch.Tensor:
            more.append(parts["x"] * 2)
            made: torch.Tensor = more[-1] + 1
            return made

    with pytest.raises(cg.CannotImport, match="Writes changes its arguments, which a graph does"):
        by(Writes().eval(), ({"x": torch.ones(3)}, []))


def test_a_model_that_cannot_be_tried_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.count += 1
        if not torch.compiler.is_exporting() and type(x) is torch.Tensor:
            raise ValueError("out of luck")
        return x * 2

    with pytest.raises(cg.CannotImport, match="Keeps changes 'count', and running it, to see whe"):
        export(Keeps(forward).eval(), (torch.ones(2, 3),))


def test_all_is_found_again_in_what_refers_to_itself() -> None:
    model = Keeps(lambda m, x: x)
    model.named["itself"] = model.named
    model.words.append(model)
    held = Held(model)
    assert held.changes() == []
    model.named["more"] = 1
    assert held.changes() == ["named['more']"]
    held.restore()
    assert list(model.named) == ["itself"]
