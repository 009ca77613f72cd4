"""How agents behave: who writes, in which life, on what knowledge, and whether their workers live as they may.

`Conduct` is told of every transaction with its writer, of every decision, and of every event; the history itself is
checked in `invariants`. The names are the rows of the table of invariants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticrt.rendezvous.decision import Decision, End, Fence, Leave, Publish
from elasticrt.rendezvous.records import Generation, Member, Seat
from elasticrt.rendezvous.view import View
from elasticrt.run_options import STOP_TIMEOUT_S
from elasticrt.spec import resized
from elasticrt.store.protocol import Compare, Txn
from tests.virtual.engine import require

if TYPE_CHECKING:
    from tests.virtual.invariants import Invariants
    from tests.virtual.living import Worker
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator

STOP_S = 6.0
"""S16: so long may workers of a replaced generation live on a node that is awake and reaches etcd. One that leaves
gives its workers STOP_TIMEOUT_S to end. L2: an agent that was told to leave has ended by then."""

TOLD_S = 8.0
"""S16: ... and on one that does not reach etcd, but a peer that is in a newer generation."""

ASKED_S = 1.6
"""L7: so long may a question of one of two nodes be under way that is answered by silence."""

REFUSED_MAX = 3
"""L8: so often a transaction that was refused may be sent again with the same compares."""


@dataclass(frozen=True)
class Intent:
    """What the sender of a transaction knew: its life, its last fence (whom, in which generation), and its view."""

    incarnation: str = ""
    fencing: tuple[str, int] = ("", 0)
    view: View | None = None


class Conduct:
    """What agents do, judged by the history that they make."""

    def __init__(self, sim: Simulator, history: Invariants) -> None:
        self.sim = sim
        self.history = history
        self.members: dict[str, tuple[Member, int]] = {}
        self.warmed: set[str] = set()
        self.writer: tuple[Process, Txn, Intent] | None = None
        self._refused: Counter[tuple[str, str, tuple[Compare, ...]]] = Counter()
        self._fenced: dict[tuple[int, str, int], set[str]] = {}
        self._named_at: dict[tuple[str, int], float] = {}

    # Writing.

    def refused(self, process: Process, txn: Txn) -> None:
        """L8: who is refused has old knowledge: it reads before it tries again. (Workers ask again.)"""
        if txn.why.endswith(" builds"):
            return
        sent = (process.name, txn.why, txn.compares)
        self._refused[sent] += 1
        require(
            self._refused[sent] < REFUSED_MAX, "L8", f"{process.name} is refused again and again, unread: {txn.why}"
        )

    def leads(self, name: str, what: str) -> None:
        """Only the holder of the oldest member key publishes, ends and asks for handovers."""
        if self.writer is None:
            return
        process, _, intent = self.writer
        text = f"{process.name} {what}, and knew generation {process.knew} of a store that has lost its data"
        require(not process.knew or name != "S1", "S1", text)
        oldest = min(self.members, key=lambda node: self.members[node][1], default="")
        own = oldest == process.name and self.members[oldest][0].incarnation == intent.incarnation
        require(own, name, f"{process.name} {what}, and {oldest or 'nobody'} leads")

    def registered(self, node: str, member: Member) -> None:
        """S3, S16: a key is made by a member of this very run, in a life that has not been left out."""
        if self.writer is None:
            return
        process, _, _ = self.writer
        stored = self.history.spec
        if stored is not None:
            same = resized(process.spec, stored.spec) == stored.spec
            require(same, "S3", f"{node} registers with other options than the run has")
            if process.attempt:
                text = f"{node} of attempt {process.attempt} registers in attempt {stored.attempt}"
                require(process.attempt == stored.attempt, "S3", text)
        mine = self.history.roster().get(node)
        left_out = mine is None or mine.incarnation != member.incarnation
        worked = member.incarnation in self.history.work.worked
        require(not (worked and left_out), "S3", f"{node} registers in a life that has been left out")
        for group in process.group.living if not process.gone else ():
            text = f"{node} begins a new life while workers of the last one live"
            require(group.incarnation == member.incarnation, "S16", text)

    def removed(self, node: str) -> None:
        """S1, S3: a farewell takes the own life's key, a fence the life that was asked, in the generation it was in."""
        before = self.members.pop(node, None)
        if before is None or self.writer is None:
            return
        (member, _), (process, txn, intent) = before, self.writer
        if txn.why.endswith(" leaves"):
            own = member.incarnation in process.incarnations
            require(own, "S3", f"the farewell of a former life of {node} removes the key of its successor")
        elif txn.why.endswith(" is fenced") and intent.fencing[0]:
            require(
                member.incarnation == intent.fencing[0], "S3", f"{process.name} fences a life that it has not asked"
            )
            number = self.history.number()
            text = f"{process.name} fences {node} for what it did in generation {intent.fencing[1]}, in {number}"
            require(intent.fencing[1] == number, "S1", text)

    # Deciding.

    def decided(self, process: Process, decision: Decision) -> None:
        """What no agent that follows the rules decides."""
        if isinstance(decision, End):
            require(
                decision.result in self.history.results.values(), "S12", f"{process.name} ends by a result that is none"
            )
        if isinstance(decision, Leave):
            process.leaves_at = self.sim.engine.now
        if isinstance(decision, Fence):
            view = process.agent.member.view
            process.fencing = (decision.member.record.incarnation, view.generation_number)
            self._fences(process, decision.member.record.node)
        if isinstance(decision, Publish):
            view = process.agent.member.view
            agreed = view.handover is not None and view.handover.record.step
            ends = [node for node, report in view.reports.items() if report.record.status in ("finishing", "ok")]
            joins = decision.draft.kind in ("join", "drain", "resize") and not agreed
            require(not (joins and ends), "S12", f"{process.name} lets nodes in, and knows that {ends} have ended well")
            for seat in decision.seats:
                report = view.reports.get(seat.node)
                left = report is not None and report.record.status == "left"
                same = report is not None and report.record.incarnation == seat.incarnation
                require(not (left and same), "L6", f"{process.name} seats {seat.node}, and knows that it has left")

    def _fences(self, process: Process, node: str) -> None:
        """L4: whoever is cut off from its peers, with etcd in reach, does not take the healthy half out of the run.

        A node that has come back, and has been heard again, is in the run: other links may be cut by then.
        """
        history = self.history
        victim, seats = (
            self.sim.processes[node],
            history.seats[history.generations[-1].nonce] if history.generations else {},
        )
        healthy = not (victim.gone or victim.paused or self.sim.unreachable(victim))
        if not healthy or node not in seats or len(seats) <= 2:
            return
        self._l4_hears_most(process, seats)
        if victim.agent.member.me.record.incarnation != seats[node].incarnation:
            return
        verdicts = process.agent.member.view.verdicts
        heard = {each for each in seats if (said := verdicts.get(seats[each].incarnation)) and said.kind == "alive"}
        fenced = self._fenced.setdefault((self.history.number(), process.name, process.life), set())
        fenced -= heard
        fenced.add(node)
        may = self._may_do_without(process, process.agent.member.view, fenced, seats)
        require(may, "L4", f"{process.name} fences healthy {sorted(fenced)} of {len(seats)} nodes")

    @staticmethod
    def _may_do_without(process: Process, view: View, names: Collection[str], seats: dict[str, Seat]) -> bool:
        """Whether so few healthy nodes may be taken out: fewer than half, or half after a lease term of silence."""
        if 2 * len(names) != len(seats):
            return 2 * len(names) < len(seats)
        assert view.spec is not None
        verdicts = [view.verdicts.get(seats[name].incarnation) for name in names]
        term_s, now = view.spec.record.spec.lease_ttl_s, process.clock()
        return all(said and said.kind == "silent" and now >= said.since + term_s for said in verdicts)

    def _l4_hears_most(self, process: Process, seats: dict[str, Seat]) -> None:
        """L4: who takes another out has heard most of the others, as far as they can be heard."""
        view = process.agent.member.view
        verdicts = view.verdicts
        victim = verdicts.get(process.fencing[0])
        if victim is not None and victim.kind == "dead":
            return  # That is certain, whatever else is heard.
        deaf = []
        for seat in view.seats.values():  # Who follows knows a part of them.
            other = self.sim.processes[seat.node]
            me = other.me  # It may have been heard in a later life.
            later = verdicts.get(me.record.incarnation) if me else None
            said = later or view.newest_verdict(seat)
            if later is None and said is not None and said.kind == "dead":
                continue  # Its machine has answered that this life has ended. Of a later one nobody need know yet.
            there = not (other.gone or other.paused or self.sim.linked(process, other))
            if there and (said is None or said.kind != "alive"):
                deaf.append(seat.node)
        may = self._may_do_without(process, view, deaf, seats)
        require(may, "L4", f"{process.name} takes others out, and hears none of {deaf}")

    # Who is left out.

    def replaced(self, old: dict[str, Seat], new: Generation, seats: dict[str, Seat]) -> None:
        """A generation takes the place of another: nobody is left out, and nobody in, without a reason."""
        text = f"generation {new.number} starts all workers anew: {new.cause}"
        require(new.in_place or not self.sim.plan.stays, "L9", text)
        lives = {seat.incarnation for seat in seats.values()}
        if new.kind == "lost":
            lost = [seat for seat in old.values() if seat.incarnation not in lives]
            require(lost, "L7", f"generation {new.number} replaces one that has lost nobody: {new.cause}")
        if new.kind in ("join", "drain", "resize"):
            self._planned(old, new, lives)
        for seat in seats.values():
            member = self.members.get(seat.node)
            if member is not None and member[0].incarnation == seat.incarnation:
                me = self.sim.processes[seat.node].me
                ended = me is None or me.record.incarnation != seat.incarnation
                # An older key may have come late, also one of a life that has ended since.
                warm = member[0].warm or (me is not None and me.record.warm)
                warm = warm or (ended and seat.incarnation in self.warmed)
                require(warm, "L1", f"{seat.node} is seated, and cannot start workers yet")
        if self.writer is not None and not self.sim.plan.rates.late:
            self._l9_in_place(new, seats)
        out = [seat for seat in old.values() if seat.incarnation not in lives and self._is_well(seat, new)]
        assert self.history.spec is not None
        room = len(seats) < self.history.spec.spec.max_nodes
        self._l4_majority(old, new, out)
        if not self.sim.plan.rates.late and room:
            for_s = ASKED_S if len(old) <= 2 else 0.0  # Nobody else's answer tells that a cut is over.
            calm = [seat.node for seat in out if self._is_calm(self.sim.processes[seat.node], for_s)]
            require(not calm, "L7", f"{calm} live, and are left out: {new.cause}")

    def _planned(self, old: dict[str, Seat], new: Generation, lives: set[str]) -> None:
        """L6: a planned change changes something, when it may."""
        spec, asked = self.history.spec, self.history.handover
        assert spec is not None
        if asked is not None and asked.step:
            return  # Some have left after that step already: there is no way back, whatever has changed since.
        grown = sum(seat.workers for seat in old.values()) != new.world_size  # A replacement comes.
        waited = self.history.generations[-1].waits
        same = lives == {seat.incarnation for seat in old.values()} and not (grown or waited or new.waits)
        require(not same, "L6", f"generation {new.number} has the same members as the one before: {new.cause}")
        # In place those that stood by come in after the loss.
        lost = self.history.generations[-1].in_place
        allowed = new.kind != "join" or spec.spec.join != "failure" or waited or lost
        require(allowed, "L6", f"generation {new.number} lets nodes in without a failure: {new.cause}")

    def _is_well(self, seat: Seat, new: Generation) -> bool:
        """Whether this life is there, awake, reaches etcd, has not left and does not want to."""
        process = self.sim.processes[seat.node]
        if process.gone or process.paused or self.sim.unreachable(process) or process.told_at is not None:
            return False
        member, me = self.members.get(seat.node), process.me
        # A newcomer has no state to wait with.
        able = [worker for worker in process.group.workers if worker.whole or not new.waits]
        if new.in_place and not any(map(self._goes_on, able)):
            return False
        if me is None or me.record.draining or (member is not None and member[0].draining):
            return False
        return me.record.incarnation == seat.incarnation and me.attempt == new.attempt

    def _goes_on(self, worker: Worker) -> bool:
        """Whether a worker could take part in the next generation in place, and its agent knows."""
        return worker.healthy and self.sim.engine.now > worker.at_home_at + 1.0 + self.sim.slack

    def _l9_in_place(self, new: Generation, seats: dict[str, Seat]) -> None:
        """L9: who could go on in place gets a seat; all begin anew only if too few could, or none has the state.

        S18: no finished step is lost with them.
        """
        ready = {}
        for process in self.sim.processes.values():
            me = process.me
            if process.gone or me is None or not self._is_calm(process) or process.told_at is not None:
                continue
            member = self.members.get(process.name)
            if me.record.draining or member is None or member[0].incarnation != me.record.incarnation:
                continue
            here = [each for each in process.group.workers if each.generation == self.history.number()]
            ready[process.name] = sum(self._goes_on(each) for each in here)
        ready = {name: count for name, count in ready.items() if count}
        if not new.in_place:
            assert self.history.spec is not None
            least = self.history.spec.spec.min_nodes
            ended = [each for each in self.history.reported if each.generation == self.history.number()]
            closing = any(each.status in ("finishing", "ok") for each in ended)
            waited = self.sim.engine.now - self.sim.began > self.history.spec.spec.join_timeout_s
            # Workers that have set up and have no state yet can go on with somebody who has it, and not by themselves.
            having = any(each.whole for name in ready for each in self.sim.processes[name].group.workers)
            text = f"generation {new.number} starts all workers anew, and {ready} could go on: {new.cause}"
            require(closing or waited or len(ready) < least or not having, "S18", text)
            return
        groups = [self.sim.processes[name].group for name in seats]
        known = [each for group in groups for each in (*group.workers, *group.dead)]
        # What has died lately, or while etcd was away, may not have been told.
        now, slack = self.sim.engine.now, self.sim.slack
        lately = min(now - 2.0, self.sim.down_since if self.sim.down_until > now - slack else now) - slack
        having = [each for each in known if each.generation and each.whole and each.died_at > lately]
        # What an agent had that was started again meanwhile is not known any more; the transaction may arrive late.
        lives = {name: self.sim.processes[name].me for name in seats}
        former = [me for name, me in lives.items() if me is None or me.record.incarnation != seats[name].incarnation]
        text = f"generation {new.number} goes on in place, and nobody in it has the state"
        require(having or former, "S18", text)
        for name, count in ready.items():
            seat = seats.get(name)
            text = (
                f"generation {new.number} has {seat.workers if seat else 0} workers of {name}, of {count}: {new.cause}"
            )
            require(seat is None or seat.workers >= count, "L9", text)

    def _is_calm(self, process: Process, for_s: float = 0.0) -> bool:
        """Whether nothing has happened to it for long, and the publisher has been able to hear it for this time."""
        calm_s = 2 * self.sim.plan.spec.lease_ttl_s + self.sim.slack
        since = max(process.trouble_at, self.sim.trouble_at)
        publisher = self.writer[0] if self.writer is not None else process
        return self.sim.engine.now - since > calm_s and self.sim.linked(process, publisher, for_s)

    def _l4_majority(self, old: dict[str, Seat], new: Generation, out: list[Seat]) -> None:
        """L4: as `_fences`: a leader that cannot hear most of the others does not go on without them."""
        if self.writer is None or len(old) <= 2:
            return
        publisher, _, intent = self.writer
        unheard = [seat.node for seat in out if not self.sim.linked(publisher, self.sim.processes[seat.node])]
        text = f"{publisher.name} goes on without {unheard}, who live: {new.cause}"
        assert intent.view is not None, "a leader has a view"
        require(self._may_do_without(publisher, intent.view, unheard, old), "L4", text)

    # Workers.

    def after_event(self) -> None:
        """S16, L2: workers of a replaced generation end soon, on every node that can know; agents leave when told."""
        sim, current = self.sim, self.history.number()
        now = sim.engine.now
        for process in sim.processes.values():
            if process.gone:
                continue
            if process.paused:  # It hears nobody.
                process.awake_at = now
                self._named_at.pop((process.name, process.life), None)
            elif sim.unreachable(process):
                process.awake_at = now
                self._s16_told_by_peers(process, current)
            if now - process.awake_at < STOP_S:
                continue
            if process.told_at is not None:
                waited = now - max(process.told_at, process.awake_at)
                longest = sim.plan.leaves_within_s or STOP_TIMEOUT_S + sim.slack + sim.drain_s
                require(waited < longest, "L2", f"{process.name} was told to leave {waited:.0f} s ago")
            for group in process.group.living:
                if process.leaves_at is not None:
                    waited = now - max(process.leaves_at, process.awake_at)
                    text = f"{process.name} leaves, and its workers live on for {waited:.1f} s"
                    require(waited < STOP_TIMEOUT_S + sim.slack, "S16", text)
                elif 0 < group.generation < current and group.attempt == self.history.attempt():
                    since = max(self.history.superseded_at.get(group.generation, now), process.awake_at)
                    text = f"{process.name} runs generation {group.generation} {now - since:.1f} s into {current}"
                    require(now - since < STOP_S + sim.slack, "S16", text)

    def _s16_told_by_peers(self, process: Process, current: int) -> None:
        now, place = self.sim.engine.now, (process.name, process.life)
        old = [group for group in process.group.living if 0 < group.generation < current]
        told, known = False, process.agent.member.view.seats if old else {}
        for group in old:
            for node in self.history.seats.get(group.nonce, {}).keys() & known.keys():
                peer = self.sim.processes[node]
                awake = not (peer.gone or peer.paused or peer is process) and self.sim.linked(peer, process)
                awake = awake and peer.probe_port == known[node].probe_port  # Another process is asked elsewhere.
                me = peer.me
                told = told or (awake and me is not None and me.started_generation > group.generation)
        if not told:
            self._named_at.pop(place, None)
            return
        since = self._named_at.setdefault(place, now)
        text = f"{process.name} runs on, and for {now - since:.0f} s a peer could have told it of generation {current}"
        require(now - since < TOLD_S + self.sim.slack, "S16", text)
