"""Saves checkpoints to disk and restores them: the public `Checkpointer`, which `Loop` uses as well.

Rank 0 saves. It takes a snapshot, and the thread of `snapshot` does the rest; at most one save is in flight. A save
becomes a commit when the agent's fenced transaction accepts it; without an agent it is a commit at once. Only then does
its draft become a manifest, and only after that is anything old deleted. A save that fails leaves the old head as it
was, and training goes on. Restoring resumes from exactly the commit that the run names (`restoring`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from elasticrt.checkpoint import newest_offer
from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory, duplicate
from elasticrt.checkpoint.commits import COMMIT_TIMEOUT_S, DirectoryHead, NoAnswer
from elasticrt.checkpoint.manifest import PAYLOAD, Manifest, stem_of
from elasticrt.checkpoint.restoring import Restoring, State
from elasticrt.checkpoint.snapshot import Snapshot, Snapshots, Use
from elasticrt.checkpoint.state_copy import plain_copy
from elasticrt.data.durable_files import Unfit
from elasticrt.distributed import agent_client, collectives, handover
from elasticrt.errors import CheckpointError, ElasticError, explain, path_of, whole_number
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.ipc.error_file import write_error_file
from elasticrt.ipc.messages import Unsaved
from elasticrt.ipc.std_streams import say
from elasticrt.text import cut

_log = logging.getLogger(__name__)

FAILED_S_MAX = 60.0
"""How long, in seconds, a process that has failed or hands over waits for its last save. Its successor starts only
after it has ended."""

UNSAVED_MAX_BYTES = 400
"""The largest reason, in bytes, that is sent to the agent for a save that has failed."""


class Checkpointer:
    """Saves and restores checkpoints in one directory. Create a Checkpointer on every rank.

    Args:
        directory: the checkpoint directory, which the first save creates. Rank 0 saves to it. It may be shared by all
            nodes, or each node's own.
        keep: how many of the newest checkpoints to keep, at least 1.

    A `Loop` has a Checkpointer of its own; use this class in training loops that are not a `Loop`.

    Attributes:
        place: identifies this directory among the checkpoint directories of the run.
        start: a name for this start of the training, the same on all ranks; "" before `restore`.
        snapshots: copies the state for each save.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self._shown = path_of(directory, "Checkpointer")
        keep = whole_number(keep, "keep", "Checkpointer", 1)
        self._directory = CheckpointDirectory(Path(directory).absolute(), keep)
        self._head = DirectoryHead(agent_client.worker_env(), self._shown)
        self.place = self._head.place
        self.snapshots = Snapshots()
        # What has ended a save on the snapshot's thread; the next `wait` raises it.
        self._failure: BaseException | None = None
        self._asked_step = -1  # The step of the newest `save` or `restore`; -1 for none.
        self.start = ""
        _live.add(self)

    @property
    def lacks_head(self) -> bool:
        """Whether the file of the newest commit is not in this directory, so that it may be lost with another node.

        Only for rank 0.
        """
        head = self._head.known
        return head is not None and not os.path.lexists(self._directory.path / head.file)

    def adds(self, step: int) -> bool:
        """Whether a save of the state after `step` would add to what is saved. Only for rank 0."""
        return newest_offer.adds(step, self._head.known, lacks_head=self.lacks_head)

    def save(self, state: Mapping[str, Any], *, step: int, epoch: int = 0) -> None:
        """Copy `state` to the host now, and write and commit the copy in the background. Only rank 0 saves.

        Args:
            state: plain values and tensors by name, such as results of `state_dict()`, the same on all ranks.
            step: the number of steps trained in this state, not less than at the save before. Beside a `Loop`, which
                counts the run's steps, the number is only a label of this directory's checkpoints, and may be less.
            epoch: the epoch that the next step belongs to.

        Waits for a save that is still in flight, at most 20 min, and while etcd does not answer. A write that fails is
        a warning. Raises ConfigError when something in `state` can't be saved; CheckpointError when the directory can't
        be used, or has checkpoints that this script has not read; DuplicateError (exit code 7) when another live run
        saves to it; TypeError and ValueError for other invalid arguments.
        """
        if not isinstance(state, Mapping):
            raise TypeError(explain("not a mapping", "Checkpointer.save", got=type(state).__name__, expected="a dict"))
        whole_number(step, "step", "Checkpointer.save")
        whole_number(epoch, "epoch", "Checkpointer.save")
        run, known = self._head.run, self._head.known
        if not run.has_loop:
            least = max(self._asked_step, 0 if known is None else known.step)
            if step < least:
                expected = f">= {least}, saved before"
                raise ValueError(explain("the step number goes back", "Checkpointer.save", got=step, expected=expected))
            # Without a Loop, the steps of the newest save count as the run's.
            run.total = max(run.total, step)
        uses = self.to_disk(step=step, epoch=epoch, of_loop=False)
        if uses:
            self.snapshots.take(state, uses)

    def to_disk(self, *, step: int, epoch: int, patient: bool = True, of_loop: bool = True) -> list[Use]:
        """The use, for `Snapshots.take`, that saves the next snapshot. None on other ranks than 0. Raises as `save`.

        Args:
            step, epoch: as for `save`.
            patient: wait while etcd does not answer. Otherwise the save is skipped with a warning.
            of_loop: whether a Loop saves. A Loop counts the run's steps, and saves again after a change of the
                membership; its only patient save is its last one.
        """
        self._asked_step = step
        # One save at a time: each commit names the one before as its parent.
        if collectives.rank_and_world()[0] != 0 or not self.wait():
            return []
        beside = self._head.is_beside(of_loop=of_loop)
        try:
            self._directory.claim(partial(self._head.take, patient=patient, adopts=beside))
        except (NoAnswer, OSError) as error:
            kind = NoAnswer if isinstance(error, NoAnswer) else CheckpointError
            self._missed(kind, self._draft(step, epoch).commit, error)
            return []
        if self._head.knows_nothing and self._directory.had_commits:
            what, expected = (
                "the directory has checkpoints that this script has not restored",
                "restore() before the first save()",
            )
            remedy = "Call it, as saves delete older checkpoints, or save to another directory"
            raise CheckpointError(what, self._shown, expected=expected, remedy=remedy)
        return [partial(self._write_guarded, self._draft(step, epoch), of_loop, patient and of_loop)]

    def _draft(self, step: int, epoch: int) -> Manifest:
        """The manifest of a save that begins now. Size and digest are not known yet."""
        worker, total, nonce = self._head.worker, self._head.run.total, secrets.token_hex(8)
        known = self._head.known
        commit = Commit(
            step=step,
            epoch=epoch,
            generation=worker.generation,
            nonce=nonce,
            parent="" if known is None else known.nonce,
            directory=str(self._directory.path),
            file=stem_of(step, worker.generation, nonce) + PAYLOAD,
            digest="0" * 64,
            size=0,
            # The commit before may be in the directory of another node, which had rank 0 then.
            serial=max(self._directory.serial, 0 if known is None else known.serial) + 1,
            node=worker.node,
            place=self.place if worker.has_agent else "",
            total=0 if total == step else max(1, total),
            root="" if known is None else known.history,
        )
        # "none" is torchrun's run id for a run without a name.
        run = "" if worker.run_id == "none" else worker.run_id
        return Manifest(commit, run, collectives.rank_and_world()[1])

    def move(self, worker: WorkerEnv) -> None:
        """Go on as `worker` in another generation, with a state that descends from the run's head.

        That holds for every Checkpointer of this process. A save in flight still belongs to the old generation, and its
        commit is refused.
        """
        self._head.move(worker)
        for each in list(_live):
            each._head.worker = worker
            # Another node's rank 0 may have saved to the directory meanwhile.
            each._directory.disclaim()

    def wait(self, timeout_s: float = COMMIT_TIMEOUT_S) -> bool:
        """Wait until no save is in flight. Returns False, with a warning, when one still is after `timeout_s` seconds.

        Only rank 0 saves, and only it knows of its saves: other ranks do not wait. The default is the longest time that
        a commit may take: a save that takes longer is stuck in the file system.

        Raises what has ended the save before, such as DuplicateError.
        """
        if not self.snapshots.wait(timeout_s):
            _log.warning("a save to %s has been in flight for more than %.0f s", self._shown, timeout_s)
            return False
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return True

    @property
    def missed(self) -> bool:
        """Whether the last save has failed."""
        return self._directory.path in _unsaved

    def _end(self, timeout_s: float = COMMIT_TIMEOUT_S) -> None:
        """Wait for the last save. After `timeout_s` seconds it counts as missed. Raises what has ended it."""
        if not self.wait(timeout_s):
            why = f"not written within {timeout_s:.0f} s"
            self._missed(CheckpointError, self._draft(max(0, self._asked_step), 0).commit, why)

    def finish(self) -> None:
        """Wait for the last save. A training whose last state is not saved has failed.

        Raises CheckpointError, which ends the run, where the directory cannot be written to; RuntimeError, after which
        the run may restart, where the commit was refused.
        """
        self._end()
        generation, error = _unsaved.pop(self._directory.path, (0, None))
        # A missed save of an earlier generation is repeated in the present one, perhaps by another rank.
        if error is not None and generation == self._head.worker.generation:
            raise error

    def _missed(self, kind: type[Exception], commit: Commit, why: str | Exception, *, repeated: bool = False) -> None:
        """Remember a save that has failed, until a later save succeeds. The agent reports it to people.

        Args:
            kind: the class of the error that is raised if no later save succeeds.
            commit: what was to be committed.
            why: the reason.
            repeated: whether the next generation saves this state again. Then the failure needs no report.
        """
        step = commit.step
        missed = Unsaved(commit.reached, cut(f"{why} ({self._shown})", UNSAVED_MAX_BYTES))
        told = repeated or agent_client.agent_link().send(missed)
        # Without an agent the log is the only place where people see it.
        level = logging.INFO if told else logging.WARNING
        _log.log(level, "the checkpoint of step %d was not saved in %s: %s", step, self._shown, why)
        goes_on = "from the beginning" if self._head.known is None else f"from step {self._head.known.step:,}"
        if self.lacks_head:
            goes_on = "from the newest checkpoint that is left"
        what = f"the last checkpoint, of step {step:,}, could not be saved"
        remedy = (
            f"Free disk space there or fix this error, then start the same command again: training resumes {goes_on}"
        )
        if repeated:
            remedy = "No action is needed: the next generation goes on"
        _unsaved[self._directory.path] = (commit.generation, kind(explain(what, self._shown, got=why, remedy=remedy)))

    def restore(self) -> State | None:
        """The state to resume from, the same on all ranks; None when there is none. Collective.

        Under an agent that is exactly the commit that the run resumes from, whichever node has it. If its file is
        damaged, or on no node of this generation, it is the nearest valid ancestor of that commit, with a warning.

        Raises CheckpointError when there are checkpoints but none can be used; RuntimeError when going back to an
        ancestor can't be recorded.
        """
        found = self.begin(claim=False)
        # Copied, because the script may keep what it gets, and the tensors map memory that all ranks of the machine
        # share.
        return None if found is None else replace(found, data=plain_copy(found.data, "checkpoint"))

    def begin(self, *, fresh: bool = False, claim: bool = True) -> State | None:
        """`restore` for a Loop. Collective.

        The tensors of the result lie in memory that the ranks of a machine share: a Loop copies from them, and keeps
        none of them.

        Args:
            fresh: start over beside the checkpoints that are there. A restart ignores this, and resumes from what this
                run has saved.
            claim: take the directory for saving at once.

        Raises DuplicateError when another live process saves there, and what `restore` raises.
        """
        restoring = Restoring(self._directory, self._shown, self._head)
        state = restoring.run(claim=claim, fresh=fresh)
        self.start = restoring.start
        self._head.run.heads[self.place] = restoring.found
        if state is not None:
            self._asked_step = state.step
            # The steps of a checkpoint that was saved beside a Loop are only labels.
            if not self._head.is_beside(of_loop=claim):
                self._head.run.total = max(self._head.run.total, state.total)
        return state

    def _write_guarded(self, draft: Manifest, of_loop: bool, last: bool, snapshot: Snapshot) -> None:
        try:
            self._write(draft, of_loop, last, snapshot)
        except BaseException as error:  # noqa: BLE001  Carried to the training thread, which raises it.
            self._failure = error

    def _write(self, draft: Manifest, of_loop: bool, last: bool, snapshot: Snapshot) -> None:
        """Save a snapshot, on the snapshot's thread: payload, draft, fenced commit, mark. Delete old files only then.

        Whenever this process dies, the old head is whole, or the new one is.
        """
        started, step = time.monotonic(), draft.commit.step
        try:
            commit = self._directory.write(draft, snapshot.write_to)
            # The next snapshot may reuse the memory now: the commit waits for etcd, which may take long.
            snapshot.is_done = True
        except (OSError, Unfit) as error:
            self._missed(CheckpointError, draft.commit, error)
            return
        reply = self._head.commit(commit, beside=self._head.is_beside(of_loop=of_loop), last=last)
        if not reply.ok:
            if reply.refusal == "taken":
                raise duplicate(self._directory.path, reply.reason)
            over = reply.refusal == "over"
            if over and not of_loop:
                what = "the checkpoint of step %d is not saved in %s: the membership has changed meanwhile"
                _log.warning(what, step, self._shown)
                return
            # A save whose generation is over may have been committed, with the answer lost: its files stay.
            if not over:
                with contextlib.suppress(OSError):
                    self._directory.discard(commit)
            self._missed(RuntimeError, draft.commit, reply.reason, repeated=over)
            return
        _unsaved.pop(self._directory.path, None)
        try:
            self._directory.mark(commit)
            self._directory.tidy(commit.nonce)
        except OSError as error:
            _log.warning("step %d is committed, but %s could not be tidied up: %s", step, self._shown, error)
        _log.debug("saved step %d in %.3f s", step, time.monotonic() - started)


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
# By directory: the generation of this process's last save, if that save failed, and the error that fails the script.
_unsaved: dict[Path, tuple[int, Exception]] = {}

# A forked child, such as a DataLoader worker, must not fail for the saves of its parent.
os.register_at_fork(after_in_child=_unsaved.clear)


@atexit.register
def _finish_saves() -> None:
    """Wait for a save in flight when the script ends, and fail the script if its last state is not saved."""
    ends_well = not handover.has_left and getattr(sys, "last_value", None) is None
    missed: Exception | None = None
    for checkpointer in list(_live):
        try:
            checkpointer._end(COMMIT_TIMEOUT_S if ends_well else FAILED_S_MAX)
        except Exception as error:  # noqa: BLE001  At exit there is no caller to raise it to.
            _log.info("the last save failed: %s: %s", type(error).__name__, error)
            missed = missed or error
    now = agent_client.worker_env().generation
    # A Checkpointer that was garbage-collected has left its failure in `_unsaved`. A missed save of an earlier
    # generation is repeated in the present one, perhaps by another rank.
    missed = missed or next((error for generation, error in _unsaved.values() if generation == now), None)
    if missed is None or not ends_well:
        return
    say(f"error: {missed}")
    write_error_file(missed)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # An exit hook has no other way to change the exit code.
    os._exit(missed.exit_code if isinstance(missed, ElasticError) else 1)
