"""Processes of a DataLoader that are sheltered from SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from elasticrt.distributed.signal_guard import sheltered
from tests.fake_worker import Agent, under

OPEN = Path("/proc/self/fd")


def test_a_sheltered_process_that_has_ended_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader starts its processes anew in each epoch, and a run may have very many of these."""
    with under(Agent(), monkeypatch):
        open_before = set(OPEN.iterdir())
        for _ in range(3):
            with sheltered():
                process = multiprocessing.get_context("fork").Process(target=os.getpid)
                process.start()
            process.join(60)
            assert process.exitcode == 0
        del process
        # Others may be closed meanwhile, when what an earlier test has left is collected.
        assert set(OPEN.iterdir()) <= open_before
