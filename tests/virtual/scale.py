"""What a rendezvous of N members costs the store: `python -m tests.virtual.scale [--nodes 10 100 ...] [--write]`.

Members with the production view, handler and decisions over the memory store, each with its own client, lease and
watches; the requests and bytes of every client are counted. N members form, one (not the leader) is lost, the others
form again, and then nothing happens for a while. `--write` keeps the table and the plot under `tests/bench/results`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from elasticrt.rendezvous.records import Seat
from elasticrt.store.protocol import Changes, Delete, KeyValue, Lease, Put, RangeRead, Txn, TxnResult, WatchSink, covers
from tests.memory_store import MemoryServer, MemoryStore, MemoryWatch
from tests.virtual.world import VirtualMember, World, spec

RESULTS = Path(__file__).parents[1] / "bench" / "results"
NODES = (10, 30, 100, 300, 1000, 3000, 10_000)
QUIET_S = 20.0
COMMAND = "python -m tests.virtual.scale --write"


@dataclass
class Bill:
    """What one client has asked for and been sent: requests, deliveries of watches, and the bytes of keys and values.

    Keep-alives are counted apart: they are all there is while nothing happens.
    """

    requests: int = 0
    deliveries: int = 0
    bytes: int = 0
    keep_alives: int = 0

    def __sub__(self, other: Bill) -> Bill:
        return Bill(*(getattr(self, name) - getattr(other, name) for name in vars(self)))

    def __add__(self, other: Bill) -> Bill:
        return Bill(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


class CountedStore(MemoryStore):
    """A client that keeps a bill."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.bill = Bill()

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        found = super().read(range_, limit=limit, by_create=by_create)
        self._pay(len(range_) + sum(map(_size, found.keys)))
        return found

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`."""
        puts = sum(len(one.key) + len(one.value) for one in txn.operations if isinstance(one, Put))
        names = sum(len(one.key) for one in txn.operations if isinstance(one, Delete))
        self._pay(puts + names + sum(len(compare.key) + 8 for compare in txn.compares))
        return super().commit(txn)

    def grant(self, ttl_s: float) -> Lease:
        """See `protocol.Store`."""
        self._pay(16)
        return super().grant(ttl_s)

    def keep_alive(self, lease_id: int) -> float:
        """See `protocol.Store`."""
        self.bill.keep_alives += 1
        return super().keep_alive(lease_id)

    def watch(self, range_: str, sink: WatchSink, *, from_revision: int) -> MemoryWatch:
        """See `protocol.Store`."""
        self._pay(len(range_))

        def counted(item: object) -> None:
            self.bill.deliveries += 1
            if isinstance(item, Changes):
                self.bill.bytes += sum(len(one.key) + _size(one.value) for one in item.events)
            sink(item)  # type: ignore[arg-type]  It comes from a watch.

        return super().watch(range_, counted, from_revision=from_revision)

    def _pay(self, size: int) -> None:
        self.bill.requests += 1
        self.bill.bytes += size


def _size(value: KeyValue | None) -> int:
    return 0 if value is None else len(value.key) + len(value.value)


class LargeServer(MemoryServer):
    """The memory server, which finds the oldest of many keys without looking at all of them."""

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `MemoryServer`. Keys are kept in the order of their creation."""
        if not limit:
            return super().read(range_, by_create=by_create)
        self.expire()
        keys: Iterator[str] = iter(self._values) if by_create else self._range(range_)
        found = tuple(islice((self._values[key] for key in keys if covers(range_, key)), limit))
        return RangeRead(found, self.revision, self.store_id)


class Crowd(World):
    """A world of many: each member's store keeps a bill, and a probe finds its target by name."""

    def __init__(self, nodes: int) -> None:
        super().__init__(spec(max_nodes=nodes))
        self.server = LargeServer(self.clock)

    def connect(self) -> MemoryStore:
        """A client for one member."""
        return CountedStore(self.server)

    def probe(self, seat: Seat, asker: str = "") -> str:
        """See `World`."""
        member = self.members[seat.node]
        return "alive" if member.alive and member.me.record.incarnation == seat.incarnation else "dead"

    def bills(self) -> dict[str, Bill]:
        """What each member has to pay by now."""
        return {name: Bill() + _bill(member) for name, member in self.members.items()}


def _bill(member: VirtualMember) -> Bill:
    assert isinstance(member.store, CountedStore)
    return member.store.bill


@dataclass(frozen=True)
class Cost:
    """What one phase has cost: everybody, and the leader alone."""

    nodes: int
    phase: str
    everybody: Bill
    leader: Bill


def measure(nodes: int) -> list[Cost]:
    """Form, lose one, form again, be quiet."""
    world = Crowd(nodes)
    for index in range(nodes):
        world.add(f"n{index}")
    world.settle()
    world.pass_time(1.0, tick=1.0)
    assert world.generations() == [1]
    formed = world.bills()
    costs = [_cost(nodes, "form", {}, formed)]
    world.members[f"n{nodes - 1}"].crash()
    for index in range(nodes - 1):
        world.members[f"n{index}"].fail(collateral=True)
    world.settle()
    assert world.generations() == [1, 2], "within the same instant"
    lost = world.bills()
    costs.append(_cost(nodes, "lose one, form again", formed, lost))
    world.pass_time(QUIET_S, tick=spec().lease_ttl_s / 3)
    costs.append(_cost(nodes, f"{QUIET_S:g} s of quiet", lost, world.bills()))
    return costs


def _cost(nodes: int, phase: str, before: dict[str, Bill], after: dict[str, Bill]) -> Cost:
    spent = {name: bill - before.get(name, Bill()) for name, bill in after.items()}
    return Cost(nodes, phase, sum(spent.values(), Bill()), spent["n0"])


def table(costs: list[Cost]) -> str:
    """Per agent, which must not grow with N, and the leader alone, which may."""
    lines = [
        "What a rendezvous costs the store, counted in the simulator (production decisions, memory store).",
        f"Made by: {COMMAND}",
        "",
        "                             per agent                                       the leader alone",
        f"{'N':>6}  {'phase':<21}{'requests':>9}{'deliveries':>11}{'bytes':>9}{'keep-alives':>12}"
        f"{'requests':>13}{'deliveries':>11}{'bytes':>12}",
    ]
    for cost in sorted(costs, key=lambda cost: (cost.phase != "form", "quiet" in cost.phase, cost.nodes)):
        one, leader = cost.everybody, cost.leader
        lines.append(
            f"{cost.nodes:>6}  {cost.phase:<21}{one.requests / cost.nodes:>9.2f}{one.deliveries / cost.nodes:>11.2f}"
            f"{one.bytes / cost.nodes:>9.0f}{one.keep_alives / cost.nodes:>12.2f}"
            f"{leader.requests:>13}{leader.deliveries:>11}{leader.bytes:>12}"
        )
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Panel:
    """One picture: both axes logarithmic, 10 to 10,000 agents across; `low` and `high` are powers of ten."""

    name: str
    low: int
    high: int
    x: float
    y: float = 40.0
    side: float = 300.0

    def place(self, nodes: float, total: float) -> tuple[float, float]:
        """Where a value is, in pixels."""
        up = (math.log10(total) - self.low) / (self.high - self.low)
        return self.x + (math.log10(nodes) - 1) / 3 * self.side, self.y + (1 - up) * self.side

    def axes(self) -> list[str]:
        """Frame, numbers, and grey lines of what is exactly proportional to N."""
        left, right, bottom = self.x, self.x + self.side, self.y + self.side
        middle = (left + right) / 2
        parts = [
            f'<text x="{middle}" y="{self.y - 12}" text-anchor="middle">{self.name} of all agents</text>',
            f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">agents</text>',
        ]
        for power in range(1, 5):
            x, _ = self.place(10**power, 10**self.low)
            parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{10**power:,}</text>')
        for power in range(self.low, self.high + 1):
            _, y = self.place(10, 10**power)
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">1e{power}</text>')
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#eee"/>')
        for power in range(self.low, self.high - 2):
            (x1, y1), (x2, y2) = self.place(10, 10**power), self.place(10**4, 10 ** (power + 3))
            parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#bbb" stroke-dasharray="3 3"/>')
        return parts

    def line(self, costs: list[Cost], phase: str, colour: str) -> list[str]:
        """The totals of one phase."""
        found = sorted((cost.nodes, getattr(cost.everybody, self.name)) for cost in costs if cost.phase == phase)
        points = [self.place(nodes, total) for nodes, total in found]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


PHASES = (("form", "#1f5fa8"), ("lose one, form again", "#c0504d"))


def plot(costs: list[Cost]) -> str:
    """Requests and bytes of everybody together against N: a cost of O(N) runs along the grey lines."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="770" height="420" font-family="sans-serif" font-size="12">',
        '<rect width="770" height="420" fill="white"/>',
    ]
    for panel in (Panel("requests", 1, 6, 70.0), Panel("bytes", 4, 9, 450.0)):
        parts += panel.axes()
        for phase, colour in PHASES:
            parts += panel.line(costs, phase, colour)
    for index, (phase, colour) in enumerate(PHASES):
        x = 70 + index * 160
        parts.append(f'<rect x="{x}" y="392" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="402">{phase}</text>')
    parts.append('<text x="450" y="402" fill="#777">grey: exactly proportional to N</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Count, print, and with --write keep."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.scale", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    costs = [cost for nodes in options.nodes for cost in measure(nodes)]
    print(table(costs), end="")
    if options.write:
        (RESULTS / "virtual_scale.txt").write_text(table(costs))
        (RESULTS / "virtual_scale.svg").write_text(plot(costs))


if __name__ == "__main__":
    main()
