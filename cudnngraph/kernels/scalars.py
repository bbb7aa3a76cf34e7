"""Numbers in generated kernels: how each dtype is read and written, and pointwise ops on float.

All arithmetic is in float32, as the reference's; what torch does with NaN is done here. Nothing
needs a header: NVRTC compiles without any include path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..ops.pointwise import SOFTPLUS_THRESHOLD

#: The C++ type of an element in memory, by dtype. Elements of 16 and 8 bits are structs of bits.
MEMORY: Mapping[torch.dtype, str] = {
    torch.float32: "float",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int64: "i64",
    torch.int32: "int",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "flag",
}

#: The C++ type of a value in a register.
REGISTER: Mapping[torch.dtype, str] = {
    **dict.fromkeys(MEMORY, "float"),
    torch.int64: "i64",
    torch.int32: "int",
    torch.int8: "int",
    torch.uint8: "int",
    torch.bool: "bool",
}

#: Defined in the text of a kernel that writes 16-bit numbers alone: exp and quotients may be off by
#: as much as 2^-20 then (exp(x) by |x| 2^-24), which rounding to 11 bits hides.
ROUNDED = "ROUNDED"

#: Defined in the text of a kernel with GELU that writes 16-bit numbers beside others. Its share of
#: the normal distribution is off by 1e-7 at most there, as with :data:`ROUNDED`.
NARROW = "NARROW"

#: What a kernel begins with.
PRELUDE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef signed char i8;
typedef unsigned char u8;
struct flag { u8 bits; };
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct e4m3 { u8 bits; };
struct e5m2 { u8 bits; };
template <class T, int N> struct alignas(sizeof(T) * N) vec { T at[N]; };

#define D static __device__ __forceinline__
template <int BYTES> struct raw;
template <> struct raw<16> { typedef uint4 type; };
template <> struct raw<8> { typedef uint2 type; };
template <> struct raw<4> { typedef u32 type; };
template <> struct raw<2> { typedef unsigned short type; };
template <> struct raw<1> { typedef u8 type; };
template <int N, class T> D vec<T, N> load(const T* p) {
  vec<T, N> x;
  typedef typename raw<sizeof(T) * N>::type bytes;
  *(bytes*)&x = *(const bytes*)p;
  return x;
}
template <int N, class T> D vec<T, N> load_if(bool there, const T* p) {
  typedef typename raw<sizeof(T) * N>::type bytes;
  vec<T, N> x;
  bytes zero = {};
  *(bytes*)&x = there ? *(const bytes*)p : zero;
  return x;
}
template <int N, class T> D void store(T* p, const vec<T, N>& x) {
  typedef typename raw<sizeof(T) * N>::type bytes;
  *(bytes*)p = *(const bytes*)&x;
}
D float bits_float(u32 x) { return __uint_as_float(x); }
D u32 float_bits(float x) { return __float_as_uint(x); }

D float get(float x) { return x; }
D int get(int x) { return x; }
D i64 get(i64 x) { return x; }
D int get(i8 x) { return x; }
D int get(u8 x) { return x; }
D bool get(flag x) { return x.bits != 0; }
D float get(bf16 x) { return bits_float((u32)x.bits << 16); }
D float get(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
template <int N, class T> D auto lane(const vec<T, N>& x, int j) { return get(x.at[j]); }
template <int N> D float lane(const vec<bf16, N>& x, int j) {
  u32 two = ((const u32*)&x)[j / 2];
  return bits_float(j % 2 ? two & 0xffff0000u : two << 16);
}
D float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
D float two_to(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#ifdef ROUNDED
D float power(float x) { return two_to(x * 1.4426950408889634f); }
D float divided(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
#else
D float power(float x) { return expf(x); }
D float divided(float x, float y) { return x / y; }
#endif
#if __CUDA_ARCH__ >= 800
D float larger(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
D float smaller(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
#else
D float larger(float a, float b) { return a > b || a != a ? a : b; }
D float smaller(float a, float b) { return a < b || a != a ? a : b; }
#endif
D void put(float& to, float x) { to = x; }
D void put(int& to, int x) { to = x; }
D void put(i64& to, i64 x) { to = x; }
D void put(i8& to, int x) { to = (i8)x; }
D void put(u8& to, int x) { to = (u8)x; }
D void put(flag& to, bool x) { to.bits = x; }
D void put(f16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
D void put(bf16& to, float x) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  u32 b = float_bits(x);
  to.bits = x != x ? 0x7fff : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
#endif
}
#if __CUDA_ARCH__ >= 890
D float get8(u8 x, bool wide) {
  unsigned int two;
  if (wide) asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(two) : "h"((unsigned short)x));
  else asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((unsigned short)x));
  f16 low;
  low.bits = (unsigned short)two;
  return get(low);
}
D u8 put8(float x, bool wide) {
  unsigned short two;
  if (wide) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
  else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
  return (u8)two;
}
D float get(e4m3 x) { return get8(x.bits, false); }
D float get(e5m2 x) { return get8(x.bits, true); }
D void put(e4m3& to, float x) { to.bits = put8(x - x != 0 ? bits_float(0x7fc00000u) : x, false); }
D void put(e5m2& to, float x) {  // the one of both that has infinities
  u32 b = float_bits(x);
  to.bits = (b << 1) == 0xff000000u ? (b >> 24 & 0x80) | 0x7c : put8(x, true);
}
#endif
"""

