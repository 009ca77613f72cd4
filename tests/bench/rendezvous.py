"""How the rendezvous grows: N agents form a generation, one is lost, they form the next; all in a real etcd.

    python -m tests.bench.rendezvous [--agents 100,1000] [--c10d 32,64,128,256] [--processes 2]

The agents are virtual (`tests/bench/crowd.py`): the production rendezvous, decisions, leases, watches and seats; no
workers. The leader has a process of its own, as it has a machine of its own; the others share the rest. Times are from
the last registration (or from the moment the survivors' workers fail) until the last agent has read its seat.
Requests, messages and bytes are etcd's own counts (/metrics). At rest nothing but keep-alives may be counted.

Beside it, torchrun's c10d rendezvous with N agents in one process, as far as that ends within 120 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers import etcd_server

RESULTS = Path(__file__).resolve().parent / "results"
REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
REST_S = 5.0
TTL_S = 60.0
"""Long, so that one machine can keep thousands of leases without being busy with that alone; nothing waits for it."""

C10D_S_MAX = 120.0


@dataclass(frozen=True)
class Counts:
    """etcd's counters at one moment: unary requests and stream messages by method, bytes from and to clients."""

    requests: dict[str, float]
    messages: dict[str, float]
    received: float
    sent: float

    @classmethod
    def read(cls, port: int) -> Counts:
        """From /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()

        def by_method(name: str) -> dict[str, float]:
            found: dict[str, float] = {}
            for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
                method = re.search(r'grpc_method="(\w+)"', labels)
                kind = re.search(r'grpc_type="(\w+)"', labels)
                assert method and kind
                word = method[1] if name.endswith("handled_total") else f"{method[1]} {name.split('_')[3]}"
                if name.endswith("handled_total") == (kind[1] == "unary"):
                    found[word] = found.get(word, 0.0) + float(value)
            return found

        def total(name: str) -> float:
            return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))

        return cls(
            by_method("grpc_server_handled_total"),
            {**by_method("grpc_server_msg_received_total"), **by_method("grpc_server_msg_sent_total")},
            total("etcd_network_client_grpc_received_bytes_total"),
            total("etcd_network_client_grpc_sent_bytes_total"),
        )

    def since(self, before: Counts) -> Counts:
        """What has been added."""

        def less(after: dict[str, float], old: dict[str, float]) -> dict[str, float]:
            changed = {name: value - old.get(name, 0.0) for name, value in after.items()}
            return {name: value for name, value in changed.items() if value}

        return Counts(
            less(self.requests, before.requests),
            less(self.messages, before.messages),
            self.received - before.received,
            self.sent - before.sent,
        )

    def per_agent(self, agents: int) -> str:
        """Requests, watch messages and bytes for each agent."""
        watch = sum(value for name, value in self.messages.items() if name.startswith("Watch"))
        kib = (self.received + self.sent) / 1024 / agents
        return f"{sum(self.requests.values()) / agents:8.1f} {watch / agents:8.1f} {kib:8.1f}"


class Crowds:
    """The processes that hold the agents. Use it as a context manager."""

    def __init__(self, port: int, total: int, processes: int) -> None:
        edges = [0, 1, *[1 + (total - 1) * (index + 1) // processes for index in range(processes)]]
        run_id = f"bench-{secrets.token_hex(4)}"
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._said: list[dict[str, Any]] = []
        self._crowds = []
        for first, last in itertools.pairwise(edges):
            order = {"run_id": run_id, "port": port, "total": total, "first": first, "last": last, "ttl_s": TTL_S}
            command = [sys.executable, "-m", "tests.bench.crowd", json.dumps({**order, "connections": 2})]
            crowd = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._crowds.append(crowd)
            threading.Thread(target=self._read, args=(crowd,), daemon=True).start()

    def __enter__(self) -> Crowds:
        return self

    def __exit__(self, *_: object) -> None:
        for crowd in self._crowds:
            crowd.kill()
            crowd.wait(10)

    def _read(self, crowd: subprocess.Popen[str]) -> None:
        assert crowd.stdout is not None
        for line in crowd.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "ended"})

    def tell(self, text: str, index: int) -> None:
        """A command to one process; the leader's is the first."""
        pipe = self._crowds[index].stdin
        assert pipe is not None
        pipe.write(text + "\n")
        pipe.flush()

    def wait(self, event: str, count: int | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Wait for an event of each process (or of `count`)."""
        deadline = time.monotonic() + WAIT_S
        wanted = {"event": event, **fields}
        while True:
            found = [said for said in self._said if wanted.items() <= said.items()]
            if len(found) >= (count or len(self._crowds)):
                self._said = [said for said in self._said if said not in found]
                return found
            try:
                self._said.append(self._events.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise SystemExit(f"not within {WAIT_S:g} s: {wanted}; so far {self._said}") from None
            if self._said[-1]["event"] == "ended":
                raise SystemExit("a process of virtual agents has ended")


def measure(agents: int, processes: int) -> str:
    """One line of the table."""
    with etcd_server() as server, Crowds(server.port, agents, processes) as crowds:
        crowds.wait("ready")
        before = Counts.read(server.port)
        crowds.tell("register", 0)  # The first to come leads.
        registered = crowds.wait("registered", 1)
        for index in range(1, processes + 1):
            crowds.tell("register", index)
        registered += crowds.wait("registered", processes)
        formed_s = _last(crowds.wait("seated", generation=1)) - _last(registered)
        register_s = _last(registered) - min(each["first"] for each in registered)
        formed = _at_rest(server.port)
        cells = [f"{agents:6} {register_s:8.2f}", f"{formed_s:8.2f} {formed.since(before).per_agent(agents)}"]

        time.sleep(REST_S)
        rest = Counts.read(server.port).since(formed)
        others = {name for name in {**rest.requests, **rest.messages} if not name.startswith("LeaseKeepAlive")}
        assert not others, f"at rest there was more than keep-alives: {rest}"

        for generation, tellers in ((2, [processes]), (3, [*range(processes + 1)])):
            before = Counts.read(server.port)
            crowds.tell(f"lose {agents + 1 - generation}", processes)
            for index in tellers:
                crowds.tell("fail 1" if generation == 2 else "fail 1000000", index)
            began = min(each["at"] for each in crowds.wait("failed", len(tellers)))
            taken = _last(crowds.wait("seated", generation=generation)) - began
            cells.append(f"{taken:8.2f} {_at_rest(server.port).since(before).per_agent(agents)}")
        kept = sum(value for name, value in rest.messages.items() if name.endswith("received")) / REST_S / agents
        return "   ".join([*cells, f"{kept:6.3f}"])


def _last(events: list[dict[str, Any]]) -> float:
    return max(each["at"] for each in events)


def _at_rest(port: int) -> Counts:
    """The counts once etcd has had nothing but keep-alives to do for half a second."""
    deadline = time.monotonic() + WAIT_S
    before = Counts.read(port)
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = Counts.read(port)
        added = now.since(before)
        if not any(not name.startswith("LeaseKeepAlive") for name in {**added.requests, **added.messages}):
            return now
        before = now
    raise SystemExit("etcd does not come to rest")


def c10d(agents: int) -> float | None:
    """Seconds that torchrun's own rendezvous takes; None when more than the limit."""
    command = [sys.executable, "-m", "tests.bench.c10d_crowd", str(agents)]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=C10D_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",") if word]

    parser.add_argument("--agents", type=numbers, default=[10, 100, 1000], help="default: 10,100,1000")
    parser.add_argument("--c10d", type=numbers, default=[32, 64, 128], help="default: 32,64,128; '' for none")
    parser.add_argument("--processes", type=int, default=2, help="processes besides the leader's (default: 2)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    # Told to end, it takes its processes with it, as after an error.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    head = "{:>6} {:>8} {:>8} {:>8} {:>8} {:>8}   {:>8} {:>8} {:>8} {:>8}   {:>8} {:>8} {:>8} {:>8}   {:>6}".format(
        "agents", "register", "formed", "requests", "watch", "KiB",
        "one lost", "requests", "watch", "KiB", "all tell", "requests", "watch", "KiB", "rest/s",
    )  # fmt: skip
    where = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, real etcd on loopback"
    lines = [
        f"{where}, {arguments.processes} + 1 processes of virtual agents on the same machine",
        "",
        head,
    ]
    print("\n".join(lines), flush=True)
    for agents in arguments.agents:
        lines.append(measure(agents, arguments.processes))
        print(lines[-1], flush=True)
    lines += [
        "",
        "Seconds. register: first to last registration. formed: from the last registration until the last has its",
        "seat. one lost: an agent is gone, one other reports failed workers; until the last survivor has its new seat.",
        "all tell: the same, and all survivors report. requests, watch (messages), KiB: per agent, counted by etcd.",
        "rest/s: keep-alives of each agent when nothing happens; nothing else is sent (checked).",
        "",
    ]
    for agents in arguments.c10d:
        taken = c10d(agents)
        shown = f"more than {C10D_S_MAX:.0f} s" if taken is None else f"{taken:.2f} s"
        lines.append(f"torchrun's c10d rendezvous, {agents} agents in one process: {shown}")
        print(lines[-1], flush=True)
        if taken is None:
            break
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "rendezvous.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
