"""Words for people. Pure."""

from __future__ import annotations

ANEW = "start again with new nodes"
"""The cause of a generation that has no node of the one before. Whether those were killed or have left, its leader does
not know."""


def counted(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`, `1,240 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
