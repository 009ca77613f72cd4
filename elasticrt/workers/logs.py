"""Handles the output of workers: whole lines go to the console, everything to log files, the end of it to reports.

There is one log file per rank and stream. Bytes are passed on unchanged, because output need not be text. Nothing here
may stop the training: a file that cannot be written is given up with one warning, and memory stays flat however much a
worker prints.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import BinaryIO

from elasticrt.ipc import std_streams
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.file_modes import make_directory, opener
from elasticrt.option_values import ERR, OUT
from elasticrt.run_options import RunOptions

_LOG = logging.getLogger(__name__)

# The end of a worker's error output that is kept for reports.
TAIL_LINES_MAX = 60
TAIL_MAX_BYTES = 16 * 1024
# A longer line is passed on in pieces. Output of other workers may come between the pieces.
LINE_MAX_BYTES = 64 * 1024
# The limit of one log file. What a worker prints after that is not kept.
FILE_MAX_BYTES = 256 * 1024 * 1024


def file_of(directory: str | Path, generation: int, rank: int, node: str, kind: str) -> Path:
    """The path of a worker's file below the run's `directory`. `kind`: "out" and "err" for its logs, "stacks", ..."""
    return Path(directory, "logs", f"generation-{generation}", f"rank-{rank}.{node}.{kind}")


def newest_generation(directory: str | Path) -> int:
    """The highest generation that has logs in a run's `directory`; 0 for none."""
    # A fresh embedded etcd knows nothing of the run's earlier generations. If their numbers were used again, logs of
    # two generations would be in one file.
    numbers = (each.name.removeprefix("generation-") for each in Path(directory, "logs").glob("generation-*"))
    return max((int(number) for number in numbers if number.isdecimal() and len(number) < 9), default=0)


@dataclass(eq=False)
class Line:
    """A line that has no end yet.

    Attributes:
        text: what the worker has printed of the line so far.
        shown: how many bytes of it the console has got.
    """

    text: bytearray = field(default_factory=bytearray)
    shown: int = 0


class WorkerConsole:
    """The console that all workers share: whole lines, each with a prefix.

    Args:
        fds: the descriptor of each stream; None: this process's stdout and stderr.
    """

    def __init__(self, fds: Mapping[str, int] | None = None) -> None:
        self._fds = dict(fds or {OUT: 1, ERR: 2})

    def write(self, line: Line, stream: str, prefix: bytes, count: int) -> None:
        """Write the first `count` bytes of `line` to `stream`, with `prefix`, without those that are shown already."""
        if stream not in self._fds:
            return
        try:
            text = bytes(line.text[:count])
            with std_streams.turn(self._fds[stream], text, line) as (goes_on, end):
                # If another writer has ended this unfinished line meanwhile, the line is written again from its start.
                text = text[line.shown :] if goes_on else text
                lines = text.splitlines(keepends=True) if prefix else [text]
                std_streams.put(self._fds[stream], end + (b"" if goes_on else prefix) + prefix.join(lines))
        except OSError as error:
            del self._fds[stream]
            _LOG.warning("the console cannot be written any more (std%s: %s); workers go on", stream, error)


