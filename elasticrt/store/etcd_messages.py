"""Converts between `protocol`'s values and etcd's messages. No I/O."""

from __future__ import annotations

from typing import Any

from elasticrt.store import proto
from elasticrt.store.protocol import Compare, Event, KeyValue, Put, RangeRead, Txn


def key_range(range_: str) -> tuple[bytes, bytes]:
    """The `key` and `range_end` of a request. The end of a prefix is its successor of the same length."""
    key = range_.encode()
    return key, key[:-1] + bytes([ord("/") + 1]) if range_.endswith("/") else b""


def range_request(range_: str, *, limit: int = 0, by_create: bool = False) -> Any:
    """The request for a linearizable read."""
    key, end = key_range(range_)
    order, target = ("ASCEND", "CREATE") if by_create else ("NONE", "KEY")
    return proto.RangeRequest(
        key=key,
        range_end=end,
        limit=limit,
        sort_order=proto.RangeRequest.SortOrder.Value(order),
        sort_target=proto.RangeRequest.SortTarget.Value(target),
    )


def txn_request(txn: Txn) -> Any:
    """The request for a transaction. Its failure branch is empty."""
    return proto.TxnRequest(
        compare=[_compare(compare) for compare in txn.compares],
        success=[_operation(operation) for operation in txn.operations],
    )


def watch_request(range_: str, watch_id: int, start_revision: int) -> Any:
    """The request to start a watch with our own `watch_id`."""
    key, end = key_range(range_)
    create = proto.WatchCreateRequest(key=key, range_end=end, start_revision=start_revision, watch_id=watch_id)
    return proto.WatchRequest(create_request=create)


def cancel_request(watch_id: int) -> Any:
    """The request to end a watch."""
    return proto.WatchRequest(cancel_request=proto.WatchCancelRequest(watch_id=watch_id))


def key_value(kv: Any) -> KeyValue:
    """One key as stored. The name of a foreign key may be no UTF-8; our own names are."""
    return KeyValue(kv.key.decode(errors="replace"), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def event(message: Any) -> Event:
    """One change."""
    is_deletion = message.type == proto.Event.EventType.Value("DELETE")
    return Event(
        message.kv.key.decode(errors="replace"), None if is_deletion else key_value(message.kv), message.kv.mod_revision
    )


def snapshot(response: Any) -> RangeRead:
    """The answer to a `range_request`."""
    keys = tuple(key_value(kv) for kv in response.kvs)
    return RangeRead(keys, response.header.revision, store_id(response.header))


def store_id(header: Any) -> str:
    """The identity of the store that answered: etcd's cluster id in hex."""
    return f"{header.cluster_id:x}"


def _compare(compare: Compare) -> Any:
    target = proto.Compare.CompareTarget.Value(compare.target.upper())
    # The default of `result` is "equal".
    message = proto.Compare(key=compare.key.encode(), target=target)
    setattr(message, compare.target + ("_revision" if compare.target in ("create", "mod") else ""), compare.expected)
    return message


def _operation(operation: Any) -> Any:
    if isinstance(operation, Put):
        put = proto.PutRequest(key=operation.key.encode(), value=operation.value, lease=operation.lease)
        return proto.RequestOp(request_put=put)
    key, end = key_range(operation.key)
    return proto.RequestOp(request_delete_range=proto.DeleteRangeRequest(key=key, range_end=end))
