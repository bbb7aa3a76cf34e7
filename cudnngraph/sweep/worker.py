"""The processes that build and check plans for a sweep.

Workers (:mod:`~cudnngraph.select.worker`) that take every engine which the library lists, those too
that its heuristics leave out, and that ask anew what an earlier sweep of this GPU found.
"""

from __future__ import annotations

from ..backend import candidates, found_bad
from ..select import forkserver, worker


def load() -> forkserver.Work:
    """Load the work of each worker, with all that it needs imported."""
    found_bad.let_through()
    candidates.offer_every_engine()
    return worker.load()
