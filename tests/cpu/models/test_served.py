"""Habits of serving: what is done with results, weights, transforms and tracers around a fused
model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from tests import numerics


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    yield


class MakesConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x), torch.tensor([1.0, 2.0]), torch.tensor(3.0), self.linear.bias


def test_what_a_model_makes_of_numbers_is_the_callers() -> None:
    model, x = MakesConstants().eval(), torch.randn(2, 4)
    fused = cg.fuse(model, x)
    for _ in range(2):
        y, made, scalar, bias = fused(x)
        assert made.tolist() == [1.0, 2.0] and scalar.item() == 3.0
        for each in (y, made, scalar):
            each.fill_(7.0)
    assert bias.data_ptr() == model.linear.bias.data_ptr(), "what it holds is handed on"


def at_once(serve: Callable[[int], None], many: int) -> None:
    """Call it with 0, 1, ... by as many threads; the first error is raised."""
    with ThreadPoolExecutor(many) as pool:
        list(pool.map(serve, range(many)))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def test_functional_call_gives_the_results_of_the_tensors_that_it_is_given() -> None:
    model, x = net(), torch.randn(3, 4)
    fused = cg.fuse(model, x)
    other = {name: 2 * each.detach() for name, each in model.named_parameters()}
    with torch.no_grad():
        for _ in range(2):
            made = torch.func.functional_call(fused, other, (x,))
            torch.testing.assert_close(made, torch.func.functional_call(model, other, (x,)))
            torch.testing.assert_close(fused(x), model(x))


def test_parts_that_were_replaced_are_taken() -> None:
    model, x = net(), torch.randn(3, 4)
    fused = cg.fuse(model, x)
    model[2] = nn.Linear(8, 2)
    torch.testing.assert_close(fused(x), model(x).detach())
    model[0].bias = nn.Parameter(torch.ones(8))
    torch.testing.assert_close(fused(x), model(x).detach())
    state = {name: 0.5 * each for name, each in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    torch.testing.assert_close(fused(x), model(x).detach())
    before = fused.bound(x)
    assert fused.bound(x) is before, "what stays is compiled once"


def test_transforms_of_torch_func_are_refused_with_the_mend() -> None:
    model, x = net(), torch.randn(3, 4)
    fused = cg.fuse(model, x)

    def by_parameters(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        made: torch.Tensor = torch.func.functional_call(fused, parameters, (x,))
        return made.sum()

    stacked = {n: torch.stack([p, p]).detach() for n, p in model.named_parameters()}
    for call in (
        lambda: torch.func.vmap(fused)(torch.stack([x, x])),
        lambda: torch.func.grad(lambda z: fused(z).sum())(x),
        lambda: torch.func.jvp(fused, (x,), (x,)),
        lambda: torch.func.vmap(by_parameters)(stacked),
    ):
        with pytest.raises(cg.BindError, match="transform the model itself, which is `unfused`"):
            call()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(cg.BindError, match="has a tangent"):
            fused(dual)
        torch.testing.assert_close(fused(x), model(x).detach())
    torch.testing.assert_close(fused(x), model(x).detach())


@pytest.mark.parametrize("by", ["jit.trace", "export", "strict export"])
def test_what_records_a_model_records_the_one_that_is_fused(by: str) -> None:
    model, x = net(), torch.randn(3, 4)
    outer = nn.Sequential(cg.fuse(model, x)).eval()
    if by == "jit.trace":
        recorded: Any = torch.jit.trace(outer, x)
    else:
        recorded = torch.export.export(outer, (x,), strict=by != "export").module()
    torch.testing.assert_close(recorded(x + 1).detach(), model(x + 1).detach())
    with torch.no_grad():
        for each in recorded.parameters():
            each.zero_()
    assert not recorded(x).any(), "it reads the parameters"


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cudnngraph"])
@pytest.mark.parametrize("whole", [True, False])
def test_torch_compile_takes_a_fused_model_within(backend: str, whole: bool) -> None:
    """The model itself, if one graph of all is asked for; else the fused one is called between."""
    torch.compiler.reset()
    model, x = net(), torch.randn(3, 4)
    fused = cg.fuse(model, x)
    outer = nn.Sequential(nn.Tanh(), fused, nn.Tanh()).eval()
    run = torch.compile(outer, backend=backend, fullgraph=whole)
    for rows in (3, 5, 2):  # others are compiled when they come
        x = torch.randn(rows, 4)
        with torch.no_grad():
            exact = copy.deepcopy(model).double()(x.double().tanh()).tanh()
            numerics.check(run(x), exact, torch.float32, model(x.tanh()).tanh(), terms=16)
    assert len(fused) == (1 if whole else 3)


def test_the_log_says_once_that_gradients_end(caplog: pytest.LogCaptureFixture) -> None:
    class Ends(nn.Linear):
        pass

    x = torch.randn(3, 4)
    fused = cg.fuse(Ends(4, 2).eval(), x)
    with torch.no_grad():
        fused(x.clone().requires_grad_())
    fused(x)
    assert not caplog.messages
    for _ in range(2):
        assert not fused(x.clone().requires_grad_()).requires_grad
    (text,) = caplog.messages
    assert text.startswith("Ends: an argument requires a gradient, and results of a fused model")


def test_a_model_in_ddp_is_fused_without_it(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(net()).eval()
        with pytest.raises(cg.PolicyError, match=r"the model within: fuse\(model\.module, "):
            cg.fuse(model, torch.randn(3, 4))
    finally:
        torch.distributed.destroy_process_group()


def test_a_nested_tensor_is_refused_in_words() -> None:
    fused = cg.fuse(net(), torch.randn(3, 4))
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(1, 4)])
    with pytest.raises(cg.BindError, match="is a nested tensor"):
        fused(nested)


def test_threads_may_compile_and_call_at_once() -> None:
    """Sizes that change are traced again while other threads compile, or call what is compiled."""
    models = [net(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()]
    compiled = [torch.compile(model, backend="cudnngraph") for model in models]

    def serve(first: int) -> None:
        for size in range(4):
            x = torch.randn(1 + (first + size) % 4, 4)
            for place in (first, first + 1):
                run, model = compiled[place % 2], models[place % 2]
                with torch.no_grad():
                    torch.testing.assert_close(run(x), model(x))

    at_once(serve, 4)


class Casts(nn.Module):
    """Under autocast, so that torch.export imports it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = self.linear(x)
        return y.float()


