"""The link from a training process to its agent: requests that are answered, reports that never wait, new seats.

There is none without an agent. A forked child, such as a DataLoader worker, inherits the socket but must not use it:
two processes that write frames into one stream tear both. Every send therefore checks the process id. Standard library
only, because scripts that never import torch use it as well.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from elasticrt.errors import ConfigError
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.flights import shortened
from elasticrt.ipc.messages import Done, Look, Message, Release, Reply, Reseat
from elasticrt.ipc.status_page import PAGE_BYTES, STACK_BEGINS, STACKS_SIGNAL, TEXT_BYTES, StatusPage

_log = logging.getLogger(__name__)


class AgentClient:
    """A channel to the agent, shared by all threads of this process. A thread of its own reads it.

    Args:
        channel: None where there is no agent: nothing is sent, and requests are refused.

    Attributes:
        linked: whether there was an agent.
    """

    def __init__(self, channel: Channel | None) -> None:
        self.linked = channel is not None
        self._channel = channel
        self._pid = os.getpid()
        self._lock = threading.Lock()  # Of sending, `_closed` and `_waiting`.
        self._closed = "" if self.linked else "there is none"  # Why nothing can be sent any more.
        self._waiting: dict[int, queue.SimpleQueue[Reply]] = {}  # By number of the request: where its answer goes.
        self._numbers = itertools.count(1)
        self._news = threading.Condition()  # Of what follows.
        self._released = False
        self._announced = self._taken = 0  # Numbers of seats: the newest that has come, and the one that was taken.
        self._seat: tuple[int, WorkerEnv] | None = None  # The newest that is not taken, with its number.
        self._on_seat: Callable[[], object] = bool
        if channel is not None:
            threading.Thread(target=self._read, args=(channel,), name="elasticrt-link", daemon=True).start()

    def request(self, make: Callable[[int], Message], timeout_s: float, fds: Sequence[int] = ()) -> Reply | None:
        """Send `make(number)`, with `fds`, and wait for the answer; None if it is not there after `timeout_s` seconds.

        Without an agent, or when it ends meanwhile, the answer is a refusal.
        """
        if os.getpid() != self._pid:
            return Reply(0, ok=False, reason="a forked child has no agent")
        answer: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer  # Before it is sent: the answer may come at once.
            problem = self._send(make(number), fds)
        try:
            return _refusal(number, problem) if problem else answer.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            self._waiting.pop(number, None)

    def post(self, message: Message) -> bool:
        """Send a small report if that needs no waiting. Returns whether it was sent."""
        # A unix socket is writable while three quarters of its buffer are free: a report then fits.
        if self._channel is None or os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._closed and bool(select.select([], [self._channel], [], 0)[1]) and not self._send(message)
        finally:
            self._lock.release()

    def say(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send a message that has no answer, waiting for room. Returns whether it was sent: not without an agent."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            return not self._send(message, fds)

    def follow(self, on_seat: Callable[[], object]) -> None:
        """From now on the reading thread calls `on_seat` for each new seat, before it can be taken."""
        self._on_seat = on_seat

    @property
    def has_seat(self) -> bool:
        """Whether a new seat can be taken."""
        return self._seat is not None

    @property
    def overtaken(self) -> bool:
        """Whether a newer seat has come than the one that was taken. True before anything is cut for it."""
        return self._announced != self._taken

    def wait_for_seat(self) -> WorkerEnv | None:
        """Take the newest seat, once there is one. None if the agent has released this worker, or is gone.

        Only the agent knows how long: too few nodes wait for others, and a newcomer waits while the others pause.
        """
        with self._news:
            self._news.wait_for(lambda: self._seat is not None or self._released)
            if self._seat is None:
                return None
            (self._taken, seat), self._seat = self._seat, None
            return seat

    def linger(self, code: int, wait_s: float, then: Callable[[], object]) -> None:
        """Report that the script has ended with `code`, and wait for Release or for the end of the agent.

        `then` is called if that takes longer than `wait_s` seconds.
        """
        with self._lock:
            problem = self._send(Done(code))
        with self._news:
            released = self._news.wait_for(lambda: self._released or problem, wait_s)
        if not released:
            then()
            with self._news:
                self._news.wait_for(lambda: self._released)

    def _send(self, message: Message, fds: Sequence[int] = ()) -> str:
        """Send under the lock. Returns why that was not possible, or ""."""
        if self._channel is not None and not self._closed:
            try:
                self._channel.send(message, fds)
            except (ChannelClosed, OSError) as error:
                self._closed = str(error) or "closed"
        return self._closed

    def _read(self, channel: Channel) -> None:
        try:
            while True:
                # No deadline: this thread has nothing else to do, and ends with the agent or the process.
                received = channel.receive()
                if received is not None:
                    self._deliver(*received)
        except (ChannelClosed, OSError, ValueError) as error:
            with self._lock:
                self._closed = self._closed or str(error) or "closed"
                refused = list(self._waiting.items())
        for number, answer in refused:
            answer.put(_refusal(number, self._closed))
        self._deliver(Release(), [])

    def _deliver(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Reseat):
            self._seated(message, fds)
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Reply):
            answer = self._waiting.get(message.request)
            if answer is not None:  # Else the request has waited too long.
                answer.put(message)
        elif isinstance(message, Release):
            with self._news:
                self._released = True
                self._news.notify_all()
        elif isinstance(message, Look):
            _show_stack()
            _show_collectives()

    def _seated(self, message: Reseat, fds: list[int]) -> None:
        """Keep a new seat. The old group is cut first, because the main thread may be waiting in it."""
        here = worker_env()
        seat = replace(
            WorkerEnv.from_env({**os.environ, **message.env}),
            listen_fd=fds[0] if fds else -1,
            channel_fd=here.channel_fd,
            page_fd=here.page_fd,
            state_fd=-1,
            error_file=here.error_file,
        )
        self._announced += 1
        # Before the seat can be taken: what is cut must not be the new group.
        self._on_seat()
        with self._news:
            if self._seat is not None and self._seat[1].listen_fd >= 0:
                os.close(self._seat[1].listen_fd)
            self._seat = self._announced, seat
            self._news.notify_all()


def _refusal(number: int, problem: str) -> Reply:
    return Reply(number, ok=False, reason=f"the agent is gone ({problem})")


def _show_stack() -> None:
    """Write the main thread's stack on the status page, as faulthandler does, while it cannot run on."""
    page_fd, main = worker_env().page_fd, threading.main_thread().ident
    frame = None if page_fd < 0 or main is None else sys._current_frames().get(main)
    if frame is None:
        return
    lines = (
        f'  File "{each.f_code.co_filename}", line {line or "???"} in {each.f_code.co_name}\n'
        for each, line in traceback.walk_stack(frame)
    )
    text = STACK_BEGINS + "\n" + "".join(lines)
    status_page().clear_text()
    os.lseek(page_fd, PAGE_BYTES, os.SEEK_SET)
    os.write(page_fd, text.encode(errors="backslashreplace")[:TEXT_BYTES])
    status_page().looks += 1


