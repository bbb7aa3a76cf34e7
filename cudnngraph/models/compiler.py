"""What torch.compiler says of itself, and what it does, while a model is traced.

Its flags and its stance are those of all threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

COMPILER = "torch._dynamo"
_COMPILING, _EXPORTING = "_is_compiling_flag", "_is_exporting_flag"


#: What a run may say of itself: torch.compiler's is_compiling(), nothing, or is_exporting() too.
#: A model that is compiled does not ask for the numbers in a tensor (whether a mask hides any), but
#: may have control flow in the place of a loop.
WAYS = ((_COMPILING,), (), (_COMPILING, _EXPORTING))
_said: dict[str, list[bool]] = {name: [] for name in WAYS[-1]}
_said_lock = threading.Lock()


@contextmanager
def saying(way: Sequence[str]) -> Iterator[None]:
    """Set flags of torch.compiler, which are those of all threads, until the last of this way."""
    with _said_lock:
        for name in way:
            _said[name].append(getattr(torch.compiler, name))
            setattr(torch.compiler, name, True)
    try:
        yield
    finally:
        with _said_lock:
            for name in way:
                setattr(torch.compiler, name, _said[name].pop())


def is_compiling() -> AbstractContextManager[None]:
    """Have torch.compiler.is_compiling() be true in all threads."""
    return saying((_COMPILING,))


_stance = ExitStack()  # the compiler's stance, while a run of some thread needs it
_runs = 0


def is_there() -> bool:
    """Whether the compiler has been imported."""
    return COMPILER in sys.modules


@contextmanager
def aside() -> Iterator[None]:
    """Have compiled functions run as they are, in all threads, until the last such run ends.

    Else what a model compiles within itself would meet modes, and stay so in the compiler's caches.
    """
    global _runs
    with _said_lock:
        if not _runs:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _runs += 1
    try:
        yield
    finally:
        with _said_lock:
            _runs -= 1
            if not _runs:
                _stance.close()
