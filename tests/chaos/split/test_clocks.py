"""Clocks that disagree: no clock crosses a host, so nothing may depend on them."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.split.test_paused import TTL_S, one_world_at_a_time
from tests.integration.trouble.stepping import History, Stepping
from tests.servers import EtcdServer, wheel_binary


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of the test's own."""
    with EtcdServer(wheel_binary(), tmp_path / "etcd") as server:
        yield server


class Skewed(Stepping):
    """A run in which node n1 lives behind `prefix`."""

    prefix: tuple[str, ...] = ()

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """See `Cluster`."""
        return [*self.prefix, *command] if name == "n1" else command


def _faketime() -> str:
    """The library that lies about the time of day: `$ELASTICRT_TEST_FAKETIME`, or Debian's package libfaketime."""
    named = os.environ.get("ELASTICRT_TEST_FAKETIME", "")
    for path in (named, *map(str, Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))):
        if path and Path(path).exists():
            return path
    pytest.skip("clock skew needs libfaketime (apt-get install libfaketime), or $ELASTICRT_TEST_FAKETIME")


def _story(tmp_path: Path, etcd: EtcdServer, prefix: tuple[str, ...]) -> Stepping:
    """Both start, one joins and a worker fails, over several leases: exactly the generations that these make."""
    with Skewed(tmp_path, "--nnodes", "1:3", "--lease-ttl", f"{TTL_S:g}", "--etcd", str(etcd.address)) as run:
        run.prefix = prefix
        run.start("n0", "--rdzv-conf", "last_call_timeout=3")
        run.start("n1", "--rdzv-conf", "last_call_timeout=3")
        run.wait("both are in", lambda: run.events("generation") and len(run.events("generation")[-1]["nodes"]) == 2)
        number = run.number()
        run.wait_for_steps(5, generation=number)
        run.wait_for_silence(2 * TTL_S)
        assert run.number() == number, "nobody was suspected"
        run.start("n2", "--rdzv-conf", "last_call_timeout=3")
        run.wait_for_steps(5, generation=number + 1)
        run.fail(number + 1, 1)
        run.wait_for_steps(10, generation=number + 2)
        run.finish()
        assert set(run.ended().values()) == {0}, run.story()
        history = History.read(etcd.address, run.run_id)
        history.check(run.marks())
        assert [len(history.lives(name)) for name in ("n0", "n1", "n2")] == [1, 1, 1]
        assert history.rank_count()[number + 1] == history.rank_count()[number + 2] == 3
        assert max(history.numbers()) == number + 2
        return run


def _lies(tmp_path: Path, lie: str) -> tuple[str, ...]:
    """The command prefix for a node whose time of day is wrong. `lie` is how libfaketime is told."""
    # libfaketime 0.9.10 fails the call that time.sleep makes, and stops other waits if it lies about both clocks.
    site = tmp_path / "site"
    site.mkdir()
    patch = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
    (site / "sitecustomize.py").write_text(patch)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return ("env", f"LD_PRELOAD={_faketime()}", lie, "FAKETIME_DONT_FAKE_MONOTONIC=1", f"PYTHONPATH={path}")


@contextmanager
def _strobe(path: Path) -> Iterator[None]:
    """Ten times a second the time of day that `path` tells changes by an hour, there and back."""
    end = threading.Event()

    def work() -> None:
        for lie in itertools.cycle(("+0", "+1h")):
            new = path.with_suffix(".new")
            new.write_text(lie)
            new.replace(path)
            if end.wait(0.1):
                return

    path.write_text("+0")
    thread = threading.Thread(target=work, name="strobe")
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(10)


@pytest.mark.slow
def test_a_clock_that_is_20_seconds_ahead(tmp_path: Path, etcd: EtcdServer) -> None:
    """T01, S1, S17: the clock of a node that joins is 20 s ahead: one world, in which all of them train.

    torchrun makes two worlds of this, each with a rank 0 of one: a heartbeat is the wall clock of the node that writes
    it, and every other node compares it with its own, so that with 20 s between them each takes the others for dead.
    Here no time of day is ever written or compared.
    """
    one_world_at_a_time(_story(tmp_path, etcd, _lies(tmp_path, "FAKETIME=+20s")))


@pytest.mark.slow
@pytest.mark.parametrize("skew", ["-1h", "+10y"])
def test_the_time_of_day_is_wrong_on_one_node(tmp_path: Path, etcd: EtcdServer, skew: str) -> None:
    """T01, S17: a node whose clock is hours or years off trains like any other."""
    _story(tmp_path, etcd, _lies(tmp_path, f"FAKETIME={skew}"))


@pytest.mark.slow
def test_the_time_of_day_jumps_all_the_time(tmp_path: Path, etcd: EtcdServer) -> None:
    """T02, S17: the time of day of one node jumps by an hour ten times a second, forth and back."""
    lie = tmp_path / "time-of-day"
    with _strobe(lie):
        prefix = _lies(tmp_path, f"FAKETIME_TIMESTAMP_FILE={lie}")
        _story(tmp_path, etcd, (*prefix, "FAKETIME_NO_CACHE=1"))


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("whose", ["node", "etcd"])
def test_monotonic_clocks_differ(tmp_path: Path, whose: str) -> None:
    """T03, S17: the monotonic clock of a node, or of etcd's machine, is ten days ahead: it was started earlier."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a time namespace needs root and unshare (util-linux)")
    ahead = ("unshare", "--time", "--monotonic", "864000", "--boottime", "864000")
    server = EtcdServer(wheel_binary(), tmp_path / "etcd")
    server.prefix = ahead if whose == "etcd" else ()
    with server as etcd:
        _story(tmp_path, etcd, ahead if whose == "node" else ())
