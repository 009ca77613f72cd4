"""The ledger file of one rank of one start, as lines that are written and read. Pure.

The first line says who writes, and what the start goes on from. Each later line is a step that begins, or an end.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# To be raised when the lines change: a reader refuses any other format.
FORMAT = 2
SUFFIX = ".ledger"

Link = tuple[str, int]
"""A start, and its last step that counts."""


@dataclass(frozen=True)
class Opening:
    """The first line of a file.

    Attributes:
        start: name of the start, the same on all its ranks.
        run, generation, rank, world_size, node: as the agent has them; "", 0 and "" without an agent.
        steps, epoch: where the start goes on.
        history: the starts that the state at `steps` descends from, oldest first.
        samples: length of the data set.
        before: other starts that already had a file in this rank's directory, without those of the history.
    """

    start: str
    run: str
    generation: int
    rank: int
    world_size: int
    node: str
    steps: int
    epoch: int
    history: tuple[Link, ...]
    samples: int
    before: tuple[str, ...] = ()

    def to_line(self) -> str:
        """The line in the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}) + "\n"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Opening:
        """The opening in a parsed line. Raises ValueError, KeyError or TypeError if the line is not an opening."""
        if fields.pop("format", None) != FORMAT:
            raise ValueError(f"not the beginning of a ledger of format {FORMAT}")
        history = tuple((str(start), int(last)) for start, last in fields.pop("history"))
        before = tuple(str(start) for start in fields.pop("before"))
        opening = cls(history=history, before=before, **fields)
        for name in ("generation", "rank", "world_size", "steps", "epoch", "samples"):
            value = getattr(opening, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}")
        return opening


@dataclass(frozen=True)
class LedgerEntry:
    """One rank's part of a step: `ids` are indices into the data set; none if the rank had no samples in the step."""

    step: int
    epoch: int
    ids: Sequence[int]

    def to_line(self) -> str:
        """The line in the file."""
        return f'{{"step": {self.step}, "epoch": {self.epoch}, "ids": {list(self.ids)}}}\n'


@dataclass(frozen=True)
class Closing:
    """An epoch's body has ended. Samples that are neither trained nor excused were left out by the script.

    Attributes:
        epoch: the epoch's number.
        steps: the steps that were done by then.
        trained: samples of the epoch that were trained on.
        excused: samples that `drop_last` left out.
    """

    epoch: int
    steps: int
    trained: int
    excused: int

    def to_line(self) -> str:
        """The line in the file."""
        return json.dumps({"closed": asdict(self)}) + "\n"


def end_line(steps: int) -> str:
    """The line that says that the loop has ended by itself after `steps`."""
    return json.dumps({"end": steps}) + "\n"


@dataclass
class LedgerFile:
    """What one rank of one start has written.

    If a step was begun twice, its last entry counts: the script broke off the first try.
    """

    name: str
    opening: Opening
    entries: dict[int, LedgerEntry] = field(default_factory=dict)
    closings: list[Closing] = field(default_factory=list)
    end: int | None = None

    @property
    def finished(self) -> int:
        """The last step that this rank has certainly finished: the end it wrote, or the one before its last entry."""
        if self.end is not None:
            return self.end
        return max(max(self.entries, default=0) - 1, self.opening.steps)


def read(name: str, content: bytes) -> LedgerFile | None:
    """Parse a file; None if it has no whole line. A last line without an end is dropped: its writer was killed.

    Raises ValueError that says which line is wrong.
    """
    lines = content.split(b"\n")[:-1]
    if not lines:
        return None
    ledger = None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            if ledger is None:
                ledger = LedgerFile(name, Opening.from_fields(fields))
            elif "ids" in fields:
                # An array takes 8 bytes for each index, a list of Python integers several times that.
                entry = LedgerEntry(int(fields["step"]), int(fields["epoch"]), array("q", fields["ids"]))
                ledger.entries[entry.step] = entry
            elif "closed" in fields:
                ledger.closings.append(Closing(**fields["closed"]))
            else:
                ledger.end = int(fields["end"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: {type(error).__name__}: {error}") from None
    return ledger
