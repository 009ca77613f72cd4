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


@dataclass(frozen=True)
class Offer:
    """What a rank could send, as numbers.

    Attributes:
        kind: NOTHING, OLDER, RESUME or BEYOND.
        serial: of the checkpoint offered.
        step: of the checkpoint offered.
        highest: the highest serial number that this rank knows of.
        troubles: `digest_of` what is wrong with its files; 0: nothing.
        marked: 1 where this directory has commits, usable or not.
    """

    kind: int = NOTHING
    serial: int = 0
    step: int = 0
    highest: int = 0
    troubles: int = 0
    marked: int = 0

    def to_numbers(self) -> list[int]:
        """Each of 64 bits with a sign; `Offer(*numbers)` is the reverse."""
        return list(astuple(self))


@dataclass(frozen=True)
class Choice:
    """What to do, and why.

    Attributes:
        what: "take" what `rank` offers; "begin" at the beginning; or "refuse": nothing that was committed can be used.
        why: in words.
        rank: who sends; -1 for nobody.
    """

    what: Literal["take", "begin", "refuse"]
    why: str
    rank: int = -1


def choose(offers: Sequence[Offer], *, resuming: bool) -> Choice:
    """What follows from all ranks' offers. `resuming`: the run says where to resume.

    A resume point that is damaged, or that nobody here has, is passed over for its nearest ancestor that is offered.
    """
    rank, best = max(enumerate(offers), key=lambda each: (each[1].kind, each[1].serial, each[1].step, -each[0]))
    if best.kind != NOTHING:
        words = {OLDER: "the newest here", RESUME: "the resume point", BEYOND: "committed after the resume point"}
        return Choice("take", f"serial number {best.serial}, step {best.step}: {words[best.kind]}", rank)
    if resuming or any(offer.marked for offer in offers):
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
