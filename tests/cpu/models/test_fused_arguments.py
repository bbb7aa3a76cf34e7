"""Arguments and results of fused models: containers of any kind, which stay what they are."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import cudnngraph as cg
from cudnngraph.models import form as forming
from cudnngraph.models import trace
from tests.models import Of, image


@dataclasses.dataclass
class Batch:
    x: Any
    scale: Any = 2.0
    rest: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: Any = 2.0
    rest: Any = None

    def __post_init__(self) -> None:
        assert isinstance(self.x, torch.Tensor), "made anew of what is no tensor"


@dataclasses.dataclass(frozen=True)
class Slots:
    __slots__ = ("rest", "scale", "x")
    x: Any
    scale: Any
    rest: Any


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """With each item as an attribute too, as the results of a library's models."""

    x: Any = None
    scale: Any = None
    rest: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


class Tokens(UserDict):  # type: ignore[type-arg]
    """With its items as attributes, as what a tokenizer makes."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Words(dict):  # type: ignore[type-arg]
    pass


class Rows(list):  # type: ignore[type-arg]
    pass


class Pair(NamedTuple):
    x: Any
    scale: Any
    rest: Any


class Triple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Fixed(Mapping):  # type: ignore[type-arg]
    """A mapping that nothing can be set in."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _items(x: Any, scale: Any, rest: Any) -> dict[str, Any]:
    return {"x": x, "scale": scale, "rest": rest}


#: Makes a container of three items.
CONTAINERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "dict": _items,
    "OrderedDict": lambda *items: OrderedDict(_items(*items)),
    "defaultdict": lambda *items: defaultdict(list, _items(*items)),
    "tuple": lambda *items: items,
    "list": lambda *items: [*items],
    "deque": lambda *items: deque(items),
    "namedtuple": Pair,
    "dataclass": Batch,
    "frozen dataclass": Frozen,
    "dataclass of slots": Slots,
    "dataclass and dict": Output,
    "UserDict": lambda *items: Tokens(_items(*items)),
    "a class of dict": lambda *items: Words(_items(*items)),
    "a class of list": lambda *items: Rows(items),
    "a class of tuple": lambda *items: Triple(items),
    "a mapping": lambda *items: Fixed(_items(*items)),
    "ChainMap": lambda *items: ChainMap(_items(*items)),
    "mappingproxy": lambda *items: types.MappingProxyType(_items(*items)),
}


def read(container: Any, key: str, index: int) -> Any:
    """An item of any of them."""
    if isinstance(container, Mapping):
        return container[key]
    return getattr(container, key) if hasattr(container, key) else container[index]


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_what_the_model_sees_and_what_comes_back(name: str) -> None:
    make = CONTAINERS[name]
    torch.manual_seed(0)

    def forward(m: Any, given: Any, more: Any) -> Any:
        assert type(given) is type(make(image(1), 1, None)), type(given)
        scale, rest = read(given, "scale", 1), read(given, "rest", 2)
        y = m.layer(read(given, "x", 0)) * scale + more["bias"]
        return make(y, [rest[0] * 2, None], {"mode": rest[1], "ids": y.argmax(-1)})

    model = Of(forward, layer=nn.Linear(4, 4)).eval()

    def arguments() -> tuple[Any, Any]:
        return make(image(3, 4), 2.0, [image(3), "sum", True, None]), {"bias": image(4)}

    example = arguments()
    fused = cg.fuse(model, example)
    for given in (example, arguments()):
        ours, theirs = fused(*given), model(*given)
        assert type(ours) is type(theirs) is type(given[0])
        torch.testing.assert_close(read(ours, "x", 0), read(theirs, "x", 0))
        assert torch.equal(read(ours, "scale", 1)[0], read(theirs, "scale", 1)[0])
        assert read(ours, "scale", 1)[1] is None and read(ours, "rest", 2)["mode"] == "sum"
        assert torch.equal(read(ours, "rest", 2)["ids"], read(theirs, "rest", 2)["ids"])
    assert len(fused) == 1


