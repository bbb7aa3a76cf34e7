"""Checks of copies into slices, for the tests on a CPU and on a GPU."""

from __future__ import annotations

from unittest.mock import patch

import torch

from cudnngraph.executor import copies


@patch.object(copies, "LEAST_BYTES", 0)
def check_slices(dtype: torch.dtype, device: str) -> None:
    """16 bytes at a time where they can be: every layout, and NaN too."""
    gen = torch.Generator(device).manual_seed(0)
    for channels, start in ((32, 0), (32, 32), (24, 8), (3, 1)):
        whole = torch.randn(2, 80, 5, 7, device=device, generator=gen).to(dtype)
        x = torch.randn(2, channels, 5, 7, device=device, generator=gen).to(dtype)
        if dtype.is_floating_point:
            x[0, 0, 0, 0] = float("nan")
        for layout in (torch.channels_last, torch.contiguous_format):
            out = whole.contiguous(memory_format=layout)[:, start : start + channels]
            for given in (x, x.contiguous(memory_format=torch.channels_last)):
                out.zero_()
                copies.copied(given, out)
                assert torch.equal(out.nan_to_num(7.0), given.nan_to_num(7.0))
    for channels in (32, 24, 5):  # windows of seven by seven
        whole = torch.randn(2, 14, 21, channels, device=device, generator=gen).to(dtype)
        windows = whole.view(2, 2, 7, 3, 7, channels).transpose(2, 3)
        out = torch.zeros_like(windows, memory_format=torch.contiguous_format)
        whole_steps = channels * dtype.itemsize % 16 == 0
        assert (copies._wide(windows, 5) is not None) is whole_steps
        assert (copies._wide(out, 5) is not None) is whole_steps
        assert torch.equal(copies.copied(windows, out), windows)
        back = torch.zeros_like(whole)
        copies.copied(out, back.view(2, 2, 7, 3, 7, channels).transpose(2, 3))
        assert torch.equal(back, whole)
