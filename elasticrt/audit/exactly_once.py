"""The ledger: which samples each step has trained, and whether each sample counts exactly once. Pure.

Each rank of each start of the training has a file. The file says where the start went on, and has a line for each step,
written before that step's gradients meet. No rank can finish a step that another has not written down, so a process may
be killed at any time. Neither clocks nor generation numbers say what counts. The training state carries its own
history, which is the starts it descends from with the last step of each, and a start writes down the history that it
went on from. What other starts wrote, or what a start wrote beyond its last step in the history, was lost and done
again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise

from elasticrt.ipc.ledger_file import Closing, LedgerEntry, LedgerFile, Link
from elasticrt.ipc.wording import counted, listed

Starts = dict[str, dict[int, LedgerFile]]
"""The files by start and rank."""

_listed = partial(listed, most=20)
"""So many of the samples that were lost or repeated in an epoch are named; the rest are counted."""


@dataclass(frozen=True)
class Epoch:
    """What became of an epoch's samples."""

    epoch: int  # The epoch's number.
    samples: int  # The length of the data set.
    trained: int  # Different samples that were trained on.
    left_out: int  # Samples that the script left out.
    over: bool  # Whether the epoch has ended.

    def __str__(self) -> str:
        if not self.over:
            return f"epoch {self.epoch}: under way, {self.trained:,} of {self.samples:,} samples"
        left = f", {self.left_out:,} left out by the script" if self.left_out else ""
        return f"epoch {self.epoch}: {self.trained:,} of {self.samples:,} samples{left}"


@dataclass(frozen=True)
class AuditResult:
    """What a ledger proves."""

    steps: int  # The last step that counts.
    starts: int  # How many starts are in the ledger, whether they count or not.
    redone: int  # Steps that were begun and do not count.
    epochs: tuple[Epoch, ...]  # In order.
    # Whether the loop has ended by itself after `steps`. If not, later steps may have been trained.
    ended: bool
    # Samples that were lost or repeated, and what is missing in the ledger. Empty: each sample counts exactly once.
    problems: tuple[str, ...]


def check(files: Iterable[LedgerFile]) -> AuditResult:
    """Whether, along the history that counts, each epoch has each sample exactly once.

    Raises ValueError for files that cannot be of one ledger, for no files, for two files of one rank of a start, and if
    the files do not tell which start is the newest.
    """
    starts: Starts = defaultdict(dict)
    for file in files:
        ranks = starts[file.opening.start]
        if file.opening.rank in ranks:
            raise ValueError(f"{file.name} and {ranks[file.opening.rank].name} are of the same rank")
        ranks[file.opening.rank] = file
    if not starts:
        raise ValueError("there is nothing in it")
    newest = _newest(starts)
    finished = max(file.finished for file in starts[newest].values())
    opening = _lowest(starts[newest]).opening
    # What counts: the history that the newest start went on from, and its own steps up to the last that one of its
    # ranks has finished. All ranks had written that step down by then.
    chain = [*opening.history, (newest, finished)]
    problems = gaps = list(_gaps(starts, chain))
    entries, closings = _counted(starts, chain)
    numbers = sorted({*entries, *closings})
    epochs = []
    for number in numbers:
        over = number < max(numbers)
        # With gaps, a sample without an entry may have been trained.
        lost = "not written down, or lost" if gaps else "lost"
        epoch, found = _judge(number, opening.samples, entries[number], closings.get(number), lost, over=over)
        epochs.append(epoch)
        problems = [*problems, *found]
    begun = sum(len({step for file in ranks.values() for step in file.entries}) for ranks in starts.values())
    counting = sum(len({entry.step for entry in entries[number]}) for number in numbers)
    ended = any(file.end is not None for file in starts[newest].values())
    return AuditResult(finished, len(starts), begun - counting, tuple(epochs), ended, tuple(problems))


def _newest(starts: Starts) -> str:
    """The start that came after all others. Raises ValueError if the files do not tell.

    A start is older than those that descend from it, and than those that found a file of it in their directory. A node
    that took part in two starts knows which came first, and so ties the directories of other nodes together. Without
    such a node, and if neither start descends from the other, their order is unknown. Generation numbers do not help:
    an etcd that has lost its data begins with 1 again.
    """
    origins = {start: {each for each, _ in _lowest(ranks).opening.history} for start, ranks in starts.items()}
    older: dict[str, set[str]] = {}
    for start, ranks in starts.items():
        # A rank that opened its file late may have found the files of starts that went on from its own start.
        found = {each for file in ranks.values() for each in file.opening.before if start not in origins.get(each, ())}
        older[start] = (origins[start] | found) & starts.keys() - {start}
    newest = sorted(starts.keys() - set().union(*older.values()))
    if len(newest) > 1:
        named = [f"{each} (run {_lowest(starts[each]).opening.run!r}, {_origin(starts[each])})" for each in newest]
        raise ValueError(
            f"it is not clear which start is the newest: each of these may be: {_listed(named)}. Give the directories "
            "of all nodes; if these are all, leave out the files of the older starts"
        )
    try:
        TopologicalSorter(older).prepare()
    except CycleError as error:
        raise ValueError(
            f"each of these starts came after another one of them: {_listed(sorted(set(error.args[1])))}"
        ) from None
    return newest[0]


