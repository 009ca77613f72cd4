"""The ledger: which samples each step has trained, and whether each counts exactly once. Pure.

Every start of a training loop has a name that all its ranks share, and each rank a file: a line that says where the
loop went on, then one for each step, written before that step's gradients meet. No rank can finish a step that another
has not written down; therefore a process may be killed at any time, and the steps that count are there.

What counts follows neither from clocks nor from the numbers of generations. The training state carries its own history,
the starts it descends from with the last step of each, through every checkpoint, copy and handover; a start writes down
the history that it went on from. What other starts wrote, or wrote beyond those steps, was lost and is done again.

The files may be in one directory or, without a shared disk, in one for each node: a book (`ipc.ledger_file`) says by
itself what came before it, wherever it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elasticrt.ipc.ledger_file import Closing, LedgerEntry, LedgerFile, Link
from elasticrt.ipc.wording import counted

NAMED_MAX = 20
"""So many samples are named of those that were lost or repeated in an epoch; the rest is counted."""


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
class AuditResult:
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


def check(books: Iterable[LedgerFile]) -> AuditResult:
    """Whether along the history that counts each epoch has each sample exactly once.

    Raises ValueError for books that cannot be of one ledger, none at all or two of one rank of a start, and when they
    don't tell which start is the newest.
    """
    starts: dict[str, dict[int, LedgerFile]] = defaultdict(dict)
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
    return AuditResult(finished, len(starts), begun - counted, tuple(epochs), tuple(problems))


def _newest(starts: Mapping[str, Mapping[int, LedgerFile]]) -> str:
    """The start that came after all others. Raises ValueError when the files don't tell.

    A start is older than those that descend from it, and than those that found a file of it in a directory. Whoever
    wrote a file knew both, wherever it lies now. A node that took part in two starts knows which came first, so that
    nodes tie their directories together; what was before the first was before the second.

    Numbers of generations don't count: an etcd that has lost its data begins with 1 again, in the same run. So nobody
    can tell when no nodes lead from one start to the other, and neither descends from the other. And of a start without
    any file, from which no other went on, nothing is known.
    """
    origins = {start: {each for each, _ in _any(ranks).opening.history} for start, ranks in starts.items()}
    older: dict[str, set[str]] = {}
    for start, ranks in starts.items():
        # A rank that was held up before it opened its file may have found those that went on from its own start.
        found = {each for book in ranks.values() for each in book.opening.before if start not in origins.get(each, ())}
        older[start] = (origins[start] | found) & starts.keys() - {start}
    newest = sorted(starts.keys() - set().union(*older.values()))
    if len(newest) > 1:
        named = [f"{each} (run {_any(starts[each]).opening.run!r}, {_origin(starts[each])})" for each in newest]
        raise ValueError(
            f"which start is the newest can't be told: each of these may be: {_list(named)}. Give the directories of "
            "all nodes; if these are all, leave out the files of those starts that are older"
        )
    known, found = set(newest), set(newest)
    while found:
        found = set().union(*(older[each] for each in found)) - known
        known |= found
    if len(known) < len(starts):
        raise ValueError(f"each of these starts came after another one of them: {_list(sorted(starts.keys() - known))}")
    return newest[0]


def _any(ranks: Mapping[int, LedgerFile]) -> LedgerFile:
    """The book of the lowest rank: what they say of the start as a whole is the same in all."""
    return ranks[min(ranks)]


def _origin(ranks: Mapping[int, LedgerFile], rank: int = -1) -> str:
    """Generation and node of a rank; of one that has no file, and of the whole start, the nodes that have one."""
    generation = f"generation {_any(ranks).opening.generation}"
    nodes = sorted({book.opening.node for book in ranks.values() if book.opening.node})
    if rank in ranks:
        return ", ".join(filter(None, (generation, ranks[rank].opening.node)))
    return f"{generation}; there are files of {_list(nodes)}" if nodes else generation


def _gaps(starts: Mapping[str, Mapping[int, LedgerFile]], chain: Sequence[Link]) -> list[str]:
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
                    who = f"rank {rank} of start {start} ({_origin(books, rank)})"
                    problems.append(f"steps {_ranges(missing)}: nothing was written by {who}")
        before = last
    return problems


def _counted(
    starts: Mapping[str, Mapping[int, LedgerFile]], chain: Sequence[Link]
) -> tuple[dict[int, list[LedgerEntry]], dict[int, Closing]]:
    """By epoch the entries that count, and how the epoch's body ended."""
    entries: dict[int, list[LedgerEntry]] = defaultdict(list)
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


def _tally(entries: Iterable[LedgerEntry]) -> dict[int, list[int]]:
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
        problems.append(f"epoch {number}: lost: {counted(lost, 'sample')}{of}: {_list(missing)}")
    if over and len(tally) > expected:
        problems.append(f"epoch {number}: {counted(len(tally), 'sample')} trained; {expected} were to be")
    repeated = [f"{sample} (steps {_words(steps)})" for sample, steps in sorted(tally.items()) if len(steps) > 1]
    if repeated:
        problems.append(f"epoch {number}: repeated: {counted(len(repeated), 'sample')}: {_list(repeated)}")
    foreign = [sample for sample in tally if not 0 <= sample < samples]
    if foreign:
        problems.append(f"epoch {number}: not in the data set: {counted(len(foreign), 'sample')}: {_list(foreign)}")
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
