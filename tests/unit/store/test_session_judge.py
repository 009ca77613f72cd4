"""The word for a lease, as a table."""

from __future__ import annotations

import pytest

from elasticrt.store.session import judge


@pytest.mark.parametrize(
    ("acked_at", "looked_at", "now", "lost", "expected"),
    [
        # TTL is 6 s throughout, so that two thirds are 4 s.
        (0.0, 0.0, 0.0, False, ("connected", "etcd answers")),
        (0.0, 3.5, 4.0, False, ("connected", "etcd answers")),
        (0.0, 4.0, 4.1, False, ("suspended", "no answer from etcd for 4.1 s")),
        (0.0, 100.0, 100.1, False, ("suspended", "no answer from etcd for 100.1 s")),
        # This process stood still: nothing it knows counts, not even an answer read after it woke up.
        (0.0, 0.0, 6.1, False, ("suspended", "paused for 6.1 s")),
        (10.0, 2.0, 10.0, False, ("suspended", "paused for 8.0 s")),
        # At most one TTL between two looks is the scheduler's, not a pause.
        (10.0, 4.0, 10.0, False, ("connected", "etcd answers")),
        # etcd's own word is final, whatever the clock says.
        (9.9, 9.9, 10.0, True, ("lost", "etcd says that the lease is gone")),
        (0.0, 0.0, 99.0, True, ("lost", "etcd says that the lease is gone")),
    ],
)
def test_judge(acked_at: float, looked_at: float, now: float, lost: bool, expected: tuple[str, str]) -> None:
    """A lease is connected for two thirds of its TTL after the last answer, unless etcd or the clock say otherwise."""
    assert judge(ttl_s=6.0, acked_at=acked_at, looked_at=looked_at, now=now, lost=lost) == expected
