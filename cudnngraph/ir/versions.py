"""Version numbers that decide which stored plans are stale, and what a raise of each one makes so.

The store has one of its own for the form of its files: ``plans_cache.record.SCHEMA_VERSION``.
"""

from __future__ import annotations

# Of a key. Raise it if a key is made otherwise, or if plans of the same graph compute something
# else: no record is found any more.
KEY = 5

# Of the environment beside a key, and of what is stored under it. Raise it if the form or meaning
# of either changes: no record is found any more.
ENVIRONMENT = 2

# Of the lowering rules. Raise it if a rule refuses what it took, or makes other numbers of it:
# serialized plans are built again from their records.
LOWERING = 5

# Of the files of what `cudnngraph check` found. Raise it if they, or a pattern, are told otherwise:
# each GPU is to be checked anew.
FINDINGS = 1
