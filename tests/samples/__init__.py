"""Sample graphs by family: what they are, inputs for them, and what torch would compute.

``enumerate_cases()`` is cheap and makes no tensor; ``make_inputs(case, device, seed)`` fills
tensors of the declared shapes, strides and dtypes, the same values on every device;
``torch_eager(case, inputs)`` is what a user of torch would write in the dtype of the inputs. Run on
``in_float64(inputs)`` it is the yardstick: it shares no code with the package.

The CPU tests run every case, ``tests/deviceless`` lowers each, ``tests/gpu`` runs each on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from tests.samples import (
    attention,
    attention_inputs,
    conv,
    linear,
    loss,
    norm,
    packed,
    pointwise,
    pooling,
    quantize,
    views,
)
from tests.samples.attention import philox_words
from tests.samples.case import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    Case,
    in_float64,
    make_inputs,
    torch_eager,
)
from tests.samples.conv import Conv

__all__ = [
    "ACTIVATIONS",
    "BF16",
    "F16",
    "F32",
    "F64",
    "Case",
    "Conv",
    "enumerate_cases",
    "in_float64",
    "make_inputs",
    "philox_words",
    "torch_eager",
]


def _gradients() -> Iterator[Case]:
    yield from conv.wgrads()
    yield from pooling.resample_gradients()
    yield from loss.softmax_gradients()
    yield from pointwise.reductions()
    yield from pointwise.expands()
    yield from pointwise.activation_gradients()
    yield from norm.training_norms()
    yield from norm.trailing_norm_gradients()
    yield from norm.image_norm_gradients()
    yield from attention.attention_gradients()
    yield from packed.packed_gradients()


@lru_cache(maxsize=1)
def enumerate_cases() -> tuple[Case, ...]:
    """Every case, ids all different. Makes no tensor."""
    cases = (
        *conv.conv_bias_act(),
        *conv.conv_bn_act(),
        *conv.conv_transpose(),
        *linear.matmul(),
        *norm.norms(),
        *norm.normalize(),
        *norm.image_norms(),
        *views.torchs_own(),
        *views.views(),
        *pooling.resamples(),
        *loss.softmaxes(),
        *loss.losses(),
        *loss.others(),
        *attention.sdpa(),
        *packed.packed(),
        *packed.paged(),
        *attention_inputs.ragged(),
        *attention_inputs.rope(),
        *attention_inputs.blocks(),
        *pointwise.pointwise(),
        *_gradients(),
        *quantize.quantized(),
        *linear.grouped(),
    )
    ids = [case.id for case in cases]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    assert not twice, f"case ids declared twice: {twice}"
    return cases
