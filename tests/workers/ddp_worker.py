"""One of two processes that train under DistributedDataParallel: torch's model, then ours.

    python ddp_worker.py RANK FILE

Prints, as JSON, the losses of both and the largest distance between their parameters and buffers.
"""

from __future__ import annotations

import copy
import gc
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cudnngraph as cg


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    theirs = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).double()
    ours = copy.deepcopy(theirs)
    assert len(cg.nn.replace(ours).swapped) == 2
    data = torch.Generator().manual_seed(1 + rank)
    batches = [
        (torch.randn(6, 3, 8, 8, generator=data).double(), torch.randint(4, (6,), generator=data))
        for _ in range(4)
    ]
    losses: list[list[float]] = []
    for model in (theirs, ours):
        shared = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(shared.parameters(), lr=0.1, momentum=0.9)
        losses.append([])
        for x, label in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(shared(x), label)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        del shared, optimizer, loss
        gc.collect()  # what a DDP model holds of the process group is to go before the group does
    pairs = zip(theirs.state_dict().items(), ours.state_dict().items(), strict=True)
    apart = 0.0
    for (name, a), (other, b) in pairs:
        assert name == other
        apart = max(apart, float((a.double() - b.double()).abs().max()))
    print(json.dumps({"losses": losses, "apart": apart, "weight": ours[0].weight.sum().item()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
