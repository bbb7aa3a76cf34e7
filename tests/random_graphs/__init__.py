"""Random graphs: what nobody chose, of 1 to about 8 ops, forward or forward and backward.

A case is made by its seed alone. It is a list of steps on numbered values, and is read two ways: by
the graph builder, and by torch's own functions in float64 (:class:`Eager`), which know nothing of
the package. :func:`judge` compiles a case, runs it and compares every output and gradient.

What a result may be off by is :mod:`tests.numerics`': the bound of its dtype, or where more than
one op rounds, ``TORCH_FACTOR`` times what torch is off by that rounds behind each op. The latter is
the most of several measurements: rounded to nearest, and by random roundings of the size of
``floor``. What cancels shows in them all.

``RANDOM_GRAPHS=5000 pytest tests/cpu/test_random_graphs.py`` runs so many;
``RANDOM_FIRST=1234 RANDOM_GRAPHS=1`` that one. ``python -m tests.random_graphs 1234`` shows it.
"""

from tests.random_graphs.cases import Case, Given, Result, Step
from tests.random_graphs.eager import Eager
from tests.random_graphs.generate import case
from tests.random_graphs.judging import Verdict, Wrong, Yardstick, check_result, judge
from tests.random_graphs.ops import BF16, F16, F32, F64, FAMILIES, LAYOUTS, OPS, Rounding

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "FAMILIES",
    "LAYOUTS",
    "OPS",
    "Case",
    "Eager",
    "Given",
    "Result",
    "Rounding",
    "Step",
    "Verdict",
    "Wrong",
    "Yardstick",
    "case",
    "check_result",
    "judge",
]
