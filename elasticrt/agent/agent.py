"""One node's agent, from its options to its exit code.

`agent.event_loop` is the loop, `rendezvous.member` decides. This file is what an agent with workers of its own adds:
`agent.supervisor` starts and stops them, `agent.membership` reaches the store, `agent.console` speaks to people.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elasticrt import events
from elasticrt.agent import health_state
from elasticrt.agent.console import Console
from elasticrt.agent.doing import doing
from elasticrt.agent.edges import Edges
from elasticrt.agent.event_loop import EventLoop, Side
from elasticrt.agent.health_server import HealthServer
from elasticrt.agent.joining import others_go_on
from elasticrt.agent.membership import CLOSE_S, Membership
from elasticrt.agent.network_interfaces import check_loopback
from elasticrt.agent.store_proxy import StoreRequest
from elasticrt.agent.supervisor import Supervisor
from elasticrt.errors import (
    EXIT_BUG,
    EXIT_CHECKPOINT,
    EXIT_OK,
    EXIT_TERMINATED,
    CheckpointError,
    DuplicateError,
    ElasticError,
    StoreError,
    explain,
)
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import Request, Step, Warm
from elasticrt.ipc.std_streams import tell
from elasticrt.liveness.probe import ProbeServer
from elasticrt.liveness.stacks import Stacks
from elasticrt.rendezvous.decision import Adopt, Decision, End, Go, Halt, Hold, Leave, Me, Publish, ReleaseHold, Wait
from elasticrt.rendezvous.member import Member
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.seats import seats_for
from elasticrt.rendezvous.view import View
from elasticrt.run_options import RunOptions
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.workers.fork_server import ParentLost
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerSaid, WorkerStarted

log = logging.getLogger(__name__)

KILLED_S = 5.0
"""SIGKILL takes milliseconds. A process that is stuck in the kernel may take for ever."""

END_GRACE_S = 5.0
ALONE_S = 5.0
"""Agents that are started together find each other within this time."""

AT_ONCE_S = 1.0
"""From a second signal to the end of the agent. Ending workers and deregistering takes milliseconds."""

TURN_S = 1.0
"""With a health port, an idle loop goes round this often to show that it can."""


@dataclass(frozen=True)
class Positions:
    """Where the workers of other nodes are in a generation, by their agents' answers; `nodes`: all addresses."""

    generation: int
    nodes: Mapping[str, str]
    by_node: Mapping[str, Mapping[str, object]]


