"""One process builds the data, the others wait, and none ever sees half of it.

The builder writes into a private directory beside the destination, which is then synced and renamed into place together
with a record of every file: name, size, time and SHA-256. A directory whose record fits is used as it is; any other is
built again. `build_rights` decides which process builds.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticrt.data import prepared_dir
from elasticrt.data.build_rights import ClaimRight, LockRight
from elasticrt.data.durable_files import sync
from elasticrt.distributed import agent_client
from elasticrt.distributed.user_notice import say
from elasticrt.errors import ConfigError, PreparationError, explain
from elasticrt.ipc.file_modes import DIRECTORY_MODE, make_directory

if TYPE_CHECKING:
    from elasticrt.distributed.barrier import Barrier


PROGRESS_S = 10.0
"""A rank that waits names the builder as often as this."""


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

    A builder that dies is replaced by a process that waits. One that raises, or leaves its directory empty, fails with
    PreparationError, which ends the run; in the "shared" scope all nodes fail with its error. Raises PreparationError
    too when `timeout_s` passes, TypeError, ValueError and ConfigError for invalid arguments.

    After `init` no rank returns before all nodes have their data: what follows is often a collective, and those wait
    for half an hour only.
    """
    target = _checked(path, build, version, scope, timeout_s)
    limit_s = math.inf if timeout_s is None else timeout_s
    ranks = _ranks(target)
    if ranks is None:
        _ready(target, build, version, scope, limit_s)
        return target
    ranks.come()
    try:
        _ready(target, build, version, scope, limit_s)
    except PreparationError as error:
        with contextlib.suppress(RuntimeError):  # The other ranks may have ended: this error is what counts.
            ranks.through(str(error))
        raise
    ranks.through()
    try:
        problem = ranks.wait(limit_s)
    except TimeoutError as late:
        raise PreparationError(str(late)) from late
    if problem:
        raise PreparationError(problem)
    return target


def _ranks(target: Path) -> Barrier | None:
    """Where all ranks meet; None before `init`, and where they come one after the other."""
    if "torch.distributed" not in sys.modules:  # Data can be prepared without loading torch; then there is no group.
        return None
    from elasticrt.distributed.barrier import Barrier, together

    return Barrier(f"prepare({str(target)!r})") if together() else None


def _ready(target: Path, build: Callable[[Path], object], version: str, scope: str, limit_s: float) -> None:
    """Return when the directory is complete on this node. Raises PreparationError."""
    if prepared_dir.fits(target, version):
        return
    page, began = agent_client.status_page(), time.monotonic()
    try:
        make_directory(target.parent)
        for_all = scope == "shared" and agent_client.agent_link().linked
        right = ClaimRight(target, version) if for_all else LockRight(target)
        while True:
            if right.ask():
                try:
                    page.building = 1  # The agent lets it finish when the membership changes.
                    if _build(right, target, build, version):
                        return
                finally:
                    page.building = 0
                    right.release()
            # Another process has built it, or takes over from here: this one has no right, or has lost it.
            if prepared_dir.fits(target, version):
                return
            _pause(right, target, time.monotonic() - began, limit_s)
    except OSError as error:
        raise _failed(target, error) from error


def _failed(target: Path, error: OSError) -> PreparationError:
    expected, remedy = "a directory that this user can write to, with room", "Mend it, or prepare the data elsewhere"
    return PreparationError("preparation failed", str(target), got=error, expected=expected, remedy=remedy)


def _pause(right: LockRight | ClaimRight, target: Path, waited_s: float, limit_s: float) -> None:
    """Wait until it is time to ask for the right again, and say so. Raises PreparationError after `limit_s`."""
    if waited_s >= limit_s:
        got = f"{waited_s:.0f} s; built by {right.holder or 'another process'}"
        remedy = "Give it a larger timeout_s, or look at what the builder is doing"
        raise PreparationError("waited too long for the preparation", str(target), got=got, remedy=remedy)
    pause_s = min(right.poll_s, limit_s - waited_s)
    time.sleep(pause_s)
    if (waited_s + pause_s) // PROGRESS_S > waited_s // PROGRESS_S:
        say(f"waiting for {target}: {right.holder or 'another process'} builds, {waited_s:.0f} s so far")


def _build(right: LockRight | ClaimRight, target: Path, build: Callable[[Path], object], version: str) -> bool:
    """Build and publish. False when the right was lost meanwhile: then the result of another builder counts."""
    if prepared_dir.fits(target, version):  # It may have been built while this process waited.
        return right.publish(lambda: None)
    right.sweep()
    workshop = target.with_name(f".{target.name}.{right.workshop}-{secrets.token_hex(8)}")
    try:
        try:
            _fill(workshop, target, build, version)
        except PreparationError as error:
            right.failed(str(error))
            raise
        return right.publish(lambda: _publish(workshop, target, version))
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _fill(workshop: Path, target: Path, build: Callable[[Path], object], version: str) -> None:
    """Run the user's function in a private directory, which is then complete and durable. Raises PreparationError."""
    try:
        workshop.mkdir(DIRECTORY_MODE)
        try:
            build(workshop)
        except (Exception, SystemExit) as error:
            got, expected = f"{type(error).__name__}: {error}", "a build without an exception"
            what, remedy = "the build function failed", "Mend it, then start again"
            raise PreparationError(what, str(target), got=got, expected=expected, remedy=remedy) from error
        prepared_dir.describe(workshop, version, str(target))
    except OSError as error:
        raise _failed(target, error) from error


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
    # What is at `target` may be replaced, so a path that can only be a mistake is refused.
    if target in (Path.home(), *Path.cwd().parents, Path.cwd()) or os.path.ismount(target) or target.is_file():
        got, expected = str(target), "a directory of its own"
        raise ConfigError("not a place for prepared data", where, got=got, expected=expected)
    return target


def _publish(workshop: Path, target: Path, version: str) -> None:
    """Put the result in place in one rename. What is there and does not fit is renamed first."""
    if prepared_dir.fits(target, version):
        return
    aside = None
    if os.path.lexists(target):
        ours = (target / prepared_dir.RECORD).is_file()
        aside = workshop.with_name(f"{workshop.name}-old")  # If this process dies, it is swept as the workshop is.
        if not ours and any(target.iterdir()):
            # Something else than a prepared directory: it may be the only copy.
            aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
            say(f"{target} has no record of its preparation; moved to {aside.name} and prepared anew")
        target.rename(aside)
    workshop.rename(target)
    sync(target.parent)
    if aside is not None and aside.name.startswith("."):
        shutil.rmtree(aside, ignore_errors=True)
