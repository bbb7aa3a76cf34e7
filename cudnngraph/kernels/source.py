"""The text of a kernel, and how it is launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..ir.spec import TensorSpec
from .scalars import FUNCTIONS, MEMORY, PRELUDE

NAME = "cudnngraph_kernel"
ARGS = "struct Args"
MOST_TENSORS = 480  # of a kernel, whose parameters have 4 KB
MOST_BOUNDS = 1024  # threads of a block
DYNAMIC = "extern __shared__ vec<u32, 4> shared[];"  # what a block has asked for


@dataclass(frozen=True)
class Launch:
    """A launch of a function of a kernel's text."""

    name: str
    blocks: int
    threads: int
    shared_bytes: int = 0  # of ``DYNAMIC``


@dataclass(frozen=True)
class Source:
    """A kernel: its text, and the numbers of blocks and threads that it is launched with, and the
    shared memory that a block has to ask for.

    One of several launches has these in ``several``, in order, and its functions take the address
    of a workspace behind those of the tensors.
    """

    text: str
    blocks: int
    threads: int
    several: tuple[Launch, ...] = ()
    workspace_bytes: int = 0
    name: str = NAME
    shared_bytes: int = 0

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches in order."""
        return self.several or (Launch(self.name, self.blocks, self.threads, self.shared_bytes),)

    def called(self, name: str) -> Source:
        """The same with functions of another name, as profilers show it."""
        several = tuple(replace(each, name=each.name.replace(NAME, name)) for each in self.several)
        return replace(self, text=self.text.replace(NAME, name), several=several, name=name)


def text_of(tensors: int, functions: Iterable[str], shared: Iterable[str] = ()) -> str:
    """The text of a kernel of so many tensors, with what its functions share."""
    args = f"{ARGS} {{ void* p[{tensors}]; }};"
    return "\n".join([PRELUDE, FUNCTIONS, *shared, args, *functions])


def function(
    name: str,
    bounds: int | str,
    lines: Iterable[str],
    *,
    workspace: bool = False,
    clusters: int = 1,
) -> str:
    """A function that is launched, with its threads as bounds; one of several launches takes the
    address of a workspace."""
    cluster = f"__cluster_dims__({clusters}, 1, 1) " if clusters > 1 else ""
    if bounds == MOST_BOUNDS:  # else registers are spilled for a second block of as many threads
        bounds = f"{bounds}, 1"
    more = ", char* const w" if workspace else ""
    return "\n".join(
        [
            f'extern "C" __global__ void {cluster}__launch_bounds__({bounds})',
            f"{name}(const __grid_constant__ Args a{more}) {{",
            *("  " + line for line in lines if line),
            "}",
            "",
        ]
    )


def pointers(tensors: Sequence[TensorSpec], inputs: int, args: str = "a.p") -> list[str]:
    """Lines that type the addresses of tensors, the first of which are inputs."""
    return [
        pointer(at, tensor, f"{args}[{at}]", const=at < inputs) for at, tensor in enumerate(tensors)
    ]


def pointer(at: int, tensor: TensorSpec, where: str, *, const: bool = False) -> str:
    """The line that types the address of a tensor."""
    kind = MEMORY[tensor.dtype]
    return f"{'const ' * const}{kind}* const p{at} = ({kind}*){where};"


def own_part(text: str) -> str:
    """The text of a kernel without the functions that all of them have; "" for ""."""
    return text[max(0, text.find(ARGS)) :]
