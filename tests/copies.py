"""What both tiers ask of copies into slices."""

from __future__ import annotations

import torch

from cudnngraph import eager


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
                eager.copied(given, out)
                assert torch.equal(out.nan_to_num(7.0), given.nan_to_num(7.0))
