"""Clocks that disagree: no clock crosses a host, so nothing may depend on them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.split.test_paused import TTL_S
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


def _story(tmp_path: Path, etcd: EtcdServer, prefix: tuple[str, ...]) -> None:
    """Both start, one joins and a worker fails, over several leases: exactly the generations that these make."""
    with Skewed(tmp_path, "--nnodes", "1:3", "--lease-ttl", f"{TTL_S:g}", "--etcd", str(etcd.address)) as run:
        run.prefix = prefix
        run.start("n0", "--settle", "3")
        run.start("n1", "--settle", "3")
        run.wait("both are in", lambda: run.events("generation") and len(run.events("generation")[-1]["nodes"]) == 2)
        number = run.number()
        run.wait_for_steps(5, generation=number)
        run.wait_for_silence(2 * TTL_S)
        assert run.number() == number, "nobody was suspected"
        run.start("n2", "--settle", "3")
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


@pytest.mark.slow
@pytest.mark.parametrize("skew", ["+20s", "-1h", "+10y"])
def test_the_time_of_day_is_wrong_on_one_node(tmp_path: Path, etcd: EtcdServer, skew: str) -> None:
    """T01, S17: torchrun's second case: a node whose clock is 20 s (or hours, years) off trains like any other."""
    # libfaketime 0.9.10 fails the call that time.sleep makes, and stops other waits if it lies about both clocks.
    site = tmp_path / "site"
    site.mkdir()
    patch = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
    (site / "sitecustomize.py").write_text(patch)
    lies = (f"LD_PRELOAD={_faketime()}", f"FAKETIME={skew}", "FAKETIME_DONT_FAKE_MONOTONIC=1", f"PYTHONPATH={site}")
    _story(tmp_path, etcd, ("env", *lies))


@pytest.mark.slow
@pytest.mark.root
def test_monotonic_clocks_differ(tmp_path: Path, etcd: EtcdServer) -> None:
    """T03: a node whose monotonic clock is ten days ahead, as on a machine that was started earlier."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a time namespace needs root and unshare (util-linux)")
    _story(tmp_path, etcd, ("unshare", "--time", "--monotonic", "864000", "--boottime", "864000"))
