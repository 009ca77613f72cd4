"""The ledger file: the samples that one rank has trained since one start, as lines of JSON. Pure.

The first line is the opening. Each other line is a step that begins, or an end.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 2
SUFFIX = ".ledger"

Link = tuple[str, int]
"""A start and its last step that counts."""


@dataclass(frozen=True)
class Opening:
    """The first line of a file: its writer, and the position from which the start went on.

    Attributes:
        start: name of the start, the same on all its ranks.
        run, generation, rank, world_size, node: as the agent has them; "", 0 and "" without one.
        steps, epoch: the position.
        history: the starts from which the state at `steps` descends, oldest first.
        samples: length of the data set.
        before: other starts with a file in this rank's directory, except those of the history.
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
        """The line of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}) + "\n"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Opening:
        """The opening with these fields. Raises ValueError, KeyError or TypeError if they are not right."""
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
    """One rank's part of a step: `ids` are indices into the data set; none if this rank had no samples."""

    step: int
    epoch: int
    ids: Sequence[int]

    def to_line(self) -> str:
        """The line of the file."""
        return f'{{"step": {self.step}, "epoch": {self.epoch}, "ids": {list(self.ids)}}}\n'


@dataclass(frozen=True)
class Closing:
    """The end of an epoch after `steps`: `trained` samples were trained, and `drop_last` left `excused` ones out.

    The script left the others out, by ending the epoch early.
    """

    epoch: int
    steps: int
    trained: int
    excused: int

    def to_line(self) -> str:
        """The line of the file."""
        return json.dumps({"closed": asdict(self)}) + "\n"


def end_line(steps: int) -> str:
    """The line for a loop that has ended by itself after `steps`."""
    return json.dumps({"end": steps}) + "\n"


@dataclass
class LedgerFile:
    """The content of a file. If a step was begun twice, the last entry counts: the script broke the first one off."""

    name: str
    opening: Opening
    entries: dict[int, LedgerEntry] = field(default_factory=dict)
    closings: list[Closing] = field(default_factory=list)
    end: int | None = None

    @property
    def finished(self) -> int:
        """The last step that this rank has certainly finished: the end it wrote, else the one before its last."""
        if self.end is not None:
            return self.end
        return max(max(self.entries, default=0) - 1, self.opening.steps)


def read(name: str, content: bytes) -> LedgerFile | None:
    """Parse the `content` of the file `name`; None if it has no whole line.

    A killed process may leave a last line without its end, which is left out. Raises ValueError with the wrong line.
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
                entry = LedgerEntry(int(fields["step"]), int(fields["epoch"]), array("q", fields["ids"]))
                ledger.entries[entry.step] = entry
            elif "closed" in fields:
                ledger.closings.append(Closing(**fields["closed"]))
            else:
                ledger.end = int(fields["end"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: {type(error).__name__}: {error}") from None
    return ledger
