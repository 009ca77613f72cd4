"""What workers ask of etcd, carried out for them: commits and shared preparations, all fenced by their generation.

On a thread of its own, so that a slow etcd delays the one worker that asked and never the agent's loop. Each request is
answered exactly once. An answer of "no" says why; the worker warns its user and goes on training. After one that is
unsure, because etcd is away, it asks again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from elasticrt.errors import StoreError
from elasticrt.ipc.directory_owner import NAME, Holding, Owner
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import UNSURE, Built, Claim, Own, Reply, Request, Save
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.records import Keys, Preparation, decode, version_of
from elasticrt.store.protocol import KeyValue, Store, StoreUnavailable
from elasticrt.text import unpacked

log = logging.getLogger(__name__)


ASK_AGAIN_S = 0.5
"""Between two questions about a commit whose outcome is unknown. They go on until the outcome is known: a worker that
took a commit for refused that did happen would have all its later ones refused."""


@dataclass(frozen=True)
class StoreRequest:
    """A request with the generation it comes from; `generation_mod` is that record's revision in the store."""

    request: Request
    generation: int
    generation_mod: int
    attempt: int
    node: str
    incarnation: str
    lease: int
    answer: Callable[[Reply], None]


class StoreProxy:
    """Carries out requests one after the other, on a thread that lives as long as there are any.

    Args:
        store: where they are carried out.
        keys: the run's.
        committed: told of every new head, from that thread.
    """

    def __init__(self, store: Store, keys: Keys, committed: Callable[[Commit], None]) -> None:
        self._closing = threading.Event()
        self._requests = StoreRequests(store, keys, committed, lambda: not self._closing.wait(ASK_AGAIN_S))
        self._lock = threading.Lock()  # Guards what follows.
        self._waiting: deque[StoreRequest] = deque()
        self._thread: threading.Thread | None = None

    def send(self, asked: StoreRequest) -> None:
        """Queue a request."""
        with self._lock:
            self._waiting.append(asked)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="elasticrt-store-proxy", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End after the request under way, which is waited for at most `timeout_s`.

        Those still queued are never carried out (their workers are gone).
        """
        self._closing.set()
        with self._lock:
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        self._requests.release()

    def _work(self) -> None:
        while (asked := self._next()) is not None:
            asked.answer(self._requests.carry_out(asked))

    def _next(self) -> StoreRequest | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None
            return None


class StoreRequests:
    """What a request does to the store. No thread and no clock of its own.

    Args:
        store: where requests are carried out.
        keys: the run's.
        committed: told of every new head.
        pause: waits a little while, and says whether to go on asking.
    """

    def __init__(
        self, store: Store, keys: Keys, committed: Callable[[Commit], None], pause: Callable[[], bool]
    ) -> None:
        self._pause = pause
        self._store = store
        self._keys = keys
        self._committed = committed
        self._holdings: dict[str, Holding] = {}

    def release(self) -> None:
        """Let go of the checkpoint directories."""
        for holding in self._holdings.values():
            holding.release()

    def carry_out(self, asked: StoreRequest) -> Reply:
        """Carry out one request; the answer, whatever happens."""
        request = asked.request
        try:
            if isinstance(request, Save):
                return self._save(asked, request)
            if isinstance(request, Own):
                return self._own(asked, request)
            if isinstance(request, Claim):
                return self._claim(asked, request)
            return self._settle(asked, request)
        except StoreUnavailable as error:
            return Reply(request.request, False, f"{UNSURE}etcd does not answer: {error}")
        except (StoreError, ValidationError) as error:
            return Reply(request.request, False, str(error))

    def _save(self, asked: StoreRequest, request: Save) -> Reply:
        try:
            head = Commit.from_fields(request.commit)
        except ValueError as error:
            return Reply(request.request, False, f"not a commit: {error}")
        if head.generation != asked.generation:  # Its writer has moved on, and asked before that.
            return Reply(request.request, False, f"generation {head.generation} is over")
        holding = self._holdings.get(unpacked(head.directory))
        other = None if holding is None else holding.lost()
        if other is not None:
            return Reply(request.request, False, f"taken: {other}")
        sent = False
        while True:
            try:
                current, known = self._head()
                if known is not None and known.nonce == head.nonce:
                    return self._accepted(request, head)  # An earlier try whose answer was lost.
                if (known.nonce if known is not None else "") != request.replaces:
                    return Reply(request.request, False, "another checkpoint has become the head")
                head_mod = current.mod_revision if current is not None else 0
                txn = transactions.commit(self._keys, asked.generation_mod, head_mod, asked.attempt, head)
                again, sent = sent, True
                if self._store.commit(txn).succeeded:
                    return self._accepted(request, head)
                if again:
                    # What made this try fail can be an earlier one that took effect in the meantime.
                    _, known = self._head()
                    if known is not None and known.nonce == head.nonce:
                        return self._accepted(request, head)
                return Reply(request.request, False, f"generation {asked.generation} is over")
            except StoreUnavailable as error:
                if not sent:
                    raise
                log.warning("commit of step %d: outcome unknown, reading back (%s)", head.step, error)
            if not self._pause():
                return Reply(
                    request.request, False, f"{UNSURE}etcd does not answer: the outcome of the commit is unknown"
                )

    def _head(self) -> tuple[KeyValue | None, Commit | None]:
        current = self._store.read(self._keys.checkpoint).get(self._keys.checkpoint)
        return current, decode(Commit, current.key, current.value) if current is not None else None

    def _accepted(self, request: Save, head: Commit) -> Reply:
        self._committed(head)
        return Reply(request.request, True)

    def _own(self, asked: StoreRequest, request: Own) -> Reply:
        """The head of a directory, and that no other live run saves to it."""
        key = self._keys.place(request.place)
        found = self._store.read(key)
        if request.take:
            owner = Owner.here(self._keys.run_id, found.store_id, asked.node)
            holding = Holding(Path(request.directory), owner)
            try:
                other = holding.take()
            except OSError as error:
                return Reply(request.request, False, f"unwritable: its record {NAME}: {error}")
            if other is not None:
                return Reply(request.request, False, f"taken: {other}")
            if request.directory in self._holdings:
                self._holdings[request.directory].release()
            self._holdings[request.directory] = holding
        value = found.get(key)
        head = None if value is None else decode(Commit, key, value.value)
        return Reply(request.request, True, "", {} if head is None else {"head": asdict(head)})

    def _claim(self, asked: StoreRequest, request: Claim) -> Reply:
        current, record = self._preparation(request.name)
        stale = record is None or record.version != version_of(request.version)
        if record is not None and not stale:
            if record.state == "done":
                return Reply(request.request, False, "done")
            if record.state == "building" and record.incarnation == asked.incarnation:
                return Reply(request.request, True)
            if record.state == "building" and current is not None and current.lease != asked.lease:
                return Reply(request.request, False, f"wait: {record.node}")
            if record.state == "failed" and record.generation == asked.generation:
                return Reply(request.request, False, f"failed: {record.error}")
            # It failed in an earlier generation, or its builder was a former life of this agent, whose workers are gone
            # and whose lease lives on: this one may try again.
        claimed = _preparing(asked, request, "building")
        seen_mod = current.mod_revision if current is not None else 0
        txn = transactions.claim(
            self._keys,
            request.name,
            claimed,
            generation_mod=asked.generation_mod,
            seen_mod=seen_mod,
            lease=asked.lease,
        )
        if self._store.commit(txn).succeeded:
            return Reply(request.request, True)
        return Reply(request.request, False, "wait: another node")

    def _settle(self, asked: StoreRequest, request: Built) -> Reply:
        current, record = self._preparation(request.name)
        if current is None or record is None or record.incarnation != asked.incarnation or record.state != "building":
            return Reply(request.request, False, "the claim is gone: another node may be building")
        state: Literal["done", "failed"] = "failed" if request.error else "done"
        settled = _preparing(asked, request, state, error=request.error)
        txn = transactions.settle(self._keys, request.name, settled, claimed_mod=current.mod_revision)
        done = self._store.commit(txn).succeeded
        return Reply(request.request, done, "" if done else "the claim is gone: another node may be building")

    def _preparation(self, name: str) -> tuple[KeyValue | None, Preparation | None]:
        key = self._keys.preparation(name)
        current = self._store.read(key).get(key)
        return current, decode(Preparation, key, current.value) if current is not None else None


def _preparing(
    asked: StoreRequest,
    request: Claim | Built,
    state: Literal["building", "done", "failed"],
    *,
    error: str = "",
) -> Preparation:
    """The record of a preparation, with the `error` that it failed with."""
    return Preparation(
        state=state,
        version=version_of(request.version),
        generation=asked.generation,
        node=asked.node,
        incarnation=asked.incarnation,
        error=error,
    )
