"""The table of plans that are wrong: what it picks out, and for which versions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.known_bad import TABLE, why_bad
from tests.reported import EXAMPLES

V919 = 91900
H200 = 90


def conv(y_layout: str = "channels_last", act: str | None = "silu") -> cg.GraphSpec:
    g = cg.Graph("g")
    x = g.input("x", (2, 16, 8, 8), torch.float16, layout="channels_last")
    w = g.input("w", (32, 16, 3, 3), torch.float16, layout="channels_last")
    g.output("y", g.conv_bias_act(x, w, activation=act), layout=y_layout)
    return g.spec()


def attention(lengths: bool, finite: bool = False) -> cg.GraphSpec:
    g = cg.Graph("g")
    q = g.input("q", (2, 4, 64, 64), torch.float16)
    n = g.input("n", (2,), torch.int32) if lengths else None
    g.output("o", g.sdpa(q, q, q, seq_len_kv=n, finite_padding=finite))
    return g.spec()


def packed(finite: bool = False) -> cg.GraphSpec:
    g = cg.Graph("g")
    q = g.input("q", (128, 4, 64), torch.float16)
    ends = g.input("ends", (3,), torch.int32)
    g.output("o", g.sdpa_varlen(q, q, q, ends, ends, 64, 64, finite_padding=finite))
    return g.spec()


def paged(finite: bool = False) -> cg.GraphSpec:
    g = cg.Graph("g")
    q, cache = (
        g.input("q", (2, 4, 1, 64), torch.float16),
        g.input("c", (8, 4, 16, 64), torch.float16),
    )
    table, n = g.input("t", (2, 4), torch.int32), g.input("n", (2,), torch.int32)
    g.output("o", g.sdpa_paged(q, cache, cache, table, n, finite_padding=finite))
    return g.spec()


def two_scaled(bias_first: bool) -> cg.GraphSpec:
    g = cg.Graph("g")
    x = g.input("x", (2, 16, 8, 8), torch.float16)
    w = g.input("w", (32, 16, 3, 3), torch.float16)
    z = g.input("z", (2, 32, 6, 6), torch.float16)
    b = g.input("b", (32,), torch.float16)
    y = g.conv(x, w) * 0.5
    y = g.bias(y, b) + z * 2.0 if bias_first else g.bias(y + z * 2.0, b)
    g.output("y", g.relu(y))
    return g.spec()


def bad(
    spec: cg.GraphSpec,
    engine: int,
    version: int = V919,
    capability: int = H200,
    allow_tf32: bool = False,
) -> str | None:
    return why_bad(spec, engine, version, capability=capability, allow_tf32=allow_tf32)


def test_engine_8_is_barred_where_the_output_is_not_channels_last() -> None:
    reason = bad(conv("contiguous"), 8)
    assert reason is not None and "writes channels_last whatever the strides" in reason
    assert bad(conv("channels_last"), 8) is None
    assert bad(conv("contiguous"), 4) is None


def test_engines_2_and_9_are_barred_from_attention_with_lengths_of_keys() -> None:
    for engine in (2, 9):
        reason = bad(attention(True), engine)
        assert reason is not None and "past a sequence's end" in reason
        assert bad(attention(False), engine) is None
    assert bad(attention(True), 8) is None
    for spec in (packed(), paged()):
        assert bad(spec, 9) is not None and bad(spec, 8) is None
    for spec in (attention(True, finite=True), packed(finite=True), paged(finite=True)):
        assert bad(spec, 9) is None, "what is past the ends is promised to be harmless"


def test_the_engines_that_crash_on_two_factors_are_barred() -> None:
    for engine in (0, 11, 52):
        reason = bad(two_scaled(bias_first=False), engine)
        assert reason is not None and "crash" in reason
        assert bad(two_scaled(bias_first=True), engine) is None
    assert bad(two_scaled(bias_first=False), 7) is None


def test_engine_8_is_barred_where_a_residual_is_changed_before_it_is_added() -> None:
    def residual(factor: float) -> cg.GraphSpec:
        g = cg.Graph("g")
        x = g.input("x", (2, 16, 8, 8), torch.float16, layout="channels_last")
        w = g.input("w", (32, 16, 3, 3), torch.float16, layout="channels_last")
        z = g.input("z", (2, 32, 6, 6), torch.float16, layout="channels_last")
        g.output("y", g.conv_bias_act(x, w, residual=z, alpha1=0.5, alpha2=factor))
        return g.spec()

    reason = bad(residual(-1.5), 8)
    assert reason is not None and "residual" in reason
    assert bad(residual(1.0), 8) is None
    assert bad(residual(-1.5), 7) is None


def product(dtype: torch.dtype) -> cg.GraphSpec:
    g = cg.Graph("g")
    x, w = g.input("x", (64, 32), dtype), g.input("w", (32, 16), dtype)
    g.output("y", x @ w if dtype == torch.int8 else g.relu(x @ w))
    return g.spec()


def test_engine_0_is_barred_from_products_in_true_float32() -> None:
    reason = bad(product(torch.float32), 0)
    assert reason is not None and "multiplies float32 in TF32" in reason
    assert bad(product(torch.float32), 4) is None
    assert bad(product(torch.float16), 0) is None
    assert bad(conv(), 0) is None


BENDS: dict[str, Callable[[cg.Graph, cg.Value], cg.Value]] = {
    "leaky_relu": lambda g, y: g.leaky_relu(y),
    "gelu": lambda g, y: g.gelu(y),
    "relu6": lambda g, y: g.relu6(y),
    "clamp_low": lambda g, y: g.clamp(y, -0.5, None),
    "clamp_high": lambda g, y: g.clamp(y, None, 0.5),
}


@pytest.mark.parametrize("name", BENDS)
def test_engine_0_is_barred_from_products_that_bend(name: str) -> None:
    def behind(kind: str, op: Callable[[cg.Graph, cg.Value], cg.Value]) -> cg.GraphSpec:
        g = cg.Graph("g")
        shapes = {"matmul": ((8, 16), (16, 8)), "conv": ((2, 8, 6, 6), (8, 8, 3, 3))}[kind]
        given = [g.input(*each, torch.float16) for each in zip("xw", shapes, strict=True)]
        g.output("y", op(g, getattr(g, kind)(*given)))
        return g.spec()

    reason = bad(behind("matmul", BENDS[name]), 0)
    assert reason is not None and "makes a ReLU of a leaky and of a clipped one" in reason
    assert bad(behind("matmul", BENDS[name]), 4) is None
    assert bad(behind("matmul", lambda g, y: g.relu(y)), 0) is None
    assert bad(behind("matmul", lambda g, y: g.clamp(y, 0.0, None)), 0) is None
    assert bad(behind("conv", BENDS[name]), 0) is None


def test_engine_4_is_barred_from_gradients_of_weights_beside_what_broadcasts() -> None:
    def gradient(shape: tuple[int, ...]) -> cg.GraphSpec:
        g = cg.Graph("g")
        dy, x = (g.input(name, (2, 8, 6, 6), torch.float16) for name in ("dy", "x"))
        dw = g.conv_wgrad(dy, x, kernel=3, padding=1)
        g.output("dw", dw * (g.input("s", shape, torch.float16) if shape else 0.5))
        return g.spec()

    for shape in ((1, 8, 1, 1), (8, 1, 1, 1)):
        reason = bad(gradient(shape), 4)
        assert reason is not None and "broadcast from the wrong place" in reason
        assert bad(gradient(shape), 2) is None
    assert bad(gradient((8, 8, 3, 3)), 4) is None
    assert bad(gradient(()), 4) is None


def sums(dtype: torch.dtype, kept: bool = True) -> cg.GraphSpec:
    """A convolution; its result as it is, or scaled within the plan."""
    g = cg.Graph("g")
    x = g.input("x", (2, 16, 8, 8), dtype, layout="channels_last")
    w = g.input("w", (32, 16, 3, 3), dtype, layout="channels_last")
    y = g.conv(x, w)
    g.output("y", y if kept else g.dequantize(y, g.input("s", (), torch.float32)))
    return g.spec()


def test_engines_0_and_28_are_barred_from_the_sums_of_int8_convolutions() -> None:
    for engine in (0, 28):
        reason = bad(sums(torch.int8), engine)
        assert reason is not None and "int32 sums wrong" in reason
        assert bad(sums(torch.int8, kept=False), engine) is None
        assert bad(sums(torch.float16), engine) is None
        assert bad(product(torch.int8), engine) is None
    assert bad(sums(torch.int8), 7) is None


def test_what_is_wrong_for_its_tf32_alone_is_right_where_tf32_is_allowed() -> None:
    assert bad(product(torch.float32), 0, allow_tf32=True) is None
    assert [entry.tf32 for entry in TABLE].count(False) == 1
    for allowed in (False, True):
        assert bad(conv("contiguous"), 8, allow_tf32=allowed) is not None


def test_what_is_not_known_of_a_release_or_a_gpu_counts_as_wrong() -> None:
    for version in (91002, V919, 92600, 92801):
        for capability in (80, H200, 100, 120):
            assert bad(conv("contiguous"), 8, version, capability) is not None


def test_an_entry_covers_what_it_was_measured_on_and_says_where_it_is_from() -> None:
    for entry in TABLE:
        assert entry.source and entry.reason
        for version, capability in entry.measured:
            engine = min(entry.engines or {0})
            assert entry.covers(engine, version, capability, entry.tf32 is True), entry.reason
        assert entry.measured or entry.until or entry.gpus, "of others' reports the scope is known"


def test_an_entry_that_was_measured_has_an_example_that_the_gpu_tier_runs() -> None:
    specs = [graph.spec() for example in EXAMPLES for graph in example.build()]
    for entry in TABLE:
        if entry.measured:
            assert any(map(entry.applies, specs)), f"tests/reported.py has no graph: {entry.reason}"


def gapped(gap: int, op: str = "matmul") -> cg.GraphSpec:
    """A product, or a convolution, that reads rows with ``gap`` elements between them."""
    g = cg.Graph("g")
    if op == "matmul":
        x = g.input("x", (64, 32), torch.float16, stride=(32 + gap, 1))
        g.output("y", g.relu(x @ g.input("w", (32, 16), torch.float16)))
    else:
        stride = (64 * (32 + gap), 1, 8 * (32 + gap), 32 + gap)
        x = g.input("x", (2, 32, 8, 8), torch.float16, stride=stride)
        g.output("y", g.conv(x, g.input("w", (16, 32, 3, 3), torch.float16)))
    return g.spec()


def test_engine_11_is_barred_from_products_with_gaps_below_9_24() -> None:
    reason = bad(gapped(8), 11, 92000)
    assert reason is not None and "operands with gaps for dense ones" in reason
    assert bad(gapped(8), 11, V919) is None, "has no such engine"
    assert bad(gapped(8), 11, 92400) is None
    assert bad(gapped(0), 11, 92000) is None
    assert bad(gapped(8), 4, 92000) is None
    assert bad(gapped(8, "conv"), 11, 92000) is None
    g = cg.Graph("repeated")
    x = g.input("x", (4, 8, 16), torch.float16, stride=(0, 16, 1))
    g.output("y", x @ g.input("w", (4, 16, 8), torch.float16))
    assert bad(g.spec(), 11, 92000) is None, "what is repeated has no gaps"


def test_products_with_pointwise_ops_are_barred_on_one_architecture_below_9_23_1() -> None:
    for engine in (0, 4, 11):
        reason = bad(product(torch.float16), engine, capability=120)
        assert reason is not None and "read outside of their operands" in reason
        assert bad(product(torch.float16), engine, version=92301, capability=120) is None
        assert bad(product(torch.float16), engine) is None
        assert bad(product(torch.int8), engine, capability=120) is None


def volumes(op: str, dtype: torch.dtype, kernel: int = 3) -> cg.GraphSpec:
    g = cg.Graph("g")
    x = g.input("x", (1, 8, 6, 6, 6), dtype)
    if op == "conv_wgrad":
        g.output("y", g.conv_wgrad(x, x, kernel=kernel, padding=kernel // 2))
    else:
        g.output("y", getattr(g, op)(x, g.input("w", (8, 8, *(kernel,) * 3), dtype)))
    return g.spec()


@pytest.mark.parametrize("op", ["conv", "conv_transpose", "conv_wgrad"])
def test_convolutions_of_volumes_are_barred_on_the_releases_that_have_them_wrong(op: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for engine in (0, 4, 28):
            reason = bad(volumes(op, dtype), engine, version=91002)
            assert reason is not None and "large 16-bit volumes" in reason
        versions = {90701: False, 90800: True, 91499: True, 91500: False, V919: False}
        for version, wrong in versions.items():
            assert (bad(volumes(op, dtype), 4, version) is not None) is wrong
        assert bad(volumes(op, dtype, kernel=1), 4, version=91002) is None
    wide = volumes(op, torch.float32)
    reason = bad(wide, 4, version=91501, allow_tf32=True)
    assert reason is not None and "TF32 kernel for convolutions of volumes" in reason
    assert bad(wide, 4, version=91501) is None, "without TF32 the kernel is not asked"
    assert bad(wide, 4, version=91600, allow_tf32=True) is None
    assert bad(conv(), 4, version=91002) is None


def test_the_composition_with_both_factors_avoids_the_crashing_pattern() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 16, 8, 8), torch.float16)
    w = g.input("w", (32, 16, 3, 3), torch.float16)
    z = g.input("z", (2, 32, 6, 6), torch.float16)
    b = g.input("b", (32,), torch.float16)
    g.output("y", g.conv_bias_act(x, w, b, residual=z, alpha1=0.5, alpha2=2.0))
    assert bad(g.spec(), 11) is None
