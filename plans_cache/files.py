"""Files in folders of the user's own: whole or not there, and never through somebody's link."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp"  # how the names of files that are being written end

_NEVER_FOLLOW = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)
Identity = tuple[int, int, int]


class Refused(OSError):
    """A path that is there and is not safe to use."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} {why}")


def _user() -> int | None:
    return os.geteuid() if hasattr(os, "geteuid") else None


def check_private(directory: Path) -> None:
    """Raise :class:`Refused` unless this user owns ``directory`` and nobody else may write to it.

    It may be a link that the user, or root, has set. FileNotFoundError where nothing is.
    """
    link, found = os.lstat(directory), os.stat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(directory, "is not a directory")
    user = _user()
    if user is None:
        return
    if found.st_uid != user or link.st_uid not in (user, 0):
        owner = found.st_uid if found.st_uid != user else link.st_uid
        raise Refused(directory, f"belongs to user {owner}, this is user {user}")
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise Refused(directory, f"has mode {mode:04o}: others may write to it; chmod go-w it")


def check_folder(folder: Path) -> None:
    """Raise :class:`Refused` unless ``folder`` is a directory itself, not a link, and the user's.

    FileNotFoundError where nothing is.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(folder, "is not a directory")
    if found.st_uid not in (_user(), 0) and _user() is not None:
        raise Refused(folder, f"belongs to user {found.st_uid}")


def check_unwritable(path: Path) -> None:
    """Raise :class:`Refused` where others than the owner may write to what is at ``path``."""
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & 0o022 and _user() is not None:
        raise Refused(path, f"has mode {mode:04o}: others may write to it; chmod go-w it")


def measure_own(folder: Path) -> tuple[int, int]:
    """Count the files in ``folder`` at any depth, and their bytes; links are not followed.

    Raises :class:`Refused` unless it is a directory itself, and all of it is the user's.
    """
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise Refused(folder, "is not a directory")
    count = size_bytes = 0
    for place, folders, names in os.walk(folder, onerror=_raise):
        for path in (Path(place), *(Path(place, name) for name in (*folders, *names))):
            found = os.lstat(path)
            if _user() not in (None, found.st_uid):
                raise Refused(path, f"belongs to user {found.st_uid}")
            if not stat.S_ISDIR(found.st_mode):
                count, size_bytes = count + 1, size_bytes + found.st_size
    return count, size_bytes


def _raise(error: OSError) -> None:
    raise error


def remove_own(folder: Path) -> None:
    """Remove ``folder`` and all that is in it, as :func:`measure_own` allows; no link is followed.

    Raises OSError where not all of it could be removed.
    """
    measure_own(folder)
    shutil.rmtree(folder)


def make_folder(folder: Path) -> None:
    """The folder, made with mode 0700 where it is not there, and checked."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check_folder(folder)


def open_own(path: Path, flags: int) -> int:
    """``os.open`` with mode 0600 that raises :class:`Refused` for a link."""
    try:
        return os.open(path, flags | _NEVER_FOLLOW, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise Refused(path, "is a symbolic link") from None
        raise


def read(path: Path, limit_bytes: int) -> bytes:
    """All of a regular file; :class:`Refused` for anything else, or over the limit."""
    # Without O_NONBLOCK a planted FIFO would hold the reader for good.
    file = open_own(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        return read_open(file, path, limit_bytes)
    finally:
        os.close(file)


def read_open(file: int, path: Path, limit_bytes: int) -> bytes:
    """:func:`read` of what is open as ``file``, from where it stands."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise Refused(path, "is not a regular file")
    if _user() is not None and found.st_uid not in (_user(), 0):
        raise Refused(path, f"belongs to user {found.st_uid}")
    if found.st_size > limit_bytes:
        raise Refused(path, f"is over {limit_bytes} bytes long")
    with open(file, "rb", closefd=False) as stream:
        return stream.read(found.st_size)  # no more: the limit would be set aside in memory


def write(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: after a crash at any moment it is the old file or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(6)}{TEMPORARY}")
    file = open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    with suppress(OSError):  # some file systems cannot sync a directory, Windows cannot open one
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def identity(path: Path) -> Identity:
    """The identity of the file at a path (inode, time, size); a link's own, not its target's."""
    found = os.lstat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size


def move_aside(path: Path, seen: Identity, target: Path) -> bool:
    """Move the file that was ``seen`` at ``path`` to ``target``; whether that was done.

    A file that a writer has put in its place meanwhile stays where it is.
    """
    os.replace(path, target)
    if identity(target) == seen:
        return True
    with suppress(FileExistsError):
        os.link(target, path, follow_symlinks=False)
    os.unlink(target)
    return False
