"""The policy: its defaults, how options and torch's own switch are read, and that it is frozen."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.device import tf32
from cudnngraph.runtime.compile import resolve_policy


def graph() -> cg.Graph:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 2, 4), torch.float32), g.input("w", (2, 2, 3), torch.float32)
    g.output("y", g.conv(x, w))
    return g


@pytest.fixture
def tf32_switch() -> object:
    """torch's switch, put back after the test."""
    before = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32 = before


def test_the_defaults_ask_for_nothing_special() -> None:
    assert dataclasses.asdict(cg.Policy()) == {
        "tune": None,
        "allow_tf32": None,
        "deterministic": False,
        "workspace_limit": None,
        "fallback": "partition",
        "kernels": None,
        "exclude_engines": (),
        "verify": None,
        "max_candidates": 12,
        "budget_s": 8.0,
        "total_s": 45.0,
    }


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cg.Policy().deterministic = True  # type: ignore[misc]


@pytest.mark.parametrize("tune", ["heuristic", "autotune", "cached"])
def test_how_a_plan_is_found_does_not_change_what_it_is_cached_by(tune: str) -> None:
    exe = graph().compile("cpu", tune=tune)
    assert exe.policy.tune == tune
    assert exe.key == graph().compile("cpu").key


def test_a_policy_that_is_silent_on_tuning_follows_the_setting() -> None:
    for tune in ("heuristic", "autotune", "cached"):
        with settings.override(tune=tune):
            assert resolve_policy(None, {}, graph().spec()).tune == tune
            asked = resolve_policy(cg.Policy(tune="heuristic"), {}, graph().spec())
            assert asked.tune == "heuristic"


@pytest.mark.parametrize("tune", ["fastest", "", "Cached", True])
def test_another_tune_is_refused(tune: object) -> None:
    expected = "is unknown; expected 'heuristic', 'autotune' or 'cached'"
    with pytest.raises(cg.PolicyError, match=f"tune={tune!r} {expected}"):
        cg.Policy(tune=tune)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_candidates", 0, "max_candidates=0; expected a whole number >= 1"),
        ("max_candidates", True, "max_candidates=True; expected a whole number >= 1"),
        ("max_candidates", 2.0, "max_candidates=2.0; expected a whole number >= 1"),
        ("max_candidates", None, "max_candidates=None; expected a whole number >= 1"),
        ("budget_s", -0.5, "budget_s=-0.5; expected seconds >= 0"),
        ("budget_s", float("nan"), "budget_s=nan; expected seconds >= 0"),
        ("budget_s", float("inf"), "budget_s=inf; expected seconds >= 0"),
        ("budget_s", False, "budget_s=False; expected seconds >= 0"),
        ("budget_s", "8", "budget_s='8'; expected seconds >= 0"),
        ("total_s", -1, "total_s=-1; expected seconds >= 0"),
        ("total_s", None, "total_s=None; expected seconds >= 0"),
        ("exclude_engines", "eng8", "exclude_engines='eng8'; expected names like ('eng8',)"),
        ("exclude_engines", (8,), "exclude_engines=(8,); expected names like ('eng8',)"),
        ("exclude_engines", ("",), "exclude_engines=('',); expected names like ('eng8',)"),
        ("exclude_engines", ("44",), "exclude_engines=('44',); expected names like ('eng8',)"),
        ("exclude_engines", ("Eng8",), "exclude_engines=('Eng8',); expected names like ('eng8',)"),
        ("exclude_engines", ("eng",), "exclude_engines=('eng',); expected names like ('eng8',)"),
    ],
)
def test_a_search_without_sense_is_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(cg.PolicyError) as caught:
        cg.Policy(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "value", [{"max_candidates": 1}, {"total_s": 2.5}, {"budget_s": 0}, {"budget_s": 2.5}]
)
def test_the_least_search_is_allowed(value: dict[str, float]) -> None:
    policy = cg.Policy(**value)  # type: ignore[arg-type]
    assert {name: getattr(policy, name) for name in value} == value


