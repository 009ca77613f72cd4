"""Output whose reader does not read."""

from __future__ import annotations

import os
import termios
import threading

import pytest

from elasticrt.ipc import std_streams


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nothing is known of any descriptor, and a reader gets less time."""
    monkeypatch.setattr(std_streams, "_ways", {})
    monkeypatch.setattr(std_streams, "_unread", {})
    monkeypatch.setattr(std_streams, "READER_S_MAX", 0.05)
    yield
    for fd, way in std_streams._ways.items():
        if fd != way:
            os.close(way)


def read_all(fd: int) -> bytes:
    """What there is to read."""
    os.set_blocking(fd, False)
    found = b""
    try:
        while piece := os.read(fd, 1 << 16):
            found += piece
    except BlockingIOError:
        pass
    return found


def test_a_pipe_that_nobody_reads():
    """Writing to a full pipe ends, and what is read later says how many lines are missing."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        std_streams.hurry([writer])
        for _ in range(3):
            assert std_streams.write(stream, 100_000 * "x" + "\n")
        assert set(read_all(reader)) == set(b"x")
        assert std_streams.write(stream, "y\n")
        assert std_streams.write(stream, "z\n")
        assert read_all(reader) == b"\n[elasticrt: 3 lines are missing here: the output was not read]\ny\nz\n"
    os.close(reader)


def test_a_terminal_that_is_stopped():
    """Ctrl-S stops the terminal, and not who writes to it; Ctrl-Q shows what comes from then on."""
    reader, writer = os.openpty()
    termios.tcflow(writer, termios.TCOOFF)
    std_streams.hurry([writer])
    std_streams.put(writer, b"a\nb\n")
    termios.tcflow(writer, termios.TCOON)
    std_streams.put(writer, b"c\n")
    assert read_all(reader).split(b"\r\n") == [
        b"",
        b"[elasticrt: 2 lines are missing here: the output was not read]",
        b"c",
        b"",
    ]
    os.close(reader)
    os.close(writer)


def test_a_reader_that_is_slow():
    """Nothing is dropped for a reader that reads."""
    reader, writer = os.pipe()
    std_streams.hurry([writer])
    found = bytearray()

    def read() -> None:
        while piece := os.read(reader, 1 << 12):
            found.extend(piece)

    reading = threading.Thread(target=read)
    reading.start()
    text = b"".join(b"%d\n" % number for number in range(100_000))
    std_streams.put(writer, text)
    os.close(std_streams._ways.pop(writer))
    os.close(writer)
    reading.join(60)
    os.close(reader)
    assert found == text


def test_a_reader_that_has_ended():
    """A closed pipe is an error, as without haste."""
    reader, writer = os.pipe()
    std_streams.hurry([writer])
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        assert not std_streams.write(stream, "x\n")
        assert not std_streams.has_reader(stream)
        assert std_streams.write(stream, "y\n")  # To /dev/null.
