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
import threading
import time
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

from elasticrt.errors import StoreError, explain
from elasticrt.ipc.proc import start_of
from elasticrt.store import etcd_server, runtime_dir
from elasticrt.store.protocol import Address

LEAVE_S = 60.0
"""How long members may take to hand over and leave, after a signal that they have got as well."""

ASKED, INSISTED = "asked to end", "asked to end at once"


def start(run_id: str, binary: Path, listen: Address | None) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start etcd and wait until it serves, at `listen` or on a socket in its data directory, which is ours alone.

    Returns the process and its record. Raises StoreError, leaving nothing behind.
    """
    data, token = runtime_dir.make_data(), uuid4().hex
    address = listen or etcd_server.socket_in(data)
    try:
        # Without fsync: the data does not outlive a crash anyway, because the next server starts empty.
        arguments = etcd_server.command(binary, address, token, ("--unsafe-no-fsync",))
        etcd = etcd_server.launch(arguments, data, deaf_to_sigterm=True)
        address = etcd_server.reached_from_here(address)
        if etcd_server.await_ready(etcd, address):
            record: dict[str, Any] = {**asdict(address), "token": token, "data": str(data)}
            for name, pid in (("keeper", os.getpid()), ("etcd", etcd.pid)):
                record |= {f"{name}_pid": pid, f"{name}_start": start_of(pid)}
            return etcd, record
        etcd_server.stop(etcd)
        got, remedy = etcd_server.why_it_ended(data)
        got = got or f"not ready within {etcd_server.READY_S_MAX:g} s"
    except OSError as error:
        got, remedy = etcd_server.in_our_words(str(error))
    runtime_dir.remove_data(data)
    remedy = remedy or "Set ELASTICRT_ETCD_BIN to another etcd, or give --etcd HOST:PORT of a running one"
    raise StoreError(explain(f"etcd did not start for run {run_id}", str(binary), got=got, remedy=remedy))


def keep(
    run_id: str, linger_s: float, etcd: subprocess.Popen[bytes], record: dict[str, Any], news: SimpleQueue[Any]
) -> None:
    """Return when the server has ended and its record is gone. The data directory is the caller's to remove."""
    from elasticrt.store.etcd import EtcdStore
    from elasticrt.store.idle_shutdown import IdleShutdown

    threading.Thread(target=_tell_end, args=(etcd.pid, news), daemon=True).start()
    store = EtcdStore((Address(record["scheme"], record["host"], record["port"]),), timeout_s=2.0)
    attendance = IdleShutdown(store, run_id, linger_s, news)
    attendance.look()
    touched_at_ns = runtime_dir.touched_at_ns(runtime_dir.runtime_directory(), run_id)
    while True:
        asked = attendance.wait()
        if asked == ASKED and attendance.let_them_leave():
            timer = threading.Timer(LEAVE_S, news.put, (INSISTED,))
            timer.daemon = True
            timer.start()
            continue
        with runtime_dir.locked(run_id) as lock:
            assert lock is not None, "we wait for the lock"
            if not asked:
                # Agents find the server under this lock. One that did since we looked last is about to register.
                last_ns, touched_at_ns = touched_at_ns, runtime_dir.touched_at_ns(lock.directory, run_id)
                if touched_at_ns != last_ns:
                    attendance.found(max(0.0, (time.time_ns() - touched_at_ns) / 1e9))
                attendance.look()
                if attendance.due() is None or touched_at_ns != last_ns:
                    continue
            store.close()
            etcd_server.stop(etcd)
            if runtime_dir.read_record(lock.directory, run_id) == record:
                runtime_dir.remove_record(lock.directory, run_id)
            runtime_dir.forget(lock.directory, run_id)
            return


def main(text: str) -> None:
    """The process. `text` is the JSON that `embedded` writes."""
    order = json.loads(text)
    if os.fork():
        os._exit(0)  # Whoever started us has nothing to wait for, and the child is nobody's to reap but init's.
    news: SimpleQueue[Any] = SimpleQueue()
    # A scheduler sends SIGTERM to everybody, SIGINT is meant for us. SimpleQueue.put is safe in a signal handler.
    signal.signal(signal.SIGTERM, lambda *_: news.put(ASKED))
    signal.signal(signal.SIGINT, lambda *_: news.put(INSISTED))
    ready_fd, lock_fd, run_id = order["ready_fd"], order["lock_fd"], order["run_id"]
    try:
        listen = Address(**order["listen"]) if order["listen"] else None
        etcd, record = start(run_id, Path(order["binary"]), listen)
    except StoreError as error:
        os.write(ready_fd, json.dumps({"error": str(error)}).encode())
        return
    try:
        runtime_dir.write_record(Path(order["directory"]), run_id, record)
        os.write(ready_fd, b"{}")
        os.close(ready_fd)
        os.close(lock_fd)  # We held the lock as well, in case that the agent died meanwhile.
        keep(run_id, order["linger_s"], etcd, record, news)
    finally:
        etcd_server.stop(etcd)
        runtime_dir.remove_data(Path(record["data"]))


def _tell_end(pid: int, news: SimpleQueue[Any]) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # It stays for `etcd_server.stop` to reap.
    news.put("etcd ended")


if __name__ == "__main__":
    main(sys.argv[1])
