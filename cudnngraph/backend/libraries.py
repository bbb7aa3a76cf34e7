"""NVIDIA's shared libraries: which are loaded, which would be, from where, and of what version.

cuDNN is one small library that loads seven others by name while it works. Where some of them come
from another place than the rest (``LD_LIBRARY_PATH`` before a wheel), plans fail without a word;
``cudnngraph doctor`` tells such cases apart with what is here. Nothing here initialises CUDA.
A folder that cannot be read is skipped, as the loader does (``os.path.exists`` raises nothing).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CUDNN = "libcudnn.so.9"
DRIVER = "libcuda.so.1"
CUDNN_PARTS = (
    "libcudnn_graph.so.9",
    "libcudnn_ops.so.9",
    "libcudnn_cnn.so.9",
    "libcudnn_adv.so.9",
    "libcudnn_engines_precompiled.so.9",
    "libcudnn_engines_runtime_compiled.so.9",
    "libcudnn_heuristic.so.9",
)
# Came with later releases than 9.19: looked at where they exist.
CUDNN_OPTIONAL_PARTS = ("libcudnn_ext.so.9", "libcudnn_engines_tensor_ir.so.9")

_OF_INTEREST = re.compile(r"lib(cudnn(_\w+)?|cuda|nvrtc(-builtins)?|cudart|cublas(Lt)?)\.so[.\d]*$")
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Library:
    """One shared library after an attempt to load it.

    ``path`` is where it was found, None if nowhere. ``error`` is the loader's message where it was
    found and could not be loaded. ``version`` is what the library says of itself.
    """

    name: str
    path: str | None = None
    error: str | None = None
    version: str | None = None

    @property
    def usable(self) -> bool:
        """Whether the library was found and is loaded."""
        return self.path is not None and self.error is None


def loaded_copies(maps: str | None = None) -> dict[str, tuple[str, ...]]:
    """Every loaded library of NVIDIA's: file name → the paths that it is mapped from.

    More than one path means that two copies of one library are in the process. Read from
    ``maps``, by default ``/proc/self/maps``; empty where the system has no such file.
    """
    if maps is None:
        maps = _MAPS.read_text() if _MAPS.exists() else ""
    found: dict[str, list[str]] = {}
    for line in maps.splitlines():
        # address perms offset dev inode path; a path may hold spaces
        columns = line.split(maxsplit=5)
        if len(columns) < 6 or not columns[5].startswith("/"):
            continue
        path = columns[5].removesuffix(" (deleted)")
        name = path.rpartition("/")[2]
        if _OF_INTEREST.match(name) and path not in found.setdefault(name, []):
            found[name].append(path)
    return {name: tuple(paths) for name, paths in sorted(found.items())}


def loaded_libraries() -> dict[str, str]:
    """File name → path of every loaded libcudnn*, libcuda, libnvrtc*, libcudart, libcublas*."""
    return {name: paths[0] for name, paths in loaded_copies().items()}


def library_path_folders() -> list[Path]:
    """The folders of ``LD_LIBRARY_PATH``, which the loader searches before those of a wheel."""
    return [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]


def wheel_folders() -> list[Path]:
    """Folders of an installed cuDNN wheel, in the order of ``sys.path``."""
    folders = (Path(entry) / "nvidia" / "cudnn" / "lib" for entry in sys.path if entry)
    return [folder for folder in folders if os.path.exists(folder / CUDNN)]


def find_cudnn() -> Path | None:
    """Return where libcudnn is loaded from, or would be; None if only the system's loader knows."""
    loaded = loaded_libraries().get(CUDNN)
    if loaded is not None:
        return Path(loaded)
    for folder in [*library_path_folders(), *wheel_folders()]:
        if os.path.exists(folder / CUDNN):
            return folder / CUDNN
    return None


def load(name: str, candidates: Iterable[Path] = ()) -> Library:
    """Load ``name``: the first of ``candidates`` that exists, else as the system finds it."""
    path = next((str(path) for path in candidates if os.path.exists(path)), None)
    try:
        ctypes.CDLL(path or name)
    except OSError as error:
        # A bare name that is nowhere is absent; any other message is of a file that was found.
        absent = path is None and "cannot open shared object file" in str(error)
        absent = absent and str(error).startswith(name)
        return Library(name) if absent else Library(name, path or name, str(error))
    return Library(name, path or _loaded_path(name) or name)


