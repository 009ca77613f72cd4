"""The ears of a worker group: one thread reads every worker's output and channel, and turns their ends into events.

Memory stays flat: a pipe is read as fast as its output can be passed on, and no faster.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticrt.ipc.cgroups import memory_groups, text_of
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.messages import (
    BuildFailed,
    Claim,
    Copied,
    Damaged,
    Done,
    Down,
    Exited,
    HandedOver,
    Message,
    Own,
    Published,
    Ready,
    Release,
    Save,
    Started,
    Step,
)
from elasticrt.ipc.status_page import StatusPage
from elasticrt.ipc.wakeup import Wakeup
from elasticrt.option_values import ERR, OUT
from elasticrt.workers.failures import WorkerFailure, failure_of
from elasticrt.workers.fork_server import ParentEvent, ParentLost, WorkerParent
from elasticrt.workers.logs import Output

_LOG = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_LAST_READ_MAX_BYTES = 1 << 22
_FLUSH_AFTER_S = 0.2
_ERROR_FILE_MAX_BYTES = 1 << 18
_MESSAGES_PER_TURN = 64
_FROM_WORKERS = (Step, Save, Own, Claim, Published, BuildFailed, Copied, Damaged, HandedOver, Ready, Down, Done)


@dataclass(frozen=True)
class WorkerStarted:
    """The worker's process exists. `at_ns` is CLOCK_MONOTONIC, as in all events."""

    generation: int
    rank: int
    local_rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True)
class WorkerSaid:
    """The worker sent a message over its channel. `fd`: what came with it, for whoever gets this event; -1: nothing."""

    generation: int
    rank: int
    local_rank: int
    message: Step | Save | Own | Claim | Published | BuildFailed | Copied | Damaged | HandedOver | Ready | Down | Done
    fd: int = -1


@dataclass(frozen=True)
class WorkerEnded:
    """The worker has ended, or is done and lingers. Said once for each worker that was asked for.

    `code` is the exit code or minus the signal number. `failure` is None after code 0, and for a worker that was ended
    by this agent's own TERM or KILL.
    """

    generation: int
    rank: int
    local_rank: int
    pid: int
    code: int
    at_ns: int
    failure: WorkerFailure | None


@dataclass(frozen=True)
class GroupEnded:
    """No process of this generation's workers is left (0: of those that set up beside the training)."""

    generation: int
    at_ns: int


