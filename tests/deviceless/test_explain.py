"""`cg.explain` and the command `explain`, against the real cuDNN library."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import deviceless, env
from cudnngraph.backend.deviceless import propose_for
from cudnngraph.cache.measured import Measured
from cudnngraph.cli import main
from cudnngraph.cli.explain import _print_plans as print_plans
from cudnngraph.explain.offline import Explanation
from cudnngraph.select import heuristic
from cudnngraph.select.remembered import keep_settled
from cudnngraph.select.settled import TORCH
from cudnngraph.settings import override

F16, F32 = torch.float16, torch.float32


def conv(dtype: torch.dtype = F16, act: str | None = None, z: str | None = None) -> cg.Graph:
    """A convolution; with ``act`` an activation behind it, with ``z`` a residual of that layout."""
    g = cg.Graph("block")
    x = g.input("x", (8, 32, 14, 14), dtype, layout="channels_last")
    w = g.input("w", (32, 32, 3, 3), dtype, layout="channels_last")
    y = g.conv(x, w, padding=1)
    if z is not None:
        y = g.add(y, g.input("z", (8, 32, 14, 14), dtype, layout=z))
    g.output("y", g.activation(y, act))
    return g


# -- the function ------------------------------------------------------------------------------


def test_a_graph_and_its_spec_are_explained_alike() -> None:
    graph = conv()
    assert cg.explain(graph) == cg.explain(graph.spec())


def test_the_text_names_gpu_library_graph_and_plans() -> None:
    found = cg.explain(conv())
    text = str(found)
    first = found.steps[0].first
    assert first is not None
    for part in (
        "NVIDIA H200 (nvidia-h200)",
        f"frontend {env.frontend_version()}",
        "y = conv(x, w, padding=((1, 1), (1, 1)))",
        f"step 1 of 1: conv: cuDNN, {len(found.steps[0].plans)} plans; takes number 1",
        f"1: {first.choice}, workspace {first.workspace_bytes} bytes",
        f"... and {len(found.steps[0].plans) - 5} more",
    ):
        assert part in text


def test_what_was_measured_for_such_a_gpu_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``compile`` follows it: a plan, and a product apart from what stands behind it."""
    graph = conv()
    with override(cache_dir=tmp_path, seeds=False):
        before = cg.explain(graph)
        part, third = before.steps[0].spec, before.steps[0].plans[2]
        memo = Measured(before.policy, deviceless.env_key("nvidia-h200"))
        choice = [third.engine, [list(knob) for knob in third.knobs]]
        built = {"what": "built", "choice": choice, "right": True, "workspace_bytes": 0}
        memo.add(part, built)
        memo.add(part, {"what": "times", "choices": [choice], "times": [5.0], "rounds": 21})
        found = cg.explain(graph)
        (step,) = found.steps
        assert step.first == third and step.plans == before.steps[0].plans
        said = "measured fastest for this step on such a GPU: a search before"
        assert f"takes number 3, {said}\n  3: {third.choice}" in str(found)
        (body,) = found.to_dict()["steps"]
        assert (body["takes"], body["measured"]) == (3, said)
        print_plans(step, 2)
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
        assert [row[0] for row in rows] == ["3", "1"] and "taken" in rows[0]
        assert cg.explain(graph, "nvidia-h100").steps[0].measured == ""
        assert cg.explain(graph, exclude_engines=(f"eng{third.engine}",)).steps[0].measured == ""
        keep_settled(memo, [(part, TORCH)])
        settled = cg.explain(graph, kernels=True)
        assert [each.runs_on for each in settled.steps] == ["torch"]


def test_to_dict_is_json_and_says_what_the_object_says() -> None:
    found = cg.explain(conv())
    body = json.loads(json.dumps(found.to_dict()))
    assert (body["graph"], body["target"], body["whole"]) == ("block", "nvidia-h200", True)
    assert body["cudnn_version"] == env.cudnn_version()
    (step,) = body["steps"]
    assert (step["ops"], step["runs_on"]) == (["conv"], "cuDNN")
    assert step["inputs"]["x"] == "f16[8, 32, 14, 14] channels_last"
    first = found.steps[0].plans[0]
    assert step["plans"][0] == {
        "rank": 1,
        "engine": first.engine,
        "knobs": dict(first.knobs),
        "workspace_bytes": first.workspace_bytes,
        "runtime_compiled": False,
        "allowed": True,
        "reason": "",
    }


