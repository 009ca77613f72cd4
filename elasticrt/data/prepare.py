"""One builds the data, everybody else waits, and nobody ever sees half of it.

The builder writes into a private directory beside the destination, which is then synced and renamed into place together
with a record of every file: name, size, time and SHA-256. Whoever finds a directory with a record that fits uses it;
anything else is built again. Which process builds is decided by a file lock that dies with its holder, or for storage
shared between nodes by a claim through the agents.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticrt.data.file_lock import FileLock
from elasticrt.data.prepared_dir import BuildFailure, PreparedRecord, attempt
from elasticrt.distributed import agent_client
from elasticrt.distributed.user_notice import say
from elasticrt.errors import ConfigError, PreparationError, explain
from elasticrt.ipc.file_modes import DIRECTORY_MODE, make_directory
from elasticrt.ipc.messages import Built, Claim, Reply

if TYPE_CHECKING:
    from elasticrt.distributed.barrier import Barrier

_POLL_S = 0.1
_CLAIM_POLL_S = 0.5
_PROGRESS_S = 10.0
_ANSWER_S = 60.0
_VISIBLE_S = 60.0
"""How long a network file system may take to show what another node has published."""


def prepare(
    path: str | os.PathLike[str],
    build: Callable[[Path], object],
    *,
    version: str = "1",
    scope: Literal["node", "shared"] = "node",
    timeout_s: float | None = None,
) -> Path:
    """The directory `path`, built by `build` exactly once, complete. Call it on every rank, before or after `init`.

    Args:
        path: where the result lies; its parent must be writable. A result that is there and fits its record is reused.
        build: called in one process with an empty private directory, which it fills. What it returns is ignored.
        version: a result of another version is built again.
        scope: "node": every node builds for itself. "shared": one node builds for all (the storage is shared).
        timeout_s: how long to wait for another builder, in seconds; None: as long as it lives.

    A builder that dies is replaced by one of those who wait. One that raises, or leaves its directory empty, fails all
    of them: PreparationError with its error. Raises PreparationError too when `timeout_s` passes, TypeError, ValueError
    and ConfigError for arguments that can't be.

    After `init` no rank returns before all nodes have their data: what follows is often a collective, and those wait
    for half an hour only.
    """
    target = _checked(path, build, version, scope, timeout_s)
    everybody = _everybody(target)
    if everybody is None:
        return _ready(target, build, version, scope, timeout_s)
    everybody.come()
    try:
        _ready(target, build, version, scope, timeout_s)
    except PreparationError as error:
        with contextlib.suppress(RuntimeError):  # Nobody is left who could be told: this error is what counts.
            everybody.through(str(error))
        raise
    everybody.through()
    try:
        problem = everybody.wait(math.inf if timeout_s is None else timeout_s)
    except TimeoutError as late:
        raise PreparationError(str(late)) from late
    if problem:
        raise PreparationError(problem)
    return target


def _everybody(target: Path) -> Barrier | None:
    """What all ranks meet in; None before `init`, and where they come one after the other."""
    if "torch.distributed" not in sys.modules:  # Data can be prepared without loading torch; then there is no group.
        return None
    from elasticrt.distributed.barrier import Barrier, together

    return Barrier(f"prepare({str(target)!r})") if together() else None


def _ready(target: Path, build: Callable[[Path], object], version: str, scope: str, timeout_s: float | None) -> Path:
    """The directory, complete, as far as this node is concerned. Raises PreparationError."""
    if PreparedRecord.fits(target, version):
        return target
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    try:
        make_directory(target.parent)
        agent = agent_client.agent_link() if scope == "shared" else None
        if agent is None:
            _through_lock(target, build, version, deadline)
        else:
            _Claims(agent, target, version).run(build, deadline)
    except OSError as error:
        raise PreparationError(explain("preparation failed", str(target), got=str(error))) from error
    return target


def _checked(path: object, build: object, version: object, scope: object, timeout_s: object) -> Path:
    where = "prepare"
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(explain("path is not a path", where, got=path))
    if not callable(build):
        raise TypeError(explain("build is not callable", where, got=build, expected="a function of one directory"))
    if not isinstance(version, str):
        raise TypeError(explain("version is not a text", where, got=version, expected='such as "1"'))
    if scope not in ("node", "shared"):
        raise ValueError(explain("no such scope", where, got=scope, expected='"node" or "shared"'))
    if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float))):
        raise TypeError(explain("timeout_s is not a number", where, got=timeout_s))
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(explain("timeout_s out of range", where, got=timeout_s, expected="> 0 seconds, or None"))
    target = Path(os.path.realpath(path))
    # What is at `target` may be replaced: never something that can only have been meant otherwise.
    if target in (Path.home(), *Path.cwd().parents, Path.cwd()) or os.path.ismount(target) or target.is_file():
        expected = "a directory of its own"
        raise ConfigError(explain("not a place for prepared data", where, got=str(target), expected=expected))
    return target


def _through_lock(target: Path, build: Callable[[Path], object], version: str, deadline: float) -> None:
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    waiting = _Waiting(target, deadline)
    while not lock.acquire(f"process {os.getpid()} on {socket.gethostname()}"):
        waiting.pause(lock.holder, _POLL_S)
    try:
        # It may have been built, or have failed, while we waited. Times that changed are looked into only here, once.
        if PreparedRecord.fits(target, version, refresh=True):
            return
        failure = BuildFailure.find(target)
        if failure is not None and failure.attempt == attempt() and failure.version == version:
            raise PreparationError(failure.error)
        BuildFailure.clear(target)
        for leftover in target.parent.glob(f".{target.name}.building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        name = f".{target.name}.building-{secrets.token_hex(8)}"
        try:
            with _building():
                _publish(_build(target, target.with_name(name), build, version), target)
        except PreparationError as error:
            BuildFailure(str(error), attempt(), version).leave(target)
            raise
    finally:
        lock.release()


def _build(target: Path, workshop: Path, build: Callable[[Path], object], version: str) -> Path:
    """Run the user's function in a private directory; the complete, synced result. Raises PreparationError."""
    try:
        workshop.mkdir(DIRECTORY_MODE)
        try:
            build(workshop)
        except (Exception, SystemExit) as error:
            text = explain("the build function failed", str(target), got=f"{type(error).__name__}: {error}")
            raise PreparationError(text) from error
        PreparedRecord.make(workshop, version, str(target))
    except OSError as error:
        shutil.rmtree(workshop, ignore_errors=True)
        raise PreparationError(explain("preparation failed", str(target), got=str(error))) from error
    except BaseException:
        shutil.rmtree(workshop, ignore_errors=True)
        raise
    return workshop


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """Let the agent know: should the membership change meanwhile, this process may finish."""
    page = agent_client.status_page()
    if page is None:
        yield
        return
    page.building = 1
    try:
        yield
    finally:
        page.building = 0


