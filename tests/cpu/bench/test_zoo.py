"""The zoo of ``cudnngraph bench zoo`` without processes: its entries, weights, results and page."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.bench.zoo import check, one, page, results
from cudnngraph.bench.zoo.entries import Called, Entry, Input, Size
from cudnngraph.bench.zoo.one import Job, Told, done
from cudnngraph.bench.zoo.registry import DEFAULT, ZOO, chosen, entries
from cudnngraph.bench.zoo.results import Results
from cudnngraph.bench.zoo.ways import WAYS
from cudnngraph.bench.zoo.weights import Untelling, check_telling, prepared
from cudnngraph.cli import main
from cudnngraph.select.decision import Decision
from cudnngraph.select.heuristic import GENERATED
from tests import python
from tests.small_zoo import RIGHT, Plain

F32 = torch.float32
#: Those that are built without memory in a test; ``cudnngraph bench zoo --check`` builds them all.
QUICK = ("YOLO-like detector", "EfficientNet-B0", "BERT-base", "SD 1.5 VAE decoder, 512")


# -- entries ---------------------------------------------------------------------------------------


def test_entries_state_their_sizes() -> None:
    assert len({entry.name for entry in ZOO}) == len(ZOO) >= 38
    for entry in ZOO:
        assert entry.library in ("torch", "timm", "torchvision", "transformers", "diffusers")
        assert entry.parameters_m > 0 and entry.dtype in (torch.float16, torch.bfloat16)
        for real, tiny in zip(entry.real.inputs, entry.tiny.inputs, strict=True):
            assert (real.name, bool(real.below)) == (tiny.name, bool(tiny.below))
            assert len(real.shape) == len(tiny.shape) and min(real.shape) >= 1
        sizes = [
            sum(torch.Size(i.shape).numel() for i in s.inputs) for s in (entry.real, entry.tiny)
        ]
        assert sizes[0] >= 16 * sizes[1], entry.name


def test_the_zoo_has_the_models_that_were_asked_for() -> None:
    asked = (
        "efficientnet-b0 efficientnetv2-s mobilenetv3-l regnety densenet-121 vgg-16 hrnet-w18 "
        "nfnet convnext-v2 coatnet maxvit efficientvit deit-3 eva-02 hiera sam detr segformer yolo "
        "r3d-18 clip siglip dinov2 bert modernbert t5 llama qwen3 gemma-3 mamba-2 whisper wav2vec2 "
        "sd*unet sdxl*unet sd*vae sdxl*vae dit pixart sd3 flux"
    )
    for name in asked.split():
        assert chosen(ZOO, [f"{name}*"]), name


def test_models_are_chosen_by_globs_in_any_case() -> None:
    names = [entry.name for entry in chosen(ZOO, ["SD*unet", "vgg-16"])]
    assert names == ["VGG-16", "SD 1.5 UNet", "SDXL UNet"]
    with pytest.raises(ValueError, match=r"no model matches 'resnet\*'; there are EfficientNet-B0"):
        chosen(ZOO, ["vgg*", "resnet*"])


def test_each_model_is_chosen_by_its_name_as_it_is_listed() -> None:
    for entry in ZOO:
        words = [word.strip() for word in f"vgg-16,{entry.name}".split(",")]
        assert {each.name for each in chosen(ZOO, words)} == {"VGG-16", entry.name}


@pytest.mark.parametrize(
    ("registry", "why"),
    [
        ("tests.small_zoo:TWICE", "has two entries 'first'"),
        ("tests.small_zoo:IMAGES", "is no list of entries; expected MODULE:NAME of some"),
        ("tests.small_zoo:NONE", "is no list of entries: module 'tests.small_zoo' has no"),
        ("no.such.module:ZOO", "is no list of entries: No module named 'no'"),
        (":ZOO", "^:ZOO is no list of entries; expected MODULE:NAME of some"),
        (".zoo:ZOO", "^.zoo:ZOO is no list of entries; expected MODULE:NAME of some"),
    ],
)
def test_what_is_no_registry_is_refused(registry: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        entries(registry)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ZOO = undefined", "NameError: name 'undefined' is not defined"),
        ("ZOO = (", "SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_registry_that_fails_is_told_in_a_line(
    text: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "failing_models.py").write_text(text)
    assert main(["bench", "zoo", "--check", "--registry", "failing_models:ZOO"]) == 2
    assert f"error: failing_models cannot be imported: {why}" in capsys.readouterr().err


def test_the_console_script_finds_models_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "own_models.py").write_text("from tests.small_zoo import RIGHT as ZOO")
    script = tmp_path / "bin" / "cudnngraph"  # its folder, not the working one, is in sys.path
    script.parent.mkdir()
    script.write_text("import sys\nfrom cudnngraph.cli import main\nsys.exit(main())\n")
    words = ("bench", "zoo", "--check", "--registry", "own_models:ZOO")
    environ = {**os.environ, "PYTHONPATH": str(python.ROOT)}
    done = python.run(script, *words, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 of 2 models can be built and called"


@pytest.mark.parametrize("entry", chosen(ZOO, QUICK), ids=lambda entry: entry.name)
def test_an_entry_builds_at_its_real_size_without_memory(entry: Entry) -> None:
    if importlib.util.find_spec(entry.library) is None:
        pytest.skip(f"{entry.library} is not installed")
    made = check.built(entry)
    assert not made.error and made.results
    assert nn.Module.register_parameter.__name__ == "register_parameter", "it is put back"


def test_the_check_tells_what_is_wrong_with_an_entry() -> None:
    right = check.built(RIGHT[0])
    assert (right.error, right.results) == ("", ((2, 4),))
    small = Size(Plain, (Input("images", (2, 4, 8, 8)),))
    assert "channels" in check.built(Entry("e", "torch", F32, 0.000276, small, small)).error
    heavy = Entry("e", "torch", F32, 7.0, RIGHT[0].real, RIGHT[0].real)
    assert check.built(heavy).error == "it has 0.000 M parameters, and is stated to have 7"
    gone: Any = Entry("e", "no_such_library", F32, 7.0, small, small)  # type: ignore[arg-type]
    assert check.built(gone).missing


def test_what_a_library_could_not_import_is_told_first() -> None:
    def hidden() -> nn.Module:
        try:
            raise OSError("libcudart.so.13 is missing")
        except OSError as error:
            raise RuntimeError("look up to see why:\nnothing") from error

    entry = Entry("e", "torch", F32, 1.0, Size(hidden, ()), Size(hidden, ()))
    told = check.built(entry).error.splitlines()[0]
    assert told == "OSError: libcudart.so.13 is missing, so RuntimeError: look up to see why:"


def test_inputs_are_those_of_their_seed() -> None:
    cpu = torch.device("cpu")
    image, text = Input("images", (2, 3, 8, 8)), Input("text", (4, 5), 7)
    one, again, other = (image.make(cpu, torch.float16, seed) for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.dtype == torch.float16 and one.is_contiguous(memory_format=torch.channels_last)
    means = Input("images", (1, 64, 32, 32)).make(cpu, F32, 0).mean((2, 3))
    assert 0.5 < float(means.std()) < 1.5, "each channel has a mean of its own"
    tokens = text.make(cpu, F32, 0)
    assert tokens.dtype == torch.int64 and 0 <= int(tokens.min()) <= int(tokens.max()) < 7


def test_a_model_is_called_by_the_names_of_its_arguments() -> None:
    class Model(nn.Module):
        def forward(self, a: Any, *, extra: Any, scale: float) -> Any:
            return Input(str(float(a)), (int(extra["b"]),), int(scale))

    called = Called(Model(), ("a", "extra.b"), ("name", "shape"), {"scale": 3.0})
    assert called(torch.tensor(1.5), torch.tensor(2)) == ("1.5", (2,))
    assert (
        Called(Model(), ("a", "extra.b"), ("below",), {"scale": 3.0})(
            torch.tensor(1.0), torch.tensor(2)
        )
        == 3
    )


# -- weights ---------------------------------------------------------------------------------------


class Fading(nn.Module):
    """Layers that let values vanish, a gate that begins next to zero, and one that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
        self.norm, self.gate = nn.LayerNorm(16), nn.Parameter(torch.full((16,), 1e-6))
        self.zero = nn.Linear(16, 16)
        nn.init.zeros_(self.zero.weight)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x) + self.gate * self.zero(x)
        return y


