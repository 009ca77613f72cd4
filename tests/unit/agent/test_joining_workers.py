"""Which workers set up beside the training, and which are being ended."""

from __future__ import annotations

from elasticrt.agent.joining import JoiningWorkers
from elasticrt.rendezvous.records import Generation


def _beside() -> JoiningWorkers:
    joining = JoiningWorkers()
    joining.beside = (
        Generation(
            number=3,
            attempt=1,
            nodes=1,
            world_size=2,
            master_address="10.0.0.1",
            master_port=1,
            cause="start",
            kind="start",
            nonce="0" * 16,
            chunks=1,
        ),
        0,
    )
    assert joining.start(3, {0}, now=1.0) == [1, 2]
    return joining


def test_who_is_given_up_is_ended_before_another_is_started() -> None:
    """W08: the place of a newcomer that is ended, perhaps stopped by a signal, is free when its process has ended."""
    joining = _beside()
    joining.give_up({2: 4711}, now=1.5)
    assert (joining.ranks, joining.ending) == ({1}, {2})
    assert joining.start(3, {0}, now=2.0) == []
    assert not joining.ended(2, seated=False), "nobody failed, so there is no delay"
    assert joining.start(3, {0}, now=3.0) == [2]


def test_those_that_may_not_join_are_not_gone_before_they_have_ended() -> None:
    """S16: a node that begins a new life waits for the ends of all that set up in the last one."""
    joining = _beside()
    assert joining.stop()
    assert (joining.ranks, joining.ending, joining.beside) == (set(), {1, 2}, None)
    assert not joining.stop()


def test_who_fails_before_its_first_step_waits_longer_each_time() -> None:
    """W09: while it sets up, or once it is let in: else the others are held up all the time. A step ends the delay."""
    joining = _beside()
    assert joining.ended(1, seated=False)
    assert joining.failed(now=2.0) == 1.0
    assert joining.ended(2, seated=False)
    assert joining.failed(now=2.5) == 0.5, "of workers that were started together all are tried again together"
    assert joining.start(3, {0}, now=2.9) == []
    assert joining.start(3, {0}, now=3.0) == [1, 2]
    joining.ranks.discard(2)
    assert joining.failed(now=3.5) == 2.0
    waits = []
    now = 5.5
    for _ in range(2_000):
        joining.start(3, {0}, now)
        waits.append(joining.failed(now))
        now += waits[-1]
    assert waits[:5] == [4.0, 8.0, 16.0, 32.0, 60.0]
    assert set(waits[4:]) == {60.0}
    joining.start(3, {0}, now)
    joining.let_in({0, 1, 2})
    joining.trained(2)
    joining.trained(0)
    assert joining.ended(1, seated=True), "it has not made a step, so the delay goes on to grow"
    assert joining.failed(now) == 60.0
    assert joining.start(3, {0, 2}, now + 60.0) == [1]
    joining.trained(0)
    joining.let_in({0, 1, 2})
    joining.trained(1)
    assert not joining.ended(1, seated=True)
    assert joining.failed(now) == 1.0
