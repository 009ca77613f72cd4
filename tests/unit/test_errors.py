"""The one form of every message: what stands in it, and what is cut."""

from __future__ import annotations

import pickle

import pytest

from elasticrt.errors import GOT_MAX, ConfigError, explain

FULL = (28, "No space left on device")


@pytest.mark.parametrize(
    ("got", "shown"),
    [
        pytest.param("x" * 300, "x" * (GOT_MAX - 3) + "...", id="a long value"),
        pytest.param("a\nb", "'a\\nb'", id="a value of two lines"),
        pytest.param(OSError(*FULL, "/data"), "No space left on device", id="the path is where"),
        pytest.param(OSError(*FULL, "/data/.draft"), "/data/.draft: No space left on device", id="another path"),
        pytest.param(OSError(*FULL), "No space left on device", id="no path"),
        pytest.param(OSError("timed out"), "timed out", id="without a number"),
        pytest.param(ValueError("y" * 90), "y" * 90, id="a long error"),
        pytest.param(ValueError("y" * 900), "y" * (GOT_MAX - 3) + "...", id="a very long error"),
        pytest.param(ValueError("a\nb"), "'a\\nb'", id="an error of two lines"),
    ],
)
def test_what_follows_what_was_found(got: object, shown: str) -> None:
    """However long it is, what was expected and the remedy follow it."""
    assert explain("full", "/data", got=got, expected="room", remedy="Make room") == (
        f"full (/data): got {shown}; expected room. Make room"
    )


def test_an_error_makes_its_message_from_its_arguments() -> None:
    """It is that of `explain`, or the one that is given whole; a copy in another process has the same."""
    error = ConfigError("full", "/data", got="0 bytes", expected="room", remedy="Make room")
    assert str(error) == explain("full", "/data", got="0 bytes", expected="room", remedy="Make room")
    assert str(ConfigError("full (/data)")) == "full (/data)"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (ConfigError, str(error))