#: Functions of float that several ops share.
FUNCTIONS = r"""
D u32 lesser(u32 a, u32 b) { return a < b ? a : b; }
D u32 greater(u32 a, u32 b) { return a > b ? a : b; }
// One over the root of x, nearer to it than y, which is within a few units of its last place.
D float nearer_root(float x, float y) {
  float high = x * y, low = fmaf(x, y, -high);
  float z = fmaf(0.5f * y, fmaf(-low, y, fmaf(-high, y, 1.0f)), y);
  return z - z == 0.0f ? z : y;
}
#ifdef ROUNDED
D float inverse_root(float x) { return rsqrtf(x); }
#else
D float inverse_root(float x) { return nearer_root(x, rsqrtf(x)); }
#endif
D float sigmoid(float x) { return inverse(1.0f + power(-x)); }
D float silu(float x) { return x * sigmoid(x); }
#if defined(ROUNDED) || defined(NARROW)
// The share of the normal distribution beyond |x|, by exp(-x^2 / 2) times a polynomial in
// 1 / (1 + 0.28 |x|), a fit to 1e-8. An infinity above 0 is 100, where 0 times that is 0.
D float size_of(float x) { return fmaxf(-x, fminf(x, 100.0f)); }
D float beyond(float size, float density) {
  float t = inverse(fmaf(size, 0.28f, 1.0f));
  float y = fmaf(-0.10580873f, t, 0.38987601f);
  y = fmaf(y, t, -0.23699670f);
  y = fmaf(y, t, 0.26891273f);
  y = fmaf(y, t, 0.067495726f);
  return fmaf(y, t, 0.11652094f) * t * density;
}
D float gelu(float x) {
  float size = size_of(x), density = two_to(-0.72134752f * x * x);
  return fmaf(-size, beyond(size, density), fmaxf(x, 0.0f));
}
D float gelu_backward(float dy, float x) {
  float density = two_to(-0.72134752f * x * x), rest = beyond(size_of(x), density);
  float share = x > 0.0f ? 1.0f - rest : rest;
  return dy * fmaf(x, density * 0.39894228f, share);
}
#else
D float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
D float gelu_backward(float dy, float x) {
  float normal = power(-0.5f * x * x) * 0.39894228040143268f;
  return dy * (0.5f * (1.0f + erff(x * 0.70710678118654752f)) + x * normal);
}
#endif
// 0.5 (1 + tanh(y)) is sigmoid(2 y), which loses no digits where y is far below 0.
D float gelu_tanh_gate(float x) {
  return sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}
D float gelu_tanh(float x) { return x * gelu_tanh_gate(x); }
D float softplus(float x, float beta) {
  return x * beta > THRESHOLD ? x : log1pf(expf(x * beta)) / beta;
}
D float mish(float x) { return x * tanhf(softplus(x, 1.0f)); }
D float elu(float x, float alpha) { return x > 0.0f || x != x ? x : alpha * expm1f(x); }
D float gelu_tanh_backward(float dy, float x) {
#if defined(ROUNDED) || defined(NARROW)
  float gate = gelu_tanh_gate(x);
  float inner = 1.5957691216057308f * (1.0f + 0.134145f * x * x);
  return dy * gate * (1.0f + x * (1.0f - gate) * inner);
#else
  float tanh = tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x));
  float inner = 0.79788456080286536f * (1.0f + 0.134145f * x * x);
  return dy * 0.5f * (1.0f + tanh + x * (1.0f - tanh * tanh) * inner);
#endif
}
D float silu_backward(float dy, float x) {
  float gate = sigmoid(x);
  return dy * gate * (1.0f + x * (1.0f - gate));
}
// The weight of the nth of four neighbours, of which two lie t behind and 1 - t before a place.
D float cubic(float t, u32 nth) {
  float x = nth == 0 ? t + 1.0f : nth == 1 ? t : nth == 2 ? 1.0f - t : 2.0f - t;
  if (nth == 1 || nth == 2) return (1.25f * x - 2.25f) * x * x + 1.0f;
  return ((-0.75f * x + 3.75f) * x - 6.0f) * x + 3.0f;
}
template <class T> D float rounded(float x) {
  T y;
  put(y, x);
  return get(y);
}
template <class T> D float quantized(float x) {
  return rounded<T>(x - x != 0.0f ? bits_float(0x7fc00000u) : x);
}
D int rounded8(float x) {  // NaN is 0, as torch's kernels and the reference have it
  return x != x ? 0 : (int)fminf(fmaxf(rintf(x), -128.0f), 127.0f);
}
""".replace("THRESHOLD", f"{float(SOFTPLUS_THRESHOLD)}f")

