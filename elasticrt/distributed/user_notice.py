"""Lines for the user from the training process, on stderr.

Warnings go through `logging`, which shows them without any configuration. Lines that only inform are printed here,
because a library must not configure logging.
"""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print one line to stderr, marked as ours."""
    print(f"elasticrt: {line}", file=sys.stderr, flush=True)  # noqa: T201  The one place where the training side prints.
