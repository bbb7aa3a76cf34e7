"""Hostile arguments for every public callable, by a seeded generator.

A call is made of good arguments, of which one to three are replaced by hostile ones: of the wrong
type, huge, not finite, empty, without an end, or objects whose own methods raise. It has to end in
an error of :mod:`cudnngraph.errors`, in Python's own TypeError where the signature does not take
it, or in a result. A graph that comes out has to freeze, and to run on the CPU where it is small.
"""

from tests.hostile.builder import builder_methods
from tests.hostile.callables import targets
from tests.hostile.calls import Target

__all__ = ["Target", "builder_methods", "targets"]