def test_containers_of_containers() -> None:
    def forward(m: Any, batch: Any) -> Any:
        inner = batch.rest["inner"]
        return Batch(batch.x + inner.x * inner.scale, Tokens(y=batch.x - 1), [Batch(inner.x * 3)])

    model = Of(forward).eval()
    batch = Batch(image(2, 3), rest=Tokens(inner=Batch(image(2, 3) + 1, scale=4.0)))
    ours, theirs = cg.fuse(model, (batch,))(batch), model(batch)
    torch.testing.assert_close(ours.x, theirs.x)
    torch.testing.assert_close(ours.scale["y"], theirs.scale.y)
    torch.testing.assert_close(ours.rest[0].x, theirs.rest[0].x)
    assert ours.rest[0].scale == 2.0


def test_the_callers_containers_are_left_alone() -> None:
    x = image(2, 3)
    tokens, batch = Tokens(x=x), Batch(x)
    fused = cg.fuse(Of(lambda m, tokens, batch: tokens.x + batch.x).eval(), (tokens, batch))
    assert tokens.data == {"x": x} and tokens["x"] is x and batch.x is x
    fused(tokens, batch)
    assert tokens["x"] is x and batch.x is x


def test_named_arguments_are_given_by_a_mapping_too() -> None:
    model = Of(lambda m, x, scale: m.layer(x) * scale, layer=nn.Linear(4, 4)).eval()
    tokens = Tokens(x=image(2, 4), scale=torch.tensor(2.0))
    fused = cg.fuse(model, (), kwargs=tokens)
    torch.testing.assert_close(fused(**tokens), model(**tokens))


class Encoder(nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ids.float() * mask


def test_a_list_for_a_model_that_takes_its_items_says_so() -> None:
    text = r"the list is one argument; give several as a tuple, as to a call: fused\(\*inputs\)"
    with pytest.raises(cg.CannotImport, match=text):
        cg.fuse(Encoder().eval(), [torch.ones(2, 3), torch.ones(2, 3)])
    fused = cg.fuse(Of(lambda m, xs: xs[0] + xs[1]).eval(), [image(2), image(2)])
    torch.testing.assert_close(fused([image(2), image(2)]), 2 * image(2))


def test_a_mapping_for_a_model_that_takes_its_items_says_so() -> None:
    tokens = Tokens(ids=torch.ones(2, 3), mask=torch.ones(2, 3))
    text = r"the Tokens is one argument; give its items by name: fused\(\*\*inputs\)"
    with pytest.raises(cg.CannotImport, match=text):
        cg.fuse(Encoder().eval(), tokens)


def test_named_arguments_are_one_form_in_any_order() -> None:
    class Named(nn.Module):
        def forward(self, x: Any, scale: Any = 1.0, *, shift: Any = None) -> Any:
            return x * scale - (0 if shift is None else shift)

    x, scale, shift = (image(2, 3) for _ in range(3))
    model = Named().eval()
    fused = cg.fuse(model, (), kwargs={"x": x, "scale": scale, "shift": shift})
    for names in itertools.permutations(("x", "scale", "shift")):
        given = {name: {"x": x, "scale": scale, "shift": shift}[name] for name in names}
        torch.testing.assert_close(fused(**given), x * scale - shift)
    assert len(fused) == 1


def test_the_order_of_names_that_a_model_sees_is_part_of_the_form() -> None:
    class Others(nn.Module):
        def forward(self, x: Any, **others: Any) -> Any:
            return {name: x * place for place, name in enumerate(others)}

    x, model = image(2, 3), Others().eval()
    fused = cg.fuse(model, (), kwargs={"a": x, "x": x, "b": x})
    for given in ({"b": x, "a": x, "x": x}, {"x": x, "a": x, "b": x}):
        made, wanted = fused(**given), model(**given)
        assert list(made) == list(wanted)
        torch.testing.assert_close(made, wanted)
    assert len(fused) == 2


def test_the_kind_of_a_container_and_its_keys_are_part_of_the_form() -> None:
    def forward(m: Any, given: Any) -> Any:
        return given["x"] * (3 if isinstance(given, Tokens) else 2) + len(given)

    model, x = Of(forward).eval(), image(2, 3)
    fused = cg.fuse(model, ({"x": x},))
    for given in ({"x": x}, Tokens(x=x), Words(x=x), Tokens(x=x, y=x), Tokens(x=x)):
        torch.testing.assert_close(fused(given), model(given))
    assert len(fused) == 4

    def local() -> Any:
        @dataclasses.dataclass
        class Batch:
            x: Any

        return Batch

    one, two = local(), local()  # of one name
    model = Of(lambda m, given: given.x * (2 if isinstance(given, one) else 3)).eval()
    fused = cg.fuse(model, (one(x),))
    torch.testing.assert_close(fused(two(x)), 3 * x)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    "values",
    [
        (True, False, True),
        (None, "a", "b", None),
        (Colour.RED, Colour.BLUE),
        (torch.float32, torch.float64),
        (1, 1.0, True),
        (0.0, -0.0),
        (b"x", range(2), (1, 2)),
        (np.float32(2), np.int64(2), 2),
        (complex(1, 2), complex(2, 1)),
    ],
)
def test_other_values_are_part_of_the_form(values: tuple[Any, ...]) -> None:
    """Those that are equal, and of other types or signs, too."""

    def forward(m: Any, x: Any, value: Any) -> Any:
        if isinstance(value, float):
            return x * value, str(type(value))
        return x * (1 + len(str(value))), str(type(value))

    model, x = Of(forward).eval(), image(2, 3)
    fused = cg.fuse(model, (x, values[0]), check=False)
    for value in (*values, *values):
        ours, theirs = fused(x, value), model(x, value)
        assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]
        assert torch.equal(ours[0].signbit(), theirs[0].signbit())