def test_weights_let_nothing_vanish() -> None:
    torch.manual_seed(0)
    model = Fading()
    x = torch.randn(64, 16)
    assert float(model(x).detach().std()) < 0.2
    made: Any = prepared(model, [x]).requires_grad_(False)
    kept: list[torch.Tensor] = []
    for layer in (*made.layers, made.zero):
        layer.register_forward_hook(lambda _, __, y: kept.append(y))
    y = made(x).detach()
    assert all(0.2 < float(each.detach().std()) < 5.0 for each in (y, *kept)) and len(kept) == 13
    assert 0.2 <= float(made.gate.min()) <= float(made.gate.max()) <= 0.6
    assert float(made.norm.weight.std()) > 0.05 and float(made.norm.bias.std()) > 0.05
    assert float(made.zero.weight.std()) > 0


def test_a_weight_that_two_modules_share_is_not_scaled() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    nn.init.normal_(first.weight, std=1e-4)
    before = first.weight.clone()
    prepared(nn.Sequential(first, second), [torch.randn(4, 8)])
    assert torch.equal(first.weight, before)


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "1 of 2 numbers are not finite"),
        (torch.full((3,), 2.0), torch.ones(3), "result 0 is one number, 2"),
        (torch.arange(4.0), torch.arange(4.0) + 1e-3, "changes by 0.0005 of its size"),
    ],
)
def test_results_by_which_nothing_can_be_checked(
    one: torch.Tensor, other: torch.Tensor, why: str
) -> None:
    with pytest.raises(Untelling, match=why):
        check_telling([one], [other])
    check_telling([torch.arange(4.0), 3], [torch.arange(4.0) * 2, 3])


