"""What a shell is given to complete commands with, and the examples in each help."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.cli.completion import SHELLS, _parsers
from elasticrt.cli.main import build_parser, main

ASK = """
source "$1"
COMP_WORDS=({words}); COMP_CWORD={place}; _shtab_elasticrt
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Writes the one of a shell."""

    def write(shell: str) -> Path:
        assert main(["completion", shell]) == 0
        path = tmp_path / f"elasticrt.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("elasticrt sto", "stop"),
        ("elasticrt run --nn", "--nnodes"),
        ("elasticrt logs --fol", "--follow"),
        ("elasticrt run --join n", "now"),
        ("elasticrt run --log-format j", "json"),
        ("elasticrt simulate --start-method s", "spawn"),
    ],
)
def test_bash_completes(script, words: str, found: str) -> None:
    """Commands, and the options of each, in one spelling."""
    ask = ASK.format(words=words, place=len(words.split()) - 1)
    done = subprocess.run(
        ["bash", "-c", ask, "bash", script("bash")], capture_output=True, text=True, timeout=20, check=True
    )
    assert (done.stdout.split(), done.stderr) == ([found], "")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_takes_its_script(script, shell: str) -> None:
    """It is one that the shell can read, where there is that shell."""
    text = script(shell).read_text()
    assert "stop" in text
    assert "nproc_per_node" not in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", script(shell)], timeout=20, check=True)


def test_it_costs_other_commands_nothing() -> None:
    """The library is imported by this command alone, and that of the last line not at all."""
    code = "import sys; from elasticrt.cli.main import main; main(['runs', '--log-dir', '/nowhere']); "
    code += "print(sorted({'shtab', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_help_has_an_example() -> None:
    """Of each command that does something."""
    silent = [
        parser.prog
        for parser in _parsers(build_parser())
        if not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
        and "example" not in (parser.epilog or "")
    ]
    assert not silent, os.linesep.join(silent)
