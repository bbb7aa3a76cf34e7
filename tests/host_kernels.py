"""Generated kernels run on the CPU: their text compiled as C++, threads of a block as fibers.

A fiber runs up to the next point at which the threads of a block meet, then the next one does. So
a kernel in which all threads meet at the same points computes here what it computes on a GPU, one
thread after the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cudnngraph.kernels.scalars import PRELUDE
from cudnngraph.kernels.write import NAME, Source

HOST = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __grid_constant__
#define __shared__ static
#define D static inline
typedef unsigned int u32;
typedef long long i64;
typedef signed char i8;
typedef unsigned char u8;
struct Three { u32 x; };
static Three threadIdx, blockIdx, gridDim;
static ucontext_t scheduler;
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
static std::vector<Fiber> fibers;
static float exchanged[1024];
static void meet() {
  u32 me = threadIdx.x;
  swapcontext(&fibers[me].context, &scheduler);
  threadIdx.x = me;
}
static void __syncthreads() { meet(); }
static float __shfl_xor_sync(unsigned, float x, int at) {
  exchanged[threadIdx.x] = x;
  meet();
  float y = exchanged[threadIdx.x ^ at];
  meet();
  return y;
}
struct flag { u8 bits; };
struct f16 { _Float16 bits; };
struct bf16 { unsigned short bits; };
template <class T, int N> struct alignas(sizeof(T) * N) vec { T at[N]; };
template <int N, class T> D vec<T, N> load(const T* p) {
  if ((uintptr_t)p % sizeof(vec<T, N>)) __builtin_trap();
  return *(const vec<T, N>*)p;
}
template <int N, class T> D void store(T* p, const vec<T, N>& x) {
  if ((uintptr_t)p % sizeof(vec<T, N>)) __builtin_trap();
  *(vec<T, N>*)p = x;
}
D float bits_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
D u32 float_bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }
D float get(float x) { return x; }
D int get(int x) { return x; }
D i64 get(i64 x) { return x; }
D int get(i8 x) { return x; }
D int get(u8 x) { return x; }
D bool get(flag x) { return x.bits != 0; }
D float get(bf16 x) { return bits_float((u32)x.bits << 16); }
D float get(f16 x) { return (float)x.bits; }
D void put(float& to, float x) { to = x; }
D void put(int& to, int x) { to = x; }
D void put(i64& to, i64 x) { to = x; }
D void put(i8& to, int x) { to = (i8)x; }
D void put(u8& to, int x) { to = (u8)x; }
D void put(flag& to, bool x) { to.bits = x; }
D void put(f16& to, float x) { to.bits = (_Float16)x; }
D void put(bf16& to, float x) {
  u32 b = float_bits(x);
  to.bits = x != x ? 0x7fff : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}
D float rsqrtf(float x) { return 1.0f / sqrtf(x); }
"""

RUN = r"""
static Args* given;
static void thread(u32 me) {
  threadIdx.x = me;
  KERNEL(*given);
  fibers[me].done = true;
}
extern "C" void run(Args* args, u32 blocks, u32 threads) {
  given = args;
  gridDim.x = blocks;
  fibers.resize(threads);
  for (u32 b = 0; b < blocks; ++b) {
    blockIdx.x = b;
    for (u32 t = 0; t < threads; ++t) {
      Fiber& f = fibers[t];
      f.stack.resize(1 << 16);
      f.done = false;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = f.stack.size();
      f.context.uc_link = &scheduler;
      makecontext(&f.context, (void (*)())thread, 1, t);
    }
    for (bool left = true; left;) {
      left = false;
      for (u32 t = 0; t < threads; ++t)
        if (!fibers[t].done) {
          threadIdx.x = t;
          swapcontext(&scheduler, &fibers[t].context);
          left |= !fibers[t].done;
        }
    }
  }
}
""".replace("KERNEL", NAME)

_FOLDER = tempfile.TemporaryDirectory(prefix="cudnngraph-kernels-")


def run(source: Source, tensors: Sequence[torch.Tensor]) -> None:
    """Run a kernel on tensors of the CPU: its inputs, then its outputs."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    assert PRELUDE in source.text
    text = source.text.replace(PRELUDE, HOST) + RUN
    place = Path(_FOLDER.name) / hashlib.sha256(text.encode()).hexdigest()[:16]
    library = place.with_suffix(".so")
    if not library.exists():
        place.with_suffix(".cpp").write_text(text)
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=fast"]
        command = [compiler, *flags, str(place.with_suffix(".cpp")), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr[:4000]}\n{source.text[len(PRELUDE) :]}"
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    ctypes.CDLL(str(library)).run(pointers, source.blocks, source.threads)
