"""How the rendezvous grows: N agents form a generation, some are lost, they form the next ones; all in a real etcd.

    python -m tests.bench.rendezvous [--agents 32,64,128,256,1000,4096] [--processes 2] [--output DIRECTORY]

The agents are virtual (`tests/bench/crowd.py`): the production rendezvous, decisions, leases, watches and seats; no
workers. The leader has a process of its own, as it has a machine of its own; the others share the rest. Times are from
the last registration (or from the moment that survivors' workers fail) until the last agent has read its seat.
Requests, messages and bytes are etcd's own counts (/metrics). At rest nothing but keep-alives may be counted.

Beside it: torchrun's c10d rendezvous with N agents in one process, as far as that ends within 120 s, and what a bare
client and etcd take to tell N watchers of one change and to answer N reads of a roster chunk (`tests/bench/bare.py`).
Writes `rendezvous.txt` and `rendezvous.svg`.
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

from tests.bench.curve import Curve, draw
from tests.servers import EtcdServer, etcd_server

RESULTS = Path(__file__).resolve().parent / "results"
REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 300.0
REST_S = 10.0
TTL_S = 60.0
"""Long, so that one machine can keep thousands of leases without being busy with that alone; nothing waits for it."""

LOSSES = 3
ALL_TELL_AGENTS_MAX = 1000
C10D_S_MAX = 120.0
TICKS_PER_S: int = os.sysconf("SC_CLK_TCK")


class Unfinished(Exception):  # noqa: N818  It describes a measurement.
    """Something did not happen in time, or at all."""


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
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
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

    @property
    def kept(self) -> float:
        """Keep-alives."""
        return self.messages.get("LeaseKeepAlive received", 0.0)

    @property
    def others(self) -> float:
        """Requests and messages that are no keep-alives."""
        everything = [*self.requests.items(), *self.messages.items()]
        return sum(value for name, value in everything if not name.startswith("LeaseKeepAlive"))

    def per_agent(self, agents: int) -> str:
        """Requests, watch messages and KiB for each agent."""
        watch = sum(value for name, value in self.messages.items() if name.startswith("Watch"))
        kib = (self.received + self.sent) / 1024 / agents
        return f"{sum(self.requests.values()) / agents:8.1f} {watch / agents:8.1f} {kib:8.1f}"


class Crowds:
    """The processes that hold the agents. Use it as a context manager."""

    def __init__(self, server: EtcdServer, total: int, processes: int) -> None:
        edges = [0, 1, *[1 + (total - 1) * (index + 1) // processes for index in range(processes)]]
        order = {"run_id": f"bench-{secrets.token_hex(4)}", "port": server.port, "total": total, "ttl_s": TTL_S}
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._said: list[dict[str, Any]] = []
        self._crowds = []
        for first, last in itertools.pairwise(edges):
            text = json.dumps({**order, "first": first, "last": last, "connections": 2, "spare": LOSSES + 1})
            command = [sys.executable, "-m", "tests.bench.crowd", text]
            crowd = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._crowds.append(crowd)
            threading.Thread(target=self._read, args=(crowd,), daemon=True).start()
        self._etcd_pid = server.pid

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
        """Wait for an event of each process (or of `count`). Raises Unfinished."""
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
                raise Unfinished(f"not within {WAIT_S:g} s: {wanted}; so far {self._said}") from None
            if self._said[-1]["event"] == "ended":
                raise Unfinished("a process of virtual agents has ended")

    def cpu_s(self) -> tuple[float, float]:
        """What the agents' processes have used so far, and what etcd has: user and system time."""
        return sum(_cpu_s(crowd.pid) for crowd in self._crowds), _cpu_s(self._etcd_pid)


@dataclass(frozen=True)
class Row:
    """What was measured with so many agents. Seconds; counts as text."""

    agents: int
    registered_s: float
    formed_s: float
    lost_s: float
    told_s: float | None
    bare_s: float
    formed_cpu_s: tuple[float, float]
    lost_cpu_s: tuple[float, float]
    formed_counts: str
    lost_counts: str
    rest: float
    kept: float


