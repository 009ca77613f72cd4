"""Reads and writes a checkpoint directory: payloads are verified before they are parsed, and files written durably.

`manifest` says what the files mean and which may be deleted; `checkpointer` and `restoring` say when.
"""

from __future__ import annotations

import atexit
import errno
import io
import logging
import os
import pickle
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from elasticrt.checkpoint.manifest import (
    DRAFT,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    NAME,
    PAYLOAD,
    TEMPORARY,
    History,
    Manifest,
    deletable_files,
)
from elasticrt.data.durable_files import Directory, Unfit, put
from elasticrt.distributed.shared_payload import Payload
from elasticrt.errors import CheckpointError, DuplicateError
from elasticrt.ipc.directory_owner import Holding, Owner
from elasticrt.ipc.env import Commit

_log = logging.getLogger(__name__)

# The disk is full, over quota, read-only or failing, or its NFS server has restarted. The trouble may be over by the
# next save, so a save that fails of it does not end the run.
_OF_DISK = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE))
# The directories that this process saves to without an agent, held until the process ends.
_locks: dict[str, Holding] = {}


def take_alone(directory: Path) -> None:
    """Take a directory for this process, which has no agent.

    Raises DuplicateError if another live process saves there; OSError.
    """
    # Two Checkpointers may name one directory differently.
    key = os.path.realpath(directory)
    if key in _locks:
        return
    holding = Holding(directory, Owner.here("", "", socket.gethostname()))
    other = holding.take()
    if other is not None:
        raise duplicate(directory, str(other))
    _locks[key] = holding
    atexit.register(holding.release)


def duplicate(directory: Path, other: str) -> DuplicateError:
    """The error when another live process saves to `directory`. `other` names that process."""
    what, remedy = "another live run saves checkpoints here", "Use another directory, or stop the other one"
    return DuplicateError(what, str(directory), got=other, remedy=remedy)


