"""A ledger in several directories: which start is the newest, and what a missing part costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrt import ElasticBatchSampler
from elasticrt.audit.exactly_once import check
from elasticrt.cli.audit import books as books_in
from elasticrt.cli.main import main
from elasticrt.data.ledger_writer import Ledger
from elasticrt.data.position import Position
from elasticrt.ipc.ledger_file import Closing, LedgerEntry, LedgerFile, Opening, end_line, read

SAMPLES = 8
PER_EPOCH = 4
PLACEMENTS = [("m",), ("n",), ("m", "n")]
"""The nodes of a start, one rank on each."""


def start(name: str, nodes: tuple[str, ...], parent: Opening | None = None) -> list[LedgerFile]:
    """The books of a start that has trained two steps, from what its parent had reached or from the beginning."""
    steps = parent.steps + 2 if parent else 0
    history = (*parent.history, (parent.start, steps)) if parent else ()
    number = ord(name) - ord("a") + 1
    opening = Opening(name, "run", number, 0, len(nodes), "", steps, steps // PER_EPOCH, history, SAMPLES)
    books = []
    for rank, node in enumerate(nodes):
        book = LedgerFile(f"{name}{rank}", replace(opening, rank=rank, node=node), end=steps + 2)
        for step in (steps + 1, steps + 2):
            ids = [2 * (step - 1) % SAMPLES, 2 * (step - 1) % SAMPLES + 1]
            book.entries[step] = LedgerEntry(step, (step - 1) // PER_EPOCH, ids[rank :: len(nodes)])
        books.append(book)
    return books


def content(book: LedgerFile) -> bytes:
    """The file of a book."""
    lines = [book.opening.to_line(), *(each.to_line() for each in (*book.entries.values(), *book.closings))]
    return "".join([*lines, end_line(book.end or 0)]).encode()


def put(directory: Path, *books: LedgerFile) -> None:
    """Write files into a directory, created when missing."""
    directory.mkdir(exist_ok=True)
    for book in books:
        (directory / f"{book.name}.ledger").write_bytes(content(book))


def in_shared(history: list[list[LedgerFile]]) -> list[LedgerFile]:
    """The starts one after the other, with one directory for all."""
    for number, books in enumerate(history):
        for book in books:
            book.opening = replace(book.opening, before=tuple(each[0].opening.start for each in history[:number]))
    return [book for books in history for book in books]


def on_own_disks(history: list[list[LedgerFile]]) -> list[LedgerFile]:
    """The same, with a directory for each node."""
    for number, books in enumerate(history):
        for book in books:
            earlier = itertools.chain.from_iterable(history[:number])
            there = {each.opening.start for each in earlier if each.opening.node == book.opening.node}
            book.opening = replace(book.opening, before=tuple(sorted(there)))
    return [book for books in history for book in books]


def small_worlds(starts: int) -> Iterator[list[list[LedgerFile]]]:
    """So many starts in order, each on one node or on both, from the beginning or from any of those before."""
    for placed in itertools.product(PLACEMENTS, repeat=starts):
        for parents in itertools.product(*(range(-1, number) for number in range(starts))):
            history: list[list[LedgerFile]] = []
            for number, (nodes, parent) in enumerate(zip(placed, parents, strict=True)):
                origin = history[parent][0].opening if parent >= 0 else None
                history.append(start("abcd"[number], nodes, origin))
            yield history


def ends_of_all_orders(books: list[LedgerFile]) -> set[str]:
    """The starts that are the last in some order that agrees with what each book says came before it."""
    facts = {
        (other, book.opening.start)
        for book in books
        for other in [*book.opening.before, *(each for each, _ in book.opening.history)]
    }
    orders = itertools.permutations(sorted({book.opening.start for book in books}))
    return {order[-1] for order in orders if all(order.index(one) < order.index(two) for one, two in facts)}


def test_small_worlds_exhaustively() -> None:
    """Own disks give the verdict of a shared one; where what is written allows of two newest starts, nobody guesses."""
    told = []
    for history in small_worlds(4):
        expected = check(in_shared(history))
        books = on_own_disks(history)
        ends = ends_of_all_orders(books)
        told.append(len(ends) == 1)
        if told[-1]:
            assert check(books) == expected
            continue
        with pytest.raises(ValueError, match="it is not clear which start is the newest") as refused:
            check(books)
        assert all(f"{each} (run" in str(refused.value) for each in ends)
    assert 0 < told.count(False) < told.count(True)


def training(*, lost: tuple[int, ...] = ()) -> list[list[LedgerFile]]:
    """An epoch: start a, then b that came to nothing, then c that goes on from a; samples of c may be lost."""
    a, b = start("a", ("m", "n")), start("b", ("m", "n"))
    (c,) = start("c", ("m",), a[0].opening)
    c.entries = {step: replace(each, ids=sorted({*each.ids} - {*lost})) for step, each in c.entries.items()}
    c.closings.append(Closing(0, 4, SAMPLES, 0))
    return [a, b, [c]]


@pytest.mark.parametrize("lost", [(), (5,)])
def test_every_way_to_move_files_into_two_directories(tmp_path: Path, lost: tuple[int]) -> None:
    """Whichever of two directories each file of one has gone to, the verdict is the same."""
    books = in_shared(training(lost=lost))
    put(tmp_path / "whole", *books)
    expected = check(books_in(tmp_path / "whole"))
    assert expected.problems == tuple(f"epoch 0: lost: 1 sample: {each}" for each in lost)
    for number, chosen in enumerate(itertools.product("12", repeat=len(books))):
        directories = [tmp_path / f"{number}-{side}" for side in "12" if any(side in each for each in chosen)]
        for directory in directories:
            put(directory, *(book for book, each in zip(books, chosen, strict=True) if directory.name[-1] in each))
        assert check(books_in(*directories)) == expected


def test_what_a_start_finds_is_written_down(tmp_path: Path) -> None:
    """Other starts that are there are named, once each; not one's own, nor those that one descends from."""
    names = ["generation-1-aa-rank-0", "generation-1-aa-rank-1", "generation-2-bb-rank-0", "generation-4-dd-rank-1"]
    for name in names:
        (tmp_path / f"{name}.ledger").touch()
    (tmp_path / "generation-3-cc-rank-0.partial").touch()
    ledger = Ledger(tmp_path, ElasticBatchSampler(range(4), 2))
    ledger.restored([["aa", 2]])
    ledger.open("dd", Position(steps=2))
    ledger.close()
    written = read("dd0", (tmp_path / "generation-0-dd-rank-0.ledger").read_bytes())
    assert written is not None
    assert (written.opening.before, written.opening.history) == (("bb",), (("aa", 2),))


