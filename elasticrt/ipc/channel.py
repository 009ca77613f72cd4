"""A channel: messages in frames over a unix stream socket, with file descriptors.

A frame is a length of four bytes and the encoded message. Descriptors travel with the first byte of their frame. The
receiver owns them and closes them.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
from collections.abc import Sequence

from elasticrt.ipc.messages import FRAME_MAX_BYTES, Message, decode, encode

_LENGTH = struct.Struct("!I")
# A Start brings six descriptors. The kernel drops those that do not fit into the receiver's buffer.
_FDS_MAX = 16


class ChannelClosed(Exception):  # noqa: N818  It is the ordinary end of a channel.
    """The other side has ended or closed the channel."""


class Channel:
    """One end of a channel, on the socket `sock`. Only one thread at a time may call `send`, and only one `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        # Received with the present frame, which may be incomplete.
        self._fds: list[int] = []

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A new channel, and the socket of its other end, which is passed on as a descriptor and then closed here."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(mine), theirs

    @classmethod
    def adopt(cls, fd: int) -> Channel:
        """The channel on an inherited descriptor `fd`, which becomes close-on-exec. Raises OSError for others."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a whole message with the descriptors `fds`. Raises ChannelClosed if the other side has ended."""
        body = encode(message)
        frame = _LENGTH.pack(len(body)) + body
        try:
            # A send on a stream may take only a part of the frame. The descriptors go with the first part.
            sent = socket.send_fds(self._socket, [frame], list(fds)) if fds else self._socket.send(frame)
            self._socket.sendall(frame[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors; None after `timeout_s` seconds in which nothing has come.

        Without a timeout it waits for ever, which is right only for a process that ends with the other side. Raises
        ChannelClosed at the end of the stream, and ValueError for a malformed frame.
        """
        # Not `select.select`, which takes no descriptor above 1023.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            if self._missing() == 0:
                body = bytes(self._buffer[_LENGTH.size :])
                self._buffer.clear()
                # If decoding fails, `close` closes the descriptors.
                message = decode(body)
                fds, self._fds = self._fds, []
                return message, fds
            if not poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)):
                return None
            self._read_some()

    def close(self) -> None:
        """Close this end, and descriptors that came with an incomplete frame."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._socket.close()

    def _missing(self) -> int:
        """How many bytes of the present frame, or of its length, are missing. Raises ValueError if it is too long."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > FRAME_MAX_BYTES:
            raise ValueError("a frame larger than any message")
        return _LENGTH.size + int(length) - len(self._buffer)

    def _read_some(self) -> None:
        # Read no further than to the end of this frame. Otherwise a frame without descriptors could get those of the
        # next frame, because the kernel ends a recvmsg after descriptors, not before them.
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, min(self._missing(), 1 << 16), _FDS_MAX)
        except ConnectionResetError as error:
            raise ChannelClosed(str(error)) from error
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        if not data:
            raise ChannelClosed("end of stream")
        self._buffer += data