Code = Callable[[Sequence[str], Mapping[str, Any]], str]


def number(value: float) -> str:
    """A number as C++ has it, to the last bit of a float32; one beyond these is an infinity."""
    if math.isfinite(value):
        value = float(torch.tensor(value, dtype=torch.float32, device="cpu"))
    if value != value or value in (float("inf"), float("-inf")):
        bits = 0x7FC00000 if value != value else 0x7F800000 if value > 0 else 0xFF800000
        return f"bits_float({bits:#x}u)"
    return f"{value.hex()}f" if math.copysign(1.0, value) > 0 else f"({value.hex()}f)"


def _call(name: str) -> Code:
    return lambda args, attrs: f"{name}({', '.join(args)})"


def _infix(sign: str) -> Code:
    return lambda args, attrs: f"({args[0]} {sign} {args[1]})"


def _clamp(args: Sequence[str], attrs: Mapping[str, Any]) -> str:
    (x,) = args
    if attrs["min"] is not None:
        x = f"larger({x}, {number(attrs['min'])})"
    if attrs["max"] is not None:
        x = f"smaller({x}, {number(attrs['max'])})"
    return x


def _leaky_relu(args: Sequence[str], attrs: Mapping[str, Any]) -> str:
    return f"({args[0]} > 0.0f ? {args[0]} : {args[0]} * {number(attrs['negative_slope'])})"


def _relu_backward(args: Sequence[str], attrs: Mapping[str, Any]) -> str:
    slope = attrs["negative_slope"]
    if not slope:
        return f"({args[1]} <= 0.0f ? 0.0f : {args[0]})"
    return f"({args[1]} > 0.0f ? {args[0]} : {number(slope)} * {args[0]})"


