"""The kernels that models of many architectures train with, under the check of a GPU's steps.

One that it takes to be wrong is left out without an error, and its ops run one by one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.models import dynamo
from cudnngraph.settings import override
from tests import generated
from tests.architectures import ARCHITECTURES
from tests.cpu.models.test_architectures import built, inputs, trained

pytestmark = pytest.mark.usefixtures("forgotten")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = dynamo.convert

    def for_a_gpu(*given: Any, **options: Any) -> object:
        return convert(*given, **{**options, "on_gpu": True, "kernels": True})

    monkeypatch.setattr(dynamo, "convert", for_a_gpu)
    monkeypatch.setattr(handles, "handle_on_current_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_kernel_of_a_training_step_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, policy = ARCHITECTURES[name], cg.Policy(kernels=True, allow_tf32=False)
    kernels = generated.install(monkeypatch)
    model = built(architecture, last=True)
    call = torch.compile(model, backend=dynamo.backend, options={"policy": policy})
    with generated.by_reference(), override(kernels=True):
        trained(model, call, inputs(architecture, last=True), bf16=True)
    assert kernels
    assert generated.refused(kernels, policy) == []
