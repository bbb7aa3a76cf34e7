"""Compile the text of a kernel to a cubin by NVRTC, without a GPU.

The only importer of ``cuda.bindings.nvrtc``, and that late: it takes 0.1 s.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from ..errors import NotSupported

#: NVRTC's options beside the architecture. No fast math: functions are as accurate as torch's.
OPTIONS = ("--std=c++17", "-default-device", "--extra-device-vectorization")

_lock = threading.Lock()  # NVRTC's own first call is not known to be safe in several threads


@cache
def nvrtc() -> Any:
    """The bindings of NVRTC. Raises :class:`NotSupported` where they or the library are missing."""
    try:
        from cuda.bindings import nvrtc as found

        found.nvrtcVersion()
    except Exception as error:  # the bindings' own errors have no common base
        raise NotSupported("a generated kernel", [f"NVRTC is missing: {error}"]) from None
    return found


def version() -> tuple[int, int]:
    """The version of NVRTC. Raises :class:`NotSupported`."""
    _, major, minor = nvrtc().nvrtcVersion()
    return int(major), int(minor)


def cubin(text: str, capability: int) -> bytes:
    """Device code of a kernel for one compute capability, as 90.

    Raises :class:`NotSupported` with what the compiler says.
    """
    library = nvrtc()
    options = [f"--gpu-architecture=sm_{capability}".encode()]
    options += [option.encode() for option in OPTIONS]
    with _lock:
        error, program = library.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
        _check(library, error)
        try:
            (error,) = library.nvrtcCompileProgram(program, len(options), options)
            if error != library.nvrtcResult.NVRTC_SUCCESS:
                raise NotSupported("a generated kernel", [_log(library, program)])
            error, size = library.nvrtcGetCUBINSize(program)
            _check(library, error)
            code = bytes(b" " * size)
            (error,) = library.nvrtcGetCUBIN(program, code)
            _check(library, error)
            return code
        finally:
            library.nvrtcDestroyProgram(program)


def _log(library: Any, program: Any) -> str:
    """What the compiler says, its first error."""
    error, size = library.nvrtcGetProgramLogSize(program)
    _check(library, error)
    log = b" " * size
    library.nvrtcGetProgramLog(program, log)
    lines: list[str] = log.rstrip(b"\0").decode(errors="replace").splitlines()
    wrong = [line for line in lines if "error" in line]
    return (wrong or lines or ["NVRTC gives no reason"])[0]


def _check(library: Any, error: Any) -> None:
    if error != library.nvrtcResult.NVRTC_SUCCESS:
        raise NotSupported("a generated kernel", [f"NVRTC: {error}"])
