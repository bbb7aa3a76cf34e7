"""``python -m cudnngraph`` is the console script ``cudnngraph``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
