"""Reads a run's story from its directory, which has one `events-NODE.jsonl` per node. Works without etcd."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from elasticrt.errors import ConfigError
from elasticrt.event_log import files, lines, records
from elasticrt.events import VERSION, AgentStopped, Record, Result
from elasticrt.ipc.proc import machine, start_of
from elasticrt.story.fold import Story
from elasticrt.story.lives import AgentLife

# How often `follow` reads new events.
LOOK_EVERY_S = 0.2
END_BYTES = 4096
"""The last line of an agent that has ended is shorter than this."""


def look_for(run: str, log_dir: str) -> Path | None:
    """The directory of `run`, which is a path, or the name of a run below `log_dir`; None if there is none.

    Raises ConfigError if the directory cannot be read.
    """
    for directory in (Path(log_dir, run), Path(run)):
        if directory.is_dir() and files(directory):
            return directory
        check_events(directory)
    return None


def find(run: str, log_dir: str) -> Path:
    """The directory of `run`, as `look_for` finds it. Raises ConfigError if there is none."""
    directory = look_for(run, log_dir)
    if directory is not None:
        return directory
    got, expected = f"no events-NODE.jsonl in {Path(log_dir, run)}", "the id of a run, or its directory"
    remedy = "See `elasticrt runs`, with --log-dir DIR for one that logs elsewhere"
    raise ConfigError("no such run", run, got=got, expected=expected, remedy=remedy)


def check_events(directory: Path) -> None:
    """Raise ConfigError if `directory` exists, and it or its events cannot be read."""
    if directory.is_dir():
        check_readable("events that cannot be read", [directory, *directory.glob("events-*.jsonl")])


def check_readable(what: str, paths: Iterable[Path]) -> None:
    """Raise ConfigError about `what` for the first of `paths` that cannot be opened.

    A glob pattern silently finds nothing in a directory without permission, so the directory is opened itself.
    """
    for path in paths:
        try:
            # O_NONBLOCK: opening a FIFO would wait for a writer.
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            raise _unreadable(what, path, error) from None


def _unreadable(what: str, path: Path, error: OSError) -> ConfigError:
    remedy = "Check the path and its permissions"
    return ConfigError(what, str(error.filename or path), got=error.strerror, remedy=remedy)


def read(directory: Path) -> Story:
    """The story in the files of `directory`. Raises ConfigError if they cannot be read, or have no events."""
    try:
        story, _, _ = next(follow(directory, lambda _: True))
    except OSError as error:
        raise _unreadable("events that cannot be read", directory, error) from None
    if not story.lives.all:
        raise says_nothing(directory)
    return story


def says_nothing(directory: Path) -> ConfigError:
    """The error for a `directory` whose files have no events."""
    got, expected = "no event of an agent", f"events of version {VERSION}"
    remedy = "Wait for the first agent's, or name another run"
    return ConfigError("no usable events in this directory", str(directory), got=got, expected=expected, remedy=remedy)


def follow(directory: Path, over: Callable[[Story], bool]) -> Iterator[tuple[Story, list[str], bool]]:
    """Follow a run's directory. Yields the story, the lines of new events by time, and whether this is the last look.

    `over` says whether a run is over, by its story.
    """
    story, offsets, last = Story(), dict[Path, int](), False
    while not last:
        news = _fold_new(story, directory, offsets)
        story.run.note_id(directory.name)
        # Their processes are gone, and they have written no end.
        dead = {life.node for life in alive_here(story) if not start_of(life.pid)}
        if dead:
            # Once more: what the agents wrote between the first reading and their end.
            news += _fold_new(story, directory, offsets)
        for node in dead.intersection(story.lives.alive()):
            story.note_killed(node)
        last = over(story)
        yield story, news, last
        if not last:
            time.sleep(LOOK_EVERY_S)


def _fold_new(story: Story, directory: Path, offsets: dict[Path, int]) -> list[str]:
    """Fold what the files have beyond their `offsets` into `story`. Returns the lines, by time."""

    def timed(path: Path) -> Iterator[tuple[float, str, Record]]:
        return ((story.when(record), line, record) for line, record in lines(path, offsets, whole=True))

    news = []
    for _, line, record in heapq.merge(*map(timed, files(directory)), key=lambda each: each[0]):
        story.fold(record)
        news.append(line)
    return news


def alive_here(story: Story) -> list[AgentLife]:
    """The agents on this machine that run, as far as is known."""
    here = machine()
    return [life for life in story.lives.living() if story.machines.get(life.node) == here]


def has_events(directory: Path) -> bool:
    """Whether `directory` has readable events."""
    return any(next(records(path), None) is not None for path in files(directory))


def newest(log_dir: str) -> Iterator[Path]:
    """The directories below `log_dir` with readable events, the newest first. Each is read only when asked for."""
    found = {path: files(path) for path in Path(log_dir).glob("*")}
    written = {path: max(file.stat().st_mtime for file in each) for path, each in found.items() if each}
    return filter(has_events, sorted(written, key=written.__getitem__, reverse=True))


def has_ended(directory: Path) -> bool:
    """Whether all agents of a run have written their end. Reads only the ends of their files."""
    ends = [deque(records(path, END_BYTES), maxlen=1) for path in files(directory)]
    return all(end and isinstance(end[0].event, (AgentStopped, Result)) for end in ends)
