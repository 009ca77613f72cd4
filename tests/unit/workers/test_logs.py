"""Output of workers: whole lines on the console, everything in files, the end of it in memory."""

from __future__ import annotations

import logging
import os

import pytest

from elasticrt.ipc import std_streams
from elasticrt.ipc.std_streams import write
from elasticrt.option_values import ERR, OUT, Streams
from elasticrt.run_options import RunOptions
from elasticrt.workers import logs
from elasticrt.workers.logs import LINE_MAX_BYTES, TAIL_LINES_MAX, Output, WorkerConsole
from tests.unit.workers.states import worker


@pytest.fixture
def screen(tmp_path):
    """A console whose both streams are one file; calling it reads what was written."""
    path = tmp_path / "screen"
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    std_streams._unfinished.clear()  # This file may have the number of one that was removed with an unfinished line.
    yield WorkerConsole({OUT: fd, ERR: fd}), path.read_bytes
    os.close(fd)


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    """Each test may warn once."""
    monkeypatch.setattr(Output, "_warned", False)


def outputs(console, directory=None, **options):
    """The outputs of ranks 0 and 1."""
    return [Output(worker("node-1", rank, 3, directory), RunOptions(**options), console) for rank in (0, 1)]


def test_lines_of_two_workers_do_not_mix(screen):
    """Pieces of lines wait for their end; each line has its prefix once."""
    console, read = screen
    a, b = outputs(console, prefix="[${node} rank ${rank}] ")
    a.write(OUT, b"one ")
    b.write(OUT, b"two\nthree\nfo")
    a.write(OUT, b"more\n")
    b.write(ERR, b"error\n")
    b.write(OUT, b"ur\n")
    one, two = b"[node-1 rank 0] ", b"[node-1 rank 1] "
    assert read() == two + b"two\n" + two + b"three\n" + one + b"one more\n" + two + b"error\n" + two + b"four\n"


def test_without_prefix_bytes_are_untouched(screen):
    """Nothing is added or lost without a prefix, whatever the bytes are."""
    console, read = screen
    data = bytes(range(256)) * 100
    a, _ = outputs(console)
    for start in range(0, len(data), 77):
        a.write(OUT, data[start : start + 77])
    a.close()
    assert read() == data


def test_an_unfinished_line_is_shown_and_ended_by_another_worker(screen):
    """A prompt without a newline appears on flush, goes on without a second prefix, and others start a new line."""
    console, read = screen
    a, b = outputs(console, prefix="${rank}: ")
    a.write(OUT, b"loading")
    assert a.unfinished
    a.flush()
    a.write(OUT, b"...")
    a.flush()
    b.write(OUT, b"hello\n")
    a.write(OUT, b"done\n")
    assert read() == b"0: loading...\n1: hello\n0: loading...done\n"


def test_an_agents_line_begins_a_line(screen, tmp_path):
    """It does not run into a worker's unfinished line or progress bar, and the worker's line comes whole again."""
    console, read = screen
    a, _ = outputs(console, prefix="${rank}: ")
    with (tmp_path / "screen").open("a") as agent:
        a.write(OUT, b"loading")
        a.flush()
        write(agent, "elasticrt: one\n")
        write(agent, "elasticrt: two\n")
        a.write(OUT, b" done\n")
        a.write(ERR, b"10%\r")
        write(agent, "elasticrt: three\n")
        a.write(ERR, b"20%\r")
        a.write(OUT, b"words\n")
    assert read() == (
        b"0: loading\nelasticrt: one\nelasticrt: two\n0: loading done\n0: 10%\r\nelasticrt: three\n0: 20%\r\n0: words\n"
    )


def test_progress_bars_of_two_workers_share_a_line(screen):
    """Each takes the place of the other's, instead of a line for each step."""
    console, read = screen
    a, b = outputs(console)
    for _ in range(2):
        a.write(ERR, b"a 10%\r")
        b.write(ERR, b"b 10%\r")
    b.write(ERR, b"\n")
    assert read() == b"a 10%\rb 10%\r" * 2 + b"\n"


def test_progress_bars_move(screen):
    """A carriage return counts as the end of a line."""
    console, read = screen
    a, _ = outputs(console)
    a.write(ERR, b"10%\r20%\r3")
    assert read() == b"10%\r20%\r"


