"""The keeper of an embedded etcd: the process that starts it, and stops it when the run no longer needs it.

Run by `embedded.find_or_start` as `python -m elasticrt.store.embedded_supervisor JSON`. It has a session of its own and
no parent that waits for it, so it outlives the agent that started it; etcd dies with it. It loads grpc only when the
server is ready and registered: that is what the agents wait for.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from elasticrt.errors import StoreError
from elasticrt.ipc.proc import start_of
from elasticrt.ipc.std_streams import point_to_null
from elasticrt.store import embedded, etcd_server
from elasticrt.store.embedded import Served
from elasticrt.store.etcd_server import EtcdProcess
from elasticrt.store.protocol import Address, Store

LOOK_S = 0.5
"""How often the members are counted. It delays nothing but the keeper's own end."""

LINGER_S = 30.0
"""A run without members may go on: its server waits so long for the next one."""

AFTER_RESULT_S = 1.0
"""A run that has its result and no members is over this soon."""

FOUND_S = 5.0
"""An agent that has just found the server of an ended run gets this long to become a member."""

LEAVE_S = 60.0
"""How long members may take to hand over and leave, after a signal that they have got as well."""


class Need:
    """Whether a run still needs its server. Times are in seconds on the clock of `now`."""

    def __init__(self, store: Store, run_id: str, now: float) -> None:
        self._store = store
        self._members, self._result = f"/elasticrt/{run_id}/members/", f"/elasticrt/{run_id}/result/"
        self._left_at = self._found_at = now
        self._touched_ns, self._end_by, self._leaves = 0, float("inf"), False

    def leave(self, by: float) -> None:
        """End when the last member has left, or at `by`: they have been asked to leave."""
        self._leaves, self._end_by = True, min(self._end_by, by)

    def over(self, touched_ns: int, now: float) -> bool:
        """Whether the server can end. `touched_ns` changes whenever an agent finds it, and will soon be a member."""
        if touched_ns != self._touched_ns:
            self._touched_ns, self._found_at = touched_ns, now
        if now >= self._end_by:
            return True
        try:
            if self._store.read(self._members, limit=1).keys:
                self._left_at = now
                return False
            if self._leaves:
                return True
            has_result = bool(self._store.read(self._result, limit=1).keys)
        except StoreError:
            return False  # It counts as needed until it answers.
        after_leaving_s, after_finding_s = (AFTER_RESULT_S, FOUND_S) if has_result else (LINGER_S, LINGER_S)
        return now >= max(self._left_at + after_leaving_s, self._found_at + after_finding_s)


def keep_up(etcd: EtcdProcess) -> bool:
    """Start it again when SIGTERM has ended it; False when it has ended in any other way.

    A scheduler sends SIGTERM to every process of a job, and etcd obeys at once, while the agents still hand over. An
    orderly end loses no data, so the same server is there again in a tenth of a second.
    """
    assert etcd.process is not None
    if etcd.process.poll() == -signal.SIGTERM:
        with suppress(StoreError):  # Then it has ended, and is not ready.
            etcd.start()
    return etcd.process.returncode is None


def keep(run_id: str, etcd: EtcdProcess, record: Path, signals: SimpleQueue[int]) -> None:
    """Return when etcd has ended or is not needed any more, and its record is removed. Raises StoreError.

    SIGTERM, which the members have got as well, ends it when the last of them has left, SIGINT at once.
    """
    from elasticrt.store.etcd import EtcdStore

    store = EtcdStore((etcd.address,))
    need = Need(store, run_id, time.monotonic())
    while keep_up(etcd):
        if need.over(_touched_ns(record), time.monotonic()):
            with embedded.locked():
                # Agents find the server under this lock. One that did since we looked is about to register.
                if need.over(_touched_ns(record), time.monotonic()):
                    record.unlink(missing_ok=True)
                    store.close()
                    etcd.stop()
                    return
        with suppress(Empty):
            number = signals.get(timeout=LOOK_S)
            if number != signal.SIGCHLD:
                need.leave(time.monotonic() + (LEAVE_S if number == signal.SIGTERM else 0.0))
    record.unlink(missing_ok=True)  # At once, without the lock: no agent may find a server that has ended.
    store.close()


def _touched_ns(record: Path) -> int:
    """When an agent last found the server; only for comparison with an earlier value."""
    try:
        return record.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _answer(error: str) -> None:
    """Tell the agent that has started us, which reads our standard output to its end: "", or why it did not work."""
    with suppress(BrokenPipeError):  # It was killed meanwhile; others find us.
        os.write(1, json.dumps(error).encode())
    point_to_null(1)


def main(text: str) -> None:
    """The process. `text` is the JSON that `embedded` writes."""
    order: dict[str, Any] = json.loads(text)
    if os.fork():
        os._exit(0)  # The agent has nothing to wait for, and init reaps the child.
    signals, record, me = etcd_server.caught_signals(), Path(order["record"]), os.getpid()
    try:
        # The data is removed before the agent hears of an error: nothing is left behind.
        with embedded.new_data() as data:
            listen = Address(**order["listen"]) if order["listen"] else etcd_server.socket_in(data)
            # Without fsync: the data does not outlive a crash anyway, because the next server starts empty.
            etcd = EtcdProcess(Path(order["binary"]), data, listen, ("--unsafe-no-fsync",))
            try:
                etcd.start()
                embedded.write_record(record, Served(etcd.address, me, start_of(me)))
                # Until this process ends: systemd-tmpfiles removes no old file that is locked.
                fcntl.flock(os.open(record, os.O_RDONLY), fcntl.LOCK_SH)
                _answer("")
                os.close(order["lock_fd"])  # We held the lock as well, in case that the agent died meanwhile.
                keep(order["run_id"], etcd, record, signals)
            finally:
                etcd.stop()
    except (StoreError, OSError) as error:  # Where no directory can have its data, the text names those.
        _answer(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
