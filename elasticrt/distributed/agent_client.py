"""The one link of a training process to its agent: requests with answers, reports that never wait.

Absent without an agent. A forked child (a DataLoader worker) inherits the socket but must not use it: two processes
writing frames into one stream would tear both, so every use checks the process id. Standard library only, so that it
also serves scripts that never import torch.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from elasticrt.errors import ConfigError, explain
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.flights import shortened
from elasticrt.ipc.messages import Done, Look, Message, Release, Reply, Reseat
from elasticrt.ipc.status_page import PAGE_BYTES, STACKS_SIGNAL, StatusPage

_log = logging.getLogger(__name__)

POST_BYTES_MAX = 32 * 1024
"""A unix socket is reported writable while three quarters of its buffer are free; a message of this size then fits."""


class Pending:
    """A request that waits for its answer."""

    def __init__(self) -> None:
        self._answered = threading.Event()
        self._reply: Reply | None = None

    def wait(self, timeout_s: float) -> Reply | None:
        """The answer, or None when it is not there after `timeout_s`. May be called again."""
        self._answered.wait(timeout_s)
        return self._reply

    def answer(self, reply: Reply) -> None:
        """Called once, by the reader."""
        self._reply = reply
        self._answered.set()


class AgentClient:
    """A channel to the agent, shared by all threads of this process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._reader: threading.Thread | None = None
        self._closed = ""
        self._news = threading.Condition()  # Of the following.
        self._released = False
        self._announced = self._taken = 0  # Numbers of seats: the newest that has come, and the one that was taken.
        self._seat: tuple[int, WorkerEnv] | None = None  # The newest that can be taken, with its number.
        self._on_seat: Callable[[], object] | None = None

    @property
    def usable(self) -> bool:
        """Whether this is the process that owns the link, and the agent was there when last heard of."""
        return os.getpid() == self._pid and not self._closed

    def request(self, make: Callable[[int], Message]) -> Pending:
        """Send `make(number)`; the answer arrives in what is returned. Without an agent it is a refusal, at once."""
        pending = Pending()
        if os.getpid() != self._pid:
            pending.answer(Reply(0, ok=False, reason="a forked child has no agent"))
            return pending
        with self._lock:
            self._read_in_background()
            number = next(self._numbers)
            self._pending[number] = pending
            problem = self._closed or self._send(make(number))
            if problem:
                self._pending.pop(number, None)
                pending.answer(Reply(number, ok=False, reason=f"the agent is gone ({problem})"))
        return pending

    def post(self, message: Message) -> bool:
        """Send a small report if that is possible without waiting; whether it went out."""
        if not self.usable or not self._lock.acquire(blocking=False):
            return False
        try:
            if not select.select([], [self._channel], [], 0)[1]:
                return False
            return not self._send(message)
        finally:
            self._lock.release()

    def say(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message that nobody answers, waiting for room if need be; without an agent it is dropped."""
        if self.usable:
            with self._lock:
                self._send(message, fds)

    def listen(self) -> None:
        """From now on listen to the agent all the time."""
        if self.usable:
            with self._lock:
                self._read_in_background()

    def follow(self, on_seat: Callable[[], object]) -> None:
        """From now on listen to the agent all the time; a thread calls `on_seat` when a new seat has come."""
        with self._lock:
            self._on_seat = on_seat
            self._read_in_background()

    @property
    def has_seat(self) -> bool:
        """Whether another seat has come that nobody has taken yet."""
        return self._seat is not None

    @property
    def overtaken(self) -> bool:
        """Whether a newer seat has come than the one that was taken. Known before anything is cut for it."""
        return self._announced != self._taken

    def wait_for_seat(self, timeout_s: float) -> WorkerEnv | None:
        """The newest seat that the agent has given this worker; None when there will be none, or none came in time."""
        with self._news:
            self._news.wait_for(lambda: self._seat is not None or self._released, timeout_s)
            if self._seat is None:
                return None
            (self._taken, seat), self._seat = self._seat, None
            return seat

    def close(self) -> None:
        """Let go of the channel. Requests that wait are refused."""
        self._closed = self._closed or "closed"
        self._channel.close()
        self._release()

    def linger(self, code: int, wait_s: float, then: Callable[[], object]) -> None:
        """Say that the script has ended with `code`, and wait for Release. An agent that is gone ends the wait, too.

        `then` is called when that takes longer than `wait_s` seconds.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._read_in_background()
            problem = self._closed or self._send(Done(code))
        if not problem:
            with self._news:
                released = self._news.wait_for(lambda: self._released, wait_s)
            if not released:
                then()
                with self._news:
                    self._news.wait_for(lambda: self._released)

    def _send(self, message: Message, fds: Sequence[int] = ()) -> str:
        """Send under the lock; why it could not be done, "" when it was."""
        try:
            self._channel.send(message, fds)
        except (ChannelClosed, OSError) as error:
            self._closed = str(error) or "closed"
        return self._closed

    def _read_in_background(self) -> None:
        if self._reader is None and not self._closed:
            self._reader = threading.Thread(target=self._read, name="elasticrt-link", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        try:
            while True:
                # Without a deadline: this thread has nothing else to do, and ends when the agent or the process does.
                received = self._channel.receive()
                if received is not None:
                    self._deliver(*received)
        except (ChannelClosed, OSError, ValueError) as error:
            self._closed = str(error) or "closed"
        with self._lock:  # After this, a request sees `_closed` and refuses itself.
            waiting, self._pending = self._pending, {}
        for number, pending in waiting.items():
            pending.answer(Reply(number, ok=False, reason=f"the agent is gone ({self._closed})"))
        self._release()

    def _release(self) -> None:
        """Nothing will be asked of this process any more."""
        with self._news:
            self._released = True
            self._news.notify_all()

    def _deliver(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Reseat):
            self._seated(message, fds)
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Reply):
            pending = self._pending.pop(message.request, None)
            if pending is not None:
                pending.answer(message)
        elif isinstance(message, Release):
            self._release()
        elif isinstance(message, Look):
            _tell_collectives()
        else:
            _log.warning("the agent sent a %s, which is not for a worker", type(message).__name__)

    def _seated(self, message: Reseat, fds: list[int]) -> None:
        """Take note of a seat, and cut the old group off first of all: the main thread may be waiting in it."""
        here = worker_env()
        told = WorkerEnv.from_env({**os.environ, **message.env})
        assert here is not None and told is not None, "only an agent's worker has a link"
        seat = replace(
            told,
            listen_fd=fds[0] if fds else -1,
            channel_fd=here.channel_fd,
            page_fd=here.page_fd,
            state_fd=-1,
            error_file=here.error_file,
        )
        self._announced += 1
        if self._on_seat is not None:
            self._on_seat()  # Before the seat can be taken: what is cut must not be the new group.
        with self._news:
            if self._seat is not None and self._seat[1].listen_fd >= 0:
                os.close(self._seat[1].listen_fd)
            self._seat = self._announced, seat
            self._news.notify_all()


def _tell_collectives() -> None:
    """Write on the status page how many collectives of the default group have begun, and which are not over."""
    page, dist = status_page(), sys.modules.get("torch.distributed")
    if page is None or dist is None:
        return
    try:
        page.begun = dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0
    except (RuntimeError, AttributeError) as error:  # The main thread is just leaving the group, or making another.
        _log.debug("how many collectives have begun is not known: %s", error)
    recorder = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    page.flights = shortened(recorder()) if recorder is not None else ""


def take_seat(seat: WorkerEnv) -> None:
    """From now on this process is who `seat` says, in its environment as well."""
    os.environ.update(seat.to_env())
    worker_env.cache_clear()


@lru_cache(maxsize=1)
def worker_env() -> WorkerEnv | None:
    """What the agent told this process; None without an agent. Raises ConfigError when it is malformed."""
    try:
        return WorkerEnv.from_env(os.environ)
    except ValueError as error:
        remedy = "These variables are the agent's: do not set or change them"
        raise ConfigError(explain("malformed environment", "ELASTICRT_*", got=str(error), remedy=remedy)) from error


@lru_cache(maxsize=1)
def agent_link() -> AgentClient | None:
    """This process's link; None without an agent. The first call adopts the descriptor."""
    worker = worker_env()
    if worker is None or worker.channel_fd < 0:
        return None
    return AgentClient(Channel.adopt(worker.channel_fd))


@lru_cache(maxsize=1)
def status_page() -> StatusPage | None:
    """This process's status page; None without an agent."""
    worker = worker_env()
    return None if worker is None or worker.page_fd < 0 else StatusPage(worker.page_fd)


@lru_cache(maxsize=1)
def show_stacks() -> None:
    """Let the agent see what this process is doing: at STACKS_SIGNAL its stacks are written behind the page's words.

    From C, without the interpreter: it works while a thread keeps the interpreter to itself, too. A handler that the
    script has for this signal stays.
    """
    worker = worker_env()
    if worker is None or worker.page_fd < 0 or signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:
        return
    os.lseek(worker.page_fd, PAGE_BYTES, os.SEEK_SET)
    faulthandler.register(STACKS_SIGNAL, worker.page_fd, all_threads=True, chain=False)


def linger(code: int, wait_s: float, then: Callable[[], object]) -> None:
    """Called at the end of a worker that hosts its group's store, which others may need. See `AgentClient.linger`."""
    link = agent_link()
    if link is not None:
        link.linger(code, wait_s, then)


def forget() -> None:
    """Read the environment anew at the next use: for a process that has become another worker."""
    for cached in (worker_env, agent_link, status_page, show_stacks):
        cached.cache_clear()
