"""Restoring, by all ranks together: from the copy in memory that the run resumes from, or the best checkpoint on disk.

A rank that has the checkpoint verifies and opens it, and the others get its bytes (`locate`). So nodes need no shared
directory, and can't disagree.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from elasticrt.checkpoint import memory_tier
from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory, duplicate, parse, take_alone
from elasticrt.checkpoint.committer import Committer
from elasticrt.checkpoint.locate import Found, Outcome, Search
from elasticrt.checkpoint.run_directories import RunDirectories
from elasticrt.checkpoint.stateful import OURS
from elasticrt.distributed import agent_client, collectives
from elasticrt.distributed.user_notice import say
from elasticrt.errors import CheckpointError, ElasticError, explain
from elasticrt.ipc.directory_owner import Owner
from elasticrt.ipc.env import Commit, Copy, WorkerEnv
from elasticrt.ipc.messages import Own, Reply

_log = logging.getLogger(__name__)

OWN_TIMEOUT_S = 90.0
TAKEN = "taken: "
"""How an agent's refusal begins where another live run saves to the directory."""


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
        resume: the head of this directory as the run knows it, if it does.
        state: what was found; None: begin at the beginning.
    """

    start: str
    resume: Commit | None
    state: State | None


@dataclass(frozen=True)
class DirectoryHead:
    """What the run says of one checkpoint directory: its head, and whether it may be saved to.

    Attributes:
        archive: the directory.
        worker: who this process is; None without an agent.
        run: what this process knows of all directories of the run.
        shown: the directory's name as in the script.
        place: as in `Commit`.
    """

    archive: CheckpointDirectory
    worker: WorkerEnv | None
    run: RunDirectories
    shown: str
    place: str

    def head(self) -> Commit | None:
        """This directory's head: as this process has made it, the run's resume point, or what etcd says."""
        worker = self.worker
        assert worker is not None, "only a run has heads"
        if self.place in self.run.heads:
            return self.run.heads[self.place]
        if worker.resume is not None and worker.resume.place in ("", self.place):
            return worker.resume
        head = self._ask(take=False).data.get("head")
        return None if head is None else Commit.from_fields(head)

    def take(self) -> Owner | None:
        """Take the directory for this run."""
        if self.worker is None:
            return take_alone(self.archive.path)
        self._ask(take=True)
        return None

    def _ask(self, *, take: bool) -> Reply:
        """What the agent knows of this directory. Raises DuplicateError when another live run saves there."""
        agent = agent_client.agent_link()
        if agent is None:
            return Reply(0, ok=True)
        asked = agent.request(lambda number: Own(number, str(self.archive.path), self.place, take))
        reply = asked.wait(OWN_TIMEOUT_S)
        reason = f"no answer in {OWN_TIMEOUT_S:.0f} s" if reply is None else reply.reason
        if reply is not None and reply.ok:
            return reply
        if reason.startswith(TAKEN):
            raise duplicate(self.archive.path, reason.removeprefix(TAKEN))
        raise RuntimeError(explain("the agent cannot say who saves here", self.shown, got=reason))


class Restoring:
    """One search for the state to go on from.

    Args:
        head: this rank's checkpoint directory, and what the run says of it.
        committer: makes what was found the head where it is not.
    """

    def __init__(self, head: DirectoryHead, committer: Committer) -> None:
        self._worker = head.worker
        self._archive = head.archive
        self._head = head
        self._committer = committer
        self._resume: Commit | None = None

    def run(self, *, claim: bool, fresh: bool) -> Restored:
        """Find the state. With `claim` take the directory for saving; with `fresh` start over. Collective.

        Raises as `Checkpointer.restore`, and DuplicateError with `claim` where another live run saves.
        """
        collectives.require_group("Checkpointer.restore")
        rank, _ = collectives.rank_and_world()
        payload: bytearray | None = None
        failure: ElasticError | None = None
        search: Search | None = None
        verdict: dict[str, Any] = {"start": secrets.token_hex(8)}
        if rank == 0:
            try:
                payload = self._prepare(claim)
                search = Search(self._archive, self._worker, self._resume)
                if payload is None:
                    search.survey()
                else:
                    search.look_around()
            except ElasticError as error:
                failure = error
                verdict = {"error": str(error)}
            else:
                verdict["resume"] = None if self._resume is None else self._resume.to_json()
                verdict["over"] = self._resume is None and _start_over(fresh)
                if payload is not None and self._worker is not None and self._worker.copy is not None:
                    verdict["copy"] = asdict(self._worker.copy)
        verdict = json.loads(bytes(collectives.broadcast_bytes(json.dumps(verdict).encode())))
        if "error" in verdict:
            raise failure if failure is not None else CheckpointError(verdict["error"])
        self._resume = None if verdict["resume"] is None else Commit.from_json(verdict["resume"])
        if search is None:
            search = Search(self._archive, self._worker, self._resume)
            search.look_around()
        if "copy" in verdict:
            state = _from_memory(search, verdict["copy"], payload)
        elif verdict["over"]:
            search.exchange()
            state = None
        else:
            state = self._from_disk(search)
        return Restored(verdict["start"], self._resume, state)

    def _prepare(self, claim: bool) -> bytearray | None:
        """On rank 0: where this directory goes on, and the copy in memory if that is what it resumes from."""
        worker = self._worker
        if claim:
            self._archive.open(create=True)
            self._archive.claim(self._head.take)
        self._archive.open(create=False)
        if worker is None:
            return None
        self._resume = self._head.head()
        copy = worker.copy
        again = self._head.place in self._head.run.heads  # This process has moved on since.
        if copy is None or copy.place not in ("", self._head.place) or again:
            copy = None
        elif self._resume is not None and self._resume != worker.resume and copy.step <= self._resume.reached:
            copy = None  # Another directory's commit made it look newer than it is.
        if copy is None:
            if self._resume is not None:
                self._committer.resumed(self._resume)
            return None
        payload = memory_tier.read(worker)
        self._committer.descends_from(self._resume)
        return payload

    def _from_disk(self, search: Search) -> State | None:
        """The best that any rank has. Rank 0 says where it goes on, and makes that the head if it is not."""
        outcome = search.run()
        rank, _ = collectives.rank_and_world()
        if outcome.choice.what == "refuse":
            text = self._refusal(outcome) if rank == 0 else ""
            raise CheckpointError(bytes(collectives.broadcast_bytes(text.encode())).decode())
        found = outcome.found
        if rank == 0:
            for trouble in outcome.troubles:
                _log.warning("skipped in %s: %s", self._head.shown, trouble)
            if found is not None:
                self._report(found)
                self._committer.went_to(found.manifest.commit)
        if found is None:
            return None
        data, commit, manifest = found.data, found.manifest.commit, found.manifest
        if data is None:
            data = parse(collectives.intact(found.payload, commit.size, commit.digest))
        return State(commit.step, commit.epoch, manifest.world_size, manifest.run, data, commit.reached)

    def _report(self, found: Found) -> None:
        resume = self._resume
        commit, run = found.manifest.commit, found.manifest.run
        if resume is None:
            place = f"{self._head.shown.rstrip('/')}/" + (f" on {found.where}" if found.where else "")
            how = self._how_to_start_over()
            say(f"resuming {place} from step {commit.step:,}{f' (run {run})' if run else ''}; {how} starts over")
            return
        if found.where:
            say(f"step {commit.step:,} comes from the checkpoint directory of {found.where}")
        if resume.step < commit.step:
            _log.warning(
                "etcd has forgotten what was committed after step %d; going on from step %d: %s",
                *(resume.step, commit.step, commit.file),
            )
        elif resume.nonce != commit.nonce:
            _log.warning("going back from step %d to step %d: %s", resume.step, commit.step, commit.file)

    def _how_to_start_over(self) -> str:
        if self._worker is None:
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
            self._head.shown,
            expected=expected,
            remedy=f"Found: {found}. {ways}, or start over ({self._how_to_start_over()})",
        )


def _from_memory(search: Search, described: dict[str, Any], payload: bytearray | None) -> State:
    """The copy that rank 0 has read, which is `described`, on all ranks, which open it at the same time."""
    search.exchange()
    sent = collectives.broadcast_bytes(b"" if payload is None else payload)
    copy = Copy(**described)
    data = parse(sent if payload is not None else collectives.intact(sent, copy.size, copy.digest))
    ours = data.get(OURS)
    step = ours["position"]["steps"] if isinstance(ours, dict) and "position" in ours else copy.step
    return State(step, copy.epoch, copy.world_size, "", data, copy.step)


def _start_over(fresh: bool) -> bool:
    """Whether the user asked for a fresh start. Only the run's first start is fresh; a restart goes on from its own."""
    return (fresh or os.environ.get("ELASTICRT_FRESH") == "1") and os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", "0"
    ) == "0"
