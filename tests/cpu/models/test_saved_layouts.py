"""How images lie that a forward of torch.compile saves for its backward, and who reads them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.errors import CannotImport
from cudnngraph.models import dynamo, saved
from cudnngraph.models.convert import convert
from tests import numerics

pytestmark = pytest.mark.usefixtures("forgotten")

Tensor = torch.Tensor
F32 = torch.float32
_aten: Any = torch.ops.aten


class Branches(nn.Module):
    """Attention over two branches that are stacked, which torch's trace has in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 8, 3, padding=1) for _ in range(2))
        self.weigh, self.last = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        stack = torch.stack([F.relu(self.first(x)), F.relu(self.second(x))], 1)
        weights = self.weigh(stack.sum(1).mean((2, 3), keepdim=True))
        y: Tensor = self.last((stack * weights.view(-1, 2, 8, 1, 1).softmax(1)).sum(1).contiguous())
        return y


def last(tensor: Any) -> Any:
    return tensor.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("refused", [(), (1,), (0, 1)], ids=["ours", "torch's backward", "torch"])
@pytest.mark.parametrize("shapes", [1, 3])
def test_what_is_saved_lies_by_channels(
    refused: tuple[int, ...], shapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward reads it right, by torch too; and with sizes that are symbols."""
    made: list[Any] = []

    def noted(*args: Any, **options: Any) -> Any:
        made.append(None)
        if (len(made) - 1) % 2 in refused:
            raise CannotImport("left to torch")
        made[-1] = convert(*args, **options)
        return made[-1]

    monkeypatch.setattr(dynamo, "convert", noted)
    torch.manual_seed(0)
    model = Branches().to(memory_format=torch.channels_last)
    ours: Any = torch.compile(model, backend="cudnngraph")
    for size in (6, 7, 9)[:shapes]:
        x = last(torch.randn(2, 3, size, 5))
        exact = copy.deepcopy(model).double()
        exact(x.double()).square().sum().backward()
        model.zero_grad()
        y = ours(x)
        assert y.stride() == model(x).stride()
        y.square().sum().backward()
        for mine, want in zip(model.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None and want.grad is not None
            numerics.check(mine.grad, want.grad, F32, terms=512)
    if not refused:
        forward = made[0].spec
        images = [forward.tensors[name] for name in forward.outputs]
        images = [each for each in images if len(each.shape) > 3 and each.shape[-2:] == (6, 5)]
        assert len(images) > 3 and all(each.stride[-3] == 1 for each in images)


def test_what_an_op_reads_as_it_lies_is_saved_as_it_was_traced() -> None:
    graph = torch.fx.Graph()
    free, viewed, image, shown = (graph.placeholder(name) for name in "abcd")
    graph.call_function(_aten.relu.default, (free,))
    rows = graph.call_function(_aten.view.default, (viewed, [2, 3, 4, 5]))
    backward = _aten._scaled_dot_product_cudnn_attention_backward.default
    graph.call_function(backward, (rows,) * 5)
    made = graph.call_function(_aten.convolution_backward.default, (image,) * 3)
    graph.output(made)
    graph.call_function(_aten.as_strided.default, (shown, [2], [1]))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert saved.in_any_order(module) == {"a", "c"}