def test_a_long_line_is_passed_on_in_pieces(screen):
    """W16: a line without an end does not pile up in memory."""
    console, read = screen
    a, _ = outputs(console, prefix="> ")
    for _ in range(5):
        a.write(OUT, b"x" * (LINE_MAX_BYTES // 2))
    assert len(a._lines[OUT].text) <= LINE_MAX_BYTES
    a.write(OUT, b"\n")
    assert read() == b"> " + b"x" * (LINE_MAX_BYTES // 2 * 5) + b"\n"


def test_files(screen, tmp_path):
    """One file for each generation, rank and stream, created when there is something; older ones are kept."""
    console, _ = screen
    a, b = outputs(console, tmp_path / "run")
    a.write(OUT, b"out")
    a.write(ERR, b"err\xff")
    a.close()
    b.close()
    later = Output(worker("node-1", 0, 4, tmp_path / "run"), RunOptions(), console)
    later.write(OUT, b"later")
    later.close()
    files = {str(p.relative_to(tmp_path / "run")): p.read_bytes() for p in (tmp_path / "run").rglob("*.*")}
    assert files == {
        "logs/generation-3/rank-0.node-1.out": b"out",
        "logs/generation-3/rank-0.node-1.err": b"err\xff",
        "logs/generation-4/rank-0.node-1.out": b"later",
    }
    assert a.path.endswith("logs/generation-3/rank-0.node-1.err")
    assert later.path.endswith("rank-0.node-1.out")
    assert b.path == ""


def test_a_file_has_a_limit(screen, tmp_path, monkeypatch, caplog):
    """W16: a file that has reached its limit ends with a note, and the console tells of that once."""
    console, read = screen
    monkeypatch.setattr(logs, "FILE_MAX_BYTES", 10)
    a, _ = outputs(console, tmp_path / "run")
    for _ in range(4):
        a.write(OUT, b"12345678\n")
    a.close()
    content = (tmp_path / "run/logs/generation-3/rank-0.node-1.out").read_bytes()
    assert content.startswith(b"12345678\n1\n[elasticrt: this log has reached its limit")
    assert content.count(b"[elasticrt") == 1
    assert caplog.text.count("rank-0.node-1.out has reached its limit") == 1
    assert read() == b"12345678\n" * 4


def test_files_that_cannot_be_written(screen, tmp_path, caplog):
    """A16: one warning for all workers, and the console goes on."""
    console, read = screen
    (tmp_path / "run").write_text("a file where a directory should be")
    with caplog.at_level(logging.WARNING):
        for output in outputs(console, tmp_path / "run"):
            output.write(OUT, b"a\n")
            output.write(ERR, b"b\n")
            output.close()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "training goes on" in caplog.text
    assert read() == b"a\nb\na\nb\n"


def test_a_full_disk(screen, tmp_path, caplog):
    """A16: a write that fails gives the file up, and nothing else."""
    console, read = screen
    a, _ = outputs(console, tmp_path / "run")
    (tmp_path / "run/logs/generation-3").mkdir(parents=True)
    (tmp_path / "run/logs/generation-3/rank-0.node-1.out").symlink_to("/dev/full")
    a.write(OUT, b"a\n")
    a.write(OUT, b"b\n")
    a.write(ERR, b"c\n")
    a.close()
    assert "No space left on device" in caplog.text
    assert read() == b"a\nb\nc\n"
    assert (tmp_path / "run/logs/generation-3/rank-0.node-1.err").read_bytes() == b"c\n"


def test_a_console_that_is_gone(tmp_path, caplog):
    """Nobody reads our output any more: one warning, no exception, files go on."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        a, b = outputs(WorkerConsole({OUT: writer}), tmp_path)
        a.write(OUT, b"a\n")
        b.write(OUT, b"b\n")
        a.close()
        b.close()
    finally:
        os.close(writer)
    assert len(caplog.records) == 1
    assert (tmp_path / "logs/generation-3/rank-1.node-1.out").read_bytes() == b"b\n"


def test_filters(screen):
    """Only the chosen local ranks are shown, and of these what is not redirected; files have it all."""
    console, read = screen
    hidden = Streams(others=frozenset({OUT}), some={1: frozenset({ERR})})
    a, b = outputs(console, hidden=hidden)
    for output in (a, b, outputs(console, local_ranks_filter=frozenset({1}))[0]):
        output.write(OUT, b"out\n")
        output.write(ERR, b"err\n")
    assert read() == b"err\nout\n"


def test_a_prefix_in_torchruns_words(screen):
    """`${role_name}` and the like are filled in; what is no name of ours stays as it is."""
    console, read = screen
    one = worker("node-1", 5, 3, local_rank=1, role="trainer")
    options = RunOptions(prefix="[${role_name}${local_rank}/${rank} ${node} ${generation} ${unknown}]:")
    Output(one, options, console).write(OUT, b"x\n")
    assert read() == b"[trainer1/5 node-1 3 ${unknown}]:x\n"


def test_nothing_is_kept_when_nothing_should_be(screen, tmp_path):
    """Without files there are none, and the console and the tail for reports are as ever."""
    console, read = screen
    a, _ = outputs(console, tmp_path, log_dir="/dev/null")
    a.write(ERR, b"oops\n")
    a.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "screen"]
    assert (read(), a.tail(), a.path) == (b"oops\n", ["oops"], "")


@pytest.mark.parametrize(
    ("written", "tail"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"]),
        ([b"no newline"], ["no newline"]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"10%\r20%\r100%\nend\r\n"], ["100%", "end"]),
        ([b"%d\n" % n for n in range(1000)], [str(n) for n in range(1000 - TAIL_LINES_MAX, 1000)]),
        ([], []),
    ],
)
def test_tail(screen, written, tail):
    """The last lines of the error output, readable, are kept for reports; plain output is not."""
    console, _ = screen
    a, _ = outputs(console)
    for data in written:
        a.write(ERR, data)
    a.write(OUT, b"not this\n")
    assert a.tail() == tail


def test_tail_is_bounded(screen):
    """W16: the ring holds 16 KiB, however long a line is."""
    console, _ = screen
    a, _ = outputs(console)
    for _ in range(10):
        a.write(ERR, b"y" * 100_000)
    assert len(a.tail()) == 1
    assert len(a.tail()[0]) == 16 * 1024


def test_the_newest_generation_of_a_run(tmp_path):
    """Numbers of a run go on where its logs end, whatever its store remembers; other names are no generations."""
    assert logs.newest_generation(tmp_path) == 0
    for name in ("generation-2", "generation-11", "generation-x", "generation-", "generation-9" + "9" * 30, "other"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert logs.newest_generation(tmp_path) == 11
