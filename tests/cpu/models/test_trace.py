"""Models as ATen ops by a run without memory: the graph of torch.export, and what is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import cudnngraph as cg
from cudnngraph.errors import CannotImport
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import print_spec
from cudnngraph.models import compiler, export, python_calls, trace
from cudnngraph.models.convert import Imported, convert
from tests import numerics, python
from tests.models import NETS, Of, image

IMAGE, LAST = (2, 8, 9, 7), torch.channels_last


def imported(made: export.Exported) -> Imported:
    return convert(made.module, made.constants, made.placeholders, channels_last=True)


def shown(made: Imported) -> str:
    return "" if made.spec is None else print_spec(canonical(made.spec))


def same_as_export(model: nn.Module, *args: Any, **kwargs: Any) -> trace.Traced:
    """The run, after a comparison of what becomes of it and of torch.export's graph."""
    traced = trace.trace(model, args, kwargs)
    assert traced is not None
    theirs = export.by_torch(model, args, kwargs)[0]
    ours = export.export(model, args, kwargs)
    assert isinstance(ours.module, trace.Traced)
    assert len(ours.placeholders) == len(theirs.placeholders)
    assert ours.out_spec == theirs.out_spec
    mine, wanted = imported(ours), imported(theirs)
    assert shown(mine) == shown(wanted)
    assert [each.overload for each in mine.opaque] == [each.overload for each in wanted.opaque]
    assert all(each.line for each in mine.opaque)
    assert mine.folded == wanted.folded
    pairs = zip(mine.results, wanted.results, strict=True)
    assert all(type(a) is type(b) for a, b in pairs)
    return traced


@pytest.mark.parametrize("name", NETS)
def test_models_are_the_graphs_that_torch_exports(name: str) -> None:
    model, x = NETS[name]()
    same_as_export(model.eval(), x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "activations": lambda m, x: F.elu(F.gelu(F.silu(torch.tanh(x))) * torch.sigmoid(x)),
    "in_place": lambda m, x: F.relu(x * 2, inplace=True).add_(x).mul_(0.5),
    "norms": lambda m, x: F.layer_norm(F.rms_norm(x, (7,)), (9, 7)),
    "statistics": lambda m, x: F.batch_norm(x, m.c, m.c.abs() + 1, m.c, m.c, False, 0.1, 1e-3),
    "convolved": lambda m, x: F.conv2d(x, m.k, m.c, 2, 1, groups=2),
    "same_padding": lambda m, x: F.conv2d(x, m.k, None, 1, "same", 1, 2),
    "transposed": lambda m, x: F.conv_transpose2d(x, m.k, None, 2, 1, 1),
    "one_dim": lambda m, x: F.max_pool1d(
        F.conv1d(x[:, :, 0], m.k[:, :, 0], padding=1, groups=2), 2
    ),
    "pools": lambda m, x: (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, ceil_mode=True)),
    "means": lambda m, x: (F.adaptive_avg_pool2d(x, (3, None)), F.avg_pool2d(x, 3, 2)),
    "indices": lambda m, x: F.max_pool2d(x, 2, return_indices=True),
    "resized": lambda m, x: F.interpolate(x, (18, 20), mode="bilinear", align_corners=True),
    "scaled": lambda m, x: F.interpolate(x, scale_factor=(2, 1.5)),
    "recomputed": lambda m, x: F.interpolate(x, scale_factor=2.0, recompute_scale_factor=True),
    "shapes": lambda m, x: torch.cat([x.flatten(2), x.reshape(2, 8, -1) * 2], dim=-1).chunk(3, 1),
    "turned": lambda m, x: x.transpose(1, 2).contiguous().view(2, 9, -1).squeeze().unsqueeze(0),
    "parts": lambda m, x: (x[:, 1:5, ::2], x[..., 3], torch.stack([x, x], 1), *x.split(4, 1)),
    "sums": lambda m, x: (x.mean((2, 3)), x.sum(1, keepdim=True), x.amax(-1)),
    "products": lambda m, x: (x @ m.w.t(), torch.matmul(x[:, 0], m.w.t()), F.linear(x, m.w)),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "masked": lambda m, x: F.scaled_dot_product_attention(x, x, x, torch.ones(9, 9).tril() > 0),
    "from_numbers": lambda m, x: x + torch.arange(7, dtype=x.dtype, device=x.device).flip(0),
    "a_list": lambda m, x: x * torch.tensor([1.0, 2, 3, 4, 5, 6, 7]),
    "softmax": lambda m, x: (x.softmax(-1), x.log_softmax(1), x.argmax(1)),
    "dropped": lambda m, x: F.dropout(x, 0.5, m.training) + x.size(0),
    "nothing": lambda m, x: (x, m.c, None, 3),
    "nested": lambda m, x: {"a": [x + 1, (x, 2.0)], "b": None},
}