GroupEvent = WorkerStarted | WorkerSaid | WorkerEnded | GroupEnded


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes of this control group the kernel has killed for memory so far; 0 where it does not say.

    A kill is counted in the group of the process, whichever group's limit was reached; by version 2 also in all around
    it. So the own group's count is what we want, or that of the nearest group that has one. `root`: where /proc and
    /sys are.
    """
    for group, names in memory_groups(root):
        for line in text_of(group / names.events).splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.strip().isdecimal():
                return int(count)
    return 0


@dataclass(eq=False)
class WorkerState:
    """One worker, as the group and its listener share it."""

    env: WorkerEnv
    output: Output
    channel: Channel
    page: StatusPage
    pipes: dict[str, int]
    pid: int = 0
    ended: bool = False  # Reported by WorkerEnded.
    gone: bool = False  # Its process is.
    lingers: bool = False
    deaf: bool = False  # Its channel is not read any more.
    stopping: bool = False  # We have told it to end.
    step: int | None = None
    left: set[int] = field(default_factory=set)  # The generations that it was in before.
    sending: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Running:
    """Workers that were started together, as number `start`. Each is in the generation that its `env` says."""

    start: int
    workers: dict[int, WorkerState]
    oom_kills: int
    parent: WorkerParent


class WorkerIO:
    """The thread. `add` and `put` may be called from anywhere; the sink is called from the thread."""

    def __init__(self, sink: Callable[[GroupEvent], None]) -> None:
        self._sink = sink
        self._inbox: collections.deque[Running | tuple[WorkerParent, ParentEvent]] = collections.deque()
        self._groups: dict[int, Running] = {}
        self._closed = False
        self.seating = threading.Lock()  # Held while a worker gets another generation, and while an end is told.
        self._bell = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._work, name="elasticrt-group", daemon=True)
        self._thread.start()

    def add(self, running: Running) -> None:
        """Listen to workers from before they are started."""
        self._inbox.append(running)
        self._bell.ring()

    def put(self, parent: WorkerParent, event: ParentEvent) -> None:
        """Take an event of a worker parent."""
        self._inbox.append((parent, event))
        self._bell.ring()

    def close(self, timeout_s: float) -> None:
        """End the thread, after all that was put before."""
        self._closed = True
        self._bell.ring()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            closed = self._closed
            timeout_s = _FLUSH_AFTER_S if any(each.output.unfinished for each in self._alive()) else None
            ready = self._selector.select(0 if closed else timeout_s)
            for key, _ in ready:
                if key.data is None:
                    self._bell.heard()
                else:
                    running, worker, stream = key.data
                    self._read(running, worker, stream)
            if not ready:
                for worker in self._alive():
                    worker.output.flush()
            while self._inbox:
                self._take(self._inbox.popleft())
            if closed:
                break
        for worker in self._alive():
            self._forget(worker)
        self._selector.close()
        self._bell.close()

    def _alive(self) -> list[WorkerState]:
        return [worker for running in self._groups.values() for worker in running.workers.values() if not worker.gone]

    def _take(self, item: Running | tuple[WorkerParent, ParentEvent]) -> None:
        if isinstance(item, Running):
            self._groups[item.start] = item
            for worker in item.workers.values():
                for stream, fd in worker.pipes.items():
                    self._selector.register(fd, selectors.EVENT_READ, (item, worker, stream))
                self._selector.register(worker.channel.fileno(), selectors.EVENT_READ, (item, worker, "channel"))
            return
        parent, event = item
        if isinstance(event, Started):
            found = self._find(event.generation, event.local_rank)
            if found is not None:
                running, worker = found
                worker.pid = event.pid
                env = worker.env
                self._sink(WorkerStarted(env.generation, env.rank, env.local_rank, event.pid, event.at_ns))
        elif isinstance(event, Exited):
            found = self._find(event.generation, event.local_rank)
            if found is not None:
                self._gone(*found, event.code, event.at_ns, start_error=event.error)
        elif isinstance(event, ParentLost):
            for running in [each for each in self._groups.values() if each.parent is parent]:
                for worker in running.workers.values():
                    if not worker.gone:
                        self._gone(running, worker, -signal.SIGKILL, time.monotonic_ns(), lost=event.reason)

    def _find(self, start: int, local_rank: int) -> tuple[Running, WorkerState] | None:
        running = self._groups.get(start)
        worker = running.workers.get(local_rank) if running is not None else None
        return (running, worker) if running is not None and worker is not None and not worker.gone else None

    def _read(self, running: Running, worker: WorkerState, stream: str) -> None:
        if worker.gone:
            return  # It ended in the same turn.
        if stream == "channel":
            self._read_channel(running, worker)
        else:
            self._read_pipe(worker, stream, _READ_BYTES)

    def _read_pipe(self, worker: WorkerState, stream: str, max_bytes: int) -> None:
        """Pass on what is there, up to about `max_bytes`."""
        fd = worker.pipes.get(stream)
        while fd is not None and max_bytes > 0:
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:  # The worker has closed it, and may well go on without.
                self._selector.unregister(fd)
                os.close(worker.pipes.pop(stream))
                return
            worker.output.write(stream, data)
            max_bytes -= len(data)

    def _read_channel(self, running: Running, worker: WorkerState) -> None:
        if worker.deaf:
            return
        try:
            count = 0
            # What is buffered has to be taken now: the selector does not know of it.
            while count < _MESSAGES_PER_TURN or worker.channel.pending():
                received = worker.channel.receive(0)
                if received is None:
                    return
                self._said(running, worker, *received)
                count += 1
        except (ChannelClosed, OSError):
            self._stop_reading(worker)
        except ValueError as error:
            _LOG.warning("rank %d says what is no message, and is not listened to any more: %s", worker.env.rank, error)
            self._stop_reading(worker)

    def _stop_reading(self, worker: WorkerState) -> None:
        if not worker.deaf:
            worker.deaf = True
            self._selector.unregister(worker.channel.fileno())

    def _said(self, running: Running, worker: WorkerState, message: Message, fds: list[int]) -> None:
        wanted = 1 if isinstance(message, Copied) else 0
        for fd in fds[wanted:]:
            os.close(fd)
        if not isinstance(message, _FROM_WORKERS):
            raise ValueError(f"a worker sent a {type(message).__name__}")  # noqa: TRY004  It came over a wire.
        if isinstance(message, Step):
            worker.step = message.step
        env = worker.env
        fd = fds[0] if fds and wanted else -1
        self._sink(WorkerSaid(env.generation, env.rank, env.local_rank, message, fd))
        if isinstance(message, Done):
            worker.lingers = True
            self._ended(running, worker, message.code, time.monotonic_ns())
            if worker.stopping:  # The group is being ended: nobody needs its store any more.
                with worker.sending, contextlib.suppress(ChannelClosed, OSError):
                    worker.channel.send(Release())

    def _gone(
        self, running: Running, worker: WorkerState, code: int, at_ns: int, *, start_error: str = "", lost: str = ""
    ) -> None:
        """The process is no more: read what it has left, say how it ended, and let go of it."""
        for stream in (OUT, ERR):
            self._read_pipe(worker, stream, _LAST_READ_MAX_BYTES)
        self._read_channel(running, worker)
        with self.seating:
            self._ended(running, worker, code, at_ns, start_error=start_error, lost=lost)
            self._forget(worker)
            generation = worker.env.generation
        if all(each.gone for each in running.workers.values()):
            del self._groups[running.start]
        if all(each.env.generation != generation for each in self._alive()):
            self._sink(GroupEnded(generation, at_ns))

    def _forget(self, worker: WorkerState) -> None:
        with worker.sending:
            worker.gone = True
            self._stop_reading(worker)
            worker.channel.close()
        for fd in worker.pipes.values():
            self._selector.unregister(fd)
            os.close(fd)
        worker.pipes.clear()
        worker.output.close()

    def _ended(
        self, running: Running, worker: WorkerState, code: int, at_ns: int, *, start_error: str = "", lost: str = ""
    ) -> None:
        if worker.ended:
            return
        worker.ended = True
        env = worker.env
        failure = None
        if code != 0:
            pages = [each.page for each in running.workers.values() if not each.page.entered]
            failure = failure_of(
                rank=env.rank,
                local_rank=env.local_rank,
                node=env.node,
                generation=env.generation,
                code=code,
                error_file=_read_text(env.error_file),
                last_lines=worker.output.tail(),
                log_path=worker.output.path,
                step=worker.step or worker.page.step or None,
                stepped=_stepped(worker),
                beats=0 if worker.page.entered else worker.page.beats,
                loaded=max((page.loaded for page in pages if page.beats), default=0),
                start_error=start_error,
                oom=code == -signal.SIGKILL and not worker.stopping and oom_kills() > running.oom_kills,
            )
            if lost:
                failure = replace(failure, message=lost)
            if worker.stopping and (code in (-signal.SIGTERM, -signal.SIGKILL) or not failure.exception):
                failure = None  # We have asked for it.
        self._sink(WorkerEnded(env.generation, env.rank, env.local_rank, worker.pid, code, at_ns, failure))


def _stepped(worker: WorkerState) -> bool | None:
    """Whether it has made a step; None when nobody has seen it begin: its steps would not have been seen either."""
    page = worker.page
    seen = page.begun_at_ns or page.init_at_ns
    return True if worker.step or page.step or page.beats else False if seen else None


def _read_text(path: str) -> str:
    if not path:
        return ""
    try:
        with Path(path).open("rb") as file:
            return file.read(_ERROR_FILE_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""  # Nothing was written, as after every end that is not an exception.
