"""Chooses the checkpoint that all ranks resume from, and decides whether a state adds to what is saved. Pure.

A checkpoint directory may be shared, or local to each node. So one rank of each node offers the best checkpoint that it
has, and all ranks take the best offer. Of equal offers they take that of the lowest rank, which is rank 0 where the
directory is shared. Every rank sees all offers, so all ranks choose alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from elasticrt.ipc.env import Commit

# The kinds of offers, a better one being larger. With a resume point (the commit that the run resumes from): nothing;
# an ancestor of it; the resume point itself; a commit after it, which etcd has forgotten. Without a resume point all
# offers are OLDER, and the newest is the best.
NOTHING, OLDER, RESUME, BEYOND = 0, 1, 2, 3


@dataclass(frozen=True)
class Offer:
    """The best checkpoint that a rank could send, and what the rank has found in its directory.

    Attributes:
        kind: NOTHING, OLDER, RESUME or BEYOND.
        commit: the checkpoint that is offered; None for NOTHING.
        run: the run that wrote the checkpoint.
        world_size: the number of processes in the generation that wrote it.
        marked: whether the rank's directory has commits, usable or not.
        highest: the highest serial number that the rank knows.
        who: the rank, in words.
        troubles: what is wrong with the rank's files.
    """

    kind: int = NOTHING
    commit: Commit | None = None
    run: str = ""
    world_size: int = 0
    marked: bool = False
    highest: int = 0
    who: str = ""
    troubles: Sequence[str] = ()

    @property
    def age(self) -> tuple[int, int]:
        """A value that is larger for a newer checkpoint."""
        return (0, 0) if self.commit is None else (self.commit.serial, self.commit.step)

    def to_json(self) -> bytes:
        """The offer as JSON, for the other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Offer:
        """The offer of another rank of this run."""
        fields = json.loads(text)
        commit = fields.pop("commit")
        return cls(commit=None if commit is None else Commit.from_fields(commit), **fields)


def choose(offers: Sequence[Offer], *, resuming: bool) -> int | None:
    """The rank whose offer all ranks take; None: begin at the beginning.

    If no rank can offer the resume point, its nearest ancestor that is offered is taken.

    Args:
        offers: the offers by rank.
        resuming: whether the run says where to resume.

    Raises LookupError when something was committed, and nothing of that can be used.
    """
    rank, best = max(enumerate(offers), key=lambda each: (each[1].kind, each[1].age, -each[0]))
    if best.kind != NOTHING:
        return rank
    if resuming or any(offer.marked for offer in offers):
        raise LookupError("there are commits, and none of them can be used")
    return None


def adds(step: int, head: Commit | None, *, lacks_head: bool) -> bool:
    """Whether to save a state after `step`: it is newer than the head, or it is the head's and the head's file is lost.

    A head of a later step stays. Only a rank that is lost had finished that step, and the others will do it again.

    Args:
        step: the last step in the state.
        head: the newest commit, if there is one.
        lacks_head: whether the head's file is not in this rank's directory.
    """
    committed = 0 if head is None else head.step
    return step > committed or (lacks_head and step == committed)


def distinct_troubles(offers: Sequence[Offer]) -> list[str]:
    """What is wrong with the files of all ranks, without repetition.

    A trouble that rank 0 has not found itself begins with the first rank that has.
    """
    found: dict[str, str] = {}
    for rank, offer in enumerate(offers):
        for trouble in offer.troubles:
            found.setdefault(trouble, f"{offer.who}: {trouble}" if rank else trouble)
    return list(found.values())
