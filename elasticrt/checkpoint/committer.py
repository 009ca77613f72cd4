"""Asking the agent to commit: what the run's head is as far as this process knows, and answers that never came.

A commit replaces the head that this worker knows. When an answer does not arrive in time the effect is unknown; the
question stays open, and is settled before the next commit, so that a commit that did happen is not taken for somebody
else's. Without an agent every save is a commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace

from elasticrt.checkpoint.run_directories import run_of
from elasticrt.distributed.agent_client import AgentClient, Pending
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.ipc.messages import Reply, Save

_log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 60.0


class Committer:
    """The history's end as this process knows it.

    Attributes:
        parent: the commit that the present state descends from; None at the beginning of a history.
    """

    def __init__(self, worker: WorkerEnv | None, link: AgentClient | None, place: str) -> None:
        self._link = link
        self._generation = 0 if worker is None else worker.generation
        self._agent = worker is not None and link is not None
        self._run = run_of(worker)
        self._place = place
        self._joined = False  # Whether it is known what the state descends from; else it must not replace anything.
        self._head = ""
        self._open: tuple[Commit, Pending] | None = None
        self.parent: Commit | None = None

    def resumed(self, resume: Commit) -> None:
        """The run says that `resume` is this directory's head."""
        self._head = resume.nonce
        self._run.heads[self._place] = resume
        self.joined()

    def joined(self) -> None:
        """The present state descends from this directory's head, or there is none."""
        self._joined = True

    def descends_from(self, resume: Commit | None) -> None:
        """The state comes from memory; `resume`, if any, is the head that it descends from."""
        self.parent = resume
        if resume is not None:
            self.resumed(resume)

    def move(self, worker: WorkerEnv) -> None:
        """Another generation, whose record says what the head is. That answers what was asked in the last one."""
        self._open, self._generation = None, worker.generation
        if worker.resume is not None and worker.resume.place in ("", self._place):
            self.descends_from(worker.resume)
        self.joined()

    def went_to(self, commit: Commit) -> None:
        """`commit` is what was restored: make it the head if it is not.

        Raises RuntimeError when it can't take the place of the head that was passed over: copies in memory would be
        taken for that one's descendants.
        """
        self.parent = commit
        if commit.nonce == self._head:
            return
        refusal = self.commit(replace(commit, place=self._place, generation=self._generation or commit.generation))
        if refusal and self._head:
            raise RuntimeError(f"step {commit.step} could not be recorded as the run's head: {refusal}")
        if refusal:
            _log.warning("step %d could not be recorded as the run's head: %s", commit.step, refusal)

    def commit(self, commit: Commit) -> str:
        """Ask for `commit` to replace the known head; "" when it did, else why not. Waits up to COMMIT_TIMEOUT_S."""
        if not self._agent or self._link is None:
            self._accepted(commit)
            return ""
        with self._run.committing:
            replaces = self._run.head if self._joined else ""
            pending = self._link.request(lambda number: Save(number, asdict(commit), replaces))
            reply = pending.wait(COMMIT_TIMEOUT_S)
            if reply is None:
                self._open = (commit, pending)
                return f"no answer from the agent in {COMMIT_TIMEOUT_S:.0f} s; it may still happen"
            return self._conclude(commit, reply)

    def settle(self, mark: Callable[[Commit], None]) -> None:
        """Before another commit: hear the answer that was missing, if it is there by now, and mark what it accepted."""
        if self._open is None:
            return
        (commit, pending), self._open = self._open, None
        reply = pending.wait(0.0)
        if reply is None:
            self._open = (commit, pending)
            return
        if not self._conclude(commit, reply):
            try:
                mark(commit)
            except OSError as error:
                _log.warning("step %d is committed but could not be marked so: %s", commit.step, error)

    def _conclude(self, commit: Commit, reply: Reply) -> str:
        if not reply.ok:
            return reply.reason or "refused without a reason"
        self._accepted(commit)
        return ""

    def _accepted(self, commit: Commit) -> None:
        self._head = self._run.head = commit.nonce
        self._run.heads[self._place] = self.parent = commit
        self.joined()
