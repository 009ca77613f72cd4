"""What a worker writes about the exception that has ended it, and what its agent reads of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrt.ipc.error_file import write_error_file
from elasticrt.workers.failures import failure_of, raised

READ_BYTES = 1 << 18
"""As much of an error file as an agent reads."""


@pytest.mark.parametrize("letter", ["x", "\0", "漢", "\U0001f600", "\ud800"])
def test_an_exception_with_a_long_message_keeps_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """However long a message is, and of whichever characters: type, beginning and final exit code reach the agent."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file(ValueError("begins " + letter * 300_000), 6)
    content = path.read_bytes()
    assert len(content) < READ_BYTES
    failure = failure_of(
        rank=0, local_rank=0, node="n", generation=1, code=1, error_file=content.decode()
    )  # fmt: skip
    found = raised(1, content.decode())
    assert found.exception == "ValueError"
    assert found.message.startswith("begins ")
    assert failure.final_code == 6
