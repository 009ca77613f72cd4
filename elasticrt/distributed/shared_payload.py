"""A payload from one rank to all others, once per machine: a state that is to be restored.

Ranks that share a machine could each receive it, sum it up and keep it, and pay for the memory of every copy. So of the
ranks that see each other's files the first receives it into a memory file, and the others read it there.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from elasticrt.distributed import collectives
from elasticrt.errors import explain

Payload = bytes | bytearray | memoryview

LARGE_BYTES = 16 * 1024 * 1024
"""A smaller payload goes to every rank: agreeing on who keeps it would take longer."""

PIECE_BYTES = 16 * 1024 * 1024
_NAME = "elasticrt-restored"


class Kept:
    """A payload in a memory file that ranks of one machine share, for as long as this object lives.

    Args:
        file: its descriptor, from now on this object's.

    Attributes:
        path: what it can be opened by, in this process.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self.path = Path(f"/proc/self/fd/{file}")

    def __del__(self) -> None:
        os.close(self._file)


def share_payload(payload: Payload, size: int, digest: str, source: int = 0) -> Payload | Kept:
    """What rank `source` passed in, on every rank, proven to be what it was; empty where that is empty. Collective.

    Args:
        payload: at `source`, which has proven it. Other ranks' is not looked at.
        size: its size in bytes, as all ranks know it.
        digest: its SHA-256 in hex, as all ranks know it.
        source: the rank that has it.

    Raises RuntimeError: what was sent is good, so the next generation may get it whole.
    """
    if collectives.alone():
        return payload
    mine = dist.get_rank() == source
    if size <= LARGE_BYTES:
        sent = collectives.broadcast_bytes(payload, source)
        if sent and not mine:
            _intact(sent, size, digest)
        return sent
    if not collectives.broadcast_bytes(b"1" if payload else b"", source):
        return b""
    with ExitStack() as stack:
        own = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        stack.callback(os.close, own)
        here = _machine()
        told = [tuple(each[1:]) for each in collectives.gather_numbers([here, os.getpid(), own]) if each[0] == here]
        file = own if told[0] == (os.getpid(), own) else _opened(*told[0])
        if file < 0:
            file = own
        elif file != own:
            stack.callback(os.close, file)
        keeps = file == own and not (mine and len(told) == 1)
        _send_to_keepers(payload, size, source, own if keeps else -1, takes_part=keeps or mine)
        damage: RuntimeError | None = None
        if keeps and not mine:
            try:
                with mmap.mmap(own, size, prot=mmap.PROT_READ) as mapped:
                    _intact(mapped, size, digest)
            except RuntimeError as error:
                damage = error
        whole = all(well for (well,) in collectives.gather_numbers([int(damage is None)]))  # And all of it is there.
        if damage is not None or not whole:
            raise damage or RuntimeError(explain("the state has changed on its way to another rank", "restore"))
        return payload if mine else Kept(os.dup(file))


def _send_to_keepers(payload: Payload, size: int, source: int, file: int, *, takes_part: bool) -> None:
    """From `source` to those ranks that take part, each of which appends it to `file` (-1: nowhere)."""
    told = collectives.gather_numbers([int(takes_part)])
    ranks = [rank for rank, (each,) in enumerate(told) if each]
    group = dist.new_group(ranks) if 1 < len(ranks) < len(told) else None  # Of it all ranks must know.
    if not takes_part:
        return
    device, room = collectives.device(), bytearray(PIECE_BYTES)
    for start in range(0, size, PIECE_BYTES):
        view = memoryview(room)[: min(PIECE_BYTES, size - start)]
        if dist.get_rank() == source:
            view[:] = memoryview(payload)[start : start + len(view)]
        if len(ranks) > 1:
            piece = torch.frombuffer(view, dtype=torch.uint8)
            travelling = piece.to(device)
            dist.broadcast(travelling, source, group=group)
            if travelling is not piece:
                piece.copy_(travelling)
        while file >= 0 and view:
            view = view[os.write(file, view) :]
    if group is not None:
        dist.destroy_process_group(group)


def _machine() -> int:
    """A number that is the same for processes that see each other in /proc; one of its own where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        seen = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        seen = secrets.token_hex(16)
    return int.from_bytes(hashlib.sha256(seen.encode()).digest()[:7], "big")


def _opened(pid: int, number: int) -> int:
    """The memory file that process `pid` has under a descriptor's number; -1 where it cannot be had."""
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    if _NAME in os.readlink(f"/proc/self/fd/{file}"):  # noqa: PTH115  Of a descriptor.
        return file
    os.close(file)
    return -1


def _intact(payload: Payload | mmap.mmap, size: int, digest: str) -> None:
    """What has arrived, held against its size and SHA-256 before anybody makes anything of it. Raises RuntimeError."""
    found = hashlib.sha256(payload).hexdigest()
    if len(payload) != size or found != digest:
        raise RuntimeError(
            explain(
                "the state has changed on its way to this rank",
                f"rank {dist.get_rank()}",
                got=f"{len(payload)} bytes with SHA-256 {found[:12]}...",
                expected=f"{size} bytes with SHA-256 {digest[:12]}...",
                remedy="If it happens again, the memory or the network of this node is bad",
            )
        )
