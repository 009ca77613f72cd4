"""Restoring, by all ranks together: from the copy in memory that the run resumes from, or the best checkpoint on disk.

Rank 0 says where the run goes on. A rank that has the checkpoint verifies and opens it, and the others get its bytes
(`locate`), each machine once. So nodes need no shared directory, and can't disagree.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from elasticrt.checkpoint import memory_tier
from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory, parse
from elasticrt.checkpoint.commits import DirectoryHead
from elasticrt.checkpoint.locate import Outcome, Search
from elasticrt.checkpoint.stateful import OURS
from elasticrt.distributed import collectives
from elasticrt.distributed.shared_payload import share_payload
from elasticrt.distributed.user_notice import say
from elasticrt.errors import CheckpointError, ElasticError, explain
from elasticrt.ipc.env import Commit, Copy

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """What `restore` found.

    Attributes:
        step: as passed to `save`.
        epoch: as passed to `save`.
        world_size: of the generation that saved it.
        run: the run that saved it, "" when it had no name.
        data: what was saved, tensors on the host. `state[name]` reads from it.
        total: steps that the run had trained by then, in all its directories.
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


@dataclass(frozen=True)
class Restored:
    """How a search for a state has ended.

    Attributes:
        start: a name for this start of the training, the same on all ranks.
        head: the commit that the state descends from, if any.
        state: what was found; None: begin at the beginning.
    """

    start: str
    head: Commit | None
    state: State | None


