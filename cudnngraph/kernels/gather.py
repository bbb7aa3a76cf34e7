"""What a loop gathers of a value: one reduction, or two numbers that belong together.

These are a mean and the squares around it, or the largest element and the sum of powers of what is
less. Partial results of chunks are put together in a fixed order. Those of a mean and its squares
are counts, means and squares, which Welford's update keeps exact far from zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .scalars import number
from .tape import Mean, Powers, Reduce, Squares, Value

#: What a reduction starts with, and the name of how two numbers of it become one.
KINDS: Mapping[str, tuple[str, str]] = {
    "sum": ("0.0f", "Add"),
    "max": (number(float("-inf")), "Larger"),
    "min": (number(float("inf")), "Smaller"),
}


@dataclass(frozen=True)
class Gather:
    """What a loop gathers of one value: a reduction, the mean and the squares around it, or the
    largest element and the sum of powers."""

    values: tuple[Value, ...]

    @property
    def operand(self) -> Value:
        """The value that is reduced."""
        last = self.values[-1]
        assert isinstance(last, Reduce)
        both = self.moments or self.peaks
        return last.of if both and isinstance(last, (Squares, Powers)) else last.operand

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that are reduced."""
        last = self.values[-1]
        assert isinstance(last, Reduce)
        return last.dims

    @property
    def moments(self) -> bool:
        """Whether it is a mean and squares, gathered as Welford does."""
        return isinstance(self.values[0], Mean)

    @property
    def peaks(self) -> bool:
        """Whether it is the largest element and the sum of powers."""
        return len(self.values) == 2 and isinstance(self.values[1], Powers)

    @property
    def parts(self) -> int:
        """The numbers of a partial result that are kept: of moments the mean and the squares, since
        the count is known."""
        return 2 if self.moments or self.peaks else 1

    @property
    def names(self) -> tuple[str, ...]:
        """C++ for these numbers, with room for the name of both."""
        if self.parts == 1:
            return ("{}",)
        return ("{}.mean", "{}.squares") if self.moments else ("{}.most", "{}.sum")

    @property
    def results(self) -> tuple[str, ...]:
        """C++ for the values, from the name of what all parts come to."""
        return ("{}.most", "{}.total()") if self.peaks else self.names[-len(self.values) :]

    @property
    def kind(self) -> tuple[str, str, str]:
        """The C++ type, what it starts with, and the name of how two become one."""
        if self.moments:
            return "Moments", "Moments(0.0f, 0.0f, 0.0f)", "Merged"
        if self.peaks:
            return "Peak", f"Peak({KINDS['max'][0]}, 0.0f)", "Higher"
        (value,) = self.values
        assert isinstance(value, Reduce)
        return ("float", *KINDS[value.kind])


def whole(gather: Gather, count: str, parts: Sequence[str]) -> str:
    """C++ for a partial result of so many elements, of its numbers."""
    if gather.moments:
        return f"Moments({count}, {', '.join(parts)})"
    return f"Peak({', '.join(parts)})" if gather.peaks else parts[0]


def team(gather: Gather, threads: int) -> str:
    """The name of the reduction over threads."""
    if gather.peaks:
        return f"peaks<{threads}>"
    return f"moments<{threads}>" if gather.moments else f"team<{gather.kind[2]}, {threads}>"


