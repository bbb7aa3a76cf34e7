"""What the inputs and results of a graph of torch.compile are called, in reports and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

SAVED = "tensor"  # what the name of a result begins with that is saved
#: What each of so many results of a graph is, of which the first are new values of these inputs.
Names = Callable[[int, Sequence[int]], "list[str]"]


def input_names(module: torch.fx.GraphModule) -> list[str]:
    """The user's names for the inputs of a dynamo graph, in AOTAutograd's order."""
    held = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return held + [source_name(n) for n in module.graph.nodes if n.op == "placeholder"]


_HELD = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")


def source_name(node: torch.fx.Node) -> str:
    """ "layers.0.weight" of a parameter, "x" of an argument."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", str(node.target))
    text = str(name() if callable(name) else name)  # a method before torch 2.10
    return ".".join(_HELD.findall(text)) or re.sub(r"^[LG]\['([^']+)'\]", r"\1", text)


def result_names(inputs: Sequence[str]) -> Names:
    """Names of a forward's results: new values of inputs, results, tensors for the gradient."""
    context = torch._guards.TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    changed = list(getattr(metadata, "mutated_inp_runtime_indices", ()))
    tokens = len(getattr(metadata, "tokens", ()))
    many = getattr(metadata, "num_outputs", None)

    def new(at: int) -> str:
        return f"the new '{inputs[at]}'" if at < len(inputs) else f"the new input {at}"

    def names(count: int, written: Sequence[int]) -> list[str]:
        made = [new(at) for at in written]
        if many is None:
            return made + [f"result {at}" for at in range(count - len(made))]
        made += [f"token {at}" for at in range(tokens)]
        made += [new(at) for at in changed]
        made += [f"result {at}" for at in range(many)]
        made += [f"{SAVED} {at} for the gradient" for at in range(count - len(made))]
        return made[:count]

    return names


def gradient_names(inputs: Sequence[str]) -> Names:
    def names(count: int, written: Sequence[int]) -> list[str]:
        if count != len(inputs):  # views of one tensor that is written count as one
            return [f"the gradient of input {at}" for at in range(count)]
        return [f"the gradient of '{name}'" for name in inputs]

    return names


def part_names(count: int, written: Sequence[int]) -> list[str]:
    """What the results of a part of a graph are."""
    return [f"value {at}" for at in range(count)]
