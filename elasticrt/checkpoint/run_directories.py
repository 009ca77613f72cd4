"""The checkpoint directories of one run: what tells them apart, and what this process knows of each.

A run may have several: training before fine-tuning, folds, trials of a search. Each has a head of its own in etcd; the
run's head is the newest of them, which every commit replaces. Steps of different loops tell nothing of each other, so
that the run counts its own: the sum over all loops of this process, which goes on where the restored state was.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from dataclasses import dataclass, field

from elasticrt.ipc.env import Commit, WorkerEnv


def place_of(directory: str, node: str) -> str:
    """16 hex digits for a directory, as the script names it: the same on each node. Pure.

    Nodes may have directories of their own, named after them: the node's name is taken out.
    """
    name = os.path.normpath(directory)
    if node:
        name = re.sub(rf"(?<![A-Za-z0-9]){re.escape(node)}(?![A-Za-z0-9])", "*", name)
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


@dataclass
class RunDirectories:
    """What this process knows of the run.

    Attributes:
        head: nonce of the run's newest commit.
        heads: the newest commit of each directory that this process has restored from, or saved to.
        total: steps that the run has trained.
        committing: held while a commit is under way, since each replaces the one before.
    """

    head: str = ""
    heads: dict[str, Commit | None] = field(default_factory=dict)
    total: int = 0
    committing: threading.Lock = field(default_factory=threading.Lock)


_runs: dict[str, RunDirectories] = {}


def run_of(worker: WorkerEnv | None) -> RunDirectories:
    """The run of this process; without an agent, what this process trains."""
    nonce = "" if worker is None else worker.nonce
    if nonce not in _runs:
        resume = None if worker is None else worker.resume
        _runs[nonce] = RunDirectories("" if resume is None else resume.nonce)
    return _runs[nonce]


def go_on(run: RunDirectories, worker: WorkerEnv) -> None:
    """The process goes on in another generation, whose record says what the run's newest commit is."""
    run.head = "" if worker.resume is None else worker.resume.nonce
    _runs.clear()
    _runs[worker.nonce] = run
