"""Make calls with hostile arguments, and report them: ``python -m tests.hostile COUNT [SEED]``."""

from __future__ import annotations

import json
import random
import resource
import sys
import warnings

from tests.hostile.callables import targets
from tests.hostile.calls import attempt

MEMORY_BYTES = 6 << 30  # of address space: what is huge is to fail, and not to be had


def main(count: int, seed: int) -> None:
    """Make calls, and report them."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    rng, known = random.Random(seed), targets()
    outcomes = [
        attempt(known[at % len(known)], rng, lambda call: print(call[:300], flush=True))
        for at in range(count)
    ]
    print(
        json.dumps(
            {
                "targets": len(known),
                "ran": sum(each.ran for each in outcomes),
                "refused": sum(bool(each.refused) for each in outcomes),
                "wrong": [f"{each.call}: {each.wrong}" for each in outcomes if each.wrong],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
