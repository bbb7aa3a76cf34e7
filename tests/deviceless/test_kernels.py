"""Generated kernels are compiled by NVRTC for every GPU that they are meant for, and spill nothing.

What the samples run as on a large GPU, as one kernel and as kernels among other steps, is compiled
for an H100; one kernel with each op for all GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

import cudnngraph as cg
from cudnngraph.errors import NotSupported
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile as compiler
from cudnngraph.kernels import patterns, pool_gradient
from cudnngraph.kernels.cubin import Resources, resources
from cudnngraph.kernels.row_kernels import write
from cudnngraph.kernels.rows import MOST_REGISTERS, rows_of, schedule_for
from cudnngraph.kernels.rules import RULES
from cudnngraph.kernels.tape import Refused
from cudnngraph.runtime import updates
from tests import chunks, generated
from tests.cpu.kernels import test_columns, test_torch_ops, test_whole_numbers
from tests.samples import F64, Case, enumerate_cases

CAPABILITIES = (80, 86, 89, 90, 100, 120)
FP8_FROM = 89
PROCESSORS = 132
PARTS = 4
CASES = [case for case in enumerate_cases() if case.dtype != F64 and not case.drawn]


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    try:
        compiler.nvrtc()
    except NotSupported as missing:
        pytest.skip(str(missing))


def kernels(case: Case) -> Iterator[tuple[GraphSpec, str]]:
    """The regions of a sample that are kernels, with their texts."""
    spec = case.build().spec()
    try:
        rows = rows_of(spec)
        yield spec, write(spec, schedule_for(rows, PROCESSORS), rows).text
    except Refused:
        pass
    for step in generated.selection(canonical(spec), PROCESSORS).steps:
        if step.kind == "kernel":
            assert step.choice is not None
            yield step.spec, patterns.source(step.spec, step.choice).text


def eight_bits(spec: GraphSpec) -> bool:
    return any(
        tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
        for tensor in spec.tensors.values()
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_of_the_samples_compiles_and_spills_nothing(part: int) -> None:
    seen: set[str] = set()

    def test(case: Case) -> None:
        for spec, text in kernels(case):
            if text not in seen:
                seen.add(text)
                found = resources(compiler.cubin(text, 90))
                assert found.local_bytes == 0, (spec, found)

    chunks.check(test, CASES[part::PARTS])
    assert len(seen) > 100


def some_with_every_op() -> list[tuple[GraphSpec, str]]:
    """Kernels of samples in which every op is found that has a rule."""
    found: list[tuple[GraphSpec, str]] = []
    seen: set[str] = set()
    for case in CASES:
        for spec, text in kernels(case):
            new = {node.op for node in spec.nodes if node.op in RULES} - seen
            if new:
                found.append((spec, text))
                seen |= new
    assert set(RULES) - seen <= {"layer_norm_backward", "rms_norm_backward"}
    return found


def test_a_kernel_with_each_op_compiles_for_every_gpu() -> None:
    known = set(compiler.nvrtc().nvrtcGetSupportedArchs()[1])
    assert {80, 90} <= known
    for spec, text in some_with_every_op():
        for capability in known & set(CAPABILITIES):
            if eight_bits(spec) and capability < FP8_FROM:
                with pytest.raises(NotSupported, match="error"):
                    compiler.cubin(text, capability)
            else:
                assert resources(compiler.cubin(text, capability)).local_bytes == 0


ROWS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "mean")


@pytest.mark.parametrize("op", ROWS)
def test_usual_rows_spill_nothing(op: str) -> None:
    """Those that are kept as numbers, as memory has them, and that are read again in each pass."""
    for extent in (64, 1000, 4096, 16384, 32768, 50257, 57344, 65536, 200_000):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            spec = rows(op, extent, dtype)
            text = patterns.source(spec, patterns.by_rule(spec, PROCESSORS)).text
            found = resources(compiler.cubin(text, 90))
            assert found.local_bytes == 0, (op, extent, dtype, found)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_long_rows_compile_for_every_gpu_and_spill_nothing(capability: int) -> None:
    for extent in (50257, 50304, 128256):
        for op in ("softmax", "loss"):
            spec = loss(extent) if op == "loss" else rows(op, extent, torch.bfloat16)
            text = patterns.source(spec, patterns.by_rule(spec, PROCESSORS)).text
            found = resources(compiler.cubin(text, capability))
            assert found.local_bytes == 0, (op, extent, found)


def loss(extent: int) -> GraphSpec:
    g = cg.Graph("loss")
    x, t = g.input("x", (512, extent), torch.bfloat16), g.input("t", (512,), torch.int64)
    g.output("y", g.cross_entropy(x, t))
    return g.spec()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [256, 512, 768, 1024, 4096])
def test_blocks_that_share_rows_out_run_all_at_a_time(width: int, dtype: torch.dtype) -> None:
    """Else some of them begin when others end. One case spills two registers for that."""
    spec = test_columns.gradient((8192, width), dtype)
    made = patterns.source(spec, patterns.by_rule(spec, PROCESSORS))
    shared, first, *_ = re.split(r'(?=extern "C")', made.text)
    found = resources(compiler.cubin(shared + first, 90))
    blocks, threads = made.launches[0].blocks, made.launches[0].threads
    assert blocks % PROCESSORS == 0
    assert blocks // PROCESSORS * threads * found.registers <= MOST_REGISTERS, found
    assert found.local_bytes == (8 if (width, dtype) == (768, torch.float32) else 0)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_batch_norms_and_sums_spill_nothing(capability: int) -> None:
    for n, c, side in ((64, 256, 56), (64, 64, 112), (64, 2048, 7)):
        g = cg.Graph("norm")
        dy, x = (
            g.input(name, (n, c, side, side), torch.bfloat16, layout="channels_last")
            for name in ("dy", "x")
        )
        vectors = [g.input(name, (c,), torch.float32) for name in ("w", "m", "i")]
        y = g.batch_norm_train(x, *vectors[:2])[0]
        for name, value in zip("yabc", (y, *g.batch_norm_backward(dy, x, *vectors)), strict=True):
            g.output(name, value)
        text = patterns.source(g.spec(), patterns.by_rule(g.spec(), PROCESSORS)).text
        assert resources(compiler.cubin(text, capability)).local_bytes == 0, (n, c, side)


def rows(op: str, extent: int, dtype: torch.dtype) -> GraphSpec:
    g = cg.Graph(op)
    x = g.input("x", (512, extent), dtype)
    vectors = [g.input(name, (extent,), dtype) for name in ("weight", "bias")]
    made = {
        "softmax": lambda: g.softmax(x, 1),
        "log_softmax": lambda: g.log_softmax(x, 1),
        "layer_norm": lambda: g.layer_norm(x, *vectors),
        "rms_norm": lambda: g.rms_norm(x, vectors[0]),
        "mean": lambda: g.reduction(x, (1,), "mean", keepdim=True),
    }[op]()
    g.output("y", made)
    g.drop_unused_inputs()
    return g.spec()


SLOW_PATH = 32  # bytes of local memory, in which CUDA's sin and cos reduce large numbers


@pytest.mark.parametrize("name", sorted(test_torch_ops.MOVES))
def test_what_moves_elements_as_torch_does_compiles_and_spills_nothing(name: str) -> None:
    op, args, inputs = test_torch_ops.MOVES[name]
    spec = test_torch_ops.graph(op, args, *inputs)
    text = patterns.source(spec, patterns.by_rule(spec, PROCESSORS)).text
    for capability in (80, 90, 120):
        assert resources(compiler.cubin(text, capability)).local_bytes == 0, name


def test_single_elements_as_torch_computes_them_compile() -> None:
    specs = [test_torch_ops.cast(*each) for each in test_torch_ops.CASTS]
    specs += test_torch_ops.compared("eq", torch.int64)
    specs += [test_torch_ops.function(op, torch.float16) for op in test_torch_ops.FUNCTIONS]
    specs += [test_torch_ops.pair(op) for op in test_torch_ops.PAIRS]
    for spec in specs:
        text = patterns.source(spec, patterns.by_rule(spec, PROCESSORS)).text
        assert resources(compiler.cubin(text, 90)).local_bytes <= SLOW_PATH, spec


def test_running_sums_compile_and_spill_nothing() -> None:
    for spec in test_whole_numbers.specs():
        text = patterns.source(spec, patterns.by_rule(spec, PROCESSORS)).text
        for capability in (80, 90, 120):
            assert resources(compiler.cubin(text, capability)).local_bytes == 0, spec


# -- what is read from a cubin ---------------------------------------------------------------------

HUNGRY = """
extern "C" __global__ void __launch_bounds__(1024) cudnngraph_kernel(float* p, int n) {
  __shared__ float shared[SHARED];
  float own[OWN];
  for (int i = 0; i < OWN; ++i) own[i] = p[i * n + threadIdx.x];
  shared[threadIdx.x % SHARED] = own[n];
  __syncthreads();
  for (int i = 0; i < OWN; ++i) p[i * n] = own[(i * n) % OWN] + shared[i % SHARED];
}
"""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_cubin_says_what_the_assembler_said(capability: int) -> None:
    for shared, own in ((1, 1), (300, 20), (5000, 200)):
        text = HUNGRY.replace("SHARED", str(shared)).replace("OWN", str(own))
        code, log = compiled(text, capability)
        (registers,) = re.findall(r"Used (\d+) registers", log)
        (frame,) = re.findall(r"(\d+) bytes stack frame", log)
        (wanted,) = re.findall(r"(\d+) bytes smem", log)
        assert resources(code) == Resources(int(registers), int(frame), int(wanted))
        assert resources(code).shared_bytes == 4 * shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_gradients_of_max_pools_spill_nothing(layout: str, dtype: torch.dtype) -> None:
    g = cg.Graph("max_pool_backward")
    dy = g.input("dy", (64, 64, 56, 56), dtype, layout=layout)
    x = g.input("x", (64, 64, 112, 112), dtype, layout=layout)
    dx = g.max_pool_backward(dy, x, kernel_size=3, stride=2, padding=1)
    g.output("dx", g.relu_backward(dx, x))
    spec = g.spec()
    for at, schedule in enumerate(pool_gradient.patches(spec, PROCESSORS)):
        text = patterns.source(spec, patterns.choice_of(schedule)).text
        for capability in (80, 90, 120) if at == 0 else (90,):
            assert resources(compiler.cubin(text, capability)).local_bytes == 0, schedule


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_updates_of_many_parameters_spill_nothing(kind: str) -> None:
    g = cg.Graph(kind)
    lr, adam = g.input("lr", (1,), torch.float32), kind == "adam"
    for number in range(updates.AT_ONCE):
        size = 768 * 64 * (number % 5) + number + 1
        if adam:
            numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decoupled": True}
        else:
            numbers = {"momentum": 0.9, "dampening": 0.0, "nesterov": True}
        write_out = updates._adam_of if adam else updates._sgd_of
        made = write_out(g, lr, number, size, weight_decay=0.1, maximize=False, **numbers)  # type: ignore[operator]
        for name, value in made.items():
            g.output(f"next_{name}", value)
    (step,) = generated.selection(canonical(g.spec()), PROCESSORS).steps
    assert step.kind == "kernel" and step.choice is not None
    text = patterns.source(step.spec, step.choice).text
    for capability in (80, 90, 120):
        found = resources(compiler.cubin(text, capability))
        assert found.local_bytes <= ADDRESSES, found


ADDRESSES = 8 * 9  # bytes, of the tensors of a region


def compiled(text: str, capability: int) -> tuple[bytes, str]:
    """The device code, and what the assembler says of it."""
    nvrtc = compiler.nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [f"--gpu-architecture=sm_{capability}".encode(), b"--ptxas-options=-v"]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    found = []
    for size_of, get in (
        (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
        (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog),
    ):
        data = bytes(size_of(program)[1])
        get(program, data)
        found.append(data)
    return found[0], found[1].decode()
