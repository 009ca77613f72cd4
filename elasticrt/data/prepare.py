"""One builds the data, everybody else waits, and nobody ever sees half of it.

The builder writes into a private directory beside the destination, which is then synced and renamed into place together
with a record of every file: name, size, time and SHA-256. A directory whose record fits is used as it is;
any other is built again. A file lock decides which process builds, or on storage that nodes share a claim through the
agents.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticrt.data import prepared_dir
from elasticrt.data.build_rights import ClaimRight, LockRight
from elasticrt.data.durable_files import sync_directory
from elasticrt.distributed import agent_client
from elasticrt.distributed.user_notice import say
from elasticrt.errors import ConfigError, PreparationError, explain
from elasticrt.ipc.file_modes import DIRECTORY_MODE, make_directory

if TYPE_CHECKING:
    from elasticrt.distributed.barrier import Barrier


PROGRESS_S = 10.0
"""How often a rank that waits says for whom."""


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
        _ready(target, build, version, scope, timeout_s)
        return target
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


def _ready(target: Path, build: Callable[[Path], object], version: str, scope: str, timeout_s: float | None) -> None:
    """Have the directory complete, as far as this node is concerned. Raises PreparationError."""
    if prepared_dir.fits(target, version):
        return
    agent = agent_client.agent_link() if scope == "shared" else None
    began = time.monotonic()
    try:
        make_directory(target.parent)
        right: LockRight | ClaimRight = LockRight(target, version)
        if agent is not None:
            right = ClaimRight(agent, target, version)
        while True:
            if right.ask():
                try:
                    with _building():
                        done = _build_once(right, target, build, version)
                finally:
                    right.release()
                if done:
                    return
            elif prepared_dir.fits(target, version):
                return
            else:
                _pause(right, target, time.monotonic() - began, math.inf if timeout_s is None else timeout_s)
    except OSError as error:
        raise PreparationError(explain("preparation failed", str(target), got=str(error))) from error


def _pause(right: LockRight | ClaimRight, target: Path, waited_s: float, limit_s: float) -> None:
    """Wait until it is time to ask for the right again, not in silence. Raises PreparationError after `limit_s`."""
    if waited_s >= limit_s:
        raise PreparationError(
            explain(
                "waited too long for the preparation",
                str(target),
                got=f"{waited_s:.0f} s; built by {right.holder() or 'another process'}",
                remedy="Give it a larger timeout_s, or look at what the builder is doing",
            )
        )
    pause_s = min(right.poll_s, limit_s - waited_s)
    time.sleep(pause_s)
    if (waited_s + pause_s) // PROGRESS_S > waited_s // PROGRESS_S:
        say(f"waiting for {target}: {right.holder() or 'another process'} builds, {waited_s:.0f} s so far")


def _build_once(right: LockRight | ClaimRight, target: Path, build: Callable[[Path], object], version: str) -> bool:
    """Build and publish, having the right. False when it was lost meanwhile: then another builder's result counts."""
    if not prepared_dir.fits(target, version, refresh=True):  # It may have been built while this process waited.
        right.sweep()
        workshop = target.with_name(f".{target.name}.{right.workshop}-{secrets.token_hex(8)}")
        try:
            _build(target, workshop, build, version)
        except PreparationError as error:
            right.failed(str(error))
            raise
        try:
            return right.publish(lambda: _publish(workshop, target, version))
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    return right.publish(lambda: None)


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


def _build(target: Path, workshop: Path, build: Callable[[Path], object], version: str) -> None:
    """Run the user's function in a private directory, which is then complete and durable. Raises PreparationError."""
    try:
        workshop.mkdir(DIRECTORY_MODE)
        try:
            build(workshop)
        except (Exception, SystemExit) as error:
            text = explain("the build function failed", str(target), got=f"{type(error).__name__}: {error}")
            raise PreparationError(text) from error
        prepared_dir.describe(workshop, version, str(target))
    except OSError as error:
        shutil.rmtree(workshop, ignore_errors=True)
        raise PreparationError(explain("preparation failed", str(target), got=str(error))) from error
    except BaseException:
        shutil.rmtree(workshop, ignore_errors=True)
        raise


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


def _publish(workshop: Path, target: Path, version: str) -> None:
    """Put the result in its place in one rename; what was there before, and does not fit, goes out of the way first."""
    if prepared_dir.fits(target, version):
        return
    aside = None
    if os.path.lexists(target):
        ours = (target / prepared_dir.RECORD).is_file()
        aside = target.with_name(f".{target.name}.building-old-{secrets.token_hex(8)}")
        if not ours and any(target.iterdir()):
            # Not made by us: it may be the only copy.
            aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
            say(f"{target} has no record of its preparation; moved to {aside.name} and prepared anew")
        target.rename(aside)
    workshop.rename(target)
    sync_directory(target.parent)
    if aside is not None and aside.name.startswith("."):
        shutil.rmtree(aside, ignore_errors=True)
