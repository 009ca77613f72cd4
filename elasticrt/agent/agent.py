"""Runs one node's agent, from its options to its exit code.

`agent.event_loop` has the loop, and `rendezvous.member` decides. This file adds what an agent with workers of its own
needs: signals, the health port, joining and leaving. `agent.supervisor` starts and stops the workers,
`agent.membership` reaches etcd, and `agent.console` prints and writes events.
"""

from __future__ import annotations

import logging
import math
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
from elasticrt.agent.event_loop import EventLoop, WorkerSide
from elasticrt.agent.health_server import HealthServer
from elasticrt.agent.joining import others_go_on
from elasticrt.agent.membership import CLOSE_S, Membership
from elasticrt.agent.network_interfaces import check_loopback
from elasticrt.agent.store_proxy import BuilderEnded, StoreRequest
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
from elasticrt.ipc.messages import Request, Step
from elasticrt.ipc.std_streams import tell
from elasticrt.liveness.probe import ProbeServer
from elasticrt.rendezvous.decision import (
    AdoptSpec,
    Decision,
    End,
    Go,
    Halt,
    Hold,
    Leave,
    Me,
    Publish,
    ReleaseHold,
    Wait,
)
from elasticrt.rendezvous.member import Member
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.seats import seats_for
from elasticrt.rendezvous.view import View
from elasticrt.run_options import RunOptions
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerMessage

log = logging.getLogger(__name__)

KILLED_S = 5.0
"""How long the agent waits for killed workers. SIGKILL takes milliseconds, but a process that is stuck in the kernel
may never end."""

END_GRACE_S = 5.0
"""How long workers may take to end after the run's result is known."""

ALONE_S = 5.0
"""An agent warns that it is alone after this time. Agents that are started together find each other sooner."""

ECHO_S = 0.5
"""Signals that follow the one before within this time are no second signal. `timeout` and other wrappers signal their
child and then its whole process group, and some schedulers do so as well."""

AT_ONCE_S = 1.0
"""From a second signal to the end of the agent. Ending workers and deregistering takes milliseconds."""

TURN_S = 1.0
"""With a health port, an idle loop goes round at this interval, to show that the loop is not stuck."""


@dataclass(frozen=True)
class Positions:
    """The answers of other agents about the positions of their workers.

    Attributes:
        generation: the generation in which the question was asked.
        nodes: the addresses of its nodes, by name.
        by_node: the answers, by node.
    """

    generation: int
    nodes: Mapping[str, str]
    by_node: Mapping[str, Mapping[str, object]]


