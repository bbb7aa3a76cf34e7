"""What runs kernels on the CPU: it tells what a GPU leaves undefined, and rounds as one does."""

from __future__ import annotations

import math

import pytest
import torch

import cudnngraph as cg
from cudnngraph.kernels.row_kernels import write
from cudnngraph.kernels.rows import Schedule
from cudnngraph.kernels.scalars import FUNCTIONS, PRELUDE
from cudnngraph.kernels.source import Source
from cudnngraph.ops.quantize import saturated
from tests import host_kernels

ADD_UP = """
struct Args { void* p[2]; };
extern "C" __global__ void cudnngraph_kernel(const __grid_constant__ Args a) {
  __shared__ float parts[64];
  const float* x = (const float*)a.p[0];
  float* y = (float*)a.p[1];
  parts[threadIdx.x] = x[threadIdx.x];
  MEET
  float sum = 0.0f;
  for (int at = 0; at < 64; ++at) sum += parts[at];
  y[threadIdx.x] = sum;
}
"""


def added_up(meet: str) -> Source:
    return Source(PRELUDE + ADD_UP.replace("MEET", meet) + "// __syncthreads", 1, 64)


def test_threads_that_do_not_wait_for_each_other_are_told() -> None:
    x, one, other = torch.arange(64.0), torch.zeros(64), torch.zeros(64)
    right, early = added_up("__syncthreads();"), added_up("")
    for source in (right, early):
        host_kernels.run(source, [x, one])
        host_kernels.run(source, [x, other], backwards=True)
        assert torch.equal(one, other) == (source is right)
    for apart in ("if (threadIdx.x < 32) __syncthreads();", "if (x[0] < threadIdx.x) return;"):
        with pytest.raises(AssertionError, match="meet at different points"):
            host_kernels.run(added_up(f"{apart} __syncthreads();"), [x, one])


ROOTS = """
struct Args { void* p[3]; };
extern "C" __global__ void cudnngraph_kernel(const __grid_constant__ Args a) {
  u32 at = threadIdx.x;
  ((float*)a.p[2])[at] = nearer_root(((const float*)a.p[0])[at], ((const float*)a.p[1])[at]);
}
"""


def test_roots_of_norms_are_right_to_the_last_place() -> None:
    """Of a GPU's ``rsqrtf``, which may be two units off."""
    x = torch.cat([torch.rand(500) * 4, torch.rand(500) * 1e-20, torch.rand(24) * 1e30])
    exact = x.double().rsqrt()
    near = exact.float()
    for away in (0.0, math.inf):
        off = near
        for _ in range(2):
            off = torch.nextafter(off, torch.full_like(off, away))
        found = torch.empty(1024)
        host_kernels.run(Source(PRELUDE + FUNCTIONS + ROOTS, 1, 1024), [x, off, found])
        unit = torch.nextafter(near, torch.full_like(near, math.inf)).double() - near.double()
        assert float(((off.double() - exact).abs() / unit).max()) > 1.5
        assert float(((found.double() - exact).abs() / unit).max()) < 0.51
    edges = torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0, 1e-42])
    found, by = torch.empty(6), edges.rsqrt()
    host_kernels.run(Source(PRELUDE + FUNCTIONS + ROOTS, 1, 6), [edges, by, found])
    assert torch.equal(found.nan_to_num(7.0), by.nan_to_num(7.0))


def test_a_vector_at_an_odd_place_is_told() -> None:
    spec = graph_of_relu().spec()
    source = write(spec, Schedule(4, 32))
    memory = torch.randn(65)
    out = torch.empty(64)
    host_kernels.run(source, [memory[:64], out])
    assert torch.equal(out, memory[:64].relu())
    with pytest.raises(AssertionError, match="multiple of its size"):
        host_kernels.run(source, [memory[1:], out])


def graph_of_relu() -> cg.Graph:
    g = cg.Graph("relu")
    g.output("y", g.relu(g.input("x", (64,), torch.float32)))
    return g


def test_eight_bits_are_rounded_as_torch_does() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        g = cg.Graph("wide")
        one = g.input("one", (1,), torch.float32)
        g.output("y", g.dequantize(g.input("x", (1, 256), dtype), one))
        out, given = torch.empty(1, 256), every.view(dtype)[None]
        host_kernels.run(write(g.spec(), Schedule(1, 32)), [torch.ones(1), given, out])
        assert torch.equal(out.nan_to_num(7.0), given.float().nan_to_num(7.0))
        g = cg.Graph("narrow")
        g.output("y", g.quantize(g.input("x", (4096,), torch.float32), dtype=dtype))
        x = torch.randn(4096) * torch.logspace(-6, 6, 4096, base=10.0)
        x[:8] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 448.0, 464.0, 61440.0])
        made = torch.zeros(4096, dtype=dtype)
        host_kernels.run(write(g.spec(), Schedule(1, 32)), [x, made])
        want = saturated(x, dtype)
        assert torch.equal(made.float().nan_to_num(7.0), want.float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_quantized_is_rounded_within_a_kernel_too(dtype: torch.dtype) -> None:
    """What reads it there reads the rounded and saturated number, as from memory."""
    g = cg.Graph("there_and_back")
    x, one = g.input("x", (4096,), torch.float32), g.input("one", (), torch.float32)
    g.output("y", g.dequantize(g.quantize(x, dtype=dtype), one, dim=0))
    given = torch.randn(4096) * torch.logspace(-6, 6, 4096, base=10.0)
    given[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    out = torch.empty(4096)
    host_kernels.run(write(g.spec(), Schedule(1, 32)), [given, torch.ones(()), out])
    want = saturated(given, dtype).float()
    assert torch.equal(out.nan_to_num(1.5), want.nan_to_num(1.5))
    if dtype == torch.int8:
        assert out[:3].tolist() == [0.0, 127.0, -128.0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_that_are_moved_stay_as_they_are(dtype: torch.dtype) -> None:
    """Infinities of E5M2 too, which :func:`quantize` alone makes NaN."""
    g = cg.Graph("moved")
    x = g.input("x", (256,), dtype)
    g.output("y", g.concat([g.slice(x, 0, 128), g.slice(x, 0, 0, 128)], 0))
    given = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = torch.zeros(256, dtype=torch.uint8).view(dtype)
    host_kernels.run(write(g.spec(), Schedule(1, 32)), [given, out])
    want = torch.cat([given[128:], given[:128]]).float()
    assert torch.equal(out.float().nan_to_num(7.0), want.nan_to_num(7.0))
