"""Every sample graph on the CPU: right numbers, right form, and one answer however it is run."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import numerics
from tests.chunks import each_case
from tests.samples import (
    Case,
    enumerate_cases,
    in_float64,
    make_inputs,
    torch_eager,
)

CASES = enumerate_cases()
FAMILIES = ("conv_bias_act", "conv_bn_act", "conv_transpose", "sdpa")


def named_outputs(exe: object, result: object) -> dict[str, torch.Tensor]:
    """Return the results of a call by output name."""
    names = exe.spec.outputs  # type: ignore[attr-defined]
    return dict(zip(names, [result] if len(names) == 1 else result, strict=True))  # type: ignore


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sample_is_within_the_policy_of_float64_and_of_torch(case: Case) -> None:
    inputs = make_inputs(case)
    exe = case.build().compile("cpu")
    outputs = named_outputs(exe, exe(**inputs))
    yardstick = torch_eager(case, in_float64(inputs))
    eager = torch_eager(case, inputs)
    assert set(outputs) == set(yardstick)
    for name, output in outputs.items():
        declared = exe.spec.tensors[name]
        assert output.dtype == declared.dtype
        assert output.stride() == declared.stride
        numerics.check(
            output, yardstick[name], case.dtype, eager[name], terms=case.terms, what=name
        )


@each_case(CASES)
def test_call_run_and_bind_agree_bitwise(case: Case) -> None:
    inputs = make_inputs(case)
    exe = case.build().compile("cpu")
    called = named_outputs(exe, exe(**inputs))

    def blank() -> dict[str, torch.Tensor]:
        return {
            name: torch.empty_strided(out.shape, out.stride(), dtype=out.dtype).fill_(
                1 if out.dtype == torch.bool else 77
            )
            for name, out in called.items()
        }

    ran, bound = blank(), blank()
    exe.run(**inputs, **ran)
    call = exe.bind(**inputs, **bound)
    call()
    call()  # a second time gives the same: nothing accumulates
    for name, out in called.items():
        assert torch.equal(out, ran[name]), name
        assert torch.equal(out, bound[name]), name


def test_the_four_families_have_at_least_150_cases() -> None:
    count = Counter(case.family for case in CASES)
    assert sum(count[family] for family in FAMILIES) >= 150
    assert all(count[family] >= 30 for family in FAMILIES), count


def test_every_family_covers_every_dtype() -> None:
    for family in FAMILIES:
        dtypes = {case.dtype for case in CASES if case.family == family}
        assert dtypes == {torch.float16, torch.bfloat16, torch.float32, torch.float64}, family


def test_declaring_every_sample_makes_no_tensor() -> None:
    class NoTensors(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            raise AssertionError(f"{func} was called")

    with NoTensors():
        for case in enumerate_cases.__wrapped__():
            if case.family != "aten":  # torch is asked there, on tensors without memory
                case.build().spec()


def test_inputs_depend_on_the_seed_and_on_nothing_else() -> None:
    case = CASES[0]
    first, again, other = make_inputs(case), make_inputs(case), make_inputs(case, seed=1)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])


def test_gaps_between_the_elements_of_a_strided_input_hold_nan() -> None:
    case = next(case for case in CASES if case.id == "conv_bias_act-x_is_a_slice-fp16")
    x = make_inputs(case)["x"]
    memory = x.as_strided((x.untyped_storage().nbytes() // 2,), (1,))
    assert x.isfinite().all()
    assert int(memory.isnan().sum()) == memory.numel() - x.numel() > 0


def test_packed_inputs_are_slices_of_one_buffer() -> None:
    case = next(case for case in CASES if case.id == "sdpa-packed-fp16")
    inputs = make_inputs(case)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    width = q.shape[1] * q.shape[3] * q.element_size()
    assert k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == width
    assert q.stride() == k.stride() == v.stride()
    assert not torch.equal(q, k)


def test_expanded_inputs_store_their_elements_once() -> None:
    case = next(case for case in CASES if case.id == "sdpa-expanded_kv-fp16")
    k = make_inputs(case)["k"]
    assert k.stride(1) == 0
    assert k.untyped_storage().nbytes() == k[:, 0].numel() * k.element_size()


def test_rows_without_a_key_give_zeros_and_minus_infinity() -> None:
    case = next(case for case in CASES if case.id == "sdpa-lse_bottom_right_long_q-fp16")
    o, lse = case.build().compile("cpu")(**make_inputs(case))
    dead = 64 - 32  # rows before the bottom-right diagonal
    assert torch.count_nonzero(o[:, :, :dead]) == 0
    assert bool((lse[:, :, :dead] == -math.inf).all())
    assert bool(lse[:, :, dead:].isfinite().all())
