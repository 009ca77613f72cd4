"""`elasticrt launch`: which argument a script of torch.distributed.launch asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticrt.cli import run
from elasticrt.cli.launch import argument_of
from elasticrt.cli.main import main
from elasticrt.settings import Command

UNDERSCORE, DASH = "--local_rank", "--local-rank"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("parser.add_argument('--local_rank', type=int)", UNDERSCORE),
        ('parser.add_argument("--local_rank")', UNDERSCORE),
        ("parser.add_argument('--local-rank', type=int)", DASH),
        ("parser.add_argument('--local-rank', '--local_rank')", DASH),
        ("parser.add_argument('--local_rank_of', type=int)  # not --local_rank", DASH),
        ("import train", DASH),
        ("", DASH),
    ],
)
def test_argument_of(source: str, expected: str) -> None:
    """The spelling is the one that the script names; torch's own when it names both or none."""
    assert argument_of(source) == expected


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], ["--local_rank=${local_rank}", "--local-rank", "x"]),
        (["--use-env"], ["--local-rank", "x"]),
        (["--use_env"], ["--local-rank", "x"]),
    ],
)
def test_what_the_script_gets(
    options: list[str], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One argument is put before the script's own, unless --use-env says that none is wanted."""
    given: list[Any] = []
    monkeypatch.setattr(run, "main", lambda parsed: given.append(parsed.arguments) or 0)
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--local_rank')")
    assert main(["launch", *options, str(script), "--local-rank", "x"]) == 0
    assert given == [arguments]


def test_a_program_gets_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """--no-python needs --use-env, as with torch.distributed.launch."""
    assert main(["launch", "--no-python", "./train"]) == 2
    assert "--use-env" in capsys.readouterr().err


def test_local_rank_in_arguments() -> None:
    """`${local_rank}` stands for the worker's local rank, as under torchrun; everything else stays as it is."""
    command = Command(("train.py", "--rank=${local_rank}", "${oc.env:HOME}", "$local_rank", "$$"))
    assert command.of_worker(3) == ["train.py", "--rank=3", "${oc.env:HOME}", "$local_rank", "$$"]
