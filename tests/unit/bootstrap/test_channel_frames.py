"""Frames: descriptors arrive with the one that they were sent with, and none is larger than its limit."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct

import pytest

from elasticrt.ipc.channel import Channel
from elasticrt.ipc.messages import FRAME_MAX_BYTES, BuildDone, Signal, Start, decode, encode


def test_descriptors_stay_with_their_frame():
    """A frame without descriptors, one with two, a large one with one and one without, all sent before any is read."""
    sender, raw = Channel.pair()
    receiver = Channel(raw)
    pipes = [os.pipe() for _ in range(2)]
    sent = [end for pipe in pipes for end in pipe]
    small = Start(1, 0, ["x"], "script", {}, "/", ["stdout", "stderr"])
    large = Start(1, 1, ["x"], "script", {"LONG": "y" * 100_000}, "/", ["stdout"])
    plain = Signal(1, 9, [0])
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


def test_a_descriptor_may_have_a_high_number():
    """W01: the channels of a node with some hundred workers are read, and waited for, like all others."""
    sender, raw = Channel.pair()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    try:
        receiver = Channel.adopt(fcntl.fcntl(raw, fcntl.F_DUPFD, 2000))
        assert receiver.receive(0.0) is None
        sender.send(Signal(1, 9, [0]))
        assert receiver.receive(5.0) == (Signal(1, 9, [0]), [])
        receiver.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        raw.close()
        sender.close()


def test_descriptors_of_a_malformed_frame_are_closed():
    """Whoever closes the channel closes what came with a frame that is no message."""
    mine, raw = socket.socketpair()
    receiver, (reader, writer) = Channel(raw), os.pipe()
    socket.send_fds(mine, [struct.pack("!I", 3) + b"abc"], [writer])
    os.close(writer)
    with pytest.raises(ValueError, match="line 1 column 1"):
        receiver.receive(5.0)
    receiver.close()
    assert os.read(reader, 1) == b"", "nobody holds the other end"
    os.close(reader)
    mine.close()


def test_the_largest_environment_fits_a_frame():
    """The kernel takes 6 MiB of arguments and environment: even in the characters that grow most they are one frame."""
    start = Start(1, 0, ["x"], "script", {f"V{n}": "\x01" * 2**17 for n in range(48)}, "/", [])
    assert decode(encode(start)) == start


@pytest.mark.parametrize("more", [0, 1])
def test_no_message_is_larger_than_a_frame(more: int) -> None:
    """At the limit a message is sent; one byte more is refused by who would send it, in words."""
    empty = len(encode(BuildDone(1, "data", "1", "")))
    message = BuildDone(1, "data", "1", "x" * (FRAME_MAX_BYTES - empty + more))
    if more:
        with pytest.raises(ValueError, match=f"a BuildDone message of {FRAME_MAX_BYTES + 1} bytes"):
            encode(message)
    else:
        assert decode(encode(message)) == message


@pytest.mark.parametrize("length", [FRAME_MAX_BYTES + 1, 0xFFFFFFFF])
def test_a_frame_beyond_the_limit_ends_the_reading(length: int) -> None:
    """A length that no message has is nonsense: it is not waited for, and no memory is kept for it."""
    receiver, sender = Channel.pair()
    try:
        sender.sendall(struct.pack("!I", length))
        with pytest.raises(ValueError, match="larger than any message"):
            receiver.receive(20.0)
    finally:
        sender.close()
        receiver.close()


def test_the_largest_frame_is_received() -> None:
    """The limit itself is no nonsense yet."""
    receiver, sender = Channel.pair()
    try:
        sender.sendall(struct.pack("!I", FRAME_MAX_BYTES))
        assert receiver.receive(0.0) is None
        assert receiver.receive(0.0) is None
    finally:
        sender.close()
        receiver.close()