def test_excluded_engines_are_a_set_whatever_they_were_given_as() -> None:
    policy = cg.Policy(exclude_engines=["eng9", "eng8", "eng9"])  # type: ignore[arg-type]
    assert policy.exclude_engines == ("eng8", "eng9")
    assert policy == cg.Policy(exclude_engines=("eng8", "eng9"))
    assert hash(policy) == hash(cg.Policy(exclude_engines=("eng9", "eng8")))


@pytest.mark.parametrize("switch", [True, False])
def test_tf32_follows_the_switch_of_torch_where_the_policy_is_silent(
    switch: bool, tf32_switch: object
) -> None:
    torch.backends.cudnn.allow_tf32 = switch
    assert resolve_policy(None, {}, graph().spec()).allow_tf32 is switch
    assert graph().compile("cpu").policy.allow_tf32 is switch


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("op", ["sdpa", "matmul"])
def test_attention_and_products_follow_torchs_switch_for_matmuls(
    op: str, switch: bool, tf32_switch: object
) -> None:
    g = cg.Graph(op)
    q = g.input("q", (1, 1, 8, 8), torch.float32)
    g.output("o", g.sdpa(q, q, q) if op == "sdpa" else q @ q)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = not switch
    torch.backends.cuda.matmul.allow_tf32 = switch
    try:
        assert g.compile("cpu").policy.allow_tf32 is switch
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("switch", [True, False])
def test_the_switch_says_nothing_of_16_bit_data(switch: bool, tf32_switch: object) -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 2, 4), torch.float16), g.input("w", (2, 2, 3), torch.float16)
    g.output("y", g.conv(x, w))
    torch.backends.cudnn.allow_tf32 = switch
    assert g.compile("cpu").policy.allow_tf32 is False


@pytest.mark.parametrize("asked", [True, False])
def test_a_policy_that_says_so_overrides_the_switch(asked: bool, tf32_switch: object) -> None:
    torch.backends.cudnn.allow_tf32 = not asked
    assert resolve_policy(cg.Policy(allow_tf32=asked), {}, graph().spec()).allow_tf32 is asked
    assert graph().compile("cpu", allow_tf32=asked).policy.allow_tf32 is asked


def test_the_switch_is_read_at_compile_and_not_later(tf32_switch: object) -> None:
    torch.backends.cudnn.allow_tf32 = True
    exe = graph().compile("cpu")
    torch.backends.cudnn.allow_tf32 = False
    assert exe.policy.allow_tf32 is True
    assert graph().compile("cpu").key != exe.key


def test_options_of_compile_override_the_fields_of_the_policy() -> None:
    policy = cg.Policy(workspace_limit=10, deterministic=True)
    resolved = graph().compile("cpu", policy=policy, workspace_limit=20).policy
    assert (resolved.workspace_limit, resolved.deterministic) == (20, True)
    assert policy.workspace_limit == 10


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(cg.Policy)], ids=lambda name: name
)
def test_every_field_is_documented(field: str) -> None:
    assert f"- ``{field}``:" in (cg.Policy.__doc__ or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_compiling_for_a_gpu_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(cg.BackendUnavailable, match=r"no CUDA device; compile\(device='cpu'\)"):
        graph().compile("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs switches that nothing else reads")
def test_a_torch_step_puts_torchs_switches_back(tf32_switch: object) -> None:
    for outside in (True, False):
        torch.backends.cudnn.allow_tf32 = outside
        before = torch.backends.cuda.matmul.allow_tf32
        for inside in (True, False):
            with tf32.scope(inside):
                assert torch.backends.cudnn.allow_tf32 is inside
                assert torch.backends.cuda.matmul.allow_tf32 is inside
            assert torch.backends.cudnn.allow_tf32 is outside
            assert torch.backends.cuda.matmul.allow_tf32 is before
