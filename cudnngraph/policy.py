"""What the user asks of plan selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import PolicyError

Tune = Literal["heuristic", "cached"]
Fallback = Literal["partition", "error"]


@dataclass(frozen=True)
class Policy:
    """How plans are chosen, and what a chosen plan may do.

    - ``tune``: "heuristic" takes the first plan of cuDNN's own ranking that builds. "cached" takes
      what an earlier run left in the cache and raises ``PlanNotCached`` where that is nothing: the
      mode for serving.
    - ``allow_tf32``: whether float32 graphs may use TF32. None follows torch's own switches as they
      stand at ``compile``: ``torch.backends.cudnn.allow_tf32`` for convolutions (torch's default:
      on), ``torch.backends.cuda.matmul.allow_tf32`` for attention (off).
    - ``deterministic``: leave out plans that cuDNN marks as not deterministic.
    - ``workspace_limit``: most bytes of scratch memory a plan may need; None for no limit.
    - ``fallback``: "partition" cuts a graph that cuDNN refuses as one plan into smaller steps, down
      to torch ops; "error" raises ``NotSupported`` instead.
    """

    tune: Tune = "heuristic"
    allow_tf32: bool | None = None
    deterministic: bool = False
    workspace_limit: int | None = None
    fallback: Fallback = "partition"

    def __post_init__(self) -> None:
        if self.tune not in ("heuristic", "cached"):
            raise PolicyError(f"tune={self.tune!r} is unknown; expected 'heuristic' or 'cached'")
        if not (self.allow_tf32 is None or isinstance(self.allow_tf32, bool)):
            raise PolicyError(f"allow_tf32={self.allow_tf32!r}; expected True, False or None")
        if not isinstance(self.deterministic, bool):
            raise PolicyError(f"deterministic={self.deterministic!r}; expected True or False")
        limit = self.workspace_limit
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise PolicyError(
                f"workspace_limit={limit!r}; expected a number of bytes >= 0, or None"
            )
        if self.fallback not in ("partition", "error"):
            raise PolicyError(
                f"fallback={self.fallback!r} is unknown; expected 'partition' or 'error'"
            )
