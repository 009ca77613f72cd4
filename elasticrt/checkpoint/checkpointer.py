"""The disk tier: checkpoints that are whole, committed, and resumed from where the run says.

Rank 0 saves. It takes a snapshot and leaves the rest to the thread of `snapshot`, at most one save at a time. A save
becomes a commit when the agent's fenced transaction accepts it (without an agent: at once). Only then does its draft
become a manifest, and only after that is anything old deleted. A save that fails leaves the old head as it was, and
training goes on.
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
from elasticrt.text import cut, packed

_log = logging.getLogger(__name__)

FAILED_S_MAX = 60.0
"""How long a process that has failed, or hands over, waits for its last save. Its successor begins after it."""

UNSAVED_MAX_BYTES = 400
"""What an agent tells of a save that has failed."""


class Checkpointer:
    """Saves and restores checkpoints in one directory. Create it on every rank.

    Args:
        directory: created at the first save. Rank 0 saves to it; it may be shared, or each node's own.
        keep: how many of the newest checkpoints to keep, at least 1.

    `Loop` has one of its own; use this class in loops that are not a `Loop`.

    Attributes:
        place: tells this directory from others of the run.
        start: a name for this start of the training, the same on all ranks; "" before `restore`.
        snapshots: takes what is saved here.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self._shown = path_of(directory, "Checkpointer")
        keep = whole_number(keep, "keep", "Checkpointer", 1)
        self._directory = CheckpointDirectory(Path(directory).absolute(), keep)
        self._head = DirectoryHead(agent_client.worker_env(), self._shown)
        self.place = self._head.place
        self.snapshots = Snapshots()
        self._failure: BaseException | None = None
        self._asked_step = -1
        self.start = ""
        _live.add(self)

    @property
    def lacks_head(self) -> bool:
        """Whether the newest commit is not in this directory, and may be lost with its node. Only for rank 0."""
        head = self._head.known
        return head is not None and not os.path.lexists(self._directory.path / head.file)

    def adds(self, step: int) -> bool:
        """Whether a save of the state after `step` would add to what is saved. Only for rank 0."""
        return newest_offer.adds(step, self._head.known, lacks_head=self.lacks_head)

    def save(self, state: Mapping[str, Any], *, step: int, epoch: int = 0) -> None:
        """Copy `state` to the host now, and write and commit it in the background. Other ranks than 0 do nothing.

        Args:
            state: plain values and tensors by name (results of `state_dict()`), the same on all ranks.
            step: steps trained in this state, not less than at the save before. Beside a Loop, which counts the run's
                steps, it is a label of this directory's checkpoints, and may be less.
            epoch: the epoch that the next step belongs to.

        Waits for a save that is still in flight, at most 20 min, and while etcd is away. Raises ConfigError when
        something in `state` can't be saved, CheckpointError for a directory that can't be used or has checkpoints that
        this script has not read, DuplicateError (exit code 7) when another live run saves to it, TypeError and
        ValueError for other invalid arguments; a write that fails is a warning.
        """
        if not isinstance(state, Mapping):
            raise TypeError(explain("not a mapping", "Checkpointer.save", got=type(state).__name__, expected="a dict"))
        uses = self.to_disk(step=step, epoch=epoch, of_loop=False)
        if uses:
            self.snapshots.take(state, uses)

    def to_disk(self, *, step: int, epoch: int, patient: bool = True, of_loop: bool = True) -> list[Use]:
        """The use that saves the snapshot which is taken next; none on other ranks than 0. Raises as `save`.

        While etcd is away, it waits if `patient`, and else skips the save with a warning. `of_loop`: a Loop counts the
        run's steps, and saves again after a change of the membership; its patient save is its last.
        """
        whole_number(step, "step", "Checkpointer.save")
        whole_number(epoch, "epoch", "Checkpointer.save")
        beside = self._head.is_beside(of_loop=of_loop)
        # Of a Loop the run's head may be ahead: rank 0 has finished a step, saved it, and died alone. What is saved
        # beside it may be ahead of its state as well, after a restart from an earlier step.
        known = None if of_loop else self._head.known
        least = self._asked_step if known is None else max(self._asked_step, known.step)
        if step < least and not beside:
            expected = f">= {least}, saved before"
            raise ValueError(explain("steps go back", "Checkpointer.save", got=step, expected=expected))
        self._asked_step = step
        if not (of_loop or self._head.run.has_loop):
            self._head.run.total = max(self._head.run.total, step)
        if collectives.rank_and_world()[0] != 0 or not self.wait():
            return []
        try:
            self._directory.claim(partial(self._head.take, patient=patient, adopts=beside))
        except (NoAnswer, OSError) as error:
            kind = NoAnswer if isinstance(error, NoAnswer) else CheckpointError
            self._missed(kind, self._draft(step, epoch).commit, error)
            return []
        if self._head.knows_nothing and self._directory.had_commits:
            what, expected = "there are checkpoints that this script has not read", "restore() before the first save()"
            remedy = "Call it, so that what is older may be deleted, or save to another directory"
            raise CheckpointError(what, self._shown, expected=expected, remedy=remedy)
        return [partial(self._write_guarded, self._draft(step, epoch), of_loop, patient and of_loop)]

    def _draft(self, step: int, epoch: int) -> Manifest:
        """The manifest of what is saved now, without size and digest."""
        worker, total, nonce = self._head.worker, self._head.run.total, secrets.token_hex(8)
        known = self._head.known
        commit = Commit(
            step=step,
            epoch=epoch,
            generation=worker.generation,
            nonce=nonce,
            parent="" if known is None else known.nonce,
            directory=packed(str(self._directory.path)),
            file=stem_of(step, worker.generation, nonce) + PAYLOAD,
            digest="0" * 64,
            size=0,
            # The one before may be in the directory of another node, which was rank 0 then.
            serial=max(self._directory.serial, 0 if known is None else known.serial) + 1,
            node=worker.node,
            place=self.place if worker.has_agent else "",
            total=0 if total == step else max(1, total),
            root="" if known is None else known.history,
        )
        run = "" if worker.run_id == "none" else worker.run_id  # Torchrun's name for a run without one.
        return Manifest(commit, run, collectives.rank_and_world()[1])

    def move(self, worker: WorkerEnv) -> None:
        """This process goes on as `worker`, with the state that descends from the run's head; so do all checkpointers.

        A save in flight is still of the old generation, and is refused.
        """
        self._head.move(worker)
        for each in list(_live):
            each._head.worker = worker
            each._directory.disclaim()

    def wait(self, timeout_s: float = COMMIT_TIMEOUT_S) -> bool:
        """Wait until no save is in flight; False (with a warning) when one still is after `timeout_s`.

        By default that is as long as a commit may take: a longer save is stuck in the file system.
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
        """Wait for the last save; one that is not written by then is missed. Raises what has ended it."""
        if not self.wait(timeout_s):
            why = f"not written within {timeout_s:.0f} s"
            self._missed(CheckpointError, self._draft(max(0, self._asked_step), 0).commit, why)

    def finish(self) -> None:
        """Wait for the last save: a training whose last state is not saved has failed.

        Raises CheckpointError where the directory cannot be written to. Raises RuntimeError, which is not final, where
        the commit was refused.
        """
        self._end()
        generation, error = _unsaved.pop(self._directory.path, (0, None))
        # A save of an earlier generation is repeated by its successor.
        if error is not None and generation == self._head.worker.generation:
            raise error

    def _missed(self, kind: type[Exception], commit: Commit, why: str | Exception, *, repeated: bool = False) -> None:
        """Remember a save that has failed; its successor clears that. `repeated`: the next generation saves it.

        The agent tells people of it; without an agent a warning does.
        """
        step = commit.step
        missed = Unsaved(commit.reached, cut(f"{why} ({self._shown})", UNSAVED_MAX_BYTES))
        told = repeated or agent_client.agent_link().say(missed)
        level = logging.INFO if told else logging.WARNING
        _log.log(level, "the checkpoint of step %d was not saved in %s: %s", step, self._shown, why)
        goes_on = "from the beginning" if self._head.known is None else f"from step {self._head.known.step:,}"
        if self.lacks_head:
            goes_on = "from the newest checkpoint that is left"
        what = f"the last checkpoint, of step {step:,}, could not be saved"
        remedy = f"Make room there or cure what is named, then give the same command again: it goes on {goes_on}"
        if repeated:
            remedy = "Nothing is to be done: the next generation goes on"
        _unsaved[self._directory.path] = (commit.generation, kind(explain(what, self._shown, got=why, remedy=remedy)))

    def restore(self) -> State | None:
        """The state to go on from, on all ranks alike; None when there is nothing to go on from.

        Under an agent that is exactly the commit that the run resumes from, whichever node has it. When its file is
        damaged or on no node that is here, its nearest valid ancestor, with a warning. Collective. Raises
        CheckpointError when there are checkpoints but none can be used, RuntimeError when going back to an ancestor
        can't be recorded.
        """
        found = self.begin(claim=False)
        # The script may keep what it gets, and memory that ranks share must not be kept.
        return None if found is None else replace(found, data=plain_copy(found.data, "checkpoint"))

    def begin(self, *, fresh: bool = False, claim: bool = True) -> State | None:
        """`restore` for a Loop: with `claim` the directory is taken for saving at once.

        The tensors lie in memory that the ranks of a machine share: a Loop copies from them, and keeps none. `fresh`:
        start over beside what is there, except after a restart, which goes on from what this run has saved. Raises
        DuplicateError when another live process saves there, and what `restore` raises.
        """
        restoring = Restoring(self._directory, self._shown, self._head)
        state = restoring.run(claim=claim, fresh=fresh)
        self.start = restoring.start
        self._head.run.heads[self.place] = restoring.found
        if state is not None:
            self._asked_step = state.step
            if not self._head.is_beside(of_loop=claim):  # Else its steps are labels.
                self._head.run.total = max(self._head.run.total, state.total)
        return state

    def _write_guarded(self, draft: Manifest, of_loop: bool, last: bool, snapshot: Snapshot) -> None:
        try:
            self._write(draft, of_loop, last, snapshot)
        except BaseException as error:  # noqa: BLE001  Carried to the training thread, which raises it.
            self._failure = error

    def _write(self, draft: Manifest, of_loop: bool, last: bool, snapshot: Snapshot) -> None:
        """On the snapshot's thread: payload, draft, fenced commit, mark, and only then deleting what is old."""
        started, step = time.monotonic(), draft.commit.step
        try:
            commit = self._directory.write(draft, snapshot.write_to)
            snapshot.is_done = True  # The commit may take long: it waits for etcd.
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
            if not over:  # One of a generation that is over may have been committed, unheard.
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
# By directory, the last save of this process if it failed: its generation, and the error that fails the script.
_unsaved: dict[Path, tuple[int, Exception]] = {}

os.register_at_fork(after_in_child=_unsaved.clear)


@atexit.register
def _finish_saves() -> None:
    """Wait for a save in flight when the script ends, and fail the script if its last state is not saved."""
    ends_well = not handover.left and getattr(sys, "last_value", None) is None
    missed: Exception | None = None
    for checkpointer in list(_live):
        try:
            checkpointer._end(COMMIT_TIMEOUT_S if ends_well else FAILED_S_MAX)
        except Exception as error:  # noqa: BLE001  At exit there is no caller to raise it to.
            _log.info("the last save failed: %s: %s", type(error).__name__, error)
            missed = missed or error
    now = agent_client.worker_env().generation
    # Of one that is gone. A save of an earlier generation is repeated by its successor, perhaps on another rank.
    missed = missed or next((error for generation, error in _unsaved.values() if generation == now), None)
    if missed is None or not ends_well:
        return
    say(f"error: {missed}")
    write_error_file(missed)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # The only way to another exit code from an exit hook.
    os._exit(missed.exit_code if isinstance(missed, ElasticError) else 1)
