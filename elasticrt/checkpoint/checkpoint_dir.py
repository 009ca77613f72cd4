"""A checkpoint directory on disk: its history read with suspicion, payloads verified before they are parsed, files
written durably, old ones deleted late. `manifest` says what the files mean; `checkpoint` says when.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import pickle
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elasticrt.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    MARK,
    PAYLOAD,
    TEMPORARY,
    History,
    Manifest,
    Name,
    doomed,
    stem_of,
)
from elasticrt.data.durable_files import Directory, Unfit, open_plain, put, sha256
from elasticrt.errors import CheckpointError, DuplicateError, explain
from elasticrt.ipc.directory_owner import Holding, Owner
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.text import packed

_log = logging.getLogger(__name__)

_locks: dict[str, Holding] = {}
"""Directories this process saves to without an agent; held until it ends."""


def take_alone(directory: Path) -> Owner | None:
    """Take a directory without an agent; who has it instead, if that is somebody who lives. Raises OSError."""
    key = os.path.realpath(directory)
    if key in _locks:
        return None
    holding = Holding(directory, Owner.here("", "", socket.gethostname()), lambda _: None)
    other = holding.take()
    if other is None:
        _locks[key] = holding
        atexit.register(holding.release)
    return other


def duplicate(directory: Path, other: str) -> DuplicateError:
    """Somebody else who lives saves there."""
    return DuplicateError(
        explain(
            "another live run saves checkpoints here",
            str(directory),
            got=other,
            remedy="Use another directory, or stop the other one",
        )
    )


class CheckpointDirectory:
    """The checkpoint directory as one process uses it: all look into theirs, rank 0 saves. Opened by `open`.

    Attributes:
        path: where it is.
        serial: what is written next gets a larger one.
        troubles: what `history` has left out, and why.
    """

    def __init__(self, path: Path, keep: int, worker: WorkerEnv | None) -> None:
        self.path = path
        self._keep = keep
        self._worker = worker
        self._generation = 0 if worker is None else worker.generation
        self._directory: Directory | None = None
        self._claimed = False
        self._before: frozenset[str] = frozenset()  # Nonces of what others had left here when it was claimed.
        self.serial = 0
        self.troubles: list[str] = []

    def move(self, worker: WorkerEnv) -> None:
        """This process belongs to another generation: the directory is claimed anew at the next save."""
        self._worker, self._generation = worker, worker.generation
        if self._directory is not None:
            self.serial = max(self.serial, self.history().serial)  # Another rank 0 may have saved here.
        self._claimed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a directory, as far as this process has looked."""
        return self._directory is not None

    def open(self, *, create: bool) -> bool:
        """Open the directory if it is not open; False when it does not exist and is not to be created.

        Raises CheckpointError when it can't be used.
        """
        if self._directory is not None:
            return True
        if not create and not os.path.lexists(self.path):
            return False
        try:
            self._directory = Directory(self.path, create=create)
            self.serial = max(self.serial, self.history().serial)
        except (OSError, Unfit) as error:
            raise CheckpointError(
                explain("the checkpoint directory can't be used", str(self.path), got=str(error))
            ) from error
        return True

    def claim(self, take: Callable[[], Owner | None]) -> None:
        """Before saving: refuse a directory that another live run saves to. `take` says who that is.

        Raises DuplicateError, CheckpointError.
        """
        if self._claimed:
            return
        try:
            other = take()
        except OSError as error:
            raise CheckpointError(
                explain("the checkpoint directory can't be used", str(self.path), got=str(error))
            ) from error
        if other is not None:
            raise duplicate(self.path, str(other))
        self._before = frozenset(map(_nonce_of, self._opened().names())) - {""}
        self._claimed = True

    def history(self) -> History:
        """What the directory tells, read anew. Files that are not what they should be are left out; see `troubles`.

        Raises OSError when it can't be listed.
        """
        directory = self._opened()
        self.troubles = []
        manifests: dict[str, Manifest] = {}
        marked = set()
        for text in directory.names():
            name = Name.parse(text)
            if name is None or name.suffix == PAYLOAD:
                continue
            try:
                if name.suffix == MARK:
                    directory.read(text, size_max=MANIFEST_BYTES_MAX)
                    marked.add(name.nonce)
                else:
                    content = directory.read(text, size_max=MANIFEST_BYTES_MAX)
                    manifests[name.nonce] = Manifest.from_json(content, name.stem)
            except (Unfit, ValueError, OSError) as error:
                self.troubles.append(f"{text}: {error}")
        return History(manifests, frozenset(marked))

    def lineage_of(self, resume: Commit, history: History) -> list[Manifest]:
        """`resume` as etcd records it (not as the directory says), then its ancestors by the directory's manifests.

        Ahead of them what the directory has in addition: an etcd that was restored from a backup knows an old head.
        """
        known = history.manifests.get(resume.nonce)
        run = self._worker.run_id if self._worker is not None else ""
        first = Manifest(resume, run, 0 if known is None else known.world_size)
        return [*history.beyond(resume.nonce, run), first, *history.lineage(resume.parent)]

    def look(self, commit: Commit) -> None:
        """Whether a payload is here and has the right size, without reading it. Raises Unfit, OSError if not."""
        fd = open_plain(commit.file, dir_fd=self._opened().fd)
        try:
            found = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if found != commit.size:
            raise Unfit(f"it has {found} bytes instead of {commit.size}")

    def load(self, commit: Commit) -> tuple[bytearray, dict[str, Any]]:
        """A payload and what is in it. Raises Unfit, OSError, CheckpointError."""
        payload = self.payload(commit)
        return payload, parse(payload)

    def payload(self, commit: Commit) -> bytearray:
        """The bytes of a payload, proven to be those that were committed. Raises Unfit, OSError; nothing is parsed."""
        content = self._opened().read(commit.file, size=commit.size)
        digest = sha256(content)
        if digest != commit.digest:
            raise Unfit(f"its SHA-256 is {digest[:12]}... instead of {commit.digest[:12]}...")
        return content

    def write(
        self,
        fill: Callable[[int], tuple[int, str]],
        *,
        step: int,
        epoch: int,
        nonce: str,
        parent: str,
        world_size: int,
        about: dict[str, Any],
        place: str = "",
        total: int = 0,
    ) -> Manifest:
        """Make payload and manifest durable. Raises OSError; then neither is left.

        `fill` writes the payload to a descriptor, and says its size in bytes and SHA-256.
        """
        directory = self._opened()
        stem = stem_of(step, self._generation, nonce)
        temporary = f"{TEMPORARY}{stem}"
        size, digest = directory.write(stem + PAYLOAD, temporary, fill)
        commit = Commit(
            step=step,
            epoch=epoch,
            generation=self._generation,
            nonce=nonce,
            parent=parent,
            directory=packed(str(self.path)),
            file=stem + PAYLOAD,
            digest=digest,
            size=size,
            serial=self.serial + 1,
            node="" if self._worker is None else self._worker.node,
            place=place,
            total=0 if total == step else total,
        )
        manifest = Manifest(commit, self._run(), world_size, {"torch": torch.__version__, **about})
        try:
            directory.write(stem + MANIFEST, temporary, lambda fd: put(fd, manifest.to_json()))
        except BaseException:
            directory.remove(stem + PAYLOAD)
            raise
        self.serial += 1
        return manifest

    def mark(self, commit: Commit) -> None:
        """Say on disk that this checkpoint is committed. Raises OSError."""
        directory = self._opened()
        stem = commit.file.removesuffix(PAYLOAD)
        if not os.access(stem + MARK, os.F_OK, dir_fd=directory.fd, follow_symlinks=False):
            text = commit.to_json().encode() + b"\n"
            # A name of its own: whoever loads may have died while writing this mark, or be writing it now.
            temporary = f"{TEMPORARY}{stem}.{secrets.token_hex(4)}"
            directory.write(stem + MARK, temporary, lambda fd: put(fd, text))

    def tidy(self, head: str) -> None:
        """Delete what is no longer needed now that `head` is committed. Raises OSError."""
        directory = self._opened()
        texts = directory.names()
        names = [name for name in map(Name.parse, texts) if name is not None]
        temporaries = [text for text in texts if text.startswith(TEMPORARY)]
        stems = doomed(self.history(), names, head, self._keep, self._before)
        for stem in stems:
            directory.remove(stem + MARK)
        if stems:
            # What a crash then leaves has no mark, and is tidied up as an interrupted save is. A mark without its
            # manifest would be kept for ever: it could be a checkpoint that only needs its manifest back.
            directory.sync()
        for stem in stems:
            directory.remove(stem + MANIFEST)
            directory.remove(stem + PAYLOAD)
        for text in temporaries:
            if _nonce_of(text) in self._before:
                directory.remove(text)

    def _opened(self) -> Directory:
        assert self._directory is not None, "open() comes first"
        return self._directory

    def _run(self) -> str:
        if self._worker is not None:
            return self._worker.run_id
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return "" if run == "none" else run


def _nonce_of(text: str) -> str:
    """Of a checkpoint's file, or of a temporary that would have become one; "" of any other."""
    name = Name.parse(text)
    if name is None and text.startswith(TEMPORARY):
        name = Name.parse(text.removeprefix(TEMPORARY).partition(".")[0] + PAYLOAD)
    return "" if name is None else name.nonce


def parse(payload: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The payload as plain values. Only called on bytes whose digest is that of a commit. Raises CheckpointError."""
    try:
        data = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"torch.load(weights_only=True) refuses it: {str(error)[:200]}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"it holds a {type(data).__name__} instead of a dict")
    return data
