"""The gate before a node's workers: what opens it, what closes it, and that looking ends."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from elasticrt.agent import gpu_gate
from elasticrt.agent.gpu_gate import GpuGate, found_by, found_by_smi
from elasticrt.workers.failures import failure_of
from elasticrt.workers.gpu_health import COOL_DOWN_S, Look
from elasticrt.workers.worker_io import WorkerEnded

ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


class Clock:
    """Stands still."""

    def monotonic(self) -> float:
        """Whatever was set."""
        return 0.0


def _gate(command: str = "", *, gpus: bool = False) -> tuple[GpuGate, queue.SimpleQueue, list[str]]:
    events: queue.SimpleQueue = queue.SimpleQueue()
    said: list[str] = []
    return GpuGate(gpus=gpus, command=command, put=events.put, say=said.append, clock=Clock()), events, said


def _ended(text: str) -> WorkerEnded:
    failure = failure_of(rank=0, local_rank=0, node="a", generation=1, code=1, last_lines=text.splitlines())
    return WorkerEnded(1, 0, 0, 7, 1, 0, failure)


def test_without_gpus_and_a_command_the_gate_is_open() -> None:
    """Nothing is looked at, and no failure closes it."""
    gate, _, said = _gate()
    gate.pass_on(1.0)
    gate.ended(_ended(ECC), 2.0)
    assert gate.open
    assert gate.wake_at() == []
    assert not said


def test_a_failure_closes_the_gate_until_the_node_is_found_healthy() -> None:
    """The command has to end with 0: first of all, and again after a GPU has failed and cooled down."""
    gate, events, said = _gate("true")
    gate.pass_on(1.0)
    assert not gate.open
    gate.looked(events.get(timeout=30), 2.0)
    assert gate.open
    gate.ended(_ended("ValueError: bad batch"), 3.0)
    assert gate.open
    gate.ended(_ended(ECC), 10.0)
    assert not gate.open
    assert gate.wake_at() == [10.0 + COOL_DOWN_S]
    gate.pass_on(10.0 + COOL_DOWN_S)
    gate.looked(events.get(timeout=30), 11.0 + COOL_DOWN_S)
    assert gate.open
    assert "uncorrectable ECC error" in said[0]
    assert said[-1] == "the GPUs are found healthy: workers start here again"


def test_a_node_that_is_not_healthy_is_looked_at_again() -> None:
    """A command that fails keeps the gate closed, says why once, and is run again after a while."""
    gate, events, said = _gate("echo row remap pending; exit 3")
    gate.pass_on(1.0)
    look = events.get(timeout=30)
    gate.looked(look, 2.0)
    gate.pass_on(3.0)
    assert not gate.open
    assert gate.wake_at() == [1.0 + COOL_DOWN_S]
    assert len(said) == 1
    assert "exit code 3: row remap pending" in said[0]


@pytest.mark.parametrize(("command", "found"), [("", ""), ("true", ""), ("echo bad; false", "exit code 1: bad")])
def test_the_command_says_what_it_finds(command: str, found: str) -> None:
    """Its last line, where it fails."""
    assert found_by(command).endswith(found)
    assert bool(found_by(command)) is bool(found)


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time it counts as a failure."""
    monkeypatch.setattr(gpu_gate, "COMMAND_S_MAX", 0.2)
    assert "has not ended" in found_by("exec sleep 60")


def _smi(directory: Path, script: str) -> dict[str, str]:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('echo "0, NVIDIA H200, [N/A], No, No"', ""),
        ('echo "0, NVIDIA H200, [N/A], Yes, No"', "GPU 0 (NVIDIA H200): rows"),
        ('case "$*" in *remapped*) echo "is not a valid field to query."; exit 2;; *) echo "0, Tesla K80";; esac', ""),
        ('echo "GPU is lost.  Reboot the system to recover this GPU"; exit 15', "is lost"),
        ('case "$*" in *--id=1*) echo "1, NVIDIA H200, [N/A], No, No";; *) exit 9;; esac', ""),
    ],
)
def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str) -> None:
    """Of the GPUs that workers see; an older one is asked for less; what it says decides."""
    monkeypatch.setenv("PATH", _smi(tmp_path, script)["PATH"])
    problem = found_by_smi({"CUDA_VISIBLE_DEVICES": "1"})
    assert found in problem
    assert bool(problem) is bool(found)


def test_without_nvidia_smi_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then workers start: many containers have GPUs without it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found_by_smi({}) == ""


def test_a_look_that_cannot_be_made_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node does not wait for ever for a thread that has failed."""
    gate, events, _ = _gate(gpus=True)
    monkeypatch.setattr(gpu_gate, "found_by_smi", lambda _: 1 / 0)
    gate.pass_on(1.0)
    look = events.get(timeout=30).look
    assert isinstance(look, Look)
    assert "division by zero" in look.problem
