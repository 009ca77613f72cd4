"""Stop a node for some seconds: `python -m elasticrt.playground.pause SECONDS AGENT_PID [WORKER_PID ...]`.

The agent, its workers, what lies between them and what the workers started are stopped with SIGSTOP and continued with
SIGCONT. A program of its own that ends, and continues the node, as soon as its standard input closes: whatever happens
to the simulation, no stopped process stays behind. What else the agent started (an etcd that other nodes use) runs on.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from elasticrt.ipc.proc import all_pids, stat


def line_of_descent(pid: int, ancestor: int) -> list[int]:
    """From `pid` up to, without, `ancestor`; empty when it is no descendant."""
    line: list[int] = []
    while pid > 1 and pid != ancestor:
        line.append(pid)
        found = stat(pid)
        pid = 0 if found is None else found.parent
    return line if pid == ancestor else []


def processes_of(agent: int, workers: list[int]) -> list[int]:
    """The pids that make up the node, the agent first: it must not see its workers stop."""
    node = [agent]
    for worker in workers:
        node += [pid for pid in line_of_descent(worker, agent) if pid not in node]
    below = [pid for pid in all_pids() if any(line_of_descent(pid, w) for w in workers if w in node)]
    return node + [pid for pid in below if pid not in node]


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each of them; one that has ended needs none."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def main(argv: list[str]) -> int:
    """Stop, wait, continue."""
    seconds, agent, workers = float(argv[0]), int(argv[1]), [int(word) for word in argv[2:]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    pids = processes_of(agent, workers)
    try:
        send(pids, signal.SIGSTOP)
        select.select([sys.stdin], [], [], seconds)
    finally:
        send(pids, signal.SIGCONT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
