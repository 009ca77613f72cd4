"""A channel: messages in frames over a unix stream socket, with file descriptors attached where needed.

A frame is a four-byte length and the encoded message. Descriptors travel with the first byte of the frame they belong
to. The reading side takes ownership of them: whoever receives closes.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Sequence

from elasticrt.ipc.messages import FRAME_MAX_BYTES, Message, decode, encode

_LENGTH = struct.Struct("!I")
_FDS_MAX = 16


class ChannelClosed(Exception):  # noqa: N818  It is the ordinary way in which the other side says goodbye.
    """The other side is gone (its process ended, or it closed the channel)."""


class Channel:
    """One end, on `sock`. `send` may be called from several threads if the caller locks; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel and the raw socket for the other side (to be passed on as a descriptor, then closed here)."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(mine), theirs

    @classmethod
    def adopt(cls, fd: int) -> Channel:
        """The channel behind an inherited descriptor `fd`, which becomes close-on-exec. OSError when it is none."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message whole, with `fds`. Raises ChannelClosed when nobody is there to read it."""
        body = encode(message)
        frame = _LENGTH.pack(len(body)) + body
        try:
            sent = socket.send_fds(self._socket, [frame], list(fds)) if fds else self._socket.send(frame)
            self._socket.sendall(frame[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """The next message and the descriptors that came with it; None when `timeout_s` passes first.

        None as timeout waits for ever: only for a process that has nothing else to do and ends when the other side
        does. Raises ChannelClosed at the end of the stream, ValueError on a frame that is none.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._next_frame()
            if message is not None:
                fds, self._fds = self._fds, []
                return message, fds
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], wait_s)[0]:
                return None
            self._read_some()

    def pending(self) -> bool:
        """Whether a whole message is buffered already, so that `select` on the socket would miss it."""
        if len(self._buffer) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._buffer)
        return len(self._buffer) >= _LENGTH.size + int(length)

    def close(self) -> None:
        """Close this end and any descriptors that were received but never taken."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._socket.close()

    def _next_frame(self) -> Message | None:
        if not self.pending():
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        return decode(body)

    def _read_some(self) -> None:
        # Never more than the frame at hand: a frame without descriptors that is read together with the next one would
        # be handed that one's descriptors. (The kernel ends a recvmsg after descriptors, not before them.)
        wanted = _LENGTH.size - len(self._buffer)
        if wanted <= 0:
            wanted = _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0]) - len(self._buffer)
        try:
            ancillary_size = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
            flags = socket.MSG_CMSG_CLOEXEC
            data, ancillary, _flags, _ = self._socket.recvmsg(min(wanted, 1 << 16), ancillary_size, flags)
        except ConnectionResetError as error:
            raise ChannelClosed(str(error)) from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if not data:
            raise ChannelClosed("end of stream")
        self._buffer += data
        if len(self._buffer) >= _LENGTH.size and _LENGTH.unpack_from(self._buffer)[0] > FRAME_MAX_BYTES:
            raise ValueError("a frame larger than any message")
