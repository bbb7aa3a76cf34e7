"""Keys of the numbers that a window covers: integers, the largest of which is the maximum.

A key is a number in the order of integers, zeros of both signs alike and all NaN above all others,
and below these bits the place of it. Of equal numbers the first one has the largest key, of NaN the
last one, as torch finds maxima. Numbers of 16 bits leave 13 bits of a float32 for the place; those
of float32 have keys of 64 bits.
"""

from __future__ import annotations

PLACES = 1 << 13  # that a key tells apart

NARROW = r"""
typedef int Key;
D Key lowest() { return (int)0x80000000u; }
D Key key_of(float x, u32 place) {
#ifdef __CUDA_ARCH__
  const u32 bits = float_bits(x + 0.0f);  // of NaN 0x7fffffff
#else
  const u32 bits = x == x ? float_bits(x + 0.0f) : 0x7fffffffu;
#endif
  return (int)(bits ^ ((u32)((int)bits >> 31) & 0x7fffe000u) ^ (0x1fffu - place));
}
D u32 place_of(Key x) { return (x > 0x7f801fff ? (u32)x : ~(u32)x) & 0x1fffu; }
"""
WIDE = r"""
typedef i64 Key;
D Key lowest() { return (i64)0x8000000000000000ull; }
D Key key_of(float x, u32 place) {
  const u32 bits = x == x ? float_bits(x + 0.0f) : 0x7fffffffu;
  const u32 high = bits ^ ((u32)((int)bits >> 31) & 0x7fffffffu);
  return (i64)((u64)high << 32 | (x == x ? 0x1fffu - place : place));
}
D u32 place_of(Key x) {
  return ((int)(x >> 32) > 0x7f800000 ? (u32)x : ~(u32)x) & 0x1fffu;
}
"""
LARGER = "D Key larger_key(Key a, Key b) { return a > b ? a : b; }\n"