def model_of(function: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    state = {"c": torch.randn(8), "k": torch.randn(8, 4, 3, 3), "w": torch.randn(5, 7)}
    return Of(function, **state).eval()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("last", [False, True])
def test_functions_are_the_graphs_that_torch_exports(name: str, last: bool) -> None:
    x = image(*IMAGE)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    same_as_export(model_of(FUNCTIONS[name]), x)


def test_arguments_keep_their_names_and_places() -> None:
    model = Of(lambda m, x, *more, scale=1.0: more[0]["y"] * scale - x)
    args = (image(2, 3), {"y": image(2, 3)})
    traced = same_as_export(model, *args, scale=2.0)
    assert len(traced.placeholders) == 2
    assert pytree.tree_unflatten([1], traced.out_spec) == 1


def test_a_weight_under_two_names_is_one_constant() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.b(self.a(x))

    traced = same_as_export(Tied().eval(), image(2, 4))
    assert len(traced.constants) == 1


def test_a_tensor_that_is_no_buffer_is_a_constant() -> None:
    held = image(3)
    traced = same_as_export(Of(lambda m, x: x * held), image(2, 3))
    (constant,) = traced.constants.values()
    assert constant.data_ptr() == held.data_ptr()


# -- what is given up ------------------------------------------------------------------------------


def _catches(m: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.sum().item()
    except Exception:
        return x


GIVEN_UP: dict[str, Callable[..., Any]] = {
    "random": lambda m, x: x + torch.rand_like(x),
    "written_random": lambda m, x: (x * 1).bernoulli_(0.5),
    "a_random_number": lambda m, x: x if float(torch.rand([])) < 2 else -x,
    "dropout": lambda m, x: F.dropout(x, 0.5, True),
    "branch": lambda m, x: x if x.sum() > 0 else -x,
    "number": lambda m, x: x * float(x.max()),
    "input": lambda m, x: x.add_(1),
    "catches": _catches,
    "statistics": lambda m, x: F.batch_norm(x, m.c, m.c, training=True),
    "address": lambda m, x: x + x.data_ptr() % 2,
    "maybe_a_view": lambda m, x: (y := x * 2, y.flatten(1).add_(1))[0],
    "strides": lambda m, x: (x * 1).as_strided_((2,), (1,)),
    "out": lambda m, x: torch.add(x, 1, out=torch.empty_like(x)),
    "control_flow": lambda m, x: torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)),
    "numpy": lambda m, x: x + torch.from_numpy(x.numpy()),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_the_unusual_is_left_to_torch_export_and_nothing_is_changed(name: str) -> None:
    model, x = model_of(GIVEN_UP[name]), image(*IMAGE)
    before = x.clone(), model.c.clone(), set(vars(model))
    assert trace.trace(model, (x,), {}) is None
    assert torch.equal(x, before[0]) and torch.equal(model.c, before[1])
    assert set(vars(model)) == before[2]
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def _draws_in_vain(m: Any, x: torch.Tensor) -> torch.Tensor:
    chance = torch.rand([])
    mask = (torch.rand_like(x) < chance).to(x.dtype)
    mask[0].mul_(torch.randn(()))
    return x * mask if m.training else torch.relu(x)


def test_random_numbers_that_nothing_reads_are_left_out() -> None:
    """Some models draw whether to skip a layer, and ask only in training."""
    model, x = model_of(_draws_in_vain).eval(), image(*IMAGE)
    before = torch.get_rng_state()
    same_as_export(model, x)
    fused = cg.fuse(model, (x,))
    assert fused.report is not None and not fused.report.opaque
    torch.testing.assert_close(fused(x), torch.relu(x))
    torch.set_rng_state(before)
    trace.trace(model, (x,), {})
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn"


def test_control_flow_works_as_before() -> None:
    """Graphs that a model compiles within itself have not met the modes of the trace."""
    model = model_of(GIVEN_UP["control_flow"])
    x = image(3)
    for _ in range(2):
        trace.trace(model, (x,), {})
        torch.testing.assert_close(model(x), x + 1 if float(x.sum()) > 0 else x - 1)


def test_subclasses_are_given_up() -> None:
    x = image(2, 3)
    two = Of(lambda m, a, b: a + b)
    assert trace.trace(two, (x, x.to_sparse()), {}) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.group_norm(x, 2, m.c, m.c),
        lambda m, x: F.instance_norm(x, weight=m.c, bias=m.c),
        lambda m, x: F.interpolate(x, (5, 5), mode="bicubic", antialias=True),
        lambda m, x: F.log_softmax(x, 1),
        lambda m, x: F.embedding(x.argmax(1) % 5, m.w),
    ],
)
def test_what_is_told_in_other_words_is_as_right(function: Callable[..., Any]) -> None:
    model, x = model_of(function), image(*IMAGE)
    assert trace.trace(model, (x,), {}) is not None
    torch.testing.assert_close(cg.fuse(model, x)(x), model(x))


