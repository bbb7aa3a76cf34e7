"""The suites of ``cudnngraph bench``: lists of tasks, made for a device.

On a CPU, and where they are to be quick, the data are small. Notes say what a suite leaves out.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..models.fused import fuse
from ..ops.base import QUANTIZED
from ..ops.work import bytes_of, flops_of
from ..policy import Policy, Tune
from . import breadth, cases, host, models, quantized
from .cases import Case
from .measure import Call, Contest, Task, captured


@dataclass(frozen=True)
class Options:
    """Options of a run; ``compile_modes`` are torch.compile's, as further baselines."""

    device: torch.device
    quick: bool = False
    tune: Tune = "autotune"
    compile_modes: tuple[str, ...] = ()

    @property
    def small(self) -> bool:
        """Whether the data are to be small."""
        return self.quick or self.device.type == "cpu"


@dataclass(frozen=True)
class Suite:
    """Its tasks, and what was left out."""

    tasks: Sequence[Task]
    notes: Sequence[str] = ()


def _compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(
        function, mode=None if mode == "default" else mode, dynamic=False
    )
    return made


def contest_of(case: Case, options: Options) -> Contest:
    """Our plans of a case beside eager torch, its other ways, and torch.compile's."""
    tensors, spec = case.tensors(options.device), case.graph.spec()
    calls: dict[str, Call] = {}
    if options.device.type == "cpu":
        ours = "reference"
        calls[ours] = case.graph.compile(options.device).bind(**tensors)
    else:
        ours = "autotuned" if options.tune == "autotune" else options.tune
        plans: dict[str, Tune] = {"heuristic": "heuristic", ours: options.tune}
        for name, tune in plans.items():
            calls[name] = case.graph.compile(options.device, tune=tune).bind(**tensors)
    calls["eager"] = partial(case.eager, tensors)
    calls |= {name: partial(run, tensors) for name, run in case.others.items()}
    for mode in options.compile_modes:
        calls[f"torch.compile {mode}"] = partial(_compiled(case.eager, mode), tensors)
    floats = [t.dtype for t in spec.tensors.values() if t.dtype.is_floating_point]
    dtypes = [spec.tensors[name].dtype for name in spec.inputs if name in spec.tensors]
    kinds = [dtype for dtype in dtypes if dtype in QUANTIZED]
    kinds += [dtype for dtype in dtypes if dtype.is_floating_point] or floats
    return Contest(calls, ours, flops=flops_of(spec), moved_bytes=bytes_of(spec), dtype=kinds[0])


def _of_cases(suite: str, listed: Sequence[Case], options: Options) -> list[Task]:
    return [Task(suite, case.name, partial(contest_of, case, options)) for case in listed]


def _large(*suites: str) -> list[Case]:
    """The cases of these names in every list that there is, each once."""
    listed = [*cases.selection_suite(), *breadth.breadth_suite()]
    found = {case.name: case for case in listed if case.suite in suites}
    return list(found.values())


def _small(*suites: str) -> list[Case]:
    return [case for case in breadth.breadth_suite(quick=True) if case.suite in suites]


def _conv(options: Options) -> Suite:
    kind = torch.float32 if options.device.type == "cpu" else torch.float16
    small = [
        cases.conv(2, 16, 14, 16, 3, 1, 1, dtype=kind),
        cases.conv(2, 16, 14, 32, 1, 1, 0, dtype=kind, residual=True),
        cases.conv(2, 16, 14, 16, 3, 1, 1, dtype=kind, groups=16),
        *_small("separable"),
    ]
    listed = small if options.small else _large("conv", "separable")
    return Suite(_of_cases("conv", listed, options))


def _transpose(options: Options) -> Suite:
    small = [cases.conv_transpose(2, 7, 16, 16, 4, 2, 1)]
    return Suite(_of_cases("transpose", small if options.small else _large("transpose"), options))


def _sdpa(options: Options) -> Suite:
    kind = torch.float32 if options.device.type == "cpu" else torch.bfloat16
    if options.small:
        small = [cases.sdpa(1, 2, 64, 32, causal=True, dtype=kind)]
        return Suite(_of_cases("sdpa", small, options))
    listed, notes = _large("sdpa"), []
    try:
        listed += importlib.import_module(f"{__package__}.attention").attention_suite()
    except ModuleNotFoundError:
        notes.append(
            "sdpa: masks, windows and caches are left out, bench/attention.py is not there"
        )
    return Suite(_of_cases("sdpa", listed, options), notes)


def _norm(options: Options) -> Suite:
    small = [*_small("norm", "others"), cases.pointwise_chain(1 << 16)]
    listed = small if options.small else _large("norm", "others", "pointwise")
    return Suite(_of_cases("norm", listed, options))


def _matmul(options: Options) -> Suite:
    small = [cases.matmul(64, 128, 64, "relu"), *_small("ffn")]
    listed = small if options.small else _large("matmul", "ffn")
    return Suite(_of_cases("matmul", listed, options))


def _low_precision(options: Options) -> Suite:
    if options.small:
        return Suite([], ["lowprecision: left out, it has no small data"])
    return Suite(_of_cases("lowprecision", quantized.lowprecision_suite(), options))


