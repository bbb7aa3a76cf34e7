"""Files whose names a user gives: a regular file is replaced as a whole, all else written into.

To replace what is no regular file would destroy it: a device node, a FIFO, a symbolic link. A link
stays one, and the file that it leads to is replaced.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_LINKS_MAX = 40  # as many as Linux follows
_MAY_NOT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def check(path: str | Path) -> None:
    """Raise OSError if :func:`writing` would refuse ``path``; its ``strerror`` says why."""
    _look(Path(path))


@contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """A stream into the file ``path``; a regular file is the old one until all is written.

    Other than regular files are opened and written into. Links are followed. A file keeps its mode,
    and one that may be written but not replaced (mounted, in another user's folder) is overwritten.
    Raises OSError where there is a folder, no folder to write into, or no permission.
    """
    place, found = _look(Path(path))
    stream, temporary = _opened(place, found)
    try:
        with stream:
            yield stream
        if temporary is not None:
            _put_in_place(temporary, place, found)
    except BaseException:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        raise


def write(path: str | Path, content: str | bytes) -> None:
    """Write all of the file ``path``, text as UTF-8; see :func:`writing`."""
    with writing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def is_standard_output(path: str | Path) -> bool:
    """Whether ``path`` is what this process has as its standard output, as /dev/stdout is."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False


def _look(path: Path) -> tuple[Path, os.stat_result | None]:
    """Follow the links at ``path``, and return where they lead and what is there."""

    def refused(number: int, why: str) -> OSError:
        return OSError(number, why, str(path))  # of the class that belongs to the number

    place = path
    for _ in range(_LINKS_MAX):
        if not place.is_symlink() or _process_of(place) is not None:
            break
        place = place.parent / os.readlink(place)
    try:
        found = os.stat(place)
    except FileNotFoundError:
        if not place.parent.is_dir():
            raise refused(errno.ENOENT, f"there is no folder {place.parent}") from None
        if not os.access(place.parent, os.W_OK | os.X_OK):
            raise refused(errno.EACCES, os.strerror(errno.EACCES)) from None
        return place, None
    if stat.S_ISDIR(found.st_mode):
        raise refused(errno.EISDIR, "is a folder; give the name of a file")
    if not os.access(place, os.W_OK):
        raise refused(errno.EACCES, os.strerror(errno.EACCES))
    return place, found


def _opened(place: Path, found: os.stat_result | None) -> tuple[BinaryIO, Path | None]:
    """A stream, and the temporary file that it is of; None where it is of ``place`` itself."""
    process = _process_of(place)
    if process == os.getpid() and place.name.isdecimal():
        # By its name a file that is open already would be written from its beginning.
        return open(os.dup(int(place.name)), "wb"), None
    if found is None or (stat.S_ISREG(found.st_mode) and process is None):
        temporary = place.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            return open(temporary, "xb"), temporary
        except OSError as error:
            if found is None or error.errno not in _MAY_NOT:
                raise
    return open(place, "wb"), None


def _process_of(path: Path) -> int | None:
    """The process of which ``path`` is an open file (/proc/1234/fd/1), None for other paths.

    Such a link leads to the open file, whatever its text says.
    """
    match = re.fullmatch(r"/proc/(\d+)(/task/\d+)?/fd", os.path.realpath(path.parent))
    return None if match is None else int(match[1])


def _put_in_place(temporary: Path, place: Path, found: os.stat_result | None) -> None:
    if found is not None:
        with suppress(OSError):  # some file systems have no modes
            os.chmod(temporary, stat.S_IMODE(found.st_mode) & 0o777)
    try:
        os.replace(temporary, place)
    except OSError as error:
        if found is None or error.errno not in _MAY_NOT:
            raise
        with open(temporary, "rb") as source, open(place, "wb") as target:
            shutil.copyfileobj(source, target)
        temporary.unlink()
