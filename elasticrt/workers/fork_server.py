"""The agent's side of the worker parent: start it, talk to it, notice its end.

The parent is a program of its own (`elasticrt.bootstrap.fork_server_main`), because the agent has threads and must not
import torch. It runs in its own session, so that Ctrl-C in a terminal reaches the agent alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticrt.errors import ConfigError, explain
from elasticrt.event_log import EventLog
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.messages import Exited, Message, Started, Warm
from elasticrt.ipc.proc import start_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParentLost:
    """The worker parent has ended without being asked to; its workers are gone with it."""

    reason: str


ParentEvent = Warm | Started | Exited | ParentLost


def note(event: Warm, events: EventLog) -> None:
    """Log and record what the worker parent has become."""
    events.write("parent_warm", **asdict(event))
    why = f": {event.reason}" if event.reason else ""
    log.info("worker parent is warm after %.2f s (%s%s)", event.import_s, event.method, why)


class WorkerParent:
    """One worker parent. Every event goes to `sink`, from a thread of this object: it must only enqueue."""

    def __init__(self, sink: Callable[[ParentEvent], None]) -> None:
        self._sink = sink
        self._follower: Callable[[ParentEvent], None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()
        self._closing = False
        self._sessions: dict[int, int] = {}  # Of workers that run: process id -> start time, to tell it from a reuse.

    def follow(self, follower: Callable[[ParentEvent], None]) -> None:
        """Also hand every event to `follower`, before the sink: this is how the worker group learns of its workers."""
        self._follower = follower

    def start(
        self,
        *,
        method: str,
        env: Mapping[str, str],
        directory: str | Path,
        preload: Sequence[str] = (),
        kind: str = "script",
        target: str = "",
    ) -> None:
        """Start the process; returns at once. `Warm` follows when it can start workers, or `ParentLost`.

        Call it from the agent's main thread. `method` is "fork" or "exec"; `env` is what workers will have, less what
        differs between them (`group.worker_environment`): variables that interpreter and libraries read while they
        load have to be right here already. `kind` is what the command will be, as in `group.Command`, and `target` the
        script or module, where known: the parent reads it. Raises OSError when the process cannot be started.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-u", "-m", "elasticrt.bootstrap.fork_server_main"]
        command += ["--method", method, "--channel-fd", str(theirs.fileno())]
        command += [f"--preload={name}" for name in preload]
        command += ["--kind", kind, f"--target={target}"]
        try:
            self._process = subprocess.Popen(
                command, env=dict(env), cwd=directory, pass_fds=[theirs.fileno()], start_new_session=True
            )
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        self._socket, self._channel = mine, Channel(mine)
        self._reader = threading.Thread(target=self._read, name="elasticrt-parent", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the parent, 0 before `start`."""
        return self._process.pid if self._process else 0

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message with descriptors (the caller keeps its own copies). ChannelClosed when the parent is gone."""
        with self._sending:
            if self._channel is None or self._closing:
                raise ChannelClosed("the worker parent has been closed")
            self._channel.send(message, fds)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the parent and all workers, and wait for it; after `timeout_s` it is killed. May be called twice."""
        if self._process is None or self._socket is None or self._reader is None:
            return
        with self._sending:
            self._closing = True
            # Only our sending side: the parent sees the end, and we still hear how its workers ended.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()

    def _read(self) -> None:
        channel, process = self._channel, self._process
        assert channel is not None
        assert process is not None
        try:
            while True:
                received = channel.receive(None)
                if received is not None:
                    self._take(received[0])
        except (ChannelClosed, OSError, ValueError) as error:
            reason = str(error)
        try:
            code = process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()  # It has closed its channel and does not end: nothing can be done with it any more.
            code = process.wait()
        with self._sending:
            unexpected, self._closing = not self._closing, True
            channel.close()
        _sweep(self._sessions)
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        lost = ParentLost(f"the worker parent (pid {process.pid}) ended: {ended}; {reason}")
        if unexpected:
            self._hand_over(lost)
        elif self._sessions and self._follower is not None:
            self._follower(lost)  # It was asked to end, but could not say of each worker how that one ended.

    def _take(self, message: Message) -> None:
        if isinstance(message, Started):
            self._sessions[message.pid] = start_of(message.pid)
        elif isinstance(message, Exited):
            self._sessions.pop(message.pid, None)
        assert isinstance(message, (Warm, Started, Exited)), message
        self._hand_over(message)

    def _hand_over(self, event: ParentEvent) -> None:
        if self._follower is not None:
            self._follower(event)
        self._sink(event)


def _sweep(sessions: Mapping[int, int]) -> None:
    """Kill what a killed parent could not: it took its workers along, but not what these had started."""
    ours: Collection[int] = {pid for pid, at in sessions.items() if start_of(pid) in (0, at)}
    if not ours:
        return
    for name in os.listdir("/proc"):  # noqa: PTH208  Names are all we need.
        if name.isdigit():
            with contextlib.suppress(OSError):  # It has ended by itself.
                if os.getsid(int(name)) in ours:
                    os.kill(int(name), signal.SIGKILL)


def keeps_dying(node: str, reason: str) -> ConfigError:
    """The error for a worker parent that has died so often that another one would as well."""
    return ConfigError(
        explain(
            "the process that starts workers keeps dying",
            f"node {node}",
            got=reason,
            expected="that it can import torch and the modules of --preload",
            remedy="Try --start-method spawn, and run `python -c 'import torch'` by hand",
        )
    )
