"""Tensors of the CPU beside those of a GPU, for which torch's meta device stands here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.models import devices, dynamo
from cudnngraph.models.convert import import_model
from cudnngraph.models.export import export
from cudnngraph.models.results import results_in
from cudnngraph.models.trace import Traced

CPU, GPU = torch.device("cpu"), torch.device("meta")


def graph_of(**seen: torch.Tensor) -> torch.fx.GraphModule:
    """A graph that returns its inputs."""
    graph = torch.fx.Graph()
    nodes = []
    for name, tensor in seen.items():
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = tensor
    graph.output(tuple(nodes))
    return torch.fx.GraphModule({}, graph)


def test_a_graph_is_where_one_of_its_tensors_is_on_a_gpu() -> None:
    here, there = torch.ones(()), torch.ones(2, device=GPU)
    assert devices.device_of([here, 3, there]) == GPU
    assert devices.device_of([here, 3]) == devices.device_of([]) == CPU
    assert devices.traced_on(graph_of(x=here), [here, there]) == GPU
    assert devices.traced_on(graph_of(x=here, y=there), [here]) == GPU  # it copies x there
    assert devices.traced_on(graph_of(x=here), [here]) == CPU
    assert devices.elsewhere([here, there, 3, here], GPU) == (0, 3)
    assert devices.elsewhere([here, there], CPU) == ()


def test_a_graph_of_several_gpus_is_refused() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)  # type: ignore[assignment]

    other = torch.Tensor._make_subclass(Elsewhere, torch.ones(2))
    with pytest.raises(cg.CannotImport, match=r"on cuda:1, meta: a graph is on one device"):
        devices.traced_on(graph_of(), [torch.ones(2, device=GPU), torch.ones(()), other])


class Indexed(nn.Module):
    """Indices and a number of the CPU, which ``to`` does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.at, self.count = torch.tensor([2, 0]), torch.tensor(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, self.at] * self.count


def test_constants_are_copied_to_the_graphs_device() -> None:
    model, x = Indexed().eval(), torch.randn(3, 4)
    imported = import_model(model, (x,))
    graph = export(model, (x,)).module.graph
    moved = devices.placed(imported, graph, GPU)
    assert len(moved.constants) >= 4 and {c.device for c in moved.constants.values()} == {GPU}
    same = devices.placed(imported, graph, CPU)
    assert all(same.constants[name] is each for name, each in imported.constants.items())


def test_results_that_torch_has_on_the_cpu_are_copied_back() -> None:
    graph = graph_of(
        x=torch.ones(2, device=GPU), y=torch.ones(2), z=torch.ones(1, device=GPU)
    ).graph
    imported = import_model(Indexed().eval(), (torch.randn(3, 4),))
    assert devices.placed(imported, graph, GPU).elsewhere == (1,)
    assert devices.placed(imported, graph, GPU, saved=[1]).elsewhere == ()
    assert devices.reads_elsewhere(graph, GPU) and not devices.reads_elsewhere(graph, CPU)
    assert devices.placed(imported, graph, CPU).elsewhere == ()


@pytest.mark.parametrize("first", ["the number", "the tensor"])
def test_what_is_traced_is_on_the_gpu_whichever_operand_comes_first(first: str) -> None:
    seen: list[torch.device] = []

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.tensor(2.0)
            y = scale * x if first == "the number" else x * scale
            seen.append(y.device)
            return y.to("cpu") + 1

    traced = Traced(Scaled(), (torch.ones(2, device=GPU),), {})
    assert seen == [GPU]
    (result,) = results_in(traced.graph)
    assert result.meta["val"].device == CPU


def test_a_compiled_graph_reads_copies_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places that are elsewhere are copied before a run, and no others."""
    asked: list[int] = []

    def told(tensors: list[torch.Tensor], device: torch.device) -> tuple[int, ...]:
        asked.append(len(tensors))
        return (0,)

    copied: list[torch.Tensor] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: object) -> torch.Tensor:
        if args == (CPU,):
            copied.append(self)
        return to(self, *args)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(dynamo, "reads_elsewhere", lambda graph, device: True)
    monkeypatch.setattr(dynamo, "elsewhere", told)
    monkeypatch.setattr(torch.Tensor, "to", noted)
    x, y = torch.randn(2, 4), torch.randn(())
    f = torch.compile(lambda x, y: x * y + 1, backend=dynamo.backend)
    made = f(x, y)
    assert torch.equal(made, x * y + 1) and asked and len(copied) == 1
