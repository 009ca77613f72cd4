"""A command on a leash is the process that was started, and ends with whoever started it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elasticrt.ipc.leash import command_of


@pytest.mark.parametrize(("command", "code"), [(["sh", "-c", "exit 9"], 9), (["/no/such"], 2)])
def test_the_leash_becomes_the_command(command: list[str], code: int) -> None:
    """Its exit code is the command's, or says that there is none."""
    assert subprocess.run(command_of(command), capture_output=True, timeout=60, check=False).returncode == code


def test_the_leash_is_for_its_own_parent() -> None:
    """With another parent, or one that has gone, nothing is started."""
    command = [*command_of(["touch", "/no/such"])]
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, timeout=60, check=False).returncode == 143


def test_the_command_ends_with_its_parent() -> None:
    """When the parent is killed the command gets the signal that was asked for."""
    program = (
        "import signal, subprocess, time; from elasticrt.ipc.leash import command_of\n"
        "wait = 'trap \"echo told; exit\" TERM; echo up; while :; do sleep 0.01; done'\n"
        "subprocess.Popen(command_of(['sh', '-c', wait]))\ntime.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.readline() == "told\n"
