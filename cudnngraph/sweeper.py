"""The process that builds and checks plans for a sweep: ``python -m cudnngraph.sweeper GPU``.

A worker (:mod:`~cudnngraph.worker`) that takes every engine which the library lists, those too that
its heuristics leave out, and that asks anew what an earlier sweep of this GPU found.
"""

from __future__ import annotations

from . import worker
from .backend import found_bad, plan


def main() -> None:
    """See the module's docstring."""
    found_bad.let_through()
    plan.offer_every_engine()
    worker.main()


if __name__ == "__main__":
    main()
