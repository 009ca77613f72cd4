"""Tells what an agent waits for, in words for its terminal. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elasticrt.ipc.wording import counted
from elasticrt.rendezvous.decision import Decision, Me, Register, Wait
from elasticrt.rendezvous.leader_context import list_names
from elasticrt.rendezvous.registration import is_same_process
from elasticrt.rendezvous.view import View
from elasticrt.story.sentences import lasted

# What takes less than this time is not shown.
SHOWN_AFTER_S = 2.0

_NODES, _NAME = "waiting for nodes", "waiting for this node's name"


@dataclass(frozen=True)
class Doing:
    """Something that takes an agent's time.

    Attributes:
        what: its name. The same name is the same wait.
        more: its present state, in words.
        until: when it ends at the latest, in seconds of the monotonic clock; None if unknown.
    """

    what: str
    more: str = ""
    until: float | None = None

    @property
    def for_people(self) -> bool:
        """Whether people may have to act. Such a wait is printed as a line of its own."""
        return self.what in (_NODES, _NAME)


def doing(  # noqa: PLR0912  It is one column of guards.
    me: Me, view: View, decision: Decision, *, workers: str, drain_until: float | None
) -> Doing | None:
    """What takes a member's time besides training; None: nothing.

    Args:
        me: the member's own state.
        view: what the member knows of the run.
        decision: its newest decision.
        workers: what its workers do before their first step, in words; "" when they train.
        drain_until: until when the member waits for its workers to hand over; None if it does not leave.
    """
    named = view.members.get(me.record.node)
    if isinstance(decision, Register) and named is not None and not is_same_process(named.record, me.record):
        other = f"the agent with pid {named.record.pid} at {named.record.address} uses it; stop one of the two"
        return Doing(_NAME, other)
    if view.handover is not None:
        handover = view.handover.record
        step = f", all workers stop after step {handover.step:,}" if handover.step else ""
        return Doing("handing over", handover.cause + step, drain_until)
    if drain_until is not None:
        return Doing("handing over", "this node leaves", drain_until)
    generation = view.generation.record if view.generation is not None else None
    if generation is not None and generation.last is not None:
        return Doing("saving", decision.reason)
    waits = generation is not None and generation.waits
    if (
        view.is_leader
        and view.members_complete
        and view.too_few_since is not None
        and (waits or not me.running_generation)
    ):
        missing = me.spec.min_nodes - len(view.members)
        here = f"{list_names(view.members)} here, {missing} missing"
        return Doing(_NODES, here, view.too_few_since + me.spec.join_timeout_s)
    if generation is not None and waits:
        if me.spec.min_nodes <= generation.nodes:
            return Doing("saving", decision.reason)
        # A follower sees no other key than the leader's: the seats tell it who else is here. A node that has come back
        # since has another incarnation.
        lives = {name: each.record.incarnation for name, each in view.members.items()}
        seated = [seat.node for seat in view.seats_in_rank_order() if lives.get(seat.node) in (None, seat.incarnation)]
        able = list(dict.fromkeys([*seated, *(name for name, each in view.members.items() if each.record.ready)]))
        setting_up = [name for name in view.members if name not in able]
        parts = [f"{list_names(able)} here"] if able else []
        if setting_up:
            parts.append(f"{list_names(setting_up)} {'is' if len(setting_up) == 1 else 'are'} setting up")
        if (missing := me.spec.min_nodes - len(able) - len(setting_up)) > 0:
            parts.append(f"{missing} missing")
        return Doing(_NODES, ", ".join(parts))
    # After a new attempt has begun, the generation may still be one of the attempt before.
    runs = generation is not None and generation.attempt == me.attempt
    if runs and view.seat_of(me.record) is not None:
        if workers:
            return Doing(workers)
        waits = isinstance(decision, Wait) and decision.until is not None
        return Doing("waiting", decision.reason) if waits else None
    if generation is not None and runs and view.roster_known:
        return Doing("standing by", f"generation {generation.number} has {counted(generation.nodes, 'node')}")
    if not me.record.warm:
        return Doing("importing torch")
    return Doing("waiting for the others", decision.reason)


def in_words(found: Doing, since: float, now: float) -> str:
    """The line about a wait: `waiting for nodes 12 s: a, b here, 1 missing; gives up in 9 min 48 s`.

    `since`: when the wait began; `now`: the present time. Both are seconds of the monotonic clock.
    """
    text = f"{found.what} {lasted(now - since)}" + (f": {found.more}" if found.more else "")
    return text + (f"; gives up in {lasted(found.until - now)}" if found.until is not None else "")