# -- a job, in this process ------------------------------------------------------------------------


def test_a_cold_start_is_timed_and_fills_its_caches(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    name, registry = RIGHT[0].name, "tests.small_zoo:RIGHT"
    plans = {"heuristic": str(tmp_path / "plans")}
    job = Job("cold", registry, name, ("heuristic",), "cpu", True, str(file), plans)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    done(job, Told(file), lambda: "go\n")
    found = json.loads(file.read_text())
    assert found["stage"] == "" and 0 < found["ways"]["heuristic"]["cold_s"] < 60
    assert "error" not in found["ways"]["heuristic"] and found["parameters"] == 276


def test_a_job_ends_with_who_would_have_let_it_begin(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    job = Job("timed", "tests.small_zoo:RIGHT", RIGHT[0].name, ("eager",), "cpu", True, str(file))
    done(job, Told(file), lambda: "")
    assert "parameters" not in json.loads(file.read_text())


# -- results ---------------------------------------------------------------------------------------


def way(us: float, cold_s: float = 0.0, warm_s: float = 0.0, gib: float = 0.0) -> dict[str, Any]:
    made: dict[str, Any] = {"us": us, "errors": [[2e-4, 3e-4]]}
    if cold_s:
        made |= {"cold_s": cold_s, "beside": 4, "first_s": warm_s}
        made |= {"filled": True, "loads": True}
    return made | ({"reserved_bytes": int(gib * 2**30)} if gib else {})


def row(name: str, status: str = "done", **ways: dict[str, Any]) -> dict[str, Any]:
    facts = {"library": "timm", "inputs": "images 2 x 3", "dtype": "float16", "cut": "", "run": 0}
    named = {key.replace("_", "-"): each for key, each in ways.items()}
    return {"name": name, **facts, "status": status, "ways": named}


def made(*rows: dict[str, Any], device: str = "a GPU", date: str = "2026-01-01") -> Results:
    run = {"date": date, "versions": {"torch": "2.11"}, "command": "cudnngraph bench zoo"}
    return Results(device, False, [run], {each["name"]: each for each in rows})


FULL = made(
    {
        **row(
            "A",
            eager=way(3000.0, gib=1.5),
            graph=way(2000.0),
            reduce_overhead=way(2000.0, 40.0, 8.0, 2.0),
            heuristic={**way(1250.0, 10.0, 2.0, 1.0), "steps": {"cuDNN": 2, "torch": 1}},
            autotuned={
                **way(1000.0, 80.0, 4.0, 1.0),
                "loads": False,
                "opaque": {"aten.roll.default": 2},
                "refused": {"wrong: 't1' is off by inf, at most 1e-05 is right": 2},
            },
        ),
        "parameters": 5_300_000,
        "wide": "float64",
    },
    {
        **row(
            "B | big",
            eager=way(900.0),
            reduce_overhead=way(500.0, 20.0, 6.0),
            max_autotune={"error": "takes more than 300 s"},
            heuristic=way(1000.0, 10.0, 3.0),
            autotuned=way(1000.0, 40.0, 3.0),
        ),
        "cut": "4 of 32 layers",
        "wide": "float32",
    },
    {
        **row("C", "failed", heuristic={"error": "CannotImport: x\ny"}),
        "error": "CannotImport: x\ny",
    },
    {**row("D", "missing"), "error": "timm is not installed"},
)


def test_the_summary_has_means_and_worst_rows() -> None:
    assert page.summary_lines(FULL) == [
        "4 models: 2 done, 1 failed, 1 missing",
        "eager / cudnngraph, autotuned: 1.64 (geometric mean of 2), at worst 0.90 (B | big)",
        "eager in a CUDA graph / cudnngraph, autotuned: 2.00 (geometric mean of 1), at worst 2.00 "
        "(A)",
        "torch.compile reduce-overhead / cudnngraph, autotuned: 1.00 (geometric mean of 2), at "
        "worst 0.50 (B | big)",
        "eager / cudnngraph, heuristic: 1.47 (geometric mean of 2), at worst 0.90 (B | big)",
        "eager in a CUDA graph / cudnngraph, heuristic: 1.60 (geometric mean of 1), at worst 1.60 "
        "(A)",
        "torch.compile reduce-overhead / cudnngraph, heuristic: 0.89 (geometric mean of 2), at "
        "worst 0.50 (B | big)",
        "cudnngraph, heuristic / cudnngraph, autotuned: 1.12 (geometric mean of 2), at most 1.25 "
        "(A)",
        "cold start, torch.compile reduce-overhead / cudnngraph, heuristic: 2.83 (geometric mean "
        "of 2), at worst 2.00 (B | big)",
        "cold start, torch.compile reduce-overhead / cudnngraph, autotuned: 0.50 (geometric mean "
        "of 2), at worst 0.50 (A)",
        "warm start, torch.compile reduce-overhead: 7.0 s (median of 2), at most 8.0 s (A)",
        "warm start, cudnngraph, heuristic: 2.5 s (median of 2), at most 3.0 s (B | big)",
        "warm start, cudnngraph, autotuned: 3.0 s (median of 1), at most 3.0 s (B | big)",
        "right: 2 of 4 models (1 beside float64, 1 beside float32)",
    ]


def test_the_page_is_made_of_the_results_alone(tmp_path: Path) -> None:
    FULL.save(tmp_path / "zoo.json")
    again = results.loaded(tmp_path / "zoo.json")
    assert again == FULL
    text = page.page(again, "zoo.svg")
    assert text == page.page(FULL, "zoo.svg")
    for line in (
        "![Times as fast as the other ways, by models](zoo.svg)",
        "- 2026-01-01: torch 2.11",
        "| A | 3.000 | 2.000 | 2.000 | 1.250 | 1.000 | 2.00 |",
        "| B / big | 0.900 | - | 0.500 | 1.000 | 1.000 | 0.50 |",
        "| A | 40.0 | 8.0 | 10.0 | 2.0 | 80.0 | - |",
        "| A | 1.50 | 2.00 | 1.00 | 1.00 |",
        "| B / big | float32 | 2.0e-04 | 2.0e-04 | 2.0e-04 | 2.0e-04 |",
        "| A | timm | float16 | images 2 x 3 | 5.3 M | 2 cuDNN, 1 torch | 2 aten.roll.default |",
        "| B / big | timm | float16 | images 2 x 3, 4 of 32 layers | - | - | - |",
        "- A, cudnngraph, autotuned: 2 x wrong: 't1' is off by inf, at most 1e-05 is right",
        "- B | big, torch.compile max-autotune: takes more than 300 s",
        "- C, cudnngraph, heuristic: CannotImport: x y",
        "- D: timm is not installed",
    ):
        assert line in text.splitlines(), line
    image = page.picture(FULL)
    assert image is not None and image == page.picture(again)
    drawn = "".join(ElementTree.fromstring(image).itertext())
    assert "B | big" in drawn and "over torch.compile reduce-overhead" in drawn


def test_results_without_times_have_a_page_without_a_picture() -> None:
    parity = made({**row("A", eager={"errors": [[1e-7, 1e-7]]}, heuristic={"errors": []})})
    assert page.picture(parity) is None
    text = page.page(parity)
    assert "## Times" not in text and "## Parity" in text and ".svg" not in text


def test_notes_of_a_person_stay_on_the_page() -> None:
    assert page.with_notes("new\n", "old\n\n## Notes\n\nmine\n") == "new\n\n## Notes\n\nmine\n"


def test_runs_of_one_day_and_of_the_same_versions_are_told_together() -> None:
    found = made(row("A", heuristic=way(1.0)))
    found.merge(made(row("B", heuristic=way(1.0))))
    found.merge(made(row("C", heuristic=way(1.0)), date="2026-01-02"))
    told = [line for line in page.page(found).splitlines() if line.lstrip().startswith("- ")][:5]
    command = "  - `cudnngraph bench zoo`"
    assert told == [
        *("- 2026-01-01: torch 2.11", command, command),
        *("- 2026-01-02: torch 2.11", command),
    ]


def test_kernels_that_their_check_refused_are_counted() -> None:
    why = "wrong: 't1' is off by inf, at most 1e-05 is right"
    refused = Decision(GENERATED, False, why, Choice(KERNEL, ()))
    none = Decision(GENERATED, False, "an op that kernels do not have")
    taken = Decision("engine 4", True, "cuDNN's first", Choice(4, ()))
    steps = [
        SimpleNamespace(decisions=made) for made in ((refused, none), (refused, taken), (taken,))
    ]
    report = SimpleNamespace(counts={"torch": 3}, tier="built", opaque=(), steps=steps)
    assert one._steps(cast(Any, SimpleNamespace(report=report))) == {
        **{"steps": {"torch": 3}, "tier": "built", "opaque": {}},
        "refused": {why: 2},
    }


def test_runs_are_merged_by_what_is_further() -> None:
    two, three = way(1.0), way(2.0)
    first = made(row("a", eager=two, heuristic=two), row("b", "failed"), row("c", "done"))
    other = made(
        row("a", eager=three), row("b", "begun"), row("c", "done"), row("d", "missing"), date="2"
    )
    first.merge(other)
    assert [first.rows[name]["run"] for name in "abcd"] == [0, 0, 1, 1]
    assert first.rows["a"]["ways"]["eager"]["us"] == 1.0, "it has more ways"
    first.sort(["d", "c", "a"])
    assert list(first.rows) == ["d", "c", "a", "b"]
    later = made(row("a", eager=three, heuristic=three), row("b", "done"), date="3")
    first.merge(later)
    data = first.to_dict()
    assert [run["date"] for run in data["runs"]] == ["2", "3"], "a run without rows is left out"
    assert {each["name"]: each["run"] for each in data["rows"]} == {"d": 0, "c": 0, "a": 1, "b": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "cannot be read"),
        ("[]", "has no results of the zoo of schema 1"),
        ('{"schema": 0}', "has no results of the zoo of schema 1"),
        ('{"schema": 1, "device": "d", "tiny": false, "runs": [], "rows": [3]}', "a row that is"),
        (
            '{"schema": 1, "device": "d", "tiny": false, "runs": [], "rows": '
            '[{"name": "a", "status": "done", "run": 0, "ways": {}}]}',
            "has a row that is none: a",
        ),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        results.loaded(tmp_path / "a.json")


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--models", "resnet*"], "no model matches 'resnet*'; there are EfficientNet-B0; "),
        (["--ways", "eager,fast"], "no way fast; there are eager, graph, reduce-overhead, "),
        (
            ["--ways", "autotuned,graph"],
            "--ways autotuned,graph needs a GPU; there are eager, heur",
        ),
        (["--ways", "eager"], "--ways has none of ours to compare with: heuristic, autotuned"),
        (["--jobs", "0"], "--jobs 0; expected 1 or more"),
        (["--limit", "0"], "argument --limit: expected seconds over 0, got '0'"),
        (["--limit", "-1"], "argument --limit: expected seconds over 0, got '-1'"),
        (["--limit", "nan"], "argument --limit: expected seconds over 0, got 'nan'"),
        (["--budget", "0"], "argument --budget: expected seconds over 0, got '0'"),
        (["--again", "--retry"], "--again measures all models, --retry those that failed"),
        (["--page-only"], "--page-only needs results: --resume FILE, or a --json FILE there is"),
        (["--resume", "gone.json"], "gone.json cannot be read: "),
        (["--out", "page.html"], "--out page.html: expected a name that ends in .md"),
        (["--out", "none/page.md"], "--out none/page.md: there is no folder none"),
        (["--registry", "json:loads"], "json:loads is no list of entries: "),
    ],
)
def test_calls_that_make_no_sense(
    words: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "zoo", "--device", "cpu", *words]) == 2
    assert f"error: {why}" in capsys.readouterr().err


