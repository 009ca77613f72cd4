"""The disk tier: checkpoints that are whole, committed, and resumed from where the run says, not where a worker likes.

Rank 0 saves: a snapshot, and everything else on its thread (`snapshot`), at most one save in flight. A save becomes a
commit when the agent's fenced transaction accepts it (without an agent: at once). Only then does the mark appear, and
only after that is anything old deleted. A save that fails leaves the old head as it was, and training goes on.

How all ranks restore together says `restoring`.
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
from functools import partial
from pathlib import Path
from typing import Any

from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory, duplicate
from elasticrt.checkpoint.committer import Committer
from elasticrt.checkpoint.restoring import TAKEN, DirectoryHead, Restoring, State
from elasticrt.checkpoint.run_directories import go_on, place_of, run_of
from elasticrt.checkpoint.snapshot import Snapshot, Snapshots, Use
from elasticrt.data.durable_files import Unfit
from elasticrt.distributed import agent_client, collectives, handover
from elasticrt.distributed.user_notice import say
from elasticrt.errors import CheckpointError, ElasticError, explain
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.error_file import write_error_file

_log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 600.0
"""A save that takes longer than this is stuck in the file system; whoever waits for it goes on with a warning."""


class Checkpointer:
    """Saves and restores checkpoints in one directory. Create it on every rank.

    Args:
        directory: created at the first save. Rank 0 saves to it; it may be shared, or each node's own.
        keep: how many of the newest checkpoints to keep, at least 1.

    `Loop` has one of its own; use this class in loops that are not a `Loop`.

    Attributes:
        place: what tells this directory from others of the run.
        start: a name for this start of the training, the same on all ranks; "" before `restore`.
        snapshots: takes what is saved here.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(explain("not a path", "Checkpointer", got=directory, expected="a directory's path"))
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(explain("keep is not a whole number", "Checkpointer", got=keep, expected="an int >= 1"))
        if keep < 1:
            raise ValueError(explain("keep is too small", "Checkpointer", got=keep, expected=">= 1"))
        self._worker = agent_client.worker_env()
        self._shown = os.fspath(directory)
        self._archive = CheckpointDirectory(Path(directory).absolute(), keep, self._worker)
        self.place = place_of(self._shown, "" if self._worker is None else self._worker.node)
        self._run = run_of(self._worker)
        self._committer = Committer(self._worker, agent_client.agent_link(), self.place)
        self.snapshots = Snapshots()
        self._saves = False  # Whether the snapshot in flight is saved.
        self._failure: BaseException | None = None
        self._asked_step = -1
        self._moved = False
        self.start = ""
        _live.add(self)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._saves and self.snapshots.busy

    @property
    def head_step(self) -> int:
        """The step of the newest commit that this process knows, -1 for none. Only rank 0 knows any."""
        return -1 if self._committer.parent is None else self._committer.parent.step

    @property
    def lacks_head(self) -> bool:
        """Whether the newest commit is not in this directory: its node may be gone. Only for rank 0."""
        head = self._worker.resume if self._worker is not None and self._moved else self._committer.parent
        if head is None or head.place not in ("", self.place):
            return False
        return not os.path.lexists(self._archive.path / head.file)

    def save(
        self, state: Mapping[str, Any], *, step: int, epoch: int = 0, about: Mapping[str, Any] | None = None
    ) -> None:
        """Copy `state` to the host now, and write and commit it in the background. Other ranks than 0 do nothing.

        Args:
            state: plain values and tensors by name (results of `state_dict()`), the same on all ranks.
            step: steps trained in this state, not less than at the save before.
            epoch: the epoch that the next step belongs to.
            about: plain JSON values for readers of the manifest.

        Waits for a save that is still in flight, at most 10 min. Raises ConfigError when something in `state` can't be
        saved, CheckpointError for a directory that can't be used, DuplicateError (exit code 7) when another live run
        saves to it, TypeError and ValueError for other arguments that can't be; a write that fails is a warning.
        """
        if not isinstance(state, Mapping):
            raise TypeError(explain("not a mapping", "Checkpointer.save", got=type(state).__name__, expected="a dict"))
        uses = self.to_disk(step=step, epoch=epoch, about=about)
        if uses:
            self.snapshots.take(state, uses)

    def to_disk(self, *, step: int, epoch: int, about: Mapping[str, Any] | None) -> list[Use]:
        """What saves the snapshot that is to be taken next; nothing on other ranks than 0. For the rest see `save`."""
        for name, value in (("step", step), ("epoch", epoch)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(explain(f"{name} is not a whole number", "Checkpointer.save", got=value))
            if value < 0:
                raise ValueError(explain(f"{name} is negative", "Checkpointer.save", got=value))
        if step < self._asked_step:
            raise ValueError(
                explain("steps go back", "Checkpointer.save", got=step, expected=f">= {self._asked_step}, saved before")
            )
        self._asked_step = step
        self._run.total = max(self._run.total, step)
        rank, world_size = collectives.rank_and_world()
        if rank != 0 or not self.wait():
            return []
        if self._moved and self._worker is not None:
            self._archive.move(self._worker)
            self._committer.move(self._worker)
            self._moved = False
        self._archive.open(create=True)
        self._archive.claim(self._head().take)
        self._saves = True
        return [partial(self._write_guarded, step, epoch, dict(about or {}), world_size, self._run.total)]

    def move(self, worker: WorkerEnv) -> None:
        """This process has another place in the run, and has the state that descends from the run's head.

        A save in flight ends as one of the old generation, which is refused; the next one is of the new place.
        """
        self._worker, self._moved = worker, True
        go_on(self._run, worker)

    def wait(self, timeout_s: float = SAVE_TIMEOUT_S) -> bool:
        """Wait until no save is in flight; False (with a warning) when one still is after `timeout_s`."""
        if not self.snapshots.wait(timeout_s):
            _log.warning("a save to %s has been in flight for more than %.0f s", self._shown, timeout_s)
            return False
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return True

    @property
    def missed(self) -> bool:
        """Whether the last save has come to nothing."""
        return (os.getpid(), self._archive.path) in _unsaved

    def finish(self) -> None:
        """Wait for the last save. One that has come to nothing is no end of a training.

        Raises CheckpointError where the directory cannot be written to, RuntimeError where the commit was refused:
        another generation may do better.
        """
        if not self.wait():
            self._missed(CheckpointError, self._asked_step, f"not written within {SAVE_TIMEOUT_S:.0f} s")
        error = _unsaved.pop((os.getpid(), self._archive.path), None)
        if error is not None and not self._moved:  # Else it was of another place, and rank 0 of this one has saved.
            raise error

    def _missed(self, kind: type[Exception], step: int, why: str) -> None:
        head = self._committer.parent
        goes_on = "from the beginning" if head is None else f"from step {head.step:,}"
        _unsaved[os.getpid(), self._archive.path] = kind(
            explain(
                f"the last checkpoint, of step {step:,}, could not be saved",
                self._shown,
                got=why,
                remedy=f"Make room there or cure what is named, then give the same command again: it goes on {goes_on}",
            )
        )

    def restore(self) -> State | None:
        """The state to go on from, on all ranks alike; None when there is nothing to go on from.

        Under an agent that is exactly the commit that the run resumes from, whichever node has it. When its file is
        damaged or on no node that is here, its nearest valid ancestor, with a warning. Collective. Raises
        CheckpointError when there are checkpoints but none can be used, RuntimeError when going back to an ancestor
        can't be recorded.
        """
        return self._restore(claim=False, fresh=False)

    def begin(self, *, fresh: bool = False) -> State | None:
        """`restore`, and claim the directory for saving at once: DuplicateError when a live process saves there.

        `fresh` starts over beside what is there, except after a restart, which goes on from what this run has saved.
        """
        return self._restore(claim=True, fresh=fresh)

    def _head(self) -> DirectoryHead:
        return DirectoryHead(self._archive, self._worker, self._run, self._shown, self.place)

    def _restore(self, *, claim: bool, fresh: bool) -> State | None:
        found = Restoring(self._head(), self._committer).run(claim=claim, fresh=fresh)
        self.start = found.start
        self._run.heads.setdefault(self.place, found.resume)
        self._committer.joined()
        if found.state is not None:
            self._asked_step = found.state.step
            self._run.total = max(self._run.total, found.state.total)
        return found.state

    def _write_guarded(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:  # noqa: BLE001  Carried to the training thread, which raises it.
            self._failure = error
        finally:
            self._saves = False

    def _write(  # noqa: PLR0917  They come from `to_disk`, the snapshot from its thread.
        self, step: int, epoch: int, about: dict[str, Any], world_size: int, total: int, snapshot: Snapshot
    ) -> None:
        """On the snapshot's thread: payload, manifest, fenced commit, mark, and only then tidying up."""
        started = time.monotonic()
        self._committer.settle(self._archive.mark)
        parent = self._committer.parent
        try:
            manifest = self._archive.write(
                snapshot.write_to,
                step=step,
                epoch=epoch,
                nonce=secrets.token_hex(8),
                parent="" if parent is None else parent.nonce,
                world_size=world_size,
                about=about,
                place="" if self._worker is None else self.place,
                total=total,
            )
        except (OSError, Unfit) as error:
            _log.warning("the checkpoint of step %d was not saved in %s: %s", step, self._shown, error)
            self._missed(CheckpointError, step, str(error))
            return
        refusal = self._committer.commit(manifest.commit)
        if refusal:
            if refusal.startswith(TAKEN):
                raise duplicate(self._archive.path, refusal.removeprefix(TAKEN))
            _log.warning("the checkpoint of step %d was not committed: %s", step, refusal)
            self._missed(RuntimeError, step, refusal)
            return
        _unsaved.pop((os.getpid(), self._archive.path), None)
        try:
            self._archive.mark(manifest.commit)
        except OSError as error:
            _log.warning("the checkpoint of step %d could not be marked as committed: %s", step, error)
            return
        try:
            self._archive.tidy(manifest.commit.nonce)
        except OSError as error:
            _log.warning("step %d is committed, but %s could not be tidied up: %s", step, self._shown, error)
        _log.debug("saved step %d in %.3f s", step, time.monotonic() - started)


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()

_unsaved: dict[tuple[int, Path], Exception] = {}
"""Directories whose last save by a process has come to nothing, and why: at the end of a script that is a failure."""


@atexit.register
def _finish_saves() -> None:
    """Finish a save in flight when the script ends. Its thread is a daemon, so that a stuck one hangs nobody.

    A script that ends well although its last state is not saved has failed: what it has trained is lost.
    """
    for checkpointer in list(_live):
        try:
            checkpointer.wait(60.0)
        except Exception as error:  # noqa: BLE001  At exit there is nobody left to raise it to.
            _log.warning("the last save failed: %s: %s", type(error).__name__, error)
    missed = next((missed for (pid, _), missed in _unsaved.items() if pid == os.getpid()), None)
    if missed is None or handover.left or getattr(sys, "last_value", None) is not None:
        return
    say(f"error: {missed}")
    code = missed.exit_code if isinstance(missed, ElasticError) else 1
    write_error_file(missed, code if code != 1 else 0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # There is no other way to another exit code from here.
