"""The ledger: which samples each step has trained, and whether each counts exactly once. Pure.

Every start of a training loop has a name that all its ranks share, and each rank a file: a line that says where the
loop went on, then one for each step, written before that step's gradients meet. No rank can finish a step that another
has not written down; therefore a process may be killed at any time, and the steps that count are there.

What counts follows neither from clocks nor from the numbers of generations. The training state carries its own history,
the starts it descends from with the last step of each, through every checkpoint, copy and handover; a start writes down
the history that it went on from. What other starts wrote, or wrote beyond those steps, was lost and is done again.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1
SUFFIX = ".ledger"
NAMED_MAX = 20
"""So many samples are named of those that were lost or repeated in an epoch; the rest is counted."""

Link = tuple[str, int]
"""A start and its last step that counts."""


@dataclass(frozen=True)
class Opening:
    """The first line of a file: who writes it, and where the start went on.

    Attributes:
        start: name of the start, the same on all its ranks.
        serial: larger than that of every start which was in the directory before.
        run, generation, rank, world_size, node: as the agent has them; "", 0 and "" without one.
        steps, epoch: where it went on.
        history: what the state at `steps` descends from, oldest first.
        samples: length of the data set.
    """

    start: str
    serial: int
    run: str
    generation: int
    rank: int
    world_size: int
    node: str
    steps: int
    epoch: int
    history: tuple[Link, ...]
    samples: int

    def to_line(self) -> str:
        """As it is in the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}) + "\n"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Opening:
        """Raises ValueError, KeyError, TypeError when it is none."""
        if fields.pop("format", None) != FORMAT:
            raise ValueError(f"not the beginning of a ledger of format {FORMAT}")
        history = tuple((str(start), int(last)) for start, last in fields.pop("history"))
        opening = cls(history=history, **fields)
        for name in ("serial", "generation", "rank", "world_size", "steps", "epoch", "samples"):
            value = getattr(opening, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}")
        return opening


@dataclass(frozen=True)
class Entry:
    """One rank's part of a step: `ids` are the indices into the data set, empty when this rank had none."""

    step: int
    epoch: int
    ids: Sequence[int]

    def to_line(self) -> str:
        """As it is in the file."""
        return f'{{"step": {self.step}, "epoch": {self.epoch}, "ids": {list(self.ids)}}}\n'


@dataclass(frozen=True)
class Closing:
    """An epoch's body has ended after `steps`, with `trained` of its samples trained and `excused` left out by rule.

    `excused`: by `drop_last`. What is neither was left out by the script, which has ended the epoch early.
    """

    epoch: int
    steps: int
    trained: int
    excused: int

    def to_line(self) -> str:
        """As it is in the file."""
        return json.dumps({"closed": asdict(self)}) + "\n"


def end_line(steps: int) -> str:
    """The loop has ended by itself after `steps`."""
    return json.dumps({"end": steps}) + "\n"


@dataclass
class Book:
    """What one rank of one start has written. Of a step that was begun twice the last entry counts: the first one was
    broken off by the script, or the next step would have had another number.
    """

    name: str
    opening: Opening
    entries: dict[int, Entry] = field(default_factory=dict)
    closings: list[Closing] = field(default_factory=list)
    end: int | None = None

    @property
    def finished(self) -> int:
        """The last step that this rank has certainly finished: the end it wrote, else the one before its last."""
        if self.end is not None:
            return self.end
        return max(max(self.entries, default=0) - 1, self.opening.steps)