#: Counts, means and sums of squared differences from them, of parts that are put together.
#: ``one_over`` has the inverse of a count without a branch, that of 1 exactly.
MOMENTS = r"""
static D_ float one_over(float count) {
  const float about = inverse(count);
  return fmaf(about, fmaf(-count, about, 1.0f), about);
}
struct Moments {
  float count, mean, squares;
  D_ Moments(float c, float m, float s) : count(c), mean(m), squares(s) {}
};
struct Merged {
  static D_ Moments of(Moments a, Moments b) {
    const float count = a.count + b.count, apart = b.mean - a.mean;
    const float part = a.count == 0.0f ? 1.0f : b.count * one_over(count);
    return Moments(count, a.mean + apart * part,
                   a.squares + b.squares + apart * (a.count * part) * apart);
  }
};
template <int T> static D_ Moments moments(Moments x) {
#pragma unroll
  for (int at = (T < 32 ? T : 32) / 2; at; at /= 2) {
    const float count = __shfl_xor_sync(~0u, x.count, at);
    const float mean = __shfl_xor_sync(~0u, x.mean, at);
    x = Merged::of(x, Moments(count, mean, __shfl_xor_sync(~0u, x.squares, at)));
  }
  if (T > 32) {
    __shared__ float parts[3][32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      parts[0][threadIdx.x / 32] = x.count;
      parts[1][threadIdx.x / 32] = x.mean;
      parts[2][threadIdx.x / 32] = x.squares;
    }
    __syncthreads();
    const int from = threadIdx.x % (T > 32 ? T / 32 : 1);
    x = Moments(parts[0][from], parts[1][from], parts[2][from]);
#pragma unroll
    for (int at = T / 64; at; at /= 2) {
      const float count = __shfl_xor_sync(~0u, x.count, at);
      const float mean = __shfl_xor_sync(~0u, x.mean, at);
      x = Merged::of(x, Moments(count, mean, __shfl_xor_sync(~0u, x.squares, at)));
    }
  }
  return x;
}
""".replace("D_", "__device__ __forceinline__")

#: What powers are taken from: the largest element. Of elements that all are -inf it is 0, so that
#: their powers are 0, and not those of NaN. ``power_below`` is exp of what is not above 0, for sums
#: that are 1 at least. It is as exact as CUDA's in five instructions, not eight: 2^(x / log 2), and
#: what rounding the quotient has lost.
POWERS = r"""
static D_ float powers_from(float most) { return most == bits_float(0xff800000u) ? 0.0f : most; }
static D_ float power_below(float x) {
#ifdef ROUNDED
  return power(x);
#else
  x = larger(x, -128.0f);
  const float two = x * 1.4426950408889634f, whole = two_to(two);
  return fmaf(whole, fmaf(two, -0.69314718055994531f, x), whole);
#endif
}
""".replace("D_", "__device__ __forceinline__")

#: The largest element and the sum of powers of a team, from those of its threads. A row of -inf has
#: the sum NaN, as exp(-inf + inf) is.
POWERS_OF_TEAM = """\
{{
  const float own = {most};
  {most} = team<Larger, {team}>({most});
  {sum} *= power(own - powers_from({most}));
}}
{sum} = team<Add, {team}>({sum});
if ({most} == bits_float(0xff800000u)) {sum} = bits_float(0x7fc00000u);
"""

#: Largest elements and sums of powers of what is less, of parts that are put together. Where the
#: largest element is infinite the sum is NaN, as exp(inf - inf) is.
PEAKS = r"""
struct Peak {
  float most, sum;
  D_ Peak(float m, float s) : most(m), sum(s) {}
  D_ void add(float x) {
    const float part = x == bits_float(0xff800000u) ? 0.0f : power(-fabsf(x - most));
    sum = x > most ? sum * part + 1.0f : sum + part;
    most = larger(most, x);
  }
  D_ float total() const { return most - most == 0.0f ? sum : bits_float(0x7fc00000u); }
};
struct Higher {
  static D_ Peak of(Peak a, Peak b) {
    const float most = larger(a.most, b.most), level = powers_from(most);
    return Peak(most, a.sum * power(a.most - level) + b.sum * power(b.most - level));
  }
};
template <int T> static D_ Peak peaks(Peak x) {
  const float most = team<Larger, T>(x.most);
  return Peak(most, team<Add, T>(x.sum * power(x.most - powers_from(most))));
}
""".replace("D_", "__device__ __forceinline__")

#: What is kept as memory has it is new to the compiler, which keeps no numbers made of it then.
KEPT = r"""
template <int N, class T> static __device__ __forceinline__ void still_as_read(vec<T, N>& x) {
#pragma unroll
  for (int at = 0; at < sizeof(x) / 4; ++at) asm volatile("" : "+r"(((u32*)&x)[at]));
}
"""

#: The blocks of a cluster wait for each other, and see what all have written.
CLUSTER = r"""
static __device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
"""


def shared_by(text: str) -> list[str]:
    """What functions of a text need of the above, but for moments."""
    names = {"powers_from": POWERS, "Peak": PEAKS, "still_as_read": KEPT, "meet_cluster": CLUSTER}
    peaks = "powers_from" if "Peak" in text else ""
    return [what for name, what in names.items() if name in text or name == peaks]
