"""Models with torch.stft and torch.istft are traced, and give what torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.models import trace
from tests import numerics
from tests.models import Of

FORMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 64), {"n_fft": 16, "window": 16}),
    "one signal": ((64,), {"n_fft": 16, "hop_length": 5, "window": 16}),
    "short window": ((2, 64), {"n_fft": 16, "hop_length": 4, "win_length": 9, "window": 9}),
    "not centered": ((2, 64), {"n_fft": 16, "hop_length": 4, "window": 16, "center": False}),
    "normalized": ((2, 64), {"n_fft": 14, "hop_length": 4, "window": 14, "normalized": True}),
    "two-sided": ((2, 64), {"n_fft": 16, "hop_length": 4, "window": 16, "onesided": False}),
    "no window": ((2, 64), {"n_fft": 16, "hop_length": 4, "win_length": 12}),
}


def model_of(form: dict[str, Any], length: int | None) -> tuple[nn.Module, nn.Module]:
    """A spectrum that is changed, and its signal; by functions, and by methods of tensors."""
    given = {**form, "window": None}
    window = torch.hann_window(form.get("window", 16), periodic=False) + 0.1

    def options(m: Any) -> dict[str, Any]:
        return {**given, "window": m.window if "window" in form else None}

    def by_functions(m: Any, x: torch.Tensor) -> Any:
        spectrum = torch.stft(x, **options(m), return_complex=True)
        signal = torch.istft(spectrum * 1.5, **options(m), length=length)
        return torch.view_as_real(spectrum), signal

    def by_methods(m: Any, x: torch.Tensor) -> Any:
        spectrum = x.stft(**options(m), return_complex=True)
        return torch.view_as_real(spectrum), (spectrum * 1.5).istft(**options(m), length=length)

    return Of(by_functions, window=window).eval(), Of(by_methods, window=window).eval()


@pytest.mark.filterwarnings("ignore:(A window was not|The length of signal):UserWarning")
@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, length) for name in FORMS for length in (None, 50)), ("plain", 80)],
)
def test_spectra_and_signals_are_torchs(name: str, length: int | None) -> None:
    shape, form = FORMS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    for model in model_of(form, length):
        assert trace.trace(model, (x,), {}) is not None
        fused = cg.fuse(model, x)
        for value in (x, torch.randn(shape)):
            own, exact = model(value), model.double()(value.double())
            model.float()
            for mine, theirs, wanted in zip(fused(value), own, exact, strict=True):
                assert mine.stride() == theirs.stride()
                numerics.check(mine, wanted, torch.float32, theirs, terms=16)


def test_arguments_that_torch_refuses_are_refused() -> None:
    spectrum = Of(lambda m, x: torch.stft(x, 16, 4, torch.ones(3), return_complex=True)).eval()
    with pytest.raises(Exception, match=r"win_length|argument"):
        cg.fuse(spectrum, torch.randn(2, 64))
    signal = Of(lambda m, x: torch.istft(torch.complex(x, x), 16, 4, window=torch.ones(16))).eval()
    with pytest.raises(Exception, match="n_fft"):
        cg.fuse(signal, torch.randn(2, 5, 7))
