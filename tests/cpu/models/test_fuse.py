"""fuse() on a CPU: results, arguments, forms, layouts, and the report."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.models import bound as bindings
from cudnngraph.models import garbage
from tests import numerics
from tests.fused import compiled, net
from tests.models import DiffusionUNet, Of, image

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


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
    before = fused(x)
    assert torch.equal(other(x), before) and other.report is not None
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    other.refresh()
    assert torch.equal(other(x), before), "a copy has weights of its own"
    assert not torch.equal(fused(x), before)


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
    ours, theirs = fused(x, pair, scale=3.0), model(x, pair, scale=3.0)
    torch.testing.assert_close(ours["total"], theirs["total"])
    assert ours["rest"][1][1:] == [3.0, None]
    assert len(fused) == 1, "a number that changes is an input"


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


class Sizes(nn.Module):
    """Sizes among its results, alone and in containers."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x.relu()
        return y.shape, (y, {"size": y.size(), "rows": x.size(0)}), [x.shape[1:]]


def test_sizes_among_the_results_are_sizes() -> None:
    x = torch.randn(3, 4)
    made, want = cg.fuse(Sizes().eval(), x)(x), Sizes()(x)
    sizes = [(each[0], each[1][1]["size"], each[2][0]) for each in (made, want)]
    assert sizes[0] == sizes[1]
    assert {type(size) for size in sizes[0]} == {torch.Size}
    assert made[1][1]["rows"] == 3 and torch.equal(made[1][0], want[1][0])


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


# -- streams ---------------------------------------------------------------------------------------


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


THRESHOLDS: list[tuple[int, int, int]] = []  # at each run; a global, which no model holds


def test_old_objects_are_collected_as_before_once_a_model_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not while that lasts, in any thread."""
    frozen: list[str] = []
    for name in ("freeze", "unfreeze"):  # counts of what is frozen fall when some of it dies
        monkeypatch.setattr(gc, name, lambda name=name: frozen.append(name))

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            THRESHOLDS.append(gc.get_threshold())
            return x + 1.0

    net, x, count = Net().eval(), torch.zeros(2), gc.get_freeze_count()
    before = gc.get_threshold()
    with garbage.old_left_alone():
        cg.fuse(net, (x,), check=False)
        inside = gc.get_threshold()
    assert inside[2] in (garbage.NEVER, 0), "Python 3.14 has none for them"
    assert THRESHOLDS and set(THRESHOLDS) == {inside}
    assert gc.get_threshold() == before
    cg.fuse(net, (x,), check=False)
    with pytest.raises(cg.CannotImport):
        cg.fuse(net, (x, x), check=False)
    assert gc.get_threshold() == before and gc.get_freeze_count() <= count and frozen == []


def test_results_under_inference_mode_are_ordinary_tensors() -> None:
    """They may be written, and saved for a backward, outside of it."""
    model = nn.Linear(4, 3).eval()
    fused, x = cg.fuse(model, torch.randn(2, 4)), torch.randn(2, 4)
    with torch.inference_mode():
        made = fused(x)
    assert not made.is_inference()
    numerics.check(made, model.double()(x.double()), torch.float32)
