"""What must hold, as small functions over the store's revision history and the workers' records.

`Invariants` is told of every revision in the moment it happens, of what workers do and of what agents say to them; the
names are those of `engine.INVARIANTS`. Each check looks only at what is new: all of them run all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrt.errors import EXIT_CHECKPOINT
from elasticrt.ipc.env import Commit
from elasticrt.rendezvous.records import (
    Generation,
    HandoverRecord,
    Keys,
    Member,
    Preparation,
    Report,
    Result,
    RosterChunk,
    Seat,
    SpecRecord,
    decode,
)
from elasticrt.spec import resized
from elasticrt.store.protocol import Changes, Event, RangeRead
from tests.virtual import copies, disks
from tests.virtual.conduct import Conduct
from tests.virtual.engine import require
from tests.virtual.work import Work, step_of

if TYPE_CHECKING:
    from tests.virtual.simulator import Simulator


class Invariants:
    """The history so far, and whether it is a good one."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.keys = Keys("run")
        self.generations: list[Generation] = []
        self.published_at: dict[int, float] = {}
        self.seats: dict[str, dict[str, Seat]] = {}
        self.chunks: dict[str, bytes] = {}
        self.heads: list[Commit] = []

        self.head_at: float = 0.0
        self.head_when_published: dict[str, str] = {}
        self.results: dict[int, Result] = {}
        self.result_at: float | None = None
        self.reports: dict[tuple[int, str], Report] = {}
        self.reported: list[Report] = []
        self.members: dict[str, Member] = {}
        self.preparations: dict[str, Preparation] = {}
        self.handover: HandoverRecord | None = None
        self.spec: SpecRecord | None = None
        self.spec_since = 0.0
        self.superseded_at: dict[int, float] = {}
        self.running = True
        self.conduct = Conduct(sim, self)
        self.work = Work(sim, self)

    def take_over(self, found: RangeRead) -> None:
        """Begin with what is left in a store that has lost data."""
        for kv in found.keys:
            if kv.key == self.keys.checkpoint:
                self.heads.append(decode(Commit, kv.key, kv.value))
            elif kv.key == self.keys.spec:
                self.spec = decode(SpecRecord, kv.key, kv.value)
            elif kv.key.startswith(self.keys.members):
                member = decode(Member, kv.key, kv.value)
                self.members[member.node] = member
                self.conduct.members[member.node] = (member, kv.create_revision)
                self.conduct.warmed |= {member.incarnation} if member.warm else set()

    # The store's history.

    def follow(self, changes: Changes) -> None:
        """All that changed at one revision."""
        for event in changes.events:
            self._one(event)
        self._s11_roster()

    def _one(self, event: Event) -> None:
        keys, key, value = self.keys, event.key, event.value
        data = value.value if value is not None else b""
        if key.startswith(keys.all_reports):
            self._report(key, decode(Report, key, data) if value is not None else None)
        elif key == keys.generation:
            require(value is not None, "S1", "the generation was deleted")
            self._generation(decode(Generation, key, data))
        elif key == keys.checkpoint:
            require(value is not None, "S2", "the head was deleted")
            self._head(decode(Commit, key, data))
        elif key.startswith(keys.results):
            require(
                value is not None and value.create_revision == value.mod_revision,
                "S12",
                f"{key} was written twice, or deleted",
            )
            self._result(decode(Result, key, data))
        elif key.startswith(keys.rosters):
            self._chunk(key, data)
        elif key.startswith(keys.members):
            self._key_of(key[len(keys.members) :], event)
        elif key.startswith(keys.preparations):
            self._preparation(key, decode(Preparation, key, data) if value is not None else None)
        elif key == keys.handover:
            self._handover(decode(HandoverRecord, key, data) if value is not None else None)
        elif key == keys.spec:
            self._spec(decode(SpecRecord, key, data))

    def _chunk(self, key: str, data: bytes) -> None:
        if not data:
            self.chunks.pop(key, None)
            return
        require(key not in self.chunks, "S1", f"{key} was written twice")
        self.chunks[key] = data

    def _report(self, key: str, report: Report | None) -> None:
        if report is not None:
            text = f"a report about {report.generation} in {self.number()}"
            require(report.generation == self.number(), "S13", text)
            self.reports[report.generation, report.node] = report
            self.reported.append(report)
        elif self.running:
            number = int(key[len(self.keys.all_reports) :].partition("/")[0])
            ended = self.spec is not None and self.spec.attempt in self.results
            require(number < self.number() or ended, "S11", f"the report {key} was deleted in its generation")

    def number(self) -> int:
        """The current generation's number, 0 before the first."""
        return self.generations[-1].number if self.generations else 0

    def roster(self) -> dict[str, Seat]:
        """The current generation's seats."""
        return self.seats[self.generations[-1].nonce] if self.generations else {}

    def attempt(self) -> int:
        """The attempt under way."""
        return self.spec.attempt if self.spec is not None else 1

    def _generation(self, new: Generation) -> None:
        self.conduct.leads("S1", f"publishes generation {new.number}")
        require(new.number == self.number() + 1, "S1", f"generation {new.number} after {self.number()}")
        require(all(new.nonce != old.nonce for old in self.generations), "S1", f"nonce {new.nonce} again")
        require(new.attempt not in self.results, "S1", f"generation {new.number} after the result of its attempt")
        prefix = self.keys.roster(new.nonce)
        chunks = [decode(RosterChunk, key, data) for key, data in sorted(self.chunks.items()) if key.startswith(prefix)]
        require(len(chunks) == new.chunks, "S1", f"generation {new.number} has {len(chunks)} of {new.chunks} chunks")
        seats = sorted((seat for part in (new, *chunks) for seat in part.seats), key=lambda seat: seat.index)
        self._s3_seats(new, seats)
        self._s13_budget(new, {seat.incarnation for seat in seats})
        head = self.heads[-1] if self.heads else None
        require(
            new.resume == head,
            "S6",
            f"generation {new.number} resumes from {step_of(new.resume)}, head {step_of(head)}",
        )
        self.seats[new.nonce] = {seat.node: seat for seat in seats}
        copies.check(self, new, seats[0])
        before = self.generations[-1] if self.generations else None
        if before is not None and before.attempt == new.attempt:
            self.conduct.replaced(self.seats[before.nonce], new, self.seats[new.nonce])
        most = self.sim.plan.generations_max
        require(not most or new.number <= most, "L6", f"generation {new.number}, where {most} are enough: {new.cause}")
        self.superseded_at[self.number()] = self.sim.engine.now
        self.generations.append(new)
        self.published_at[new.number] = self.sim.engine.now
        names = " ".join(seat.node for seat in seats)
        start = f"copy of step {new.memory.step}" if new.memory is not None else f"resume {step_of(new.resume)}"
        self.sim.engine.say("etcd", f"= generation {new.number} ({new.kind}): {names}; {start}; {new.cause}")

    def _s3_seats(self, new: Generation, seats: list[Seat]) -> None:
        assert self.spec is not None
        spec = self.spec.spec
        least = 1 if new.waits else spec.min_nodes
        require(least <= len(seats) <= spec.max_nodes, "S3", f"{len(seats)} nodes in generation {new.number}")
        require(len(seats) == new.nodes, "S3", f"{len(seats)} seats for {new.nodes} nodes")
        offset = 0
        for index, seat in enumerate(seats):
            require(seat.index == index and seat.rank_offset == offset, "S3", f"{seat.node} has a wrong rank")
            offset += seat.workers
        require(offset == new.world_size, "S3", f"{offset} ranks in a world of {new.world_size}")
        require(len({seat.node for seat in seats}) == len(seats), "S3", "a node has two seats")

    def _s13_budget(self, new: Generation, lives: set[str]) -> None:
        old = self.generations[-1] if self.generations else None
        if old is None or old.attempt != new.attempt:
            require((new.restarts.spent, new.restarts.total) == (0, 0), "S13", "a new attempt begins with restarts")
            return
        failed = [report for report in self.reported if report.generation == old.number and report.status == "failed"]
        failures = [(report.node, report.failure) for report in failed if report.failure is not None]
        intent = self.conduct.writer[2] if self.conduct.writer else None
        heard = intent.view.reports if intent and intent.view else {}  # A publication may arrive later than a report.
        final = [node for node, failure in failures if failure.final_code and node in heard]
        require(not final, "S13", f"generation {new.number} comes after a failure on {final} that no restart can cure")
        if new.last is not None:
            whole = (failed or old.last) and new.in_place and new.restarts == old.restarts
            require(whole, "S13", "an end that nobody has caused, that counts, or that nobody has a state for")
            return
        step = self.heads[-1].step if self.heads else 0
        reached = max(process.group.furthest() for process in self.sim.processes.values())
        further = step > old.restarts.step or old.restarts.beats < new.restarts.beats <= reached
        if new.kind == "failure":
            again = [node for node, failure in failures if failure.early and failure.early == old.restarts.early]
            require(
                further or not again, "S13", f"generation {new.number} comes after the same failure before a first step"
            )
            require(failed, "S13", f"generation {new.number} counts a failure that nobody reported in {old.number}")
            require(new.restarts.total == old.restarts.total + 1, "S13", "a failure that does not count once")
        elif new.kind in ("join", "lost", "drain", "resize"):
            kept = new.restarts.total == old.restarts.total and new.restarts.spent == old.restarts.spent
            stay = lives.intersection(seat.incarnation for seat in self.seats[old.nonce].values())
            require(kept or not stay, "S13", f"a {new.kind} changed the count of restarts")
        spec = self.sim.spec
        spent = new.restarts.spent if spec.restarts_reset else new.restarts.total
        require(spent <= spec.max_restarts, "S13", f"{spent} restarts of {spec.max_restarts}")
        if new.kind == "failure":
            follows = old.in_place and not (new.restarts.step or new.restarts.beats)
            counts = not (follows or (new.in_place and any(failure.killed for _, failure in failures)))
            known = (old.restarts.spent, 0) if spec.restarts_reset and further else (old.restarts.spent,)
            least = [each + counts for each in known]
            require(new.restarts.spent in (*least, *(each + 1 for each in known)), "S13", "the budget came back")

    def _head(self, new: Commit) -> None:
        old = self.heads[-1] if self.heads else None
        if self.conduct.writer is None:
            self.heads.append(new)  # By hand.
            return
        require(new.generation == self.number(), "S2", f"generation {new.generation} commits in {self.number()}")
        require(not self._ended(), "S2", f"step {new.step} is committed after the result")
        if old is not None and new.nonce == old.parent:
            disks.check_going_back(self.sim, old, new, self.roster())
            self.work.gone_back(self.generations[-1].nonce, new.step)
            self.heads.append(new)
            self.sim.engine.say("etcd", f"= head: back to step {new.step} in generation {new.generation}")
            return
        require(
            new.parent == (old.nonce if old else ""), "S2", f"step {new.step} does not follow the head {step_of(old)}"
        )
        same = (new.step, self.generations[-1].nonce) in self.work.redone or self._rescued(old, new)
        require(new.step >= step_of(old) + (not same), "S2", f"step {new.step} after {step_of(old)}")
        trained = tuple(step for step, _ in self.sim.disk[new.nonce])
        require(trained == tuple(range(1, new.step + 1)), "S5", f"step {new.step} was trained on {trained}")
        self.heads.append(new)
        self.sim.committed.add(new.nonce)
        if not self.generations[-1].waits:  # What is saved while a run stands still is no sign that it goes on.
            self.head_at = self.sim.engine.now
        self.sim.engine.say("etcd", f"= head: step {new.step} by generation {new.generation}")

    def _rescued(self, old: Commit | None, new: Commit) -> bool:
        """Whether a run that waits saves the very state of a head on another node's disk: no step counts twice."""
        if old is None or not self.generations[-1].waits or not disks.lacks(self.sim, new.node, old.nonce):
            return False
        state = self.sim.disk[new.nonce]
        return state == self.sim.disk[old.nonce] or (bool(state) and state[-1] in self.work.redone)

    def _handover(self, new: HandoverRecord | None) -> None:
        """S1: a leader asks for it, of the current generation. S5: once a step is agreed, all leave after that step."""
        old, self.handover = self.handover, new
        if new is not None:
            self.conduct.leads("S1", "asks for a handover")
            text = f"a handover of generation {new.generation} in {self.number()}"
            require(new.generation == self.number(), "S1", text)
        elif self.conduct.writer is not None and self.conduct.writer[1].why.endswith("given up"):
            self.conduct.leads("S1", "gives a handover up")
        if old is not None and old.step and old.generation == self.number() and not self._ended():
            text = f"all were told to leave after step {old.step}, and now {new.step if new else 'that it is given up'}"
            require(new is not None and new.step == old.step, "S5", text)

    def _ended(self) -> bool:
        return self.spec is not None and self.spec.attempt in self.results

    def _result(self, new: Result) -> None:
        self.conduct.leads("S12", f"ends the run ({new.reason})")
        require(
            new.generation == self.number(), "S12", f"a result about generation {new.generation} in {self.number()}"
        )
        if new.status == "succeeded":
            last = self.generations[-1]
            ranks = self.work.well.get(last.nonce, set())
            require(ranks == set(range(last.world_size)), "S12", f"success, but only {sorted(ranks)} ended well")
            require(new.code == 0, "S12", f"success with code {new.code}")
        else:
            require(new.code != 0, "S12", "failure with code 0")
        self._s13_result(new)
        self._l3_result(new)
        self._s6_result(new)
        self.results[new.attempt] = new
        self.result_at = self.sim.engine.now
        self.sim.engine.say("etcd", f"= result: {new.status}, code {new.code}: {new.reason}")

    def _s13_result(self, new: Result) -> None:
        if new.code != 1:
            return
        last, spec = next(each for each in reversed(self.generations) if each.last is None), self.sim.spec
        failed = [report for report in self.reported if report.generation == last.number and report.status == "failed"]
        require(failed, "S13", f"the run failed, but nobody reported a failure in generation {last.number}")
        spent = last.restarts.spent if spec.restarts_reset else last.restarts.total
        if any(
            report.failure and report.failure.early and report.failure.early == last.restarts.early for report in failed
        ):
            return
        require(spent >= spec.max_restarts, "S13", f"the run failed after {spent} of {spec.max_restarts} restarts")
        if self.sim.plan.stays:
            step = self.heads[-1].step if self.heads else 0
            workers = [each for process in self.sim.processes.values() for each in process.group.workers]
            further = [each.step for each in workers if each.healthy and each.whole and each.step > step]
            require(not further, "S13", f"the run gives up with {further} steps and {step} saved")

    def one_history(self) -> list[Generation]:
        """The present generation and all that it has gone on from in place; the last is the one that was started."""
        started = max(index for index, each in enumerate(self.generations) if not each.in_place)
        return self.generations[started:][::-1]

    def _s6_result(self, new: Result) -> None:
        if new.code == EXIT_CHECKPOINT and disks.NOBODY_HAS_IT in new.text:
            disks.check_end(self.sim, self.heads[-1], self.roster())

    def _l3_result(self, new: Result) -> None:
        if new.code == 3:
            waited = self.sim.engine.now - self.sim.began
            least = self.sim.plan.spec.join_timeout_s * 0.97
            require(waited >= least, "L3", f"given up after {waited:.0f} s of {least:.0f}")
            least_nodes = self.spec.spec.min_nodes if self.spec is not None else 1
            require(len(self.members) < least_nodes, "L3", f"given up, and {sorted(self.members)} are enough")

    def _key_of(self, node: str, event: Event) -> None:
        value = event.value
        if value is None:
            self.conduct.removed(node)
            self._member(node, None)
            return
        member = decode(Member, event.key, value.value)
        self._member(node, member)
        self.conduct.members[node] = (member, value.create_revision)
        if member.warm:
            self.conduct.warmed.add(member.incarnation)
        if value.create_revision == value.mod_revision:
            self.conduct.registered(node, member)

    def _member(self, node: str, member: Member | None) -> None:
        if member is None:
            self.members.pop(node, None)
            return
        old = self.members.get(node)
        require(old is None or old.incarnation == member.incarnation, "S3", f"{node}'s key was taken by another life")
        self.members[node] = member

    def _preparation(self, key: str, new: Preparation | None) -> None:
        old = self.preparations.pop(key, None)
        if new is not None and old is not None:
            require(old.state != "done", "S9", "a finished preparation was replaced")
            if old.state == "building":
                require(new.incarnation == old.incarnation, "S9", f"{new.node} replaced the builder {old.node}")
        if new is not None:
            if new.state == "building":
                require(new.generation == self.number(), "S9", f"generation {new.generation} builds in {self.number()}")
            else:
                held = old is not None and old.state == "building" and old.incarnation == new.incarnation
                require(held, "S9", f"{new.node} published without the claim")
            self.preparations[key] = new

    def _spec(self, new: SpecRecord) -> None:
        require(new.attempt not in self.results, "S12", f"attempt {new.attempt} begins again after its result")
        # Operators may change the numbers of nodes, and who was told to leave.
        old = self.spec
        may = {"spec": resized(new.spec, old.spec), "stopped": old.stopped, "leaving": old.leaving} if old else {}
        if old is not None and new.model_copy(update=may) != old:
            over = old.attempt in self.results
            require(over or not self.members, "S3", f"the options are changed while {sorted(self.members)} live")
        if self.spec is not None and new.attempt != self.spec.attempt:
            require(new.attempt == self.spec.attempt + 1, "S12", f"attempt {new.attempt} after {self.spec.attempt}")
            require(self.spec.attempt in self.results, "S12", "a new attempt before the last had a result")
        self.spec, self.spec_since = new, self.sim.engine.now

    def _s11_roster(self) -> None:
        if not self.generations or self.generations[-1].attempt in self.results:
            return
        new = self.generations[-1]
        present = sum(key.startswith(self.keys.roster(new.nonce)) for key in self.chunks)
        require(present == new.chunks, "S11", f"the roster of the current generation {new.number} was deleted")

    def after_event(self) -> None:
        """L1, in stories that say how soon a fault is overcome; then what agents do."""
        limit = self.sim.plan.commits_within_s
        if limit and not self.results and self.generations:
            waited = self.sim.engine.now - max(self.head_at, self.published_at[1])
            require(waited < limit, "L1", f"nothing has been committed for {waited:.0f} s")
        self.conduct.after_event()
