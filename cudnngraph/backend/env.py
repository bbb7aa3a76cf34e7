"""The environment of the backend: the frontend, versions, identity of the device.

Importing this module imports neither ``cudnn`` nor ``cuda`` and makes no CUDA call; the first call
of :func:`frontend` does the former, the first of :func:`device_identity` the latter.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import logging
import platform
import sys
from dataclasses import dataclass
from types import ModuleType

import torch

from ..errors import BackendUnavailable
from ..ir import versions
from .libraries import CUDNN, find_cudnn, loaded_libraries

__all__ = [
    "FRONTEND_MIN",
    "FRONTEND_BELOW",
    "DeviceIdentity",
    "EnvKey",
    "capability",
    "cudnn_version",
    "device_identity",
    "distribution_version",
    "env_key",
    "frontend",
    "frontend_in_range",
    "frontend_version",
    "has_wheels",
    "how_to_get_cudnn",
    "how_to_get_frontend",
    "loaded_libraries",
    "uuid",
]

FRONTEND_MIN = (1, 28)
FRONTEND_BELOW = (1, 33)

_log = logging.getLogger(__name__)


# -- the frontend ------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def frontend() -> ModuleType:
    """The module ``cudnn``, imported on the first call, with libcudnn loaded.

    Raises:
        BackendUnavailable: the frontend is not installed or cannot be imported, or libcudnn
            cannot be loaded; the message says what to install.
    """
    _preload_cudnn()
    try:
        import cudnn
    except ModuleNotFoundError as error:
        if error.name != "cudnn":
            raise BackendUnavailable(_broken_frontend(error)) from error
        raise BackendUnavailable(
            f"the cuDNN frontend is not installed; {how_to_get_frontend()}"
        ) from error
    except Exception as error:  # its import runs a loader that raises anything
        raise BackendUnavailable(_broken_frontend(error)) from error
    try:
        cudnn.backend_version()
    except Exception as error:
        raise BackendUnavailable(f"{_why_no_library()}; {how_to_get_cudnn()}") from error
    if not frontend_in_range(cudnn.__version__):
        _log.warning(
            "cuDNN frontend %s is outside the supported range %s; %s",
            cudnn.__version__,
            _range_text(),
            how_to_get_frontend(),
        )
    return cudnn  # type: ignore[no-any-return,unused-ignore]


def cudnn_version() -> int:
    """Version of the loaded libcudnn as a number: 91900 is 9.19.0."""
    return int(frontend().backend_version())


def frontend_version() -> str:
    """Version of the imported frontend, "1.28.0"."""
    return str(frontend().__version__)


def frontend_in_range(version: str) -> bool:
    """Whether the frontend ``version`` is one that this package supports."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return FRONTEND_MIN <= tuple(numbers) < FRONTEND_BELOW


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, None if it is not installed. Imports nothing of it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_wheels() -> bool:
    """Whether NVIDIA ships wheels of cuDNN and its frontend for this platform."""
    machine = platform.machine().lower()
    if sys.platform == "linux":
        return machine in ("x86_64", "aarch64")
    return sys.platform == "win32" and machine == "amd64"


def how_to_get_cudnn() -> str:
    """Advice on getting libcudnn here, as the second half of a message."""
    if not has_wheels():
        return _NO_WHEELS
    if torch.version.cuda is not None:
        return "reinstall torch, whose CUDA build brings cuDNN"
    return "pip install nvidia-cudnn-cu13==9.19.0.56"


_NO_WHEELS = (
    f"NVIDIA ships no wheels for {sys.platform} on {platform.machine()}, "
    "graphs run there by the reference executor, on CPU tensors"
)


def how_to_get_frontend() -> str:
    """Advice on getting a supported frontend here, as the second half of a message."""
    return f"pip install 'nvidia-cudnn-frontend{_range_text()}'" if has_wheels() else _NO_WHEELS


def _range_text() -> str:
    low, below = (".".join(map(str, version)) for version in (FRONTEND_MIN, FRONTEND_BELOW))
    return f">={low},<{below}"


def _broken_frontend(error: Exception) -> str:
    return (
        "the cuDNN frontend is installed and cannot be imported "
        f"({type(error).__name__}: {error}); "
        f"pip install --force-reinstall --no-deps 'nvidia-cudnn-frontend{_range_text()}'"
    )


def _why_no_library() -> str:
    path = find_cudnn()
    try:
        ctypes.CDLL(str(path or CUDNN))
    except OSError as error:
        return f"libcudnn cannot be loaded ({error})"
    return f"the cuDNN frontend does not see the libcudnn at {path or CUDNN}"


def _preload_cudnn() -> None:
    """Load the cuDNN wheel where the frontend would not look for it.

    The frontend searches ``LD_LIBRARY_PATH``, one site-packages folder and the system. A wheel in
    another folder of ``sys.path`` (a user's site, a venv over system packages) is found by the
    system's loader once it is in the process. torch, imported above, loads its own.
    """
    path = find_cudnn()
    if path is not None and CUDNN not in loaded_libraries():
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            _log.debug("cannot load %s: %s", path, error)  # the frontend will say so


# -- devices -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceIdentity:
    """The kind of a GPU, and which one of the machine it is."""

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    index: int


@dataclass(frozen=True)
class EnvKey:
    """The environment that a plan depends on. Two equal keys may share plans."""

    cudnn_version: int
    frontend_version: str
    gpu_name: str
    compute_capability: tuple[int, int]
    sm_count: int
    schema: int


@functools.cache
def device_identity(index: int) -> DeviceIdentity:
    """Identity of the CUDA device ``index``; initialises CUDA on its first call."""
    properties = torch.cuda.get_device_properties(index)
    return DeviceIdentity(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        index=index,
    )


def uuid(index: int) -> str:
    """Return the UUID of the CUDA device ``index``."""
    return str(torch.cuda.get_device_properties(index).uuid)


@functools.cache
def env_key(index: int) -> EnvKey:
    """The environment's part of the key of every plan for the CUDA device ``index``."""
    device = device_identity(index)
    return EnvKey(
        cudnn_version=cudnn_version(),
        frontend_version=frontend_version(),
        gpu_name=device.name,
        compute_capability=device.compute_capability,
        sm_count=device.sm_count,
        schema=versions.ENVIRONMENT,
    )


def capability(index: int) -> int:
    """Compute capability of the CUDA device ``index``: 90 for 9.0."""
    major, minor = env_key(index).compute_capability
    return 10 * major + minor
