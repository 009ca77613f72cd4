"""The few lines that the training side says to the user, on stderr. A library configures no logging.

Warnings go through `logging` (visible without any configuration); lines that merely inform are written here.
"""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One informing line on stderr, marked as ours."""
    print(f"elasticrt: {line}", file=sys.stderr, flush=True)  # noqa: T201  The one place where the training side prints.