def read(name: str, content: bytes) -> Book | None:
    """Parse a file. A last line without an end is what a killed process leaves, and is none; None: not even a first.

    Raises ValueError saying which line is wrong.
    """
    lines = content.split(b"\n")[:-1]
    if not lines:
        return None
    book = None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            if book is None:
                book = Book(name, Opening.from_fields(fields))
            elif "ids" in fields:
                entry = Entry(int(fields["step"]), int(fields["epoch"]), array("q", fields["ids"]))
                book.entries[entry.step] = entry
            elif "closed" in fields:
                book.closings.append(Closing(**fields["closed"]))
            else:
                book.end = int(fields["end"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: {type(error).__name__}: {error}") from None
    return book


@dataclass(frozen=True)
class Epoch:
    """What became of an epoch's samples. `left_out`: by the script or by `drop_last`; `over`: nothing is to come."""

    epoch: int
    samples: int
    trained: int
    left_out: int
    over: bool

    def __str__(self) -> str:
        if not self.over:
            return f"epoch {self.epoch}: under way, {self.trained:,} of {self.samples:,} samples"
        left = f", {self.left_out:,} left out by the script" if self.left_out else ""
        return f"epoch {self.epoch}: {self.trained:,} of {self.samples:,} samples{left}"


@dataclass(frozen=True)
class Verdict:
    """What a ledger proves.

    Attributes:
        steps: the last step that counts.
        starts: how many starts are in the ledger, whether they count or not.
        redone: steps that were begun and are superseded.
        epochs: in order.
        problems: samples that were lost or repeated, and what is missing in the ledger; empty: exactly once.
    """

    steps: int
    starts: int
    redone: int
    epochs: tuple[Epoch, ...]
    problems: tuple[str, ...]


def check(books: Iterable[Book]) -> Verdict:
    """Whether along the history that counts each epoch has each sample exactly once.

    Raises ValueError for books that cannot be of one ledger: none at all, or two of one rank of a start.
    """
    starts: dict[str, dict[int, Book]] = defaultdict(dict)
    for book in books:
        ranks = starts[book.opening.start]
        if book.opening.rank in ranks:
            raise ValueError(f"{book.name} and {ranks[book.opening.rank].name} are of the same rank")
        ranks[book.opening.rank] = book
    if not starts:
        raise ValueError("there is nothing in it")
    newest = _newest(starts)
    finished = max(book.finished for book in starts[newest].values())
    chain = [*_any(starts[newest]).opening.history, (newest, finished)]
    problems = _gaps(starts, chain)
    entries, closings = _counted(starts, chain)
    samples = _any(starts[newest]).opening.samples
    numbers = sorted({*entries, *closings})
    epochs = []
    for number in numbers:
        epoch, found = _judge(
            number, samples, _tally(entries[number]), closings.get(number), over=number < max(numbers)
        )
        epochs.append(epoch)
        problems += found
    begun = sum(len({step for book in ranks.values() for step in book.entries}) for ranks in starts.values())
    counted = sum(len({entry.step for entry in entries[number]}) for number in numbers)
    return Verdict(finished, len(starts), begun - counted, tuple(epochs), tuple(problems))


def _newest(starts: Mapping[str, Mapping[int, Book]]) -> str:
    """The start that nobody has gone on from. Of several the one of the latest generation, or of the latest run."""
    gone_on_from = {start for ranks in starts.values() for start, _ in _any(ranks).opening.history}
    openings = [_any(ranks).opening for start, ranks in starts.items() if start not in gone_on_from]
    by_run: dict[str, Opening] = {}
    for opening in sorted(openings, key=lambda each: (each.generation, each.serial)):
        by_run[opening.run] = opening
    if not by_run:
        raise ValueError("every start in it says that it went on from another one of them")
    return max(by_run.values(), key=lambda each: each.serial).start


def _any(ranks: Mapping[int, Book]) -> Book:
    """The book of the lowest rank: what they say of the start as a whole is the same in all."""
    return ranks[min(ranks)]


def _gaps(starts: Mapping[str, Mapping[int, Book]], chain: Sequence[Link]) -> list[str]:
    """What should be in the ledger for the steps of `chain` and is not."""
    problems, before = [], 0
    for start, last in chain:
        books = starts.get(start, {})
        if not books and last > before:
            problems.append(f"steps {before + 1} to {last}: nothing was written by start {start}")
        elif books:
            opening = _any(books).opening
            if opening.steps > before:
                problems.append(f"steps {before + 1} to {opening.steps}: trained without a ledger")
            for rank in range(opening.world_size):
                missing = set(range(opening.steps + 1, last + 1)) - set(books[rank].entries if rank in books else ())
                if missing:
                    where = f"rank {rank} of start {start} (generation {opening.generation})"
                    problems.append(f"steps {_ranges(missing)}: nothing was written by {where}")
        before = last
    return problems


def _counted(
    starts: Mapping[str, Mapping[int, Book]], chain: Sequence[Link]
) -> tuple[dict[int, list[Entry]], dict[int, Closing]]:
    """By epoch the entries that count, and how the epoch's body ended."""
    entries: dict[int, list[Entry]] = defaultdict(list)
    closings: dict[int, Closing] = {}
    before = 0
    for (start, last), (heir, _) in zip(chain, [*chain[1:], ("", 0)], strict=True):
        books = starts.get(start, {})
        for book in books.values():
            for step in range(before + 1, last + 1):
                if step in book.entries:
                    entries[book.entries[step].epoch].append(book.entries[step])
            for closing in book.closings:
                # After its last step that counts, the heir's state may be from before the end of the epoch's body.
                again = closing.steps == last and heir in starts and _any(starts[heir]).opening.epoch <= closing.epoch
                if before <= closing.steps <= last and not again:
                    closings[closing.epoch] = closing
        before = last
    return entries, closings


def _tally(entries: Iterable[Entry]) -> dict[int, list[int]]:
    """Samples, each with the steps that have trained it."""
    tally: dict[int, list[int]] = {}
    for entry in entries:
        for sample in entry.ids:
            tally.setdefault(sample, []).append(entry.step)
    return tally


def _judge(
    number: int, samples: int, tally: Mapping[int, Sequence[int]], closing: Closing | None, *, over: bool
) -> tuple[Epoch, list[str]]:
    """An epoch and what is wrong with it."""
    problems = []
    over = over or closing is not None
    expected = closing.trained if closing is not None else samples
    left_out = samples - expected - (closing.excused if closing is not None else 0)
    if over and len(tally) < expected:
        missing = [sample for sample in range(samples) if sample not in tally]
        # Which of those that are missing were to be left out, if any, nobody can say.
        lost = expected - len(tally)
        of = f", among these {len(missing)}" if len(missing) > lost else ""
        problems.append(f"epoch {number}: lost: {lost} samples{of}: {_list(missing)}")
    if over and len(tally) > expected:
        problems.append(f"epoch {number}: {len(tally)} samples were trained; {expected} were to be")
    repeated = [f"{sample} (steps {_words(steps)})" for sample, steps in sorted(tally.items()) if len(steps) > 1]
    if repeated:
        problems.append(f"epoch {number}: repeated: {len(repeated)} samples: {_list(repeated)}")
    foreign = [sample for sample in tally if not 0 <= sample < samples]
    if foreign:
        problems.append(f"epoch {number}: not in the data set: {len(foreign)} samples: {_list(foreign)}")
    return Epoch(number, samples, len(tally), left_out if over else 0, over), problems


def _list(items: Sequence[object]) -> str:
    more = f" and {len(items) - NAMED_MAX} more" if len(items) > NAMED_MAX else ""
    return ", ".join(str(each) for each in items[:NAMED_MAX]) + more


def _words(steps: Sequence[int]) -> str:
    return " and ".join(str(step) for step in steps)


def _ranges(numbers: Iterable[int]) -> str:
    """`1-3, 7` from {1, 2, 3, 7}."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return _list([str(first) if first == last else f"{first}-{last}" for first, last in parts])