def measure(agents: int, processes: int) -> Row:
    """One line of the tables. Raises Unfinished."""
    with etcd_server() as server:
        with Crowds(server, agents, processes) as crowds:
            crowds.wait("ready")
            before = Counts.read(server.port)
            crowds.tell("register", 0)  # The first to come leads.
            registered = crowds.wait("registered", 1)
            for index in range(1, processes + 1):
                crowds.tell("register", index)
            registered += crowds.wait("registered", processes)
            used = crowds.cpu_s()
            formed_s = _last(crowds.wait("seated", generation=1)) - _last(registered)
            formed_cpu_s = _less(crowds.cpu_s(), used)
            formed = _at_rest(server.port)
            time.sleep(REST_S)
            rest = Counts.read(server.port).since(formed)

            losses, generation = [], 1
            for _ in range(LOSSES):
                generation += 1
                losses.append(_lose(crowds, server.port, agents, processes, generation, everybody=False))
            lost_s, lost_cpu_s, lost = sorted(losses, key=lambda loss: loss[0])[LOSSES // 2]
            told_s = None
            if agents <= ALL_TELL_AGENTS_MAX:
                told_s, _, _ = _lose(crowds, server.port, agents, processes, generation + 1, everybody=True)
        return Row(
            agents=agents,
            registered_s=_last(registered) - min(each["first"] for each in registered),
            formed_s=formed_s,
            lost_s=lost_s,
            told_s=told_s,
            bare_s=bare(agents, server.port),
            formed_cpu_s=formed_cpu_s,
            lost_cpu_s=lost_cpu_s,
            formed_counts=formed.since(before).per_agent(agents),
            lost_counts=lost.per_agent(agents),
            rest=rest.others / agents,
            kept=rest.kept / REST_S / agents,
        )


def _lose(
    crowds: Crowds, port: int, agents: int, processes: int, generation: int, *, everybody: bool
) -> tuple[float, tuple[float, float], Counts]:
    """Lose one agent: seconds until the last survivor has its new seat, CPU seconds until then, and all counts."""
    tellers = range(processes + 1) if everybody else range(processes, processes + 1)
    before, used = Counts.read(port), crowds.cpu_s()
    crowds.tell(f"lose {agents + 1 - generation}", processes)
    for index in tellers:
        crowds.tell(f"fail {agents if everybody else 1}", index)
    began = min(each["at"] for each in crowds.wait("failed", len(tellers)))
    taken = _last(crowds.wait("seated", generation=generation)) - began
    return taken, _less(crowds.cpu_s(), used), _at_rest(port).since(before)


def _last(events: list[dict[str, Any]]) -> float:
    return float(max(each["at"] for each in events))


def _less(after: tuple[float, float], before: tuple[float, float]) -> tuple[float, float]:
    return after[0] - before[0], after[1] - before[1]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def _at_rest(port: int) -> Counts:
    """The counts once etcd has had nothing but keep-alives to do for half a second. Raises Unfinished."""
    deadline = time.monotonic() + WAIT_S
    before = Counts.read(port)
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = Counts.read(port)
        if not now.since(before).others:
            return now
        before = now
    raise Unfinished("etcd does not come to rest")


def bare(agents: int, port: int) -> float:
    """Seconds that the same number of reads and watch messages take without us."""
    return _alone("tests.bench.bare", [str(agents), str(port)], WAIT_S)


def c10d(agents: int) -> float:
    """Seconds that torchrun's own rendezvous takes. Raises Unfinished after the limit."""
    return _alone("tests.bench.c10d_crowd", [str(agents)], C10D_S_MAX)


def _alone(module: str, arguments: list[str], limit_s: float) -> float:
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise Unfinished(f"{module} {arguments[0]}: not within {limit_s:g} s") from None
    if done.returncode != 0:
        raise Unfinished(f"{module} {arguments[0]}: {done.stderr[-500:]}")
    return float(done.stdout.split()[-1])


HEAD = (
    f"{'':6} {'seconds':>8} {'':44}   {'CPU seconds, agents + etcd':^33}   {'at rest, per agent':>20}\n"
    f"{'agents':>6} {'register':>8} {'formed':>8} {'one lost':>8} {'all tell':>8} {'bare':>8} {'c10d':>8}   "
    f"{'formed':>16} {'one lost':>16}   {'others':>9} {'keep/s':>10}"
)
COUNTS_HEAD = (
    f"{'':6} {'register and form, per agent':^26}   {'one lost, per agent':^26}\n"
    f"{'agents':>6} {'requests':>8} {'watch':>8} {'KiB':>8}   {'requests':>8} {'watch':>8} {'KiB':>8}"
)
LEGEND = f"""
register: first to last registration. formed: from the last registration until the last agent has its seat. one lost:
an agent is gone, one other reports failed workers; until the last survivor has its new seat (median of {LOSSES}).
all tell: the same, and all survivors report at once. bare: a change told to as many watchers and as many reads of a
roster chunk, by a client that does nothing else. c10d: torchrun's own rendezvous, agents as threads of one process,
given up after {C10D_S_MAX:.0f} s; -: not tried. CPU seconds: what the agents' processes and etcd used meanwhile; on an
idle machine the time cannot be less than their sum divided by the number of cores. requests, watch (messages) and KiB:
counted by etcd. others: requests and messages in {REST_S:.0f} s that are no keep-alives.
"""


def shown(row: Row, c10d_s: str) -> str:
    """A line of the first table."""
    seconds = [row.registered_s, row.formed_s, row.lost_s, row.told_s, row.bare_s]
    cells = " ".join(f"{'-' if value is None else f'{value:.2f}':>8}" for value in seconds)
    cpu = " ".join(f"{one:8.2f} +{two:6.2f}" for one, two in (row.formed_cpu_s, row.lost_cpu_s))
    return f"{row.agents:6} {cells} {c10d_s:>8}   {cpu}   {row.rest:9.3f} {row.kept:10.3f}"


def curves(rows: list[Row], rivals: dict[int, float], gave_up: int | None) -> list[Curve]:
    """The same as lines of the picture. `gave_up`: with how many agents c10d did not end."""
    limit = f" ({gave_up}: more than {C10D_S_MAX:.0f} s)" if gave_up else ""
    return [
        Curve(f"torchrun's c10d{limit}", list(rivals.items())),
        Curve("one lost, formed again", [(row.agents, row.lost_s) for row in rows]),
        Curve("formed", [(row.agents, row.formed_s) for row in rows]),
        Curve("bare reads and messages", [(row.agents, row.bare_s) for row in rows]),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="32,64,128,256,1000,4096")
    parser.add_argument("--processes", type=int, default=2, help="processes besides the leader's (default: 2)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    # Told to end, it takes its processes with it, as after an error.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    where = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, real etcd on loopback"
    lines = [f"{where}, {arguments.processes} + 1 processes of virtual agents on the same machine", "", HEAD]
    print("\n".join(lines), flush=True)
    rows: list[Row] = []
    rivals: dict[int, float] = {}
    gave_up: int | None = None
    for agents in [int(word) for word in arguments.agents.split(",")]:
        rival = "-"
        if not gave_up:
            try:
                rivals[agents] = c10d(agents)
                rival = f"{rivals[agents]:.2f}"
            except Unfinished:
                gave_up, rival = agents, f">{C10D_S_MAX:.0f}"
        try:
            rows.append(measure(agents, arguments.processes))
            lines.append(shown(rows[-1], rival))
        except Unfinished as error:
            lines.append(f"{agents:6} did not finish: {error}; c10d {rival}")
        print(lines[-1], flush=True)
    lines += ["", COUNTS_HEAD, *(f"{row.agents:6} {row.formed_counts}   {row.lost_counts}" for row in rows), LEGEND]
    print("\n".join(lines[-len(rows) - 3 :]))
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "rendezvous.txt").write_text("\n".join(lines))
    (arguments.output / "rendezvous.svg").write_text(draw(curves(rows, rivals, gave_up)))
    if any(row.rest for row in rows):
        raise SystemExit("at rest there was more than keep-alives")


if __name__ == "__main__":
    main()