def test_flags_are_those_of_the_real_tensors() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if m.w.requires_grad else 3) * (5 if isinstance(m.w, nn.Parameter) else 7)

    model, x = Of(forward).eval(), image(2, 3)
    model.w = nn.Parameter(image(3))
    assert trace.trace(model, (x,), {}) is not None
    torch.testing.assert_close(cg.fuse(model, x)(x), model(x))


def test_an_argument_that_the_model_holds_is_given_up() -> None:
    held = image(2, 4)
    assert trace.trace(Of(lambda m, x: x * 2 + held).eval(), (held,), {}) is None
    writes = Of(lambda m, d: d.setdefault("y", d["x"] * 2)).eval()
    assert trace.trace(writes, ({"x": held},), {}) is None


class Cache:
    """An object that a model keeps keys and values in."""

    def __init__(self, *kept: torch.Tensor) -> None:
        self.kept = kept


class Remembers(nn.Module):
    """A model that gives a cache with its result, unless told not to."""

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> Any:
        """(x * 2, a cache)."""
        return (x * 2, Cache(x)) if use_cache else (x * 2,)


def test_a_cache_in_the_results_is_refused_with_the_mend() -> None:
    model, x = Remembers().eval(), image(2, 4)
    with pytest.raises(CannotImport) as caught:
        cg.fuse(model, x)
    assert str(caught.value) == (
        "Remembers returns a Cache, which a graph does not: it has tensors, plain values, and "
        "tuples, lists and dicts of them; call it with use_cache=False, or return the tensors in it"
    )
    (y,) = cg.fuse(model, x, kwargs={"use_cache": False})(x, use_cache=False)
    torch.testing.assert_close(y, x * 2)


class Loops(nn.Module):
    """A loop over what is chosen by numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, where it is large times two."""
        for chosen in (x > 0).any(-1).nonzero():
            x = x * chosen
        return x


class Caught(Loops):
    """The same, of a module that torch.export stumbles over for another reason."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, where it is large times two; its weight is made anew, as those of some routers are."""
        if not torch.compiler.is_compiling():
            return super().forward(x)
        raise TypeError("is not for a compiler")