def _lowest(ranks: Mapping[int, LedgerFile]) -> LedgerFile:
    """The file of the lowest rank. What files say of the start as a whole is the same in all of them."""
    return ranks[min(ranks)]


def _origin(ranks: Mapping[int, LedgerFile], rank: int = -1) -> str:
    """Generation and node of a rank. For a rank without a file, or the whole start: the nodes that have files."""
    generation = f"generation {_lowest(ranks).opening.generation}"
    nodes = sorted({file.opening.node for file in ranks.values() if file.opening.node})
    if rank in ranks:
        return ", ".join(filter(None, (generation, ranks[rank].opening.node)))
    return f"{generation}; there are files of {_listed(nodes)}" if nodes else generation


def _gaps(starts: Starts, chain: Sequence[Link]) -> Iterator[str]:
    """What should be in the ledger for the steps of `chain`, and is not."""
    for (_, before), (start, last) in pairwise([("", 0), *chain]):
        if start not in starts:
            if last > before:
                yield f"steps {before + 1} to {last}: nothing was written by start {start}"
            continue
        files = starts[start]
        opening = _lowest(files).opening
        if opening.steps > before:
            yield f"steps {before + 1} to {opening.steps}: trained without a ledger"
        for rank in range(opening.world_size):
            missing = set(range(opening.steps + 1, last + 1)) - set(files[rank].entries if rank in files else ())
            if missing:
                who = f"rank {rank} of start {start} ({_origin(files, rank)})"
                yield f"steps {_ranges(missing)}: nothing was written by {who}"


def _counted(starts: Starts, chain: Sequence[Link]) -> tuple[dict[int, list[LedgerEntry]], dict[int, Closing]]:
    """By epoch: the entries that count, and how the epoch's body ended."""
    entries: dict[int, list[LedgerEntry]] = defaultdict(list)
    closings: dict[int, Closing] = {}
    links = [("", 0), *chain, ("", 0)]
    for (_, before), (start, last), (heir, _) in zip(links, links[1:], links[2:], strict=False):
        # The next start may have gone on from a state before the end of an epoch's body, though after the same step.
        # Then it ends that body again, and the first end does not count.
        redone = _lowest(starts[heir]).opening.epoch if heir in starts else math.inf
        for file in starts.get(start, {}).values():
            for step in range(before + 1, last + 1):
                if step in file.entries:
                    entries[file.entries[step].epoch].append(file.entries[step])
            for closing in file.closings:
                if before <= closing.steps <= last and (closing.steps < last or closing.epoch < redone):
                    closings[closing.epoch] = closing
    return entries, closings


def _judge(
    number: int, samples: int, entries: Iterable[LedgerEntry], closing: Closing | None, word: str, *, over: bool
) -> tuple[Epoch, list[str]]:
    """An epoch, and what is wrong with it.

    Args:
        number: the epoch's number.
        samples: the length of the data set.
        entries: those of the epoch that count.
        closing: how the epoch's body ended; None: it has not.
        word: what samples without entries are called.
        over: whether a later epoch has begun.
    """
    problems = []
    # For each sample, the steps that have trained it.
    tally: dict[int, list[int]] = defaultdict(list)
    for entry in entries:
        for sample in entry.ids:
            tally[sample].append(entry.step)
    over = over or closing is not None
    expected = closing.trained if closing is not None else samples
    left_out = samples - expected - (closing.excused if closing is not None else 0)
    if over and len(tally) < expected:
        missing = [sample for sample in range(samples) if sample not in tally]
        # Some samples may have been left out on purpose. Which of the missing ones these are is unknown.
        lost = expected - len(tally)
        of = f", among these {len(missing)}" if len(missing) > lost else ""
        problems.append(f"epoch {number}: {word}: {counted(lost, 'sample')}{of}: {_listed(missing)}")
    if over and len(tally) > expected:
        problems.append(f"epoch {number}: {counted(len(tally), 'sample')} trained; {expected} were to be")
    repeated = [
        f"{sample} (steps {' and '.join(map(str, steps))})" for sample, steps in sorted(tally.items()) if len(steps) > 1
    ]
    if repeated:
        problems.append(f"epoch {number}: repeated: {counted(len(repeated), 'sample')}: {_listed(repeated)}")
    foreign = [sample for sample in tally if not 0 <= sample < samples]
    if foreign:
        problems.append(f"epoch {number}: not in the data set: {counted(len(foreign), 'sample')}: {_listed(foreign)}")
    return Epoch(number, samples, len(tally), left_out if over else 0, over), problems


def _ranges(numbers: Iterable[int]) -> str:
    """`1-3, 7` from {1, 2, 3, 7}."""
    # Within one range, numbers and their places differ by the same.
    runs = groupby(enumerate(sorted(numbers)), lambda each: each[1] - each[0])
    parts = [[number for _, number in run] for _, run in runs]
    return _listed([str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts])
