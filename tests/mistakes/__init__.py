"""Mistakes in a graph: each row declares one, and names what its message must say."""

from __future__ import annotations

from tests.mistakes.attention import ATTENTION
from tests.mistakes.declare import Bad
from tests.mistakes.graphs import GRAPHS
from tests.mistakes.layers import LAYERS
from tests.mistakes.ops import OPS

ROWS = [Bad(name, declare, says) for name, (declare, says) in [*LAYERS, *OPS, *ATTENTION, *GRAPHS]]
