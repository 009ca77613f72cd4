"""Finding what to resume from, by all ranks together: whoever has it sends it.

One rank of each node looks into its own directory, and all tell what they could send. `offer.choose` decides, in every
rank alike. The chosen rank proves and parses its payload before anybody gets a byte; when it can't, its next best is
offered in the next round. Each round but the last strikes out a candidate, so there are no more rounds than candidates.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory
from elasticrt.checkpoint.manifest import History, Manifest
from elasticrt.checkpoint.newest_offer import BEYOND, NOTHING, OLDER, RESUME, Choice, Offer, choose, digest_of, speakers
from elasticrt.data.durable_files import Unfit
from elasticrt.distributed import collectives
from elasticrt.errors import CheckpointError, explain
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.text import unpacked

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from.

    Attributes:
        manifest: its description.
        payload: its bytes, on every rank.
        data: what is in them, on the rank that had them; None elsewhere.
        where: who had them, in words; "" for rank 0.
    """

    manifest: Manifest
    payload: bytes | bytearray | memoryview
    data: dict[str, Any] | None
    where: str


@dataclass(frozen=True)
class Outcome:
    """How a search has ended, the same on all ranks.

    Attributes:
        choice: the last one: "take" if `found`.
        found: what to resume from, if anything.
        troubles: what was wrong with whatever was passed over.
    """

    choice: Choice
    found: Found | None
    troubles: list[str] = field(default_factory=list)


class Search:
    """One rank's part in it.

    Args:
        archive: this rank's directory.
        worker: who this process is; None without an agent.
        resume: the head of this directory as the run knows it, if it does.
    """

    def __init__(self, archive: CheckpointDirectory, worker: WorkerEnv | None, resume: Commit | None) -> None:
        self._archive = archive
        self._resume = resume
        self._rank = collectives.rank_and_world()[0]
        self._name = f"rank {self._rank}" if worker is None else f"node {worker.node}"
        self._left: list[tuple[int, Manifest]] = []
        self._has_resume = False
        self._troubles: list[str] = []
        self._marked = False
        local_rank = os.environ.get("LOCAL_RANK", "0") if worker is None else str(worker.local_rank)
        self._looks = self._rank == 0 or local_rank == "0"

    def look_around(self) -> None:
        """`survey`, where others may have what is needed: a directory that can't be used is a trouble, no end."""
        if not self._looks:
            return
        try:
            self._archive.open(create=False)
            self.survey()
        except CheckpointError as error:
            self._troubles.append(str(error))

    def survey(self) -> None:
        """List what this rank could send. Raises CheckpointError when its directory can't be read."""
        if not self._archive.is_open:
            return
        try:
            history = self._archive.history()
        except OSError as error:
            raise CheckpointError(
                explain("the checkpoint directory can't be read", str(self._archive.path), got=str(error))
            ) from error
        self._troubles += self._archive.troubles
        self._marked = bool(history.marked)
        if self._resume is not None:
            self._has_resume = self._resume.nonce in history.marked | history.manifests.keys()
        self._left = list(self._candidates(history))
        self._strike_out_missing()

    def exchange(self) -> list[Offer]:
        """Everybody's offers, by rank. Collective. What this rank writes next is numbered above all of them."""
        offers = [Offer(*numbers) for numbers in collectives.gather_numbers(self._offer().to_numbers())]
        self._archive.serial = max(self._archive.serial, *(offer.highest for offer in offers))
        return offers

    def run(self) -> Outcome:
        """Find it. Collective."""
        while True:
            offers = self.exchange()
            choice = choose(offers, resuming=self._resume is not None)
            _log.debug("%s: %s", choice.what, choice.why)
            found = self._take(choice.rank) if choice.what == "take" else None
            if found is not None or choice.what != "take":
                break
        troubles = self._tell(speakers(offers))
        lost = choice.what == "refuse" or (choice.what == "take" and offers[choice.rank].kind == OLDER)
        if self._resume is not None and lost and not any(self._resume.file in each for each in troubles):
            wrote = (
                f", {self._resume.node} has written it to {unpacked(self._resume.directory)}"
                if self._resume.node
                else ""
            )
            troubles.insert(0, f"{self._resume.file}: no node here has it{wrote}")
        return Outcome(choice, found, troubles)

    def _candidates(self, history: History) -> Iterator[tuple[int, Manifest]]:
        if self._resume is None:
            yield from ((OLDER, manifest) for manifest in history.candidates())
            return
        kind = BEYOND
        for manifest in self._archive.lineage_of(self._resume, history):
            if manifest.commit.nonce == self._resume.nonce:
                yield RESUME, manifest
                kind = OLDER
            else:
                yield kind, manifest

    def _strike_out_missing(self) -> None:
        """Go on to the next candidate whose payload is here, as far as can be told without reading it."""
        while self._left:
            kind, manifest = self._left[0]
            try:
                self._archive.look(manifest.commit)
            except FileNotFoundError as error:
                # The resume point may be in another node's directory, and nothing is wrong with this one.
                if kind != RESUME or self._has_resume:
                    self._troubles.append(f"{manifest.commit.file}: {error}")
            except (Unfit, OSError) as error:
                self._troubles.append(f"{manifest.commit.file}: {error}")
            else:
                return
            del self._left[0]

    def _offer(self) -> Offer:
        highest = max(self._archive.serial, 0 if self._resume is None else self._resume.serial)
        common = (highest, digest_of(self._troubles), int(self._marked))
        if not self._left:
            return Offer(NOTHING, 0, 0, *common)
        kind, manifest = self._left[0]
        return Offer(kind, manifest.commit.serial, manifest.commit.step, *common)

    def _take(self, source: int) -> Found | None:
        """What rank `source` offers, on every rank; None when it turns out to be damaged."""
        described, payload, data = b"", bytearray(), None
        if self._rank == source:
            manifest = self._left[0][1]
            try:
                payload, data = self._archive.load(manifest.commit)
            except (Unfit, OSError, CheckpointError) as error:
                self._troubles.append(f"{manifest.commit.file}: {error}")
                del self._left[0]
                self._strike_out_missing()
            else:
                self._mark(manifest.commit)
                told = {"commit": asdict(manifest.commit), "run": manifest.run, "world_size": manifest.world_size}
                described = json.dumps({**told, "where": self._name if source else ""}).encode()
        described = bytes(collectives.broadcast_bytes(described, source))
        if not described:
            return None
        fields = json.loads(described)
        manifest = Manifest(Commit.from_fields(fields["commit"]), fields["run"], fields["world_size"])
        return Found(manifest, collectives.broadcast_bytes(payload, source), data, fields["where"])

    def _mark(self, commit: Commit) -> None:
        """Whatever is offered was committed; without a mark it is only found through its successors."""
        try:
            self._archive.mark(commit)
        except OSError as error:  # A reader may lack the right.
            _log.info("%s could not be marked as committed: %s", commit.file, error)

    def _tell(self, ranks: list[int]) -> list[str]:
        """What is wrong with the files of `ranks`, on every rank: each once, with the first that has seen it."""
        everyones: dict[str, str] = {}
        for rank in ranks:
            mine = json.dumps([self._name, self._troubles]).encode()
            name, troubles = json.loads(bytes(collectives.broadcast_bytes(mine, rank)))
            for trouble in troubles:
                everyones.setdefault(trouble, trouble if rank == 0 else f"{name}: {trouble}")
        return list(everyones.values())
