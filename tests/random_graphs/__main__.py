"""Show and judge the cases of some seeds: ``python -m tests.random_graphs 1234``."""

from __future__ import annotations

import sys

from tests.random_graphs.generate import case
from tests.random_graphs.judging import judge

if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print(case(seed), judge(case(seed)), sep="\n")
