"""One SLURM for all tests that can share it, an etcd for its jobs, and the record of what happened when."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.deploy.slurm import lab as lab_module
from tests.deploy.slurm.lab import Lab
from tests.servers import EtcdServer, wheel_binary

RECORD = "ELASTICRT_SLURM_RECORD"
"""Names a file to write the record to."""


@pytest.fixture(scope="session")
def record(session_mark: object) -> Iterator[list[str]]:
    """Lines of the record; written at the end when a file for it is named."""
    del session_mark
    found: list[str] = []
    yield found
    if os.environ.get(RECORD) and found:
        head = [f"Written by: {RECORD}=FILE python -m pytest tests/deploy/slurm", ""]
        Path(os.environ[RECORD]).write_text("\n".join([*head, *found]) + "\n")


@pytest.fixture
def note(record: list[str], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line with the seconds since the test began. The first line of a test is what it is about."""
    begun = time.monotonic()
    record += ["", f"{request.node.name}: {(request.function.__doc__ or '').strip()}"]

    def add(text: str) -> None:
        record.append(f"{time.monotonic() - begun:7.1f} s  {text}")

    return add


@pytest.fixture(scope="session")
def shared_lab(session_mark: object, record: list[str]) -> Iterator[Lab]:
    """Three nodes that are one machine."""
    del session_mark  # First, so that it looks for leftovers after this SLURM has ended.
    reason = lab_module.missing()
    if reason:
        pytest.skip(reason)
    # Not pytest's own directory: munge's socket must have a short name, and all above it must be ours.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        begun = time.monotonic()
        with Lab(Path(directory)) as lab:
            version = lab.run("sinfo", "--version")
            record.append(f"{version}, {datetime.now(timezone.utc):%Y-%m-%d}, {os.cpu_count()} cores")
            record.append(f"munged, slurmctld and three slurmd are up after {time.monotonic() - begun:.1f} s")
            yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    """The shared SLURM; no job outlives its test."""
    yield shared_lab
    shared_lab.end_jobs()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the site's: outside all jobs."""
    with EtcdServer(wheel_binary(), tmp_path / "etcd") as server:
        yield server
