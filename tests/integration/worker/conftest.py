"""A worker parent, warmed up once for all tests of a file."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rig import Rig, alive, plainly, wait_until


@pytest.fixture(scope="module")
def warm(session_mark: object) -> Iterator[Rig]:
    """Workers as forks of a warm parent."""
    rig = Rig("fork")
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def cold(session_mark: object) -> Iterator[Rig]:
    """Workers as programs of their own."""
    rig = Rig("exec")
    yield rig
    rig.close()


@pytest.fixture(params=["fork", "exec"])
def either(request: pytest.FixtureRequest, warm: Rig, cold: Rig) -> Rig:
    """A parent of either method, shared with other tests."""
    return warm if request.param == "fork" else cold


@pytest.fixture(params=["fork", "exec"])
def own(request: pytest.FixtureRequest, session_mark: object) -> Iterator[Rig]:
    """A parent for this test alone, of either method: the test may break it."""
    rig = Rig(request.param)
    yield rig
    rig.close()


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script with plain Python."""
    return plainly


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Whether a process runs."""
    return alive


@pytest.fixture
def until() -> Callable[..., Any]:
    """Poll a condition."""
    return wait_until