def test_the_zoo_is_no_suite_among_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "conv", "zoo"]) == 2
    assert "zoo is no suite among others: cudnngraph bench zoo" in capsys.readouterr().err


def test_the_check_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "zoo", "--check", "--registry", "tests.small_zoo:UNBUILT"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "images 2 x 3 x 8 x 8 → 2x4" in lines[1]
    assert any("no_such_library is not installed" in line for line in lines)
    assert lines[-1] == "2 of 4 models can be built and called"


def test_runs_are_merged_into_a_page_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, whole = (tmp_path / f"{name}.json" for name in ("one", "two", "whole"))
    made(row("VGG-16", eager=way(3.0), heuristic=way(2.0))).save(one)
    made(row("EfficientNet-B0", eager=way(3.0), heuristic=way(1.0))).save(two)
    out = tmp_path / "page.md"
    out.write_text("old\n\n## Notes\n\nmine\n")
    words = ["--resume", str(one), "--resume", str(two), "--json", str(whole), "--out", str(out)]
    assert main(["bench", "zoo", "--page-only", *words]) == 0
    told = capsys.readouterr().out
    assert (
        "eager / cudnngraph, heuristic  2.12 (geometric mean of 2), at worst 1.50 (VGG-16)" in told
    )
    rows = json.loads(whole.read_text())["rows"]
    assert [each["name"] for each in rows] == ["EfficientNet-B0", "VGG-16"], "in the zoo's order"
    first = out.read_text()
    assert first.endswith("## Notes\n\nmine\n") and "](page.svg)" in first
    picture = (tmp_path / "page.svg").read_text()
    assert main(["bench", "zoo", "--page-only", "--json", str(whole), "--out", str(out)]) == 0
    assert (out.read_text(), (tmp_path / "page.svg").read_text()) == (first, picture)
    made(row("VGG-16"), device="another GPU").save(two)
    assert main(["bench", "zoo", "--page-only", *words[:4]]) == 2
    assert "the runs differ in device: a GPU and another GPU" in capsys.readouterr().err


def test_ways_have_titles_of_their_own() -> None:
    assert len({each.title for each in WAYS.values()}) == len(WAYS)
    assert [name for name, each in WAYS.items() if each.ours] == ["heuristic", "autotuned"]
    assert entries(DEFAULT) == ZOO