@pytest.mark.parametrize("make", [Batch, lambda *items: Tokens(_items(*items)), list])
def test_a_model_that_changes_its_arguments_is_refused(make: Any) -> None:
    def forward(m: Any, given: Any) -> Any:
        if isinstance(given, list):
            given.append(1)
            return given[0] + 1
        if isinstance(given, Batch):
            given.scale = given.x + 1
            return given.x
        return given.pop("x") + 1

    given = make([image(2)]) if make is list else make(image(2), 1.0, None)
    with pytest.raises(cg.CannotImport, match=r"Of.* changes its arguments, which a graph"):
        cg.fuse(Of(forward).eval(), (given,))


class Strict(Mapping):  # type: ignore[type-arg]
    """Nothing can be made like it."""

    def __init__(self, x: torch.Tensor, *, secret: int) -> None:
        self.x, self.secret = x, secret

    def __getitem__(self, key: str) -> Any:
        return {"x": self.x}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("x",))

    def __len__(self) -> int:
        return 1


def test_what_cannot_be_made_again_is_named() -> None:
    text = "a Strict cannot be made again of its items; expected a dict, a tuple or a dataclass"
    with pytest.raises(cg.CannotImport, match=text):
        cg.fuse(Of(lambda m, given: given["x"] + 1).eval(), (Strict(image(2), secret=1),))


def test_what_holds_itself_or_has_no_hash_is_refused() -> None:
    model = Of(lambda m, given: given).eval()
    within = Batch(image(2))
    within.rest = within
    with pytest.raises(cg.BindError, match="are nested too deeply, or hold themselves"):
        cg.fuse(model, (within,))
    with pytest.raises(cg.PolicyError, match="an argument is a set, which has no hash: forms are"):
        cg.fuse(model, (Batch({1, 2}),))


def test_a_slice_is_part_of_the_form() -> None:
    model, x = Of(lambda m, x, rows: (x * 2.0)[rows]).eval(), image(5, 3)
    fused = cg.fuse(model, (x, slice(0, 2)))
    for rows in (slice(0, 2), slice(1, 4), slice(None, None, 2), slice(0, 2)):
        torch.testing.assert_close(fused(x, rows), model(x, rows))
    assert len(fused) == 3
    with pytest.raises(cg.PolicyError, match="a slice of tensors; expected whole numbers in it"):
        fused(x, slice(torch.tensor(0), torch.tensor(1)))


