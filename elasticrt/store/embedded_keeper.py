"""The keeper of an embedded etcd: the process that starts it, and stops it when the run no longer needs it.

`embedded.find_or_start` runs it as `python -m elasticrt.store.embedded_keeper JSON`. It has a session of its own
and no parent that waits for it, so it outlives the agent that started it. etcd dies with it. It asks the server by the
JSON gateway of etcd, not by grpc: grpc needs threads, and may wait for ever where a limit of processes leaves it none.
"""

from __future__ import annotations

import base64
import fcntl
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from elasticrt.errors import StoreError
from elasticrt.ipc.proc import start_of
from elasticrt.ipc.std_streams import point_to_null
from elasticrt.ipc.wording import signal_name
from elasticrt.store import embedded, etcd_server
from elasticrt.store.embedded import EmbeddedServer
from elasticrt.store.etcd_server import EtcdProcess
from elasticrt.store.protocol import Address

LOOK_S = 0.5
"""Seconds between two counts of the members. They delay nothing but the keeper's own end."""

LINGER_S = 30.0
"""A run without members may go on: its server waits this many seconds for the next one."""

OVER_S = 5.0
"""A run that has its result is over this many seconds after its last member has left. An agent that has just found its
server gets as long to become a member."""

LEAVE_S = 60.0
"""How many seconds members may take to hand over and leave after SIGTERM, which they have got as well."""

SILENT_S = 900.0
"""A server that has not answered for so many seconds is over: no agent trains on for longer without etcd."""

READ_S = 5.0
"""For how many seconds a record says why the server has ended."""

ANSWER_S = 2.0
"""How many seconds to wait for an answer of the server."""


def has_keys(address: Address, prefix: str) -> bool:
    """Whether the etcd at `address` has keys that begin with `prefix`, by its JSON gateway. Raises OSError."""
    # The end of the range is the first key behind all that begin with the prefix.
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    first, last = (base64.b64encode(key.encode()).decode() for key in (prefix, end))
    order = {"key": first, "range_end": last, "limit": 1, "keys_only": True}
    try:
        with closing(http.client.HTTPConnection("localhost")) as connection:
            connection.sock = etcd_server.connect(address, ANSWER_S)
            connection.request("POST", "/v3/kv/range", json.dumps(order))
            answer = connection.getresponse()
            text = answer.read()
        if answer.status == http.client.OK:
            return bool(json.loads(text).get("kvs"))
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"no answer of an etcd: {error}") from error
    raise OSError(f"etcd answers with status {answer.status}")


class ServerDemand:
    """Whether a run still needs its server. Times are in seconds on the clock of `now`.

    Args:
        has_keys: whether the run's etcd has keys that begin with a prefix. Raises OSError.
        run_id: the run.
        now: the time at which the server became ready.
    """

    def __init__(self, has_keys: Callable[[str], bool], run_id: str, now: float) -> None:
        self._has_keys = has_keys
        self._members, self._result = f"/elasticrt/{run_id}/members/", f"/elasticrt/{run_id}/result/"
        # When there last was a member, or an agent found the server; and when it answered last.
        self._used_at = self._answered_at = now
        self._touched_ns, self._end_by, self._members_leave = 0, float("inf"), False

    def note_leaving(self, by: float) -> None:
        """The members have been asked to leave: the server ends after the last of them, or at `by`."""
        self._members_leave, self._end_by = True, min(self._end_by, by)

    def is_over(self, touched_ns: int, now: float) -> bool:
        """Whether the server can end.

        `touched_ns` is the time of the record. It changes whenever an agent finds the server, and that agent will soon
        be a member.
        """
        if touched_ns != self._touched_ns:
            self._touched_ns, self._used_at = touched_ns, now
        if now >= self._end_by:
            return True
        try:
            if self._has_keys(self._members):
                self._used_at = self._answered_at = now
                return False
            has_result = self._has_keys(self._result)
        except OSError:
            return now >= self._answered_at + SILENT_S
        self._answered_at = now
        return self._members_leave or now >= self._used_at + (OVER_S if has_result else LINGER_S)


