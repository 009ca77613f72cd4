"""Which live run a command means that does not name one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from elasticrt import events
from elasticrt.cli.live_run import live_run, named_run
from elasticrt.cli.main import main
from elasticrt.event_log import EventLog
from elasticrt.ipc.proc import start_of
from elasticrt.run_options import EtcdOptions
from elasticrt.store.embedded import Served, locked, record_of, write_record
from elasticrt.store.protocol import Address


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def _run(name: str, *, lives: bool) -> None:
    """A run with a directory; one that lives has an etcd on this machine, whose keeper is this process."""
    log = EventLog("node-0", Path("runs", name))
    log.write(events.AgentStarted(1, name, "embedded", f"runs/{name}", "a machine", 1, 1))
    log.close()
    if lives:
        with locked() as (directory, _):
            served = Served(Address("http", "127.0.0.1", 9), os.getpid(), start_of(os.getpid()))
            write_record(record_of(directory, name), served)


def _arguments(run: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(run=run, log_dir="runs")


def test_the_only_live_run_is_meant() -> None:
    """Runs that have ended do not count, however new they are."""
    _run("calm-fox", lives=True)
    _run("old-owl", lives=False)
    with live_run(_arguments(), EtcdOptions()) as run:
        assert run.keys.run_id == "calm-fox"


@pytest.mark.parametrize("command", [["stop"], ["drain", "node-0"], ["resize", "1:2"]], ids=lambda words: words[0])
def test_of_several_live_runs_none_is_chosen(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that changes a run does not guess: exit code 2, and the names."""
    _run("keen-koala", lives=True)
    _run("calm-fox", lives=True)
    assert main([*command, "--log-dir", "runs"]) == 2
    assert "which run? (--run-id): expected one of calm-fox, keen-koala" in capsys.readouterr().err


def test_ways_of_naming_a_run() -> None:
    """RUN is an id or a directory, and overrules --run-id."""
    _run("calm-fox", lives=False)
    assert named_run(_arguments(), EtcdOptions()) is None
    assert named_run(_arguments(), EtcdOptions(run_id="digits")) == ("digits", Path("runs/digits"))
    assert named_run(_arguments("calm-fox"), EtcdOptions(run_id="digits")) == ("calm-fox", Path("runs/calm-fox"))
    assert named_run(_arguments("runs/calm-fox"), EtcdOptions()) == ("calm-fox", Path("runs/calm-fox"))
