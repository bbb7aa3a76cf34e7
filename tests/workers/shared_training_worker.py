"""One of two processes that train a model by the backend, under DDP or FSDP2, in several ways.

    python shared_training_worker.py RANK FILE

Prints, as JSON, for each way: the graphs that ran, how far parameters and buffers of rank 0's model
are from float64's, and in which order buckets were reduced and backward graphs ran.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import cudnngraph as cg
from cudnngraph.models import bound, report
from tests import numerics

STEPS = 3
BACKEND: Any = "cudnngraph"


class Block(nn.Module):
    """A convolution, its norm and an activation."""

    def __init__(self, channels: int, kernels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, kernels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


class Head(nn.Module):
    """Two layers, of 2 MiB, so that DDP has two buckets of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x.flatten(1))))
        return y


class Net(nn.Module):
    """Two blocks and a head; ``unused`` takes part in no step."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(3, 8), Block(8, 8), Head()
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.second(self.first(x)))
        return y


def batch(step: int, rank: int) -> torch.Tensor:
    """The images of a rank."""
    gen = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, 8, 8, generator=gen)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def exact(start: nn.Module, parts: int) -> nn.Module:
    """The model of rank 0 behind all steps, in float64: gradients are means over the ranks.
    ``parts`` batches make a step."""
    models = [copy.deepcopy(start).double() for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            for part in range(parts):
                model(batch(step * parts + part, rank).double()).square().mean().backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            if pair[0].grad is None:
                continue
            mean = (pair[0].grad + pair[1].grad) / 2
            for parameter in pair:
                parameter.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    return models[0]


def sharded(model: nn.Module, *, compiled: bool) -> nn.Module:
    """FSDP2 around each part, and around the whole; with the parts compiled before it."""
    mesh = init_device_mesh("cpu", (2,))
    for part in model.children():
        if compiled:
            part.compile(backend=BACKEND)
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


Log = list[str]


def ddp(model: nn.Module, log: Log, **options: Any) -> DDP:
    """DDP of two buckets, which notes when one is reduced."""
    made = DDP(model, bucket_cap_mb=1, **options)

    def reduced(state: Any, bucket: Any) -> Any:
        log.append("bucket")
        summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return summed.then(lambda done: done.value()[0] / 2)

    reduced.__annotations__.clear()  # torch compares them with classes, not with their names
    made.register_comm_hook(None, reduced)
    return made


def compiled(model: Any) -> Any:
    return torch.compile(model, backend=BACKEND)


#: What is called in a loop, and whose no_sync there is; how many batches make a step.
WAYS: dict[str, tuple[Callable[[nn.Module, Log], Any], int]] = {
    "DDP(compile)": (lambda model, log: ddp(compiled(model), log), 1),
    "compile(DDP)": (lambda model, log: compiled(ddp(model, log)), 1),
    "compile(DDP), accumulated": (lambda model, log: compiled(ddp(model, log)), 2),
    "DDP(compile), accumulated": (lambda model, log: ddp(compiled(model), log), 2),
    "DDP(compile), static": (lambda model, log: ddp(compiled(model), log, static_graph=True), 1),
    "DDP(compile), unused": (
        lambda model, log: ddp(compiled(model), log, find_unused_parameters=True),
        1,
    ),
    "compile(FSDP)": (lambda model, log: compiled(sharded(model, compiled=False)), 1),
    "FSDP(compile)": (lambda model, log: sharded(model, compiled=True), 1),
}


def train(way: str) -> dict[str, Any]:
    """Train in a way."""
    torch._dynamo.reset()
    report._COMPILED.clear()  # the graphs of the way before, which are collected some time
    torch.manual_seed(0)
    model, log = Net(unused="unused" in way), list[str]()
    start = copy.deepcopy(model)
    make, parts = WAYS[way]
    run = make(model, log)
    optimizer = optimizer_of(model)
    real = bound.Direct.results

    def noted(graph: bound.Direct, tensors: list[Any]) -> list[Any]:
        log.append("graph")
        return real(graph, tensors)

    bound.Direct.results = noted  # type: ignore[method-assign]
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            last = part == parts - 1
            held = getattr(run, "no_sync", None) if not last else None
            with nullcontext() if held is None else held():
                loss = run(batch(step * parts + part, dist.get_rank())).square().mean()
                log.clear()
                loss.backward()
        optimizer.step()
    bound.Direct.results = real  # type: ignore[method-assign]
    named = [*model.named_parameters(), *model.named_buffers()]
    whole = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in named}
    refused = [str(each) for each in cg.reports() if each.refused]
    found = {"log": log, "graphs": len(cg.reports()), "refused": refused}
    if dist.get_rank() == 0:
        wanted = exact(start, parts)
        state = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
        for name, mine in whole.items():
            numerics.check(mine, state[name], torch.float32, terms=1 << 13, what=f"{way}: {name}")
    del run, optimizer, loss, model
    gc.collect()  # what holds the process group is to go before the group does
    return found


def main(rank: int, file: str) -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    print(json.dumps({way: train(way) for way in WAYS}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
