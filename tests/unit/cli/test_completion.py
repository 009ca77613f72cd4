"""What a shell is given to complete commands with, and the examples in each help."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.cli.main import build_parser

ASK = """
source "$1"
COMP_WORDS=({words}); COMP_CWORD={place}; _shtab_elasticrt
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path: Path):
    """Writes the one of a shell, as docs/commands.md says."""

    def write(shell: str) -> Path:
        path = tmp_path / f"elasticrt.{shell}"
        command = [sys.executable, "-m", "shtab", "--shell", shell, "elasticrt.cli.main.build_parser", "-o", path]
        subprocess.run(command, timeout=30, check=True)
        return path

    return write


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("elasticrt sto", "stop"),
        ("elasticrt run --nn", "--nnodes"),
        ("elasticrt logs --fol", "--follow"),
        ("elasticrt run tra", "train.py"),
        ("elasticrt status --log-dir tra", "train.py"),
    ],
)
def test_bash_completes(script, tmp_path: Path, words: str, found: str) -> None:
    """Commands, the options of each in one spelling, and names of files."""
    (tmp_path / "train.py").touch()
    ask = ASK.format(words=words, place=len(words.split()) - 1)
    done = subprocess.run(
        ["bash", "-c", ask, "bash", script("bash")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert (done.stdout.split(), done.stderr) == ([found], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_takes_its_script(script, shell: str) -> None:
    """It is one that the shell can read, where there is that shell."""
    text = script(shell).read_text()
    assert "stop" in text
    assert "nproc_per_node" not in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", script(shell)], timeout=20, check=True)


def test_every_help_has_an_example() -> None:
    """Of each command that does something."""
    silent = [
        parser.prog
        for parser in _parsers(build_parser())
        if not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
        and "example" not in (parser.epilog or "")
    ]
    assert not silent, os.linesep.join(silent)


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """This one, and those of its commands."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(below for action in nested for each in action.choices.values() for below in _parsers(each))]
