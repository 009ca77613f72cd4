"""Writes files whole or not at all, and durably. Reads files only if they are what they seem.

To write a file: write a temporary file in the same directory, fsync it, rename it, and fsync the directory. To read a
file: open it relative to an open directory, follow no symbolic link, and accept only a regular file with a single name
(hard link). Other users may be able to write to a checkpoint directory, so what is found there is checked, not trusted.
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
"""A large file is read in pieces of this size, which fits into the processor's caches."""


class Unfit(Exception):  # noqa: N818  A finding about a file that is then skipped, not a failure of the program.
    """A file is not a regular file with a single name, or not of the expected size or content. The text says which."""


def put(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


class Directory:
    """An open directory. All names of files are relative to it and contain no "/".

    Args:
        path: the directory.
        create: whether to create it when it is missing.

    Attributes:
        path: as given.
        fd: the descriptor of the open directory.

    Raises OSError when the directory cannot be opened, Unfit when any user could plant files in it.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        if create:
            _make(path)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        mode = os.fstat(self.fd).st_mode
        # The sticky bit, as on /tmp, keeps users from replacing each other's files.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            os.close(self.fd)
            raise Unfit(f"it is writable by everybody (mode {stat.S_IMODE(mode):o}): chmod o-w")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    @property
    def is_removed(self) -> bool:
        """Whether the directory was deleted, and nothing has its path now.

        False for one that was only unmounted, and may come back.
        """
        if os.path.lexists(self.path):
            return False
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:
            # On NFS, `fstat` fails for a deleted directory. The next write fails as well, and has the reason.
            return False

    def names(self) -> list[str]:
        """The names in the directory, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208  Of the open directory, not of a path.

    def remove(self, name: str) -> None:
        """Delete a file. A missing file is not an error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def rename(self, name: str, new: str) -> None:
        """Rename a file from `name` to `new`, durably. A missing file is not an error. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.fsync(self.fd)

    def write(self, name: str, temporary: str, fill: Callable[[int], Made]) -> Made:
        """Write a file durably. Returns what `fill` returns.

        Args:
            name: the file's name.
            temporary: the file's name until it is whole.
            fill: writes the content to the descriptor that it gets.

        Raises OSError (no space, read-only ...), also when the directory's path leads elsewhere by now; and what `fill`
        raises. Nothing is left of the file then, and a file that had this name before is untouched.
        """
        # After an unmount the path leads to an empty mount point, which must not be filled. If the path is missing,
        # `stat` raises FileNotFoundError, an OSError that says so.
        mine, there = os.fstat(self.fd), self.path.stat()
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise OSError(f"{self.path} is not the directory of the start any more (unmounted or replaced?)")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, FILE_MODE, dir_fd=self.fd)
        try:
            try:
                made = fill(fd)
                # A failed fsync is never tried again. The kernel may have dropped the pages, and then reports success.
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
        """Check that this is a plain file of `size` bytes, without reading it. Raises Unfit if it is not; OSError."""
        with self._plain(name, size):
            pass

    def read(self, name: str, *, size_max: int) -> bytearray:
        """The whole content of a plain file.

        Raises Unfit when it is not a plain file, or is larger than `size_max` bytes; OSError.
        """
        content = bytearray()
        with self._plain(name) as fd:
            found = os.fstat(fd).st_size
            if found > size_max:
                raise Unfit(f"it has {found} bytes, more than {size_max}")
            for piece in _pieces(fd, found):
                content += piece
        return content

    def read_into(self, name: str, write: Callable[[memoryview], object], size: int) -> str:
        """Pass a plain file of `size` bytes to `write`, piece by piece. Returns its SHA-256 in hex.

        The pieces stay in the processor's caches, and this process's memory never holds the file a second time. Raises
        Unfit for another kind of file or another size; OSError.
        """
        digest = hashlib.sha256()
        with self._plain(name, size) as fd:
            for piece in _pieces(fd, size):
                digest.update(piece)
                write(piece)
        return digest.hexdigest()

    @contextlib.contextmanager
    def _plain(self, name: str, size: int | None = None) -> Iterator[int]:
        """A descriptor for reading a plain file: a regular one with exactly one name, and with `size` bytes if given.

        Raises Unfit for another file; OSError.
        """
        try:
            # O_NONBLOCK: otherwise opening a FIFO, which somebody has planted, would wait for its writer.
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
    """The first `size` bytes of a file in pieces. All pieces use the same memory, so each is valid until the next.

    Raises Unfit when the file has fewer bytes.
    """
    room, done = memoryview(bytearray(min(size, PIECE_BYTES))), 0
    while done < size:
        count = os.readv(fd, [room[: size - done]])
        if count == 0:
            raise Unfit(f"it ended after {done} of {size} bytes while being read")
        yield room[:count]
        done += count


def _make(path: Path) -> None:
    """Make a directory, and its missing parents, durably."""
    missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
    for each in reversed(missing):
        # Another process may have been faster.
        with contextlib.suppress(FileExistsError):
            # All changes go through `os`, so that tests can replace it.
            os.mkdir(each, DIRECTORY_MODE)  # noqa: PTH102
        # The name of a directory is stored in its parent, so the parent is synced. A parent that this user may write
        # to, but not read, cannot be synced.
        with contextlib.suppress(PermissionError):
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
    """Make the content of a file durable, or the names in a directory. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
