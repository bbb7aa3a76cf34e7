"""A step's plan from its choice, whoever makes it: cuDNN, or a generated kernel."""

from __future__ import annotations

from ..backend import candidates, plan
from ..backend.plan import KERNEL, Choice, Plan
from ..ir.spec import GraphSpec
from ..kernels import kernel


def replay(spec: GraphSpec, choice: Choice, device_index: int) -> Plan:
    """Build the plan that a choice names. Raises :class:`NotSupported`."""
    if choice.engine == KERNEL:
        return kernel.build(spec, choice, device_index)
    return candidates.replay(spec, choice, device_index)


def load(blob: bytes, choice: Choice, device_index: int) -> Plan:
    """Load a serialized plan, which holds device code: trust its source.

    Raises :class:`NotSupported`.
    """
    if choice.engine == KERNEL:
        return kernel.load(blob, choice, device_index)
    return plan.load(blob, choice, device_index)
