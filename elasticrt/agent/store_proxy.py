"""Carries out what workers ask of etcd: commits and shared preparations of data, all fenced by their generation.

The proxy has a thread of its own, so that a slow etcd delays the worker that has asked, and never the agent's loop.
Each request gets exactly one answer. A refusal has a reason: the worker warns its user and trains on. While etcd is
away, or after the lease has ended, the answer is "unsure", and the worker asks again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from elasticrt.errors import StoreError
from elasticrt.ipc.directory_owner import NAME, Holding, Owner
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import ERRNO, BuildDone, ClaimBuild, OpenDirectory, Reply, Request, Save
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.records import Keys, Preparation, R, decode, version_of
from elasticrt.store.protocol import KeyValue, LeaseLost, Store, StoreBlocked, StoreUnavailable

log = logging.getLogger(__name__)

_State = Literal["building", "done", "failed"]


@dataclass(frozen=True)
class BuilderEnded:
    """A worker of this node has ended. What it was building becomes free for others. Nobody waits for the answer."""

    request: int = 0


@dataclass(frozen=True)
class StoreRequest:
    """A worker's request, with what the transaction for it needs.

    Attributes:
        request: the request.
        generation: the generation of the worker that asks.
        record: what the store's key of the generation holds, with which the transaction compares; None if the worker's
            generation is over.
        attempt: the attempt at the run.
        node, incarnation: this node's name and its present incarnation.
        lease: the id of this node's lease.
        answer: takes the reply to the worker.
        local_rank: the local rank of the worker.
    """

    request: Request | BuilderEnded
    generation: int
    record: bytes | None
    attempt: int
    node: str
    incarnation: str
    lease: int
    answer: Callable[[Reply], None]
    local_rank: int = 0


class StoreProxy:
    """Carries out requests one after the other, on a thread that the first request starts.

    Only the agent's main thread calls the methods, but for `carry_out`, which has no thread and no clock.

    Args:
        store: the store.
        keys: the run's keys.
        committed: takes every new head of the run, that is, the newest committed checkpoint.
        meeting: where the agents of this machine find the store, as `OpenStore.place`.
    """

    def __init__(self, store: Store, keys: Keys, committed: Callable[[Commit], None], meeting: str) -> None:
        self._store = store
        self._keys = keys
        self._committed = committed
        self._meeting = meeting
        # The checkpoint directories that this agent owns.
        self._holdings: dict[str, Holding] = {}
        # By preparation: the local rank of this node's worker that has claimed the build.
        self._builders: dict[str, int] = {}
        self._closing = False
        self._waiting: queue.SimpleQueue[StoreRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, asked: StoreRequest) -> None:
        """Queue a request. Its answer comes from the proxy's thread."""
        self._waiting.put(asked)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="elasticrt-store-proxy", daemon=True)
            self._thread.start()

    def worker_ended(self, asked: StoreRequest) -> None:
        """Take note that a worker has ended. `asked`: with a `BuilderEnded`."""
        if asked.local_rank in self._builders.values():
            self.send(asked)

    def close(self, timeout_s: float) -> None:
        """End the thread after the request under way, and release the checkpoint directories that this agent owns.

        This method waits at most `timeout_s` seconds for that request. A directory that the request takes later is
        released as soon as it is taken. Requests that are still queued are dropped, because their workers have ended. A
        second call does nothing more.
        """
        self._closing = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
        for holding in list(self._holdings.values()):
            holding.release()

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None and not self._closing:
            reply = self.carry_out(asked)
            if isinstance(asked.request, BuilderEnded) and reply.refusal == "unsure":
                # No worker asks again in this case. An etcd that takes no writes refuses at once.
                time.sleep(LOOK_AGAIN_S)
                self._waiting.put(asked)
            asked.answer(reply)

    def carry_out(self, asked: StoreRequest) -> Reply:
        """Carry out one request, and return the reply. Errors of the store become refusals.

        A commit that is asked for again is recognised by its nonce. If it were refused after it had succeeded, all
        later commits of the worker would be refused too: they would name the head before it as the one that they
        replace.
        """
        request = asked.request
        try:
            if isinstance(request, Save):
                return self._save(asked, request)
            if isinstance(request, OpenDirectory):
                return self._open_directory(asked, request)
            if isinstance(request, ClaimBuild):
                return self._claim_build(asked, request)
            if isinstance(request, BuilderEnded):
                return self._free_builds(asked)
            return self._end_build(asked, request)
        except StoreUnavailable as error:
            return Reply(request.request, False, f"etcd does not answer: {error}", refusal="unsure")
        # The agent gets another lease, so the worker should ask again.
        except LeaseLost as error:
            return Reply(request.request, False, str(error), refusal="unsure")
        # etcd takes no writes now, for example because it is full. A worker tries a preparation again until etcd has
        # space. A save that is refused as "blocked" is left out, unless it is the run's last one.
        except StoreBlocked as error:
            refusal = "blocked" if isinstance(request, Save) else "unsure"
            return Reply(request.request, False, str(error), refusal=refusal)
        except (StoreError, ValidationError) as error:
            return Reply(request.request, False, str(error))

    def _save(self, asked: StoreRequest, request: Save) -> Reply:
        """Make a checkpoint the head by a transaction that compares the generation and the head before."""
        try:
            head = Commit.from_fields(request.commit)
        except ValueError as error:
            return Reply(request.request, False, f"not a commit: {error}")
        key = self._keys.place(head.place) if request.beside else self._keys.checkpoint
        current, known = self._find(Commit, key)
        # An earlier try has succeeded, and its answer was lost.
        if known is not None and known.nonce == head.nonce:
            return self._accepted(request, head)
        refusal = self._refusal(asked, request, head, known)
        if refusal is not None:
            return refusal
        head_mod = current.mod_revision if current is not None else 0
        if asked.record is not None:
            txn = transactions.commit(self._keys, asked.record, head_mod, asked.attempt, head, beside=request.beside)
            if self._store.commit(txn).succeeded:
                return self._accepted(request, head)
        # An earlier try, whose outcome was unknown, may have taken effect after the head was read. It then makes this
        # try fail.
        _, known = self._find(Commit, key)
        if known is not None and known.nonce == head.nonce:
            return self._accepted(request, head)
        return Reply(request.request, False, f"generation {asked.generation} is over", refusal="over")

    def _refusal(self, asked: StoreRequest, request: Save, head: Commit, known: Commit | None) -> Reply | None:
        """Why `head` must not replace `known`, the head as it was read; None when it may."""
        # The worker has got a seat in another generation since it began to save.
        if head.generation != asked.generation:
            return Reply(request.request, False, f"generation {head.generation} is over", refusal="over")
        holding = self._holdings.get(head.directory)
        other = None if holding is None else holding.lost()
        if other is not None:
            return Reply(request.request, False, str(other), refusal="taken")
        if (known.nonce if known is not None else "") != request.replaces:
            why = "etcd has lost the record of the checkpoint before it"
            if known is not None:
                why = f"another checkpoint, of step {known.step:,}, is the newest now"
            return Reply(request.request, False, why)
        return None

    def _find(self, kind: type[R], key: str) -> tuple[KeyValue | None, R | None]:
        """Read `key`. Returns what the store has there, and the record of that `kind`; None, None without the key."""
        current = self._store.read(key).get(key)
        return current, decode(kind, key, current.value) if current is not None else None

    def _accepted(self, request: Save, head: Commit) -> Reply:
        if not request.beside:
            self._committed(head)
        return Reply(request.request, True)

    def _open_directory(self, asked: StoreRequest, request: OpenDirectory) -> Reply:
        """Answer with the head of a checkpoint directory. If asked to, also take the directory for this run.

        A directory to which another live run saves is not taken.
        """
        key = self._keys.place(request.place)
        found = self._store.read(key)
        if request.take:
            owner = Owner.here(self._keys.run_id, found.store_id, asked.node, self._meeting)
            holding = Holding(Path(request.directory), owner)
            try:
                other = holding.take()
            except OSError as error:
                return Reply(request.request, False, f"its record {NAME}: {error.strerror}", {ERRNO: error.errno})
            if other is not None:
                return Reply(request.request, False, str(other), refusal="taken")
            if request.directory in self._holdings:
                self._holdings[request.directory].release()
            self._holdings[request.directory] = holding
            if self._closing:
                holding.release()
        value = found.get(key)
        head = None if value is None else decode(Commit, key, value.value)
        return Reply(request.request, True, "", {} if head is None else {"head": asdict(head)})

    def _claim_build(self, asked: StoreRequest, request: ClaimBuild) -> Reply:
        """Claim the right to build a preparation, for one worker of this node.

        The claim is bound to this node's lease.
        """
        current, record = self._find(Preparation, self._keys.preparation(request.name))
        if record is not None and record.version == version_of(request.version):
            if record.state == "building" and record.incarnation == asked.incarnation:
                mine = self._builders.setdefault(request.name, asked.local_rank) == asked.local_rank
                return Reply(request.request, mine, "another process of this node", refusal="" if mine else "wait")
            refusal, why = _taken(asked, record)
            if refusal:
                return Reply(request.request, False, why, refusal=refusal)
        if asked.record is not None:
            claimed, seen_mod = _preparing(asked, request, "building"), current.mod_revision if current else 0
            txn = transactions.claim_preparation(
                self._keys, request.name, claimed, generation_value=asked.record, seen_mod=seen_mod, lease=asked.lease
            )
            if self._store.commit(txn).succeeded:
                self._builders[request.name] = asked.local_rank
                return Reply(request.request, True)
        return Reply(request.request, False, "another node", refusal="wait")

    def _free_builds(self, asked: StoreRequest) -> Reply:
        """Give up the claims of a worker that has ended. Otherwise they would stand as long as this agent lives."""
        for name in [name for name, local_rank in self._builders.items() if local_rank == asked.local_rank]:
            current, record = self._find(Preparation, self._keys.preparation(name))
            if current is not None and record is not None and _is_ours(asked, record):
                self._store.commit(transactions.free_preparation(self._keys, name, claimed_mod=current.mod_revision))
            del self._builders[name]
        return Reply(asked.request.request, True)

    def _end_build(self, asked: StoreRequest, request: BuildDone) -> Reply:
        """Record the outcome of a preparation that this incarnation has claimed."""
        current, record = self._find(Preparation, self._keys.preparation(request.name))
        self._builders.pop(request.name, None)
        if current is not None and record is not None and _is_ours(asked, record):
            settled = _preparing(asked, request, "failed" if request.error else "done", request.error)
            txn = transactions.end_preparation(self._keys, request.name, settled, claimed_mod=current.mod_revision)
            if self._store.commit(txn).succeeded:
                return Reply(request.request, True)
        return Reply(request.request, False, "the claim is gone: another node may be building")


def _is_ours(asked: StoreRequest, record: Preparation) -> bool:
    """Whether this incarnation of the node is the builder."""
    return record.incarnation == asked.incarnation and record.state == "building"


def _taken(asked: StoreRequest, record: Preparation) -> tuple[str, str]:
    """The refusal of a claim to a preparation with this `record`, and its reason; "", "" if it can be claimed.

    The claim is from another incarnation than the builder's, or comes after the build.
    """
    if record.state == "done":
        return "done", ""
    # The record of a build vanishes when the lease of its builder ends.
    if record.state == "building":
        return "wait", record.node
    if record.state == "failed" and record.generation == asked.generation:
        return "failed", f"on {record.node}: {record.error}"
    # The build failed in an earlier generation. Another try is allowed.
    return "", ""


def _preparing(asked: StoreRequest, request: ClaimBuild | BuildDone, state: _State, error: str = "") -> Preparation:
    """The record of a preparation in this `state`. `error`: with what the build has failed; "" unless it has."""
    where: dict[str, Any] = {"generation": asked.generation, "node": asked.node, "incarnation": asked.incarnation}
    return Preparation(state=state, version=version_of(request.version), error=error, **where)
