"""The agent's side of the worker parent: starts it, talks to it, notices its end.

The parent is a separate program (`elasticrt.bootstrap.fork_server_main`), because the agent has threads and must not
import torch. It runs in its own session, so that Ctrl-C in a terminal reaches the agent alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from elasticrt.ipc.proc import kill_sessions, members, start_of
from elasticrt.ipc.time_bounds import PARENT_END_S

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParentLost:
    """The worker parent has ended, and its workers with it."""

    reason: str


ParentEvent = FromParent | ParentLost


def note(event: Warm, event_log: EventLog) -> None:
    """Log, and write to `event_log`, that the worker parent can start workers, and by which method."""
    event_log.write(events.ParentWarm(**asdict(event)))
    why = f": {event.reason}" if event.reason else ""
    level = logging.WARNING if event.reason.startswith("--preload") else logging.INFO
    log.log(level, "worker parent is warm after %.2f s (%s%s)", event.import_s, event.method, why)


class WorkerParent:
    """One worker parent. Its process starts at once; `Warm` follows when it can start workers, or `ParentLost`.

    Make it in the agent's main thread. A `WorkerGroup` reads from it; all other methods are for the agent's thread.

    Args:
        method: "fork" or "exec".
        env: the environment that workers share (`workers.environment`). Interpreter and libraries read variables
            while they load, so these must be right already.
        directory: the workers' working directory.
        preload: modules to import in advance.
        kind, target: what the command will be, as in `Command`, and the script or module, if known: it is read.

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
        self._sessions: dict[int, int] = {}  # Running workers by process id; the start time reveals a reused id.
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

    def fileno(self) -> int:
        """For `select`."""
        return self._channel.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message with `fds`, which stay the caller's. Raises ChannelClosed when the parent has ended."""
        with self._sending:
            if self._closing:
                raise ChannelClosed("the worker parent has been closed")
            self._channel.send(message, fds)

    def receive(self) -> list[ParentEvent]:
        """Messages of the parent that have arrived. ParentLost is the last: the parent has ended and been reaped."""
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
        """End the parent and all workers, and wait for it; after `timeout_s` it is killed. May be called twice."""
        with self._sending:
            self._closing = True
            # Only our sending side: the parent sees the end of the channel, and can still report its workers' ends.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if not self._ended.wait(timeout_s):
            self._process.kill()
            self._ended.wait(PARENT_END_S)

    def _lost(self, reason: str) -> ParentLost:
        try:
            code = self._process.wait(PARENT_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # It has closed its channel and does not end: it is of no more use.
            code = self._process.wait()
        with self._sending:
            self._closing = True
            self._channel.close()
        # A killed parent takes its workers along, but not the processes that these have started.
        sessions = {pid for pid, at in self._sessions.items() if start_of(pid) in (0, at)}
        deadline = time.monotonic() + PARENT_END_S
        while members(sessions) and time.monotonic() < deadline:
            kill_sessions(sessions)
            time.sleep(0.01)
        self._ended.set()
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return ParentLost(f"the worker parent (pid {self.pid}) ended: {ended}; {reason}")


def keeps_dying(node: str, reason: str) -> ConfigError:
    """The error for a worker parent on `node` that has died too often, the last time for this `reason`."""
    what, expected = "the process that starts workers keeps dying", "that it can import torch and --preload's modules"
    remedy = "Try --start-method spawn, and run `python -c 'import torch'` by hand"
    return ConfigError(what, f"node {node}", got=reason, expected=expected, remedy=remedy)
