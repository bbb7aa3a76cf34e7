"""Gradients of random graphs against torch autograd."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec, canonical_order
from tests.gradients import check_float64, floating_inputs, random_inputs
from tests.samples import F64

SMOOTH = ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus", "elu", "erf", "neg")
KINKED = ("relu", "leaky_relu", "abs", "clamp", "identity")


class Grower:
    """Draws a random graph over one image, (2, 4, 5, 6) to begin with."""

    def __init__(self, draw: Callable[..., int]) -> None:
        self.draw = draw
        self.g = cg.Graph("random")
        self.pool = [self.g.input("x0", (2, 4, 5, 6), F64, layout=self.one("channels_last", None))]
        self.made = 0

    def one(self, *choices):  # type: ignore[no-untyped-def]
        return self.draw(st.sampled_from(choices))

    def new(self, *shape: int) -> cg.Value:
        self.made += 1
        return self.g.input(f"p{self.made}", shape, F64)

    def image(self) -> cg.Value:
        return self.one(*[value for value in self.pool if len(value.shape) == 4])

    def step(self) -> None:
        kind = self.one(
            *("conv", "conv", "conv_transpose", "bias", "scale", "smooth", "smooth", "kinked"),
            *("residual", "broadcast", "arithmetic", "batch_norm", "batch_norm_train", "sdpa"),
            *("reduction", "select", "extremum", "power", "expand", "matmul", "norm", "views"),
            *("concat", "slice"),
        )
        self.pool.append(getattr(self, kind)(self.image()))

    def conv(self, x: cg.Value) -> cg.Value:
        c = x.shape[1]
        groups = self.one(*(n for n in (1, 2, c) if c % n == 0))
        k = groups * self.one(1, 2)
        kernel, stride, dilation = self.one(1, 2, 3), self.one(1, 2), self.one(1, 2)
        reach = dilation * (kernel - 1)
        pads = tuple((self.one(0, 1) + reach // 2, reach - reach // 2) for _ in range(2))
        w = self.new(k, c // groups, kernel, kernel)
        return self.g.conv(x, w, stride=stride, padding=pads, dilation=dilation, groups=groups)

    def conv_transpose(self, x: cg.Value) -> cg.Value:
        c = x.shape[1]
        groups = self.one(*(n for n in (1, 2) if c % n == 0))
        kernel, stride, dilation = self.one(1, 2, 3), self.one(1, 2), self.one(1, 2)
        extra = self.one(*range(max(stride, dilation)))
        # What reaches the stride has to be padded away again.
        pads = tuple((self.one(0, 1), extra // stride * stride) for _ in range(2))
        reach = dilation * (kernel - 1) + 1
        many = zip(x.shape[2:], pads, strict=True)
        if any((n - 1) * stride - sum(pad) + reach + extra < 1 for n, pad in many):
            return self.g.neg(x)
        w = self.new(c, self.one(1, 2), kernel, kernel)
        return self.g.conv_transpose(
            x,
            w,
            stride=stride,
            padding=pads,
            output_padding=extra,
            groups=groups,
            dilation=dilation,
        )

    def vector(self, x: cg.Value) -> cg.Value:
        c = x.shape[1]
        return self.new(c) if self.one(True, False) else self.new(1, c, 1, 1)

    def bias(self, x: cg.Value) -> cg.Value:
        return self.g.bias(x, self.vector(x))

    def scale(self, x: cg.Value) -> cg.Value:
        return self.g.scale(x, self.vector(x))

    def smooth(self, x: cg.Value) -> cg.Value:
        kind = self.one(*SMOOTH)
        return self.g.softplus(x, beta=1.5) if kind == "softplus" else getattr(self.g, kind)(x)

    def kinked(self, x: cg.Value) -> cg.Value:
        kind = self.one(*KINKED)
        if kind == "clamp":
            return self.g.clamp(x, *self.one((-0.4, 0.7), (None, 0.5), (-0.25, None)))
        if kind == "leaky_relu":
            return self.g.leaky_relu(x, self.one(0.1, -0.3))
        return getattr(self.g, kind)(x)

    def residual(self, x: cg.Value) -> cg.Value:
        like = [value for value in self.pool if value.shape == x.shape]
        return self.one(self.g.add, self.g.sub, self.g.mul)(x, self.one(*like))

    def broadcast(self, x: cg.Value) -> cg.Value:
        n, c, h, w = x.shape
        shape = self.one((w,), (h, 1), (c, 1, 1), (n, 1, 1, w), (), (1, c, h, 1))
        other = self.new(*shape)
        return self.one(self.g.add, self.g.mul)(*self.one((x, other), (other, x)))

    def arithmetic(self, x: cg.Value) -> cg.Value:
        return self.one(
            lambda: x / (self.g.exp(x * 0.1) + 1.0),
            lambda: 2.0 - x * 0.5,
            lambda: (x * x + 0.5).log(),
            lambda: (x * x + 0.5).sqrt(),
            lambda: (x * x + 0.5).rsqrt(),
            lambda: (x * x + 1.0).reciprocal(),
        )()

    def power(self, x: cg.Value) -> cg.Value:
        positive = x * x + 0.3
        return self.one(
            lambda: x**2.0,
            lambda: positive**0.7,
            lambda: self.g.pow(positive, self.g.tanh(x)),
            lambda: self.g.pow(1.5, self.g.tanh(x)),
        )()

    def batch_norm(self, x: cg.Value) -> cg.Value:
        mean, var = self.vector(x), self.vector(x)
        affine = [self.vector(x) for _ in range(self.one(0, 1, 2))]
        return self.g.batch_norm(x, mean, var * var + 0.5, *affine, eps=1e-3)

    def batch_norm_train(self, x: cg.Value) -> cg.Value:
        if x.shape[0] * x.shape[2] * x.shape[3] < 2:
            return self.g.neg(x)
        return self.g.batch_norm_train(x, self.vector(x), self.vector(x), eps=0.1)[0]

    def sdpa(self, x: cg.Value) -> cg.Value:
        b, h, s, d = x.shape
        h_kv = self.one(*(n for n in (1, 2, h) if h % n == 0))
        keys, d_v = self.one(3, s, 7), self.one(d, 3)
        k, v = self.new(b, h_kv, keys, d), self.new(b, h_kv, keys, d_v)
        mask = self.one(None, (b, h, s, keys), (1, 1, 1, keys), (s, keys), (b, 1, s, 1))
        return self.g.sdpa(
            x,
            k,
            v,
            None if mask is None else self.new(*mask),
            is_causal=self.one(True, False),
            window=self.one(None, (2, 1), (None, 2)),
            diagonal_alignment=self.one("top_left", "bottom_right"),
        )

    def reduction(self, x: cg.Value) -> cg.Value:
        dims = self.one((1,), (2, 3), (0, 2, 3), (0, 1), None)
        small = self.g.reduction(x, dims, self.one("sum", "mean", "max", "min"), keepdim=True)
        return x - small

    def expand(self, x: cg.Value) -> cg.Value:
        vector = self.g.reduction(x, (0, 2, 3), self.one("mean", "max"))
        return x * self.g.expand(vector, x.shape, (1,))

    def matmul(self, x: cg.Value) -> cg.Value:
        b, h, s, d = x.shape
        shape = self.one((d, 3), (h, d, 3), (1, h, d, 2), (b, 1, d, d))
        if self.one(True, False):
            return x @ self.new(*shape)
        left = self.one((3, s), (b, 1, 2, s))
        return self.new(*left) @ x

    def norm(self, x: cg.Value) -> cg.Value:
        shape = x.shape[self.one(1, 2, 3) :]
        with_bias = [self.new(*shape) for _ in range(self.one(0, 1))]
        return self.one(self.g.layer_norm, self.g.rms_norm)(
            x, self.new(*shape), *with_bias, eps=0.1
        )

    def views(self, x: cg.Value) -> cg.Value:
        b, h, s, d = x.shape
        return self.one(
            lambda: self.g.transpose(x, *self.one((1, 2), (2, 3), (0, 3))),
            lambda: self.g.permute(x, self.one((0, 2, 3, 1), (3, 1, 0, 2))),
            lambda: self.g.reshape(x, self.one((b, h * s, d, 1), (1, b, h, s * d))),
        )()

    def slice(self, x: cg.Value) -> cg.Value:
        dim = self.one(*range(4))
        n = x.shape[dim]
        start = self.one(*range(min(n, 3)))
        return self.g.slice(x, dim, start, self.one(None, n), self.one(1, 2, 3))

    def concat(self, x: cg.Value) -> cg.Value:
        like = [value for value in self.pool if value.shape == x.shape]
        return self.g.concat([x, self.one(*like), x], self.one(0, 1, 3))

    def select(self, x: cg.Value) -> cg.Value:
        other = self.residual(x)
        return self.g.where(self.one(self.g.gt, self.g.le)(x, other), x * 0.5, other)

    def extremum(self, x: cg.Value) -> cg.Value:
        return self.one(self.g.minimum, self.g.maximum)(x, self.one(0.2, x * 0.5, self.residual(x)))

    def finish(self) -> GraphSpec:
        """Output each value of the pool that no later output is computed from.

        An operand may be unused: a random choice may drop it.
        """
        reached: set[str] = set()
        for value in reversed(self.pool[1:]):
            if value.name not in reached:
                self.g.output(f"y{len(self.g._outputs)}", value)
                nodes = canonical_order(self.g._nodes, [value.name])
                reached.update(name for node in nodes for name in node.results)
        return self.g.spec()


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(st.data(), st.integers(1, 10), st.integers(0, 3))
def test_the_gradient_of_a_random_graph_is_torch_autograds(
    data: st.DataObject, steps: int, seed: int
) -> None:
    grower = Grower(data.draw)
    for _ in range(steps):
        grower.step()
    spec = grower.finish()
    inputs = random_inputs(spec, seed)
    gradient = check_float64(spec, inputs)
    # A part of wrt gives the same numbers from no more work.
    some = data.draw(st.sampled_from(floating_inputs(spec)))
    part = check_float64(spec, inputs, (some,), seed)
    assert len(part.backward.nodes) <= len(gradient.backward.nodes)
    extra = len(spec.outputs)
    assert len(part.forward.outputs[extra:]) <= len(gradient.forward.outputs[extra:])
