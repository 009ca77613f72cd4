"""Who still needs an embedded etcd: its keeper's view of the members of the run, and the decision when to end."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Any

from elasticrt.errors import StoreError
from elasticrt.store.protocol import Broken, Changes, Store, Watch

AFTER_RESULT_S = 1.0
"""A run that has its result and no members is over this soon."""

FOUND_S = 5.0
"""An agent that has just found the server of an ended run gets this long to become a member."""

LOOK_S = 60.0
"""How often everything is read again although no change was heard of."""


def ends_at(*, members: int, result: bool, left_at: float, found_at: float, linger_s: float) -> float | None:
    """When to end if nothing changes, on the clock of the arguments; None while there are members. Pure.

    `left_at` is when the last member left, or when the server began; `found_at` when an agent last asked for it.
    """
    if members:
        return None
    if result:
        return max(left_at + min(AFTER_RESULT_S, linger_s), found_at + min(FOUND_S, linger_s))
    return max(left_at, found_at) + linger_s


class IdleShutdown:
    """Follows the members and the result of a run. `news` also takes text from others, which ends `wait`."""

    def __init__(self, store: Store, run_id: str, linger_s: float, news: SimpleQueue[Any]) -> None:
        self._store = store
        self._prefixes = (f"/elasticrt/{run_id}/members/", f"/elasticrt/{run_id}/result/")
        self._linger_s = linger_s
        self._news = news
        self._watches: list[Watch] = []
        self._keys: set[str] = set()
        self._attended = False  # Whether there has been a member: who has started the server is about to be the first.
        self._read_at = dict.fromkeys(self._prefixes, 0)
        self._left_at = self._found_at = time.monotonic()

    def wait(self) -> str:
        """Return "" when nobody has needed the server for long enough, or the text that somebody put into `news`."""
        while True:
            due = self.due()
            wait_s = LOOK_S if due is None else due - time.monotonic()
            try:
                news = self._news.get(timeout=max(0.0, wait_s))
            except Empty:
                if due is not None:
                    return ""
                self.look()
                continue
            if isinstance(news, str):
                return news
            if isinstance(news, Changes):
                self._replace(self._after(news))
            elif not isinstance(news, Broken):
                self.look()

    def due(self) -> float | None:
        """See `ends_at`."""
        return ends_at(
            members=self._count(self._keys),
            result=any(key.startswith(self._prefixes[1]) for key in self._keys),
            left_at=self._left_at,
            found_at=self._found_at,
            linger_s=self._linger_s if self._attended else max(self._linger_s, FOUND_S),
        )

    def let_them_leave(self) -> bool:
        """End as soon as the last member has left. False when there is none to wait for."""
        self._linger_s = 0.0
        return self.due() is None

    def found(self, ago_s: float) -> None:
        """An agent has asked for the server so many seconds ago: it will be a member soon, or has been one."""
        self._found_at = time.monotonic() - ago_s

    def look(self) -> None:
        """Read everything again and watch from there. When etcd does not answer, it counts as needed for a while."""
        for watch in self._watches:
            watch.cancel()
        self._watches = []
        try:
            snapshots = [self._store.read(prefix) for prefix in self._prefixes]
        except StoreError:
            self.found(0.0)
            return
        self._replace({entry.key for snapshot in snapshots for entry in snapshot.keys})
        for prefix, snapshot in zip(self._prefixes, snapshots, strict=True):
            self._read_at[prefix] = snapshot.revision
            self._watches.append(self._store.watch(prefix, self._news.put, from_revision=snapshot.revision + 1))

    def _after(self, changes: Changes) -> set[str]:
        keys = set(self._keys)
        for event in changes.events:
            # An earlier watch can have left news in the queue that is older than what was read since.
            if any(event.key.startswith(p) and event.mod_revision > at for p, at in self._read_at.items()):
                (keys.discard if event.value is None else keys.add)(event.key)
        return keys

    def _replace(self, keys: set[str]) -> None:
        if self._count(self._keys) and not self._count(keys):
            self._left_at = time.monotonic()
        self._keys = keys
        self._attended = self._attended or bool(self._count(keys))

    def _count(self, keys: set[str]) -> int:
        return sum(key.startswith(self._prefixes[0]) for key in keys)
