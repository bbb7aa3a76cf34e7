"""Data: releases of torch, cuDNN and its frontend that the tests ran with, and the GPUs.

``cudnngraph doctor`` says where the installed ones stand, and docs/versions.md has the table. A
row is added when the tiers have run, and not before.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tested:
    """Three releases that the tests ran with.

    Attributes:
        torch: major and minor, "2.11".
        cudnn: the version as a number, 91900 for 9.19.0.
        frontend: major and minor, "1.28".
        gpus: name and compute capability (90 is 9.0) of the GPUs on which the GPU tier ran; none
            where only the tiers ran that need no GPU.
        how: which tests, and what runs them.
    """

    torch: str
    cudnn: int
    frontend: str
    gpus: tuple[tuple[str, int], ...]
    how: str

    def __str__(self) -> str:
        return f"torch {self.torch}, cuDNN {dotted(self.cudnn)}, frontend {self.frontend}"


_H200, _H100 = ("NVIDIA H200", 90), ("NVIDIA H100", 90)

TESTED: tuple[Tested, ...] = (
    Tested("2.11", 91900, "1.28", (_H200, _H100), "tests/gpu, before each set of results"),
    Tested("2.11", 91900, "1.32", (_H200,), "tests/gpu, before each set of results"),
    Tested("2.13", 91900, "1.28", (), "`make test`, at each change"),
    Tested("2.14", 92400, "1.32", (), "`make test-newest`, where pip is held below torch 2.15"),
    Tested("2.15", 92600, "1.32", (), "`make test-newest`, at each change; once tests/cpu whole"),
    Tested("2.15", 92801, "1.32", (), "tests/deviceless, once"),
)


def standing(torch: str, cudnn: int, frontend: str) -> Tested | None:
    """The row of these releases, patch releases of torch and the frontend aside."""
    wanted = (_minor(torch), cudnn, _minor(frontend))
    return next((row for row in TESTED if (row.torch, row.cudnn, row.frontend) == wanted), None)


def tested_torch(torch: str) -> bool:
    """Whether the tests ran with this torch, whatever else was installed."""
    return any(row.torch == _minor(torch) for row in TESTED)


def markdown_table() -> str:
    """One row for each set of releases."""
    lines = ["| torch | cuDNN | frontend | on a GPU | what ran |", "|---|---|---|---|---|"]
    for row in TESTED:
        gpus = ", ".join(name for name, _ in row.gpus) or "never"
        lines.append(f"| {row.torch} | {dotted(row.cudnn)} | {row.frontend} | {gpus} | {row.how} |")
    return "\n".join(lines) + "\n"


def dotted(cudnn: int) -> str:
    """91900 → "9.19.0"."""
    return f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}"


def _minor(version: str) -> str:
    """ "2.13.0+cpu" → "2.13"."""
    return ".".join(version.split("+")[0].split(".")[:2])