def test_threads_may_fuse_at_once_what_torch_export_imports() -> None:
    made = [(Casts().eval(), torch.randn(2, 4)) for _ in range(3)]

    def serve(number: int) -> None:
        model, x = made[number]
        with torch.no_grad():
            own, exact = model(x).bfloat16(), copy.deepcopy(model.linear).double()(x.double())
            ours = cg.fuse(model, x)(x).bfloat16()
        numerics.check(ours, exact, torch.bfloat16, own, terms=4)

    at_once(serve, 3)


class Noisy(nn.Module):
    """Of an argument whose name is one of Python's own, and with what leaves it to torch.export."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + torch.rand_like(input)


def test_an_argument_may_have_a_name_of_pythons_own_where_torch_export_imports() -> None:
    with pytest.raises(cg.CannotImport, match="draws random numbers"):
        cg.fuse(Noisy().eval(), torch.randn(3, 4))


def test_an_exported_program_is_fused_as_it_was_exported() -> None:
    """It has no modes: torch says that it is in training, and refuses eval()."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)
    batch = ({0: torch.export.Dim("batch", min=1, max=8)},)
    trained = torch.export.export(model, (x,))
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=batch)
    with pytest.raises(NotImplementedError):
        program.module().eval()
    fused = cg.fuse(program.module(), x)
    assert fused.eval() is fused and fused.report is not None and fused.report.folded == 1
    for each in (x, x[:1], torch.cat([x, x])):
        torch.testing.assert_close(fused(each), model(each).detach())
    with pytest.raises(cg.CannotImport, match="num_batches_tracked"):
        cg.fuse(trained.module(), x)
    with pytest.raises(cg.PolicyError, match=r"is a ExportedProgram; .* the program's module\(\)"):
        cg.fuse(program, x)  # type: ignore[arg-type]
