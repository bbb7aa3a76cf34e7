"""The backend's ``mode="reduce-overhead"``: CUDA graphs of forward and backward train as eager."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.replays import LOOPS, Step, check_loop, compiled, data, each_step, net, replays

__all__ = ["replays"]


@pytest.fixture(autouse=True)
def _new_compiler(forgotten: None) -> Iterator[None]:
    gc.collect()
    yield


@pytest.mark.parametrize("step", LOOPS)
def test_steps_are_eagers(step: Step, replays: list[tuple[str, str]]) -> None:
    check_loop(step, replays, "cuda")


def test_dropout_draws_new_numbers_for_every_replay(replays: list[tuple[str, str]]) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5)).cuda()
    run = compiled(model)
    x, seen = torch.ones(16, 32, device="cuda"), []
    for _ in range(6):
        model.zero_grad(set_to_none=True)
        y = run(x)
        y.sum().backward()
        assert model[0].bias.grad is not None
        torch.testing.assert_close(model[0].bias.grad, 2.0 * (y != 0).sum(0).float())
        seen.append((y != 0).clone())
    assert replays[-1] == ("backward", "replay")
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_results_of_inference_are_the_users_own(replays: list[tuple[str, str]]) -> None:
    model = net("cuda").eval()
    run = compiled(model)
    with torch.no_grad():
        given = [data(model, number)[0] for number in range(6)]
        made = [run(x) for x in given]
        for x, y in zip(given, made, strict=True):
            torch.testing.assert_close(y, model(x), rtol=2e-3, atol=2e-3)
    assert replays[-1] == ("forward", "replay")


def test_what_reads_on_the_host_runs_as_it_is(
    replays: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    @torch.library.custom_op("cudnngraph_tests::by_its_largest", mutates_args=())
    def by_its_largest(x: torch.Tensor) -> torch.Tensor:
        return x / float(x.abs().max())

    by_its_largest.register_fake(torch.empty_like)
    run = compiled(lambda x: torch.relu(by_its_largest(x)) + 1)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(6):
            x = torch.randn(64, device="cuda")
            torch.testing.assert_close(run(x), torch.relu(x / x.abs().max()) + 1)
    assert replays[-1] == ("forward", "run")
    assert sum("a graph is not captured" in each for each in caplog.messages) == 1


def test_gradients_outlive_the_graphs_that_made_them(replays: list[tuple[str, str]]) -> None:
    """Whoever holds a gradient holds its memory, when the model is gone and others need some."""
    model = net("cuda")
    run = compiled(model)
    for number in range(5):
        each_step(model, run, number)
    assert replays[-1] == ("backward", "replay")
    held = [each.grad for each in model.parameters()]
    before = [each.clone() for each in held if each is not None]
    del model, run
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    filled = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    for mine, wanted in zip(held, before, strict=True):
        assert mine is not None
        assert torch.equal(mine, wanted)
    assert all(each.isnan().all() for each in filled)


def test_a_backward_takes_the_memory_of_what_it_has_read(replays: list[tuple[str, str]]) -> None:
    """It reads what was saved where its forward has left it, with no copy, and writes there."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(1 << 16, 512, device="cuda")

    def steps(run: Callable[..., torch.Tensor]) -> None:
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            run(x).square().mean().backward()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    steps(model)
    eager = torch.cuda.max_memory_allocated() - before
    model.zero_grad(set_to_none=True)
    steps(compiled(model))
    assert replays[-2:] == [("forward", "replay"), ("backward", "replay")]
    segments = torch.cuda.memory_snapshot()
    of_graphs = [each["total_size"] for each in segments if each["segment_pool_id"] != (0, 0)]
    assert 0.5 * eager < sum(of_graphs) < 1.2 * eager
