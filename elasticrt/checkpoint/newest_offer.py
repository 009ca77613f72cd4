"""Who sends the checkpoint that all resume from: chosen by every rank alike, from what each has in its directory. Pure.

Directories may be shared, or local to their nodes. So one rank of each node says what it could send, and the best offer
is taken; with equal ones the lowest rank's, which is rank 0 where the directory is shared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

NOTHING, OLDER, RESUME, BEYOND = 0, 1, 2, 3
"""How good an offer is. With a resume point: none; an ancestor of it; itself; committed after it, which etcd has
forgotten. Without one all that is offered is OLDER: the newest is the best."""


@dataclass(frozen=True)
class Offer:
    """What a rank could send, and what it has seen on the way to it.

    Attributes:
        kind: NOTHING, OLDER, RESUME or BEYOND.
        serial: of the checkpoint offered.
        step: of the checkpoint offered.
        marked: whether this directory has commits, usable or not.
        highest: the highest serial number that this rank knows of.
        who: this rank, in words.
        troubles: what is wrong with its files.
        commit, run, world_size: of the checkpoint offered, the commit as plain values.
    """

    kind: int = NOTHING
    serial: int = 0
    step: int = 0
    marked: bool = False
    highest: int = 0
    who: str = ""
    troubles: Sequence[str] = ()
    commit: dict[str, Any] = field(default_factory=dict)
    run: str = ""
    world_size: int = 0

    def to_json(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Offer:
        """The reverse, of what another rank of this run has made."""
        return cls(**json.loads(text))


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


def told_once(offers: Sequence[Offer]) -> list[str]:
    """What is wrong with all ranks' files: each thing once, with the first that has seen it, unless that is rank 0."""
    told: dict[str, str] = {}
    for rank, offer in enumerate(offers):
        for trouble in offer.troubles:
            told.setdefault(trouble, f"{offer.who}: {trouble}" if rank else trouble)
    return list(told.values())
