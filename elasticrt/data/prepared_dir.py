"""The record of a prepared directory: its files with their digests, so that damage is noticed.

The record lies inside the directory that it describes, so that both appear in one rename.
"""

from __future__ import annotations

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
    files = [{**_stamp(path), "path": str(path.relative_to(directory))} for path in paths]
    write_text(directory / RECORD, json.dumps({"format": _FORMAT, "version": version, "files": files}, indent=1) + "\n")
    sync_tree(directory)


def fits(directory: Path, version: str) -> bool:
    """Whether the `directory` is there, of this `version`, and every file is as it was published.

    A file of the same size and modification time is taken as unchanged, so that a restart does not read all data again;
    any other, such as that of a copy, is compared by digest.
    """
    try:
        record = json.loads((directory / RECORD).read_text())
        if record["format"] != _FORMAT or record["version"] != version:
            return False
        return all(_is_as_it_was(directory / each["path"], each) for each in record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_as_it_was(path: Path, entry: dict[str, Any]) -> bool:
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) == (entry["size"], entry["mtime_ns"]):
        return True
    return bool(status.st_size == entry["size"] and _stamp(path)["sha256"] == entry["sha256"])


def _stamp(path: Path) -> dict[str, Any]:
    """Size, time and digest of a file. A link counts as what it leads to."""
    status, digest = path.stat(), hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": digest.hexdigest()}
