"""Which rank sends the checkpoint that all resume from, and which state adds to what is saved. Pure.

Every rank decides alike, from what each has on disk.
Directories may be shared, or local to their nodes. So one rank of each node offers the best checkpoint that it has, and
all take the best offer; of equal ones the lowest rank's, which is rank 0 where the directory is shared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from elasticrt.ipc.env import Commit

# How good an offer is. With a resume point: none; an ancestor of it; itself; committed after it and forgotten by etcd.
# Without a resume point all offers are OLDER, and the newest is the best.
NOTHING, OLDER, RESUME, BEYOND = 0, 1, 2, 3


@dataclass(frozen=True)
class Offer:
    """What a rank could send, and what it has found on the way to it."""

    kind: int = NOTHING  # NOTHING, OLDER, RESUME or BEYOND.
    commit: Commit | None = None  # The checkpoint offered; None for NOTHING.
    run: str = ""  # The run that wrote it.
    world_size: int = 0  # Of the generation that wrote it.
    marked: bool = False  # Whether this directory has commits, usable or not.
    highest: int = 0  # The highest serial number that this rank knows.
    who: str = ""  # This rank, in words.
    troubles: Sequence[str] = ()  # What is wrong with its files.

    @property
    def age(self) -> tuple[int, int]:
        """Larger for a newer checkpoint."""
        return (0, 0) if self.commit is None else (self.commit.serial, self.commit.step)

    def to_json(self) -> bytes:
        """For the other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Offer:
        """The offer of another rank of this run."""
        fields = json.loads(text)
        commit = fields.pop("commit")
        return cls(commit=None if commit is None else Commit.from_fields(commit), **fields)


def choose(offers: Sequence[Offer], *, resuming: bool) -> int | None:
    """The rank whose offer all take; None: begin at the beginning. `resuming`: the run says where to resume.

    Where the resume point is damaged or missing, its nearest ancestor that is offered is taken. Raises LookupError when
    something was committed, and nothing of it can be used.
    """
    rank, best = max(enumerate(offers), key=lambda each: (each[1].kind, each[1].age, -each[0]))
    if best.kind != NOTHING:
        return rank
    if resuming or any(offer.marked for offer in offers):
        raise LookupError("there are commits, and none of them can be used")
    return None


def adds(step: int, head: Commit | None, *, lacks_head: bool) -> bool:
    """Whether a state that waits after `step` adds to what is saved: it is newer than the head, or that is not here.

    A head of a later step stays: only a rank that is lost had finished that step, and the others will do it again.
    """
    committed = 0 if head is None else head.step
    return step > committed or (lacks_head and step == committed)


def distinct_troubles(offers: Sequence[Offer]) -> list[str]:
    """What is wrong with the files of all ranks, each once, with the first rank that found it unless that is rank 0."""
    found: dict[str, str] = {}
    for rank, offer in enumerate(offers):
        for trouble in offer.troubles:
            found.setdefault(trouble, f"{offer.who}: {trouble}" if rank else trouble)
    return list(found.values())
