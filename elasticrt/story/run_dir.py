"""Reads a run from its directory, which has an `events-NODE.jsonl` of each node. Works without etcd."""

from __future__ import annotations

import heapq
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from elasticrt.errors import ConfigError
from elasticrt.event_log import files, lines, records
from elasticrt.events import VERSION, AgentStopped, Record, Result
from elasticrt.ipc.proc import machine, stat
from elasticrt.story.clocks import Clocks
from elasticrt.story.fold import Story

LOOK_EVERY_S = 0.2
END_BYTES = 4096
"""The last line of an agent that has ended is shorter."""


def look_for(run: str, log_dir: str) -> Path | None:
    """The directory of `run`: a path, or the name of a run below `log_dir`; None when there is none.

    Raises ConfigError where it cannot be read.
    """
    for directory in (Path(log_dir, run), Path(run)):
        if directory.is_dir() and files(directory):
            return directory
        check_events(directory)
    return None


def find(run: str, log_dir: str) -> Path:
    """The same. Raises ConfigError when there is none."""
    directory = look_for(run, log_dir)
    if directory is not None:
        return directory
    got, expected = f"no events-NODE.jsonl in {Path(log_dir, run)}", "the id of a run, or its directory"
    remedy = "See `elasticrt runs`, with --log-dir DIR for one that logs elsewhere"
    raise ConfigError("no such run", run, got=got, expected=expected, remedy=remedy)


def check_events(directory: Path) -> None:
    """Raises ConfigError where `directory` is there, and it or its events cannot be read."""
    if directory.is_dir():
        check_readable("events that cannot be read", [directory, *directory.glob("events-*.jsonl")])


def check_readable(what: str, paths: Iterable[Path]) -> None:
    """Raises ConfigError about `what` for the first that cannot be opened. No pattern finds what is in there."""
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            raise _unreadable(what, path, error) from None


def _unreadable(what: str, path: Path, error: OSError) -> ConfigError:
    remedy = "Check the path and its permissions"
    return ConfigError(what, str(error.filename or path), got=error.strerror, remedy=remedy)


def read(directory: Path) -> Story:
    """The story in the files of `directory`. Raises ConfigError if they cannot be read, or have no events."""
    telling = _Telling(directory)
    try:
        for _ in chain(telling.news(), telling.anew()):
            pass
    except OSError as error:
        raise _unreadable("events that cannot be read", directory, error) from None
    if not telling.story.lives:
        raise says_nothing(directory)
    return telling.story


def says_nothing(directory: Path) -> ConfigError:
    """The error that the files of `directory` have no events."""
    got, expected = "no event of an agent", f"events of version {VERSION}"
    remedy = "Wait for the first agent's, or name another run"
    return ConfigError("events that say nothing", str(directory), got=got, expected=expected, remedy=remedy)


def looks(directory: Path, over: Callable[[Story], bool]) -> Iterator[tuple[Story, list[str], bool]]:
    """The story in a run's directory, the lines of new events, by time, and whether the run is `over` then.

    Where wall clocks turn out to disagree the story is another one, which is told from the beginning.
    """
    telling, first, last = _Telling(directory), True, False
    while not last:
        news, again = list(telling.news()), list(telling.anew())
        last = over(telling.story)
        yield telling.story, again if first and again else news, last
        first = False
        if not last:
            time.sleep(LOOK_EVERY_S)


class _Telling:
    """Tells a `story` from the files of a run's directory."""

    def __init__(self, directory: Path) -> None:
        self.story = Story()
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._dead: list[str] = []  # Nodes of this machine whose agents were killed, as the newest look tells.
        self._counts: Counter[Path] = Counter()  # How many events of each file are told.

    def news(self) -> Iterator[str]:
        """The lines of new events, by time. Each is told before."""
        yield from self._told()
        self._dead = dead_here(self.story)
        if self._dead:
            yield from self._told()  # What they have written before their end.
        self._end()

    def anew(self) -> Iterator[str]:
        """Where wall clocks turn out to disagree, the same of all events so far."""
        behind = self.story.clocks.disagree()
        if behind is not None:
            self.story = Story(Clocks(behind))
            yield from self._merged(lambda path: islice(lines(path, {}, whole=True), self._counts[path]))
            self._end()

    def _told(self) -> Iterator[str]:
        def new(path: Path) -> Iterator[tuple[str, Record]]:
            for each in lines(path, self._offsets, whole=True):
                self._counts[path] += 1
                yield each

        return self._merged(new)

    def _merged(self, found: Callable[[Path], Iterator[tuple[str, Record]]]) -> Iterator[str]:
        def timed(path: Path) -> Iterator[tuple[float, str, Record]]:
            return ((self.story.clocks.when(record), line, record) for line, record in found(path))

        for _, line, record in heapq.merge(*map(timed, files(self._directory)), key=lambda each: each[0]):
            self.story.tell(record)
            yield line

    def _end(self) -> None:
        self.story.run_id = self.story.run_id or self._directory.name
        for node in set(self._dead).intersection(self.story.alive()):
            self.story.killed(node)


def dead_here(story: Story) -> list[str]:
    """The nodes of this machine whose agents are processes no more, and have noted no end: they were killed."""
    return [node for node in alive_here(story) if stat(story.pid(node)) is None]


def alive_here(story: Story) -> list[str]:
    """The nodes of this machine whose agents run, as far as is known."""
    here = machine()
    return [node for node in story.alive() if story.clocks.machines.get(node) == here]


def has_events(directory: Path) -> bool:
    """Whether `directory` has readable events."""
    return any(next(records(path), None) is not None for path in files(directory))


def newest(log_dir: str) -> Iterator[Path]:
    """The directories below `log_dir` with readable events, the newest first. It reads those that are asked for."""
    found = {path: files(path) for path in Path(log_dir).glob("*")}
    written = {path: max(file.stat().st_mtime for file in each) for path, each in found.items() if each}
    return filter(has_events, sorted(written, key=written.__getitem__, reverse=True))


def has_ended(directory: Path) -> bool:
    """Whether all agents of a run have noted their end, as the ends of their files tell."""
    ends = [deque(records(path, END_BYTES), maxlen=1) for path in files(directory)]
    return all(end and isinstance(end[0].event, (AgentStopped, Result)) for end in ends)