class Agent(Side):
    """An agent, from `run` to its exit code. Its loop knows it as a `Side`.

    Args:
        settings: its own options.
        spec: what it must agree on with the other nodes of the run.
        edges: clock, network, processes and files; None: this machine's.
    """

    def __init__(self, settings: Settings, spec: RunSpec, edges: Edges | None = None) -> None:
        edges = edges or Edges()
        self.settings = settings
        self.console = Console(settings, edges)
        self.edges = edges
        self.clock = edges.clock
        self.loop = EventLoop(settings.run_id, self, edges)
        self.queue = self.loop.queue
        self.node: Supervisor = edges.supervisor(
            settings, self.queue.put, self.console.events, self.console.warn, edges
        )
        self.membership: Membership
        self.probes: ProbeServer | None = None
        self.health: HealthServer | None = None
        self.spec = spec
        self.drain_until: float | None = None
        self.late = False  # Whether it leaves because it could not hand over in time.
        self.alone_at: float | None = None
        self.hurry = False
        self.away_since: float | None = None  # Since when etcd has not answered, as far as that was written.
        self.saved: Commit | None = None  # The newest checkpoint that this node has committed.
        self.last_signal = signal.SIGTERM
        # Signals so far: the one is written by their handler, the other by what it interrupts.
        self._signals = self._heeded = 0
        self._decision: Decision = Wait("not decided yet")

    def run(self) -> int:
        """Take part in the run until it ends, or until a signal tells this agent to leave. Returns the exit code."""
        check_loopback()
        for number in self.settings.options.signals:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # As under nohup.
                signal.signal(number, self._told)
        code = EXIT_BUG
        self.loop.watch_threads()
        try:
            self.node.open()  # Importing torch takes longest, so it begins first.
            self.console.open_last_line()
            for note in self.settings.options.notes:
                self.console.warn(note)
            self._answer_for_health()
            code = self.work()
        except ElasticError as error:
            code = error.exit_code
            raise
        finally:
            self.node.close()
            if self.health is not None:
                self.health.close()
            self.console.stopped(code)
            self.loop.unwatch_threads()
            # Python restores the default handlers before it exits, and SIGALRM's default is to kill.
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        return code

    def tell_to_leave(self, number: int) -> None:
        """Queue a signal."""
        self.queue.put(signal.Signals(number))
        self._signals += 1

    def _told(self, number: int, _frame: object) -> None:
        """Signal handler. The second signal sets an alarm, so that the agent ends even where etcd does not answer."""
        self.tell_to_leave(number)
        self.node.told_to_leave()  # At once: the loop may be waiting for etcd.
        # The user may have given SIGALRM the meaning of another signal by --signals. Then there is no alarm.
        if self._signals == 2 and signal.SIGALRM not in self.settings.options.signals:
            signal.signal(signal.SIGALRM, self._end_at_once)
            signal.setitimer(signal.ITIMER_REAL, AT_ONCE_S)

    def _end_at_once(self, _number: int, _frame: object) -> None:
        """End as if killed: the workers get their death signal, and the other nodes miss this one's lease."""
        self.console.close_last_line()
        tell("elasticrt: ended at once: the other nodes, if any, find out by themselves\n")
        os._exit(EXIT_TERMINATED)

    def work(self) -> int:
        """Join, take part, end; the exit code."""
        self.membership = Membership(
            self.settings, self.queue, self.edges, told_to_leave=lambda: self._signals > self._heeded
        )
        try:
            return self._end(self.loop.take_part()) if self._join() else EXIT_OK
        finally:
            if self.probes is not None:
                self.probes.close()
            self.loop.prober.close()
            self.membership.close()

    @property
    def member(self) -> Member:
        """This agent's member of the run. Not set before it begins to join."""
        return self.loop.member

    # The loop's `Side`.

    def do_what_is_due(self, now: float) -> None:
        """See `Side`."""
        member, view, node = self.member, self.member.view, self.member.me.record.node
        self._attend()
        elsewhere = [other for other in view.ended if other != node]
        self.node.do_what_is_due(now, elsewhere, leaves=member.me.record.draining, unagreed=self._unagreed)
        self._ask_for_positions(now)
        if self.drain_until is not None and now >= self.drain_until:
            self.drain_until = None
            self.late = True
            late = f"not handed over within {self.settings.options.drain_timeout_s:g} s"
            member.me = replace(member.me, leaving=late)
        if self.alone_at is not None and now >= self.alone_at:
            self.alone_at = None
            if view.leads and len(view.members) == 1:
                self.console.warn(self.settings.alone)
        self.console.generation(view, member.me, self.node.stands_by)
        if self.console.narrates:
            at = doing(member.me, view, self._decision, workers=self.node.doing(), drain_until=self.drain_until)
            self.console.tick(now, at, self.node.progress.step(), view.head)

    @property
    def _unagreed(self) -> str:
        """Why nothing can be agreed now, as far as this node has noticed; "": it can."""
        if self.member.outage.problem:
            return "etcd does not answer"
        return "etcd takes no writes" if self.member.outage.refused_since is not None else ""

    def _ask_for_positions(self, now: float) -> None:
        """Ask other nodes where their workers are, when it is time; the answers arrive as `Positions`."""
        generation = self.node.asks_for_positions(now)
        if generation:
            view = self.member.view
            nodes = {seat.node: seat.address for seat in view.order()}
            self.loop.prober.ask_for_workers(
                whom_to_ask(view, first=self.node.is_first),
                lambda found: self.queue.put(Positions(generation, nodes, found)),
                view.witnesses,
            )

    def _attend(self) -> None:
        """Where workers go on in place, let the workers that this node lacks set up beside them."""
        me, view = self.member.me, self.member.view
        if view.generation is None or not view.roster_known or me.leaving or me.record.draining:
            return
        seat = view.seat_of(me.record)
        seated = seat is None or me.started >= view.number  # Otherwise its workers are about to get their seats.
        if seated and others_go_on(view, me.record.node):
            generation = view.generation.record
            self.node.attend(generation, generation.nodes if seat is None else seat.index)

    def describe(self, me: Me, now: float) -> Me:
        """See `Side`. The leader's key tells what only it sees: that workers go on in place, until a generation says
        so, and where some have ended."""
        view = self.member.view
        tells = view.leads and view.generation is not None and not view.generation.record.in_place
        goes_on = view.number if tells and others_go_on(view, me.record.node) else 0
        ended = view.ended[:2] if view.leads else ()
        if (goes_on, ended) != (me.record.goes_on, me.record.ended):
            me = replace(me, record=me.record.model_copy(update={"goes_on": goes_on, "ended": ended}))
        return self.node.describe(me, now)

    def decided(self, decision: Decision) -> None:
        """See `Side`. Notes what the health port answers from now on."""
        self._decision = decision
        self._note_etcd()
        if isinstance(decision, Adopt):
            self.console.events.write(events.Resized(decision.spec.min_nodes, decision.spec.max_nodes))
        if self.health is None:
            return
        member, now = self.member, self.clock.monotonic()
        self.health.noted = health_state.member(
            member.me,
            member.view,
            member.outage,
            now,
            story=self.console.story,
            told_at=now + self.console.zero,
            step=self.node.progress.step(),
            answer_s=self.loop.session.answer_s,
        )

    def _note_etcd(self, *, fresh: bool = False) -> None:
        """Write that etcd does not answer, or does again; `fresh`: another one, in place of one that has died."""
        outage = self.member.outage
        if not fresh and (self.away_since is not None) == bool(outage.problem):
            return
        since, problem, now = self.away_since or outage.since, "" if fresh else outage.problem, self.clock.monotonic()
        etcd = ",".join(map(str, self.membership.meeting.endpoints)) if fresh else ""
        self.console.events.write(events.EtcdAway(round(now - since, 1) if since else 0.0, problem, fresh, etcd))
        self.away_since = since if problem else None

    def alarms(self, now: float) -> Iterable[float]:
        """See `Side`."""
        alarms = [self.drain_until, self.alone_at, *self.node.alarms(), *self.console.alarms(now)]
        if self.health is not None:
            alarms.append(self.health.noted.turned_at + TURN_S)
        return [at for at in alarms if at is not None]

    def run_generation(self, generation: Generation, seat: Seat) -> None:
        """See `Side`."""
        if self.settings.options.fresh and not self.member.me.started and generation.resume is not None:
            self.console.left_out_fresh(generation.resume.reached)
        self.node.run(generation, seat, tuple(seat.node for seat in self.member.view.order()))

    def hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        """See `Side`."""
        match decision:
            case Hold(_, handover):
                self.node.hold(handover)
            case Go(_, step, save):
                self.node.go(step, save=save)
            case ReleaseHold():
                self.node.release()

    def handle(self, event: Any) -> None:
        """See `Side`."""
        match event:
            case signal.Signals():
                self._heeded += 1
                self._signalled(event)
            case WorkerSaid(message=message) if isinstance(message, Request):
                self._ask_store(event)
            case Commit():
                self.saved, took_s = event, round(self.node.saving_s(), 3)
                self.console.committed(events.Committed(event.reached, event.generation, event.size, took_s))
            case Warm() | ParentLost() | WorkerStarted() | WorkerSaid() | WorkerEnded() | GroupEnded():
                self.node.fold(event)
                if isinstance(event, WorkerSaid) and isinstance(event.message, Step):
                    self.console.heard(event.generation, event.rank, event.message)
                if self.node.misfit is not None and not self._leaves:
                    self._begin_to_leave("the script of this node is not the run's")
            case Stacks():
                self.node.stalled(event)
            case Positions(generation, nodes, by_node):
                self.node.blame(generation, nodes, by_node)

    # Joining.

    def _answer_for_health(self) -> None:
        if self.settings.options.health is None:
            return
        limit_s = self.settings.etcd_wait_s + self.spec.join_timeout_s + health_state.LIVE_S
        noted = health_state.HealthState(
            self.settings.run_id, self.settings.node, "joining", self.clock.monotonic(), limit_s
        )
        self.health = HealthServer(*self.settings.options.health, noted)
        self.console.events.follow(self.health.tell)
        self.console.say(f"health: {self.health.url}/live, /ready and /metrics")

    def _join(self) -> bool:
        """Become a member, and print how others join. False if the run has succeeded already."""
        settings, address = self.settings, self.membership.meeting.address
        self.probes = self.edges.probe_server(
            self.loop.prober,
            address,
            settings.run_id,
            lambda: (self.member.me.record.incarnation, self.member.me.started),
            self._known,
            lambda: self.node.hangs.search.said,
        )
        self.node.seating.ports.bind(address)
        record = MemberRecord(
            node=settings.node,
            incarnation=self.edges.token(),
            address=address,
            pid=os.getpid(),
            workers=settings.workers,
            probe_port=self.probes.port,
            port=self.node.seating.ports.port,
            drain_s=settings.options.drain_timeout_s,
            node_rank=settings.options.node_rank,
        )
        self.loop.member = Member(
            Me(record=record, spec=self.spec),
            settings.run_id,
            token=self.edges.token,
            say=self.console.warn,
            note=log.warning,
            seats_per_chunk=self.edges.seats_per_chunk,
        )
        self.probes.start()
        result = self.membership.open(self.member)
        if result is not None:
            self.console.nothing_to_do(result)
            return False
        self.loop.begin(self.member, self.membership.driver, self.membership.session)
        self.console.joined(self.member.me, self.membership.meeting)
        if self.health is not None:
            self.console.events.write(events.Health(url=self.health.url))
        if settings.alone:
            self.alone_at = self.clock.monotonic() + ALONE_S
        return True

    def _known(self) -> Iterable[Seat]:
        """The seats of its generation that this agent knows; the leader's it knows by its key. From any thread."""
        if not self.member.me.started:
            return ()
        view = self.member.view
        leader = view.members.get(view.oldest or "")
        return (*view.seats.values(), *seats_for([leader] if leader is not None else []))

    def left_out(self, reason: str) -> bool:
        """See `Side`. Kills the workers and waits for their end: they must do nothing after the new registration."""
        self.node.kill()
        deadline = self.clock.monotonic() + KILLED_S
        while not self.node.are_gone() and (left := deadline - self.clock.monotonic()) > 0:
            try:
                self.loop.handle(self.queue.get(timeout=left))
            except queue.Empty:
                log.warning("workers that were killed are still there after %g s", KILLED_S)
        self.console.warn(f"this node comes back as a new member: {reason}")
        return True

    # The store.

    def revive_store(self) -> None:
        """See `Side`. The embedded etcd is not durable: the run goes on from the newest checkpoint on disk.

        It also ends with the run, of which an agent that was stopped by a signal hears too late.
        """
        if not self.membership.embedded_died():
            return
        ended = self.membership.how_it_ended(self.member)
        if ended is not None:
            self.console.warn("this machine's etcd has ended with the run, as the logs of other nodes tell")
            self.member.has_ended(ended)
            return
        self.console.warn(
            "this machine's etcd has died; starting a fresh one, workers start again from the newest checkpoint"
        )
        self.node.kill()
        self.membership.open_fresh(self.member)
        self._note_etcd(fresh=True)
        self.loop.begin(self.member, self.membership.driver, self.membership.session)

    def published(self, decision: Publish, before: View) -> None:
        """See `Side`."""
        self.console.published(decision, before)

    def _ask_store(self, said: WorkerSaid) -> None:
        member, request = self.member, said.message
        view, me = member.view, member.me
        assert isinstance(request, Request)
        # A worker that sets up beside the training prepares data for the generation that goes on.
        number = said.generation or view.number
        # The transaction compares the record of the worker's own generation. It is not sent when another is current.
        current = view.generation is not None and view.number == number
        self.membership.proxy.send(
            StoreRequest(
                request=request,
                generation=number,
                record=view.generation.value if view.generation and current else None,
                attempt=me.attempt,
                node=me.record.node,
                incarnation=me.record.incarnation,
                lease=member.lease_id,
                answer=said.answer,
            )
        )

    # Leaving.

    def _end(self, decision: End | Leave | Halt) -> int:
        if self.health is not None:
            noted, limit_s = self.health.noted, self.settings.stop_timeout_s + health_state.LIVE_S
            self.health.noted = replace(noted, phase="ending", turned_at=self.clock.monotonic(), limit_s=limit_s)
        match decision:
            case End(result=result):
                self.node.finish(END_GRACE_S, well=result.status == "succeeded")
                self.console.ended(result, leads=self.member.view.leads)
                self.membership.leave(self.member)
                return result.code
            case Leave():
                self.console.close_last_line()
                self.console.events.write(events.Leaves(decision.reason))
                self.console.say(f"leaving: {decision.reason}", "leaving")
                reached, away = self.node.progress.reached, self.member.outage.since is not None
                unagreed = away or self.member.me.record.draining
                if unagreed and not decision.saving and not decision.others_go_on:
                    # Nobody goes on, and what was to be saved was not agreed on in time.
                    decision = replace(decision, saving=reached)
                self.node.progress.remember()
                self.node.progress.tell()  # `stop` looks at the last step when the key is gone.
                self.membership.leave(self.member, seat_too=True)
                # A signal that was added by --signals means something to the script, so it gets that signal.
                passed_on = self.last_signal if self.last_signal not in RunOptions.signals else signal.SIGTERM
                saves = decision.saving > 0 and self.node.is_first
                self.node.stop(self.settings.stop_timeout_s, self._impatient, passed_on)
                self.membership.proxy.close(CLOSE_S)
                self._impatient()  # A commit that was under way is to be known below.
                late_after = reached if self.late or away else 0
                asks = saves or late_after or self.console.narrates
                head, known = self._newest() if asks else (None, False)
                lost = known and saves and (head is None or head.reached < decision.saving)
                if self.node.misfit is None or decision.saving:
                    self.console.left(decision, head, lost=lost, late_after=late_after, known=known or away)
                if self.node.misfit is not None:
                    raise CheckpointError(self.node.misfit.summary)
                return EXIT_CHECKPOINT if lost else EXIT_TERMINATED
            case Halt():
                self.node.kill()
                self.membership.leave(self.member)
                raise halted(decision, self.settings.run_id)

    def _signalled(self, number: signal.Signals) -> None:
        """Begin to leave: by a handover if the workers can, within a time limit. A second signal ends the wait."""
        self.last_signal = number
        self.hurry = self.hurry or self._leaves
        self._begin_to_leave(f"{number.name} received")

    @property
    def _leaves(self) -> bool:
        """Whether this node is on its way out."""
        return self.member.me.record.draining or bool(self.member.me.leaving)

    def _begin_to_leave(self, reason: str) -> None:
        """Leave by a handover, or at once if that is under way already. It waits for etcd, as long as it may take."""
        member = self.member
        if self._leaves:
            member.me = replace(member.me, leaving=member.me.leaving or reason)
        else:
            self.drain(reason)

    def drain(self, reason: str) -> None:
        """See `Side`. Workers that cannot hand over are ended at once, but where this node has copies of the state."""
        if not (self.node.progress.can_hand_over() or self.node.seating.memory.newest):
            self.member.me = replace(self.member.me, leaving=reason)
            return
        self.console.say(f"{reason}: handing over; a second signal ends this node at once")
        self.drain_until = self.clock.monotonic() + self.settings.options.drain_timeout_s
        self.member.drain()

    def _newest(self) -> tuple[Commit | None, bool]:
        """The newest committed checkpoint, if there is one, and whether that is known: etcd may not answer.

        One that this node has committed or heard of is on its disk, also when etcd has forgotten it. One alone in its
        generation knows all of them, as that names the newest one before it.
        """
        heard, found, answered = self.member.view, None, self.member.outage.since is None
        generation = heard.generation.record if heard.generation is not None else None
        alone, before = generation is not None and generation.nodes == 1, generation.resume if generation else None
        try:
            found = self.membership.driver.run(self.member.newest_head()) if answered else None
        except StoreError as error:
            log.warning("what is saved is not known: %s", error)
            answered = False
        head = heard.head.record if heard.head else None
        known = [each for each in (found, self.saved, head, before) if each is not None]
        return max(known, key=lambda each: each.reached, default=None), answered or alone

    def _impatient(self) -> bool:
        """Fold the ends of workers, what they ask, and have saved. Returns whether a second signal has come."""
        while not self.queue.empty():
            event = self.queue.get_nowait()
            self.hurry = self.hurry or isinstance(event, signal.Signals)
            asks = isinstance(event, WorkerSaid) and isinstance(event.message, Request)
            if asks or isinstance(event, WorkerEnded | GroupEnded | Commit):
                self.handle(event)
        return self.hurry


def whom_to_ask(view: View, *, first: bool) -> list[Seat]:
    """The agents to ask where workers are: by that of rank 0, the `first`, all others, for their workers' positions; by
    each of them that one, for what it has found out.

    A member of a large run knows only some seats. Without that of rank 0 it asks the leader, which knows all of them
    and passes on what it has heard.
    """
    others = [seat for seat in view.order() if seat.node != view.node]
    if first:
        return others
    leader = view.members.get(view.oldest or "")
    known = [seat for seat in others if seat.index == 0]
    return known or list(seats_for([leader] if leader is not None else []))


def halted(decision: Halt, run_id: str) -> ElasticError:
    """The error that an agent of the run `run_id` ends with because of its `decision`."""
    if decision.code == DuplicateError.exit_code:
        kind: type[ElasticError] = DuplicateError
        remedy = "Start this node again with the run's options"
    else:
        kind = StoreError
        remedy = "The checkpoints are intact: check etcd, then submit the run again with the same --run-id"
    return kind(explain("this node cannot go on", f"run {run_id}", got=decision.reason, remedy=remedy))