def _show_collectives() -> None:
    """Write on the status page how many collectives the default group has begun, and which have not ended."""
    page, dist = status_page(), sys.modules.get("torch.distributed")
    if dist is None:
        return
    try:
        page.begun = dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0
    except (RuntimeError, AttributeError) as error:  # The main thread is just leaving or making a group.
        _log.debug("how many collectives have begun is not known: %s", error)
    recorder = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    page.flights = shortened(recorder()) if recorder is not None else ""


def take_seat(seat: WorkerEnv) -> None:
    """Make this process the worker that `seat` describes, in its environment as well."""
    os.environ.update(seat.to_env())
    worker_env.cache_clear()
    worker_env()  # Read at once: the script may write to these variables later.


@lru_cache(maxsize=1)
def worker_env() -> WorkerEnv:
    """What the agent told this process, if it has one. Raises ConfigError when it is malformed."""
    try:
        return WorkerEnv.from_env(os.environ)
    except ValueError as error:
        remedy = "These variables are the agent's: do not set or change them"
        raise ConfigError("malformed environment", "ELASTICRT_*", got=error, remedy=remedy) from error


@lru_cache(maxsize=1)
def agent_link() -> AgentClient:
    """This process's link. The first call adopts the descriptor and begins to read."""
    worker = worker_env()
    return AgentClient(None if worker.channel_fd < 0 else Channel.adopt(worker.channel_fd))


@lru_cache(maxsize=1)
def status_page() -> StatusPage:
    """This process's status page; without an agent one that only this process sees."""
    return StatusPage(worker_env().page_fd)


@lru_cache(maxsize=1)
def show_stacks() -> None:
    """Let the agent see the main thread's stack: at `messages.Look`, and at STACKS_SIGNAL unless the script uses it.

    The signal is for a thread that holds the interpreter's lock, and for a script without a Loop, which has no link:
    then nobody reads messages, and faulthandler writes the stack from C.
    """
    worker = worker_env()
    if worker.page_fd < 0 or signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:
        return
    os.lseek(worker.page_fd, PAGE_BYTES, os.SEEK_SET)
    # Only the thread that gets the signal, which is the main one: faulthandler would read frames of the others while
    # they change. Those of a main thread that runs Python code may be half made: measured, a crash in 5,000 signals
    # (CPython 3.11). So the agent asks by a message first.
    faulthandler.register(STACKS_SIGNAL, worker.page_fd, all_threads=False, chain=False)