class CheckpointDirectory:
    """A checkpoint directory, as one process uses it. Every rank may read its own; rank 0 saves.

    Args:
        path: the directory, which need not exist yet.
        keep: how many of the newest checkpoints to keep.

    Attributes:
        path: as given.
        serial: the highest serial number that this process knows. The next checkpoint gets a larger one.
        had_commits: whether the directory had commits when this process claimed it.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep
        self._directory: Directory | None = None
        # The nonces that were in the directory when this process claimed it. None: this process has not claimed it.
        self._before: frozenset[str] | None = None
        self.serial = 0
        self.had_commits = False

    def open(self, *, create: bool) -> bool:
        """Open the directory if it is not open. Returns False when it does not exist and `create` is not set.

        Raises CheckpointError when the directory can't be used; OSError when its disk is full, read-only or failing.
        """
        if self._directory is not None:
            return True
        if not create and not os.path.lexists(self.path):
            return False
        try:
            self._directory = Directory(self.path, create=create)
        except (OSError, Unfit) as error:
            self._refuse(error)
        return True

    def claim(self, take: Callable[[], object]) -> None:
        """Before a save: create the directory, and take it for this run. Does nothing if that is done.

        A directory that was deleted meanwhile is made again.

        Args:
            take: takes the directory for this run, or raises.

        Raises what `take` raises; CheckpointError when the directory can't be used; OSError when its disk is full,
        read-only or failing.
        """
        if self._directory is not None and self._directory.is_removed:
            _log.warning("the checkpoint directory %s was deleted; it is made again", self.path)
            self._directory.close()
            self._directory = self._before = None
        if self._before is not None:
            return
        self.open(create=True)
        try:
            take()
            # Listing the directory also renews `serial`: another node's rank 0 may have saved here.
            self.had_commits = bool(self.history().marked)
            # Without a single manifest, the payloads may be copies that a user has made without manifests. They stay.
            kept = () if self.had_commits else (PAYLOAD,)
            self._before = frozenset(name["nonce"] for name in self._names() if name["suffix"] not in kept)
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise `error` itself if it comes from the disk, so that the next save tries again; else CheckpointError."""
        if isinstance(error, OSError) and error.errno in _OF_DISK:
            raise error
        raise self.unusable(error) from error

    def unusable(self, error: Exception) -> CheckpointError:
        """The CheckpointError that the directory can't be used because of `error`."""
        expected, remedy = "a directory that this user can write to", "Fix it, or use another directory"
        what = "the checkpoint directory can't be used"
        return CheckpointError(what, str(self.path), got=error, expected=expected, remedy=remedy)

    def disclaim(self) -> None:
        """Claim the directory anew before the next save, because this process has another place in the run."""
        self._before = None

    def history(self) -> History:
        """Read all manifests in the directory. Raises OSError when the directory can't be listed."""
        directory = self._opened()
        # A file that is wrong in any way costs that checkpoint, and not the others.
        troubles, manifests, marked, names = [], {}, set(), self._names()
        described = {name["stem"] for name in names if name["suffix"] in (MANIFEST, DRAFT)}
        for name in names:
            if name["suffix"] == PAYLOAD and not name["temporary"] and name["stem"] not in described:
                troubles.append(f"{name.string}: there is no {name['stem']}{MANIFEST} with it")
            if name["suffix"] not in (MANIFEST, DRAFT):
                continue
            if name["suffix"] == MANIFEST:
                marked.add(name["nonce"])
            try:
                content = directory.read(name.string, size_max=MANIFEST_BYTES_MAX)
                manifests[name["nonce"]] = Manifest.from_json(content, name["stem"])
            except (Unfit, ValueError, OSError) as error:
                troubles.append(f"{name.string}: {error}")
        found = History(manifests, frozenset(marked), tuple(troubles))
        self.serial = max(self.serial, found.serial)
        return found

    def look(self, commit: Commit) -> None:
        """Check that the payload of `commit` is here and has the right size, without reading it.

        Raises Unfit or OSError if not.
        """
        self._opened().look(commit.file, commit.size)

    def payload(self, commit: Commit) -> Payload:
        """The payload of `commit`, in memory and verified by its digest, but not parsed. Raises Unfit, OSError."""
        payload = Payload()
        digest = self._opened().read_into(commit.file, payload.write, commit.size)
        if digest != commit.digest:
            raise Unfit(f"its SHA-256 is {digest[:12]}... instead of {commit.digest[:12]}...")
        return payload

    def write(self, manifest: Manifest, fill: Callable[[int], tuple[int, str]]) -> Commit:
        """Write payload and draft durably. Returns the commit to ask for, which has the payload's size and digest.

        Args:
            manifest: the manifest without size and digest.
            fill: writes the payload to a descriptor, and returns its size in bytes and its SHA-256 in hex.

        Raises OSError, and what `fill` raises. Neither file is left then.
        """
        directory, name = self._opened(), manifest.commit.file
        stem = name.removesuffix(PAYLOAD)
        # The payload comes first, so that a draft never describes a file that is not there.
        size, digest = directory.write(name, TEMPORARY + stem, fill)
        commit = replace(manifest.commit, size=size, digest=digest)
        content = replace(manifest, commit=commit).to_json()
        try:
            directory.write(stem + DRAFT, TEMPORARY + stem, lambda fd: put(fd, content))
        except BaseException:
            directory.remove(name)
            raise
        self.serial = max(self.serial, commit.serial)
        return commit

    def mark(self, commit: Commit) -> None:
        """Note on disk that `commit` was accepted: rename its draft to a manifest. Raises OSError.

        Does nothing if there is no draft, as after an earlier mark.
        """
        stem = commit.file.removesuffix(PAYLOAD)
        self._opened().rename(stem + DRAFT, stem + MANIFEST)

    def discard(self, commit: Commit) -> None:
        """Delete the files of a checkpoint whose commit was refused. Raises OSError."""
        for name in (commit.file.removesuffix(PAYLOAD) + DRAFT, commit.file):
            self._opened().remove(name)

    def tidy(self, head: str) -> None:
        """Delete the files that are not needed now that the commit with the nonce `head` is there. Raises OSError."""
        directory = self._opened()
        for name in deletable_files(self.history(), self._names(), head, self._keep, self._before or frozenset()):
            directory.remove(name.string)

    def _names(self) -> list[re.Match[str]]:
        return [name for name in map(NAME.fullmatch, self._opened().names()) if name is not None]

    def _opened(self) -> Directory:
        assert self._directory is not None, "open() comes first"
        return self._directory


def parse(payload: Payload | bytes | bytearray) -> dict[str, Any]:
    """Parse a payload into plain values. The caller has verified its digest. Raises CheckpointError.

    The tensors of a `Payload` map its memory file, which all ranks of this machine share. A rank that writes to a
    tensor gets its own copy of the pages that it changes.
    """
    try:
        if isinstance(payload, Payload):
            data = torch.load(payload.path, map_location="cpu", weights_only=True, mmap=True)
        else:
            data = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"torch.load(weights_only=True) refuses it: {str(error)[:200]}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"it holds a {type(data).__name__} instead of a dict")
    return data