def test_the_workspace_is_that_of_the_built_plan() -> None:
    graph = conv()
    plans = cg.explain(graph).steps[0].plans
    lowered, candidates = propose_for(graph.spec(), "nvidia-h200")
    built = {}
    for candidate, plan in zip(candidates, plans, strict=True):
        assert candidate.choice == plan.choice
        if not plan.runtime_compiled:
            lowered.graph.build_plan_at_index(candidate.index)
            size = lowered.graph.get_workspace_size_plan_at_index(candidate.index)
            built[plan.rank] = (size, plan.workspace_bytes)
    assert len(built) > 10
    assert all(size == told for size, told in built.values())


def test_true_float32_bars_the_plans_that_round_to_tf32() -> None:
    loose = cg.explain(conv(F32), allow_tf32=True).steps[0]
    exact = cg.explain(conv(F32), allow_tf32=False).steps[0]
    assert [plan.choice for plan in loose.plans] == [plan.choice for plan in exact.plans]
    assert all(plan.allowed for plan in loose.plans)
    barred = [plan for plan in exact.plans if not plan.allowed]
    assert len(barred) > len(exact.plans) // 2
    assert {plan.reason for plan in barred} == {"barred by the policy: less exact than float32"}
    assert exact.first is not None and exact.first.rank > 1


def test_a_policy_may_be_given_as_an_object_or_by_its_fields() -> None:
    by_field = cg.explain(conv(F32), allow_tf32=False, deterministic=True)
    assert by_field == cg.explain(conv(F32), policy=cg.Policy(allow_tf32=False, deterministic=True))
    assert by_field.policy.deterministic


def test_a_workspace_limit_bars_plans_by_what_they_need() -> None:
    plans = cg.explain(conv(F32), allow_tf32=False).steps[0].plans
    needs = [plan.workspace_bytes for plan in plans if plan.allowed]
    limit = max(need for need in needs if need is not None) - 1
    assert limit >= 0
    limited = cg.explain(conv(F32), allow_tf32=False, workspace_limit=limit).steps[0].plans
    assert [plan.allowed for plan in limited] == [
        plan.allowed and (plan.workspace_bytes or 0) <= limit for plan in plans
    ]
    assert f"needs {limit + 1} bytes of workspace, over {limit}" in str(
        [plan.reason for plan in limited]
    )


def test_engines_that_the_policy_excludes_are_barred() -> None:
    first = cg.explain(conv(F32)).steps[0].first
    assert first is not None
    name = f"eng{first.choice.engine}"
    step = cg.explain(conv(F32), exclude_engines=(name,)).steps[0]
    barred = [plan for plan in step.plans if plan.choice.engine == first.choice.engine]
    assert barred and not any(plan.allowed for plan in barred)
    assert {p.reason for p in barred} == {f"barred by the policy: exclude_engines has '{name}'"}
    assert step.first is not None and step.first.choice.engine != first.choice.engine


@pytest.mark.usefixtures("driver")
def test_the_cuts_are_those_of_select(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    module = sys.modules["cudnngraph.explain.offline"]

    def recording(spec: cg.GraphSpec, target: str) -> Any:
        asked.append(tuple(node.op for node in spec.nodes))
        return propose_for(spec, target)

    monkeypatch.setattr(module, "propose_for", recording)
    graph = conv(act="silu", z="contiguous")
    found = cg.explain(graph)

    def refuses_fusion(spec: cg.GraphSpec) -> Any:
        again.append(tuple(node.op for node in spec.nodes))
        if again[-1] not in [step.ops for step in found.steps if step.runs_on == "cuDNN"]:
            raise cg.NotSupported("this", ["it is not whole"])
        return module._Proposal(None, 0), ()  # type: ignore[attr-defined]

    again: list[tuple[str, ...]] = []
    walked = heuristic.heuristic(graph.spec(), found.policy, refuses_fusion)
    assert again == asked
    assert [step.spec for step in walked.steps] == [step.spec for step in found.steps]
    assert len(found.steps) > 1 and not found.whole


@pytest.mark.usefixtures("driver")
def test_what_cudnn_refuses_says_why_and_becomes_a_torch_step() -> None:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (2, 4, 64, 32), torch.float32) for name in "qkv")
    g.output("o", g.sdpa(q, k, v))
    (step,) = cg.explain(g).steps
    assert (step.runs_on, step.plans, step.first) == ("torch", (), None)
    assert "takes float16 and bfloat16 only" in step.refusals[0].reason
    assert "sdpa: torch" in str(cg.explain(g))


