"""What is no cubin is refused; what one says is tested where NVRTC makes one (tests/deviceless)."""

from __future__ import annotations

import random

import pytest

from cudnngraph.kernels.cubin import Resources, resources


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58), b"x" * 200])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cubin"):
        resources(data)


def test_random_bytes_behind_a_right_beginning_are_refused() -> None:
    rng = random.Random(0)
    for _ in range(200):
        with pytest.raises(ValueError, match="cubin"):
            resources(b"\x7fELF\x02\x01" + rng.randbytes(rng.randrange(400)))


def test_resources_in_words() -> None:
    assert str(Resources(40, 0, 128)) == "40 registers, 128 B shared"
    assert str(Resources(255, 64, 0)) == "255 registers, 0 B shared, 64 B local"
