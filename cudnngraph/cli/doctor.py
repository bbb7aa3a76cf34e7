"""``cudnngraph doctor``: what is installed, what is loaded and from where, and what to mend.

A check passes, warns (something is absent and graphs still run, by the reference executor or
without a cache on disk) or fails (something is there and broken). The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import torch

from plans_cache import PlanStore

from .. import settings
from ..backend import env, found_bad, libraries, tested
from ..backend.libraries import Library
from ..backend.lowering.driver import first_line
from ..errors import BackendUnavailable, SettingsError
from ..kernels import compile as compiler
from ..kernels import kernel
from .table import print_table

TORCH_MIN = (2, 9)
JSON_SCHEMA = 1
"""Of the object that ``--json`` prints; raised when a field goes or changes its meaning."""

_DRIVER_MEND = "install NVIDIA's driver to use a GPU"
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the report. ``mend`` says in one line what to do, and is empty for a pass."""

    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str
    mend: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, with the versions and the loaded libraries that they looked at.

    ``versions`` has the same keys everywhere, None for what is absent. ``libraries`` maps the
    file name of each loaded library of NVIDIA's to its path.
    """

    checks: tuple[Check, ...]
    versions: dict[str, str | None]
    libraries: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> str:
        """The report as one JSON object: schema, ok, checks, versions, libraries."""
        body = {
            "schema": JSON_SCHEMA,
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
            "versions": self.versions,
            "libraries": self.libraries,
        }
        return json.dumps(body, indent=2)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``doctor`` and its arguments."""
    parser = subparsers.add_parser("doctor", help="check the installation and say what to mend")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when nothing failed, else 1."""
    report = examine()
    if args.json:
        print(report.to_json())
        return 0 if report.ok else 1
    rows = [[check.status, check.name, check.detail] for check in report.checks]
    print_table(["status", "check", "found"], rows, styles=_STYLES)
    for check in report.checks:
        if check.mend:
            print(f"{check.status} {check.name}: {check.mend}")
    count = {status: sum(c.status == status for c in report.checks) for status in _STYLES}
    print(f"{count['pass']} passed, {count['warn']} warned, {count['fail']} failed")
    return 0 if report.ok else 1


def examine() -> Report:
    """Run every check. One that crashes is reported as failed and stops no other."""
    checks: list[Check] = []
    for name, check in CHECKS:
        try:
            checks.extend(check())
        except Exception as error:
            crash = f"the check crashed: {type(error).__name__}: {error}"
            checks.append(Check(name, "fail", crash, "report this as a bug of cudnngraph"))
    return Report(tuple(checks), _versions(), env.loaded_libraries())


# -- the checks --------------------------------------------------------------------------------


def _settings() -> Iterator[Check]:
    try:
        settings.Settings.from_environ(os.environ)
    except SettingsError as error:
        yield Check("settings", "fail", str(error), "set the variable to a value it can have")
        return
    known = [v.name for v in settings.VARIABLES]
    names = [name for name in known if os.environ.get(name)]
    detail = ", ".join(names) or "no variable is set"
    others = sorted(name for name in set(os.environ) - set(known) if name.startswith("CUDNNGRAPH_"))
    if others:
        near = [each for name in others for each in get_close_matches(name, known)] or known
        mend = f"unset it, or set one of {', '.join(dict.fromkeys(near))}"
        yield Check("settings", "warn", f"{detail}; not known: {', '.join(others)}", mend)
    else:
        yield Check("settings", "pass", detail)


def _torch() -> Iterator[Check]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    detail = f"{torch.__version__} ({build}), {Path(torch.__file__).parent}"
    if _release(torch.__version__) < TORCH_MIN:
        wanted = ".".join(map(str, TORCH_MIN))
        yield Check("torch", "fail", detail, f"pip install 'torch>={wanted}'")
    else:
        yield Check("torch", "pass", detail)


def _frontend() -> Iterator[Check]:
    name = "cudnn-frontend"
    installed = env.distribution_version("nvidia-cudnn-frontend")
    try:
        module = env.frontend()
    except BackendUnavailable as error:
        if installed is None:
            yield Check(name, "warn", "not installed", env.how_to_get_frontend())
        elif "libcudnn" in str(error):
            yield Check(name, "warn", f"{installed}, without libcudnn", "see the check cudnn")
        else:
            yield Check(name, "fail", installed, str(error))
        return
    version = env.frontend_version()
    detail = f"{version}, {Path(str(module.__file__)).parent}"
    if not env.frontend_in_range(version):
        too_old = _release(version) < env.FRONTEND_MIN
        detail += ", not a release that this package is tested with"
        yield Check(name, "fail" if too_old else "warn", detail, env.how_to_get_frontend())
    elif installed is not None and installed != version:
        detail += f"; the installed distribution is {installed}"
        mend = "remove the other copy, or take its folder out of PYTHONPATH"
        yield Check(name, "fail", detail, mend)
    else:
        yield Check(name, "pass", detail)


def _cudnn() -> Iterator[Check]:
    library = _load_cudnn()
    if library.path is None:
        yield Check("cudnn", "warn", "not found", env.how_to_get_cudnn())
        return
    if library.error is not None:
        yield Check("cudnn", "fail", f"{library.path}: {library.error}", _mend_of(library))
        return
    copies = libraries.loaded_copies().get(libraries.CUDNN, ())
    if len(copies) > 1:
        mend = "keep one: clear LD_LIBRARY_PATH, or pip uninstall the copy that torch does not use"
        yield Check("cudnn", "fail", "two copies are loaded: " + ", ".join(copies), mend)
        return
    detail = f"{_cudnn_text()}, {library.path}"
    folder = Path(library.path).parent
    wheels = [wheel for wheel in libraries.wheel_folders() if not _same(wheel, folder)]
    if wheels and any(_same(folder, entry) for entry in libraries.library_path_folders()):
        detail += f", by LD_LIBRARY_PATH in place of the wheel at {wheels[0]}"
        yield Check("cudnn", "warn", detail, "unset LD_LIBRARY_PATH unless this is meant")
    else:
        yield Check("cudnn", "pass", detail)


def _cudnn_parts() -> Iterator[Check]:
    if not _load_cudnn().usable:
        return
    parts = libraries.load_cudnn_parts()
    home = Path(str(libraries.find_cudnn())).parent
    versions = {part.version for part in parts if part.version is not None}
    for part in parts:
        name = part.name.split(".")[0]
        detail = ", ".join(text for text in (part.version, part.path) if text)
        if part.path is None:
            yield Check(name, "fail", f"not found beside {home}", env.how_to_get_cudnn())
        elif not _same(Path(part.path).parent, home):
            mend = "clear LD_LIBRARY_PATH, so that all parts of cuDNN come from one folder"
            yield Check(name, "fail", f"{detail}, the rest is in {home}", mend)
        elif (
            part.error is not None and libraries.DRIVER in part.error
        ):  # from 9.28 on it is linked to it
            yield Check(name, "warn", f"{part.path}: {part.error}", _DRIVER_MEND)
        elif part.error is not None:
            yield Check(name, "fail", f"{part.path}: {part.error}", _mend_of(part))
        elif part.version is not None and len(versions) > 1:
            detail += ", beside parts of " + ", ".join(sorted(versions - {part.version}))
            yield Check(name, "fail", detail, env.how_to_get_cudnn())
        else:
            yield Check(name, "pass", detail)


def _cuda_python() -> Iterator[Check]:
    yield Check("cuda-python", "pass", _cuda_python_version() or "not installed")


def _driver() -> Iterator[Check]:
    library = libraries.load_driver()
    wanted = torch.version.cuda
    if library.path is None:
        yield Check("driver", "warn", f"no {libraries.DRIVER}", _DRIVER_MEND)
    elif library.error is not None:
        mend = "reinstall NVIDIA's driver"
        yield Check("driver", "fail", f"{library.path}: {library.error}", mend)
    elif library.version is None:
        detail = f"{library.path} names no CUDA version, as a stub does"
        yield Check("driver", "warn", detail, _DRIVER_MEND)
    elif wanted is not None and not torch.cuda.is_available():
        detail = f"CUDA {library.version}, {library.path}; torch is built for CUDA {wanted}"
        if _release(library.version)[0] < _release(wanted)[0]:
            mend = f"update NVIDIA's driver, or install a torch for CUDA {library.version}"
            yield Check("driver", "fail", detail, mend)
        else:
            yield Check("driver", "pass", detail)
    else:
        yield Check("driver", "pass", f"CUDA {library.version}, {library.path}")


def _nvrtc() -> Iterator[Check]:
    if not _load_cudnn().usable:
        return
    library = _load_nvrtc()
    if library.path is None:
        detail = f"no {library.name}: cuDNN cannot build its runtime-fused engines"
        mend = f"pip install 'nvidia-cuda-nvrtc=={_major(library)}.*'"
        yield Check("nvrtc", "warn", detail, mend if env.has_wheels() else env.how_to_get_cudnn())
    elif library.error is not None:
        mend = f"pip install --force-reinstall 'nvidia-cuda-nvrtc=={_major(library)}.*'"
        yield Check("nvrtc", "fail", f"{library.path}: {library.error}", mend)
    else:
        yield Check("nvrtc", "pass", f"{library.version}, {library.path}")


def _kernels() -> Iterator[Check]:
    """Check if kernels can be generated, and loaded by the driver."""
    why = kernel.why_none()
    if why is not None:
        mend = "pip install cuda-bindings nvidia-cuda-nvrtc"
        detail = f"none are generated, torch runs these steps: {first_line(why)}"
        yield Check("kernels", "warn", detail, mend if env.has_wheels() else env.how_to_get_cudnn())
        return
    version = compiler.version()
    detail = "generated by NVRTC {}.{}".format(*version)
    driver = libraries.load_driver().version
    if driver is not None and _release(driver)[0] < version[0]:
        detail += f", which the driver does not load: it is of CUDA {driver}"
        major = _release(driver)[0]
        mend = f"update NVIDIA's driver, or pip install 'cuda-bindings=={major}.*' and its NVRTC"
        yield Check("kernels", "warn", detail, mend)
    else:
        yield Check("kernels", "pass", detail)


def _gpu() -> Iterator[Check]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            mend = "install a CUDA build of torch to use a GPU"
        else:
            mend = "see the check driver; CUDA_VISIBLE_DEVICES may hide a GPU"
        yield Check("gpu", "warn", "torch sees none: the reference executor runs graphs", mend)
        return
    for index in range(torch.cuda.device_count()):
        device = env.device_identity(index)
        memory_gib = torch.cuda.get_device_properties(index).total_memory / 2**30
        major, minor = device.compute_capability
        detail = f"{device.name}, sm_{major}{minor}, {device.sm_count} SMs, {memory_gib:.0f} GiB"
        yield Check(f"gpu {index}", "pass", detail)


def _tested() -> Iterator[Check]:
    """Check if the tests ran with the installed versions; broken ones are left out."""
    release = str(torch.__version__)
    cudnn = libraries.cudnn_library_version() if _load_cudnn().usable else None
    try:
        env.frontend()
        frontend = env.frontend_version()
    except BackendUnavailable:
        frontend = None
    on_gpu = "; ".join(str(row) for row in tested.TESTED if row.gpus)
    if cudnn is None or frontend is None:
        detail = f"torch {release} by itself: "
        if tested.tested_torch(release):
            yield Check("tested", "pass", detail + "the tests of the reference ran with it")
        else:
            yield Check("tested", "warn", detail + "no test ran with it", f"tested: {on_gpu}")
        return
    row = tested.standing(release, cudnn, frontend)
    capabilities = {
        "sm_{}{}".format(*env.device_identity(index).compute_capability): index
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    }
    if row is None:
        these = f"torch {release}, cuDNN {tested.dotted(cudnn)}, frontend {frontend}"
        detail = f"no test ever ran with {these}"
        yield Check("tested", "warn", detail, f"a GPU ran the tests with {on_gpu}")
        return
    names = ", ".join(name for name, _ in row.gpus)
    others = sorted(set(capabilities) - {f"sm_{number}" for _, number in row.gpus})
    if not row.gpus:
        detail = f"{row}: tested without a GPU, never run on one"
        if capabilities:
            yield Check("tested", "warn", detail, f"a GPU ran the tests with {on_gpu}")
        else:
            yield Check("tested", "pass", detail)
    elif others:
        detail = f"{row}: tested on {names}, never on a GPU of {', '.join(others)}"
        yield Check("tested", "warn", detail, "compare results with those of device='cpu'")
    else:
        yield Check("tested", "pass", f"{row}: tested on {names}")


def _checked() -> Iterator[Check]:
    """Say when `cudnngraph check` went over each GPU with these versions, and what it found."""
    if not torch.cuda.is_available() or not _load_cudnn().usable:
        return
    try:
        env.frontend()
        for index in range(torch.cuda.device_count()):
            name = f"gpu {index} checked"
            known = found_bad.barred(index)
            if known is None:
                detail = "never with these versions; `cudnngraph check --quick` does it in minutes"
                yield Check(name, "pass", detail)
                continue
            yield Check(name, "pass", _sweep_of(known.described))
    except (BackendUnavailable, SettingsError):
        return  # the checks of these say what is wrong


def _sweep_of(described: Mapping[str, object]) -> str:
    counts = described.get("counts")
    counts = counts if isinstance(counts, dict) else {}
    numbers = {name: n for name, n in counts.items() if type(n) is int}
    wrong = numbers.get("wrong", 0) + numbers.get("fault", 0)
    ran = wrong + numbers.get("right", 0)
    only = f", only '{described['only']}'" if described.get("only") else ""
    ended = "" if described.get("complete") is True else ", not to its end"
    return (
        f"on {str(described.get('checked'))[:10]} ({described.get('mode')}{only}{ended}): {wrong} "
        f"of {ran} plans are wrong" + (", and passed over" if wrong else "")
    )


def _cache() -> Iterator[Check]:
    try:
        folder = settings.Settings.from_environ(os.environ).cache_dir
    except SettingsError:
        yield Check("cache", "warn", "unknown", "see the check settings")
        return
    memory_only = "plans are kept in memory only"
    elsewhere = "set CUDNNGRAPH_CACHE_DIR to a directory of yours"
    try:
        PlanStore(folder, seeds=None).check_directory()
    except OSError as error:
        yield Check("cache", "warn", f"{error}: {memory_only}", f"mend that, or {elsewhere}")
        return
    if not folder.exists():
        parent = next(path for path in folder.parents if path.exists())
        if os.access(parent, os.W_OK | os.X_OK) and not folder.is_symlink():
            yield Check("cache", "pass", f"{folder}, made on first use")
        else:
            detail = f"{folder} cannot be made in {parent}: {memory_only}"
            yield Check("cache", "warn", detail, elsewhere)
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    detail = f"{folder}, mode {mode:04o}, owner {_owner(folder)}"
    if os.access(folder, os.W_OK | os.X_OK):
        yield Check("cache", "pass", detail)
    else:
        mend = f"chmod 700 {folder}, or {elsewhere}"
        yield Check("cache", "warn", f"{detail}, not writable: {memory_only}", mend)


CHECKS: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
    ("settings", _settings),
    ("torch", _torch),
    ("cudnn-frontend", _frontend),
    ("cudnn", _cudnn),
    ("cudnn parts", _cudnn_parts),
    ("cuda-python", _cuda_python),
    ("driver", _driver),
    ("nvrtc", _nvrtc),
    ("kernels", _kernels),
    ("gpu", _gpu),
    ("tested", _tested),
    ("checked", _checked),
    ("cache", _cache),
)


# -- what the checks share ---------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    """Version of everything that the report is about, by a fixed set of keys."""

    def probe(read: Callable[[], str | None]) -> str | None:
        try:
            return read()
        except Exception:  # the check of the same thing says what is wrong
            return None

    return {
        "python": sys.version.split()[0],
        "cudnngraph": settings.VERSION,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": probe(_cudnn_text),
        "cudnn_frontend": env.distribution_version("nvidia-cudnn-frontend"),
        "cuda_python": _cuda_python_version(),
        "driver": probe(lambda: libraries.load_driver().version),
        "nvrtc": probe(lambda: _load_nvrtc().version),
    }


def _cuda_python_version() -> str | None:
    return env.distribution_version("cuda-python") or env.distribution_version("cuda-bindings")


def _load_cudnn() -> Library:
    """libcudnn, after the frontend had its chance to load the one it prefers."""
    with contextlib.suppress(BackendUnavailable):
        env.frontend()
    home = libraries.find_cudnn()
    return libraries.load(libraries.CUDNN, [home] if home else [])


def _load_nvrtc() -> Library:
    cuda = libraries.cudnn_cuda_version()
    return libraries.load_nvrtc(cuda[0]) if cuda else Library("libnvrtc.so")


def _mend_of(library: Library) -> str:
    """Say how to mend a part of cuDNN that is there and broken."""
    folder = Path(str(library.path)).parent
    if any(_same(folder, entry) for entry in libraries.library_path_folders()):
        return f"take {folder} out of LD_LIBRARY_PATH"
    return env.how_to_get_cudnn().replace("pip install ", "pip install --force-reinstall ")


def _major(library: Library) -> str:
    return library.name.rpartition(".")[2]


def _cudnn_text() -> str | None:
    version = libraries.cudnn_library_version()
    return None if version is None else tested.dotted(version)


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" → (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, NotImplementedError):
        return str(path.stat().st_uid)
