"""Generated kernels run on the CPU: their text compiled as C++, threads of a block as fibers.

A fiber runs up to the next point at which the threads of a block meet, then the next one does. So
a kernel in which all threads meet at the same points computes here what it computes on a GPU, one
thread after the other. What a GPU leaves undefined is told: threads that meet at different points,
and vectors that do not lie at a multiple of their size.

Kernels are compiled many at a time: all that were asked for since one was last run.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnngraph.kernels.banded import PRODUCTS
from cudnngraph.kernels.gather import CLUSTER
from cudnngraph.kernels.scalars import PRELUDE
from cudnngraph.kernels.source import DYNAMIC, Source
from cudnngraph.kernels.tap_products import COLUMNS

HOST = r"""
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __shared__ static __attribute__((section("shared")))
#define D static inline
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef signed char i8;
typedef unsigned char u8;
struct Three { u32 x; };
static Three threadIdx, blockIdx, gridDim;
enum Wrong { NOTHING, MISALIGNED, APART };
static int wrong;
static jmp_buf scheduler;
static ucontext_t beginning;
struct Fiber {
  ucontext_t context;
  jmp_buf at;
  std::vector<char> stack;
  bool begun, done;
  int met;
};
static std::vector<Fiber> fibers;
static float exchanged[1024];
static void meet(int point) {
  u32 me = threadIdx.x;
  fibers[me].met = point;
  if (!_setjmp(fibers[me].at)) _longjmp(scheduler, 1);
  threadIdx.x = me;
}
static void __syncthreads() { meet(1); }
static void __syncwarp() { meet(60); }
enum { CLUSTER = 1000 };  // the point at which blocks meet
static void meet_cluster() { meet(CLUSTER); }
static float __shfl_xor_sync(unsigned, float x, int at) {
  exchanged[threadIdx.x] = x;
  meet(2 + at);
  float y = exchanged[threadIdx.x ^ at];
  meet(2 + at);
  return y;
}
struct flag { u8 bits; };
struct f16 { _Float16 bits; };
struct bf16 { unsigned short bits; };
struct e4m3 { u8 bits; };
struct e5m2 { u8 bits; };
template <class T, int N> struct alignas(sizeof(T) * N) vec { T at[N]; };
template <int N, class T> D vec<T, N> load(const T* p) {
  vec<T, N> x;
  if ((uintptr_t)p % sizeof x) wrong = MISALIGNED;
  memcpy(&x, p, sizeof x);
  return x;
}
template <int N, class T> D vec<T, N> load_if(bool there, const T* p) {
  return there ? load<N>(p) : vec<T, N>{};
}
template <int N, class T> D void store(T* p, const vec<T, N>& x) {
  if ((uintptr_t)p % sizeof x) wrong = MISALIGNED;
  memcpy(p, &x, sizeof x);
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
template <int N, class T> D auto lane(const vec<T, N>& x, int j) { return get(x.at[j]); }
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
// 8 bits of which `fraction` are behind the point: rounded to even, beyond the largest it is that.
D float get8(u8 x, int fraction, int bias, u8 most, u8 nan) {
  int size = x & 0x7f, power = size >> fraction, rest = size & ((1 << fraction) - 1);
  if (power) rest += 1 << fraction, power -= 1;
  float y = size >= nan ? NAN : size > most ? INFINITY : ldexpf(rest, power + 1 - bias - fraction);
  return x & 0x80 ? -y : y;
}
D u8 put8(float x, int fraction, int bias, u8 most, u8 nan) {
  u8 sign = std::signbit(x) ? 0x80 : 0;
  if (x - x != 0 || x == 0) return x == 0 ? sign : nan | sign;
  int power;
  frexpf(x, &power);
  int step = (power - 1 < 1 - bias ? 1 - bias : power - 1) - fraction;
  float units = nearbyintf(ldexpf(fabsf(x), -step));
  int bits = (int)units + ((step + fraction - 1 + bias) << fraction);
  return (bits > most ? most : bits) | sign;
}
D float get(e4m3 x) { return get8(x.bits, 3, 7, 0x7e, 0x7f); }
D float get(e5m2 x) { return get8(x.bits, 2, 15, 0x7b, 0x7d); }
D void put(e4m3& to, float x) { to.bits = put8(x, 3, 7, 0x7e, 0x7f); }
D void put(e5m2& to, float x) {
  to.bits = std::isinf(x) ? (x < 0 ? 0xfc : 0x7c) : put8(x, 2, 15, 0x7b, 0x7f);
}
// What a warp does together with the matrices of tensor cores.
static const void* rows_at[1024];
static u32 multiplied[1024][6];
D u32 lows(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
D u32 highs(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
D void load_rows(u32 (&a)[4], const void* at) {
  u32 me = threadIdx.x, first = me / 32 * 32, lane = me % 32;
  if ((uintptr_t)at % 16) wrong = MISALIGNED;
  rows_at[me] = at;
  meet(50);
  for (u32 m = 0; m < 4; ++m)
    memcpy(&a[m], (const u32*)rows_at[first + 8 * m + lane / 4] + lane % 4, 4);
  meet(51);
}
template <int N> D void load_columns(u32 (&a)[N], const void* at) {
  u32 me = threadIdx.x, first = me / 32 * 32, lane = me % 32;
  if ((uintptr_t)at % 16) wrong = MISALIGNED;
  rows_at[me] = at;
  meet(53);
  for (u32 m = 0; m < N; ++m) {
    u32 two[2];
    for (u32 k = 0; k < 2; ++k)
      two[k] = ((const unsigned short*)rows_at[first + 8 * m + lane % 4 * 2 + k])[lane / 4];
    a[m] = two[0] | two[1] << 16;
  }
  meet(54);
}
template <class T> D float half_of(T, u32 two, u32 second) {
  unsigned short bits = second ? two >> 16 : two & 0xffff;
  T x;
  memcpy(&x, &bits, 2);
  return get(x);
}
template <class T> D void multiply(
    T kind, float& p, float& q, float& r, float& s, const u32 (&a)[4], u32 b0, u32 b1) {
  u32 me = threadIdx.x, first = me / 32 * 32, lane = me % 32;
  for (int i = 0; i < 4; ++i) multiplied[me][i] = a[i];
  multiplied[me][4] = b0, multiplied[me][5] = b1;
  meet(52);
  float* sums[4] = {&p, &q, &r, &s};
  for (u32 e = 0; e < 4; ++e) {
    u32 row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (u32 k = 0; k < 16; ++k) {
      u32 x = multiplied[first + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      u32 y = multiplied[first + column * 4 + k % 8 / 2][4 + k / 8];
      *sums[e] += half_of(kind, x, k % 2) * half_of(kind, y, k % 2);
    }
  }
  meet(53);
}
D float rsqrtf(float x) { return 1.0f / sqrtf(x); }
D float inverse(float x) { return 1.0f / x; }
D float power(float x) { return expf(x); }
D float two_to(float x) { return exp2f(x); }
D float divided(float x, float y) { return x / y; }
D float larger(float a, float b) { return a > b || a != a ? a : b; }
D float smaller(float a, float b) { return a < b || a != a ? a : b; }
"""

RUN = r"""
static void (*kernel)(void*);
static void* given;
static char* workspace;
static void thread(u32 me) {
  kernel(given);
  fibers[me].done = true;
  _longjmp(scheduler, 1);
}
static void resume(u32 t) {
  Fiber& f = fibers[t];
  threadIdx.x = t;
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true;
  swapcontext(&beginning, &f.context);
}
static void begin(u32 threads) {
  for (u32 t = 0; t < threads; ++t) {
    Fiber& f = fibers[t];
    f.stack.resize(1 << 16);
    f.begun = f.done = false;
    f.met = 0;
    f.context = beginning;
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, (void (*)())thread, 1, t);
  }
}
// The threads of a block from one meeting to the next, the last one first if `backwards`. Whether
// they are done; else the block waits for its cluster.
static bool block(u32 threads, bool backwards) {
  for (bool left = true; left;) {
    for (u32 n = 0; n < threads; ++n) {
      u32 t = backwards ? threads - 1 - n : n;
      if (!fibers[t].done) resume(t);
    }
    left = !fibers[0].done;
    for (u32 t = 1; t < threads; ++t)
      if (fibers[t].done != fibers[0].done || (left && fibers[t].met != fibers[0].met)) {
        wrong = APART;
        return true;
      }
    if (left && fibers[0].met == CLUSTER) return false;
  }
  return true;
}
extern char __start_shared[] __attribute__((visibility("hidden")));
extern char __stop_shared[] __attribute__((visibility("hidden")));
__attribute__((used)) __shared__ char there_is_some = 0;
// The blocks of a cluster, each with shared memory of its own, from one meeting to the next.
static void cluster(u32 first, u32 many, u32 threads, bool backwards) {
  std::vector<std::vector<Fiber>> of(many);
  std::vector<std::vector<char>> memory(many);
  for (u32 done = 0, round = 0; !done && wrong == NOTHING; ++round) {
    for (u32 n = 0; n < many && wrong == NOTHING; ++n) {
      u32 b = backwards ? many - 1 - n : n;
      blockIdx.x = first + b;
      fibers.swap(of[b]);
      if (round) memcpy(__start_shared, memory[b].data(), memory[b].size());
      else fibers.resize(threads), begin(threads);
      done += block(threads, backwards);
      memory[b].assign(__start_shared, __stop_shared);
      fibers.swap(of[b]);
    }
    if (done && done < many) wrong = APART;
  }
}
static int launch(
    void (*what)(void*), void* args, u32 blocks, u32 threads, u32 clusters, int how) {
  kernel = what;
  given = args;
  wrong = NOTHING;
  gridDim.x = blocks;
  fibers.resize(threads);
  getcontext(&beginning);
  for (u32 b = 0; b < blocks && wrong == NOTHING; b += clusters) {
    blockIdx.x = how & 1 ? blocks - clusters - b : b;
    if (clusters > 1) cluster(blockIdx.x, clusters, threads, how & 1);
    else if (how & 2) begin(threads), block(threads, how & 1);
    else for (u32 t = 0; t < threads; ++t) {
      threadIdx.x = how & 1 ? threads - 1 - t : t;
      what(args);
    }
  }
  return wrong;
}
"""

#: A kernel among others.
ENTRY = r"""
namespace k%d {
%s
%s}
"""

#: A function of a kernel; those of several take a workspace.
CALL = r"""
static void call_%(name)s(void* a) { %(name)s(*(Args*)a%(workspace)s); }
extern "C" int run_%(at)d_%(name)s(void* args, char* w, u32 blocks, u32 threads, int how) {
  workspace = w;
  return launch(call_%(name)s, args, blocks, threads, %(clusters)d, how);
}
"""

MEETINGS = ("__syncthreads", "__shfl")
WRONG = ("", "a vector does not lie at a multiple of its size", "threads meet at different points")

_FOLDER = tempfile.TemporaryDirectory(prefix="cudnngraph-kernels-")
_known: dict[str, Any] = {}  # the calls of a kernel by its text, or why it does not compile
_asked: dict[str, Source] = {}  # what is to be compiled


def expect(source: Source) -> Source:
    """Compile a kernel with the next one that is run."""
    if source.text not in _known:
        _asked[source.text] = source
    return source


def run(source: Source, tensors: Sequence[torch.Tensor], *, backwards: bool = False) -> None:
    """Run a kernel on tensors of the CPU: its inputs, then its outputs.

    ``backwards`` runs the last thread first: a kernel whose threads wait for each other where they
    have to gives the same bits.
    """
    expect(source)
    if source.text not in _known:
        sources = tuple(_asked.values())
        _asked.clear()
        _compile(sources)
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    meets = any(name in source.text for name in MEETINGS)
    how = backwards + 2 * meets
    calls = _known[source.text]
    assert not isinstance(calls, str), f"{calls[:4000]}\n{source.text[len(PRELUDE) :]}"
    # What a kernel finds in its workspace is whatever was there.
    room = torch.full((source.workspace_bytes // 4 + 128,), float("nan"))
    start = -room.data_ptr() % 256 // 4
    scratch = ctypes.c_void_p(room[start:].data_ptr())
    for each in source.launches:
        wrong = calls[each.name](pointers, scratch, each.blocks, each.threads, how)
        assert not wrong, f"{WRONG[wrong]}\n{source.text[len(PRELUDE) :]}"
    behind = room[start + -(-source.workspace_bytes // 4) :]
    assert bool(behind.isnan().all()), "a kernel writes behind its workspace"


def _cluster_of(source: Source, name: str) -> int:
    """The blocks of a cluster."""
    found = re.search(rf"__cluster_dims__\((\d+), 1, 1\)[^{{]*\b{name}\(", source.text)
    return int(found[1]) if found else 1


def _compile(sources: Sequence[Source]) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    parts = [HOST, RUN]
    for at, source in enumerate(sources):
        assert PRELUDE in source.text
        own = source.text.replace(PRELUDE, "").replace('extern "C" ', "").replace(CLUSTER, "")
        own = own.replace(PRODUCTS, "").replace(COLUMNS, "")
        sized = DYNAMIC.replace("extern ", "").replace("[]", f"[{source.shared_bytes // 16}]")
        own = own.replace(DYNAMIC, sized)
        scratch = ", workspace" if source.several else ""
        calls = (
            CALL
            % {
                "at": at,
                "name": each.name,
                "workspace": scratch,
                "clusters": _cluster_of(source, each.name),
            }
            for each in source.launches
        )
        parts.append(ENTRY % (at, own, "".join(dict.fromkeys(calls))))
    whole = "".join(parts)
    place = Path(_FOLDER.name) / hashlib.sha256(whole.encode()).hexdigest()[:16]
    library = place.with_suffix(".so")
    place.with_suffix(".cpp").write_text(whole)
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=fast"]
    flags += ["-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"]
    command = [compiler, *flags, str(place.with_suffix(".cpp")), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and len(sources) > 1:  # the others, and which one it is
        half = len(sources) // 2
        for some in (sources[:half], sources[half:]):
            _compile(some)
        return
    if done.returncode:
        _known[sources[0].text] = done.stderr
        return
    loaded = ctypes.CDLL(str(library))
    for at, source in enumerate(sources):
        _known[source.text] = {
            each.name: getattr(loaded, f"run_{at}_{each.name}") for each in source.launches
        }
