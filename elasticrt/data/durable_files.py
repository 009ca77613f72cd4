"""Files that are written whole or not at all, and read only when they are what they seem.

Writing: a temporary in the same directory, fsync, rename, fsync of the directory. Reading: relative to an open
directory, no symbolic links, regular files with one name only. Others may be able to write to the checkpoint directory:
what is found there is checked, not trusted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from elasticrt.ipc.file_modes import DIRECTORY_MODE, FILE_MODE

Made = TypeVar("Made")

PIECE_BYTES = 1 << 18
"""How much of a large file is read at a time."""


class Unfit(Exception):  # noqa: N818  A finding about a file that is then skipped, not a failure of the program.
    """The file is no plain file of one name, or not of the size or content that it should have. The text says which."""


def put(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


class Directory:
    """An open directory, created when missing. All names are relative to it and contain no "/".

    Writing raises OSError when the path has come to lead elsewhere (unmounted, replaced): an empty mount point must not
    be filled.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        """Raises OSError when it cannot be opened, Unfit when strangers could plant files in it."""
        if create:
            _make(path)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        mode = os.fstat(self.fd).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            os.close(self.fd)
            raise Unfit(f"it is writable by everybody (mode {stat.S_IMODE(mode):o}): chmod o-w")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    @property
    def is_removed(self) -> bool:
        """Whether it was deleted, and nothing is there now. One that is unmounted was not deleted: it may come back."""
        if os.path.lexists(self.path):
            return False
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:  # On NFS a deleted one cannot be asked; the next write fails with the reason.
            return False

    def names(self) -> list[str]:
        """The names in it, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208  Of the open directory, not of a path.

    def remove(self, name: str) -> None:
        """Delete a file; one that is missing is not an error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def rename(self, name: str, new: str) -> None:
        """Rename a file, durably; one that is missing is not an error. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.fsync(self.fd)

    def write(self, name: str, temporary: str, fill: Callable[[int], Made]) -> Made:
        """Make a file durable. Returns what `fill` returns.

        Args:
            name: of the file.
            temporary: its name until it is whole.
            fill: writes the content to the descriptor that it gets.

        Raises OSError (no space, read-only ...) and what `fill` raises; then nothing is left of it, and a file that had
        this name before is untouched.
        """
        mine, there = os.fstat(self.fd), self.path.stat()  # FileNotFoundError is an OSError and says the same.
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise OSError(f"{self.path} is not the directory of the start any more (unmounted or replaced?)")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, FILE_MODE, dir_fd=self.fd)
        try:
            try:
                made = fill(fd)
                # An fsync that failed is never tried again: the kernel may have dropped the pages and would say yes.
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(temporary)
            raise
        os.fsync(self.fd)
        return made

    def look(self, name: str, size: int) -> None:
        """Raises Unfit when this is no plain file of `size` bytes, OSError."""
        with self._plain(name, size):
            pass

    def read(self, name: str, *, size_max: int) -> bytearray:
        """The whole content of a plain file. Raises Unfit when it is none, or larger than `size_max` bytes; OSError."""
        content = bytearray()
        with self._plain(name) as fd:
            found = os.fstat(fd).st_size
            if found > size_max:
                raise Unfit(f"it has {found} bytes, more than {size_max}")
            for piece in _pieces(fd, found):
                content += piece
        return content

    def read_into(self, name: str, write: Callable[[memoryview], object], size: int) -> str:
        """Give a plain file of `size` bytes to `write`; its SHA-256. Raises Unfit for another file, OSError.

        In pieces that stay in the processor's caches: the file is never a second time in this process's memory.
        """
        digest = hashlib.sha256()
        with self._plain(name, size) as fd:
            for piece in _pieces(fd, size):
                digest.update(piece)
                write(piece)
        return digest.hexdigest()

    @contextlib.contextmanager
    def _plain(self, name: str, size: int | None = None) -> Iterator[int]:
        """A descriptor for reading a regular file that has exactly one name, and `size` bytes if that is given.

        Raises Unfit otherwise, OSError.
        """
        try:
            # O_NONBLOCK: to open a planted FIFO must not wait for its writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Unfit("it is a symbolic link") from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Unfit("it is not a regular file")
            if status.st_nlink != 1:
                raise Unfit(f"it has {status.st_nlink} names (hard links)")
            if size not in (None, status.st_size):
                raise Unfit(f"it has {status.st_size} bytes instead of {size}")
            yield fd
        finally:
            os.close(fd)


def _pieces(fd: int, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of a file, each piece where the one before was. Raises Unfit when there are fewer."""
    room, done = memoryview(bytearray(min(size, PIECE_BYTES))), 0
    while done < size:
        count = os.readv(fd, [room[: size - done]])
        if count == 0:
            raise Unfit(f"it ended after {done} of {size} bytes while being read")
        yield room[:count]
        done += count


def _make(path: Path) -> None:
    """Make a directory and those above it that are missing, each durably: a name lives in the directory above it."""
    missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # Another process was faster.
            # All changes go through `os`, so that tests can stand in for it.
            os.mkdir(each, DIRECTORY_MODE)  # noqa: PTH102
        with contextlib.suppress(PermissionError):  # A directory that may be written to and not read cannot be synced.
            sync(each.parent)


def sync_tree(root: Path) -> None:
    """Make every file and directory below `root`, and `root` itself, durable. Raises OSError."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                sync(path)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Make a file durable, or the names in a directory. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
