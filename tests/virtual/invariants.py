"""What must hold, as small functions over the store's revision history and the workers' records.

`Invariants` is told of every revision in the moment it happens, of what workers do and of what agents say to them; the
names are the rows of the table of invariants. Each check looks only at what is new: all of them run all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrt.agent.commit import Errand
from elasticrt.contract.messages import Reply, Save
from elasticrt.rendezvous.decision import Decision, End, Fence, Publish
from elasticrt.rendezvous.records import (
    Generation,
    HeadRecord,
    Keys,
    Member,
    Preparation,
    Report,
    Result,
    RosterChunk,
    Seat,
    SpecRecord,
    decode,
    roster_digest,
)
from elasticrt.store.protocol import Changes, Event
from tests.virtual.engine import Violation

if TYPE_CHECKING:
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator
    from tests.virtual.training import Group, Training

LEAVE_S = 8.0
"""L2: an agent that was told to leave has ended by then."""

STOP_S = 6.0
"""S16: so long may workers of a replaced generation live on a node that is awake and reaches etcd."""


def require(holds: object, name: str, text: str) -> None:
    """An invariant, or the end of this run."""
    if not holds:
        raise Violation(name, text)


class Invariants:
    """The history so far, and whether it is a good one."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.keys = Keys("run")
        self.generations: list[Generation] = []
        self.published_at: dict[int, float] = {}
        self.seats: dict[str, dict[str, Seat]] = {}
        self.chunks: dict[str, bytes] = {}
        self.heads: list[HeadRecord] = []
        self.head_at: float = 0.0
        self.head_when_published: dict[str, str] = {}
        self.results: dict[int, Result] = {}
        self.result_at: float | None = None
        self.reports: dict[tuple[int, str], Report] = {}
        self.reported: list[Report] = []
        self.members: dict[str, Member] = {}
        self.preparation: Preparation | None = None
        self.spec: SpecRecord | None = None
        self.started_ranks: dict[str, dict[int, str]] = {}
        self.well: dict[str, set[int]] = {}
        self.told_step: dict[str, int] = {}
        self.superseded_at: dict[int, float] = {}
        self.fenced: dict[tuple[int, str, int], set[str]] = {}

    # The store's history.

    def follow(self, changes: Changes) -> None:
        """All that changed at one revision."""
        for event in changes.events:
            self._one(event)
        self._s11_roster()

    def _one(self, event: Event) -> None:
        keys, key, value = self.keys, event.key, event.value
        data = value.value if value is not None else b""
        if key == keys.generation:
            require(value is not None, "S1", "the generation was deleted")
            self._generation(decode(Generation, key, data))
        elif key == keys.checkpoint:
            require(value is not None, "S2", "the head was deleted")
            self._head(decode(HeadRecord, key, data))
        elif key.startswith(keys.results):
            require(value is not None and value.version == 1, "S12", f"{key} was written twice, or deleted")
            self._result(decode(Result, key, data))
        elif key.startswith(keys.all_reports):
            if value is not None:
                report = decode(Report, key, data)
                require(
                    report.generation == self._number(),
                    "S13",
                    f"a report about {report.generation} in {self._number()}",
                )
                self.reports[report.generation, report.node] = report
                self.reported.append(report)
            elif self.sim.running:
                number = int(key[len(keys.all_reports) :].partition("/")[0])
                ended = self.spec is not None and self.spec.attempt in self.results
                require(number < self._number() or ended, "S11", f"the report {key} was deleted in its generation")
        elif key.startswith(keys.rosters):
            if value is None:
                self.chunks.pop(key, None)
            else:
                require(key not in self.chunks, "S1", f"{key} was written twice")
                self.chunks[key] = data
        elif key.startswith(keys.members):
            self._member(key[len(keys.members) :], decode(Member, key, data) if value is not None else None)
        elif key.startswith(keys.preparations):
            self._preparation(decode(Preparation, key, data) if value is not None else None)
        elif key == keys.spec:
            self._spec(decode(SpecRecord, key, data))

    def _number(self) -> int:
        return self.generations[-1].number if self.generations else 0

    def _generation(self, new: Generation) -> None:
        require(new.number == self._number() + 1, "S1", f"generation {new.number} after {self._number()}")
        require(all(new.nonce != old.nonce for old in self.generations), "S1", f"nonce {new.nonce} again")
        require(new.attempt not in self.results, "S1", f"generation {new.number} after the result of its attempt")
        prefix = self.keys.roster(new.nonce)
        chunks = [decode(RosterChunk, key, data) for key, data in sorted(self.chunks.items()) if key.startswith(prefix)]
        require(len(chunks) == new.chunks, "S1", f"generation {new.number} has {len(chunks)} of {new.chunks} chunks")
        require(roster_digest(tuple(chunks)) == new.roster_digest, "S1", f"generation {new.number}: another roster")
        seats = sorted((seat for chunk in chunks for seat in chunk.seats), key=lambda seat: seat.index)
        self._s3_seats(new, seats)
        self._s13_budget(new)
        head = self.heads[-1] if self.heads else None
        require(
            new.resume == head, "S6", f"generation {new.number} resumes from {_step(new.resume)}, head {_step(head)}"
        )
        self.seats[new.nonce] = {seat.node: seat for seat in seats}
        self._l7_nobody_lost(new)
        self.superseded_at[self._number()] = self.sim.engine.now
        self.generations.append(new)
        self.published_at[new.number] = self.sim.engine.now
        names = " ".join(seat.node for seat in seats)
        self.sim.engine.say(
            "etcd", f"= generation {new.number} ({new.kind}): {names}; resume {_step(new.resume)}; {new.cause}"
        )

    def _s3_seats(self, new: Generation, seats: list[Seat]) -> None:
        spec = self.sim.plan.spec
        require(spec.min_nodes <= len(seats) <= spec.max_nodes, "S3", f"{len(seats)} nodes in generation {new.number}")
        require(len(seats) == new.nodes, "S3", f"{len(seats)} seats for {new.nodes} nodes")
        offset = 0
        for index, seat in enumerate(seats):
            require(seat.index == index and seat.rank_offset == offset, "S3", f"{seat.node} has a wrong rank")
            offset += seat.workers
        require(offset == new.world_size, "S3", f"{offset} ranks in a world of {new.world_size}")
        require(len({seat.node for seat in seats}) == len(seats), "S3", "a node has two seats")

    def _s13_budget(self, new: Generation) -> None:
        old = self.generations[-1] if self.generations else None
        if old is None or old.attempt != new.attempt:
            require((new.restarts, new.restarts_total) == (0, 0), "S13", "a new attempt begins with restarts")
            return
        failed = [report for report in self.reported if report.generation == old.number and report.status == "failed"]
        if new.kind == "failure":
            require(failed, "S13", f"generation {new.number} counts a failure that nobody reported in {old.number}")
            require(new.restarts_total == old.restarts_total + 1, "S13", "a failure that does not count once")
        elif new.kind in ("join", "lost"):
            kept = new.restarts_total == old.restarts_total and new.restarts == old.restarts
            require(kept or new.cause.startswith("start again"), "S13", f"a {new.kind} changed the count of restarts")
        spec = self.sim.plan.spec
        spent = new.restarts if spec.restarts_reset else new.restarts_total
        require(spent <= spec.max_restarts, "S13", f"{spent} restarts of {spec.max_restarts}")
        if new.kind == "failure" and new.restarts != old.restarts + 1:
            step = self.heads[-1].step if self.heads else 0
            require(
                spec.restarts_reset and step > old.restart_step and new.restarts == 1, "S13", "the budget came back"
            )

    def _head(self, new: HeadRecord) -> None:
        old = self.heads[-1] if self.heads else None
        require(new.generation == self._number(), "S2", f"generation {new.generation} commits in {self._number()}")
        require(not self._ended(), "S2", f"step {new.step} is committed after the result")
        require(
            new.parent == (old.nonce if old else ""), "S2", f"step {new.step} does not follow the head {_step(old)}"
        )
        require(new.step > _step(old), "S2", f"step {new.step} after {_step(old)}")
        trained = self.sim.disk[new.nonce]
        require(trained == tuple(range(1, new.step + 1)), "S5", f"step {new.step} was trained on {trained}")
        self.heads.append(new)
        self.head_at = self.sim.engine.now
        self.sim.engine.say("etcd", f"= head: step {new.step} by generation {new.generation}")

    def _ended(self) -> bool:
        return self.spec is not None and self.spec.attempt in self.results

    def _result(self, new: Result) -> None:
        if new.status == "succeeded":
            last = self.generations[-1]
            ranks = self.well.get(last.nonce, set())
            require(ranks == set(range(last.world_size)), "S12", f"success, but only {sorted(ranks)} ended well")
            require(new.code == 0, "S12", f"success with code {new.code}")
        else:
            require(new.code != 0, "S12", "failure with code 0")
        self._s13_result(new)
        self._l3_result(new)
        self.results[new.attempt] = new
        self.result_at = self.sim.engine.now
        self.sim.engine.say("etcd", f"= result: {new.status}, code {new.code}: {new.reason}")

    def _s13_result(self, new: Result) -> None:
        if new.code != 1:
            return
        last, spec = self.generations[-1], self.sim.plan.spec
        failed = [report for report in self.reported if report.generation == last.number and report.status == "failed"]
        require(failed, "S13", f"the run failed, but nobody reported a failure in generation {last.number}")
        spent = last.restarts if spec.restarts_reset else last.restarts_total
        require(spent >= spec.max_restarts, "S13", f"the run failed after {spent} of {spec.max_restarts} restarts")

    def _l3_result(self, new: Result) -> None:
        if new.code == 3:
            waited = self.sim.engine.now - self.sim.began
            least = self.sim.plan.spec.join_timeout_s * 0.97
            require(waited >= least, "L3", f"given up after {waited:.0f} s of {least:.0f}")

    def _member(self, node: str, member: Member | None) -> None:
        if member is None:
            self.members.pop(node, None)
            return
        old = self.members.get(node)
        require(old is None or old.incarnation == member.incarnation, "S3", f"{node}'s key was taken by another life")
        self.members[node] = member

    def _preparation(self, new: Preparation | None) -> None:
        old = self.preparation
        if new is not None and old is not None:
            require(old.state != "done", "S9", "a finished preparation was replaced")
            if old.state == "building":
                require(new.incarnation == old.incarnation, "S9", f"{new.node} replaced the builder {old.node}")
        if new is not None:
            if new.state == "building":
                require(
                    new.generation == self._number(), "S9", f"generation {new.generation} builds in {self._number()}"
                )
            else:
                held = old is not None and old.state == "building" and old.incarnation == new.incarnation
                require(held, "S9", f"{new.node} published without the claim")
        self.preparation = new

    def _spec(self, new: SpecRecord) -> None:
        if self.spec is not None and new.attempt != self.spec.attempt:
            require(new.attempt == self.spec.attempt + 1, "S12", f"attempt {new.attempt} after {self.spec.attempt}")
            require(self.spec.attempt in self.results, "S12", "a new attempt before the last had a result")
        self.spec = new

    def _s11_roster(self) -> None:
        if not self.generations or self._ended():
            return
        new = self.generations[-1]
        present = sum(key.startswith(self.keys.roster(new.nonce)) for key in self.chunks)
        require(present == new.chunks, "S11", f"the roster of the current generation {new.number} was deleted")

    # Workers.

    def started(self, group: Group) -> None:
        """S3: ranks of a generation belong to one node each, and are those of its roster."""
        seats = self.seats.get(group.nonce, {})
        seat = seats.get(group.process.name)
        require(seat is not None, "S3", f"{group.process.name} has no seat in generation {group.generation}")
        assert seat is not None
        life = group.process.agent.me.record.incarnation
        require(seat.incarnation == life, "S3", f"{seat.node} took the seat of another life")
        owners = self.started_ranks.setdefault(group.nonce, {})
        generation = next(one for one in self.generations if one.nonce == group.nonce)
        for env in group.envs:
            require(env.rank not in owners, "S3", f"rank {env.rank} of generation {group.generation} was started twice")
            owners[env.rank] = life
            same = (env.world_size, env.master_addr, env.master_port, env.generation, env.group_rank)
            record = generation
            expected = (record.world_size, record.master_address, record.master_port, record.number, seat.index)
            require(same == expected, "S3", f"rank {env.rank} was told {same}, not {expected}")
            require(env.rank == seat.rank_offset + env.local_rank, "S3", f"{seat.node} has rank {env.rank}")

    def formed(self, training: Training) -> None:
        """S4, S6: one process group holds one generation, and starts from one point."""
        for group in training.ready:
            require(group.nonce == training.nonce, "S4", "workers of two generations in one process group")
            step = group.resume.step if group.resume else 0
            require(step == training.step, "S6", f"{group.process.name} starts from step {step}, not {training.step}")

    def stepped(self, training: Training) -> None:
        """S10: nobody trains below what was committed before the generation began."""
        generation = next(one for one in self.generations if one.nonce == training.nonce)
        require(training.step > _step(generation.resume), "S10", f"step {training.step} is done again")

    def exited(self, group: Group) -> None:
        """A node's workers have ended well."""
        self.well.setdefault(group.nonce, set()).update(env.rank for env in group.envs)

    def answered(self, process: Process, errand: Errand, reply: Reply) -> None:
        """S8: what a worker is told about its commit is true, as soon as it is told."""
        if isinstance(errand.request, Save):
            nonce = errand.request.commit["nonce"]
            there = any(head.nonce == nonce for head in self.heads)
            if reply.ok:
                require(there, "S8", f"{process.name} was told that a commit is done, and it is not")
            elif "unknown" not in reply.reason and "does not answer" not in reply.reason:
                # Once its generation is over nobody is left to be misled.
                require(
                    not there or errand.generation < self._number(),
                    "S8",
                    f"{process.name} was told '{reply.reason}' of a commit that is done",
                )

    def told(self, node: str, step: int) -> None:
        """S10: the steps that a node reports as committed only grow."""
        require(
            step >= self.told_step.get(node, 0), "S10", f"{node} reports step {step} after {self.told_step.get(node)}"
        )
        self.told_step[node] = step

    # Agents.

    def decided(self, process: Process, decision: Decision) -> None:
        """What no agent that follows the rules decides."""
        if isinstance(decision, End):
            require(decision.result in self.results.values(), "S12", f"{process.name} ends by a result that is none")
        if isinstance(decision, Fence):
            self._fences(process, decision.member.record.node)
        if isinstance(decision, Publish):
            view = process.agent.rendezvous.view
            for seat in decision.draft.seats:
                report = view.reports.get(seat.node)
                left = report is not None and report.record.status == "left"
                same = report is not None and report.record.incarnation == seat.incarnation
                require(not (left and same), "L6", f"{process.name} seats {seat.node}, and knows that it has left")

    def _fences(self, process: Process, node: str) -> None:
        """L4: whoever is cut off from its peers, with etcd in reach, does not take the healthy half out of the run."""
        victim, seats = self.sim.processes[node], self.seats[self.generations[-1].nonce] if self.generations else {}
        healthy = not (victim.gone or victim.paused or self.sim.unreachable(victim))
        if not healthy or node not in seats or len(seats) <= 2:
            return
        if victim.agent.me.record.incarnation != seats[node].incarnation:
            return
        fenced = self.fenced.setdefault((self._number(), process.name, process.life), set())
        fenced.add(node)
        require(
            2 * len(fenced) < len(seats), "L4", f"{process.name} fences healthy {sorted(fenced)} of {len(seats)} nodes"
        )

    def _l7_nobody_lost(self, new: Generation) -> None:
        """L7: a node whose key or lease went, and which has had no other trouble for long, is not lost."""
        if new.kind != "lost" or self.sim.plan.rates.late or not self.generations:
            return
        calm_s = 2 * self.sim.plan.spec.lease_ttl_s + self.sim.slack
        for node, seat in self.seats[self.generations[-1].nonce].items():
            process = self.sim.processes[node]
            same = not process.gone and not process.paused and process.agent.me.record.incarnation == seat.incarnation
            calm = self.sim.engine.now - max(process.trouble_at, self.sim.trouble_at) > calm_s
            out = all(one.incarnation != seat.incarnation for one in self.seats[new.nonce].values())
            report = self.reports.get((self._number(), node))
            left = report is not None and report.status == "left"
            room = len(self.seats[new.nonce]) < self.sim.plan.spec.max_nodes
            require(not (same and calm and out and room and not left), "L7", f"{node} lives, and {new.cause}")

    def after_event(self) -> None:
        """S16: workers of a replaced generation end soon, on every node that can know."""
        now = self.sim.engine.now
        current = self._number()
        for process in self.sim.processes.values():
            if process.gone or process.paused or self.sim.unreachable(process):
                process.awake_at = now
                continue
            if now - process.awake_at < STOP_S:
                continue
            if process.told_at is not None:
                waited = now - max(process.told_at, process.awake_at)
                require(waited < LEAVE_S + self.sim.slack, "L2", f"{process.name} was told to leave {waited:.0f} s ago")
            for group in process.group.living:
                if group.generation < current:
                    since = max(self.superseded_at.get(group.generation, now), process.awake_at)
                    slack = STOP_S + self.sim.slack
                    text = f"{process.name} runs generation {group.generation} {now - since:.1f} s into {current}"
                    require(now - since < slack, "S16", text)


def _step(head: HeadRecord | None) -> int:
    return head.step if head is not None else 0
