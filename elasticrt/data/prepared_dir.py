"""The record of a prepared directory: its files with their digests, so that damage is noticed.

The record lies inside the directory that it describes, so that both appear in one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from elasticrt.data.durable_files import sync_tree
from elasticrt.errors import PreparationError
from elasticrt.ipc.file_modes import write_text

RECORD = ".elasticrt-prepared.json"
_FORMAT = 1
_READ_BYTES = 1 << 20


def describe(directory: Path, version: str, shown: str) -> None:
    """Write the record of everything in `directory`, and make all of it durable.

    Raises PreparationError, with the name `shown`, when there is nothing in it; OSError.
    """
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    if not paths:
        raise PreparationError("the build function made nothing", shown, got="an empty directory", expected="some file")
    _write(directory, version, [{**_stamp(path), "path": str(path.relative_to(directory))} for path in paths])
    sync_tree(directory)


def fits(directory: Path, version: str, *, refresh: bool = False) -> bool:
    """Whether the directory is there, of this version, and every file is as it was published.

    A file of the same size and modification time is taken as unchanged, so that a restart does not read all data again;
    any other is compared by digest.

    Args:
        directory: the directory.
        version: the version that is wanted.
        refresh: note the new times of unchanged files, such as those of a copy. Only with the right to build.
    """
    try:
        record = json.loads((directory / RECORD).read_text())
        if record["format"] != _FORMAT or record["version"] != version:
            return False
        stale = [each for each in record["files"] if not _is_as_it_was(directory / each["path"], each)]
        for each in stale:
            now = _stamp(directory / each["path"])
            if (now["size"], now["sha256"]) != (each["size"], each["sha256"]):
                return False
            each["mtime_ns"] = now["mtime_ns"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if stale and refresh:
        with contextlib.suppress(OSError):  # Read-only data is digested once in each process.
            _write(directory, version, record["files"])
    return True


def _write(directory: Path, version: str, files: list[dict[str, Any]]) -> None:
    draft = directory / f"{RECORD}.new"
    write_text(draft, json.dumps({"format": _FORMAT, "version": version, "files": files}, indent=1) + "\n")
    draft.replace(directory / RECORD)


def _is_as_it_was(path: Path, entry: dict[str, Any]) -> bool:
    status = path.stat()
    return bool(status.st_size == entry["size"] and status.st_mtime_ns == entry["mtime_ns"])


def _stamp(path: Path) -> dict[str, Any]:
    """Size, time and digest of a file. A link counts as what it leads to."""
    status, digest = path.stat(), hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": digest.hexdigest()}