class _File:
    """One log file. The first write creates it, and it never grows beyond FILE_MAX_BYTES."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left = FILE_MAX_BYTES
        self._file: BinaryIO | None = None

    @property
    def used(self) -> bool:
        return self._file is not None

    def write(self, data: bytes) -> None:
        if self._left < 0:
            return
        if self._file is None:
            make_directory(self.path.parent)
            self._file = open(self.path, "ab", buffering=0, opener=opener)  # noqa: SIM115  Kept; no opener there.
        self._file.write(data[: self._left])
        self._left -= len(data)
        if self._left < 0:
            self._file.write(b"\n[elasticrt: this log has reached its limit; the rest is not kept]\n")
            mib = FILE_MAX_BYTES >> 20
            _LOG.warning("%s has reached its limit of %d MiB: what follows is not kept", self.path, mib)
            self.close()

    def close(self) -> None:
        self._left = -1
        if self._file is not None:
            self._file.close()


class Output:
    """The output of one worker.

    Args:
        worker: the worker's seat.
        options: which output is shown, with which prefix, and whether it is kept.
        console: where it is shown.
    """

    # Belongs to the class, so that a full disk is reported once, and not by each worker in each generation.
    _warned: bool = False

    def __init__(self, worker: WorkerEnv, options: RunOptions, console: WorkerConsole) -> None:
        self._options = options
        self._console = console
        self._lines = {OUT: Line(), ERR: Line()}
        self._tail = bytearray()
        self._files: dict[str, _File] = {}
        # The path of the log in the seat before: the new seat has none until something is printed.
        self._last_path = ""
        self.seat(worker)

    def seat(self, worker: WorkerEnv) -> None:
        """Use the prefix and the log files of the seat `worker` from now on."""
        self._last_path = self.path
        self.close()
        options = self._options
        # The names that a prefix may contain: those of torchrun, and some of elasticrt.
        names: dict[str, object] = {"node": worker.node, "rank": worker.rank, "local_rank": worker.local_rank}
        names |= {"generation": worker.generation, "role_name": worker.role}
        self._prefix = os.fsencode(Template(options.prefix or "").safe_substitute(names))
        ranks = options.local_ranks_filter
        shown = ranks is None or worker.local_rank in ranks
        self._shown = frozenset({OUT, ERR}) - options.hidden.of(worker.local_rank) if shown else frozenset()
        self._files.clear()
        for stream in (OUT, ERR) if options.log_dir != os.devnull and worker.run_dir else ():
            path = file_of(worker.run_dir, worker.generation, worker.rank, worker.node, stream)
            self._files[stream] = _File(path)

    @property
    def path(self) -> str:
        """The path of the log of the error output, else of the plain output; "" if neither is kept."""
        written = [self._files[stream] for stream in (ERR, OUT) if stream in self._files]
        return next((str(file.path) for file in written if file.used), self._last_path)

    @property
    def unfinished(self) -> bool:
        """Whether a part of a line is not shown yet, because the line has no end."""
        return any(len(line.text) > line.shown for line in self._lines.values())

    def write(self, stream: str, data: bytes) -> None:
        """Keep and show `data` that was read from the worker's `stream`."""
        if stream == ERR:
            self._tail += data[-TAIL_MAX_BYTES:]
            del self._tail[:-TAIL_MAX_BYTES]
        self._keep(stream, data)
        if stream not in self._shown:
            return
        line = self._lines[stream]
        line.text += data
        # A progress bar ends its lines with a carriage return, so that also ends a line here: the bar should move.
        end = max(line.text.rfind(b"\n"), line.text.rfind(b"\r")) + 1
        if end == 0 and len(line.text) > LINE_MAX_BYTES:
            end = len(line.text)
        if end:
            self._console.write(line, stream, self._prefix, end)
            del line.text[:end]
            line.shown = 0

    def flush(self) -> None:
        """Show unfinished lines as they are."""
        for stream, line in self._lines.items():
            if len(line.text) > line.shown:
                self._console.write(line, stream, self._prefix, len(line.text))
                line.shown = len(line.text)

    def tail(self) -> list[str]:
        """The last lines of the error output, for a report."""
        # Of a progress bar only the last state of the line is kept: what follows its last carriage return.
        text = self._tail.decode(errors="replace").replace("\r\n", "\n").removesuffix("\n")
        return [line.rpartition("\r")[2] for line in text.split("\n")][-TAIL_LINES_MAX:] if text else []

    def close(self) -> None:
        """Show what is left, and close the files."""
        self.flush()
        for file in self._files.values():
            file.close()

    def _keep(self, stream: str, data: bytes) -> None:
        if stream not in self._files:
            return
        try:
            self._files[stream].write(data)
        except OSError as error:
            file = self._files.pop(stream)
            file.close()
            if not Output._warned:
                Output._warned = True
                _LOG.warning("logs of workers are not kept: %s: %s; training goes on", file.path, error.strerror)
