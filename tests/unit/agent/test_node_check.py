"""Whether a node may train: asked of a real command, on a clock that the test turns."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from elasticrt.agent.node_check import CHECK_S_MAX, COOL_DOWN_S, NodeCheck, refusal


class Turned:
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """The time that it was turned to."""
        return self.now

    def monotonic_ns(self) -> int:
        """The same in nanoseconds."""
        return int(self.now * 1e9)

    def sleep(self, seconds: float, /) -> None:
        """Turn it."""
        self.now += seconds


def answered(check: NodeCheck, now: float) -> None:
    """Ask, and wait for the command's real end."""
    check.look(now)
    deadline = time.monotonic() + 30
    while check._asking is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        check.look(now)


def test_a_node_is_let_in_when_its_check_passes(tmp_path: Path) -> None:
    """Before the first worker starts, and again after longer and longer times, until the command ends with 0."""
    fit, said, clock = tmp_path / "fit", [], Turned()
    code = f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(fit)!r}).exists() else 'a fan stands still')"
    check = NodeCheck((sys.executable, "-c", code), said.append, clock)
    assert not check.is_fit
    for wait_s in (COOL_DOWN_S, 2 * COOL_DOWN_S):
        answered(check, clock.now)
        assert not check.is_fit
        why = "exit code 1: a fan stands still"
        assert said.pop() == f"this node is not fit to train: {why}; checked again in {wait_s:g} s"
        assert check.alarm() == clock.now + wait_s
        check.look(clock.now + wait_s - 0.1)
        assert check._asking is None, "too early"
        clock.sleep(wait_s)
    fit.touch()
    answered(check, clock.now)
    assert check.is_fit
    assert check.alarm() is None


def test_without_a_command_a_node_is_fit_until_a_gpu_fails() -> None:
    """Then nvidia-smi is asked, after a time to recover; where there is none, that is said."""
    said, clock = [], Turned()
    check = NodeCheck((), said.append, clock)
    assert check.is_fit
    assert check.alarm() is None
    check.doubt("rank 1 on n: the GPU has fallen off the bus")
    check.doubt("rank 2 on n: the same")
    assert not check.is_fit
    assert check.alarm() == clock.now + COOL_DOWN_S
    assert len(said) == 1


def test_without_nvidia_smi_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many containers have GPUs without it: workers start again after the time to recover, and that is said."""
    monkeypatch.setenv("PATH", str(tmp_path))
    said, clock = [], Turned()
    check = NodeCheck((), said.append, clock)
    check.doubt("rank 1 on n: the GPU has fallen off the bus")
    check.look(clock.now + COOL_DOWN_S)
    assert check.is_fit
    assert "cannot be checked without nvidia-smi" in said[-1]


def test_a_check_that_hangs_is_a_refusal() -> None:
    """It is ended, and nothing of it is left."""
    said, clock = [], Turned()
    check = NodeCheck(("sleep", "1000"), said.append, clock)
    check.look(clock.now)
    check.look(clock.now + CHECK_S_MAX)
    assert check._asking is not None
    check.look(clock.now + CHECK_S_MAX + 1)
    assert check._asking is None
    assert "no answer in 120 s" in said[0]


@pytest.mark.parametrize(
    ("code", "output", "gpus", "found"),
    [
        (0, "0, 0, No, No\n1, 0, No, No\n", 2, ""),
        (0, "0, [N/A], [N/A], [N/A]\n", 1, ""),
        (0, "0, 0, No, No\n", 2, "1 of 2 GPUs answer"),
        (0, "0, 0, No, No\n1, 4, No, No\n", 2, "errors in the memory of GPU 1, which has to be reset"),
        (0, "0, 0, Yes, No\n", 1, "errors in the memory of GPU 0, which has to be reset"),
        (0, "0, 0, No, Yes\n", 1, "errors in the memory of GPU 0, which has to be reset"),
        (15, "Unable to determine the device handle: GPU is lost\n", 1, "exit code 15: Unable to determine the device"),
        (0, "tested 4 disks, 2, Yes\n", 0, ""),
        (3, "", 0, "exit code 3"),
        (0, "0, 0, No, No\nUnable to determine the device handle for GPU1: Unknown Error\n", 2, "Unable to determine"),
    ],
)
def test_refusals(code: int, output: str, gpus: int, found: str) -> None:
    """A GPU that does not answer, errors that a reset would clear; of the user's own command its exit code alone."""
    said = refusal(code, output, gpus)
    assert said.startswith(found)
    assert bool(said) is bool(found)
