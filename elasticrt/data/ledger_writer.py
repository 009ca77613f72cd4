"""Writes the ledger: each rank notes the samples of a step before the step's gradients are reduced.

`audit.exactly_once` reads the ledgers of all ranks, and checks that each sample has counted exactly once.

The directory may be shared, or each node's own. A step is one `write`, and nothing is synced. So a killed process loses
nothing; what a node has written in the seconds before a power loss is reported as missing. A ledger that cannot be
written is a warning, and training goes on: the file ends with its last whole line, and the audit's `check` says up to
which step its proof reaches, or which steps are missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from elasticrt.data.durable_files import put
from elasticrt.data.position import Position
from elasticrt.data.sample_order import BatchSlice
from elasticrt.data.sampler import ElasticBatchSampler
from elasticrt.distributed import agent_client
from elasticrt.distributed.collectives import rank_and_world
from elasticrt.errors import ConfigError
from elasticrt.ipc.file_modes import FILE_MODE, make_directory
from elasticrt.ipc.ledger_file import SUFFIX, Closing, LedgerEntry, Link, Opening, end_line

_log = logging.getLogger(__name__)


class Ledger:
    """This rank's ledger. Without a directory it writes nothing, and only continues the history that was restored.

    A history is a list of links: the name of a start of the training, and the last step of that start which counts.

    Args:
        directory: the directory of the ledger files, created when missing; None: nothing is written.
        sampler: the sampler of the Loop.

    Raises ConfigError when `directory` is given and the sampler is not an ElasticBatchSampler.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, sampler: object) -> None:
        if directory is not None and not isinstance(sampler, ElasticBatchSampler):
            got, expected = type(sampler).__name__, "a sampler that has each sample exactly once"
            what, remedy = "a ledger needs an ElasticBatchSampler", "Leave ledger= out for another sampler"
            raise ConfigError(what, "Loop(sampler=)", got=got, expected=expected, remedy=remedy)
        self._directory = None if directory is None else Path(directory).absolute()
        self._sampler = sampler if isinstance(sampler, ElasticBatchSampler) else None
        self._history: list[Link] = []
        self._start = ""  # The name of the present start.
        self._began_at = 0  # The number of steps when the file was begun.
        self._ids: list[int] = []  # The samples of the step that is being noted.
        self._fd = -1
        self._size = 0  # Bytes of all whole lines.
        self._size_opened = 0  # Bytes of the opening.

    @property
    def writes(self) -> bool:
        """Whether steps are noted."""
        return self._fd >= 0

    def restored(self, history: Iterable[Sequence[Any]]) -> None:
        """Take over the `history` of the restored state: a result of the method `history`."""
        self._history = [(start, last) for start, last in history]

    def history(self, steps: int) -> list[list[str | int]]:
        """The history of a state after `steps` steps, as plain values."""
        links = [*self._history, (self._start, steps)] if self._start and steps > self._began_at else self._history
        return [[start, last] for start, last in links]

    def open(self, start: str, position: Position) -> None:
        """The loop is entered: begin this rank's file.

        `start` is the name of this start of the training, the same on all ranks. It begins or resumes at `position`.
        """
        rank, world_size = rank_and_world()
        if self._directory is None or self._sampler is None:
            return
        worker = agent_client.worker_env()
        generation, self._start, self._began_at = worker.generation, start, position.steps
        name = f"generation-{generation}-{start}-rank-{rank}{SUFFIX}"
        try:
            make_directory(self._directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._directory / name, flags, FILE_MODE)
            # Listed after the file was made: on NFS, a node that changes nothing in a directory may see a listing that
            # is half a minute old.
            there = starts(each.name for each in self._directory.iterdir())
        except OSError as error:
            _log.warning("no ledger is written to %s: %s", self._directory, error)
            self.close()
            return
        opening = Opening(
            start=start,
            run=worker.run_id,
            generation=generation,
            rank=rank,
            world_size=world_size,
            node=worker.node,
            steps=position.steps,
            epoch=position.epoch,
            history=tuple(self._history),
            samples=self._sampler.state_dict()["samples"],
            before=tuple(sorted(there - {start} - {each for each, _ in self._history})),
        )
        self._size = 0
        self._write(opening.to_line())
        self._size_opened = self._size

    def begin(self, step: int, epoch: int, share: BatchSlice) -> None:
        """Before a forward of `step`: note the samples of `share`. The last forward of a step writes the entry."""
        assert self._sampler is not None, "called only while this writes"
        self._ids += self._sampler.indices(share)
        if share.last:
            ids, self._ids = self._ids, []
            self._write(LedgerEntry(step, epoch, ids).to_line())

    def renew(self) -> None:
        """Forget the samples of a global batch that was under way: the next batch begins a whole one."""
        self._ids = []

    def closed(self, position: Position) -> None:
        """The body of the epoch has ended at `position`, whether or not all samples of the epoch were trained."""
        if self.writes and self._sampler is not None:
            facts, over = self._sampler.state_dict(), not self._sampler.remaining
            # With `drop_last` an epoch is over before all its samples are trained. These are excused.
            excused = facts["samples"] - facts["consumed"] if over else 0
            self._write(Closing(position.epoch, position.steps, facts["consumed"], excused).to_line())

    def end(self, steps: int) -> None:
        """The loop ends by itself after `steps` steps."""
        if self.writes:
            self._write(end_line(steps))

    def take_back(self) -> None:
        """Remove all entries since `open`, and write no more: no rank has trained these steps.

        Otherwise the entries of batches that were read ahead would prove steps.
        """
        if self.writes:
            self._cut(self._size_opened)

    def close(self) -> None:
        """Write no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, line: str) -> None:
        """Append a whole line. After an error the ledger ends with the line before."""
        text = line.encode()
        try:
            put(self._fd, text)
        except OSError as error:
            _log.warning("the ledger in %s is not continued: %s", self._directory, error)
            self._cut(self._size)
        else:
            self._size += len(text)

    def _cut(self, size: int) -> None:
        """Truncate the file to `size`, and write no more."""
        # The audit leaves out a last line that is not whole.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, size)
        self.close()


def starts(names: Iterable[str]) -> set[str]:
    """The names of the starts that ledger files with these `names` belong to."""
    return {name.rsplit("-rank-", 1)[0].rpartition("-")[2] for name in names if name.endswith(SUFFIX)}
