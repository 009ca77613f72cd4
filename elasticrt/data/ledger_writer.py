"""Writing the ledger: each rank notes the samples of a step before the step's gradients meet. See `audit.exactly_once`.

A directory may be shared, or each node's own. A step is one `write`, and nothing is synced: a killed process loses
nothing, and what a node wrote in the seconds before it lost its power is reported as missing. A ledger that cannot be
written is a warning, and training goes on: steps that found no room are missing in it, and `check` says so.
"""

from __future__ import annotations

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
    """This rank's ledger. Without a directory it only carries on the history that was restored.

    Args:
        directory: created when missing; None: nothing is written.
        sampler: that of the Loop.

    Raises ConfigError when `directory` is given and the sampler is no ElasticBatchSampler.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, sampler: object) -> None:
        if directory is not None and not isinstance(sampler, ElasticBatchSampler):
            got, expected = type(sampler).__name__, "ElasticBatchSampler, which has each sample exactly once"
            what, remedy = "a ledger without a sampler that counts", "Leave ledger= out for another sampler"
            raise ConfigError(what, "Loop(sampler=)", got=got, expected=expected, remedy=remedy)
        self._directory = None if directory is None else Path(directory).absolute()
        self._sampler = sampler if isinstance(sampler, ElasticBatchSampler) else None
        self._history: list[Link] = []
        self._start = ""
        self._began_at = 0
        self._ids: list[int] = []
        self._fd = -1
        self._head = ""  # What is to be written before the next line: the first one, the end of an epoch.
        self._size = self._last_size = 0  # Bytes of whole lines, and of those without the last; 0: it has to stay.
        self._noted = 0  # The step of the newest entry.
        self._size_opened = 0  # Bytes of the first line.
        self._lacks = False  # Whether lines found no room.

    @property
    def writes(self) -> bool:
        """Whether steps are noted."""
        return self._fd >= 0

    def restored(self, history: Iterable[Sequence[Any]]) -> None:
        """Take over what the restored state descends from: a result of `history`."""
        self._history = [(start, last) for start, last in history]

    def history(self, steps: int) -> list[list[str | int]]:
        """What a state of `steps` descends from, as plain values."""
        links = [*self._history, (self._start, steps)] if self._start and steps > self._began_at else self._history
        return [[start, last] for start, last in links]

    def open(self, start: str, position: Position) -> None:
        """The loop is entered: begin the file of this rank of this start."""
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
            # After the open: on NFS a node that changes nothing in a directory may see a listing half a minute old.
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
        self._head, self._size, self._last_size, self._noted = opening.to_line(), 0, 0, 0
        self._write("")
        self._size_opened = self._size

    def begin(self, step: int, epoch: int, share: BatchSlice) -> None:
        """Before a forward of `step`: note its samples. The last forward of a step writes them down."""
        assert self._sampler is not None, "called only while this writes"
        self._ids += self._sampler.indices(share)
        if share.last:
            ids, self._ids = self._ids, []
            if self._write(LedgerEntry(step, epoch, ids).to_line()):
                self._noted = step
            elif self._noted == step:
                self.close()  # Else the entry of the first try at this step would count.

    def renew(self) -> None:
        """Batches begin with a whole global batch: forget the one that was under way."""
        self._ids = []

    def closed(self, position: Position) -> None:
        """The body of the epoch has ended, whether or not all its samples were trained."""
        if self.writes and self._sampler is not None:
            facts, over = self._sampler.state_dict(), not self._sampler.remaining
            excused = facts["samples"] - facts["consumed"] if over else 0
            line = Closing(position.epoch, position.steps, facts["consumed"], excused).to_line()
            if not self._write(line):
                self._head += line  # Without it samples that were left out would be lost ones.

    def end(self, steps: int) -> None:
        """The loop ends by itself after `steps`. Where steps are missing this may take the place of the last line.

        Otherwise a file whose disk stays full would tell of no step after the last one that found room.
        """
        lacks = self._lacks
        if self.writes and not self._write(end_line(steps)) and lacks and self._size:
            self._head, self._size = "", self._last_size or self._size
            self._cut()
            if self.writes:
                self._write(end_line(steps))

    def take_back(self) -> None:
        """Nobody has trained what is noted since `open`."""
        if self.writes:
            self._size, self._last_size = self._size_opened, 0
            self._cut()

    def close(self) -> None:
        """Write no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, line: str) -> bool:
        """Append a whole line, or nothing. Returns whether there was room for it."""
        text = (self._head + line).encode()
        try:
            put(self._fd, text)
        except OSError as error:
            if not self._lacks:
                _log.warning("steps are missing in the ledger in %s: %s", self._directory, error)
            self._lacks = True
            self._cut()
            return False
        self._last_size = 0 if self._head else self._size
        self._head, self._size = "", self._size + len(text)
        return True

    def _cut(self) -> None:
        """Leave whole lines only in the file."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            # Another line after one that was cut would hide the cut.
            _log.warning("the ledger in %s is not continued: %s", self._directory, error)
            self.close()


def starts(names: Iterable[str]) -> set[str]:
    """The starts that files of these names belong to."""
    return {name.rsplit("-rank-", 1)[0].rpartition("-")[2] for name in names if name.endswith(SUFFIX)}
