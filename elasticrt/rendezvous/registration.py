"""How a member gets its key into etcd, comes back with it, and takes it out again. Pure (see `requests`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.records import Member, Report, Result, SpecRecord, decode
from elasticrt.rendezvous.replica import Replica
from elasticrt.rendezvous.requests import Conversation, Transact
from elasticrt.rendezvous.view import View
from elasticrt.spec import RunSpec, difference, resized
from elasticrt.store.protocol import KeyValue


@dataclass(frozen=True)
class Entered:
    """What registering found: the attempt this member belongs to, and the run's options (it may have been resized)."""

    attempt: int
    spec: RunSpec


@dataclass(frozen=True)
class Kept:
    """A key that keeps a newcomer out, as long as its owner lives or its lease has not ended.

    Attributes:
        key: of a member with the newcomer's name, or of any member of a run with other options.
        unlike: these options; "" if it is the name.
        lease_ttl_s: of the leases of its run, in seconds.
    """

    key: KeyValue
    unlike: str
    lease_ttl_s: float


def enter(
    replica: Replica, spec: RunSpec, member: Member, lease: int, *, again: bool
) -> Conversation[Entered | Result | Kept | None]:
    """One try to register for the first time.

    Args:
        replica: the member's copy of the run's keys.
        spec: the options that this node was started with.
        member: its record.
        lease: what its key is to be bound to.
        again: whether a run that has succeeded is to be run once more.

    Returns:
        Entered: registered. Result: the run has succeeded before, so there is nothing to do. Kept: the caller finds
        out whether the owner of that key still lives. None: another member was faster, or members of an attempt that
        has ended are still leaving. Try again soon.
    """
    keys, own = replica.keys, replica.keys.member(member.node)
    # In this order: an earlier try whose answer was lost, and which arrives only now, writes the spec and the key.
    mine = yield from replica.look_up(own)
    stored = yield from replica.record(SpecRecord, keys.spec)
    if mine is not None:
        if decode(Member, mine.key, mine.value).incarnation != member.incarnation:
            return Kept(mine, "", stored[0].spec.lease_ttl_s if stored else spec.lease_ttl_s)
        return Entered(stored[0].attempt, stored[0].spec) if stored else None
    generation = yield from replica.look_up(keys.generation)
    alive = (yield from replica.read(keys.members, limit=1))[0].keys
    if own in (kv.key for kv in alive):
        return None
    known = stored[0] if stored is not None else None
    result = (yield from replica.record(Result, keys.result(known.attempt))) if known is not None else None
    place = _place(spec, known, result[0] if result is not None else None, alive=bool(alive), again=again)
    if isinstance(place, str):
        assert known is not None, "a run with members has options"
        return Kept(alive[0], place, known.spec.lease_ttl_s)
    if not isinstance(place, Entered):
        return place
    record = None
    if known is None or not alive:
        # Also where it is written as it was: of two that see no live member, with two specs, one has to be refused.
        same = known is not None and (known.spec, known.attempt) == (place.spec, place.attempt)
        record = known if same else SpecRecord(spec=place.spec, attempt=place.attempt)
    fence, seen_mod = generation.value if generation else b"", stored[1] if stored else 0
    txn = transactions.register(keys, member, lease, record, generation=fence, seen_mod=seen_mod)
    done, _ = yield Transact(txn)
    return place if done.succeeded else None


def _place(
    spec: RunSpec, stored: SpecRecord | None, result: Result | None, *, alive: bool, again: bool
) -> Entered | Result | str | None:
    """Where a newcomer belongs. `result` is that of the attempt in `stored`; `alive`: the run has members.

    Returns as `enter`, and in place of a key the options in which its members differ.
    """
    if stored is None:
        return Entered(1, spec)
    if not alive:
        if result is None:
            return Entered(stored.attempt, spec)
        if result.status == "succeeded" and not again:
            return result
        return Entered(stored.attempt + 1, spec)
    if result is not None:
        return None
    if stored.resized:
        spec = resized(spec, stored.spec)
    return difference(spec, stored.spec) or Entered(stored.attempt, spec)


def evict(replica: Replica, stale: KeyValue, member: Member) -> Conversation[None]:
    """Delete the key of a dead life with this member's name, if it is unchanged.

    Args:
        replica: the member's copy of the run's keys.
        stale: the key as it was read.
        member: the record that it holds.
    """
    generation = yield from replica.look_up(replica.keys.generation)
    fence = generation.value if generation else b""
    yield Transact(transactions.evict(replica.keys, fence, member.node, stale.mod_revision))


def register_again(replica: Replica, member: Member, lease: int) -> Conversation[bool]:
    """Come back with a key, after the last one was lost. False: the view was old (it has been read anew)."""
    keys, before = replica.keys, (replica.view.number, transactions.mod(replica.view.spec))
    yield from replica.refresh()
    if (replica.view.number, transactions.mod(replica.view.spec)) != before:
        # A generation may have left this life out, or the run may have other options: that is decided anew.
        return False
    mine = replica.view.members.get(member.node)
    if mine is not None and mine.record.incarnation == member.incarnation:
        # The key is still there, on the old lease: replace it by one on the new lease.
        txn = transactions.announce(keys, replica.view, member, lease)
        return bool((yield from replica.write(txn)))
    if mine is not None and same_process(mine.record, member):
        # A former life of this very agent, whose farewell did not reach etcd: its lease need not be waited for.
        yield from leave(replica, member)
        yield from replica.refresh()
    elif mine is not None:
        return False  # Of another process with this name: its lease ends, or it lives.
    view = replica.view
    txn = transactions.register(keys, member, lease, generation=view.fence, seen_mod=transactions.mod(view.spec))
    return bool((yield from replica.write(txn)))


def leave(
    replica: Replica, member: Member, told: Callable[[View], Report | None] = lambda _: None
) -> Conversation[None]:
    """Take the key of `member`, in this life or a former one, out at once, if it is there.

    The report that is `told` of the newest view tells the other members why.
    """
    for tell in (told, told, lambda _: None):
        mine = replica.view.members.get(member.node)
        if mine is not None and not same_process(mine.record, member):
            return  # Another agent has come with this name, after a silence of this one.
        report = tell(replica.view)
        done, _ = yield Transact(transactions.leave(replica.keys, replica.view, report))
        if done.succeeded or report is None:
            return
        yield from replica.refresh()  # The generation has moved on, or the key does not exist any more.


def same_process(one: Member, other: Member) -> bool:
    """Whether two lives are those of one agent: it holds its probe port from its start to its end."""
    return (one.address, one.probe_port, one.pid) == (other.address, other.probe_port, other.pid)
