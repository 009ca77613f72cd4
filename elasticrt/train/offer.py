"""Who sends the checkpoint that all resume from: chosen by every rank alike, from what each has in its directory. Pure.

Directories may be shared, or local to their nodes. So one rank of each node says what it could send, and the best offer
is taken; with equal ones the lowest rank's, which is rank 0 where the directory is shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

NOTHING, OLDER, RESUME, BEYOND = 0, 1, 2, 3
"""How good an offer is. With a resume point: none; an ancestor of it; itself; committed after it, which etcd has
forgotten. Without one all that is offered is OLDER: the newest is the best."""
MARKED, WRITER_SEEN = 1, 2
"""Signs in a directory, added up."""


@dataclass(frozen=True)
class Offer:
    """What a rank could send, as numbers.

    Attributes:
        kind: NOTHING, OLDER, RESUME or BEYOND.
        serial: of the checkpoint offered.
        step: of the checkpoint offered.
        highest: the highest serial number that this rank knows of.
        troubles: `digest_of` what is wrong with its files; 0: nothing.
        signs: MARKED: this directory has commits, usable or not; WRITER_SEEN: the resume point's writer is here, or has
            left a trace in the directory.
    """

    kind: int = NOTHING
    serial: int = 0
    step: int = 0
    highest: int = 0
    troubles: int = 0
    signs: int = 0

    def to_numbers(self) -> list[int]:
        """Each of 64 bits with a sign; `Offer(*numbers)` is the reverse."""
        return list(astuple(self))


@dataclass(frozen=True)
class Choice:
    """What to do, and why.

    Attributes:
        what: "take" what `rank` offers; "begin" at the beginning; or stop: "refuse", because nothing that was committed
            can be used, or "away", because the newest is on a node that is not here.
        why: in words.
        rank: who sends; -1 for nobody.
    """

    what: Literal["take", "begin", "refuse", "away"]
    why: str
    rank: int = -1


def choose(offers: Sequence[Offer], *, resuming: bool) -> Choice:
    """What follows from all ranks' offers. `resuming`: the run says where to resume.

    A resume point that nobody here has is only passed over for its ancestors when it is surely lost: its writer is one
    of us, or this directory has files of that writer, so that it is one that all nodes share.
    """
    rank, best = max(enumerate(offers), key=lambda each: (each[1].kind, each[1].serial, each[1].step, -each[0]))
    if resuming and best.kind < RESUME and not any(offer.signs & WRITER_SEEN for offer in offers):
        return Choice("away", "nobody here has the resume point, or shares a directory with the node that wrote it")
    if best.kind != NOTHING:
        words = {OLDER: "the newest here", RESUME: "the resume point", BEYOND: "committed after the resume point"}
        return Choice("take", f"serial number {best.serial}, step {best.step}: {words[best.kind]}", rank)
    if resuming or any(offer.signs & MARKED for offer in offers):
        return Choice("refuse", "there are commits, and none of them can be used")
    return Choice("begin", "nothing was ever committed")


def digest_of(troubles: Sequence[str]) -> int:
    """64 bits that tell lists of troubles apart; 0 for none."""
    if not troubles:
        return 0
    return int.from_bytes(hashlib.sha256("\n".join(troubles).encode()).digest()[:8], "big", signed=True) or 1


def speakers(offers: Sequence[Offer]) -> list[int]:
    """The ranks that say what is wrong: of those that see the same (in a shared directory, all) only the first."""
    first: dict[int, int] = {}
    for rank, offer in enumerate(offers):
        if offer.troubles:
            first.setdefault(offer.troubles, rank)
    return list(first.values())
