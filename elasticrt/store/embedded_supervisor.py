"""The keeper of an embedded etcd: the process that starts it, and stops it when the run no longer needs it.

Run by `embedded.find_or_start` as `python -m elasticrt.store.embedded_supervisor JSON`. It has a session of its own and
no parent that waits for it, so it outlives the agent that started it; etcd dies with it. It loads grpc only when the
server is ready and registered: that is what the agents wait for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from elasticrt.errors import StoreError, explain
from elasticrt.ipc.proc import start_of
from elasticrt.store import embedded, etcd_server
from elasticrt.store.embedded import Served
from elasticrt.store.protocol import Address, Store

LOOK_S = 0.5
"""How often the members are counted. It delays nothing but the keeper's own end."""

AFTER_RESULT_S = 1.0
"""A run that has its result and no members is over this soon."""

FOUND_S = 5.0
"""An agent that has just found the server of an ended run gets this long to become a member."""

LEAVE_S = 60.0
"""How long members may take to hand over and leave, after a signal that they have got as well."""


def ends_at(*, members: int, result: bool, left_at: float, found_at: float, linger_s: float) -> float | None:
    """When to end if nothing changes, on the clock of the arguments; None while there are members. Pure.

    `left_at` is when the last member left, or when the server began; `found_at` when an agent last asked for it.
    """
    if members:
        return None
    if result:
        return max(left_at + min(AFTER_RESULT_S, linger_s), found_at + min(FOUND_S, linger_s))
    return max(left_at, found_at) + linger_s


class Need:
    """Whether a run still needs its server. Times are in seconds on the clock of `now`."""

    def __init__(self, store: Store, run_id: str, linger_s: float, now: float) -> None:
        self._store = store
        self._members, self._result = f"/elasticrt/{run_id}/members/", f"/elasticrt/{run_id}/result/"
        # Who has started the server is about to be the first member, however short the run lingers.
        self._linger_s, self._after_first_s = max(linger_s, FOUND_S), linger_s
        self._left_at = self._found_at = now
        self._touched_ns = 0

    def leave(self) -> None:
        """The members are told to leave: the server ends when the last of them has."""
        self._linger_s = self._after_first_s = 0.0

    def over(self, touched_ns: int, now: float) -> bool:
        """Whether the server can end. `touched_ns` changes whenever an agent finds it, and will soon be a member."""
        if touched_ns != self._touched_ns:
            self._touched_ns, self._found_at = touched_ns, now
        try:
            members = self._store.read(self._members, limit=1).count
            result = self._store.read(self._result, limit=1).count
        except StoreError:
            members, result = 1, 0  # It counts as needed until it answers.
        if members:
            self._left_at, self._linger_s = now, self._after_first_s
        due = ends_at(
            members=members,
            result=bool(result),
            left_at=self._left_at,
            found_at=self._found_at,
            linger_s=self._linger_s,
        )
        return due is not None and now >= due


class Server:
    """The etcd process. `start` raises StoreError, leaving nothing behind."""

    def __init__(self, run_id: str, binary: Path, listen: Address | None) -> None:
        self._run_id = run_id
        self.data = embedded.make_data()
        address = listen or etcd_server.socket_in(self.data)
        self.address = etcd_server.reached_from_here(address)
        # Without fsync: the data does not outlive a crash anyway, because the next server starts empty.
        self._command = etcd_server.command(binary, address, uuid4().hex, ("--unsafe-no-fsync",))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it serves."""
        try:
            self.process = etcd_server.launch(self._command, self.data)
            if etcd_server.await_ready(self.process, self.address):
                return
            got, remedy = etcd_server.why_it_ended(self.data)
            got = got or f"not ready within {etcd_server.READY_S_MAX:g} s"
        except OSError as error:
            got, remedy = etcd_server.in_our_words(str(error))
        self.end()
        remedy = remedy or "Set ELASTICRT_ETCD_BIN to another etcd, or give --etcd HOST:PORT of a running one"
        what = f"etcd did not start for run {self._run_id}"
        raise StoreError(explain(what, self._command[0], got=got, remedy=remedy))

    def lives(self) -> bool:
        """Whether it runs. One that was ended by SIGTERM is started again: that is not ours to obey.

        A scheduler sends SIGTERM to every process of a job, and etcd obeys at once, while the agents still hand over.
        An orderly end loses no data, so the same server is there again in a tenth of a second.
        """
        assert self.process is not None
        if self.process.poll() != -signal.SIGTERM:
            return self.process.returncode is None
        try:
            self.start()
        except StoreError:
            return False
        return True

    def end(self) -> None:
        """Stop it, and remove its data."""
        if self.process is not None:
            etcd_server.stop(self.process)
        embedded.remove_data(self.data)


def keep(run_id: str, linger_s: float, server: Server, record: Path, signals: SimpleQueue[int]) -> None:
    """Return when the server has ended or is not needed any more, and its record is gone.

    SIGTERM, which the members have got as well, ends it when the last of them has left, SIGINT at once.
    """
    from elasticrt.store.etcd import EtcdStore

    store = EtcdStore((server.address,))
    need, end_by = Need(store, run_id, linger_s, time.monotonic()), float("inf")
    while server.lives():
        over = need.over(_touched_ns(record), time.monotonic())
        if over or time.monotonic() >= end_by:
            with embedded.locked():
                # Agents find the server under this lock. One that did since we looked is about to register.
                if time.monotonic() >= end_by or need.over(_touched_ns(record), time.monotonic()):
                    record.unlink(missing_ok=True)
                    store.close()
                    server.end()
                    return
        try:
            number = signals.get(timeout=LOOK_S)
        except Empty:
            continue
        if number == signal.SIGTERM:
            need.leave()
        if number != signal.SIGCHLD:
            end_by = min(end_by, time.monotonic() + (LEAVE_S if number == signal.SIGTERM else 0.0))
    record.unlink(missing_ok=True)  # At once, without the lock: nobody may find a server that is gone.
    store.close()
    with embedded.locked():
        pass  # It removes an empty runtime directory.


def _touched_ns(record: Path) -> int:
    """When an agent last found the server; only for comparison with an earlier value."""
    try:
        return record.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def main(text: str) -> None:
    """The process. `text` is the JSON that `embedded` writes."""
    order: dict[str, Any] = json.loads(text)
    if os.fork():
        os._exit(0)  # Whoever started us has nothing to wait for, and the child is nobody's to reap but init's.
    signals: SimpleQueue[int] = SimpleQueue()  # Its `put` is safe in a signal handler.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda received, _: signals.put(received))
    listen, record = Address(**order["listen"]) if order["listen"] else None, Path(order["record"])
    server = Server(order["run_id"], Path(order["binary"]), listen)
    try:
        server.start()
    except StoreError as error:
        os.write(order["ready_fd"], json.dumps(str(error)).encode())
        return
    try:
        me = os.getpid()
        embedded.write_record(record, Served(server.address, me, start_of(me), str(server.data)))
        os.write(order["ready_fd"], b'""')
        os.close(order["ready_fd"])
        os.close(order["lock_fd"])  # We held the lock as well, in case that the agent died meanwhile.
        keep(order["run_id"], order["linger_s"], server, record, signals)
    finally:
        server.end()


if __name__ == "__main__":
    main(sys.argv[1])
