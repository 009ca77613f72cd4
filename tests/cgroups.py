"""Control groups for tests: how the kernel describes them, trees of files that look like them, and real ones."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elasticrt.ipc.cgroups import VERSIONS, memory_groups


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Files by name, below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """A real control group without a limit, inside one with `limit_bytes`, inside our own. Skips where none can be."""
    found = memory_groups()
    if not found:
        pytest.skip("this machine has no control groups for memory")
    # Where both versions are mounted, it is the old one that knows of memory.
    own, names = next((each for each in found if each[1] is VERSIONS["cgroup"]), found[0])
    outer = own / f"elasticrt-test-{secrets.token_hex(4)}"
    made: list[Path] = []
    try:
        try:
            for path in (outer, outer / "inner"):
                path.mkdir()
                made.append(path)
            (outer / names.limits[0]).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group can be made in {own}: {error}")
        yield outer / "inner"
    finally:
        for path in reversed(made):
            path.rmdir()