def load_cudnn_parts() -> list[Library]:
    """Load every sublibrary of the cuDNN that is loaded, from where cuDNN itself would load it.

    That is ``LD_LIBRARY_PATH`` first and the folder of the library that asks second (its run
    path). The parts that have a version check are loaded by cuDNN itself and must pass it.
    """
    home = find_cudnn()
    if home is None:
        return []
    mismatches = _version_checks(home)
    parts = []
    for name in CUDNN_PARTS + CUDNN_OPTIONAL_PARTS:
        folders = [*library_path_folders(), home.parent]
        loaded = _loaded_path(name)
        part = Library(name, loaded) if loaded else load(name, (f / name for f in folders))
        if part.path is None and name in CUDNN_OPTIONAL_PARTS:
            continue
        error = part.error or mismatches.get(name)
        version = _version_of_file(part.path)
        parts.append(Library(name, part.path, error, version))
    return parts


def load_driver() -> Library:
    """The CUDA driver, with the CUDA version that it supports ("13.0"). Needs no GPU."""
    library = load(DRIVER)
    if not library.usable:
        return library
    number = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(number))
    except AttributeError as error:
        return Library(library.name, library.path, f"it is no CUDA driver: {error}")
    if status != 0 or number.value == 0:
        return library
    return Library(library.name, library.path, None, _dotted(number.value))


def load_nvrtc(cuda_major: int) -> Library:
    """NVRTC of one CUDA major version, which cuDNN's runtime-fused engines compile with.

    Searched as cuDNN does: what is loaded, ``LD_LIBRARY_PATH``, the wheel beside cuDNN's, the
    system.
    """
    name = f"libnvrtc.so.{cuda_major}"
    loaded = _loaded_path(name)
    library = Library(name, loaded) if loaded else load(name, _nvrtc_candidates(name, cuda_major))
    if library.path is None or library.error is not None:
        return library
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    ctypes.CDLL(library.path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return Library(name, library.path, None, f"{major.value}.{minor.value}")


def cudnn_library_version() -> int | None:
    """Version of the loaded cuDNN as a number, 91900 is 9.19.0; None without cuDNN."""
    return _call_cudnn("cudnnGetVersion")


def cudnn_cuda_version() -> tuple[int, int] | None:
    """(major, minor) of the CUDA that the loaded cuDNN was built with; None without cuDNN."""
    number = _call_cudnn("cudnnGetCudartVersion")
    return None if number is None else (number // 1000, number % 1000 // 10)


def _call_cudnn(function_name: str) -> int | None:
    """The answer of a function ``size_t f(void)`` of the loaded cuDNN, None without cuDNN."""
    home = find_cudnn()
    if home is None:
        return None
    function = getattr(ctypes.CDLL(str(home)), function_name)
    function.restype = ctypes.c_size_t
    return int(function())


def _nvrtc_candidates(name: str, cuda_major: int) -> Iterator[Path]:
    for folder in library_path_folders():
        yield folder / name
    home = find_cudnn()
    if home is not None:
        packages = home.parent.parent.parent
        yield packages / f"cu{cuda_major}" / "lib" / name
        yield packages / "cuda_nvrtc" / "lib" / name


def _version_checks(home: Path) -> dict[str, str]:
    """Complaints of cuDNN about its own parts: file name → message, for parts that do not fit."""
    library = ctypes.CDLL(str(home))
    library.cudnnGetErrorString.restype = ctypes.c_char_p
    wrong = {}
    for part in ("graph", "ops", "cnn", "adv"):
        check = getattr(library, f"cudnn{part.capitalize()}VersionCheck", None)
        status = 0 if check is None else check()
        if status != 0:
            wrong[f"libcudnn_{part}.so.9"] = library.cudnnGetErrorString(status).decode()
    return wrong


def _loaded_path(name: str) -> str | None:
    """Path of a loaded library by its name, or by its name and more version digits."""
    loaded = loaded_libraries()
    longer = (path for key, path in loaded.items() if key.startswith(name + "."))
    return loaded.get(name) or next(longer, None)


def _version_of_file(path: str | None) -> str | None:
    """9.19.0 of ``libcudnn_ops.so.9 → libcudnn_ops.so.9.19.0``; None where the name is shorter."""
    match = re.search(r"\.so\.(\d+\.\d+[\d.]*)$", os.path.realpath(path)) if path else None
    return match.group(1) if match else None


def _dotted(cuda_version: int) -> str:
    """13000 → "13.0"."""
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"
