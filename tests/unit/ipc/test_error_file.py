"""What a worker writes about the exception that has ended it, and what its agent reads of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrt.errors import PreparationError
from elasticrt.ipc.error_file import CALLSTACK_BYTES_MAX, MESSAGE_BYTES_MAX, Described, described, write_error_file
from elasticrt.workers.failures import Remains, failure_of, raised
from tests.unit.workers.states import worker

READ_BYTES = 1 << 18
"""As much of an error file as an agent reads."""


@pytest.mark.parametrize("letter", ["x", "\0", "漢", "\U0001f600", "\ud800"])
def test_an_exception_with_a_long_message_keeps_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """However long a message is, and of whichever characters: type and beginning reach the agent."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file(PreparationError("begins " + letter * 300_000))
    content = path.read_bytes()
    assert len(content) < READ_BYTES
    left = Remains(1, error_file=content.decode())
    failure, found = failure_of(worker("n", 0, 1), left), raised(left)
    assert found.exception == "PreparationError"
    assert found.message.startswith("begins ")
    assert failure.final_code == 6


def _raised(error: Exception) -> Described:
    def fail() -> None:
        raise error

    try:
        fail()
    except Exception as caught:  # noqa: BLE001  Whatever the test gives.
        return described(caught)


def test_a_worker_looks_at_an_excerpt_of_what_it_has_raised() -> None:
    """Of megabytes of text only the beginning and the end are looked at; what is short is there as a whole."""
    long = _raised(RuntimeError("begins " + "a line\n" * 500_000 + "ends"))
    assert (long.name, long.message[:7], long.whole) == ("RuntimeError", "begins ", False)
    assert len(long.message) <= MESSAGE_BYTES_MAX
    assert len(long.callstack) <= CALLSTACK_BYTES_MAX
    assert "RuntimeError: begins" in long.callstack
    assert long.callstack.endswith("a line\nends\n")
    short = _raised(RuntimeError("no more"))
    assert short.whole
    assert short.callstack.endswith("RuntimeError: no more\n")


def test_an_exception_that_cannot_be_printed_is_shown_by_its_type() -> None:
    """An exception whose own `__str__` raises has its type, its place, and what is wrong with it."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no str")

    said = _raised(MuteError())
    assert said.name == "MuteError"
    assert "its __str__ raises ValueError" in said.message
    assert "in _raised" in said.callstack
    assert "MuteError" in said.callstack.splitlines()[-1]
