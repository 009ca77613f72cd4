"""A disk that loses what was not synced: what the code does to one, and what a power cut may leave of it.

`Recorder` stands in for the module `os` inside `data/durable_files.py`, the one place where checkpoints change a file
system. It does what is asked, and notes every change. `remains` then lists what a disk may hold after a power cut at
any point of these changes, as POSIX permits it:

* a name that was created, replaced or deleted since the last fsync of its directory: either as before, or as after any
  of the changes, for each name by itself (a rename may have happened to one of its two names only);
* what was written to a file since its last fsync: nothing of it, a part, all, or zeros and holes in its place.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIECE_BYTES = 64

Content = bytes
Names = dict[str, int]


@dataclass(frozen=True)
class Change:
    """Something that happened, in order.

    `kind`: "link" (`name` now stands for file `file`), "unlink" (of `name`), "write" (`data` at the end of `file`),
    "fsync" (of `file`), "fsync directory", or whatever a test wants to note between these, with `note`.
    """

    kind: str
    name: str = ""
    file: int = -1
    data: Content = b""
    note: Any = None


class Recorder:
    """`os` for the code under test. Directories are known by their paths; files by numbers of their own."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._files: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._directories: dict[int, str] = {}
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def note(self, kind: str, note: Any = None) -> None:
        """Something between the changes."""
        self.changes.append(Change(kind, note=note))

    def mkdir(self, path: str | os.PathLike[str], mode: int = 0o777) -> None:
        """A directory is a name in its parent; what is in it is known by its path."""
        os.mkdir(path, mode)  # noqa: PTH102  As the code under test calls it.
        self.changes.append(Change("link", self._path(path, None), next(self._numbers)))

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Files that are created are followed; so are directories."""
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        full = self._path(path, dir_fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):  # However it is opened.
            self._directories[fd] = full
        elif flags & os.O_CREAT:
            assert flags & os.O_EXCL, "files are created, never written over"
            self._files[fd] = self._names[full] = next(self._numbers)
            self.changes.append(Change("link", full, self._files[fd]))
        return fd

    def close(self, fd: int) -> None:
        """Forget the descriptor."""
        os.close(fd)
        self._files.pop(fd, None)
        self._directories.pop(fd, None)

    def write(self, fd: int, data: Any) -> int:
        """To a file, or to memory, which no power cut leaves."""
        count = os.write(fd, data)
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):  # noqa: PTH115  Of a descriptor.
            self.changes.append(Change("write", file=self._files[fd], data=bytes(data[:count])))
        return count

    def fsync(self, fd: int) -> None:
        """Of a file, or of a directory."""
        os.fsync(fd)
        if fd in self._files:
            self.changes.append(Change("fsync", file=self._files[fd]))
        else:
            self.changes.append(Change("fsync directory", self._directories[fd]))

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        """Two changes: of either name."""
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        old, new = self._path(source, src_dir_fd), self._path(target, dst_dir_fd)
        self._names[new] = self._names.pop(old)
        self.changes += [Change("link", new, self._names[new]), Change("unlink", old)]

    def unlink(self, name: str, *, dir_fd: int) -> None:
        """Of a name that is there."""
        os.unlink(name, dir_fd=dir_fd)
        self.changes.append(Change("unlink", self._path(name, dir_fd)))

    def _path(self, name: Any, dir_fd: int | None) -> str:
        return str(Path(self._directories[dir_fd] if dir_fd is not None else "", name).absolute())


@dataclass
class Disk:
    """What is durable, and what is not yet.

    `names`: the file that each stands for; `pending`: what a name has stood for since, in order (-1: nothing);
    `durable`, `written`: contents of files, and what was added to them since.
    """

    names: Names = field(default_factory=dict)
    pending: dict[str, list[int]] = field(default_factory=dict)
    durable: dict[int, Content] = field(default_factory=dict)
    written: dict[int, Content] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        """The change happens; nothing of it is durable yet, unless it says so."""
        if change.kind == "link":
            self.pending.setdefault(change.name, []).append(change.file)
        elif change.kind == "unlink":
            self.pending.setdefault(change.name, []).append(-1)
        elif change.kind == "write":
            self.written[change.file] = self.written.get(change.file, b"") + change.data
        elif change.kind == "fsync":
            self.durable[change.file] = self.durable.get(change.file, b"") + self.written.pop(change.file, b"")
        elif change.kind == "fsync directory":
            for name in [each for each in self.pending if _parent(each) == change.name]:
                self._set(self.names, name, self.pending.pop(name)[-1])

    @staticmethod
    def _set(names: Names, name: str, file: int) -> None:
        names.pop(name, None)
        if file >= 0:
            names[name] = file

    def after_a_cut(self) -> Iterator[dict[str, Content]]:
        """What may be on the disk if the power fails now: contents by path, empty ones for directories."""
        uncertain = sorted(self.pending)
        choices = [[self.names.get(name, -1), *self.pending[name]] for name in uncertain]
        seen = set()
        for chosen in itertools.product(*(dict.fromkeys(each) for each in choices)):
            names = dict(self.names)
            for name, file in zip(uncertain, chosen, strict=True):
                self._set(names, name, file)
            names = {name: file for name, file in names.items() if self._reachable(name, names)}
            torn = sorted({file for file in names.values() if file in self.written})
            for contents in itertools.product(*(self._contents(file) for file in torn)):
                known = dict(zip(torn, contents, strict=True))
                remains = {name: known.get(file, self.durable.get(file, b"")) for name, file in names.items()}
                key = hash(tuple(sorted(remains.items())))
                if key not in seen:
                    seen.add(key)
                    yield remains

    def _reachable(self, name: str, names: Names) -> bool:
        """Whether the directories that were made on the way to it are there."""
        parent = _parent(name)
        made = parent in self.pending or parent in self.names
        return not made or (parent in names and self._reachable(parent, names))

    def _contents(self, file: int) -> Iterable[Content]:
        """What may be found in a file that has been written to since it was synced, if ever."""
        base, new = self.durable.get(file, b""), self.written[file]
        half = len(new) // 2
        found = [b"", new[:1], new[:half], new[:-1], new, bytes(len(new)), bytes(half) + new[half:], new[:half]]
        found += [new[:half] + bytes(len(new) - half), bytes([new[0] ^ 1]) + new[1:]] if new else []
        return dict.fromkeys(base + each for each in found)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def remains(
    changes: Sequence[Change], oracle: Callable[[Sequence[Change]], Any]
) -> Iterator[tuple[int, Any, dict[str, Content]]]:
    """Every state after a power cut before each change and after the last: (number, what `oracle` says then, state).

    A state that was there at an earlier point with the same answer of the oracle is not repeated.
    """
    disk, seen = Disk(), set()
    for number in range(len(changes) + 1):
        expected = oracle(changes[:number])
        for state in disk.after_a_cut():
            key = hash((repr(expected), tuple(sorted(state.items()))))
            if key not in seen:
                seen.add(key)
                yield number, expected, state
        if number < len(changes):
            disk.apply(changes[number])
