"""What device code needs of a GPU, read from its file: registers, local and shared memory.

A cubin is an ELF file. The attributes of a kernel lie in sections ``.nv.info`` as records: how the
value is given (1 byte), what it is (1 byte), and 2 bytes that are the value or its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SYMBOLS = 2  # SHT_SYMTAB
_FUNCTION = 2  # STT_FUNC
_SIZED = 4  # EIFMT_SVAL: the 2 bytes are the length of a value behind them
_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE: a symbol, a number

# From sm_90 on the driver has the first bytes of a block's shared memory; they are counted in.
_RESERVED, _RESERVED_BYTES = ".nv.shared.reserved.0", 1024


@dataclass(frozen=True)
class Resources:
    """What a kernel needs: registers and bytes of local memory of a thread, and bytes of shared
    memory of a block.

    Local memory holds what registers do not: spilled values, and arrays at indices that are not
    known.
    """

    registers: int
    local_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        local = f", {self.local_bytes} B local" if self.local_bytes else ""
        return f"{self.registers} registers, {self.shared_bytes} B shared{local}"


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    offset: int
    size: int
    link: int


def resources(cubin: bytes) -> Resources:
    """What a cubin's functions need at most. Raises ``ValueError`` for what is no cubin."""
    try:
        return _resources(cubin)
    except (struct.error, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"not a cubin: {error!r}") from None


def _resources(cubin: bytes) -> Resources:
    if cubin[:6] != _MAGIC:
        raise ValueError("not a cubin: it is no ELF file of 64 bits")
    sections = _sections(cubin)
    kernels = [each.name[6:] for each in sections if each.name.startswith(".text.")]
    if not kernels:
        raise ValueError("a cubin without a kernel")
    symbols = _symbols(cubin, sections)
    most = {_REGISTERS: 0, _FRAME: 0}
    for section in sections:
        if section.name != ".nv.info" and section.name[9:] not in kernels:
            continue
        for attribute, value in _records(cubin[section.offset : section.offset + section.size]):
            if attribute not in most or len(value) != 8:
                continue
            symbol, number = struct.unpack("<II", value)
            if symbols[symbol] in kernels:
                most[attribute] = max(most[attribute], number)
    sizes = {each.name: each.size for each in sections}
    shared = max(sizes.get(f".nv.shared.{kernel}", 0) for kernel in kernels)
    if shared and _RESERVED in sizes:
        shared -= _RESERVED_BYTES
    return Resources(most[_REGISTERS], most[_FRAME], shared)


def _sections(cubin: bytes) -> list[_Section]:
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    found = []
    for number in range(count):
        name, type_, _, _, offset, length, link, _, _, _ = struct.unpack_from(
            "<IIQQQQIIQQ", cubin, at + number * size
        )
        found.append((name, _Section("", type_, offset, length, link)))
    start = found[names][1].offset
    return [
        _Section(_text(cubin, start + name), each.type, each.offset, each.size, each.link)
        for name, each in found
    ]


def _symbols(cubin: bytes, sections: list[_Section]) -> list[str]:
    """The names of symbols, by number; "" for what is no function."""
    names = []
    for section in sections:
        if section.type != _SYMBOLS:
            continue
        start = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, info = struct.unpack_from("<IB", cubin, at)
            names.append(_text(cubin, start + name) if info & 15 == _FUNCTION else "")
    return names


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, number = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + number]
            at += number


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()
