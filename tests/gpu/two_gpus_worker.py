"""One of two processes, each on a GPU of its own, over NCCL.

    python two_gpus_worker.py RANK FILE SECONDS

Prints, as JSON: the losses of torch's model and of ours under DistributedDataParallel and how far
the first step's gradients are apart; how far synchronised batch norms are from torch's; which
plans the rank runs, all of them tuned by one rank. After SECONDS it says what its threads are at,
and ends.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cudnngraph as cg

LAST = torch.channels_last


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative distance."""
    return float((ours - theirs).double().norm() / theirs.double().norm())


def trained(rank: int) -> dict[str, object]:
    """Four steps of torch's model and of ours, by measured plans."""
    torch.manual_seed(0)
    theirs = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.ConvTranspose2d(32, 16, 2, stride=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    theirs = theirs.to("cuda", memory_format=LAST)  # type: ignore[call-overload]
    ours = copy.deepcopy(theirs)
    assert len(cg.nn.replace(ours, policy=cg.Policy(tune="autotune")).swapped) == 2
    data = torch.Generator().manual_seed(1 + rank)
    batches = [
        (torch.randn(16, 8, 16, 16, generator=data), torch.randint(16, (16,), generator=data))
        for _ in range(4)
    ]
    losses: list[list[float]] = []
    gradients: list[list[torch.Tensor]] = []
    for model in (theirs, ours):
        shared = DistributedDataParallel(model, device_ids=[rank])
        optimizer = torch.optim.SGD(shared.parameters(), lr=0.05, momentum=0.9)
        losses.append([])
        for number, (x, label) in enumerate(batches):
            optimizer.zero_grad()
            y = shared(x.to("cuda", memory_format=LAST))
            loss = nn.functional.cross_entropy(y, label.cuda())
            loss.backward()  # type: ignore[no-untyped-call]
            if number == 0:
                gradients.append(
                    [p.grad.clone() for p in shared.parameters() if p.grad is not None]
                )
            optimizer.step()
            losses[-1].append(loss.item())
        del shared
    far = [apart(b, a) for a, b in zip(*gradients, strict=True)]
    return {"losses": losses, "gradients": far, "weight": ours[0].weight.sum().item()}


def synchronised(rank: int) -> float:
    """The largest distance from torch's SyncBatchNorm, of results, gradients and statistics."""
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.SyncBatchNorm(32), nn.SiLU())
    theirs = theirs.to("cuda", memory_format=LAST)  # type: ignore[call-overload]
    ours = cg.FusedConvBlock.from_torch(*copy.deepcopy(theirs))
    far = 0.0
    for step in range(3):
        data = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4 + 3 * rank, 8, 12, 12, generator=data).cuda().to(memory_format=LAST)
        grad = torch.randn(4 + 3 * rank, 32, 12, 12, generator=data).cuda()
        found = []
        for model in (theirs, ours):
            given = x.clone().requires_grad_()
            y = model(given)
            wanted = [given, *(p for n, p in model.named_parameters() if n != "0.bias")]
            found.append([y.detach(), *torch.autograd.grad(y, wanted, grad)])
        far = max([far, *(apart(b, a) for a, b in zip(*found, strict=True))])
    for name in ("running_mean", "running_var"):
        far = max(far, apart(getattr(ours.norm, name), getattr(theirs[1], name)))
    return far


def plans() -> list[str]:
    """Return the plans that this rank runs of a graph for which several are about as fast."""
    g = cg.Graph("shared")
    x = g.input("x", (8, 64, 28, 28), torch.float16, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), torch.float16, layout="channels_last")
    b = g.input("b", (64,), torch.float16)
    g.output("y", g.conv_bias_act(x, w, b, padding=1))
    return [str(step.choice) for step in g.compile("cuda", tune="autotune").steps]


def main(rank: int, file: str, limit_s: float) -> None:
    """See the module's docstring."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=2)
    told: dict[str, object] = {}
    for name, tell in (
        ("ddp", lambda: trained(rank)),
        ("sync", lambda: synchronised(rank)),
        ("plans", plans),
    ):
        print(f"rank {rank}: {name}", file=sys.stderr, flush=True)
        told[name] = tell()
    torch.cuda.synchronize()
    print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
