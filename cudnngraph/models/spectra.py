"""torch.stft and torch.istft as ops that a run without memory can follow.

torch's own turn a result in place, and the inverse asks whether its windows add up to zero. That
depends on the window and on sizes alone, so a model that has run once has its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F


def _window(
    window: torch.Tensor | None, width: int, n_fft: int, like: torch.Tensor
) -> torch.Tensor:
    """The window between zeros; ones if there is none."""
    if window is None:
        window = torch.ones(width, dtype=like.real.dtype, device=like.device)
    if window.shape != (width,) or window.is_complex() or not 0 < width <= n_fft:
        raise TypeError
    before = (n_fft - width) // 2
    return F.pad(window, (before, n_fft - width - before))


def _stft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor:
    hop = n_fft // 4 if hop_length is None else hop_length
    plain = return_complex and align_to_window is None and input.is_floating_point()
    if not plain or input.dim() not in (1, 2) or hop <= 0:
        raise TypeError
    window = _window(window, n_fft if win_length is None else win_length, n_fft, input)
    signal = input if input.dim() == 2 else input[None]
    if center:
        signal = F.pad(signal[None], (n_fft // 2, n_fft // 2), mode=pad_mode)[0]
    if signal.shape[1] < n_fft:
        raise TypeError
    pieces = signal.unfold(1, n_fft, hop) * window
    transform = torch.fft.fft if onesided is False else torch.fft.rfft
    frames: torch.Tensor = transform(pieces, norm="ortho" if normalized else "backward").mT
    return frames if input.dim() == 2 else frames[0]


def _istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor:
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    bins = n_fft if onesided is False else n_fft // 2 + 1
    if return_complex or not input.is_complex() or input.dim() not in (2, 3):
        raise TypeError
    if not 0 < hop <= width or input.shape[-2] != bins:
        raise TypeError
    window = _window(window, width, n_fft, input)
    frames = (input if input.dim() == 3 else input[None]).mT[..., : n_fft // 2 + 1]
    pieces = torch.fft.irfft(frames, n_fft, norm="ortho" if normalized else "backward") * window
    count = frames.shape[1]
    total = n_fft + hop * (count - 1)

    def added_up(x: torch.Tensor) -> torch.Tensor:
        sizes = [x.shape[0], total]
        made: torch.Tensor = torch.ops.aten.unfold_backward(x, sizes, 1, n_fft, hop)
        return made

    start = n_fft // 2 if center else 0
    end = total - start if length is None else start + length
    weights = added_up(window.square().expand(1, count, n_fft))[:, start:end]
    signal = added_up(pieces)[:, start:end] / weights
    signal = F.pad(signal, (0, max(0, end - total)))
    return signal if input.dim() == 3 else signal[0]


#: torch's functions, each with one that gives the same. Those raise TypeError for arguments that
#: are torch's own to judge.
SPECTRA: Mapping[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((torch.stft, torch.Tensor.stft), _stft),
    **dict.fromkeys((torch.istft, torch.Tensor.istft), _istft),
}
