"""What messages keep of a value: enough to act on, and no more."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrt.cli.main import build_parser, main
from elasticrt.errors import explain
from elasticrt.run_options import RunOptions
from elasticrt.spec import RunSpec, difference
from tests.servers import free_port


def test_a_value_is_shown_as_far_as_it_helps() -> None:
    """An empty value is visible, a message inside a message keeps its end, and a flood is cut."""
    assert explain("what", "where", got="") == "what (where): got ''"
    inner = explain(
        "no answer from etcd to read /elasticrt/calm-fox-k7m2p/spec within 2 s", "http://a:1", got="refused"
    )
    assert inner in explain("etcd has not answered for 2 s", "--etcd", got=inner)
    assert len(explain("what", "where", got="x" * 10_000)) < 300


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ("a.py --lr 0.1", "a.py --lr 0.2", "word 3 is '0.1' here, '0.2' in the run"),
        ("a.py --n 4", "a.py --n 4 --batch 16", "word 4 is '' here, '--batch' in the run"),
        ("a.py " + "x " * 300 + "1", "a.py " + "x " * 300 + "2 b c", "word 302 is '1' here, '2' in the run"),
        ("a.py", "b.py", "word 1 is 'a.py' here, 'b.py' in the run"),
    ],
)
def test_two_commands_that_differ_are_shown(mine: str, theirs: str, words: str) -> None:
    """The first word that differs is shown, and what else differs."""
    specs = [
        RunSpec(min_nodes=1, max_nodes=most, command=("script", *text.split()))
        for most, text in ((2, mine), (3, theirs))
    ]
    assert difference(*specs) == f"--max-nodes: 2 here, 3 in the run, command: {words}"


@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", "Connection refused"), ("no.such.host.invalid", "not known")]
)
def test_why_etcd_cannot_be_reached(
    host: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without --etcd-wait the reason is said, and a remedy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for wait in ([], ["--etcd-wait", "1s"]):
        assert main(["run", "--etcd", f"http://{host}:{free_port()}", "--insecure-etcd", *wait, "train.py"]) == 4
        last = capsys.readouterr().err.splitlines()[-1]
        assert reason in last
        assert "`elasticrt etcd` starts one" in last


@pytest.mark.parametrize("command", [["status"], ["stop"], ["drain", "node-0"], ["resize", "1:2"]])
def test_commands_whose_etcd_is_away(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They say what looks for the reason: exit code 4."""
    etcd = f"http://127.0.0.1:{free_port()}"
    assert main([*command, "calm-fox", "--etcd", etcd]) == 4
    assert capsys.readouterr().err.endswith(f". `elasticrt doctor --etcd {etcd}` looks for the reason\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("drain", "the following arguments are required: NODE"),
        ("drain --log-dir", "argument --log-dir: expected one argument"),
        ("logs --follow=3", "argument --follow/-f: ignored explicit argument '3'"),
        ("stop a b", "unrecognized arguments: b"),
        ("report --logdir x", "unrecognized arguments: --logdir"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong, where, one remedy: exit code 2."""
    assert main(command.split()) == 2
    name = command.partition(" ")[0]
    begin, end = f"not a usable command line (elasticrt {name}): got {said}; expected", f"See `elasticrt {name} --help`"
    told = capsys.readouterr().err
    assert f"elasticrt: error: {begin}" in told
    assert ("Did you mean --log-dir?" if "--logdir" in command else end) in told


@pytest.mark.parametrize("words", ["n0 --log-dir D fox", "--log-dir D n0 fox", "n0 fox --log-dir D", "-- n0 fox"])
def test_options_may_stand_between_other_words(words: str) -> None:
    """As other tools take them; what follows a script is the script's all the same."""
    given = build_parser().parse_args(["drain", *words.split()])
    assert (given.name, given.run) == ("n0", "fox")
    assert given.log_dir == ("D" if "D" in words else RunOptions.log_dir)
    run = build_parser().parse_args(["run", "train.py", "--nnodes", "3", "x"])
    assert (run.script, run.arguments, run.nnodes) == ("train.py", ["--nnodes", "3", "x"], None)


def test_a_ledger_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is a sentence, not the number of an error."""
    monkeypatch.chdir(tmp_path)
    assert main(["ledger", "check", "nosuchdir"]) == 2
    said = capsys.readouterr().err
    assert "(nosuchdir): got nosuchdir: No such file or directory; expected" in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    "words", [["status", "x" * 300], ["report", "x" * 300], ["resize", "1:2", "x" * 300], ["run", f"{'x' * 300}.py"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_names_that_no_file_can_have(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is too long is the user's mistake: one line, and exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "too long" in line


@contextmanager
def no_root() -> Iterator[None]:
    """In this context permissions count, for root as well."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("words", ["run {}/t.py", "report --log-dir {} fox", "status {}/fox", "runs --log-dir {}/x"])
def test_paths_that_may_not_be_looked_at(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the user's mistake, not a bug: one line that names the path, and exit code 2."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with no_root():
        code = main(words.format(closed).split())
    closed.chmod(0o700)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert str(closed) in line


def test_help_shows_a_variable_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A percent sign in it is one, and no place for another value."""
    monkeypatch.setenv("ELASTICRT_LOG_DIR", "/data/100%/runs")
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    assert "(default: /data/100%/runs)" in capsys.readouterr().out


def test_a_limit_of_threads_is_no_bug(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """G17: where no thread can be started, one line says which limits to look at, with exit code 2."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert main(["doctor"]) == 2
    said = "elasticrt: error: no thread can be started (ulimit -u, or pids.max of the container)"
    assert said in capfd.readouterr().err
