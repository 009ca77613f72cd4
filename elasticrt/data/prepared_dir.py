"""The record of a prepared directory, and the note that a failed builder leaves for those who wait.

A record lies inside the directory it describes, so that both appear in one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from elasticrt.data.durable_files import sync_tree
from elasticrt.errors import PreparationError, explain
from elasticrt.ipc.file_modes import write_text

RECORD = ".elasticrt-prepared.json"
_FORMAT = 1
_READ_BYTES = 1 << 20
_FAILURE_S = 60.0
"""How long a failure speaks for those who come late. After that the build is tried again."""


def describe(directory: Path, version: str, shown: str) -> None:
    """Write the record of everything in `directory`, and make all of it durable.

    Raises PreparationError, with the name `shown`, when there is nothing in it; OSError.
    """
    files = [_describe(path, directory) for path in _files(directory)]
    if not files:
        raise PreparationError(
            explain("the build function made nothing", shown, got="an empty directory", expected="some file")
        )
    text = json.dumps({"format": _FORMAT, "version": version, "files": files}, indent=1)
    write_text(directory / RECORD, text + "\n")
    sync_tree(directory)


def fits(directory: Path, version: str, *, refresh: bool = False) -> bool:
    """Whether the directory is there, of this version, and every file is as it was published.

    A file of the same size and modification time is taken as unchanged, so that a restart need not read all data
    again; any other is compared by digest. `refresh` (only with the right to build) notes new times that proved
    harmless, such as those of a copy.
    """
    try:
        record = json.loads((directory / RECORD).read_text())
        if record["format"] != _FORMAT or record["version"] != version:
            return False
        stale = [entry for entry in record["files"] if not _same(directory, entry)]
        unchanged = all(_same_content(directory, entry) for entry in stale)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if stale and unchanged and refresh:
        _refresh(directory, record)
    return unchanged


def digest_of(directory: Path) -> str:
    """SHA-256 of the record itself. Raises OSError when there is none."""
    return hashlib.sha256((directory / RECORD).read_bytes()).hexdigest()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)


def _describe(path: Path, directory: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "path": str(path.relative_to(directory)),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": _digest(path),
    }


def _digest(path: Path) -> str:
    # A build may link to data elsewhere; what counts is what is read through the link.
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()


def _same(directory: Path, entry: dict[str, Any]) -> bool:
    status = (directory / entry["path"]).stat()
    return bool(status.st_size == entry["size"] and status.st_mtime_ns == entry["mtime_ns"])


def _same_content(directory: Path, entry: dict[str, Any]) -> bool:
    path = directory / entry["path"]
    return bool(path.stat().st_size == entry["size"] and _digest(path) == entry["sha256"])


def _refresh(directory: Path, record: dict[str, Any]) -> None:
    for entry in record["files"]:
        entry["mtime_ns"] = (directory / entry["path"]).stat().st_mtime_ns
    temporary = directory / f"{RECORD}.new"
    with contextlib.suppress(OSError):  # Data may be read-only here; then it is digested once for each process.
        write_text(temporary, json.dumps(record, indent=1) + "\n")
        temporary.replace(directory / RECORD)


def note_failure(target: Path, version: str, error: str) -> None:
    """Leave the builder's error for those who wait. Without the note (disk full) they build and fail by themselves."""
    with contextlib.suppress(OSError):
        write_text(_failure(target), json.dumps([_attempt(), version, error]))


def noted_failure(target: Path, version: str) -> str:
    """The builder's error in this start of the job, if it was noted lately for this version; else ""."""
    try:
        if time.time() - _failure(target).stat().st_mtime > _FAILURE_S:
            return ""
        *of, error = json.loads(_failure(target).read_text())
    except (OSError, ValueError, TypeError):
        return ""
    return str(error) if of == [_attempt(), version] else ""


def clear_failure(target: Path) -> None:
    """Remove the note."""
    _failure(target).unlink(missing_ok=True)


def _failure(target: Path) -> Path:
    return target.with_name(f".{target.name}.failed.json")


def _attempt() -> str:
    """Names this start of this job on this node: equal for all its processes, another one after a restart."""
    generation = os.environ.get("ELASTICRT_NONCE", "") + os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    # Processes of one job have a launcher in common; a process alone has only itself.
    together = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"{generation}:{os.getppid() if together else os.getpid()}"