def _publish(workshop: Path, target: Path) -> None:
    """Put the result in its place in one rename; what was there before goes out of the way first."""
    aside = None
    if os.path.lexists(target):
        ours = PreparedRecord.exists(target)
        aside = target.with_name(f".{target.name}.building-old-{secrets.token_hex(8)}")
        if not ours and any(target.iterdir()):
            # Not made by us: that may be somebody's only copy.
            aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
            say(f"{target} has no record of its preparation; moved to {aside.name} and prepared anew")
        target.rename(aside)
    workshop.rename(target)
    PreparedRecord.sync_parent(target)
    if aside is not None and aside.name.startswith("."):
        shutil.rmtree(aside, ignore_errors=True)


class _Waiting:
    """Waiting for another builder: in small steps, with a deadline, and not in silence."""

    def __init__(self, target: Path, deadline: float) -> None:
        self._target = target
        self._deadline = deadline
        self._started = time.monotonic()
        self._told = self._started

    def pause(self, who: Callable[[], str], step_s: float) -> None:
        """One step. Raises PreparationError when the deadline has passed."""
        now = time.monotonic()
        if now >= self._deadline:
            raise PreparationError(
                explain(
                    "waited too long for the preparation",
                    str(self._target),
                    got=f"{now - self._started:.0f} s; built by {who() or 'somebody'}",
                    remedy="Give it a larger timeout_s, or look at what the builder is doing",
                )
            )
        if now - self._told >= _PROGRESS_S:
            self._told = now
            say(f"waiting for {self._target}: {who() or 'somebody'} builds, {now - self._started:.0f} s so far")
        time.sleep(min(step_s, max(0.0, self._deadline - now)))


