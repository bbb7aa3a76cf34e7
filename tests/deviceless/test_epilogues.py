"""Products with what stands behind them in blocks of real models, planned for an H200."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cudnngraph as cg
from tests import blocks

VIEWS = ("reshape", "transpose", "slice")  # which nothing runs


def steps(graph: cg.Graph, **options: bool) -> list[str]:
    """The steps that run something: by what, and their ops."""
    found = cg.explain(graph, allow_tf32=False, **options).steps
    return [
        f"{step.runs_on}: {' '.join(step.ops)}"
        for step in found
        if len(step.ops) > 1 or step.ops[0] not in VIEWS
    ]


@pytest.mark.generated
def test_in_training_a_gpt_adds_and_normalizes_in_one_kernel(driver: None) -> None:
    """The sum is kept in another shape than the norm reads it; it is written once. Biases are cast
    with the weights, but for those that the kernel reads."""
    norm = "kernel: cast add add reshape layer_norm cast"
    assert steps(blocks.gpt_block()) == [
        "kernel: cast cast cast cast cast cast",
        *("cuDNN: matmul", norm, "cuDNN: matmul add", "kernel: gelu_tanh"),
        *("cuDNN: matmul", norm, "cuDNN: matmul add"),
    ]
    found = cg.explain(blocks.gpt_block(), allow_tf32=False)
    kernels = [step for step in found.steps if step.runs_on == "kernel" and "add" in step.ops]
    outputs = [
        {name: str(step.spec.tensors[name].dtype) for name in step.spec.outputs} for step in kernels
    ]
    norms = ("norm2", "next_norm1")
    for made, total, name in zip(outputs, ("middle", "end"), norms, strict=True):
        wide = {each: "torch.float32" for each in (total, f"{name}_mean", f"{name}_inv_std")}
        assert made == {**wide, f"{name}_y": "torch.bfloat16"}
    text = str(found)
    assert "a bias is cast with the weights" in text
    assert "a plan compiled at run time would lose about 30.9 us on the product" in text


@pytest.mark.generated
def test_a_unet_adds_in_front_of_norms_and_behind_long_products(driver: None) -> None:
    norm = "kernel: add add layer_norm"
    assert steps(blocks.unet_block()) == [
        *("cuDNN: matmul", norm, "cuDNN: matmul", "cuDNN: matmul", norm),
        *("cuDNN: matmul add", "kernel: gelu mul", "cuDNN: matmul", "kernel: add add"),
    ]


@pytest.mark.generated
def test_in_a_small_unet_no_kernel_pays_but_in_front_of_norms(driver: None) -> None:
    assert steps(blocks.unet_block(2, 64, 320))[-1] == "cuDNN: matmul add add"
    assert "kernel: add add layer_norm" in steps(blocks.unet_block(2, 64, 320))


@pytest.mark.generated
def test_wide_results_of_short_products_stay_one_plan(driver: None) -> None:
    assert steps(blocks.convnext_block()) == [
        *("kernel: layer_norm", "cuDNN: matmul add gelu", "cuDNN: matmul add mul add")
    ]


@pytest.mark.parametrize("block", [blocks.gpt_block, blocks.unet_block, blocks.convnext_block])
def test_without_kernels_each_product_has_its_epilogue(
    block: Callable[[], cg.Graph], driver: None
) -> None:
    for step in steps(block(), kernels=False):
        if "matmul" in step and step != "cuDNN: matmul":
            assert step.startswith(("cuDNN: matmul add", "cuDNN: matmul cast add"))
    assert sum("matmul" in step and "add" in step for step in steps(block())) >= 2


@pytest.mark.generated
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_large_layer_is_one_call_of_torch(deterministic: bool, driver: None) -> None:
    g = cg.Graph("layer")
    x, w = (g.input(*each, blocks.F16) for each in (("x", (8192, 4096)), ("w", (4096, 4096))))
    g.output("y", g.relu(g.add(g.matmul(x, w), g.input("b", (4096,), blocks.F16))))
    (first, *others) = steps(g, deterministic=deterministic)
    if deterministic:  # torch's products promise no equal bits
        assert first == "cuDNN: matmul" and others == ["kernel: add relu"]
    else:
        assert (first, others) == ("torch: matmul add relu", [])
        assert "torch has it as one call" in str(cg.explain(g))
