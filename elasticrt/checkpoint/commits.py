"""The heads of a run's checkpoint directories, as this process knows them, and asking the agent for another one.

A run may have several directories: training before fine-tuning, folds, trials of a search. Each has a head of its own
in etcd; the run's head is the newest of them, and every commit replaces it. What a script saves beside its Loop is not
among them (`Checkpointer.save`): the run cannot go on from that. Steps of different loops can't be compared: the run
counts the steps of all loops together, on from the restored state. Without an agent every save is a commit.
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
from elasticrt.ipc.messages import ERRNO, Own, Reply, Request, Save

_log = logging.getLogger(__name__)

# Longer than an agent lives without etcd: one that has not answered until then never will.
COMMIT_TIMEOUT_S = 1200.0
# Between two questions while etcd is away.
ASK_AGAIN_S = 1.0


class NoAnswer(RuntimeError):  # noqa: N818  Not an error of the user's or of ours.
    """The agent has no answer, because etcd is away."""


def place_of(directory: str, node: str) -> str:
    """16 hex digits for a directory, as the script names it: the same on each node. Pure."""
    # Nodes may have directories of their own, named after them: the node's name is taken out.
    name = os.path.normpath(directory)
    if node:
        name = re.sub(rf"(?<![A-Za-z0-9]){re.escape(node)}(?![A-Za-z0-9])", "*", name)
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


@dataclass
class RunHeads:
    """What this process knows of the run."""

    newest: str = ""  # Nonce of the run's newest commit.
    # By place, the commit that the state of that directory's loop descends from, None for a beginning. Only of
    # directories that this process has restored from.
    heads: dict[str, Commit | None] = field(default_factory=dict)
    total: int = 0  # Steps that the run has trained.
    has_loop: bool = False  # Whether a Loop counts them. Else they are those of the newest save.
    # Held while a commit is under way: each replaces the one before.
    committing: threading.Lock = field(default_factory=threading.Lock)


_runs: dict[str, RunHeads] = {}


def run_of(worker: WorkerEnv) -> RunHeads:
    """What this process knows of its run; without an agent, of what it trains."""
    if worker.nonce not in _runs:
        _runs[worker.nonce] = RunHeads("" if worker.resume is None else worker.resume.nonce)
    return _runs[worker.nonce]


class DirectoryHead:
    """The head of one checkpoint directory, by its path in the script."""

    def __init__(self, worker: WorkerEnv, directory: str) -> None:
        self.worker = worker  # This process's place in the run, by the last `move`.
        # Tells this directory from others of the run, as in `Commit`.
        self.place = place_of(directory, worker.node)
        self.run = run_of(worker)  # What this process knows of all directories of the run.
        self._agent = agent_client.agent_link()
        self._shown = directory
        self._path = Path(directory).absolute()

    @property
    def known(self) -> Commit | None:
        """The commit that the state descends from; None at the beginning of a history, and before it is restored."""
        return self.run.heads.get(self.place)

    @property
    def knows_nothing(self) -> bool:
        """Whether nothing was restored or saved here."""
        return self.place not in self.run.heads

    def resume_point(self) -> Commit | None:
        """Where this directory goes on: where this process has taken it, else where the run resumes, else its head."""
        if not self.worker.has_agent:
            return None
        if not self.knows_nothing:
            return self.known
        if self.worker.resume is not None and self.worker.resume.place in ("", self.place):
            return self.worker.resume
        return self._ask(take=False)

    def take(self, *, patient: bool = True, adopts: bool = False) -> None:
        """Take the directory for this run, without an agent for this process. `patient`: wait while etcd is away.
        `adopts`: what the run has saved here is this process's as well, whether it has restored that or not.

        Raises DuplicateError when another live run saves there, NoAnswer when the agent can't say, OSError.
        """
        if not self.worker.has_agent:
            take_alone(self._path)
        else:
            head = self._ask(take=True, patient=patient)
            if head is not None and (adopts or not self.knows_nothing):  # Another rank 0 may have saved here.
                self.run.heads[self.place] = head

    def move(self, worker: WorkerEnv) -> None:
        """This process goes on as `worker`, whose generation says which commit is the newest."""
        self.worker, resume = worker, worker.resume
        self.run.newest = "" if resume is None else resume.nonce
        if resume is not None and resume.place in ("", self.place):
            self.run.heads[self.place] = resume
        self.run.heads.setdefault(self.place, None)
        _runs.clear()
        _runs[worker.nonce] = self.run

    def is_beside(self, *, of_loop: bool) -> bool:
        """Whether what is saved here is not the run's: a Loop saves that, and this is not `of_loop`."""
        return self.run.has_loop and not of_loop

    def go_back(self, commit: Commit, *, beside: bool) -> Reply:
        """Make an older commit, which was restored, the head again; `beside` a Loop that of its directory only."""
        generation = self.worker.generation if self.worker.has_agent else commit.generation
        back = replace(commit, place=self.place, generation=generation)
        return self._replace(back, descends=True, beside=beside)

    def commit(self, commit: Commit, *, beside: bool, last: bool) -> Reply:
        """Ask for `commit` to replace the known head, `beside` a Loop that of its directory. `last`: no other save
        follows, so wait while etcd takes no writes.

        Raises NoAnswer when the agent does not say: the outcome is unknown then, and later commits would be refused.
        """
        # A state whose history is unknown must not replace anything.
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
        """The head of this directory, as the agent knows it. With `take` it takes the directory for the run."""
        what = "the agent cannot say who saves here"
        again = ("unsure",) if patient else ()
        reply = self._answer(what, lambda number: Own(number, str(self._path), self.place, take), again)
        if reply.ok:
            head = reply.data.get("head")
            return None if head is None else Commit.from_fields(head)
        if reply.refusal == "taken":
            raise duplicate(self._path, reply.reason)
        if ERRNO in reply.data:
            raise OSError(reply.data[ERRNO], reply.reason)
        raise NoAnswer(explain(what, self._shown, got=reply.reason))

    def _answer(self, what: str, make: Callable[[int], Request], again: Collection[str]) -> Reply:
        """The agent's answer; it is asked again after refusals of the kinds `again`. Raises NoAnswer, saying `what`."""
        if not self._agent.linked:
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
