"""The heads of a run's checkpoint directories, as this process knows them, and the requests for new commits.

A head is the newest commit of a directory. A run may have several directories: training before fine-tuning, folds,
trials of a search. Each has a head of its own in etcd. The run's head is the newest of these, and every commit replaces
it. Checkpoints that a script saves beside its Loop (`Checkpointer.save`) never become the run's head, because the run
cannot resume from them. Steps of different loops can't be compared, so the run counts the steps of all its loops
together, beginning with those of the restored state. Without an agent every save is a commit at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from elasticrt.checkpoint.checkpoint_dir import duplicate, take_alone
from elasticrt.distributed import agent_client
from elasticrt.errors import explain
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.ipc.messages import ERRNO, OpenDirectory, Reply, Request, Save

_log = logging.getLogger(__name__)

# Seconds. An agent does not live without etcd for as long, so one that has not answered by then never will.
COMMIT_TIMEOUT_S = 1200.0
# The pause, in seconds, between two requests while etcd does not answer.
ASK_AGAIN_S = 1.0


class NoAnswer(RuntimeError):  # noqa: N818  Not an error of the user's or of ours.
    """The agent has no answer, because etcd does not answer."""


def place_of(directory: str, node: str) -> str:
    """16 hex digits that identify a checkpoint directory within the run, the same on all nodes. Pure.

    Args:
        directory: the path as the script gives it.
        node: the name of this node; "" without an agent.
    """
    # Each node may have a directory of its own, with the node's name in the path. A star takes the name's place.
    name = os.path.normpath(directory)
    if node:
        name = re.sub(rf"(?<![A-Za-z0-9]){re.escape(node)}(?![A-Za-z0-9])", "*", name)
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


@dataclass
class RunHeads:
    """What this process knows of the checkpoints of its run.

    Attributes:
        newest: the nonce of the run's newest commit; "" for none.
        heads: by place, the commit that the state of that directory's loop descends from; None for a state that began
            at the beginning. Only directories that this process has restored from or saved to are in it.
        total: the steps that the run has trained, over all its loops.
        has_loop: whether a Loop counts `total`. If not, it is the step of the newest save.
        committing: held while a commit is under way.
    """

    newest: str = ""
    heads: dict[str, Commit | None] = field(default_factory=dict)
    total: int = 0
    has_loop: bool = False
    # Each commit names the one that it replaces, so two at once would refuse each other.
    committing: threading.Lock = field(default_factory=threading.Lock)


# By the nonce of the generation. All checkpointers of this process share the one entry.
_runs: dict[str, RunHeads] = {}


def run_of(worker: WorkerEnv) -> RunHeads:
    """What this process knows of its run; without an agent, of the training in this process."""
    if worker.nonce not in _runs:
        _runs[worker.nonce] = RunHeads("" if worker.resume is None else worker.resume.nonce)
    return _runs[worker.nonce]


class DirectoryHead:
    """The head of one checkpoint directory, and the requests to the agent about it.

    Args:
        worker: this process's seat.
        directory: the directory's path as the script gives it.

    Attributes:
        worker: the seat of the last `move`.
        place: identifies the directory within the run, as in `Commit`.
        run: what this process knows of all directories of the run.
    """

    def __init__(self, worker: WorkerEnv, directory: str) -> None:
        self.worker = worker
        self.place = place_of(directory, worker.node)
        self.run = run_of(worker)
        self._agent = agent_client.agent_link()
        self._shown = directory
        self._path = Path(directory).absolute()

    @property
    def known(self) -> Commit | None:
        """The commit that the state descends from; None at the beginning of a history, and before a restore."""
        return self.run.heads.get(self.place)

    @property
    def knows_nothing(self) -> bool:
        """Whether this process has neither restored from this directory nor saved to it."""
        return self.place not in self.run.heads

    def resume_point(self) -> Commit | None:
        """The commit to resume from in this directory; None without an agent, or if there is none.

        It is the commit that this process has come to by itself; else the one that the run resumes from, if that is in
        this directory; else the directory's head in etcd.
        """
        if not self.worker.has_agent:
            return None
        if not self.knows_nothing:
            return self.known
        if self.worker.resume is not None and self.worker.resume.place in ("", self.place):
            return self.worker.resume
        return self._ask(take=False)

    def take(self, *, patient: bool = True, adopts: bool = False) -> None:
        """Take the directory for this run; without an agent, for this process.

        Args:
            patient: wait while etcd does not answer.
            adopts: continue the history that the run has saved here, also if this process has not restored it.

        Raises DuplicateError when another live run saves there, NoAnswer when the agent can't say, OSError.
        """
        if not self.worker.has_agent:
            take_alone(self._path)
        else:
            head = self._ask(take=True, patient=patient)
            # Another node's rank 0 may have saved here since this process knew the head.
            if head is not None and (adopts or not self.knows_nothing):
                self.run.heads[self.place] = head

    def move(self, worker: WorkerEnv) -> None:
        """Go on as `worker` in another generation, which says which commit is the run's newest."""
        self.worker, resume = worker, worker.resume
        self.run.newest = "" if resume is None else resume.nonce
        if resume is not None and resume.place in ("", self.place):
            self.run.heads[self.place] = resume
        self.run.heads.setdefault(self.place, None)
        _runs.clear()
        _runs[worker.nonce] = self.run

    def is_beside(self, *, of_loop: bool) -> bool:
        """Whether a save is beside the run's history: a Loop saves the run, and this save is not `of_loop`."""
        return self.run.has_loop and not of_loop

    def go_back(self, commit: Commit, *, beside: bool) -> Reply:
        """Make an older commit, which was restored, the head again.

        Args:
            commit: the older commit.
            beside: change the head of the directory only, not that of the run.
        """
        generation = self.worker.generation if self.worker.has_agent else commit.generation
        back = replace(commit, place=self.place, generation=generation)
        return self._replace(back, descends=True, beside=beside)

    def commit(self, commit: Commit, *, beside: bool, last: bool) -> Reply:
        """Ask the agent to replace the known head by `commit`.

        Args:
            commit: the new head. Its files are durable.
            beside: replace the head of the directory only, not that of the run.
            last: no other save follows, so wait while etcd takes no writes.

        Raises NoAnswer when the agent does not answer. The outcome is then unknown, and later commits, which name the
        old head, would be refused.
        """
        # A state whose history is unknown may only begin a history. The agent refuses it if there is a head.
        unknown = self.knows_nothing
        reply = self._replace(commit, descends=not unknown, beside=beside, last=last)
        if not reply.ok and not reply.refusal and unknown:
            why = f"{reply.reason}, and this process has not called restore() here: do so before the first save"
            return replace(reply, reason=why)
        return reply

    def _replace(self, commit: Commit, *, descends: bool, beside: bool, last: bool = False) -> Reply:
        with self.run.committing:
            newest = self.run.newest if not beside else "" if self.known is None else self.known.nonce
            replaces = newest if descends else ""
            what = f"the agent does not say whether it has committed step {commit.step}"
            again = ("unsure", "blocked") if last else ("unsure",)
            reply = self._answer(what, lambda number: Save(number, asdict(commit), replaces, beside), again)
            if reply.ok:
                self.run.newest = self.run.newest if beside else commit.nonce
                self.run.heads[self.place] = commit
            return reply

    def _ask(self, *, take: bool, patient: bool = True) -> Commit | None:
        """The head of this directory, as the agent knows it. With `take` the agent takes the directory for the run."""
        what = "the agent cannot say whether another run saves here"
        again = ("unsure",) if patient else ()
        reply = self._answer(what, lambda number: OpenDirectory(number, str(self._path), self.place, take), again)
        if reply.ok:
            head = reply.data.get("head")
            return None if head is None else Commit.from_fields(head)
        if reply.refusal == "taken":
            raise duplicate(self._path, reply.reason)
        if ERRNO in reply.data:
            raise OSError(reply.data[ERRNO], reply.reason)
        raise NoAnswer(explain(what, self._shown, got=reply.reason))

    def _answer(self, what: str, make: Callable[[int], Request], again: Collection[str]) -> Reply:
        """The agent's answer to a request. Without an agent every request is granted.

        Args:
            what: the text of the NoAnswer that is raised when the agent does not answer.
            make: makes the request with the number that it gets.
            again: the kinds of refusal after which the request is repeated.
        """
        if not self._agent.has_agent:
            return Reply(0, ok=True)
        deadline, warned = time.monotonic() + COMMIT_TIMEOUT_S, False
        while True:
            reply = self._agent.request(make, max(0.0, deadline - time.monotonic()))
            if reply is None:
                raise NoAnswer(explain(what, self._shown, got=f"no answer in {COMMIT_TIMEOUT_S:.0f} s"))
            if reply.refusal not in again:
                return reply
            if not warned:
                _log.warning("%s waits for etcd: %s", self._shown, reply.reason)
                warned = True
            time.sleep(ASK_AGAIN_S)
