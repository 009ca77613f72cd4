"""The link from a training process to its agent: requests with answers, reports that never wait, new seats.

Without an agent there is no link. A forked child, such as a DataLoader worker, inherits the socket but must not use it:
two processes that write frames into one stream destroy each other's frames. Every send therefore checks the process id.
This module uses the standard library only, because scripts that never import torch use it as well.
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
from elasticrt.ipc.messages import Message, Release, Reply, Reseat, ScriptDone, ShowStack
from elasticrt.ipc.status_page import PAGE_BYTES, STACK_BEGINS, STACKS_SIGNAL, TEXT_BYTES, StatusPage

_log = logging.getLogger(__name__)


class AgentClient:
    """The channel to the agent, shared by all threads of this process. A thread of the client's own reads it.

    Args:
        channel: the channel. None where there is no agent: then nothing is sent, and requests are refused.

    Attributes:
        has_agent: whether there was an agent.
    """

    def __init__(self, channel: Channel | None) -> None:
        self.has_agent = channel is not None
        self._channel = channel
        self._pid = os.getpid()
        self._lock = threading.Lock()  # Guards sending, `_closed` and `_waiting`.
        self._closed = "" if self.has_agent else "there is none"  # Why nothing can be sent any more; "" while it can.
        self._waiting: dict[int, queue.SimpleQueue[Reply]] = {}  # Where an answer goes, by number of its request.
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()  # Guards the attributes below.
        self._released = False
        # Seats are numbered in the order of their arrival: the newest that has come, and the newest that was taken.
        self._announced = self._taken = 0
        self._seat: tuple[int, WorkerEnv] | None = None  # The newest seat with its number, until it is taken.
        self._on_seat: Callable[[], object] = bool  # See `call_on_seat`.
        if channel is not None:
            threading.Thread(target=self._read, args=(channel,), name="elasticrt-link", daemon=True).start()

    def request(self, make: Callable[[int], Message], timeout_s: float, fds: Sequence[int] = ()) -> Reply | None:
        """Send a request and wait for the answer; None if there is no answer after `timeout_s` seconds.

        Without an agent, or when the agent ends meanwhile, the answer is a refusal.

        Args:
            make: makes the request with the number that it gets.
            timeout_s: how long to wait, in seconds.
            fds: file descriptors that travel with the request.
        """
        if os.getpid() != self._pid:
            return Reply(0, ok=False, reason="a forked child has no agent")
        answer: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            # Registered before the request is sent, because the answer may come at once.
            self._waiting[number] = answer
            problem = self._send(make(number), fds)
        try:
            return _refusal(number, problem) if problem else answer.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            self._waiting.pop(number, None)

    def try_send(self, message: Message) -> bool:
        """Send a small report if that needs no waiting. Returns whether it was sent."""
        # Linux calls a unix socket writable while three quarters of its buffer are free. A report then fits.
        if self._channel is None or os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._closed and bool(select.select([], [self._channel], [], 0)[1]) and not self._send(message)
        finally:
            self._lock.release()

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send a message that has no answer, and wait for room. Returns whether it was sent; False without an agent."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            return not self._send(message, fds)

    def call_on_seat(self, on_seat: Callable[[], object]) -> None:
        """From now on the reading thread calls `on_seat` for each new seat, before the seat can be taken."""
        self._on_seat = on_seat

    @property
    def has_seat(self) -> bool:
        """Whether a new seat can be taken."""
        return self._seat is not None

    @property
    def is_overtaken(self) -> bool:
        """Whether a newer seat has come than the one that was taken last.

        This becomes true before connections are cut for the new seat. So an error that the cut causes is known as such.
        """
        return self._announced != self._taken

    def wait_for_seat(self) -> WorkerEnv | None:
        """Take the newest seat, once there is one. None if the agent has released this worker, or has ended.

        There is no timeout, because only the agent knows how long a seat may take: with too few nodes the run waits for
        others, and a newcomer waits while the training is in a pause.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._seat is not None or self._released)
            if self._seat is None:
                return None
            (self._taken, seat), self._seat = self._seat, None
            return seat

    def wait_for_release(self, code: int, wait_s: float, then: Callable[[], object]) -> None:
        """Report the end of the script, and wait for Release or for the end of the agent.

        Args:
            code: the script's exit code.
            wait_s: after so many seconds of waiting, `then` is called, and the wait goes on.
            then: what to do in a long wait.
        """
        with self._lock:
            problem = self._send(ScriptDone(code))
        with self._changed:
            released = self._changed.wait_for(lambda: self._released or problem, wait_s)
        if not released:
            then()
            with self._changed:
                self._changed.wait_for(lambda: self._released)

    def _send(self, message: Message, fds: Sequence[int] = ()) -> str:
        """Send a message; the caller holds `_lock`. Returns why that was not possible, or ""."""
        if self._channel is not None and not self._closed:
            try:
                self._channel.send(message, fds)
            except (ChannelClosed, OSError) as error:
                self._closed = str(error) or "closed"
        return self._closed

    def _read(self, channel: Channel) -> None:
        """Deliver what the agent sends, on the reading thread, until the agent has ended."""
        try:
            while True:
                # Without a deadline: this thread has nothing else to do, and ends with the agent or the process.
                received = channel.receive()
                if received is not None:
                    self._deliver(*received)
        except (ChannelClosed, OSError, ValueError) as error:
            with self._lock:
                self._closed = self._closed or str(error) or "closed"
                refused = list(self._waiting.items())
        for number, answer in refused:
            answer.put(_refusal(number, self._closed))
        # The end of the agent releases the worker: no seat can come any more.
        self._deliver(Release(), [])

    def _deliver(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Reseat):
            self._seated(message, fds)
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, Reply):
            answer = self._waiting.get(message.request)
            # A request whose timeout has passed is not registered any more.
            if answer is not None:
                answer.put(message)
        elif isinstance(message, Release):
            with self._changed:
                self._released = True
                self._changed.notify_all()
        elif isinstance(message, ShowStack):
            _show_stack()
            _show_collectives()

    def _seated(self, message: Reseat, fds: list[int]) -> None:
        """Keep a new seat. The old group is cut first, because the main thread may be waiting in that group."""
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
        # This cuts the present group. The seat is offered only afterwards: otherwise the main thread could take it, and
        # the cut would hit the new group.
        self._on_seat()
        with self._changed:
            # A seat that was never taken is replaced. Its listening socket is of no use any more.
            if self._seat is not None and self._seat[1].listen_fd >= 0:
                os.close(self._seat[1].listen_fd)
            self._seat = self._announced, seat
            self._changed.notify_all()


