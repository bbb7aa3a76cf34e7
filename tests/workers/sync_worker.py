"""One of two processes whose batch norms are synchronised, against one process on both batches.

    python sync_worker.py RANK FILE

Prints, as JSON, for each case the largest distance of results, gradients and buffers.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cudnngraph as cg

F64 = torch.float64
CASES: dict[str, dict[str, Any]] = {
    "3 and 5": {},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "no affine": {"affine": False},
    "residual": {"residual": True, "activation": "silu"},
    "residual alone": {"residual": True, "activation": None, "bias": False},
    "1d": {"dims": 1, "stride": 2},
    "one value here": {"size": 1, "padding": 1, "batches": (1, 1)},
    "4 and none": {"batches": (4, 0)},
    "transposed": {"transposed": True, "stride": 2, "groups": 2, "residual": True},
    "not far from zero": {"offset": 1e4},
}


def by_torch(block: Any, x: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    """One process, torch's own batch norm."""
    bn = block.norm
    plain = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][x.dim() - 3](
        bn.num_features, bn.eps, bn.momentum, bn.affine, bn.track_running_stats, dtype=F64
    )
    plain.load_state_dict(bn.state_dict())
    block._modules["1"] = plain
    y = plain(block.conv(x))
    y = y if z is None else y + z
    return y if block.activation is None else block.activation(y)  # type: ignore[no-any-return]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    largest = float(b.detach().abs().max()) if b.numel() else 0.0
    return float((a - b).detach().abs().max()) / max(largest, 1.0) if a.numel() else 0.0


def run(rank: int, options: dict[str, Any]) -> float:
    """Three steps of a case."""
    options = {"padding": 1, "size": 7, "batches": (3, 5), **options}
    batches, size, offset = options.pop("batches"), options.pop("size"), options.pop("offset", 0.0)
    residual = options.pop("residual", False)
    kind = cg.FusedConvTransposeBlock if options.pop("transposed", False) else cg.FusedConvBlock
    torch.manual_seed(2)
    ours = kind(4, 6, 3, norm="sync", dtype=F64, **options)
    theirs = copy.deepcopy(ours)
    mine = slice(sum(batches[:rank]), sum(batches[: rank + 1]))
    far = 0.0
    for _ in range(3):
        x = torch.randn(sum(batches), 4, *(size,) * (ours.conv.weight.dim() - 2), dtype=F64)
        x += offset
        shape = ours.conv(x).shape
        z, grad = (torch.randn(shape, dtype=F64) for _ in range(2))
        here, whole = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
        here_z, whole_z = z[mine].clone().requires_grad_(), z.clone().requires_grad_()
        y = ours(here, here_z if residual else None)
        expected = by_torch(theirs, whole, whole_z if residual else None)
        ours.zero_grad()
        theirs.zero_grad()
        y.backward(grad[mine])
        expected.backward(grad)
        far = max(far, apart(y, expected[mine]), apart(here.grad, whole.grad[mine]))
        if residual:
            far = max(far, apart(here_z.grad, whole_z.grad[mine]))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            dist.all_reduce(a.grad)
            far = max(far, apart(a.grad, b.grad))
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            far = max(far, apart(a, b))
        theirs._modules["1"] = copy.deepcopy(ours.norm)
    return far


def alone(group: Any, rank: int) -> float:
    """In a group of one rank the statistics are that rank's."""
    torch.manual_seed(3 + rank)
    block = cg.FusedConvBlock(4, 6, 3, norm="sync", process_group=group, dtype=F64)
    x = torch.randn(3, 4, 7, 7, dtype=F64)
    y = block(x)
    return apart(y, torch.relu(nn.functional.batch_norm(block.conv(x), None, None, training=True)))


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    told = {name: run(rank, options) for name, options in CASES.items()}
    groups = [dist.new_group([each]) for each in range(2)]
    told["a group of one"] = alone(groups[rank], rank)
    print(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