def test_an_array_is_refused_with_the_way_to_give_it() -> None:
    fused = cg.fuse(Of(lambda m, x: x * 2.0).eval(), image(5, 3))
    with pytest.raises(cg.PolicyError, match=r"give a tensor, as torch\.from_numpy makes"):
        fused(image(5, 3).numpy())


def test_results_that_hold_tensors_in_objects_are_refused() -> None:
    class Cache:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    text = "Of returns a Cache, which a graph does not: it has tensors, plain .*use_cache=False"
    with pytest.raises(cg.CannotImport, match=text):
        cg.fuse(Of(lambda m, x: (x, [Cache(x)])).eval(), image(2))


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)).eval())
    mend = "which cannot be traced; use the module that torch.jit was given"
    with pytest.raises(cg.CannotImport, match=rf"ScriptModule is a ScriptModule, {mend}"):
        cg.fuse(scripted, image(2, 4))
    part = nn.Sequential(nn.ReLU(), torch.jit.script(Decides())).eval()
    with pytest.raises(cg.CannotImport, match=rf"Sequential has a ScriptModule, '1', {mend}"):
        cg.fuse(part, image(2, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("runs", [0, 4])
def test_a_scripted_part_without_choices_is_traced(runs: int) -> None:
    """Also one that torch.jit has run often enough to have fused its ops."""
    torch.manual_seed(0)
    part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid()).eval())
    model, x = nn.Sequential(nn.ReLU(), part).eval(), image(2, 4)
    for _ in range(runs):
        model(x)
    fused = cg.fuse(model, x)
    assert fused.report is not None and not fused.report.opaque
    torch.testing.assert_close(fused(-x), model(-x), rtol=1e-5, atol=1e-6)


def test_torch_is_told_of_no_class() -> None:
    """Classes of others are registered with torch by others, or not at all."""
    given = Batch(image(2))
    cg.fuse(Of(lambda m, given: Batch(given.x + 1)).eval(), (given,))
    assert Batch not in pytree.SUPPORTED_NODES and Tokens not in pytree.SUPPORTED_NODES


def test_results_are_the_callers_for_each_call() -> None:
    fused = cg.fuse(Of(lambda m, x: Tokens(y=x * 2, z=[x + 1])).eval(), image(2))
    first, second = fused(torch.ones(2)), fused(torch.zeros(2))
    assert first is not second and first["z"] is not second["z"]
    assert torch.equal(first["y"], torch.full((2,), 2.0)) and torch.equal(second.y, torch.zeros(2))


def test_a_tensor_without_dims_may_be_on_the_cpu_beside_others() -> None:
    """As time steps of a scheduler are. Another tensor may not."""
    model = Of(lambda m, x, t: m.layer(x) * t, layer=nn.Linear(4, 4)).eval().to("meta")
    x, t = image(2, 4), torch.tensor(2.0)
    assert forming._device_of([x.to("meta"), t, 3], model) == torch.device("meta")
    assert forming._device_of([t], Of(abs)) == torch.device("cpu")
    with pytest.raises(cg.PolicyError, match="arguments and model are on cpu, meta; expected one"):
        cg.fuse(model, (x, t), check=False)


def test_one_tensor_in_two_places_is_one_to_the_model() -> None:
    x, y = image(2, 5, 8), image(2, 5, 8)
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    alike = Of(lambda m, a, b: (a + b if a is b else a - b, b)).eval()
    for each, count in ((model, 3), (alike, 2)):
        assert trace.trace(each, (x,) * count, {}) is not None
        fused = cg.fuse(each, (x,) * count)
        for args in ((x, x, x), (x, y, y), (x, x, y), (y, x, x), (y, y, y)):
            for mine, theirs in zip(fused(*args[:count]), each(*args[:count]), strict=True):
                torch.testing.assert_close(mine, theirs)