def _refusal(number: int, problem: str) -> Reply:
    return Reply(number, ok=False, reason=f"the agent is gone ({problem})")


def _show_stack() -> None:
    """Write the main thread's stack on the status page, in faulthandler's form.

    The main thread cannot run on meanwhile, because this thread holds the interpreter's lock.
    """
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
    except (RuntimeError, AttributeError) as error:
        # The main thread is just leaving or making a group.
        _log.debug("how many collectives have begun is not known: %s", error)
    recorder = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    page.flights = shortened(recorder()) if recorder is not None else ""


def take_seat(seat: WorkerEnv) -> None:
    """Make this process the worker that `seat` describes, also in the environment variables."""
    os.environ.update(seat.to_env())
    worker_env.cache_clear()
    # Read at once, because the script may write to these variables later.
    worker_env()


@lru_cache(maxsize=1)
def worker_env() -> WorkerEnv:
    """The settings of this worker, which its agent has put into the environment. Without an agent they say nothing.

    Raises ConfigError when they are malformed.
    """
    try:
        return WorkerEnv.from_env(os.environ)
    except ValueError as error:
        remedy = "These variables are the agent's: do not set or change them"
        raise ConfigError("malformed environment", "ELASTICRT_*", got=error, remedy=remedy) from error


@lru_cache(maxsize=1)
def agent_link() -> AgentClient:
    """This process's link to its agent. The first call adopts the descriptor and begins to read."""
    worker = worker_env()
    return AgentClient(None if worker.channel_fd < 0 else Channel.adopt(worker.channel_fd))


@lru_cache(maxsize=1)
def status_page() -> StatusPage:
    """This process's status page; without an agent, a page that only this process sees.

    Raises ConfigError in a process that has the worker's environment, and not its descriptors.
    """
    try:
        return StatusPage(worker_env().page_fd)
    except (OSError, ValueError) as error:
        # A loader's worker that is spawned runs the script from its first line to its `if __name__ == "__main__":`.
        what, expected = "called in a process that the script has started", "a call in the worker itself"
        remedy = 'Put the call behind `if __name__ == "__main__":`, or let loaders fork their workers'
        raise ConfigError(what, "elasticrt.init", got=error, expected=expected, remedy=remedy) from error


@lru_cache(maxsize=1)
def show_stacks() -> None:
    """Let the agent see the main thread's stack by STACKS_SIGNAL, unless the script uses this signal itself.

    The agent asks by the message `messages.ShowStack` first, which the link's thread answers. That thread cannot answer
    while another thread holds the interpreter's lock, and a script without a Loop has no link. In these cases the agent
    sends the signal, and faulthandler writes the stack from C.
    """
    worker = worker_env()
    if worker.page_fd < 0 or signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:
        return
    os.lseek(worker.page_fd, PAGE_BYTES, os.SEEK_SET)
    # Faulthandler shows only the thread that gets the signal, which is the main one: it would read the frames of other
    # threads while these change. In a main thread that runs Python code even its own frames may be half made: measured,
    # one crash in 5,000 signals (CPython 3.11). That is why the agent asks by a message first.
    faulthandler.register(STACKS_SIGNAL, worker.page_fd, all_threads=False, chain=False)