def _batch_norm(args: Sequence[str], attrs: Mapping[str, Any]) -> str:
    x, mean, var, weight, bias = args
    made = f"({x} - {mean}) * rsqrtf({var} + {number(attrs['eps'])})"
    if weight:
        made += f" * {weight}"
    return f"({made} + {bias})" if bias else f"({made})"


def _quantize(args: Sequence[str], attrs: Mapping[str, Any]) -> str:
    x = f"({args[0]} / {args[1]})" if args[1] else args[0]
    if attrs["dtype"] == "int8":
        return f"rounded8({x})"
    return f"quantized<{MEMORY[getattr(torch, attrs['dtype'])]}>({x})"


#: C++ for an op on single elements, from C++ for its operands ("" at an open port).
RULES: Mapping[str, Code] = {
    **{name: _infix(sign) for name, sign in {"add": "+", "sub": "-", "mul": "*"}.items()},
    "div": _call("divided"),
    **{"bias": _infix("+"), "scale": _infix("*"), "dequantize": _infix("*")},
    **{
        name: _infix(sign) for name, sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}.items()
    },
    **{name: _infix(sign) for name, sign in {"gt": ">", "ge": ">=", "logical_and": "&&"}.items()},
    "logical_or": _infix("||"),
    "logical_not": lambda args, attrs: f"(!{args[0]})",
    **{name: _call(name + "f") for name in ("tanh", "log", "sqrt", "rsqrt", "erf", "pow")},
    **{name: _call(name) for name in ("sigmoid", "silu", "gelu", "gelu_tanh", "mish")},
    **{name: _call(name) for name in ("gelu_backward", "gelu_tanh_backward", "silu_backward")},
    "exp": _call("power"),
    "maximum": _call("larger"),
    "minimum": _call("smaller"),
    "abs": _call("fabsf"),
    "relu": lambda args, attrs: f"larger({args[0]}, 0.0f)",
    "leaky_relu": _leaky_relu,
    "elu": lambda args, attrs: f"elu({args[0]}, {number(attrs['alpha'])})",
    "softplus": lambda args, attrs: f"softplus({args[0]}, {number(attrs['beta'])})",
    "clamp": _clamp,
    "relu_backward": _relu_backward,
    "identity": lambda args, attrs: args[0],
    "cast": lambda args, attrs: args[0],
    "to_float": lambda args, attrs: f"(float){args[0]}",
    "neg": lambda args, attrs: f"(-{args[0]})",
    "reciprocal": lambda args, attrs: f"(1.0f / {args[0]})",
    "where": lambda args, attrs: f"({args[0]} ? {args[1]} : {args[2]})",
    "batch_norm": _batch_norm,
    "batch_norm_apply": lambda args, attrs: (
        f"(({args[0]} - {args[1]}) * {args[2]} * {args[3]} + {args[4]})"
    ),
    "quantize": _quantize,
}

#: Reductions over the threads of a team, in the same order at every run.
TEAM = r"""
struct Add { static D_ float of(float a, float b) { return a + b; } };
struct Larger { static D_ float of(float a, float b) { return larger(a, b); } };
struct Smaller { static D_ float of(float a, float b) { return smaller(a, b); } };
template <class F, int T> static D_ float team(float x) {
#pragma unroll
  for (int at = (T < 32 ? T : 32) / 2; at; at /= 2) x = F::of(x, __shfl_xor_sync(~0u, x, at));
  if (T > 32) {
    __shared__ float parts[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[threadIdx.x / T * (T / 32) + threadIdx.x % (T > 32 ? T / 32 : 1)];
#pragma unroll
    for (int at = T / 64; at; at /= 2) x = F::of(x, __shfl_xor_sync(~0u, x, at));
  }
  return x;
}
""".replace("D_", "__device__ __forceinline__")