@pytest.mark.parametrize("kind", [Loops, Caught])
def test_a_loop_that_numbers_choose_is_refused_with_the_mend(kind: type[nn.Module]) -> None:
    text = (
        rf"{kind.__name__} asks for the numbers in a tensor, which a graph does not "
        r"\(test_trace.py:\d+ in forward: .*\); choose with torch.where among results of one "
        r"shape; in the place of a loop over experts, sort rows by expert and multiply them by "
        "torch.nn.functional.grouped_mm"
    )
    with pytest.raises(CannotImport, match=text):
        cg.fuse(kind().eval(), image(4, 6))


@pytest.mark.parametrize("numbers", [lambda x: x.tolist(), lambda x: x.cpu().numpy().tolist()])
def test_lists_of_the_numbers_in_a_tensor_are_refused_with_the_line(
    numbers: Callable[[torch.Tensor], list[int]],
) -> None:
    def function(m: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if len({*numbers(lengths)}) > 1:
            return x
        return x[:, : max(numbers(lengths))] * 2

    text = (
        r"Of asks for the numbers in a tensor, which a graph does not \(test_trace.py:\d+ in .*numb"
    )
    with pytest.raises(CannotImport, match=text) as caught:
        cg.fuse(Of(function).eval(), (image(2, 6), torch.tensor([3, 4])))
    assert caught.value.__cause__ is not caught.value


def test_a_number_that_is_used_elsewhere_is_refused_with_the_line_that_asks() -> None:
    """torch.export tells where it is used, if that."""

    def function(m: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        rows = sizes[0].item()
        y = x.reshape(rows, -1)
        return y.sum(1) if y.shape[0] > 2 else y

    with pytest.raises(CannotImport, match=r"numbers in a tensor, .*rows = sizes\[0\]\.item"):
        cg.fuse(Of(function).eval(), (image(2, 6), torch.tensor([3, 4])))


def test_an_object_among_the_arguments_is_refused() -> None:
    model = Of(lambda m, b: b.kept[0] * 2).eval()
    text = "Of is given a Cache, which a graph does not: .*; call it with use_cache=False, or give"
    with pytest.raises(CannotImport, match=text):
        cg.fuse(model, (Cache(image(2, 4)),))


# -- what a run says of itself ---------------------------------------------------------------------


def _asks(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As transformers asks whether a mask hides anything."""
    mask = x > -9
    if not torch.compiler.is_compiling() and mask.all():
        return x * 2
    return torch.where(mask, x * 2, 0.0)


def _loops(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As Mamba has control flow where it is compiled, and a loop elsewhere."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 2, (x,))
    return x * 2


def _exports(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.compiler.is_exporting() else x * 2 + 0 * x.sum().item()


SAYS: dict[str, tuple[Callable[..., Any], tuple[str, ...], str]] = {
    "asks": (_asks, compiler.WAYS[0], "where"),
    "loops": (_loops, compiler.WAYS[1], "mul"),
    "exports": (_exports, compiler.WAYS[2], "mul"),
}


@pytest.mark.parametrize("name", SAYS)
def test_a_model_hears_that_it_is_traced(name: str) -> None:
    function, way, op = SAYS[name]
    model, x = Of(function).eval(), image(2, 6)
    found = [trace.trace(model, (x,), {}, each) is not None for each in compiler.WAYS]
    assert found[compiler.WAYS.index(way)] and not any(found[: compiler.WAYS.index(way)])
    made = export.export(model, (x,))
    assert isinstance(made.module, trace.Traced)
    assert op in {
        str(node.target).split(".")[1]
        for node in made.module.graph.nodes
        if "." in str(node.target)
    }
    torch.testing.assert_close(cg.fuse(model, x)(x), model(x))
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def test_a_run_that_fails_leaves_no_flag_and_no_state() -> None:
    seen: SimpleQueue[tuple[bool, list[Any]]] = SimpleQueue()  # a list would be put back too

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        seen.put((torch.compiler.is_compiling(), list(m.kept)))
        m.kept.append(1)
        return x * float(x.sum())

    model = Of(forward).eval()
    model.kept = []
    with pytest.raises(CannotImport):
        export.export(model, (image(2, 3),))
    runs = [seen.get() for _ in range(seen.qsize())]
    ours = [compiling for compiling, _ in runs[: len(compiler.WAYS)]]
    assert ours == [bool(way) for way in compiler.WAYS]
    assert all(not kept for _, kept in runs) and model.kept == []
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def test_flags_of_several_threads_end_with_the_last() -> None:
    model = Of(lambda m, x: x * 2 if torch.compiler.is_compiling() else x * 3).eval()
    failed: list[Any] = []

    def run() -> None:
        for _ in range(20):
            if trace.trace(model, (image(2, 3),), {}, compiler.WAYS[0]) is None:
                failed.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed and not torch.compiler.is_compiling()
    seen: list[object] = []
    torch.compile(lambda x: x + 1, backend=lambda module, _: seen.append(module) or module)(
        image(2)
    )
    assert seen, "torch.compile is left to run as it is"


@torch.library.custom_op("cudnngraph_tests::thrice", mutates_args=())
def _thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@_thrice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_of_others_is_a_step_of_its_own() -> None:
    model, x = Of(lambda m, x: _thrice(x + 1) * 2).eval(), image(2, 6)
    assert trace.trace(model, (x,), {}) is not None
    fused = cg.fuse(model, x)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.report is not None
    assert [name for name, _ in fused.report.opaque] == ["cudnngraph_tests.thrice.default"]


def test_a_product_into_a_tensor_of_the_model() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        z = x.new_zeros(4, 4)
        torch.matmul(x, x, out=z)
        return z

    model, x = Of(forward).eval(), image(4, 4)
    torch.testing.assert_close(cg.fuse(model, x)(x), model(x))


def test_an_expanded_input_and_memory_as_it_lies() -> None:
    x = image(1, 8, 9, 7).expand(2, 8, 9, 7)
    model = model_of(lambda m, x: F.conv2d(x, m.k, groups=2))
    torch.testing.assert_close(cg.fuse(model, x)(x), model(x), rtol=1e-4, atol=1e-4)
    strided = model_of(lambda m, x: F.conv2d(x, m.k, groups=2).as_strided((4,), (1,)))
    x = image(*IMAGE)
    for last in (False, True):
        torch.testing.assert_close(
            cg.fuse(strided, x, channels_last=last)(x), strided(x), rtol=1e-4, atol=1e-4
        )


# -- forms -----------------------------------------------------------------------------------------

FORMED: dict[str, Callable[..., torch.Tensor]] = {
    "conv2d": lambda x: F.conv2d(x, torch.zeros(6, 4, 3, 2), None, (2, 1), (1, 0), (1, 2), 2),
    "conv1d": lambda x: F.conv1d(x[:, :, 0].contiguous(), torch.zeros(6, 8, 3), stride=2),
    "conv3d": lambda x: F.conv3d(x.unsqueeze(2), torch.zeros(6, 8, 1, 3, 3), padding=(0, 1, 1)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.zeros(8, 3, 4, 4), None, 2, 1, 1, 2),
    "max_pool2d": lambda x: F.max_pool2d(x, (3, 2), 2, 1),
    "max_pool_plain": lambda x: F.max_pool2d(x, 3),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive_1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "bilinear": lambda x: F.interpolate(x, (5, 11), mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.3),
    "relu": lambda x: F.relu(x),
    "add": lambda x: x + x,
    "bias": lambda x: x + torch.zeros(8, 1, 1),
    "bias_first": lambda x: torch.zeros(8, 1, 1) + x,
    "of_two_layouts": lambda x: x + torch.zeros(2, 9, 7, 8).permute(0, 3, 1, 2),
    "of_another_layout": lambda x: torch.zeros(2, 9, 7, 8).permute(0, 3, 1, 2) - x,
    "mask_first": lambda x: torch.zeros(9, 7) * x,
    "number": lambda x: x * 2.0,
    "cat": lambda x: torch.cat([x, x, x], 1),
    "cat_mixed": lambda x: torch.cat([x, torch.zeros(2, 3, 9, 7)], 1),
    "cat_expanded": lambda x: torch.cat([x.flatten(2), torch.zeros(1, 1, 63).expand(2, 1, 63)], 1),
    "cat_turned": lambda x: torch.cat([x.flatten(2).transpose(1, 2)] * 2, 1),
    "embedding": lambda x: F.embedding(x.argmax(1), torch.zeros(8, 5)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x[..., :5]),
    "cat_rows": lambda x: torch.cat([x, x], -1),
    "linear": lambda x: F.linear(x.flatten(1), torch.zeros(5, 504)),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(8), torch.zeros(8)),
    "layer_norm": lambda x: F.layer_norm(x, (9, 7)),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean_dropped": lambda x: x.mean((-1, 2)),
    "mean_of_rows": lambda x: x.mean(1),
}


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("last", [False, True])
def test_forms_are_those_of_torchs_results(name: str, last: bool) -> None:
    x = torch.zeros(IMAGE).contiguous(memory_format=LAST if last else torch.contiguous_format)
    traced = trace.trace(Of(lambda m, x: FORMED[name](x)).eval(), (x,), {})
    assert traced is not None
    (result,) = (node for node in traced.graph.nodes if node.op == "output")
    seen, want = result.args[0][0].meta["val"], FORMED[name](x)
    assert (seen.shape, seen.dtype) == (want.shape, want.dtype)
    if name == "conv_transpose2d":  # on a CPU in another layout than on a GPU
        return
    steps = zip(seen.shape, seen.stride(), want.stride(), strict=True)
    assert all(ours == theirs for extent, ours, theirs in steps if extent > 1)


# -- imports ---------------------------------------------------------------------------------------

_ALONE = """
import sys, torch, cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.executor import torch_steps as eager
from cudnngraph.models.convert import import_model
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
net, x = {
    "resnet": (models.ResNet((1, 1), 8, 5), torch.randn(1, 3, 64, 64)),
    "unet": (models.UNet(8, 3), torch.randn(1, 3, 32, 32)),
    "deeplab": (models.DeepLab(models.ResNet((1, 1, 1), 8, dilated=True), 8, 3),
        torch.randn(1, 3, 64, 64)),
    "gpt": (models.GPT(97, 64, 2, 32), torch.randint(0, 97, (2, 32))),
    "vit": (models.ViT(32, 8, 64, 2, 10), torch.randn(1, 3, 32, 32)),
    "convnext": (models.ConvNeXt((16, 32), (1, 1), 10), torch.randn(1, 3, 64, 64)),
}[sys.argv[1]]
cg.fuse(net.eval(), x, check=False)
x = x.half() if x.is_floating_point() else x
graph = CutGraph(import_model(net.half(), (x,), channels_last=True).spec)
for node in graph.compute_nodes:
    eager.prepare(subgraph_of(graph, [node]), allow_tf32=False, device=torch.device("cpu"))
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("name", ["resnet", "unet", "deeplab", "gpt", "vit", "convnext"])
def test_fuse_does_not_import_torchs_compiler(name: str) -> None:
    """A second of a start."""
    done = python.run("-c", _ALONE, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


_CATCHES = """
import torch
import cudnngraph as cg
class Net(torch.nn.Module):
    def forward(self, x):
        try:
            import torch._dynamo
        except Exception:
            return x + 1
        return x + 2
x = torch.zeros(3)
print(cg.fuse(Net().eval(), x)(x).tolist())
"""


def test_a_model_that_does_without_the_compiler_is_noted_with_it() -> None:
    """As it runs, not as it runs where the import fails."""
    done = python.run("-c", _CATCHES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]"


_COMPILES = """
import sys
import torch
import cudnngraph as cg
class Net(torch.nn.Module):
    def forward(self, x):
        if not hasattr(self, "run"):
            self.run = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
        return self.run(x)
assert "torch._dynamo" not in sys.modules
net, x = Net().eval(), torch.zeros(3)
print(cg.fuse(net, x)(x).tolist(), net(x).tolist())
"""


def test_a_model_that_is_the_first_to_import_the_compiler_runs_beside_it() -> None:
    done = python.run("-c", _COMPILES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0, 1.0] [1.0, 1.0, 1.0]"


PRODUCTS = (
    *("bhid,bhjd->bhij", "bhij,bhjd->bhid", "b h i d, b h j d -> b h j i", "bdi,bdj->bij"),
    *("id,jd->ij", "di,dj->ji", "...id,...jd->...ij", "bhdi,bhjd->bhij"),
)
NO_PRODUCTS = (
    *("bhid,bhjd->bihj", "bhid,bhid->bhi", "bi,bj->bij", "bhid,bhjd->hbij", "bid,bjd->ij"),
    *("ij,jk", "iij,jd->id", "i,i->", "bhid,jd->bhij", "...id,jd->...ij", "bid,bjd,bjd->bij"),
)


@pytest.mark.parametrize("equation", [*PRODUCTS, *NO_PRODUCTS])
def test_an_einsum_that_is_a_product_of_matrices_is_one_node(equation: str) -> None:
    sizes = {"b": 2, "h": 3, "i": 4, "j": 5, "d": 6, "k": 7, "...": 2}
    torch.manual_seed(0)

    def made(term: str) -> torch.Tensor:
        labels = [each if each != "." else "..." for each in term.replace("...", ".")]
        return torch.randn([sizes[each] for each in labels])

    terms = equation.replace(" ", "").split("->")[0].split(",")
    operands = tuple(map(made, terms))
    model = Of(lambda m, *xs: torch.einsum(equation, *xs)).eval()
    traced = trace.trace(model, operands, {})
    assert traced is not None
    ops = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    one = "aten.matmul.default" in ops and set(ops) <= {"aten.matmul.default", "aten.transpose.int"}
    assert one == (equation in PRODUCTS), ops
    torch.testing.assert_close(cg.fuse(model, operands)(*operands), model(*operands))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bid,bjd->bij", ((2, 4, 1), (2, 5, 6))),
        ("...id,...dj->...ij", ((4, 6), (2, 6, 5))),
    ],
)
def test_an_einsum_of_sizes_that_repeat_is_left_to_torch(
    equation: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    operands = tuple(map(torch.randn, shapes))
    model = Of(lambda m, x, y: torch.einsum(equation, x, y)).eval()
    traced = trace.trace(model, operands, {})
    assert traced is not None
    assert "aten.matmul.default" not in {str(node.target) for node in traced.graph.nodes}
    torch.testing.assert_close(cg.fuse(model, operands)(*operands), model(*operands))


def test_an_einsum_of_a_diagonal_is_no_product() -> None:
    x = torch.randn(2, 2, 4, 6)
    assert python_calls.product("abid,abjd->abij", x, x) is not None
    assert python_calls.product("bbid,bbjd->bbij", x, x) is None


def test_an_einsum_that_torch_refuses_is_refused() -> None:
    x = torch.randn(2, 4, 6)
    model = Of(lambda m, x: torch.einsum("id,jd->ij", x, x)).eval()
    assert trace.trace(model, (x,), {}) is None


def test_an_einsum_that_is_differentiated_or_cast_is_traced_as_before() -> None:
    def squares(t: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bid,bjd->bij", t, t).sum()

    def cast(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.einsum("bid,bjd->bij", x, x * 2)

    x = torch.randn(2, 4, 6)
    wide = x.double()
    for function, exact in (
        (lambda m, x: torch.func.grad(squares)(x), torch.func.grad(squares)(wide)),
        (cast, torch.einsum("bid,bjd->bij", wide, wide * 2)),
    ):
        model = Of(function).eval()
        assert trace.trace(model, (x,), {}) is not None
        own = model(x)
        numerics.check(cg.fuse(model, x)(x), exact, own.dtype, own, terms=6)