def restart_if_terminated(etcd: EtcdProcess) -> bool:
    """Start etcd again after SIGTERM has ended it. Returns whether etcd runs: False if it has ended in any other way.

    A scheduler sends SIGTERM to every process of a job, and etcd obeys at once, while the agents still hand over. An
    orderly end loses no data, so the same server is there again in a tenth of a second.
    """
    assert etcd.process is not None
    if etcd.process.poll() == -signal.SIGTERM:
        # A server that fails to start has ended, so the code below sees its end.
        with suppress(StoreError):
            etcd.start()
    return etcd.process.returncode is None


def keep(run_id: str, etcd: EtcdProcess, record: Path, signals: SimpleQueue[int]) -> None:
    """Return when etcd has ended, and its record says so, or is not needed any more, and its record is removed.

    SIGTERM, which the members have got as well, ends etcd when the last of them has left. SIGINT ends it at once.
    """
    demand = ServerDemand(partial(has_keys, etcd.address), run_id, time.monotonic())
    while restart_if_terminated(etcd):
        if demand.is_over(_touched_ns(record), time.monotonic()):
            with embedded.locked():
                # Agents find the server under this lock. An agent that found it since the look above is about to
                # register.
                if demand.is_over(_touched_ns(record), time.monotonic()):
                    record.unlink(missing_ok=True)
                    etcd.stop()
                    return
        with suppress(Empty):
            number = signals.get(timeout=LOOK_S)
            if number != signal.SIGCHLD:
                demand.note_leaving(time.monotonic() + (LEAVE_S if number == signal.SIGTERM else 0.0))
    # This is done at once, without the lock: no agent may find a server that has ended.
    served = embedded.read_record(record)
    try:
        if served is not None:
            embedded.write_record(record, replace(served, why_ended=_how_it_ended(etcd)))
    except (StoreError, OSError):
        record.unlink(missing_ok=True)


def _forget(record: Path) -> None:
    """Remove the record of a server that has ended by itself, once its agents have had the time to read why."""
    if (served := embedded.read_record(record)) is None or not served.why_ended:
        return
    time.sleep(READ_S)
    with embedded.locked():
        # An agent that looks for a server removes the record, and starts another one.
        if embedded.read_record(record) == served:
            record.unlink(missing_ok=True)


def _how_it_ended(etcd: EtcdProcess) -> str:
    """How etcd has ended by itself, in a few words."""
    assert etcd.process is not None
    code = etcd.process.returncode
    if code < 0:
        return f"killed by {signal_name(-code)}"
    return f"ended with code {code}: {etcd.why_it_ended()}".removesuffix(": ")


def _touched_ns(record: Path) -> int:
    """When an agent last found the server; only for comparison with an earlier value."""
    try:
        return record.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _answer(error: str) -> None:
    """Tell the agent that has started this process "", or why the server could not be started.

    The agent reads this process's standard output to its end.
    """
    # If the agent was killed meanwhile, other agents still find the server.
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(error).encode())
    point_to_null(1)


def main(text: str) -> None:
    """The process. `text` is the JSON that `embedded` writes."""
    order: dict[str, Any] = json.loads(text)
    if os.fork():
        # The agent has nothing to wait for, and init reaps the child.
        os._exit(0)
    signals, record, me = etcd_server.catch_signals(), Path(order["record"]), os.getpid()
    try:
        # The data is removed before the agent hears of an error, so that nothing is left behind.
        with embedded.new_data_directory() as data:
            listen = Address(**order["listen"]) if order["listen"] else etcd_server.socket_in(data)
            # Without fsync, because the data does not outlive a crash anyway: the next server starts empty.
            etcd = EtcdProcess(Path(order["binary"]), data, listen, ("--unsafe-no-fsync",))
            try:
                etcd.start()
                embedded.write_record(record, EmbeddedServer(etcd.address, me, start_of(me)))
                # The record stays locked until this process ends: systemd-tmpfiles removes no old file that is locked.
                fcntl.flock(os.open(record, os.O_RDONLY), fcntl.LOCK_SH)
                _answer("")
                # This process held the lock as well, in case the agent died meanwhile.
                os.close(order["lock_fd"])
                keep(order["run_id"], etcd, record, signals)
            finally:
                etcd.stop()
        _forget(record)
    # If no directory can take the data, the error's text names the directories.
    except (StoreError, OSError) as error:
        _answer(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
