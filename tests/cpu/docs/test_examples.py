"""The examples run as a reader would run them, and the demo notices a wrong result."""

from __future__ import annotations

import os
import re
import runpy
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.cli.arguments import device as known_device
from cudnngraph.executor import reference
from tests import python
from tests.numerics import bound
from tests.scripts import loaded

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
TITLES = (
    "sharpen: depthwise conv + clamp",
    "block: conv + batch_norm + relu",
    "upsample: conv_transpose + bias + clamp",
    "attention over patches: sdpa",
)


def run_example(name: str, *arguments: str, cwd: Path, threads: int | None = None) -> python.Done:
    """The example as a command of its own, away from the checkout's directory.

    ``threads`` for small tensors on a busy machine, where threads wait for each other.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    return python.run(EXAMPLES / name, *arguments, cwd=cwd, env=environ)


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return loaded(EXAMPLES / "demo.py")


@pytest.fixture
def quick(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo without its timing."""
    monkeypatch.setattr(demo, "median_ms", lambda call, device: 0.0)
    return demo


def test_every_example_is_run_here() -> None:
    named = {
        *("attention.py", "demo.py", "quantized.py", "segmentation_decoder.py", "ten_lines.py"),
        "train_digits.py",
        *("deeplab.py", "gpt.py", "unet.py"),
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == named


def losses_of(done: python.Done) -> list[list[str]]:
    """The rows of a training's table: step, torch's loss, ours, how far apart."""
    return [line.split() for line in done.stdout.splitlines() if re.match(r" *\d+  \d", line)]


def test_training_on_digits_follows_torch_and_learns(tmp_path: Path) -> None:
    """The loss of every 20th of 200 steps is within 2 %; the script's exit code says so."""
    done = run_example("train_digits.py", "--device", "cpu", cwd=tmp_path, threads=1)
    assert done.returncode == 0, done.stdout + done.stderr
    table = losses_of(done)
    assert [int(row[0]) for row in table] == list(range(0, 200, 20))
    assert all(abs(float(row[2]) / float(row[1]) - 1) < 0.02 for row in table)
    theirs, ours = (float(v) for v in re.findall(r"([\d.]+)%", done.stdout.splitlines()[-1]))
    assert ours > 90 and abs(ours - theirs) < 2  # 10 % by chance


def test_training_on_digits_in_autocast_learns_as_much(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--amp", "--steps", "100")
    done = run_example("train_digits.py", *arguments, cwd=tmp_path, threads=1)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, ours = (float(v) for v in re.findall(r"([\d.]+)%", done.stdout.splitlines()[-1]))
    assert ours > 80 and abs(ours - theirs) < 4


def test_a_decoder_of_transposed_blocks_follows_torch_and_learns(tmp_path: Path) -> None:
    """The losses are within 2 %, and torch labels as ours with the same state: the exit code."""
    done = run_example("segmentation_decoder.py", "--device", "cpu", cwd=tmp_path, threads=1)
    assert done.returncode == 0, done.stdout + done.stderr
    table = losses_of(done)
    assert [int(row[0]) for row in table] == list(range(0, 100, 20))
    assert all(abs(float(row[2]) / float(row[1]) - 1) < 0.02 for row in table)
    right, differ = (float(v) for v in re.findall(r"([\d.]+)%", done.stdout.splitlines()[-1]))
    assert right > 40 and differ <= 0.01  # 25 % by chance


def test_attention_learns_to_copy_and_agrees_with_torch(tmp_path: Path) -> None:
    done = run_example("attention.py", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    module, copied, apart = done.stdout.splitlines()
    assert module == "FusedSDPA(causal=True, window=(6, None))"
    assert float(copied.split()[-1].rstrip("%")) >= 95.0
    assert float(apart.split()[-1]) < 1e-5


def test_a_network_is_quantised_to_each_of_the_8_bit_dtypes(tmp_path: Path) -> None:
    done = run_example("quantized.py", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [re.match(r"(\w+): off by ([\d.]+)% of", line) for line in done.stdout.splitlines()]
    errors = {match[1]: float(match[2]) for match in found if match}
    assert list(errors) == ["int8", "float8_e4m3fn", "float8_e5m2"]
    assert 0.5 < errors["int8"] < 2.6
    assert 2.6 < errors["float8_e4m3fn"] < 8.0 < errors["float8_e5m2"] < 16.0


def test_deeplab_segments_the_photograph_as_torch_does(tmp_path: Path) -> None:
    done = run_example("deeplab.py", "--device", "cpu", "--size", "64", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"DeepLabV3-ResNet-50, .+, random weights$", lines[0])
    assert "60 batch norms folded" in lines[1]
    (same,) = re.findall(r"pixels of the same class: ([\d.]+)%", done.stdout)
    assert float(same) >= 99.0
    assert re.search(r"^torch [\d.]+ ms, fused [\d.]+ ms$", done.stdout, flags=re.MULTILINE)
    with Image.open(tmp_path / "out" / "regions.png") as picture:
        assert picture.size == (64, 64)


def test_the_u_net_learns_and_marks_the_same_pixels_fused(tmp_path: Path) -> None:
    done = run_example("unet.py", "--device", "cpu", "--steps", "45", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    right, differ = re.findall(r"([\d.]+)%", done.stdout.splitlines()[-1])
    assert float(right) > 95.0 and float(differ) < 0.1


def test_the_small_gpt_writes_the_same_by_all_three_ways(tmp_path: Path) -> None:
    done = run_example("gpt.py", "--device", "cpu", "--steps", "30", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = dict(line.split(": ", 1) for line in done.stdout.splitlines()[-3:])
    assert set(written) == {"torch", "fused", "compiled"}
    assert len(set(written.values())) == 1 and len(written["torch"]) >= 40


@pytest.mark.parametrize(
    "name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "ten_lines.py")
)
def test_a_device_that_is_not_there_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = runpy.run_path(str(EXAMPLES / name))
    for device, said in (
        ("cuda", "CUDA devices that torch sees here: 0; got 'cuda'"),
        ("foo", "expected cpu, cuda or cuda:1, got 'foo'"),
        ("meta", "expected cpu, cuda or cuda:1, got 'meta'"),
    ):
        with pytest.raises(SystemExit) as stop:
            module["main"](["--device", device])
        assert stop.value.code == 2
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[-1].partition("error: ")[2]) == (
            "",
            f"argument --device: {said}",
        )


def test_a_gpu_by_its_number_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert known_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ArgumentTypeError, match="that torch sees here: 2; got 'cuda:2'"):
        known_device("cuda:2")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("x.foo", "expected a name like picture.png, got 'x.foo'"),
        ("x", "expected a name like picture.png, got 'x'"),
        ("file/x.png", "no folder file can be made: File exists"),
    ],
)
def test_the_demo_refuses_a_picture_that_it_cannot_write_before_any_work(
    place: str,
    said: str,
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        demo.main(["--device", "cpu", "--out", place])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1].partition("error: ")[2]) == ("", f"argument --out: {said}")


def test_ten_lines_has_ten_lines_and_prints_the_shape_and_the_plan(tmp_path: Path) -> None:
    lines = (EXAMPLES / "ten_lines.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) == 10
    done = run_example("ten_lines.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([8, 64, 56, 56])\n")
    assert "step 1: conv → bias → relu" in done.stdout


def test_the_demo_prints_one_table_and_writes_the_picture(tmp_path: Path) -> None:
    done = run_example("demo.py", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for title in TITLES:
        (line,) = (line for line in done.stdout.splitlines() if title in line)
        cells = [cell.strip() for cell in re.split("[│|]", line.strip("│|"))]
        assert cells[:3] == [title, "cpu", "reference"]
        time_ms, torch_ms, error = map(float, cells[3:])
        assert time_ms > 0 and torch_ms > 0
        assert error <= bound(torch.float32)
    picture = tmp_path / "out" / "sharpened.png"
    assert f"sharpened picture: {picture.relative_to(tmp_path)}" in done.stdout
    with Image.open(picture) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (512, 600))


def test_the_page_shows_the_table_that_the_demo_prints() -> None:
    shown = [
        [cell.strip() for cell in line.strip("│┃").split(line[0])][:3]
        for line in (ROOT / "docs" / "demo.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(("│", "┃"))
    ]
    assert shown == [["graph", "device", "plan"], *([t, "cpu", "reference"] for t in TITLES)]


def test_the_picture_is_the_photograph_sharpened(quick: ModuleType, tmp_path: Path) -> None:
    """The same colours and the same way up, with steeper steps from pixel to pixel."""
    path = tmp_path / "here" / "picture.png"
    assert quick.main(["--device", "cpu", "--out", str(path)]) == 0
    photo = quick.load_photo(torch.device("cpu"), torch.float32)[0].permute(1, 2, 0).numpy()
    picture = np.array(Image.open(path)) / 255.0
    assert picture.shape == photo.shape
    assert np.abs(picture.mean(axis=(0, 1)) - photo.mean(axis=(0, 1))).max() < 0.01
    for channel in range(3):
        pair = np.stack([picture[..., channel].ravel(), photo[..., channel].ravel()])
        assert np.corrcoef(pair)[0, 1] > 0.95
    for axis in (0, 1):
        steps, before = (np.abs(np.diff(image, axis=axis)).mean() for image in (picture, photo))
        assert steps > 1.3 * before


def test_the_demos_tolerances_are_the_test_suites(demo: ModuleType) -> None:
    assert {dtype: bound(dtype) for dtype in demo.TOLERANCE} == demo.TOLERANCE


def test_the_cases_are_within_tolerance_in_half_precision_too(quick: ModuleType) -> None:
    """The graphs that a GPU runs, as far as a CPU can show it: the same graphs on float16 data."""
    photo = quick.load_photo(torch.device("cpu"), torch.float16)
    for make_case in (quick.sharpen, quick.conv_bn_relu, quick.upsample, quick.attention):
        case = make_case(photo)
        assert quick.measure(case, torch.device("cpu")).error <= bound(torch.float16), case.title


@pytest.mark.parametrize(
    ("op", "broken"),
    [
        ("clamp", lambda right: right * 1.001),
        ("relu", lambda right: right + torch.nan),
    ],
    ids=["off by 0.1 percent", "NaN"],
)
def test_a_wrong_result_fails_the_demo(
    op: str,
    broken: Callable[[torch.Tensor], torch.Tensor],
    quick: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cg.cache_clear()  # graphs that ran before know their rules
    right: Any = reference.RULES[op]
    monkeypatch.setitem(
        reference.RULES,  # type: ignore[arg-type]
        op,
        lambda inputs, attrs: broken(right(inputs, attrs)),
    )
    assert quick.main(["--device", "cpu", "--out", str(tmp_path / "picture.png")]) == 1
    out, err = capsys.readouterr()
    wrong = [title for title in TITLES if op in title]
    assert [line.split(": ", 1)[1] for line in err.splitlines()] == [
        f"{title}: the relative error is over 5e-07" for title in wrong
    ]
    assert sum("FAILED" in line for line in out.splitlines()) == len(wrong)
    cg.cache_clear()


def test_the_plan_column_names_engines_and_torch_steps(demo: ModuleType) -> None:
    def step(choice: Choice | None, *ops: str) -> SimpleNamespace:
        nodes = [SimpleNamespace(op=op) for op in ops]
        return SimpleNamespace(choice=choice, spec=SimpleNamespace(nodes=nodes))

    def exe(*steps: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda"), steps=steps)

    engine = Choice(39, (("TILE_SIZE", 8),))
    assert demo.plan_of(exe(step(engine, "conv", "relu"))) == "engine 39"
    assert demo.plan_of(exe(step(None, "sdpa"))) == "torch"
    pair = exe(step(None, "conv"), step(engine, "constant", "mul", "relu"))
    assert demo.plan_of(pair) == "conv: torch\nmul+relu: engine 39"