def test_float64_is_not_shown_to_cudnn() -> None:
    (step,) = cg.explain(conv(torch.float64)).steps
    assert step.runs_on == "torch"
    assert "float64" in step.refusals[0].reason


def fan(branches: int) -> cg.Graph:
    """A product, and as many pointwise ops on its operand."""
    g = cg.Graph("fan")
    x = g.input("x", (64, 64), torch.float16)
    for at in range(branches):
        g.output(f"y{at}", g.relu(x * (at + 1.0)))
    g.output("z", x @ g.input("w", (64, 64), torch.float16))
    return g


@pytest.mark.usefixtures("driver")
def test_a_graph_of_many_ops_on_inputs_is_not_shown_to_cudnn_as_a_whole() -> None:
    """It raised MemoryError or ValueError out of the library, or did not come back."""
    explained = cg.explain(fan(60))
    ops = [op for step in explained.steps for op in step.ops]
    assert sorted(ops) == sorted(["matmul", *["mul", "relu"] * 60])
    reasons = [refusal.reason for step in explained.steps for refusal in step.refusals]
    assert any(reason.startswith("61 ops read inputs alone") for reason in reasons), reasons


@pytest.mark.usefixtures("driver")
def test_a_graph_of_some_ops_on_inputs_is_shown_to_cudnn() -> None:
    deviceless.lower_for(fan(9).spec(), "nvidia-h200")
    with pytest.raises(cg.NotSupported, match=r"14 ops read inputs alone.*; at most 13 are shown"):
        deviceless.lower_for(fan(13).spec(), "nvidia-h200")


@pytest.mark.usefixtures("driver")
def test_bools_that_are_inputs_count_as_ops() -> None:
    g = cg.Graph("bools")
    x = g.input("x", (64, 64), torch.float16)
    y = x @ g.input("w", (64, 64), torch.float16)
    for at in range(13):
        y = g.where(g.input(f"b{at}", (64, 64), torch.bool), y, 0.0)
    g.output("y", y)
    with pytest.raises(cg.NotSupported, match="14 ops read inputs alone"):
        deviceless.lower_for(g.spec(), "nvidia-h200")


@pytest.mark.usefixtures("driver")
def test_without_the_fallback_a_refusal_is_raised() -> None:
    with pytest.raises(cg.NotSupported, match="has no plan for") as caught:
        cg.explain(conv(act="silu", z="contiguous"), fallback="error")
    assert caught.value.reasons


def test_an_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(cg.NotSupported, match="'a100'") as caught:
        cg.explain(conv(), "a100")
    assert "nvidia-h200" in str(caught.value)


def test_mistakes_in_the_graph_are_reported_as_compile_does() -> None:
    g = cg.Graph("wrong")
    g.output("y", g.relu(g.input("x", (2, 3), torch.int32)))
    with pytest.raises(cg.GraphError, match="int32"):
        cg.explain(g)


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Any:
        raise cg.BackendUnavailable("the cuDNN frontend is not installed; pip install it")

    monkeypatch.setattr(env, "frontend", missing)
    with pytest.raises(cg.BackendUnavailable, match="pip install"):
        cg.explain(conv())


# The library's own words: those of cuDNN 9.19, then of 9.26.
NO_DRIVER = ("this->libcuda == nullptr", "Ensure the NVIDIA driver is installed")


