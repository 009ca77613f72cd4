"""Finding what to resume from, by all ranks together: whoever has it sends it.

One rank of each node looks into its own directory, and all tell what they could send. `newest_offer` decides, in every
rank alike. The chosen rank proves and parses its payload before anybody gets a byte; when it can't, it sends nothing,
and its next best is offered in the next round. So there are no more rounds than candidates.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory, parse
from elasticrt.checkpoint.manifest import History, Manifest
from elasticrt.checkpoint.newest_offer import BEYOND, OLDER, RESUME, Choice, Offer, choose, told_once
from elasticrt.data.durable_files import Unfit
from elasticrt.distributed import collectives
from elasticrt.distributed.shared_payload import share_payload
from elasticrt.errors import CheckpointError
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.text import unpacked

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a search has ended, the same on all ranks.

    Attributes:
        choice: the last one: "take" if something was found.
        troubles: what was wrong with whatever was passed over.
        manifest: of what was found; None: nothing was.
        data: what is in it.
        where: who had it, in words; "" for rank 0.
    """

    choice: Choice
    troubles: list[str]
    manifest: Manifest | None = None
    data: dict[str, Any] = field(default_factory=dict)
    where: str = ""


class Search:
    """One rank's part in it.

    Args:
        directory: this rank's.
        worker: who this process is; None without an agent.
        resume: the head of this directory as the run knows it, if it does.
    """

    def __init__(self, directory: CheckpointDirectory, worker: WorkerEnv | None, resume: Commit | None) -> None:
        self._directory = directory
        self._resume = resume
        self._run = "" if worker is None else worker.run_id
        self._rank = collectives.rank_and_world()[0]
        self._name = f"rank {self._rank}" if worker is None else f"node {worker.node}"
        self._left: list[tuple[int, Manifest]] = []
        self._has_resume = self._marked = False
        self._troubles: list[str] = []
        local_rank = os.environ.get("LOCAL_RANK", "0") if worker is None else str(worker.local_rank)
        if self._rank == 0 or local_rank == "0":
            self._look()

    def exchange(self) -> list[Offer]:
        """Everybody's offers, by rank. Collective. What this rank writes next is numbered above all of them."""
        highest = max(self._directory.serial, 0 if self._resume is None else self._resume.serial)
        mine = Offer(marked=self._marked, highest=highest, who=self._name, troubles=self._troubles)
        if self._left:
            kind, manifest = self._left[0]
            commit = manifest.commit
            about = asdict(replace(manifest, about={}))
            mine = replace(mine, kind=kind, serial=commit.serial, step=commit.step, manifest=about)
        offers = [Offer.from_json(each) for each in collectives.gather_bytes(mine.to_json())]
        self._directory.serial = max(self._directory.serial, *(offer.highest for offer in offers))
        return offers

    def run(self) -> Outcome:
        """Find it. Collective. Raises RuntimeError when what is sent does not arrive as it was."""
        while True:
            offers = self.exchange()
            choice = choose(offers, resuming=self._resume is not None)
            _log.debug("%s: %s", choice.what, choice.why)
            if choice.what != "take":
                return Outcome(choice, self._all_troubles(offers, passed_over=choice.what == "refuse"))
            source = offers[choice.rank]
            payload, data = self._proven() if self._rank == choice.rank else (bytearray(), {})
            fields = source.manifest
            manifest = Manifest(Commit.from_fields(fields["commit"]), fields["run"], fields["world_size"])
            sent = share_payload(payload, manifest.commit.size, manifest.commit.digest, choice.rank)
            if not sent:
                continue
            if self._rank != choice.rank:
                data = parse(sent)
            troubles = self._all_troubles(offers, passed_over=source.kind == OLDER)
            return Outcome(choice, troubles, manifest, data, source.who if choice.rank else "")

    def _look(self) -> None:
        """List what this rank could send. A directory that can't be used has something in it, for all that is known."""
        directory = self._directory
        try:
            if not directory.open(create=False):
                return
            history = directory.history()
        except (CheckpointError, OSError) as error:
            self._troubles.append(str(error))
            self._marked = True
            return
        self._troubles += directory.troubles
        self._marked = bool(history.marked)
        self._has_resume = self._resume is not None and self._resume.nonce in history.marked | history.manifests.keys()
        self._left = list(self._candidates(history))
        self._strike_out_missing()

    def _candidates(self, history: History) -> Iterator[tuple[int, Manifest]]:
        """What to try, in this order. Of the resume point counts what etcd records, not what the directory says.

        Ahead of it what the directory has in addition: an etcd that was restored from a backup knows an old head.
        """
        resume = self._resume
        if resume is None:
            yield from ((OLDER, manifest) for manifest in history.candidates())
            return
        known = history.manifests.get(resume.nonce)
        yield from ((BEYOND, manifest) for manifest in history.beyond(resume.nonce, self._run))
        yield RESUME, Manifest(resume, self._run, 0 if known is None else known.world_size)
        yield from ((OLDER, manifest) for manifest in history.lineage(resume.parent))

    def _strike_out_missing(self) -> None:
        """Go on to the next candidate whose payload is here, as far as can be told without reading it."""
        while self._left:
            kind, manifest = self._left[0]
            try:
                self._directory.look(manifest.commit)
            except FileNotFoundError as error:
                # The resume point may be in another node's directory, and nothing is wrong with this one.
                if kind != RESUME or self._has_resume:
                    self._troubles.append(f"{manifest.commit.file}: {error}")
            except (Unfit, OSError) as error:
                self._troubles.append(f"{manifest.commit.file}: {error}")
            else:
                return
            del self._left[0]

    def _proven(self) -> tuple[bytearray, dict[str, Any]]:
        """What this rank offers, and what is in it; nothing when it turns out to be damaged."""
        commit = self._left[0][1].commit
        try:
            payload = self._directory.payload(commit)
            data = parse(payload)
        except (Unfit, OSError, CheckpointError) as error:
            self._troubles.append(f"{commit.file}: {error}")
            del self._left[0]
            self._strike_out_missing()
            return bytearray(), {}
        try:
            self._directory.mark(commit)  # Whatever is offered was committed.
        except OSError as error:  # A reader may lack the right.
            _log.info("%s could not be marked as committed: %s", commit.file, error)
        return payload, data

    def _all_troubles(self, offers: list[Offer], *, passed_over: bool) -> list[str]:
        """What is wrong with all ranks' files, and where the resume point is if it was passed over."""
        troubles, resume = told_once(offers), self._resume
        if passed_over and resume is not None and not any(resume.file in each for each in troubles):
            wrote = f", {resume.node} has written it to {unpacked(resume.directory)}" if resume.node else ""
            troubles.insert(0, f"{resume.file}: no node here has it{wrote}")
        return troubles
