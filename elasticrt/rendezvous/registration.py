"""How a member puts its key into etcd, comes back after losing it, and takes it out again. Pure (see `requests`)."""

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
class Registered:
    """The member is registered.

    Attributes:
        attempt: the attempt that the member belongs to.
        spec: the run's options. After a resize they differ from those that the node was started with.
    """

    attempt: int
    spec: RunSpec


@dataclass(frozen=True)
class Blocked:
    """A key that keeps a newcomer out, as long as its owner lives or its lease has not ended.

    Attributes:
        key: the key of a member with the newcomer's name, or of any member of a run with other options.
        difference: how the options differ; "" if the name is the reason.
        lease_ttl_s: the TTL of leases of that run, in seconds.
    """

    key: KeyValue
    difference: str
    lease_ttl_s: float


def try_register(
    replica: Replica, spec: RunSpec, member: Member, lease: int, *, again: bool
) -> Conversation[Registered | Result | Blocked | None]:
    """Try once to register for the first time.

    Args:
        replica: the member's copy of the run's keys.
        spec: the options that this node was started with.
        member: the member's record.
        lease: the lease to bind the key to.
        again: whether to run a run once more that has succeeded.

    Returns:
        Registered: the member is registered. Result: the run has succeeded before, so there is nothing to do. Blocked:
        the caller finds out whether the owner of that key still lives. None: another member was faster, or members of
        an attempt that has ended are still leaving; try again soon.
    """
    keys, own = replica.keys, replica.keys.member(member.node)
    # The own key is read first, then the spec. An earlier try whose answer was lost may take effect between the two
    # reads. It writes both keys in one transaction, so whoever sees the key then sees its spec as well.
    mine = yield from replica.read_key(own)
    stored = yield from replica.read_record(SpecRecord, keys.spec)
    if mine is not None:
        if decode(Member, mine.key, mine.value).incarnation != member.incarnation:
            return Blocked(mine, "", stored[0].spec.lease_ttl_s if stored else spec.lease_ttl_s)
        return Registered(stored[0].attempt, stored[0].spec) if stored else None
    generation = yield from replica.read_key(keys.generation)
    alive = (yield from replica.read(keys.members, limit=1))[0].keys
    # The own key has come since the look above. The next try finds out whose it is.
    if own in (kv.key for kv in alive):
        return None
    known = stored[0] if stored is not None else None
    result = (yield from replica.read_record(Result, keys.result(known.attempt))) if known is not None else None
    place = _judge_newcomer(spec, known, result[0] if result is not None else None, alive=bool(alive), again=again)
    if isinstance(place, str):
        assert known is not None, "a run with members has options"
        return Blocked(alive[0], place, known.spec.lease_ttl_s)
    if not isinstance(place, Registered):
        return place
    record = None
    if known is None or not alive:
        # If the run was told to stop, it goes on with this newcomer.
        # The spec is written even if it does not change. Of two newcomers that see no live member and have different
        # specs, one then fails its compare of the spec's revision.
        record = SpecRecord(spec=place.spec, attempt=place.attempt)
        if known is not None and (known.spec, known.attempt) == (place.spec, place.attempt):
            record = known.model_copy(update={"stopped": False})
    generation_value, seen_mod = generation.value if generation else b"", stored[1] if stored else 0
    txn = transactions.register(keys, member, lease, record, generation_value=generation_value, seen_mod=seen_mod)
    done, _ = yield Transact(txn)
    return place if done.succeeded else None


def _judge_newcomer(
    spec: RunSpec, stored: SpecRecord | None, result: Result | None, *, alive: bool, again: bool
) -> Registered | Result | str | None:
    """Where a newcomer belongs, as `try_register` returns it; for members with other options the difference, as text.

    Args:
        spec: the options of the newcomer.
        stored: the options in the store.
        result: the result of the attempt in `stored`, if it has ended.
        alive: whether the run has members.
        again: as in `try_register`.
    """
    if stored is None:
        return Registered(1, spec)
    if not alive:
        if result is None:
            return Registered(stored.attempt, spec)
        if result.status == "succeeded" and not again:
            return result
        return Registered(stored.attempt + 1, spec)
    # The members of an attempt that has ended are still leaving. The next attempt begins without them.
    if result is not None:
        return None
    if stored.resized:
        spec = resized(spec, stored.spec)
    return difference(spec, stored.spec) or Registered(stored.attempt, spec)


def fence(replica: Replica, stale: KeyValue, member: Member) -> Conversation[None]:
    """Delete the key of a dead life with this member's name, if the key is unchanged.

    Args:
        replica: the member's copy of the run's keys.
        stale: the key as it was read.
        member: the record that the key holds.
    """
    generation = yield from replica.read_key(replica.keys.generation)
    generation_value = generation.value if generation else b""
    yield Transact(transactions.fence(replica.keys, generation_value, member.node, stale.mod_revision))


def register_again(replica: Replica, member: Member, lease: int) -> Conversation[bool]:
    """Register again after the key was lost. Returns False if the view was old; then it has been read again."""
    keys, before = replica.keys, (replica.view.generation_number, transactions.mod_revision_of(replica.view.spec))
    yield from replica.refresh()
    if (replica.view.generation_number, transactions.mod_revision_of(replica.view.spec)) != before:
        # A newer generation may have left this life out, or the run may have other options now. `decide` has to see
        # that first.
        return False
    mine = replica.view.members.get(member.node)
    if mine is not None and mine.record.incarnation == member.incarnation:
        # The key is still there, bound to the old lease. The announcement binds it to the new one.
        txn = transactions.announce(keys, replica.view, member, lease)
        return bool((yield from replica.write(txn)))
    if mine is not None and is_same_process(mine.record, member):
        # The key is of a former life of this very agent, whose deletion did not reach etcd. Its lease need not be
        # waited for.
        yield from leave(replica, member)
        yield from replica.refresh()
    elif mine is not None:
        # Another process has this name. Its lease ends, or it lives.
        return False
    view = replica.view
    txn = transactions.register(
        keys, member, lease, generation_value=view.generation_value, seen_mod=transactions.mod_revision_of(view.spec)
    )
    return bool((yield from replica.write(txn)))


def leave(
    replica: Replica, member: Member, last_report: Callable[[View], Report | None] = lambda _: None
) -> Conversation[None]:
    """Delete the key of `member` at once, if it is there, in its present life or a former one.

    `last_report` makes this node's last report from the newest view. The report tells the other members why the node
    left.
    """
    # The report is fenced by the generation, which may move on in between: try twice with a report, then without one.
    for make_report in (last_report, last_report, lambda _: None):
        mine = replica.view.members.get(member.node)
        if mine is not None and not is_same_process(mine.record, member):
            # Another agent has taken this name, after a silence of this one.
            return
        report = make_report(replica.view)
        done, _ = yield Transact(transactions.leave(replica.keys, replica.view, report))
        if done.succeeded or report is None:
            return
        # The generation has moved on, or the key does not exist any more.
        yield from replica.refresh()


def is_same_process(one: Member, other: Member) -> bool:
    """Whether two lives are of the same agent process: an agent holds its probe port from its start to its end."""
    return (one.address, one.probe_port, one.pid) == (other.address, other.probe_port, other.pid)