def test_without_a_driver_library_a_fused_step_is_unknown_and_says_so(tmp_path: Path) -> None:
    # In a process of its own: this one may have loaded the stub, which the loader then finds.
    told = subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], capture_output=True
    )
    if told.returncode == 0:
        pytest.skip("this machine has a CUDA driver library")
    file = tmp_path / "fused.py"
    file.write_text(SOURCE)
    command = [sys.executable, "-m", "cudnngraph", "explain", f"{file}:fused"]
    home = Path(cg.__file__).parents[1]
    said = subprocess.run(command, capture_output=True, text=True, cwd=home)
    assert said.returncode == 1
    if env.cudnn_version() >= 92800:  # without a driver no GPU can be described
        assert "from 9.28 on it needs a CUDA driver library (libcuda.so.1)" in said.stderr
        return
    assert "conv → silu: not known, it takes a runtime-compiled engine" in said.stdout
    assert "no CUDA driver library (libcuda.so.1) can be loaded here" in said.stdout
    assert any(reason in said.stdout for reason in NO_DRIVER)


# -- the command -------------------------------------------------------------------------------

SOURCE = """
import torch
import cudnngraph as cg

print("from the file")


def build(act):
    g = cg.Graph("block")
    x = g.input("x", (8, 32, 14, 14), torch.float16, layout="channels_last")
    w = g.input("w", (32, 32, 3, 3), torch.float16, layout="channels_last")
    g.output("y", g.activation(g.conv(x, w, padding=1), act))
    return g


def bare() -> cg.Graph:
    return build(None)


def fused():
    return build("silu")


model = torch.nn.Linear(2, 3)


def number() -> int:
    return 1


def wide():
    g = cg.Graph("wide")
    g.output("y", g.relu(g.input("x", (4,), torch.float64)))
    return g


def wrong():
    g = cg.Graph("wrong")
    g.output("y", g.relu(g.input("x", (4,), torch.int32)))
    return g


plain = build(None)
same = plain
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A file with graphs."""
    file = tmp_path / "graphs.py"
    file.write_text(SOURCE)
    return str(file)


def test_the_command_lists_the_graphs_and_annotated_functions_of_a_file(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", source]) == 0
    out, err = capsys.readouterr()
    assert out.count("graph 'block' planned for NVIDIA H200") == 2  # bare() and plain, once each
    assert "step 1 of 1: conv: cuDNN" in out
    header = next(line for line in out.splitlines() if line.startswith("#"))
    assert header.split() == ["#", "engine", "compiled", "workspace", "status", "knobs"]
    assert out.count("taken") == 2
    assert "more: --all lists them" in out
    assert "from the file" in err and "from the file" not in out


def test_the_command_lists_all_plans_when_told_to(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{source}:plain", "--all"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert len(rows) == len(cg.explain(conv()).steps[0].plans)


def test_the_command_prints_json(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{source}:bare", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    found: Explanation = cg.explain(conv(), allow_tf32=False)
    assert body == {"schema": 1, "graphs": [found.to_dict()]}


def test_the_command_fails_where_cudnn_has_no_plan_at_all(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{source}:wide"]) == 1
    assert "relu: torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        ("{}:nothing", 2, "defines no 'nothing'"),
        ("{}:number", 2, "'number' of "),
        ("{}:model", 2, "is a Linear, not a graph; of a model, cg.fuse(model, example).report"),
        ("{}:build", 2, "cannot be run: TypeError"),
        ("{}.missing", 2, "there is no file"),
        ("{}:wrong", 1, "x 'x' is int32"),
        ("{}:bare --target a100", 2, "--target a100; known: nvidia-h100"),
    ],
)
def test_the_command_says_what_is_wrong_without_a_traceback(
    place: str, code: int, said: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *place.format(source).split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    message = err[err.index("error: ") :]
    assert said in message
    assert "Traceback" not in err


def test_a_file_without_graphs_is_told_what_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "empty.py"
    file.write_text("x = 1\n")
    assert main(["explain", str(file)]) == 2
    assert (
        "no graph at module level and no function annotated '-> Graph'" in capsys.readouterr().err
    )


# -- the stub ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
def test_a_driver_library_is_in_the_process() -> None:
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) in (0, 100)  # success, or no device
    assert cg.explain(conv()).driver
