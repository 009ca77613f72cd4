"""Descriptors arrive with the frame that they were sent with, whatever waits before and after it."""

from __future__ import annotations

import os

from elasticrt.contract.channel import Channel
from elasticrt.contract.messages import Signal, Start, decode, encode


def test_descriptors_stay_with_their_frame():
    """A frame without descriptors, one with two, a large one with one and one without, all sent before any is read."""
    sender, raw = Channel.pair()
    receiver = Channel(raw)
    pipes = [os.pipe() for _ in range(2)]
    sent = [end for pipe in pipes for end in pipe]
    small = Start(1, 0, ["x"], False, {}, "/", ["stdout", "stderr"])
    large = Start(1, 1, ["x"], False, {"LONG": "y" * 100_000}, "/", ["stdout"])
    plain = Signal(1, 9, sessions=True)
    try:
        for message, fds in ((plain, []), (small, sent[:2]), (plain, []), (large, sent[2:3]), (plain, [])):
            sender.send(message, fds)
        received = [receiver.receive(5.0) for _ in range(5)]
    finally:
        for fd in sent:
            os.close(fd)
    assert [each and (each[0], len(each[1])) for each in received] == [
        (plain, 0),
        (small, 2),
        (plain, 0),
        (large, 1),
        (plain, 0),
    ]
    for each in received:
        assert each is not None
        for fd in each[1]:
            os.close(fd)
    sender.close()
    receiver.close()


def test_the_largest_environment_fits_a_frame():
    """The kernel takes 6 MiB of arguments and environment: even in the characters that grow most they are one frame."""
    start = Start(1, 0, ["x"], False, {f"V{n}": "\x01" * 2**17 for n in range(48)}, "/", [])
    assert decode(encode(start)) == start
