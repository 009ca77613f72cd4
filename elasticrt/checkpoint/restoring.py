"""Restores the state, by all ranks together: from the run's memory copy, or from the best checkpoint on disk.

Rank 0 says where the run resumes. One rank of each node offers the best checkpoint of its own directory, and every rank
chooses the same offer (`newest_offer`). So nodes need no shared directory, and cannot disagree. The chosen rank
verifies and parses its file before it sends a byte of it. If the file is damaged, that rank offers its next best one.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elasticrt.checkpoint import memory_tier
from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory, parse
from elasticrt.checkpoint.commits import DirectoryHead
from elasticrt.checkpoint.manifest import History, Manifest
from elasticrt.checkpoint.newest_offer import BEYOND, OLDER, RESUME, Offer, choose, distinct_troubles
from elasticrt.checkpoint.stateful import LOOP_KEY
from elasticrt.data.durable_files import Unfit
from elasticrt.distributed import collectives
from elasticrt.distributed.shared_payload import Payload, share_payload
from elasticrt.errors import CheckpointError, ElasticError, RankZeroCheckpointError, explain
from elasticrt.ipc.env import Commit, Copy
from elasticrt.ipc.std_streams import say

_log = logging.getLogger(__name__)

EVENTS_TAIL_BYTES = 1 << 20
"""How much of each event file is searched for the newest commit."""


@dataclass(frozen=True)
class State:
    """The state that `restore` has found.

    Attributes:
        step: as passed to `save`.
        epoch: as passed to `save`.
        world_size: the number of processes in the generation that saved it.
        run: the id of the run that saved it; "" if the run had no name.
        data: what was saved, with its tensors on the host. `state[name]` reads from it.
        total: the steps that the run had trained by then, over all its checkpoint directories.
    """

    step: int
    epoch: int
    world_size: int
    run: str
    data: dict[str, Any]
    total: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in self.data


def newest_saved(run_dir: Path) -> int:
    """The newest step that an agent's events in a run's directory say was committed; 0 for none.

    The agents' etcd may have ended since. Only the end of each file is read: commits come often.
    """
    steps = [0]
    for path in run_dir.glob("events-*.jsonl"):
        if not path.is_file():  # Opening a FIFO would wait for a writer.
            continue
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - EVENTS_TAIL_BYTES))
            for line in file:
                with suppress(ValueError, KeyError):  # The first line may be cut.
                    event = json.loads(line)
                    steps += [event["step"]] if event["event"] == "committed" else []
    return max(steps)


class Restoring:
    """One rank's part in the search for the state to resume from.

    Args:
        directory: this rank's checkpoint directory.
        shown: the directory's path as the script gives it, for messages.
        head: the head of the directory, as this process knows it.

    Attributes:
        start: after `run` a name for this start of the training, the same on all ranks.
        found: after `run` the commit that the state descends from, if any.
    """

    def __init__(self, directory: CheckpointDirectory, shown: str, head: DirectoryHead) -> None:
        self._directory = directory
        self._shown = shown
        self._head = head
        self._worker = head.worker
        self._rank, _ = collectives.rank_and_world()
        self._resume: Commit | None = None  # The commit that rank 0 says to resume from; None if it knows none.
        self._candidates: Iterator[tuple[int, Manifest]] = iter(())  # What this rank could send after `_best`.
        self._best: tuple[int, Manifest] | None = None  # What this rank offers, after its kind (`newest_offer`).
        self._marked = False  # Whether this rank's directory has commits, usable or not, as far as is known.
        self._troubles: list[str] = []  # What is wrong with files in this rank's directory.
        self.start = ""
        self.found: Commit | None = None

    def run(self, *, claim: bool, fresh: bool) -> State | None:
        """Find the state; None: begin at the beginning. Collective.

        Args:
            claim: take the directory for saving.
            fresh: start over.

        Raises as `Checkpointer.restore`; with `claim` also DuplicateError when another live run saves there.
        """
        collectives.require_group("Checkpointer.restore")
        verdict, failure, payload = dict[str, Any](), None, None
        if self._rank == 0:
            try:
                verdict, payload = self._decide_resume(claim, fresh)
            except ElasticError as error:
                # The other ranks wait in the broadcast below: they must learn of the error before it is raised.
                failure, verdict = error, {"error": str(error)}
        verdict = json.loads(collectives.broadcast_bytes(json.dumps(verdict).encode()))
        if "error" in verdict:
            raise failure or self._unusable_for_all(verdict["error"])
        self.start = verdict["start"]
        self._resume = self.found = None if verdict["resume"] is None else Commit.from_fields(verdict["resume"])
        local_rank = collectives.local_rank_of(0)
        # One rank of each node reads: the others would read the same directory and find the same. Rank 0 always reads,
        # in case it is not its node's local rank 0.
        if 0 in (self._rank, local_rank):
            self._read_directory()
        if verdict["copy"] is None and not verdict["over"]:
            return self._from_disk(claim)
        # Nothing is restored from disk, but later saves must be numbered above all that any rank knows.
        self._exchange()
        return None if verdict["over"] else _from_memory(Copy(**verdict["copy"]), payload)

    def _decide_resume(self, claim: bool, fresh: bool) -> tuple[dict[str, Any], Payload | None]:
        """On rank 0: where this directory resumes, as fields for all ranks, and the memory copy if there is one."""
        if claim:
            try:
                self._directory.claim(self._head.take)
            except OSError as error:
                # At the beginning of a run, ending costs no step. Later, training goes on without saving.
                if self._worker.resume_step == 0:
                    raise self._directory.unusable(error) from error
                _log.warning("nothing can be saved in %s now, each save tries again: %s", self._shown, error)
        resume = self._head.resume_point()
        copy = self._copy(resume)
        # The user's wish to start over holds for the first start of a run. A restart must not lose what the run has
        # saved since.
        wished = fresh or os.environ.get("ELASTICRT_FRESH") == "1"
        over = wished and collectives.launched("TORCHELASTIC_RESTART_COUNT", 0) == 0
        verdict = {
            "start": secrets.token_hex(8),
            "resume": None if resume is None else asdict(resume),
            "copy": None if copy is None else asdict(copy),
            "over": resume is None and copy is None and over,
        }
        return verdict, None if copy is None else memory_tier.read(self._worker)

    def _copy(self, resume: Commit | None) -> Copy | None:
        """The memory copy that this directory resumes from; None if the run resumes from a checkpoint, or elsewhere."""
        worker = self._worker
        if worker.copy is None or worker.copy.place not in ("", self._head.place):
            return None
        # This process has restored the directory before, and its training has gone on from there.
        if not self._head.knows_nothing:
            return None
        # The copy is not newer than this directory's own head. It was only newer than the run's head, which is another
        # directory's commit.
        if resume is not None and resume != worker.resume and worker.copy.step <= resume.reached:
            return None
        return worker.copy

    def _from_disk(self, claim: bool) -> State | None:
        """The best state that any rank has on disk. Rank 0 reports it, and makes its commit the head if it is not."""
        while True:
            offers = self._exchange()
            try:
                source = choose(offers, resuming=self._resume is not None)
            except LookupError:
                # All ranks raise the text of rank 0: nodes may name their directories differently.
                text = self._refusal(offers) if self._rank == 0 else ""
                raise self._unusable_for_all(collectives.broadcast_bytes(text.encode()).decode()) from None
            if source is None:
                self._warn(distinct_troubles(offers))
                self._warn_of_lost_checkpoints()
                return None
            offer = offers[source]
            self.found = commit = offer.commit
            assert commit is not None, "only NOTHING has none"
            payload, data = self._verified() if self._rank == source else (None, {})
            payload = share_payload(payload, commit.size, commit.digest, source)
            # The offer has turned out to be damaged. Its rank offers the next best.
            if payload is None:
                continue
            if self._rank != source:
                data = parse(payload)
            if self._rank == 0:
                self._warn(self._all_troubles(offers) if offer.kind == OLDER else distinct_troubles(offers))
                self._report(commit, offer.run, offer.who if source else "")
                self._make_head(commit, of_loop=claim)
            return State(commit.step, commit.epoch, offer.world_size, offer.run, data, commit.reached)

    def _unusable_for_all(self, text: str) -> CheckpointError:
        """The error that all ranks raise, with the `text` of rank 0."""
        return RankZeroCheckpointError(text) if self._rank else CheckpointError(text)

    def _exchange(self) -> list[Offer]:
        """The offers of all ranks, by rank. Collective.

        This rank's next commit will have a serial number above all that any rank knows.
        """
        mine = Offer(
            marked=self._marked,
            highest=max(self._directory.serial, 0 if self._resume is None else self._resume.serial),
            who=f"node {self._worker.node}" if self._worker.has_agent else f"rank {self._rank}",
            troubles=self._troubles,
        )
        if self._best is not None:
            kind, best = self._best
            mine = replace(mine, kind=kind, commit=best.commit, run=best.run, world_size=best.world_size)
        offers = [Offer.from_json(each) for each in collectives.gather_bytes(mine.to_json())]
        self._directory.serial = max(self._directory.serial, *(offer.highest for offer in offers))
        return offers

    # This rank's directory.

    def _read_directory(self) -> None:
        """List what this rank could send.

        A directory that can't be read counts as one that has commits: otherwise the run could start over beside them.
        """
        try:
            if not self._directory.open(create=False):
                return
            history = self._directory.history()
        except (CheckpointError, OSError) as error:
            self._troubles.append(str(error))
            self._marked = True
            return
        self._marked = bool(history.marked)
        # The manifest of the resume point may be missing or damaged: etcd has the same commit.
        point = "" if self._resume is None else self._resume.file
        self._troubles += [each for each in history.troubles if not point or not each.startswith(f"{point}: ")]
        self._candidates = self._usable(history)
        self._best = next(self._candidates, None)

    def _usable(self, history: History) -> Iterator[tuple[int, Manifest]]:
        """The checkpoints to try, in this order, each with its kind (`newest_offer`), whose payloads seem to be here.

        "Seem": a payload is looked at, but not read. What the run has committed after its resume point comes first: an
        etcd that was restored from a backup has forgotten these commits.
        """
        resume, run = self._resume, self._worker.run_id
        ordered = [(OLDER, each) for each in history.candidates()]
        if resume is not None:
            # The commit as etcd has it, not as a file says. The world size is only in the manifest; 0: not known.
            known = history.manifests.get(resume.nonce, Manifest(resume, run, 0))
            point = RESUME, Manifest(resume, run, known.world_size)
            beyond = [(BEYOND, each) for each in history.beyond(resume, run)]
            ordered = [*beyond, point, *((OLDER, each) for each in history.ancestors(resume, run))]
        for kind, manifest in ordered:
            try:
                self._directory.look(manifest.commit)
            except (Unfit, OSError) as error:
                # A resume point without a manifest here was saved by another node. Then nothing is wrong with this
                # directory.
                elsewhere = kind == RESUME and manifest.commit.nonce not in history.marked | history.manifests.keys()
                if not (elsewhere and isinstance(error, FileNotFoundError)):
                    self._troubles.append(f"{manifest.commit.file}: {error}")
            else:
                yield kind, manifest

    def _verified(self) -> tuple[Payload | None, dict[str, Any]]:
        """The payload that this rank offers, and its content. (None, {}) when the payload turns out to be damaged."""
        assert self._best is not None, "it was chosen"
        commit = self._best[1].commit
        try:
            payload = self._directory.payload(commit)
            data = parse(payload)
        except (Unfit, OSError, CheckpointError) as error:
            self._troubles.append(f"{commit.file}: {error}")
            self._best = next(self._candidates, None)
            return None, {}
        try:
            # Only commits are offered. This process's predecessor may have died between commit and mark.
            self._directory.mark(commit)
        except OSError as error:
            # A process that only reads may lack the right to write.
            _log.info("%s could not be marked as committed: %s", commit.file, error)
        return payload, data

    # What rank 0 says and does.

    def _make_head(self, commit: Commit, *, of_loop: bool) -> None:
        """Make `commit` the head again, if it is not.

        Raises RuntimeError when `commit` can't replace the head that was passed over. Memory copies of the state would
        then count as descendants of that head.
        """
        if self._resume is not None and self._resume.nonce == commit.nonce:
            return
        reply = self._head.go_back(commit, beside=self._head.is_beside(of_loop=of_loop))
        if not reply.ok and self._resume is not None:
            raise RuntimeError(f"step {commit.step} could not be recorded as the run's head: {reply.reason}")
        if not reply.ok:
            _log.warning("step %d could not be recorded as the run's head: %s", commit.step, reply.reason)

    def _all_troubles(self, offers: list[Offer]) -> list[str]:
        """What is wrong with the files of all ranks. Also where the resume point is, if no rank has its file."""
        troubles, resume = distinct_troubles(offers), self._resume
        if resume is not None and not any(resume.file in each for each in troubles):
            wrote = f", {resume.node} has written it to {resume.directory}" if resume.node else ""
            troubles.insert(0, f"{resume.file}: no node here has it{wrote}")
        return troubles

    def _warn(self, troubles: list[str]) -> None:
        for trouble in troubles if self._rank == 0 else []:
            _log.warning("skipped in %s: %s", self._shown, trouble)

    def _warn_of_lost_checkpoints(self) -> None:
        """Warn if this run has saved before, and neither etcd nor the directory knows of that."""
        worker = self._worker
        # With a commit in etcd, or of an earlier Loop of this process, an empty directory is a new one of the script's.
        if self._rank == 0 and worker.run_dir and worker.resume is None and not self._head.run.heads:
            saved = newest_saved(Path(worker.run_dir))
            if saved:
                what = "no checkpoint in %s, and this run has saved step %d (events in %s): training begins at step 0"
                _log.warning(what, self._shown, saved, worker.run_dir)

    def _report(self, commit: Commit, run: str, where: str) -> None:
        resume = self._resume
        if resume is None:
            place = f"{self._shown.rstrip('/')}/" + (f" on {where}" if where else "")
            how = self._how_to_start_over()
            say(f"resuming {place} from step {commit.step:,}{f' (run {run})' if run else ''}; {how} starts over")
            return
        if where:
            say(f"step {commit.step:,} comes from the checkpoint directory of {where}")
        if resume.step < commit.step:
            _log.warning(
                "etcd has forgotten what was committed after step %d; going on from step %d: %s",
                *(resume.step, commit.step, commit.file),
            )
        elif resume.nonce != commit.nonce:
            _log.warning("going back from step %d to step %d: %s", resume.step, commit.step, commit.file)

    def _how_to_start_over(self) -> str:
        fresh = "--fresh" if self._resume is None else "--fresh with another --run-id"
        return fresh if self._worker.has_agent else "ELASTICRT_FRESH=1"

    def _refusal(self, offers: list[Offer]) -> str:
        """The error's text when no checkpoint can be used: why the run stops, and what its user can do."""
        resume, found = self._resume, "; ".join(self._all_troubles(offers)) or "nothing"
        expected, ways = "a committed checkpoint that is whole", "Put a good copy back"
        if resume is not None:
            expected = f"the newest, step {resume.step:,}, or one that its manifest shows to be before it, whole"
            ways += f", start {resume.node} together with these nodes" if resume.node else ""
            ways += ", go on from the newest that is here with another --run-id"
        remedy = f"Found: {found}. {ways}, or start over ({self._how_to_start_over()})"
        return explain("no checkpoint can be used", self._shown, expected=expected, remedy=remedy)


def _from_memory(copy: Copy, payload: Payload | None) -> State:
    """The state in the memory copy that rank 0 has read, on all ranks. Collective."""
    payload = share_payload(payload, copy.size, copy.digest)
    assert payload is not None, "rank 0 has read it"
    data = parse(payload)
    ours = data.get(LOOP_KEY)
    # A copy counts the steps of the run. Those of this Loop are in its position.
    step = ours["position"]["steps"] if isinstance(ours, dict) and "position" in ours else copy.step
    return State(step, copy.epoch, copy.world_size, "", data, copy.step)