def _host(options: Options) -> Suite:
    def beside(name: str) -> Contest:
        every = host.inference(options.device)
        kept = {name, host.BESIDE[name], "torch.cudnn_convolution_relu"}
        calls = {key: call for key, call in every.items() if key in kept}
        return Contest(calls, name, clock="host")

    def training(norm: bool) -> Contest:
        ours, theirs, _ = host.training(options.device, (1, 8, 4, 4), norm=norm)
        return Contest({"module": ours, "torch: modules": theirs}, "module", clock="host")

    rows = [Task("host", name, partial(beside, name)) for name in host.BESIDE]
    rows += [
        Task("host", f"{name} forward and backward", partial(training, norm))
        for name, norm in (("Conv-BN-ReLU", True), ("Conv-ReLU", False))
    ]
    return Suite(rows)


def _training(options: Options) -> Suite:
    shape = (2, 8, 8, 8) if options.small else (32, 128, 28, 28)

    def step(norm: bool) -> Contest:
        ours, theirs, model = host.training(options.device, shape, norm=norm)
        calls: dict[str, Call] = {"module": ours, "eager": theirs}
        x = torch.randn(shape, device=options.device, dtype=next(model.parameters()).dtype)
        x = x.to(memory_format=host.LAST).requires_grad_()
        grad = torch.randn_like(x).detach()
        for mode in options.compile_modes:
            fast = _compiled(model, mode)
            given = [x, *model.parameters()]
            calls[f"torch.compile {mode}"] = partial(_gradients, fast, x, given, grad)
        return Contest(calls, "module", clock="wall", dtype=x.dtype)

    return Suite(
        [
            Task("training", f"{name} {' '.join(map(str, shape))}", partial(step, norm))
            for name, norm in (("Conv-BN-ReLU", True), ("Conv-ReLU", False))
        ]
    )


def _gradients(model: Any, x: torch.Tensor, given: Any, grad: torch.Tensor) -> object:
    return torch.autograd.grad(model(x), given, grad)


# -- processes -------------------------------------------------------------------------------------

_START = """
import torch, cudnngraph as cg
g = cg.Graph("g")
x = g.input("x", (8, 64, 28, 28), torch.float16, layout="channels_last")
w = g.input("w", (64, 64, 3, 3), torch.float16, layout="channels_last")
g.output("y", g.relu(g.bias(g.conv(x, w, padding=1), g.input("b", (64,), torch.float16))))
g.compile("{device}", tune="{tune}")
"""


def _startup(options: Options) -> Suite:
    def process(code: str, folder: str) -> None:
        environ = {**os.environ, "CUDNNGRAPH_CACHE_DIR": os.path.join(folder, "plans")}
        subprocess.run([sys.executable, "-c", code], env=environ, check=True)

    def contest() -> Contest:
        keep = tempfile.TemporaryDirectory()
        folder = keep.name
        code = _START.format(device=options.device, tune=options.tune)
        torch_only = "import torch" + (
            "; torch.zeros(1, device='cuda')" if options.device.type == "cuda" else ""
        )
        process(code, folder)  # the cache is filled once

        def run(text: str) -> object:
            process(text, keep.name)
            return keep

        return Contest(
            {
                "import, compile from the cache": partial(run, code),
                "torch alone": partial(run, torch_only),
            },
            "import, compile from the cache",
            clock="process",
        )

    return Suite([Task("startup", "a new process", contest)])


# -- models ----------------------------------------------------------------------------------------


def _models(options: Options) -> Suite:
    gpu = options.device.type == "cuda"
    kind = torch.float16 if gpu else torch.float32
    listed = [*models.WHOLE, *(models.TORCHVISION if models.has_torchvision() else ())]
    if options.small:
        small = partial(models.ResNet, (1, 1), width=8, classes=10)
        listed = [models.Whole("a small ResNet batch 2", small, (2, 3, 32, 32))]

    def contest(whole: models.Whole) -> Contest:
        torch.manual_seed(0)
        model: Any = models.randomized(whole.make())
        model = model.to(options.device, kind).to(memory_format=host.LAST)
        x = whole.example(options.device, kind)
        policy = Policy(tune=options.tune if gpu else None)
        fused = fuse(model, x, policy=policy, capture=gpu, reuse_results=True, check=False)
        calls: dict[str, Call] = {"fused": partial(_inferred, fused, x)}
        calls["eager"] = partial(_inferred, model, x)
        if gpu:
            calls["eager in a CUDA graph"] = captured(calls["eager"])
        for mode in options.compile_modes:
            calls[f"torch.compile {mode}"] = partial(_inferred, _compiled(model, mode), x)
        return Contest(calls, "fused", clock="wall", dtype=kind)

    return Suite([Task("models", whole.name, partial(contest, whole)) for whole in listed])


@torch.no_grad()
def _inferred(model: Callable[..., Any], x: torch.Tensor) -> object:
    return model(x)


SUITES: Mapping[str, Callable[[Options], Suite]] = {
    "conv": _conv,
    "transpose": _transpose,
    "sdpa": _sdpa,
    "norm": _norm,
    "matmul": _matmul,
    "lowprecision": _low_precision,
    "host": _host,
    "startup": _startup,
    "models": _models,
    "training": _training,
}
