"""Sends a payload, which is a state to restore, from one rank to all others, once per machine.

A payload is a memory file (memfd). If each rank of a machine received, verified and kept its own, the machine would pay
for the memory of every copy. So one rank of each machine, the keeper, keeps the payload, and the others map its file.
Ranks count as on one machine if they can open each other's files in /proc.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from elasticrt.distributed import collectives
from elasticrt.errors import explain
from elasticrt.ipc.proc import machine

LARGE_BYTES = 16 * 1024 * 1024
"""A payload up to this size goes to every rank: to agree on keepers, and to make a group of them, takes longer."""

# A payload is broadcast in pieces of this size.
PIECE_BYTES = 16 * 1024 * 1024
# How the links in /proc/PID/fd to our memory files begin.
_NAMES = "/memfd:elasticrt-"


class Payload:
    """A payload in a memory file. The memory lives as long as this object, or a tensor that maps the file.

    Args:
        file: the descriptor of the memory file, which this object closes; None: a new, empty file.

    Attributes:
        file: the descriptor.
        path: the path at which this process can open it.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = os.memfd_create("elasticrt-restored", os.MFD_CLOEXEC) if file is None else file
        self.path = Path(f"/proc/self/fd/{self.file}")

    def __del__(self) -> None:
        os.close(self.file)

    @property
    def size(self) -> int:
        """In bytes."""
        return os.fstat(self.file).st_size

    def mapped(self) -> mmap.mmap:
        """Map the payload's bytes for reading. It must not be empty."""
        return mmap.mmap(self.file, 0, prot=mmap.PROT_READ)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`. Raises MemoryError if there is no room.

        Not OSError, which a caller takes for damage of the file that it reads `data` from. The data may be good.
        """
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self.file, left) :]
        except OSError as error:
            raise MemoryError(f"a state does not fit into memory: {error}") from error

    def flaw(self, size: int, digest: str) -> str:
        """How the payload differs from its promised `size` in bytes and SHA-256 `digest` in hex; "" if it does not."""
        # The size comes first: reading a mapped file behind its end raises SIGBUS.
        if self.size != size or not size:
            return f"got {self.size} bytes; expected {size}"
        with self.mapped() as content:
            found = hashlib.sha256(content).hexdigest()
        return "" if found == digest else f"got SHA-256 {found[:12]}...; expected {digest[:12]}..."


def share_payload(payload: Payload | None, size: int, digest: str, source: int = 0) -> Payload | None:
    """Send the payload of rank `source` to every rank. Collective.

    Returns the verified payload; None on all ranks if `source` has none.

    Args:
        payload: the payload on rank `source`, which has verified it. Ignored on other ranks.
        size: the payload's size in bytes, known to all ranks.
        digest: the payload's SHA-256 in hex, known to all ranks.
        source: the rank that has the payload.

    Raises RuntimeError if the payload is damaged on its way. A CheckpointError would end the run, while the next
    generation may get the payload whole.
    """
    if collectives.alone():
        return payload
    rank = dist.get_rank()
    own = payload if rank == source else Payload()
    # A number for this machine that fits into a signed integer of 64 bits.
    here = int.from_bytes(hashlib.sha256(machine().encode()).digest()[:7], "big")
    places = collectives.gather_numbers([here, os.getpid(), -1 if own is None else own.file])
    if own is None or places[source][2] < 0:
        return None
    first = [machine for machine, *_ in places].index(here)
    keeper = source if places[source][0] == here else first
    keeps = rank == keeper or size <= LARGE_BYTES
    # A rank that may not open the keeper's file (another user, a container) receives a payload of its own.
    found = own if keeps else _opened(*places[keeper][1:]) or own
    _send(own if found is own else None, size, source)
    damage = "" if found is not own or rank == source else found.flaw(size, digest)
    # This is also a barrier: the keeper's file is complete, and the other ranks of its machine may read it.
    whole = all(well for (well,) in collectives.gather_numbers([int(not damage)]))
    if damage:
        remedy = "If it happens again, the memory or the network of this node is bad"
        what = "the state was corrupted on its way to this rank"
        raise RuntimeError(explain(what, f"rank {rank}", got=damage.removeprefix("got "), remedy=remedy))
    if not whole:
        raise RuntimeError(explain("the state was corrupted on its way to another rank", "restore"))
    return found


def _send(own: Payload | None, size: int, source: int) -> None:
    """Broadcast the payload from `source` to the ranks that have an `own` file to receive it into. Collective."""
    receives = collectives.gather_numbers([int(own is not None)])
    ranks = [rank for rank, (each,) in enumerate(receives) if each]
    # `new_group` is collective: also the ranks that stay outside must call it.
    group = dist.new_group(ranks) if 1 < len(ranks) < len(receives) else None
    if own is None or len(ranks) == 1:
        return
    device, room = collectives.device(), bytearray(min(size, PIECE_BYTES))
    sends = dist.get_rank() == source
    with own.mapped() if sends else nullcontext(b"") as content:
        for start in range(0, size, PIECE_BYTES):
            view = memoryview(room)[: min(PIECE_BYTES, size - start)]
            if sends:
                view[:] = content[start : start + len(view)]
            piece = torch.frombuffer(view, dtype=torch.uint8)
            travelling = piece.to(device)
            dist.broadcast(travelling, source, group=group)
            if not sends:
                # This does nothing if both are the same tensor, as without a GPU.
                piece.copy_(travelling)
                own.write(view)
    if group is not None:
        dist.destroy_process_group(group)


def _opened(pid: int, number: int) -> Payload | None:
    """The memory file behind descriptor `number` of process `pid`; None if it cannot be opened, or is none of ours."""
    try:
        found = Payload(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return None
    return found if str(found.path.readlink()).startswith(_NAMES) else None
