"""All watches of one etcd store, on one stream, with one thread that survives the loss of a server.

When the stream breaks, the thread opens another one (next endpoint, pauses of 50 ms to 1 s). Every watch then goes on
from the revision after the last one that it delivered. A watch that cannot go on ends with a `Resync`, never with
silence: the history was compacted, another store answers, or the server cancelled the watch.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from elasticrt.errors import ElasticError
from elasticrt.store import etcd_messages
from elasticrt.store.connection import Connections, Endpoint, code_and_details, grpc
from elasticrt.store.grpc_errors import ErrorMeaning, judge_error
from elasticrt.store.protocol import Changes, Event, Resync, StoreUnavailable, WatchSink

_logger = logging.getLogger(__name__)

PAUSE_S_MIN = 0.05
"""The pause before the next stream, in seconds, doubles from the first value to the second."""
PAUSE_S_MAX = 1.0


@dataclass(eq=False)
class EtcdWatch:
    """A watch of a range of etcd's keys.

    Attributes:
        watcher: runs the watch.
        number: the watch id by which etcd knows the watch.
        range: the key or prefix.
        sink: gets what the watch delivers.
        next_revision: the first revision that the sink has not seen.
        store_id: the id of the store in which the watch began, "" until it is known.
        logged_in_again: whether a new login was the answer to the last refusal.
    """

    watcher: Watcher
    number: int
    range: str
    sink: WatchSink
    next_revision: int
    store_id: str
    logged_in_again: bool = False

    def request(self) -> Any:
        """The message that starts the watch, one revision early (see `new_events`)."""
        return etcd_messages.watch_request(self.range, self.number, max(1, self.next_revision - 1))

    def new_events(self, messages: Any) -> tuple[Event, ...]:
        """The events that the sink has not seen.

        A watch starts one revision early, and the events of that revision are dropped here. The reason is that a
        compaction keeps no deletion at its own revision: a watch that starts exactly there would skip the deletion
        silently. A watch that starts one revision earlier gets an error.
        """
        return tuple(etcd_messages.event(m) for m in messages if m.kv.mod_revision >= self.next_revision)

    def cancel(self) -> None:
        """See `protocol.Watch`. Cancelling twice is harmless."""
        self.watcher.remove(self)


class Watcher:
    """The watches of one store, at the endpoints of `connections`. Its thread lives from the first watch on."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        # Guards the attributes below. A sink is never called with the lock held: it may cancel its watch.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watches: dict[int, EtcdWatch] = {}
        self._count = 0
        self._thread: threading.Thread | None = None
        # The requests of the stream under way. None: there is no stream, and new watches wait for the next one.
        self._requests: SimpleQueue[Any] | None = None
        # The numbers of the watches that the stream has not answered yet, in the order in which they were sent.
        self._unanswered: deque[int] = deque()
        self._call: Any = None

    def add(self, range_: str, sink: WatchSink, *, from_revision: int) -> EtcdWatch:
        """Start a watch. Never blocks. Raises StoreUnavailable after `close`."""
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailable(f"this client of etcd is closed ({', '.join(self._connections.names)})")
            # Numbers begin at 1: etcd takes the watch id 0 as "choose one for me".
            self._count += 1
            watch = EtcdWatch(self, self._count, range_, sink, from_revision, self._connections.store_id)
            self._watches[watch.number] = watch
            if self._requests is not None:
                self._begin(watch, self._requests)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elasticrt-watch", daemon=True)
                self._thread.start()
        return watch

    def _begin(self, watch: EtcdWatch, requests: SimpleQueue[Any]) -> None:
        """Ask for a watch on the stream that sends `requests`. The lock must be held."""
        requests.put(watch.request())
        self._unanswered.append(watch.number)

    def remove(self, watch: EtcdWatch) -> None:
        """Cancel one watch."""
        with self._lock:
            if self._watches.pop(watch.number, None) is not None and self._requests is not None:
                self._requests.put(etcd_messages.cancel_request(watch.number))

    def close(self) -> None:
        """Cancel all watches and end the thread. Waits for the thread for at most 5 s, and not at all inside a sink."""
        with self._lock:
            self._closed.set()
            self._watches = {}
            call, thread = self._call, self._thread
        if call is not None:
            call.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def _run(self) -> None:
        """Open stream after stream, until `close`."""
        failures = 0
        while not self._closed.is_set():
            failures = 1 if self._run_stream() else failures + 1
            pause_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(failures - 1, 10))
            # Jitter keeps the agents of a run from coming back to a restarted etcd all at once.
            self._closed.wait(pause_s * random.uniform(0.75, 1.0))  # noqa: S311

    def _run_stream(self) -> bool:
        """Run one stream from its start to its end. Returns whether the server answered at all."""
        answered = False
        endpoint: Endpoint | None = None
        try:
            endpoint = self._connections.current()
            endpoint.log_in(self._connections.timeout_s)
            for response in self._open(endpoint):
                answered = True
                self._dispatch(response, endpoint)
        except grpc.RpcError as error:
            assert endpoint is not None, "an RPC needs an endpoint"
            self._note_lost_stream(endpoint, error)
        except ElasticError as error:
            _logger.debug("no watch stream: %s", error)
        finally:
            self._hang_up()
        if endpoint is not None:
            self._connections.move_on_from(endpoint)
        return answered

    def _open(self, endpoint: Endpoint) -> Iterator[Any]:
        """Open a stream for all watches, and yield its responses."""
        requests: SimpleQueue[Any] = SimpleQueue()
        # With `hasleader` an etcd member that lost its quorum ends the stream. Without it the stream would only fall
        # silent.
        metadata = (*endpoint.metadata, ("hasleader", "true"))
        with self._lock:
            # `close` cancels the call that it finds. It would not find this one.
            if self._closed.is_set():
                raise StoreUnavailable("closed")
            self._unanswered.clear()
            for watch in self._watches.values():
                self._begin(watch, requests)
            call = endpoint.watch.Watch(iter(requests.get, None), metadata=metadata)
            self._requests, self._call = requests, call
        yield from call

    def _hang_up(self) -> None:
        """End the stream under way, if there is one."""
        with self._lock:
            requests, self._requests = self._requests, None
        if requests is not None:
            # This ends the thread in which gRPC waits for the next request.
            requests.put(None)
            self._call.cancel()

    def _note_lost_stream(self, endpoint: Endpoint, error: grpc.RpcError) -> None:
        """Draw the consequences of a stream that ended with an error: a new login, or TLS files that are read again."""
        code, details = code_and_details(error)
        _logger.debug("the watch stream of etcd at %s has ended: %s: %s", endpoint.address, code, details)
        meaning = judge_error(code, details)
        if meaning is ErrorMeaning.LOGIN:
            endpoint.log_out(endpoint.metadata)
        elif meaning is ErrorMeaning.UNTRUSTED:
            self._connections.move_on_from(endpoint, redial=True)

    def _dispatch(self, response: Any, endpoint: Endpoint) -> None:
        """Give one response to its watch."""
        with self._lock:
            # From etcd 3.5.9 on a refused watch gets a response without a watch id. But etcd answers new watches in the
            # order in which they were sent.
            number = self._unanswered.popleft() if response.created else response.watch_id
            watch = self._watches.get(number)
        if watch is None:
            # We have cancelled this watch, and etcd still had something to say about it.
            return
        store_id = etcd_messages.store_id(response.header)
        watch.store_id = watch.store_id or store_id
        if store_id != watch.store_id:
            self._end(watch, "replaced")
        elif response.compact_revision:
            self._end(watch, "compacted")
        elif response.canceled:
            self._on_cancelled(watch, response, endpoint)
        elif response.created:
            self._on_created(watch, response)
        else:
            self._on_changes(watch, response)

    def _on_created(self, watch: EtcdWatch, response: Any) -> None:
        """Check that the store is not behind what this watch has seen."""
        # A follower may lag behind a revision that was read at another member. Only a linearizable read proves that
        # revisions went back, as in a store that was restored from a backup or begun anew.
        if response.header.revision < watch.next_revision - 1:
            request = etcd_messages.range_request(watch.range, limit=1)
            header = self._connections.ask("confirm the revision", lambda endpoint: endpoint.kv.Range, request).header
            if header.revision < watch.next_revision - 1 or etcd_messages.store_id(header) != watch.store_id:
                self._end(watch, "replaced")
                return
        watch.logged_in_again = False

    def _on_changes(self, watch: EtcdWatch, response: Any) -> None:
        """Deliver the events that the sink has not seen."""
        events = watch.new_events(response.events)
        if events:
            watch.next_revision = events[-1].mod_revision + 1
            self._deliver(watch, Changes(events, events[-1].mod_revision))

    def _on_cancelled(self, watch: EtcdWatch, response: Any, endpoint: Endpoint) -> None:
        """End a watch that etcd has cancelled, or start it again if its login has expired."""
        reason = response.cancel_reason
        meaning = judge_error("UNKNOWN", reason)
        # To a watch etcd says "permission denied" also when it does not know the token any more.
        refused_login = meaning is ErrorMeaning.LOGIN or "permission denied" in reason
        if meaning is ErrorMeaning.COMPACTED:
            self._end(watch, "compacted")
        elif refused_login and not watch.logged_in_again and endpoint.log_out(endpoint.metadata):
            # This ends the stream, so that all watches start again with a new login. A watch gets only one new login,
            # because the refusal may be meant.
            watch.logged_in_again = True
            raise StoreUnavailable(f"the login at {endpoint.address} has expired")
        else:
            self._end(watch, f"cancelled: {reason or 'no reason given'} (etcd at {endpoint.address})")

    def _end(self, watch: EtcdWatch, reason: str) -> None:
        """Deliver the last notice of a watch, and remove the watch."""
        self._deliver(watch, Resync(reason))
        self.remove(watch)

    def _deliver(self, watch: EtcdWatch, notice: Changes | Resync) -> None:
        # A watch that has been cancelled meanwhile delivers nothing.
        if watch.number in self._watches:
            watch.sink(notice)
