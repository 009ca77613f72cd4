"""The disk tier: checkpoints that are whole, committed, and resumed from where the run says, not where a worker likes.

Rank 0 saves: a snapshot, and everything else on its thread (`snapshot`), at most one save in flight. A save becomes a
commit when the agent's fenced transaction accepts it (without an agent: at once). Only then does the mark appear, and
only after that is anything old deleted. A save that fails leaves the old head as it was, and training goes on.

All ranks restore together: whoever has the checkpoint verifies and opens it, the others get its bytes (`search`). Nodes
need no shared directory for that, and can't disagree.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elasticrt.checkpoint import memory_tier
from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory, duplicate, parse, take_alone
from elasticrt.checkpoint.committer import Committer
from elasticrt.checkpoint.locate import Found, Outcome, Search
from elasticrt.checkpoint.run_directories import go_on, place_of, run_of
from elasticrt.checkpoint.snapshot import Snapshot, Snapshots, Use
from elasticrt.checkpoint.stateful import OURS
from elasticrt.data.durable_files import Unfit
from elasticrt.distributed import agent_client, collectives, handover
from elasticrt.distributed.user_notice import say
from elasticrt.errors import CheckpointError, ElasticError, explain
from elasticrt.ipc.directory_owner import Owner
from elasticrt.ipc.env import Commit, Copy, WorkerEnv
from elasticrt.ipc.error_file import write_error_file
from elasticrt.ipc.messages import Own, Reply

_log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 600.0
"""A save that takes longer than this is stuck in the file system; whoever waits for it goes on with a warning."""


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
        self._resume: Commit | None = None  # Of this directory, as `restore` has found it.
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
        self._archive.claim(self._take)
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

    def _restore(self, *, claim: bool, fresh: bool) -> State | None:
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
        self.start = verdict["start"]
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
        self._run.heads.setdefault(self.place, self._resume)
        self._committer.joined()
        if state is not None:
            self._asked_step = state.step
            self._run.total = max(self._run.total, state.total)
        return state

    def _prepare(self, claim: bool) -> bytearray | None:
        """On rank 0: where this directory goes on, and the copy in memory if that is what it resumes from."""
        worker = self._worker
        if claim:
            self._archive.open(create=True)
            self._archive.claim(self._take)
        self._archive.open(create=False)
        if worker is None:
            return None
        self._resume = self._head()
        copy = worker.copy
        again = self.place in self._run.heads  # This process has moved on since.
        if copy is None or copy.place not in ("", self.place) or again:
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

    def _head(self) -> Commit | None:
        """This directory's head: as this process has made it, the run's resume point, or what etcd says."""
        worker = self._worker
        assert worker is not None, "only a run has heads"
        if self.place in self._run.heads:
            return self._run.heads[self.place]
        if worker.resume is not None and worker.resume.place in ("", self.place):
            return worker.resume
        head = self._ask(take=False).data.get("head")
        return None if head is None else Commit.from_fields(head)

    def _take(self) -> Owner | None:
        """Take the directory for this run."""
        if self._worker is None:
            return take_alone(self._archive.path)
        self._ask(take=True)
        return None

    def _ask(self, *, take: bool) -> Reply:
        """What the agent knows of this directory. Raises DuplicateError when another live run saves there."""
        agent = agent_client.agent_link()
        if agent is None:
            return Reply(0, ok=True)
        asked = agent.request(lambda number: Own(number, str(self._archive.path), self.place, take))
        reply = asked.wait(OWN_TIMEOUT_S)
        reason = f"no answer in {OWN_TIMEOUT_S:.0f} s" if reply is None else reply.reason
        if reply is not None and reply.ok:
            return reply
        if reason.startswith(TAKEN):
            raise duplicate(self._archive.path, reason.removeprefix(TAKEN))
        raise RuntimeError(explain("the agent cannot say who saves here", self._shown, got=reason))

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
                _log.warning("skipped in %s: %s", self._shown, trouble)
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
            place = f"{self._shown.rstrip('/')}/" + (f" on {found.where}" if found.where else "")
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
        return "ELASTICRT_FRESH=1" if self._resume is None else "ELASTICRT_FRESH=1 with another --run-id"

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
