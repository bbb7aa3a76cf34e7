"""A small model, and torch.compile by the backend of the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cudnngraph.bench import models
from cudnngraph.models import dynamo


def net() -> nn.Module:
    torch.manual_seed(0)
    return models.randomized(models.ResNet((1, 1), 8, 10))


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=dynamo.backend, options=options or None)
