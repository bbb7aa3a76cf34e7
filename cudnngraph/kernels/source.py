"""The text of a kernel, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace

NAME = "cudnngraph_kernel"
ARGS = "struct Args"
MOST_TENSORS = 480  # of a kernel, whose parameters have 4 KB


@dataclass(frozen=True)
class Launch:
    """A launch of a function of a kernel's text."""

    name: str
    blocks: int
    threads: int


@dataclass(frozen=True)
class Source:
    """A kernel: its text, and the numbers of blocks and threads that it is launched with.

    One of several launches has these in ``several``, in order, and its functions take the address
    of a workspace behind those of the tensors.
    """

    text: str
    blocks: int
    threads: int
    several: tuple[Launch, ...] = ()
    workspace_bytes: int = 0
    name: str = NAME

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches in order."""
        return self.several or (Launch(self.name, self.blocks, self.threads),)

    def called(self, name: str) -> Source:
        """The same with functions of another name, as profilers show it."""
        several = tuple(replace(each, name=each.name.replace(NAME, name)) for each in self.several)
        return replace(self, text=self.text.replace(NAME, name), several=several, name=name)


def own_part(text: str) -> str:
    """The text of a kernel without the functions that all of them have; "" for ""."""
    return text[max(0, text.find(ARGS)) :]
