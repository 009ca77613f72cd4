"""The agent's side of the worker parent: starts the parent, talks to it, and notices its end.

The parent is a separate program (`elasticrt.bootstrap.fork_server_main`): the agent has threads, so it must not fork
workers, and it must not import torch. The parent runs in its own session, so that Ctrl-C in a terminal reaches the
agent alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticrt import events
from elasticrt.errors import ConfigError
from elasticrt.event_log import EventLog
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.messages import Exited, FromParent, Message, Started, Warm
from elasticrt.ipc.proc import HELPER_MAX_S, kill_sessions, members, start_of
from elasticrt.ipc.time_bounds import PARENT_END_S

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParentLost:
    """The worker parent has ended for this `reason`, and its workers with it."""

    reason: str


ParentEvent = FromParent | ParentLost


def write_parent_warm(event: Warm, event_log: EventLog) -> None:
    """Log, and write to `event_log`, that the worker parent is warm, and how it starts workers."""
    event_log.write(events.ParentWarm(**asdict(event)))
    why = f": {event.reason}" if event.reason else ""
    level = logging.WARNING if event.reason.startswith("--preload") else logging.INFO
    log.log(level, "worker parent is warm after %.2f s (%s%s)", event.import_s, event.method, why)


class WorkerParent:
    """One worker parent. Its process starts at once. `Warm` follows when it can start workers, or `ParentLost`.

    Make it in the agent's main thread. A `WorkerGroup` calls `fileno` and `receive` on its reading thread; all other
    methods are for the agent's main thread.

    Args:
        method: how to start workers, "fork" or "exec".
        env: the environment that workers share (`workers.environment`). It must be final: the interpreter and libraries
            read variables while they load, which happens in the parent.
        directory: the workers' working directory.
        preload: modules to import in advance.
        kind: the kind of the workers' command, as in `Command`.
        target: the script, module or program of that command. The parent reads a script to see what it imports.

    Attributes:
        pid: the process id of the parent.

    Raises OSError when the process cannot be started.
    """

    def __init__(
        self,
        *,
        method: str,
        env: Mapping[str, str],
        directory: str | Path,
        preload: Sequence[str],
        kind: str,
        target: str,
    ) -> None:
        self._sending = threading.Lock()
        self._closing = False
        self._ended = threading.Event()
        # The start time of each running worker, by process id: it reveals an id that another process has got since.
        self._sessions: dict[int, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(self._socket)
        order = {"method": method, "preload": list(preload), "kind": kind, "target": target}
        text = json.dumps({**order, "channel_fd": theirs.fileno()})
        command = [sys.executable, "-u", "-m", "elasticrt.bootstrap.fork_server_main", text]
        try:
            self._process = subprocess.Popen(
                command, env=dict(env), cwd=directory, pass_fds=[theirs.fileno()], start_new_session=True
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    def wake(self) -> None:
        """Let a parent that a signal has stopped go on."""
        self._process.send_signal(signal.SIGCONT)

    def fileno(self) -> int:
        """The descriptor of the channel, for a selector."""
        return self._channel.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message with `fds`, which the caller keeps. Raises ChannelClosed if the parent has ended."""
        with self._sending:
            if self._closing:
                raise ChannelClosed("the worker parent has been closed")
            self._channel.send(message, fds)

    def receive(self) -> list[ParentEvent]:
        """Return the messages that have arrived. `ParentLost` is the last one: the parent has ended and been reaped."""
        found: list[ParentEvent] = []
        try:
            while received := self._channel.receive(0):
                message = received[0]
                if isinstance(message, Started):
                    self._sessions[message.pid] = start_of(message.pid)
                elif isinstance(message, Exited):
                    self._sessions.pop(message.pid, None)
                assert isinstance(message, FromParent), message
                found.append(message)
        except (ChannelClosed, OSError, ValueError) as error:
            found.append(self._lost(str(error)))
        return found

    def close(self, timeout_s: float = PARENT_END_S) -> None:
        """End the parent and all workers, and wait for the parent. It is killed after `timeout_s` seconds.

        A second call does nothing more.
        """
        with self._sending:
            self._closing = True
            # Only the sending direction: the parent sees the end of the channel, and can still report the ends of its
            # workers.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if not self._ended.wait(timeout_s):
            self._process.kill()
            self._ended.wait(PARENT_END_S)

    def _lost(self, reason: str) -> ParentLost:
        """Reap the parent, which has closed its channel, and kill the processes that its workers have left."""
        try:
            code = self._process.wait(PARENT_END_S)
        except subprocess.TimeoutExpired:
            # A parent without a channel can serve nobody.
            self._process.kill()
            code = self._process.wait()
        with self._sending:
            self._closing = True
            self._channel.close()
        # When the parent is killed, the kernel kills its workers too (PR_SET_PDEATHSIG), but not the processes that the
        # workers have started. Those are still in the workers' sessions, even if a worker itself is gone (start time
        # 0).
        sessions = {pid for pid, at in self._sessions.items() if start_of(pid) in (0, at)}
        begun = time.monotonic()
        # Again and again, because a process may start another one between the look and the signal.
        while members(sessions) and (waited_s := time.monotonic() - begun) < PARENT_END_S:
            kill_sessions(sessions, with_helpers=waited_s > HELPER_MAX_S)
            time.sleep(0.01)
        self._ended.set()
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return ParentLost(f"the worker parent (pid {self.pid}) ended: {ended}; {reason}")


def parents_keep_dying(node: str, reason: str) -> ConfigError:
    """The error to raise when worker parents on `node` have died too often, the last one for this `reason`."""
    what, expected = "the process that starts workers keeps dying", "that it can import torch and --preload's modules"
    remedy = "Try --start-method spawn, and run `python -c 'import torch'` by hand"
    return ConfigError(what, f"node {node}", got=reason, expected=expected, remedy=remedy)