class Restoring:
    """One search for the state to go on from.

    Args:
        directory: this rank's checkpoint directory.
        shown: its name as in the script.
        head: what the run says of it.
    """

    def __init__(self, directory: CheckpointDirectory, shown: str, head: DirectoryHead) -> None:
        self._directory = directory
        self._shown = shown
        self._head = head
        self._rank, _ = collectives.rank_and_world()
        self._resume: Commit | None = None

    def run(self, *, claim: bool, fresh: bool) -> Restored:
        """Find the state. With `claim` take the directory for saving; with `fresh` start over. Collective.

        Raises as `Checkpointer.restore`, and DuplicateError with `claim` where another live run saves.
        """
        collectives.require_group("Checkpointer.restore")
        payload, verdict = bytearray(), dict[str, Any]()
        failure: ElasticError | None = None
        if self._rank == 0:
            try:
                verdict, payload = self._verdict(claim, fresh)
            except ElasticError as error:
                failure, verdict = error, {"error": str(error)}
        verdict = json.loads(bytes(collectives.broadcast_bytes(json.dumps(verdict).encode())))
        if "error" in verdict:
            raise failure if failure is not None else CheckpointError(verdict["error"])
        self._resume = None if verdict["resume"] is None else Commit.from_fields(verdict["resume"])
        search = Search(self._directory, self._head.worker, self._resume)
        if verdict["copy"] is not None:
            return Restored(verdict["start"], self._resume, _from_memory(search, Copy(**verdict["copy"]), payload))
        if verdict["over"]:
            search.exchange()
            return Restored(verdict["start"], None, None)
        return self._from_disk(verdict["start"], search.run())

    def _verdict(self, claim: bool, fresh: bool) -> tuple[dict[str, Any], bytearray]:
        """On rank 0: where this directory goes on, and what the copy in memory holds if that is what it resumes from.

        An error of ours that is raised here is every rank's.
        """
        if claim:
            self._directory.claim(self._head.take)
        again = self._head.place in self._head.run.heads  # This process has moved on since it began.
        resume = self._head.resume_point()
        copy = None if again else self._copy(resume)
        worker = self._head.worker
        verdict = {
            "start": secrets.token_hex(8),
            "resume": None if resume is None else asdict(resume),
            "copy": None if copy is None else asdict(copy),
            "over": resume is None and _start_over(fresh),
        }
        return verdict, bytearray() if copy is None or worker is None else memory_tier.read(worker)

    def _copy(self, resume: Commit | None) -> Copy | None:
        """The copy in memory that this directory resumes from, if the run resumes from one, and that is this one's."""
        worker = self._head.worker
        if worker is None or worker.copy is None or worker.copy.place not in ("", self._head.place):
            return None
        if resume is not None and resume != worker.resume and worker.copy.step <= resume.reached:
            return None  # Another directory's commit made it look newer than it is.
        return worker.copy

    def _from_disk(self, start: str, outcome: Outcome) -> Restored:
        """The best that any rank has. Rank 0 says where it goes on, and makes that the head if it is not."""
        if outcome.choice.what == "refuse":
            text = self._refusal(outcome) if self._rank == 0 else ""  # Nodes may call their directories differently.
            raise CheckpointError(bytes(collectives.broadcast_bytes(text.encode())).decode())
        manifest = outcome.manifest
        if self._rank == 0:
            for trouble in outcome.troubles:
                _log.warning("skipped in %s: %s", self._shown, trouble)
            if manifest is not None:
                self._report(outcome, manifest.commit, manifest.run)
                self._make_head(manifest.commit)
        if manifest is None:
            return Restored(start, None, None)
        commit = manifest.commit
        state = State(commit.step, commit.epoch, manifest.world_size, manifest.run, outcome.data, commit.reached)
        return Restored(start, commit, state)

    def _make_head(self, commit: Commit) -> None:
        """Raises RuntimeError when it can't take the place of the head that was passed over: copies in memory would be
        taken for that one's descendants."""
        if self._resume is not None and self._resume.nonce == commit.nonce:
            return
        refusal = self._head.go_back(commit)
        if refusal and self._resume is not None:
            raise RuntimeError(f"step {commit.step} could not be recorded as the run's head: {refusal}")
        if refusal:
            _log.warning("step %d could not be recorded as the run's head: %s", commit.step, refusal)

    def _report(self, outcome: Outcome, commit: Commit, run: str) -> None:
        resume = self._resume
        if resume is None:
            place = f"{self._shown.rstrip('/')}/" + (f" on {outcome.where}" if outcome.where else "")
            how = self._how_to_start_over()
            say(f"resuming {place} from step {commit.step:,}{f' (run {run})' if run else ''}; {how} starts over")
            return
        if outcome.where:
            say(f"step {commit.step:,} comes from the checkpoint directory of {outcome.where}")
        if resume.step < commit.step:
            _log.warning(
                "etcd has forgotten what was committed after step %d; going on from step %d: %s",
                *(resume.step, commit.step, commit.file),
            )
        elif resume.nonce != commit.nonce:
            _log.warning("going back from step %d to step %d: %s", resume.step, commit.step, commit.file)

    def _how_to_start_over(self) -> str:
        if self._head.worker is None:
            return "ELASTICRT_FRESH=1"
        return "--fresh" if self._resume is None else "--fresh with another --run-id"

    def _refusal(self, outcome: Outcome) -> str:
        """Why the run stops here, for whoever has to decide what is to become of it."""
        resume, found = self._resume, "; ".join(outcome.troubles) or "nothing"
        expected, ways = "a committed checkpoint that is whole", "Put a good copy back"
        if resume is not None:
            expected = f"the newest, step {resume.step:,}, or one that its manifest shows to be before it, whole"
            ways += f", start {resume.node} together with these nodes" if resume.node else ""
            ways += ", go on from the newest that is here with another --run-id"
        return explain(
            "no checkpoint can be used",
            self._shown,
            expected=expected,
            remedy=f"Found: {found}. {ways}, or start over ({self._how_to_start_over()})",
        )


def _from_memory(search: Search, copy: Copy, payload: bytearray) -> State:
    """What rank 0 has read of its `copy`, on all ranks, which open it at the same time."""
    search.exchange()
    data = parse(share_payload(payload, copy.size, copy.digest))
    ours = data.get(OURS)
    step = ours["position"]["steps"] if isinstance(ours, dict) and "position" in ours else copy.step
    return State(step, copy.epoch, copy.world_size, "", data, copy.step)


def _start_over(fresh: bool) -> bool:
    """Whether the user asked for a fresh start. Only the run's first start is fresh; a restart goes on from its own."""
    return (fresh or os.environ.get("ELASTICRT_FRESH") == "1") and os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", "0"
    ) == "0"
