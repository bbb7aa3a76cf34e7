"""Plans, sizes and times as text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from plans_cache import StepRecord


def clean(text: str) -> str:
    """``text`` without what would steer a terminal: a record may come from anywhere."""
    return "".join(
        f"\\x{ord(char):02x}" if unicodedata.category(char) in ("Cc", "Cf", "Cn", "Cs") else char
        for char in text
    )


def bytes_text(size: int) -> str:
    """1536 → "1.5 KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def time_text(time_us: float | None) -> str:
    """Microseconds, "-" where nothing was measured."""
    return "-" if time_us is None else f"{time_us:.1f} µs"


def age_text(age_s: float) -> str:
    """Seconds in the largest unit that fits."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= size_s:
            return f"{age_s / size_s:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"


def cudnn_text(version: str) -> str:
    """ "91900" → "9.19.0"; anything else as it is."""
    if not re.fullmatch("[0-9]{5,6}", version):
        return version
    number = int(version)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def knobs_text(knobs: Iterable[tuple[str, int]]) -> str:
    """Knobs as ``NAME=value``."""
    return " ".join(f"{clean(name)}={value}" for name, value in knobs)


def plan_text(step: StepRecord) -> str:
    """Return what runs a step: an engine or a generated kernel with its knobs, or torch."""
    if step.engine is None:
        return "torch"
    engine = "kernel" if step.kind == "kernel" else f"engine {step.engine}"
    return engine + (f" ({knobs_text(step.knobs)})" if step.knobs else "")


def ops_of(step: StepRecord) -> list[str]:
    """The ops of a step but for its constants."""
    return [clean(op) for op in step.ops if op != "constant"]