def test_the_command_over_the_directories_of_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`elasticrt ledger check DIR DIR` has the output and the exit codes that it has over one directory."""
    monkeypatch.chdir(tmp_path)
    whole = Path("whole")
    put(whole, *in_shared(training()))
    assert main(["ledger", "check", "whole"]) == 0
    proof = capsys.readouterr().out
    assert proof.endswith("each sample counts exactly once\n")
    for book in on_own_disks(training()):
        put(Path(f"node-{book.opening.node}"), book)
    both = ["ledger", "check", "node-m", "node-n"]
    assert main(both) == 0
    assert capsys.readouterr().out == proof
    assert main([*both, "node-m"]) == 2
    assert "node-m/a0.ledger are of the same rank" in capsys.readouterr().err

    assert main(["ledger", "check", "node-m"]) == 1
    missing = "nothing was written by rank 1 of start a (generation 1; there are files of m)"
    assert f"WRONG: steps 1-2: {missing}\n" in capsys.readouterr().out
    put(Path("node-x"), *start("d", ("x",)))
    assert main([*both, "node-x"]) == 2
    each = "each of these may be: c (run 'run', generation 3; there are files of m), d (run 'run', generation 4; "
    assert f"it is not clear which start is the newest: {each}there are files of x). Give" in capsys.readouterr().err

    Path("empty").mkdir()
    assert main([*both, "empty"]) == 2
    assert "no such file in empty" in capsys.readouterr().err
