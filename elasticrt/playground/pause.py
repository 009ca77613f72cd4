"""Stop a node for some seconds: `python -m elasticrt.playground.pause SECONDS AGENT_PID`.

The agent and everything below it are stopped with SIGSTOP and continued with SIGCONT. A program of its own that ends,
and continues the node, as soon as its standard input closes: whatever happens to the simulation, no stopped process
stays behind. An etcd that the agent has started is no descendant of it, and runs on for the other nodes.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from elasticrt.ipc.proc import all_pids, stat


def descends(pid: int, ancestor: int) -> bool:
    """Whether `pid` is a process that `ancestor` has started, or one of those has."""
    while pid > 1:
        found = stat(pid)
        pid = 0 if found is None else found.parent
        if pid == ancestor:
            return True
    return False


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each of them; one that has ended needs none."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def main(argv: list[str]) -> int:
    """Stop, wait, continue."""
    seconds, agent = float(argv[0]), int(argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    pids = [agent]  # First: it must not see its workers stop.
    try:
        send(pids, signal.SIGSTOP)
        pids += [pid for pid in all_pids() if descends(pid, agent)]
        send(pids, signal.SIGSTOP)
        select.select([sys.stdin], [], [], seconds)
    finally:
        send(pids, signal.SIGCONT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