class _Claims:
    """Shared storage under agents: who builds is agreed on by claims, fenced by the generation.

    Only local rank 0 claims, so that a node never builds twice. The other local ranks wait for the result; should
    their node's builder fail, its error ends the generation and them with it.
    """

    def __init__(self, agent: agent_client.AgentClient, target: Path, version: str) -> None:
        worker = agent_client.worker_env()
        self._agent = agent
        self._target = target
        self._version = version
        self._claims = worker is None or worker.local_rank == 0
        self._generation = 0 if worker is None else worker.generation
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:12]
        self._name = re.sub(r"[^A-Za-z0-9._-]", "_", target.name)[:64].lstrip(".") + "-" + digest

    def run(self, build: Callable[[Path], object], deadline: float) -> None:
        """Until the result is in place. Raises PreparationError."""
        waiting = _Waiting(self._target, deadline)
        seen_done = math.inf
        while True:
            reason = "wait: another process of this node"
            if self._claims:
                reply = self._claim(waiting)
                if reply.ok:
                    with _building():
                        built = self._built(build, waiting)
                    if built:
                        return
                    continue
                reason = reply.reason
            if PreparedRecord.fits(self._target, self._version):
                return
            if reason.startswith("failed"):
                raise PreparationError(reason.removeprefix("failed:").strip() or "the build failed elsewhere")
            if reason == "done":
                seen_done = min(seen_done, time.monotonic())
                self._check_visible(seen_done)
            elif not reason.startswith("wait"):
                raise PreparationError(explain("the agent refuses the preparation", str(self._target), got=reason))
            waiting.pause(lambda reason=reason: reason.partition(":")[2].strip(), _CLAIM_POLL_S)  # type: ignore[misc]

    def _claim(self, waiting: _Waiting) -> Reply:
        """Ask to build, until the answer is known: a claim whose answer was lost may stand."""
        while True:
            reply = self._ask(lambda number: Claim(number, self._name, self._version))
            if reply.ok or not reply.reason.startswith("unsure"):
                return reply
            waiting.pause(lambda: "nobody knows who", _CLAIM_POLL_S)

    def _built(self, build: Callable[[Path], object], waiting: _Waiting) -> bool:
        """Build and publish; False when the claim was lost meanwhile: then somebody else's result counts."""
        if not PreparedRecord.fits(self._target, self._version, refresh=True):
            try:
                workshop = _build(self._target, self._workshop(), build, self._version)
            except PreparationError as error:
                text = str(error)[:1000]
                self._ask(lambda number: Built(number, self._name, self._version, "", text))
                raise
            # Asked again just before the rename: a builder that was paused for long has lost its claim to another.
            mine = self._claim(waiting).ok
            if not mine or PreparedRecord.fits(self._target, self._version):
                shutil.rmtree(workshop, ignore_errors=True)
                if not mine:
                    return False
            else:
                _publish(workshop, self._target)
                self._tidy()
        digest = PreparedRecord.digest(self._target)
        reply = self._ask(lambda number: Built(number, self._name, self._version, digest))
        return reply.ok

    def _workshop(self) -> Path:
        return self._target.with_name(f".{self._target.name}.shared-{self._generation}-{secrets.token_hex(8)}")

    def _tidy(self) -> None:
        """Remove what builders of earlier generations left. One of this generation may be paused, and live."""
        for leftover in self._target.parent.glob(f".{self._target.name}.shared-*"):
            generation = leftover.name.rpartition("shared-")[2].partition("-")[0]
            if generation.isdigit() and int(generation) < self._generation:
                shutil.rmtree(leftover, ignore_errors=True)

    def _ask(self, make: Callable[[int], Claim | Built]) -> Reply:
        reply = self._agent.request(make).wait(_ANSWER_S)
        if reply is None:
            text = explain("no answer from the agent", str(self._target), got=f"nothing in {_ANSWER_S:.0f} s")
            raise PreparationError(text)
        return reply

    def _check_visible(self, seen_done: float) -> None:
        if time.monotonic() - seen_done > _VISIBLE_S:
            raise PreparationError(
                explain(
                    "prepared, but not there",
                    str(self._target),
                    got=f"nothing that fits its record for {_VISIBLE_S:.0f} s",
                    expected='storage that all nodes share (scope="shared")',
                    remedy='Use scope="node", or another version',
                )
            )