class Agent(WorkerSide):
    """One node's agent: `run` lasts until the agent's exit code. To its event loop the agent is a `WorkerSide`.

    Args:
        settings: this node's own options.
        spec: the options on which all nodes of the run must agree.
        edges: clock, network, processes and files; None: those of this machine.
    """

    def __init__(self, settings: Settings, spec: RunSpec, edges: Edges | None = None) -> None:
        edges = edges or Edges()
        self.settings = settings
        self.console = Console(settings, edges)
        self.edges = edges
        self.clock = edges.clock
        self.loop = EventLoop(settings.run_id, self, edges)
        self.queue = self.loop.queue
        self.supervisor: Supervisor = edges.supervisor(
            settings, self.queue.put, self.console.events, self.console.warn, edges
        )
        self.membership: Membership
        self.probes: ProbeServer | None = None
        self.health: HealthServer | None = None
        self.spec = spec
        # Until when this node waits for its handover before it leaves without one; None while it is not draining.
        self.drain_until: float | None = None
        # Whether this node leaves because it could not hand over in time.
        self.drain_timed_out = False
        # When to warn if no other node has come; None: never.
        self.alone_at: float | None = None
        # Since when etcd has not answered, as far as an event has told it; None while etcd answers.
        self.away_since: float | None = None
        # The newest checkpoint that this node has committed.
        self.last_commit: Commit | None = None
        self.last_signal = signal.SIGTERM
        # The signals that have come, and those that the loop has handled. Only the signal handler writes the first
        # count, and only the loop the second: a count that both wrote could lose a signal.
        self._signals = self._signals_done = 0
        # When the newest of them came.
        self._signalled_at = -math.inf
        self._decision: Decision = Wait("not decided yet")

    def run(self) -> int:
        """Take part in the run until it ends, or until a signal tells this agent to leave. Returns the exit code.

        Raises ElasticError, with the exit code in it, when the agent cannot join or cannot go on.
        """
        check_loopback()
        for number in self.settings.options.signals:
            # Under nohup SIGHUP is ignored, and has to stay so.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        code = EXIT_BUG
        self.loop.watch_threads()
        try:
            # Importing torch takes longest, so the worker parent starts first.
            self.supervisor.open()
            self.console.open_last_line()
            for note in self.settings.options.notes:
                self.console.warn(note)
            self._answer_for_health()
            code = self.join_and_run()
        except ElasticError as error:
            code = error.exit_code
            raise
        finally:
            self.supervisor.close()
            if self.health is not None:
                self.health.close()
            self.console.stopped(code)
            self.loop.unwatch_threads()
            # Python restores the default signal handlers before it exits. An alarm that is still set, or one more
            # signal, would then end the process, and replace the exit code.
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number in self.settings.options.signals if self._signals else ():
                signal.signal(number, signal.SIG_IGN)
        return code

    def tell_to_leave(self, number: int) -> None:
        """Tell this agent to leave, as the signal `number` does. A signal handler may call this."""
        # A SimpleQueue's `put` is reentrant: the signal may have interrupted another `put`.
        self.queue.put(signal.Signals(number))
        self._signals += 1

    def _on_signal(self, number: int, _frame: object) -> None:
        """Handle a signal. The second one sets an alarm, so that the agent ends even if etcd does not answer."""
        now = self.clock.monotonic()
        if now - self._signalled_at < ECHO_S:
            return
        self._signalled_at = now
        self.tell_to_leave(number)
        # Not left to the loop, which may be waiting for etcd: some schedulers send the same signal to the workers.
        self.supervisor.told_to_leave()
        # With --signals the user may have made SIGALRM a signal to leave. Then there is no alarm.
        if self._signals == 2 and signal.SIGALRM not in self.settings.options.signals:
            signal.signal(signal.SIGALRM, self._end_at_once)
            signal.setitimer(signal.ITIMER_REAL, AT_ONCE_S)

    def _end_at_once(self, _number: int, _frame: object) -> None:
        """End as if killed. The worker parent ends the workers, and the other nodes notice that the lease has ended."""
        self.console.close_last_line()
        tell("elasticrt: ended at once, without a handover: other nodes notice it by themselves\n")
        os._exit(EXIT_TERMINATED)

    def join_and_run(self) -> int:
        """Join the run, take part in it, and leave it. Returns the exit code."""
        self.membership = Membership(
            self.settings, self.queue, self.edges, told_to_leave=lambda: self._signals > self._signals_done
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
        """This agent's member of the run. Not set before the agent begins to join."""
        return self.loop.member

    # The loop's `WorkerSide`.

    def do_what_is_due(self, now: float) -> None:
        """See `WorkerSide`."""
        member, view, node = self.member, self.member.view, self.member.me.record.node
        self._set_up_beside()
        elsewhere = [other for other in view.ended_nodes if other != node]
        unagreed = ""
        if member.outage.problem or member.outage.refused_since is not None:
            unagreed = "etcd does not answer" if member.outage.problem else "etcd takes no writes"
        self.supervisor.do_what_is_due(now, elsewhere, leaves=member.me.record.draining, unagreed=unagreed)
        self._ask_for_positions(now)
        if self.drain_until is not None and now >= self.drain_until:
            self.drain_until = None
            self.drain_timed_out = True
            late = f"not handed over within {self.settings.options.drain_timeout_s:g} s"
            if unagreed:
                late += f", as {unagreed}"
            elif member.me.saves:
                late += ", as a save takes longer: allow for it by --drain-timeout"
            member.me = replace(member.me, leave_reason=late)
        if self.alone_at is not None and now >= self.alone_at:
            self.alone_at = None
            if view.is_leader and len(view.members) == 1:
                self.console.warn(self.settings.alone)
        self.console.announce_standby(view, member.me, self.supervisor.stands_by)
        if self.console.narrates:
            at = doing(member.me, view, self._decision, workers=self.supervisor.doing(), drain_until=self.drain_until)
            self.console.tick(now, at, self.supervisor.progress.step(), view.head)

    def _ask_for_positions(self, now: float) -> None:
        """Ask other agents for their workers' positions, if it is time. Their answers arrive as one `Positions`."""
        generation = self.supervisor.hangs.search.asks_for_positions(now)
        if generation:
            view = self.member.view
            nodes = {seat.node: seat.address for seat in view.seats_in_rank_order()}
            self.loop.prober.ask_for_workers(
                whom_to_ask(view, first=self.supervisor.is_first),
                lambda found: self.queue.put(Positions(generation, nodes, found)),
                view.witnesses,
            )

    def _set_up_beside(self) -> None:
        """Let the workers that this node lacks set up beside a generation whose workers go on in place."""
        me, view = self.member.me, self.member.view
        if view.generation is None or not view.roster_known or me.leave_reason or me.record.draining:
            return
        seat = view.seat_of(me.record)
        # A node that has a seat and has not started the generation is about to seat its workers. None is missing yet.
        seated = seat is None or me.started_generation >= view.generation_number
        if seated and others_go_on(view, me.record.node):
            generation = view.generation.record
            self.supervisor.set_up_beside(generation, generation.nodes if seat is None else seat.index)

    def describe(self, me: Me, now: float) -> Me:
        """See `WorkerSide`.

        The leader's member key also tells what only the leader sees: on which nodes workers have ended.
        """
        view = self.member.view
        ended = view.ended_nodes[:2] if view.is_leader else ()
        if ended != me.record.ended:
            me = replace(me, record=me.record.model_copy(update={"ended": ended}))
        return self.supervisor.describe(me, now)

    def decided(self, decision: Decision) -> None:
        """See `WorkerSide`. Renews the state from which the health port answers."""
        self._decision = decision
        self._note_etcd()
        if isinstance(decision, AdoptSpec):
            self.console.events.write(events.Resized(decision.spec.min_nodes, decision.spec.max_nodes))
        if self.health is None:
            return
        member, now = self.member, self.clock.monotonic()
        self.health.state = health_state.member(
            member.me,
            member.view,
            member.outage,
            now,
            story=self.console.story,
            told_at=now + self.console.clock_offset_s,
            step=self.supervisor.progress.step(),
            answer_s=self.loop.session.answer_s,
        )

    def _note_etcd(self, *, fresh: bool = False) -> None:
        """Write an event when etcd stops answering, and when it answers again.

        `fresh`: a fresh embedded etcd has taken the place of one that has died.
        """
        outage = self.member.outage
        if not fresh and (self.away_since is not None) == bool(outage.problem):
            return
        since, problem, now = self.away_since or outage.since, "" if fresh else outage.problem, self.clock.monotonic()
        etcd = ",".join(map(str, self.membership.open_store.endpoints)) if fresh else ""
        self.console.events.write(events.EtcdAway(round(now - since, 1) if since else 0.0, problem, fresh, etcd))
        self.away_since = since if problem else None

    def alarms(self, now: float) -> Iterable[float | None]:
        """See `WorkerSide`."""
        turn_at = self.health.state.turned_at + TURN_S if self.health is not None else None
        return [turn_at, self.drain_until, self.alone_at, *self.supervisor.alarms(), *self.console.alarms(now)]

    def run_generation(self, generation: Generation, seat: Seat) -> None:
        """See `WorkerSide`."""
        if self.settings.options.fresh and not self.member.me.started_generation and generation.resume is not None:
            self.console.fresh_ignored(generation.resume.reached)
        self.supervisor.run(generation, seat, tuple(seat.node for seat in self.member.view.seats_in_rank_order()))

    def hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        """See `WorkerSide`."""
        self.supervisor.hand_over(decision)

    def handle(self, event: Any) -> None:
        """See `WorkerSide`."""
        match event:
            case signal.Signals():
                self._signals_done += 1
                self._leave_on_signal(event)
            case WorkerMessage(message=message) if isinstance(message, Request):
                self.membership.proxy.send(self._store_request(event, message))
            case Commit():
                self.last_commit, took_s = event, round(self.supervisor.saving_s(), 3)
                self.console.committed(events.Committed(event.reached, event.generation, event.size, took_s))
            case Positions(generation, nodes, by_node):
                self.supervisor.hangs.search.note_answers(self.clock.monotonic(), generation, nodes, by_node)
            case _:
                self.supervisor.fold(event)
                if isinstance(event, WorkerEnded):
                    self.membership.proxy.worker_ended(self._store_request(event, BuilderEnded()))
                if isinstance(event, WorkerMessage) and isinstance(event.message, Step):
                    self.console.note_step(event.generation, event.rank, event.message)
                if self.supervisor.misfit is not None and not self._is_leaving:
                    self.drain("the script of this node is not the run's")

    # Joining.

    def _answer_for_health(self) -> None:
        """Open the health port, if the user has asked for one."""
        if self.settings.options.health is None:
            return
        # While the agent joins, its loop does not go round yet. It may wait for etcd, then for its turn to register.
        limit_s = self.settings.etcd_wait_s + self.spec.join_timeout_s + health_state.LIVE_S
        state = health_state.HealthState(
            self.settings.run_id, self.settings.node, "joining", self.clock.monotonic(), limit_s
        )
        self.health = HealthServer(*self.settings.options.health, state)
        self.console.events.follow(self.health.fold)
        self.console.say(f"health: {self.health.url}/live, /ready and /metrics")

    def _join(self) -> bool:
        """Become a member, and print how other nodes join. Returns False if the run has succeeded before.

        Raises ConfigError, DuplicateError, StoreError.
        """
        settings, address = self.settings, self.membership.open_store.address
        self.probes = self.edges.probe_server(
            self.loop.prober,
            address,
            settings.run_id,
            lambda: (self.member.me.record.incarnation, self.member.me.started_generation),
            self._known_seats,
            lambda: self.supervisor.hangs.search.answer,
        )
        # Bound before ranks are agreed on: the member key announces the port, which rank 0's store will use.
        self.supervisor.seating.ports.bind(address)
        record = MemberRecord(
            node=settings.node,
            incarnation=self.edges.token(),
            address=address,
            pid=os.getpid(),
            workers=settings.workers,
            probe_port=self.probes.port,
            port=self.supervisor.seating.ports.port,
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
        # Probes are answered before the member key exists, because others may probe as soon as they see the key.
        self.probes.start()
        result = self.membership.open(self.member)
        if result is not None:
            self.console.nothing_to_do(result)
            return False
        self.loop.begin(self.member, self.membership.driver, self.membership.session)
        self.console.joined(self.member.me, self.membership.open_store, self.member.replica.store_id)
        if self.health is not None:
            self.console.events.write(events.Health(url=self.health.url))
        if settings.alone:
            self.alone_at = self.clock.monotonic() + ALONE_S
        return True

    def _known_seats(self) -> Iterable[Seat]:
        """The seats of the present generation that this agent knows. Any thread may call this.

        In a large run an agent reads only its own chunk of the roster, but it knows the leader's address by its key.
        """
        if not self.member.me.started_generation:
            return ()
        view = self.member.view
        leader = view.members.get(view.leader_node or "")
        return (*view.seats.values(), *seats_for([leader] if leader is not None else []))

    def end_before_rejoin(self, reason: str) -> bool:
        """See `WorkerSide`. Kills the workers, and waits up to KILLED_S for their end.

        A worker of the old incarnation must do nothing after the new one has registered.
        """
        self.supervisor.kill()
        deadline = self.clock.monotonic() + KILLED_S
        while not self.supervisor.are_gone() and (left := deadline - self.clock.monotonic()) > 0:
            try:
                self.loop.handle(self.queue.get(timeout=left))
            except queue.Empty:
                log.warning("workers that were killed are still there after %g s", KILLED_S)
        self.console.warn(f"this node comes back as a new member: {reason}")
        return True

    # The store.

    def revive_store(self) -> None:
        """See `WorkerSide`.

        An embedded etcd is not durable. When it dies, the run goes on from the newest checkpoint on disk. The embedded
        etcd also ends with the run: an agent that was stopped by a signal meanwhile finds it gone, and reads the run's
        result from the logs of other nodes.
        """
        has_died, why = self.membership.embedded_died()
        if not has_died:
            return
        ended = self.membership.how_it_ended(self.member)
        if ended is not None:
            self.console.warn("this machine's etcd has ended with the run; the logs of other nodes have its result")
            self.member.note_result(ended)
            return
        died = f"this machine's etcd has died{f' ({why})' if why else ''}"
        self.console.warn(f"{died}: starting a new one, and all workers again from the newest checkpoint")
        self.supervisor.kill()
        self.membership.open_fresh(self.member)
        self._note_etcd(fresh=True)
        self.loop.begin(self.member, self.membership.driver, self.membership.session)

    def published(self, decision: Publish, before: View) -> None:
        """See `WorkerSide`."""
        self.console.published(decision, before)

    def _store_request(self, said: WorkerMessage | WorkerEnded, request: Request | BuilderEnded) -> StoreRequest:
        """A worker's request, with the record of the worker's generation as its fence."""
        member, answer = self.member, said.answer if isinstance(said, WorkerMessage) else lambda _: None
        view, me = member.view, member.me
        # A worker that sets up beside the training says generation 0. It prepares data for the present generation.
        number = said.generation or view.generation_number
        # The transaction compares the record of the worker's own generation. Without that record it is not sent,
        # because a newer generation has replaced the worker's.
        current = view.generation is not None and view.generation_number == number
        return StoreRequest(
            request=request,
            generation=number,
            record=view.generation.value if view.generation and current else None,
            attempt=me.attempt,
            node=me.record.node,
            incarnation=me.record.incarnation,
            lease=member.lease_id,
            answer=answer,
            local_rank=said.local_rank,
        )

    # Leaving.

    def _end(self, decision: End | Leave | Halt) -> int:
        """End the workers and leave the run as `decision` says. Returns the exit code.

        Raises CheckpointError if the script of this node is not the run's, and the error of `halted` after a Halt.
        """
        if self.health is not None:
            state, limit_s = self.health.state, self.settings.stop_timeout_s + health_state.LIVE_S
            self.health.state = replace(state, phase="ending", turned_at=self.clock.monotonic(), limit_s=limit_s)
        match decision:
            case End(result=result):
                self.supervisor.finish(END_GRACE_S, well=result.status == "succeeded")
                self.console.ended(result, leads=self.member.view.is_leader)
                self.membership.leave(self.member)
                return result.code
            case Leave():
                self.console.close_last_line()
                self.console.events.write(events.Leaves(decision.reason))
                self.console.say(f"leaving: {decision.reason}", "leaving")
                reached, away = self.supervisor.progress.reached, self.member.outage.since is not None
                unagreed = away or self.member.me.record.draining
                if unagreed and not decision.save_step and not decision.others_go_on:
                    # No node goes on with the state, and the nodes did not agree in time on the step to save. So the
                    # last finished step is the one that should have been saved.
                    decision = replace(decision, save_step=reached)
                # Before the member key is deleted: as soon as all keys are gone, `elasticrt stop` reads the last step
                # from the event log.
                self.supervisor.progress.note_last_step()
                self.supervisor.progress.write()
                # If etcd does not answer, the key vanishes when the lease ends. The workers must not train on while the
                # agent waits for etcd: these steps would be lost.
                if not away:
                    self.membership.leave(self.member, seat_too=True)
                # A signal that the user added with --signals means something to the script, so the workers get that
                # signal too. The usual ones become SIGTERM.
                passed_on = self.last_signal if self.last_signal not in RunOptions.signals else signal.SIGTERM
                saves = decision.save_step > 0 and self.supervisor.is_first
                self.supervisor.stop(self.settings.stop_timeout_s, self._poll_while_leaving, passed_on)
                self.membership.proxy.close(CLOSE_S)
                # Fold a commit that the proxy has just finished: below, the agent says which steps are saved.
                self._poll_while_leaving()
                late_after = reached if self.drain_timed_out or away else 0
                asks = saves or late_after or self.console.narrates
                head, known = self._newest_checkpoint() if asks else (None, False)
                lost = known and saves and (head is None or head.reached < decision.save_step)
                if self.supervisor.misfit is None or decision.save_step:
                    known = known or away
                    self.console.left(decision, head, saves=saves, lost=lost, late_after=late_after, known=known)
                if self.supervisor.misfit is not None:
                    raise CheckpointError(self.supervisor.misfit.summary)
                return EXIT_CHECKPOINT if lost else EXIT_TERMINATED
            case Halt():
                self.supervisor.kill()
                self.membership.leave(self.member)
                raise halted(decision, self.settings.run_id)

    def _leave_on_signal(self, number: signal.Signals) -> None:
        """Leave by a handover because of the signal `number`. If it is the second one, leave at once.

        A handover needs etcd. Without an answer from etcd the handover waits, for `drain_timeout_s` at most.
        """
        self.last_signal = number
        if not self._is_leaving:
            self.drain(f"{number.name} received")
        if self._signals > 1:
            me = self.member.me
            self.member.me = replace(me, leave_reason=me.leave_reason or f"{number.name} received")

    @property
    def _is_leaving(self) -> bool:
        """Whether this node is leaving the run, at once or after a handover."""
        return self.member.me.record.draining or bool(self.member.me.leave_reason)

    def drain(self, reason: str) -> None:
        """See `WorkerSide`. Gives the handover `drain_timeout_s` seconds.

        A node whose workers cannot hand over, and which holds no copy of the state, has nothing to give: it leaves at
        once.
        """
        if not (self.supervisor.progress.can_hand_over() or self.supervisor.seating.memory.newest):
            self.member.me = replace(self.member.me, leave_reason=reason)
            return
        self.console.say(f"{reason}: handing over; a second signal ends this node at once")
        self.drain_until = self.clock.monotonic() + self.settings.options.drain_timeout_s
        self.member.drain()

    def _newest_checkpoint(self) -> tuple[Commit | None, bool]:
        """The newest committed checkpoint that this node knows, and whether it is certainly the newest of the run.

        If etcd does not answer, another node may have committed a newer one, unless this node is alone in its
        generation: its record names the newest checkpoint before it, and this node has committed all later ones. A
        checkpoint that this node has committed or heard of counts even if a fresh etcd does not know it: the file is on
        disk.
        """
        heard, found, answered = self.member.view, None, self.member.outage.since is None
        generation = heard.generation.record if heard.generation is not None else None
        alone, before = generation is not None and generation.nodes == 1, generation.resume if generation else None
        try:
            found = self.membership.driver.run(self.member.newest_head()) if answered else None
        except StoreError as error:
            log.warning("it is not known which step is saved: %s", error)
            answered = False
        head = heard.head.record if heard.head else None
        known = [each for each in (found, self.last_commit, head, before) if each is not None]
        return max(known, key=lambda each: each.reached, default=None), answered or alone

    def _poll_while_leaving(self) -> bool:
        """Handle the queued events that matter while this node leaves. Returns whether a second signal has come.

        These are the ends of workers, their requests to the store, and commits.
        """
        while not self.queue.empty():
            event = self.queue.get_nowait()
            asks = isinstance(event, WorkerMessage) and isinstance(event.message, Request)
            if asks or isinstance(event, WorkerEnded | GroupEnded | Commit):
                self.handle(event)
        return self._signals > 1


def whom_to_ask(view: View, *, first: bool) -> list[Seat]:
    """The seats of the agents to ask about the workers' positions, as this agent's `view` knows them.

    The agent on rank 0's node (`first`) asks all others for the positions of their workers. Any other agent asks rank
    0's, for the culprit that it has found. An agent of a large run may not know the seat of rank 0. It then asks the
    leader, which knows all seats and passes on what it has heard.
    """
    others = [seat for seat in view.seats_in_rank_order() if seat.node != view.node]
    if first:
        return others
    leader = view.members.get(view.leader_node or "")
    known = [seat for seat in others if seat.index == 0]
    return known or list(seats_for([leader] if leader is not None else []))


def halted(decision: Halt, run_id: str) -> ElasticError:
    """The error with which an agent of the run `run_id` ends because of `decision`."""
    if decision.code == DuplicateError.exit_code:
        kind: type[ElasticError] = DuplicateError
        remedy = "Start this node again with the run's options"
    else:
        kind = StoreError
        remedy = "The checkpoints are intact: check etcd, then submit the run again with the same --run-id"
    return kind(explain("this node cannot go on", f"run {run_id}", got=decision.reason, remedy=remedy))
